package run

import (
	"context"
	"slices"

	"github.com/seed90331342/attn/cmd/attn/internal/array"
	"github.com/seed90331342/attn/cmd/attn/internal/call"
	"github.com/seed90331342/attn/cmd/internal/flags"
	"github.com/seed90331342/attn/kernels"
)

// gradients are the flags of the backward pass.
type gradients struct {
	DO     string `name:"do" placeholder:"dO.npy" group:"Gradients" help:"Compute gradients of a loss from this one, with respect to the output, in its shape. Needs one of the outputs below, --out is then optional."`
	DQ     string `name:"dq" placeholder:"dQ.npy" group:"Gradients" help:"Write the gradient of q, in its shape and type."`
	DK     string `name:"dk" placeholder:"dK.npy" group:"Gradients" help:"Write the gradient of k."`
	DV     string `name:"dv" placeholder:"dV.npy" group:"Gradients" help:"Write the gradient of v."`
	DBias  string `name:"dbias" placeholder:"dB.npy" group:"Gradients" help:"Write the gradient of --bias, in its shape, as f4: summed over the axes along which it is broadcast."`
	DSinks string `name:"dsinks" placeholder:"dS.npy" group:"Gradients" help:"Write the gradient of --sinks, [H] of f4."`

	do *array.File
}

// checkGradients checks the flags of gradients and opens the file of --do.
func (c *Command) checkGradients(in *call.Inputs) (err error) {
	outputs := [...]struct{ flag, path string }{{"--dq", c.DQ}, {"--dk", c.DK}, {"--dv", c.DV}, {"--dbias", c.DBias}, {"--dsinks", c.DSinks}}
	requested := ""
	for _, o := range outputs {
		if o.path != "" {
			requested = o.flag
		}
	}
	switch {
	case c.DO == "" && requested != "":
		return flags.Usagef("%s is given without --do, the gradient of the output", requested)
	case c.DO == "":
		return nil
	case requested == "":
		return flags.Usagef("--do has no output: give one of --dq, --dk, --dv, --dbias, --dsinks")
	case c.RoPE.Base != nil:
		return flags.Usagef("--do cannot be given with a --rope: rotate the files before")
	case c.DBias != "" && in.Bias() == nil:
		return flags.Usagef("--dbias is given without a --bias")
	case c.DSinks != "" && c.Sinks.Values == nil:
		return flags.Usagef("--dsinks is given without --sinks")
	}
	if c.do, err = array.Open("do", c.DO, false); err != nil {
		return err
	}
	d := in.Dims
	want := in.FileShape(kernels.Shape{d.Batch, d.Heads, d.SeqQ, d.ValueDim})
	if !slices.Equal(c.do.Shape, want) {
		return c.do.Errorf("shape is %v, the output has %v: they must be equal", c.do.Shape, want)
	}
	return nil
}

// differentiate computes and writes the gradients.
func (r *computation) differentiate(ctx context.Context) error {
	if r.DO == "" {
		return nil
	}
	do, err := r.Upload(ctx, r.do, r.do.DType())
	if err != nil {
		return err
	}
	var grads kernels.Gradients
	defer func() { grads.Release() }()
	outputs := []struct {
		flag, path string
		to         *kernels.Tensor
		dtype      kernels.DType
		shape      kernels.Shape
		file       []int // its shape
	}{
		{"dq", r.DQ, &grads.Q, r.Operands.DType, r.Q.Shape(), nil},
		{"dk", r.DK, &grads.K, r.Operands.DType, r.K.Shape(), nil},
		{"dv", r.DV, &grads.V, r.Operands.DType, r.V.Shape(), nil},
		{"dbias", r.DBias, &grads.Bias, kernels.F32, r.Options.Bias.Shape(), nil},
		{"dsinks", r.DSinks, &grads.Sinks, kernels.F32, kernels.Shape{1, r.Dims.Heads, 1, 1}, []int{r.Dims.Heads}},
	}
	if bias := r.Operands.Bias(); bias != nil {
		outputs[3].file = bias.File.Shape
	}
	for _, o := range outputs {
		if o.path == "" {
			continue
		}
		if *o.to, err = r.dev.Alloc(ctx, o.dtype, o.shape); err != nil {
			return err
		}
	}
	d := kernels.Result{O: do}
	if err := r.call.Backward(ctx, grads, d, r.result); err != nil {
		return err
	}
	if r.Check {
		report, err := r.call.CheckBackward(ctx, grads, d, r.result, kernels.CheckOptions{})
		if err != nil {
			return err
		}
		if err := r.checked("rows of dq, dk and dv", report); err != nil {
			return err
		}
	}
	for _, o := range outputs {
		t, shape := *o.to, o.file
		if shape == nil {
			shape = r.FileShape(o.shape)
			if t, err = r.BHSD(t); err != nil {
				return err
			}
		}
		if err := r.write(ctx, o.flag, t, shape); err != nil {
			return err
		}
	}
	return nil
}
