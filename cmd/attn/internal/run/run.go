// Package run is the command attn run.
package run

import (
	"context"
	"errors"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/seed90331342/attn/cmd/attn/internal/array"
	"github.com/seed90331342/attn/cmd/attn/internal/call"
	"github.com/seed90331342/attn/cmd/internal/cli"
	"github.com/seed90331342/attn/cmd/internal/flags"
	"github.com/seed90331342/attn/cmd/internal/output"
	"github.com/seed90331342/attn/kernels"
)

// Command is attn run: attention over .npy and .safetensors files.
type Command struct {
	cli.Device      `embed:""`
	call.Problem    `embed:""`
	flags.Overwrite `embed:""`

	Out         string `name:"out" placeholder:"O.npy" group:"Outputs" help:"Output, in q's rank and layout: f4, or f2 for f16. bf16 is written as f4, as numpy has no such type. Required without --plan."`
	LSE         string `name:"lse" placeholder:"L.npy" group:"Outputs" help:"Also write the log-sum-exp of the rows, [B,H,Sq] of f4; [H,total] of packed sequences."`
	Weights     string `name:"weights" placeholder:"W.npy" group:"Outputs" help:"Also write the softmax weights, [B,H,Sq,Sk] of f4; takes that much memory."`
	Scores      string `name:"scores" placeholder:"S.npy" group:"Outputs" help:"Also write the scores, [B,H,Sq,Sk] of f4; takes that much memory."`
	ScoresAt    string `name:"scores-at" enum:"scaled,capped,biased" default:"biased" group:"Outputs" help:"Stage of --scores: scaled, after the softcap (capped), or after biases and masks, with -Inf for hidden keys (biased)."`
	TopK        int    `name:"topk" placeholder:"N" group:"Outputs" help:"Find the N largest weights of each query, in memory O(Sq·N)."`
	TopKKeys    string `name:"topk-keys" placeholder:"I.npy" group:"Outputs" help:"Write the keys of these weights, [B,H,Sq,N] of i4, largest first; -1 where there are fewer."`
	TopKWeights string `name:"topk-weights" placeholder:"W.npy" group:"Outputs" help:"Write these weights, [B,H,Sq,N] of f4."`
	KeepMask    string `name:"keep-mask" placeholder:"M.npy" group:"Outputs" help:"Also write the weights that --dropout keeps, [B,H,Sq,Sk] of bool."`

	gradients `embed:""`

	Check bool `name:"check" help:"Recompute sampled rows, of dq, dk and dv too, in float64, print the largest error and its bound, and fail above it."`
	Plan  bool `name:"plan" help:"Print how the call would run, and stop. Reads only the headers of the files."`
}

// Run computes, plans or prints the call.
func (c *Command) Run(ctx context.Context, out *cli.Streams) error {
	if c.Out == "" && c.DO == "" && !c.Plan {
		return flags.Usagef("missing flags: --out")
	}
	if err := c.Problem.Check(); err != nil {
		return err
	}
	in, err := c.Problem.Open()
	if err != nil {
		return err
	}
	if err := c.checkPairs(); err != nil {
		return err
	}
	if err := c.checkGradients(in); err != nil {
		return err
	}
	var set output.Set
	defer set.Discard()
	if !c.Plan {
		outputs := []flags.File{
			{Flag: "--out", Path: c.Out}, {Flag: "--lse", Path: c.LSE}, {Flag: "--weights", Path: c.Weights},
			{Flag: "--scores", Path: c.Scores}, {Flag: "--topk-keys", Path: c.TopKKeys}, {Flag: "--topk-weights", Path: c.TopKWeights},
			{Flag: "--keep-mask", Path: c.KeepMask}, {Flag: "--dq", Path: c.DQ}, {Flag: "--dk", Path: c.DK}, {Flag: "--dv", Path: c.DV},
			{Flag: "--dbias", Path: c.DBias}, {Flag: "--dsinks", Path: c.DSinks},
		}
		if err := c.Overwrite.Check(append(in.Files(), c.otherInputs()...), outputs); err != nil {
			return err
		}
		for _, f := range outputs {
			if err := set.Add(f.Flag, f.Path); err != nil {
				return err
			}
		}
	}
	dev, err := c.Device.Open()
	if err != nil {
		return err
	}
	defer dev.Close()
	// The plan fails for a call that cannot run, before its data is read.
	prepared, err := in.Prepare(dev, c.LSE != "", c.Weights != "")
	if err != nil {
		return err
	}
	plan, err := prepared.Plan(ctx)
	if err != nil {
		return err
	}
	if c.DO != "" {
		if _, err := prepared.PlanBackward(ctx, prepared.Gradients().Operands()); err != nil {
			return err
		}
	}
	if c.Plan {
		return printPlan(out.Out, dev, in, plan)
	}
	if err := errors.Join(in.CheckMemory(), c.checkMemory(in.Dims)); err != nil {
		return err
	}
	status := cli.NewStatus(out.Err)
	var notes []string
	stop := status.Watch(func() string { return "reading the inputs" })
	operands, err := in.Load(ctx, dev, func(format string, args ...any) { notes = append(notes, fmt.Sprintf(format, args...)) })
	stop()
	for _, n := range notes {
		out.Note("%s", n)
	}
	if err != nil {
		return err
	}
	defer operands.Release()
	r := &computation{Command: c, Operands: operands, dev: dev, files: &set, traced: status.Active()}
	defer func() { r.result.Release() }()
	for _, step := range []struct {
		what string
		run  func(context.Context) error
	}{
		{"rotary embedding", r.rotate}, {"attention of " + cli.SI(float64(plan.FLOPs), "FLOP"), r.attend}, {"check against float64", r.check},
		{"output", r.writeRows}, {"scores, weights and masks", r.writePairs}, {"gradients", r.differentiate}, {"writing", set.Commit},
	} {
		stop := status.Watch(func() string { return dev.Info().Name + ": " + step.what + r.percent() })
		err := step.run(ctx)
		stop()
		if _, e := io.WriteString(out.Out, r.printed); err == nil {
			err = e
		}
		if r.printed = ""; err != nil {
			return err
		}
	}
	return nil
}

