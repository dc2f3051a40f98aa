package main

import (
	"context"
	"fmt"
	"io"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/nn"
)

// calculation is one call with its tensors on the device.
type calculation struct {
	be   backend.Backend
	in   *runInputs
	note io.Writer // where roundings are said

	q, k, v backend.Tensor
	present [3]backend.Tensor // q, k and v in the files' order of axes
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
		var err error
		if past := c.in.past[i]; past != nil {
			c.present[i], err = c.join(ctx, past, f, c.in.whole(i))
		} else {
			c.present[i], err = c.upload(ctx, f, c.in.dtype, c.in.stored(f))
		}
		if err == nil {
			*to[i], err = c.in.bhsd(c.present[i])
		}
		if err != nil {
			return err
		}
	}
	for _, f := range c.in.pairs {
		m, err := c.upload(ctx, f.npyFile, f.dtype(), f.shape)
		if err != nil {
			return err
		}
		f.put(&c.opt, m)
	}
	return nil
}

// join reads what is from before and what follows it into one tensor of the shape
// whole, in the files' order of axes.
func (c *calculation) join(ctx context.Context, past, now *npyFile, whole backend.Shape) (backend.Tensor, error) {
	data := make([]float32, 0, whole.Elements())
	var parts [2][]float32
	var rows [2]int // elements that lie side by side
	for i, f := range []*npyFile{past, now} {
		x, overflows, err := f.float32s(ctx)
		if err != nil {
			return backend.Tensor{}, err
		}
		c.noteRounding(f, overflows)
		parts[i], rows[i] = x, 1
		for _, l := range f.Shape[c.in.seqAxis():] {
			rows[i] *= l
		}
	}
	for len(parts[0]) > 0 {
		for i, n := range rows {
			data = append(data, parts[i][:n]...)
			parts[i] = parts[i][n:]
		}
	}
	t, err := kernels.FromFloat32(ctx, c.be, c.in.dtype, data, whole)
	if err == nil {
		c.held = append(c.held, t)
	}
	return t, err
}

// noteRounding says that f8 was rounded.
func (c *calculation) noteRounding(f *npyFile, overflows int) {
	if f.Size != 8 {
		return
	}
	beyond := ""
	if overflows > 0 {
		beyond = fmt.Sprintf("; %d numbers beyond its range became infinite", overflows)
	}
	fmt.Fprintf(c.note, "attn: note: --%s %s is f8, rounded to f4%s\n", f.name, f.path, beyond)
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
		if err == nil {
			c.noteRounding(f, overflows)
		}
	}
	if err != nil {
		return t, err
	}
	c.held = append(c.held, t)
	return t, nil
}

// turn turns queries and keys by their positions, which count on from the keys that
// are from before, and in each packed sequence from 0. Those keys are turned already.
func (c *calculation) turn(ctx context.Context, r nn.RoPE) error {
	past := c.in.pastKeys()
	for i, t := range []*backend.Tensor{&c.q, &c.k} {
		seq := t.Shape()[backend.Seq]
		first := 0 // row that turns
		if i == 1 {
			first = past
		}
		positions := nn.Positions(past, seq-first)
		if c.in.packed {
			cu := [][]int{c.in.cuQ, c.in.cuK}[i]
			for n := range len(cu) - 1 {
				for row := cu[n]; row < cu[n+1]; row++ {
					positions[0][row] = row - cu[n]
				}
			}
		}
		angles, err := r.Angles(ctx, kernels.NewDevice(c.be), t.Shape()[backend.Dim], positions)
		if err != nil {
			return err
		}
		defer angles.Release()
		from := *t
		var to backend.Tensor
		if first > 0 { // they are read into one tensor, which is ours
			if to, err = t.Slice(backend.Seq, first, seq); err != nil {
				return err
			}
			from = to
		} else {
			// The file's own memory may be what is read.
			stored, err := c.be.Alloc(ctx, t.DType(), c.present[i].Shape())
			if err != nil {
				return err
			}
			c.held = append(c.held, stored)
			c.present[i] = stored
			if to, err = c.in.bhsd(stored); err != nil {
				return err
			}
			*t = to
		}
		if err := kernels.NewDevice(c.be).Rotate(ctx, to, from, angles); err != nil {
			return err
		}
	}
	return nil
}

// attend computes the call into outputs that lie as the files will.
func (c *calculation) attend(ctx context.Context, lse, weights bool) error {
	if progress := newNote(c.note); progress.w != io.Discard {
		defer progress.clear()
		ctx = backend.WithTrace(ctx, &backend.Trace{Progress: func(done, total float64) {
			progress.show(fmt.Sprintf("%s: %3.0f%% of %s", c.be.Info().Name, 100*done/total, si(total, "FLOP")))
		}})
	}
	if c.in.packed {
		return c.attendPacked(ctx)
	}
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
	return kernels.AttentionInto(ctx, c.be, c.result, c.q, c.k, c.v, c.opt)
}

// attendPacked computes packed sequences.
func (c *calculation) attendPacked(ctx context.Context) (err error) {
	c.result, err = kernels.AttentionVarlen(ctx, c.be, c.q, c.k, c.v, c.in.cuQ, c.in.cuK, c.opt)
	if err != nil {
		return err
	}
	c.held = append(c.held, c.result.O, c.result.LSE)
	c.stored, err = kernels.Packed(c.result.O)
	return err
}

// check recomputes sampled rows in float64.
func (c *calculation) check(ctx context.Context, w io.Writer) error {
	var r kernels.CheckReport
	var err error
	if c.in.packed {
		r, err = kernels.CheckVarlen(ctx, c.be, c.q, c.k, c.v, c.in.cuQ, c.in.cuK, c.result, c.opt, kernels.CheckOptions{})
	} else {
		r, err = kernels.Check(ctx, c.be, c.q, c.k, c.v, c.result, c.opt, kernels.CheckOptions{})
	}
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
	full := func(s backend.Shape) []int { return s[:] }
	for _, f := range []struct {
		flag  string
		t     backend.Tensor
		shape func(backend.Shape) []int
	}{
		{"out", c.stored, c.in.outShape},
		{"lse", c.result.LSE, c.in.lseShape},
		{"weights", c.result.Weights, full},
		{"present-k", c.present[1], c.in.outShape},
		{"present-v", c.present[2], c.in.outShape},
	} {
		if f.t.IsZero() || !files.has(f.flag) {
			continue
		}
		if err := c.writeTensor(ctx, files, f.flag, f.t, f.shape(f.t.Shape())); err != nil {
			return err
		}
	}
	return nil
}

func (c *calculation) writeTensor(ctx context.Context, files *outputs, flag string, t backend.Tensor, shape []int) error {
	if !t.OnHost() || !t.IsContiguous() {
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
