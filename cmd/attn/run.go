package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
)

// runCmd is attn run: attention over .npy files.
type runCmd struct {
	Q string `name:"q" required:"" placeholder:"Q.npy" help:"Queries: [S,D], [B,S,D] or [B,H,S,D] of f2, f4 or f8 (rounded to f4)."`
	K string `name:"k" required:"" placeholder:"K.npy" help:"Keys, of q's rank; their heads divide q's."`
	V string `name:"v" required:"" placeholder:"V.npy" help:"Values, of q's rank, with k's heads and length and any head size."`

	Out     string `name:"out" placeholder:"O.npy" help:"Output, in q's rank and layout: f4, or f2 for f16. bf16 is written as f4, as numpy has no such type. Needed unless --plan."`
	LSE     string `name:"lse" placeholder:"L.npy" help:"Also write the rows' log-sum-exp, [B,H,Sq] of f4."`
	Weights string `name:"weights" placeholder:"W.npy" help:"Also write the softmax weights, [B,H,Sq,Sk] of f4; takes that much memory."`

	callFlags `embed:""`

	Check bool `name:"check" help:"Recompute sampled rows in float64, print the largest error and its bound, and fail when it is over."`
	Plan  bool `name:"plan" help:"Print how the call would run, and stop: only the files' headers are read."`
}

// Run computes the call, or plans it.
func (c *runCmd) Run(ctx context.Context, out *streams) error {
	if c.Out == "" && !c.Plan {
		return errors.New("--out is missing: where to write the output")
	}
	in, err := c.inputs([]namedPath{{"q", c.Q}, {"k", c.K}, {"v", c.V}})
	if err != nil {
		return err
	}
	var files outputs
	defer files.discard()
	if !c.Plan {
		for _, f := range []struct{ flag, path string }{{"out", c.Out}, {"lse", c.LSE}, {"weights", c.Weights}} {
			if f.path == "" {
				continue
			}
			if err := files.add(f.flag, f.path); err != nil {
				return err
			}
		}
	}
	be, err := backend.Open(c.Backend)
	if err != nil {
		return err
	}
	defer be.Close()
	// Planned with the headers alone, a call that cannot run fails before its
	// data is read.
	plan, err := in.plan(be, c.runOptions())
	if err != nil {
		return err
	}
	if c.Plan {
		return printPlan(out.out, be, in, plan)
	}
	if err := in.fitMemory(); err != nil {
		return err
	}
	calc := calculation{be: be, in: in, note: out.err}
	defer calc.release()
	if err := calc.load(ctx, c.runOptions()); err != nil {
		return err
	}
	if err := calc.attend(ctx, c.LSE != "", c.Weights != ""); err != nil {
		return err
	}
	if c.Check {
		if err := calc.check(ctx, out.out); err != nil {
			return err
		}
	}
	if err := calc.write(ctx, &files); err != nil {
		return err
	}
	return files.commit(ctx)
}

// runOptions are those of the call with what is to come out.
func (c *runCmd) runOptions() kernels.Options {
	opt := c.options()
	opt.LSE, opt.Weights = c.LSE != "", c.Weights != ""
	return opt
}

// setMask puts a mask where its type belongs.
func setMask(opt *kernels.Options, m backend.Tensor) {
	if m.DType() == backend.Bool {
		opt.Mask = m
	} else {
		opt.Bias = m
	}
}

// calculation is one call with its tensors on the device.
type calculation struct {
	be   backend.Backend
	in   *runInputs
	note io.Writer // where roundings are said

	q, k, v backend.Tensor
	opt     kernels.Options
	result  kernels.Result
	stored  backend.Tensor // result.O in the file's order of axes
	held    []backend.Tensor
	unmaps  []func() // of files that tensors may lie in
}

func (c *calculation) release() {
	for _, t := range c.held {
		t.Release()
	}
	for _, unmap := range c.unmaps {
		unmap()
	}
}

// load reads the files and uploads what they hold.
func (c *calculation) load(ctx context.Context, opt kernels.Options) error {
	c.opt = opt
	to := []*backend.Tensor{&c.q, &c.k, &c.v}
	for i, f := range c.in.qkv {
		up, err := c.upload(ctx, f, c.in.dtype, f.stored())
		if err == nil {
			*to[i], err = c.in.bhsd(up)
		}
		if err != nil {
			return err
		}
	}
	if c.in.mask != nil {
		m, err := c.upload(ctx, c.in.mask, c.in.mask.dtype(), c.in.maskShape)
		if err != nil {
			return err
		}
		setMask(&c.opt, m)
	}
	return nil
}

