package nn

import (
	"context"
	"fmt"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/internal/op"
	"github.com/seed90331342/attn/kernels/internal/steps"
)

// Linear is a linear layer, with weights in the device's memory:
//
//	y = x·W + B    W [1, 1, In, Out]    B [1, 1, 1, Out], or none
//
// It has no backward pass of its own. Its methods are safe for concurrent use.
type Linear struct {
	dev  *kernels.Device
	w, b kernels.Tensor
}

// NewLinear returns a layer with the given number of inputs, for the caller to Release. The
// weights are as in PyTorch's Linear:
//
//	weights [Out][In]    bias [Out], or nil
//
// Errors: ErrShape for lengths that do not match, ErrMemory, and the backend's.
func NewLinear(ctx context.Context, dev *kernels.Device, inputs int, weights, bias []float32) (l *Linear, err error) {
	defer op.Annotate(&err, "linear layer")
	l = &Linear{dev: dev}
	host, err := Transposed(weights, inputs)
	if err == nil {
		l.w, err = dev.Upload(ctx, host)
	}
	if err == nil && bias != nil {
		if l.b, err = dev.FromFloat32(ctx, kernels.F32, bias, kernels.Shape{1, 1, 1, host.Shape()[kernels.Dim]}); err != nil {
			err = fmt.Errorf("bias: %w", err)
		}
	}
	if err != nil {
		l.Release()
		return nil, err
	}
	return l, nil
}

// Release frees the memory of the weights.
func (l *Linear) Release() {
	l.w.Release()
	l.b.Release()
}

// Apply computes the layer's output for x and allocates it, for the caller to Release:
//
//	x [B, 1, S, In]    y [B, 1, S, Out] of x's dtype
//
// Errors: ErrShape and ErrDType for x, ErrUnsupported when the device has no projections, and the backend's.
func (l *Linear) Apply(ctx context.Context, x kernels.Tensor) (y kernels.Tensor, err error) {
	defer op.Annotate(&err, "linear layer")
	s, w := x.Shape(), l.w.Shape()
	s[kernels.Dim] = w[kernels.Dim]
	b := steps.Steps{Ctx: ctx, Dev: l.dev, DType: x.DType(), Err: checkInput(x, w[kernels.Seq])}
	b.Affine(b.Keep(&y, s), x, l.w, l.b)
	return b.Result(y)
}

// ApplyFloat32 is Apply for the rows of x in host memory: x [S][In], y [S][Out].
func (l *Linear) ApplyFloat32(ctx context.Context, x []float32) (y []float32, err error) {
	y, _, err = onHost(ctx, l.dev, x, 1, l.w.Shape()[kernels.Seq], func(t kernels.Tensor) (kernels.Result, error) {
		y, err := l.Apply(ctx, t)
		return kernels.Result{O: y}, err
	})
	op.Annotate(&err, "linear layer")
	return y, err
}

// onHost applies a layer of n inputs, 0 if nobody made it, to batches of rows in host memory.
func onHost(ctx context.Context, dev *kernels.Device, x []float32, batches, n int, apply func(x kernels.Tensor) (kernels.Result, error)) (y, weights []float32, err error) {
	t, err := dev.FromFloat32(ctx, kernels.F32, x, kernels.Shape{batches, 1, len(x) / max(n, 1) / max(batches, 1), n})
	if err != nil {
		return nil, nil, fmt.Errorf("x: %w", err)
	}
	defer t.Release()
	r, err := apply(t)
	if err != nil {
		return nil, nil, err
	}
	defer r.Release()
	if y, err = dev.ToFloat32(ctx, r.O); err == nil && !r.Weights.IsZero() {
		weights, err = dev.ToFloat32(ctx, r.Weights)
	}
	return y, weights, err
}

// Transposed returns the weights [Out][In] of PyTorch's Linear as a tensor [1, 1, In, Out] in
// host memory, as [MultiHeadWeights] has them. It returns ErrShape when inputs, In, does not
// divide the length of weights, and ErrMemory.
func Transposed(weights []float32, inputs int) (kernels.Tensor, error) {
	if inputs < 1 || len(weights)%inputs != 0 {
		return kernels.Tensor{}, fmt.Errorf("%d weights are not rows of %d inputs: %w", len(weights), inputs, kernels.ErrShape)
	}
	data, err := kernels.Make[float32](len(weights))
	if err != nil {
		return kernels.Tensor{}, err
	}
	outputs := len(weights) / inputs
	for i, w := range weights {
		data[i%inputs*outputs+i/inputs] = w
	}
	return kernels.HostF32(data, kernels.Shape{1, 1, inputs, outputs})
}
