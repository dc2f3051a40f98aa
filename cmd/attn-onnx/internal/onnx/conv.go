package onnx

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/seed90331342/attn/cmd/attn-onnx/internal/onnxfile"
	"github.com/seed90331342/attn/kernels"
)

// convOp is a CausalConvWithState node: a convolution of each channel with its own weights, along the past and the new
// elements, with SiLU after it or not.
//
//	input, output [B, Ch, L]    weight [Ch, 1, k]    bias [Ch]    past_state, present_state [B, Ch, k-1]
//
// ONNX Runtime's node of that name has dilation n: weights are n elements apart and states have (k-1)·n elements.
// With channels_last, input, output and states have the channels last, on one or more axes. state_window W > 0 adds an
// axis: present_state [W, B, Ch, k-1] has the states after the last W elements, as in [linearOp].
type convOp struct {
	silu, last       bool
	dilation, window int
}

// The inputs of CausalConvWithState, by position.
const (
	convInput = iota
	convWeight
	convBias
	convPast
)

var convInputs = []string{"input", "weight", "bias", "past_state"}

func newCausalConv(_ *node, a *attributes) operator {
	return &convOp{silu: a.word("activation", "none", "silu", "swish") != "none", dilation: 1}
}

// newRuntimeConv returns a node of ONNX Runtime.
func newRuntimeConv(n *node, a *attributes) operator {
	if axes := a.integer("ndim", 1, 1, 3); axes != 1 {
		a.fail("attribute ndim is %d, attn convolves along one axis: %w", axes, kernels.ErrUnsupported)
	}
	op := newCausalConv(n, a).(*convOp)
	op.last, op.dilation, op.window = a.flag("channels_last"), a.integer("dilation", 1, 1, 63), a.integer("state_window", 0, 0, 8)
	return op
}

func (op *convOp) run(ctx context.Context, dev *kernels.Device, in []*onnxfile.Tensor) ([]*onnxfile.Tensor, string, error) {
	if err := checkHalves(convInputs, in, -1); err != nil {
		return nil, "", err
	}
	x, w, past := in[convInput], in[convWeight], in[convPast]
	s := x.Shape
	if len(s) < 3 || len(s) > 3 && !op.last || len(w.Shape) != 3 || x.Elements() == 0 || w.Elements() == 0 {
		return nil, "", fmt.Errorf("input has shape %v and weight %v: they must be [batch channels length], or [batch length channels ...] with channels_last, and [channels 1 k], without a length of 0: %w", s, w.Shape, kernels.ErrShape)
	}
	batch, channels, length, kept := s[0], s[1], s[2], (w.Shape[2]-1)*op.dilation
	stateShape := []int{batch, channels, kept}
	if op.last {
		length, channels = s[1], x.Elements()/(batch*s[1])
		stateShape = append([]int{batch, kept}, s[2:]...)
	}
	if op.window > 0 {
		stateShape = append([]int{op.window}, stateShape...)
	}
	for i, want := range [][]int{convWeight: {channels, 1, w.Shape[2]}, convBias: {channels}, convPast: stateShape} {
		if t := in[i]; i > 0 && t != nil && !slices.Equal(t.Shape, want) {
			return nil, "", fmt.Errorf("%s has shape %v, it must be %v for input %v and weight %v: %w", convInputs[i], t.Shape, want, s, w.Shape, kernels.ErrShape)
		}
	}
	w, err := dilated(w, op.dilation)
	state, e := newTensor(x.Type, stateShape)
	if err = errors.Join(err, e); err != nil {
		return nil, "", err
	}
	state.Data = state.Data[:cap(state.Data)]
	slots, dtype := max(op.window, 1), dtypeOf(x.Type)
	up := uploader{ctx: ctx, dev: dev}
	defer up.release()
	// rows returns the shape of n elements of each channel, and channelsLast them as a view [rows, 1, n, Ch].
	rows := func(batch, n int) kernels.Shape {
		if op.last {
			return kernels.Shape{batch, 1, n, channels}
		}
		return kernels.Shape{batch, 1, channels, n}
	}
	channelsLast := func(t kernels.Tensor) kernels.Tensor {
		if op.last {
			return t
		}
		return up.view(t.Swap(kernels.Seq, kernels.Dim))
	}
	slot := func(t kernels.Tensor, n int) kernels.Tensor {
		return channelsLast(up.view(t.Slice(kernels.Batch, n*batch, (n+1)*batch)))
	}
	y := up.alloc("output", dtype, rows(batch, length))
	weights := up.upload("weight", w, dtype, kernels.Shape{1, 1, channels, kept + 1})
	c := kernels.CausalConv{
		SiLU: op.silu, Y: channelsLast(y), X: channelsLast(up.upload("input", x, dtype, rows(batch, length))),
		W: up.view(weights.Swap(kernels.Seq, kernels.Dim)),
	}
	if bias := in[convBias]; bias != nil {
		c.Bias = up.upload("bias", bias, dtype, kernels.Shape{1, 1, 1, channels})
	}
	var present kernels.Tensor
	if kept > 0 { // else states have no elements
		present = up.upload("present_state", state, dtype, rows(slots*batch, kept))
		if past != nil {
			c.PastState = slot(up.upload("past_state", past, dtype, rows(slots*batch, kept)), slots-1)
		}
	}
	err = lastStates(length, slots, func(lo, hi, n int) error {
		part := c
		part.X, part.Y = up.view(c.X.Slice(kernels.Seq, lo, hi)), up.view(c.Y.Slice(kernels.Seq, lo, hi))
		if kept > 0 {
			part.PresentState = slot(present, n)
			c.PastState = part.PresentState
		}
		if up.err != nil {
			return up.err
		}
		return dev.CausalConv(ctx, part)
	})
	if err != nil {
		return nil, "", err
	}
	output, err := download(ctx, dev, y, x.Type, s)
	if err == nil && kept > 0 {
		state, err = download(ctx, dev, present, x.Type, stateShape)
	}
	return []*onnxfile.Tensor{output, state}, "causal convolution, " + x.Type.String(), err
}

// dilated returns weights [Ch, 1, k] with zeros between them, [Ch, 1, (k-1)·dilation+1].
func dilated(w *onnxfile.Tensor, dilation int) (*onnxfile.Tensor, error) {
	taps, size := w.Shape[2], w.Type.Size()
	width := (taps-1)*dilation + 1
	y, err := newTensor(w.Type, []int{w.Shape[0], 1, width})
	if err != nil {
		return nil, err
	}
	y.Data = y.Data[:cap(y.Data)]
	for i := range w.Elements() {
		copy(y.Data[(i/taps*width+i%taps*dilation)*size:], w.Data[i*size:][:size])
	}
	return y, nil
}

// lastStates calls f with spans [lo, hi) of tokens and the slot n, of slots, of the state after them. The first span
// ends with the first token whose state is kept, the others have a token each.
func lastStates(tokens, slots int, f func(lo, hi, n int) error) error {
	kept := min(slots, tokens)
	for lo, hi, n := 0, tokens-kept+1, slots-kept; n < slots; lo, hi, n = hi, hi+1, n+1 {
		if err := f(lo, hi, n); err != nil {
			return err
		}
	}
	return nil
}