// upload reads one file onto the device, as dtype.
func (c *calculation) upload(ctx context.Context, f *npyFile, dtype backend.DType, shape backend.Shape) (backend.Tensor, error) {
	var t backend.Tensor
	var err error
	if f.mappable(dtype) {
		// Where that is not to be had the file is read.
		if host, unmap, err := f.mapped(dtype, shape); err == nil {
			c.unmaps = append(c.unmaps, unmap)
			if t, err = c.be.Upload(ctx, host); err != nil {
				return t, err
			}
			c.held = append(c.held, t)
			return t, nil
		}
	}
	switch {
	case dtype == backend.Bool:
		var data []bool
		if data, err = f.bools(ctx); err == nil {
			t, err = backend.HostBool(data, shape)
		}
		if err == nil {
			t, err = c.be.Upload(ctx, t)
		}
	case dtype == backend.F16 && f.Size == 2:
		var data []uint16
		if data, err = f.bits(ctx); err == nil {
			t, err = backend.HostBits(data, dtype, shape)
		}
		if err == nil {
			t, err = c.be.Upload(ctx, t)
		}
	default:
		var data []float32
		var overflows int
		if data, overflows, err = f.float32s(ctx); err == nil {
			t, err = kernels.FromFloat32(ctx, c.be, dtype, data, shape)
		}
		if err == nil && f.Size == 8 {
			beyond := ""
			if overflows > 0 {
				beyond = fmt.Sprintf("; %d numbers beyond its range became infinite", overflows)
			}
			fmt.Fprintf(c.note, "attn: note: --%s %s is f8, rounded to f4%s\n", f.name, f.path, beyond)
		}
	}
	if err != nil {
		return t, err
	}
	c.held = append(c.held, t)
	return t, nil
}

// attend computes the call into outputs that lie as the files will.
func (c *calculation) attend(ctx context.Context, lse, weights bool) error {
	q, k, v := c.q.Shape(), c.k.Shape(), c.v.Shape()
	alloc := func(t *backend.Tensor, dtype backend.DType, shape backend.Shape) error {
		var err error
		if *t, err = c.be.Alloc(ctx, dtype, shape); err == nil {
			c.held = append(c.held, *t)
		}
		return err
	}
	rows := backend.Shape{q[backend.Batch], q[backend.Heads], q[backend.Seq], v[backend.Dim]}
	stored := rows
	if c.in.swapped {
		stored[backend.Heads], stored[backend.Seq] = rows[backend.Seq], rows[backend.Heads]
	}
	if err := alloc(&c.stored, c.in.dtype, stored); err != nil {
		return fmt.Errorf("output: %w", err)
	}
	var err error
	if c.result.O, err = c.in.bhsd(c.stored); err != nil {
		return err
	}
	if lse {
		rows[backend.Dim] = 1
		if err := alloc(&c.result.LSE, backend.F32, rows); err != nil {
			return fmt.Errorf("lse: %w", err)
		}
	}
	if weights {
		rows[backend.Dim] = k[backend.Seq]
		if err := alloc(&c.result.Weights, backend.F32, rows); err != nil {
			return fmt.Errorf("weights: %w", err)
		}
	}
	if progress := newNote(c.note); progress.w != io.Discard {
		defer progress.clear()
		ctx = backend.WithTrace(ctx, &backend.Trace{Progress: func(done, total float64) {
			progress.show(fmt.Sprintf("%s: %3.0f%% of %s", c.be.Info().Name, 100*done/total, si(total, "FLOP")))
		}})
	}
	return kernels.AttentionInto(ctx, c.be, c.result, c.q, c.k, c.v, c.opt)
}

// check recomputes sampled rows in float64.
func (c *calculation) check(ctx context.Context, w io.Writer) error {
	r, err := kernels.Check(ctx, c.be, c.q, c.k, c.v, c.result, c.opt, kernels.CheckOptions{})
	if err != nil {
		return err
	}
	if !r.OK() {
		return fmt.Errorf("check failed, nothing was written: %s, an error of %.3g where the bound is %.3g (%d rows against float64)",
			r.Worst, r.MaxError, r.Bound, r.Rows)
	}
	_, err = fmt.Fprintf(w, "check: %d rows against float64: max error %.3g where the bound is %.3g, the nearest to a bound (%s)\n", r.Rows, r.MaxError, r.Bound, r.Worst)
	return err
}

// write fills the output files.
func (c *calculation) write(ctx context.Context, files *outputs) error {
	if err := c.writeTensor(ctx, files, "out", c.stored, c.in.outShape(c.stored.Shape())); err != nil {
		return err
	}
	if t := c.result.LSE; !t.IsZero() {
		s := t.Shape()
		if err := c.writeTensor(ctx, files, "lse", t, s[:backend.Dim]); err != nil {
			return err
		}
	}
	if t := c.result.Weights; !t.IsZero() {
		s := t.Shape()
		return c.writeTensor(ctx, files, "weights", t, s[:])
	}
	return nil
}

func (c *calculation) writeTensor(ctx context.Context, files *outputs, flag string, t backend.Tensor, shape []int) error {
	if !t.OnHost() {
		host, err := backend.AllocHost(t.DType(), t.Shape())
		if err != nil {
			return err
		}
		if err := c.be.Download(ctx, host, t); err != nil {
			return err
		}
		t = host
	}
	return files.write(flag, func(w io.Writer) error { return writeNPY(ctx, w, t, shape) })
}