// otherInputs returns the input files that are not operands: lists and --do.
func (c *Command) otherInputs() []flags.File {
	files := []flags.File{
		{Flag: "--segments", Path: c.Segments.File}, {Flag: "--kv-segments", Path: c.KVSegments.File}, {Flag: "--cu-q", Path: c.CuQ.File},
		{Flag: "--cu-k", Path: c.CuK.File}, {Flag: "--alibi", Path: c.ALiBi.File}, {Flag: "--sinks", Path: c.Sinks.File}, {Flag: "--do", Path: c.DO},
	}
	for i := range files {
		files[i].Path = array.Path(files[i].Path)
	}
	return files
}

// checkPairs checks the outputs with an element for each query and key.
func (c *Command) checkPairs() error {
	top := c.TopKKeys != "" || c.TopKWeights != ""
	switch {
	case c.TopK < 0:
		return flags.Usagef("--topk is %d, it must be at least 1", c.TopK)
	case top && c.TopK == 0:
		return flags.Usagef("--topk is missing: the number of weights for each query")
	case c.TopK > 0 && !top:
		return flags.Usagef("--topk has no output: give --topk-keys or --topk-weights")
	case c.KeepMask != "" && c.Dropout.P == nil:
		return flags.Usagef("--keep-mask is given without a --dropout")
	case c.CuQ.Rows != nil && (top || c.Scores != "" || c.KeepMask != ""):
		return flags.Usagef("--scores, --topk and --keep-mask cannot be given for packed sequences, whose lengths differ")
	}
	return nil
}

// checkMemory checks the outputs that are allocated after the call, which may take long.
func (c *Command) checkMemory(d kernels.Dims) error {
	for _, f := range []struct {
		flag    string
		given   bool
		columns int
		size    int // bytes
	}{
		{"--scores", c.Scores != "", d.SeqK, 4},
		{"--topk", c.TopK > 0, c.TopK, 4 + 4},
		{"--keep-mask", c.KeepMask != "", d.SeqK, 1},
	} {
		if !f.given {
			continue
		}
		bytes := kernels.Shape{d.Batch, d.Heads, d.SeqQ * f.size, f.columns}.Elements() // negative when too large
		if err := kernels.CheckMemory(int64(bytes)); err != nil {
			return fmt.Errorf("%s: an output of %v: %w", f.flag, []int{d.Batch, d.Heads, d.SeqQ, f.columns}, err)
		}
	}
	return nil
}

// printPlan prints how a call would run.
func printPlan(out io.Writer, dev *kernels.Device, in *call.Inputs, p kernels.Plan) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	line := func(name, format string, args ...any) {
		fmt.Fprintf(w, "%s\t%s\n", name, fmt.Sprintf(format, args...))
	}
	line("backend", "%s (%s)", p.Backend, dev.Info().Device)
	line("provider", "%s", dev.Info().Provider)
	for _, f := range in.QKV {
		line(f.Flag, "%v %s, computed as %v", f.Shape, f.TypeName(), in.DType)
	}
	for _, f := range in.Masks {
		line(f.Flag, "%v %s, as %v", f.File.Shape, f.TypeName(), f.Shape)
	}
	line("path", "%s", p.Path)
	line("why", "%s", p.Why)
	line("pairs", "%d visible (query, key) pairs", p.Pairs)
	line("work", "%s", cli.SI(float64(p.FLOPs), "FLOP"))
	line("moves", "at least %s", cli.Bytes(p.Bytes))
	if p.Streamed > 0 {
		line("streams", "%s between host and device", cli.Bytes(p.Streamed))
	}
	line("scratch", "%s in addition to the operands", cli.Bytes(p.Scratch))
	line("chunks", "%d (%s)", p.Chunks, p.Cut)
	for _, l := range p.Limits {
		line("limit", "%s %s", l.Name, cli.Limit(l))
	}
	return w.Flush()
}
