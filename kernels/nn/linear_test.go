package nn_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/kernels/nn"
)

// TestSlices compares ApplyFloat32 of a layer of attention with Apply: two batches of three rows, with weights.
func TestSlices(t *testing.T) {
	dev, ctx := onCPU(t), t.Context()
	c := nn.MultiHeadConfig{Model: 8, Heads: 2}
	w := must.Get(c.Initialise(nn.Initialiser{}))(t)
	l := must.Get(nn.NewMultiHeadAttention(ctx, dev, c, w))(t)
	defer l.Release()
	in := random(t, dev, 1, 2, 1, 3, 8)
	opt := nn.MultiHeadOptions{Options: kernels.Options{Causal: true, Weights: true}}
	want := must.Get(l.Apply(ctx, in, opt))(t)
	defer want.Release()
	floats := func(t *testing.T, x kernels.Tensor) []float32 {
		return must.Get(dev.ToFloat32(ctx, x))(t)
	}
	y, weights, err := l.ApplyFloat32(ctx, floats(t, in), 2, opt)
	if err != nil || !slices.Equal(y, floats(t, want.O)) || !slices.Equal(weights, floats(t, want.Weights)) {
		t.Errorf("y is %v, weights are %v, %v", y, weights, err)
	}
	opt.Weights = false
	if y, weights, err := l.ApplyFloat32(ctx, floats(t, in), 2, opt); err != nil || len(y) != 2*3*8 || weights != nil {
		t.Errorf("without weights, y is %v, weights are %v, %v", y, weights, err)
	}
}

// TestLinearErrors: errors name the argument.
func TestLinearErrors(t *testing.T) {
	dev, ctx := onCPU(t), t.Context()
	c := nn.MultiHeadConfig{Model: 4}
	w := must.Get(c.Initialise(nn.Initialiser{}))(t)
	attention := must.Get(nn.NewMultiHeadAttention(ctx, dev, c, w))(t)
	defer attention.Release()
	l := must.Get(nn.NewLinear(ctx, dev, 2, []float32{1, 2, 3, 4}, nil))(t)
	defer l.Release()
	apply := func(shape ...int) error {
		_, err := l.Apply(ctx, random(t, dev, 1, shape...))
		return err
	}
	for _, c := range []struct {
		err  error
		want string
	}{
		{func() error { _, err := nn.NewLinear(ctx, dev, 3, []float32{1, 2, 3, 4}, nil); return err }(), "linear layer: 4 weights are not rows of 3 inputs"},
		{func() error { _, err := nn.NewLinear(ctx, dev, 0, nil, nil); return err }(), "linear layer: 0 weights are not rows of 0 inputs"},
		{func() error { _, err := nn.NewLinear(ctx, dev, 2, []float32{1, 2, 3, 4}, []float32{1}); return err }(), "linear layer: bias: "},
		{apply(1, 1, 2, 3), "linear layer: x has shape [1 1 2 3], it must be [B, 1, S, 2] for the layer"},
		{apply(1, 2, 2, 2), "linear layer: x has shape [1 2 2 2], it must be [B, 1, S, 2]"},
		{func() error { _, err := l.ApplyFloat32(ctx, []float32{1, 2, 3}); return err }(), "linear layer: x: "},
		{func() error {
			_, _, err := attention.ApplyFloat32(ctx, make([]float32, 9), 1, nn.MultiHeadOptions{})
			return err
		}(), "multi-head attention: x: "},
		{func() error {
			_, _, err := attention.ApplyFloat32(ctx, make([]float32, 4), 0, nn.MultiHeadOptions{})
			return err
		}(), "multi-head attention: x: "},
		{func() error {
			_, _, err := attention.ApplyFloat32(ctx, make([]float32, 4), -1, nn.MultiHeadOptions{})
			return err
		}(), "multi-head attention: x: "},
	} {
		if !errors.Is(c.err, kernels.ErrShape) || !strings.HasPrefix(c.err.Error(), c.want) {
			t.Errorf("error %v, should begin with %q", c.err, c.want)
		}
	}
}
