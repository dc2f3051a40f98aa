package onnx

import (
	"context"
	"fmt"
	"slices"

	"github.com/seed90331342/attn/cmd/attn-onnx/internal/onnxfile"
	"github.com/seed90331342/attn/kernels"
)

// convOp is a CausalConvWithState node: a convolution of each channel with its own weights, along the past and the new
// elements, with SiLU after it or not.
//
//	input, output [B, Ch, L]    weight [Ch, 1, k]    bias [Ch]    past_state, present_state [B, Ch, k-1]
type convOp struct{ silu bool }

// The inputs of CausalConvWithState, by position.
const (
	convInput = iota
	convWeight
	convBias
	convPast
)

func newCausalConv(_ *node, a *attributes) operator {
	return &convOp{silu: a.word("activation", "none", "silu", "swish") != "none"}
}

func (op *convOp) run(ctx context.Context, dev *kernels.Device, in []*onnxfile.Tensor) ([]*onnxfile.Tensor, string, error) {
	names := schemas["CausalConvWithState"].inputs
	if err := checkHalves(names, in, -1); err != nil {
		return nil, "", err
	}
	x, w := in[convInput], in[convWeight]
	if len(x.Shape) != 3 || len(w.Shape) != 3 || x.Elements() == 0 || w.Elements() == 0 {
		return nil, "", fmt.Errorf("input has shape %v and weight %v: they must be [batch channels length] and [channels 1 k], without a length of 0: %w", x.Shape, w.Shape, kernels.ErrShape)
	}
	batch, channels, length, width := x.Shape[0], x.Shape[1], x.Shape[2], w.Shape[2]
	stateShape := []int{batch, channels, width - 1}
	for i, want := range [][]int{convWeight: {channels, 1, width}, convBias: {channels}, convPast: stateShape} {
		if t := in[i]; i > 0 && t != nil && !slices.Equal(t.Shape, want) {
			return nil, "", fmt.Errorf("%s has shape %v, it must be %v for input %v and weight %v: %w", names[i], t.Shape, want, x.Shape, w.Shape, kernels.ErrShape)
		}
	}
	dtype := dtypeOf(x.Type)
	up := uploader{ctx: ctx, dev: dev}
	defer up.release()
	// channelsLast returns the elements of t [rows, Ch, columns] as a view [rows, 1, columns, Ch].
	channelsLast := func(t kernels.Tensor) kernels.Tensor { return up.view(t.Swap(kernels.Seq, kernels.Dim)) }
	y := up.alloc("output", dtype, kernels.Shape{batch, 1, channels, length})
	c := kernels.CausalConv{
		SiLU: op.silu, Y: channelsLast(y), X: channelsLast(up.upload("input", x, dtype, kernels.Shape{batch, 1, channels, length})),
		W: channelsLast(up.upload("weight", w, dtype, kernels.Shape{1, 1, channels, width})),
	}
	if bias := in[convBias]; bias != nil {
		c.Bias = up.upload("bias", bias, dtype, kernels.Shape{1, 1, 1, channels})
	}
	var present kernels.Tensor
	if width > 1 { // else states have no elements
		shape := kernels.Shape{batch, 1, channels, width - 1}
		if past := in[convPast]; past != nil {
			c.PastState = channelsLast(up.upload("past_state", past, dtype, shape))
		}
		present = up.alloc("present_state", dtype, shape)
		c.PresentState = channelsLast(present)
	}
	if up.err != nil {
		return nil, "", up.err
	}
	if err := dev.CausalConv(ctx, c); err != nil {
		return nil, "", err
	}
	output, err := download(ctx, dev, y, x.Type, x.Shape)
	if err != nil {
		return nil, "", err
	}
	state := &onnxfile.Tensor{Type: x.Type, Shape: stateShape}
	if width > 1 {
		state, err = download(ctx, dev, present, x.Type, stateShape)
	}
	return []*onnxfile.Tensor{output, state}, "causal convolution, " + x.Type.String(), err
}
