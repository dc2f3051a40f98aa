package nn

import (
	"cmp"
	"context"
	"fmt"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/internal/op"
	"github.com/seed90331342/attn/kernels/internal/steps"
)

// Projections are the linear layers before self-attention, which [kernels.Device.Attention] then
// computes:
//
//	q = x·Wq + Bq    k = x·Wk + Bk    v = x·Wv + Bv
//
//	Wq [1, 1, M, Heads·D]    Wk [1, 1, M, KVHeads·D]    Wv [1, 1, M, KVHeads·Dv]
//
// M is the model size, the last length of x. A bias is [1, 1, 1, N] for a weight with N
// columns, or the zero Tensor for none. All are in the device's memory, F32, F16 or BF16.
type Projections struct {
	Wq, Wk, Wv kernels.Tensor
	Bq, Bk, Bv kernels.Tensor
	// Heads is the number of heads in the columns of Wq; 0 means 1. KVHeads is that in
	// the columns of Wk and Wv; 0 means Heads.
	Heads, KVHeads int
}

// Apply computes q, k and v in the dtype of x and splits their columns into heads:
//
//	x [B, 1, S, M]    q [B, Heads, S, D]    k [B, KVHeads, S, D]    v [B, KVHeads, S, Dv]
//
// Each result is a view of [B, S, heads·D] memory, for the caller to Release.
//
// Errors: ErrShape and ErrDType name the operand, ErrUnsupported when the device has no
// projections.
func (p Projections) Apply(ctx context.Context, dev *kernels.Device, x kernels.Tensor) (q, k, v kernels.Tensor, err error) {
	defer op.Annotate(&err, "projections")
	heads := cmp.Or(p.Heads, 1)
	kvHeads := cmp.Or(p.KVHeads, heads)
	if heads < 0 || kvHeads < 0 {
		return q, k, v, fmt.Errorf("heads is %d and kvHeads is %d, neither may be negative: %w", p.Heads, p.KVHeads, kernels.ErrOption)
	}
	if q, err = project(ctx, dev, "q", x, p.Wq, p.Bq, heads); err == nil {
		if k, err = project(ctx, dev, "k", x, p.Wk, p.Bk, kvHeads); err == nil {
			v, err = project(ctx, dev, "v", x, p.Wv, p.Bv, kvHeads)
		}
	}
	if err != nil {
		q.Release()
		k.Release()
		return kernels.Tensor{}, kernels.Tensor{}, kernels.Tensor{}, err
	}
	return q, k, v, nil
}

// project computes x·w + bias and splits the columns into heads.
func project(ctx context.Context, dev *kernels.Device, name string, x, w, bias kernels.Tensor, heads int) (kernels.Tensor, error) {
	m, n := x.Shape()[kernels.Dim], w.Shape()[kernels.Dim]
	if err := cmp.Or(checkInput(x, m), w.CheckShape("w"+name, kernels.Shape{1, 1, m, n}, "[1, 1, M, N] of x [B, 1, S, M]", floats...)); err != nil {
		return kernels.Tensor{}, err
	}
	if n%heads != 0 {
		return kernels.Tensor{}, fmt.Errorf("w%s has %d columns, %d heads must divide them: %w", name, n, heads, kernels.ErrShape)
	}
	b := steps.Steps{Ctx: ctx, Dev: dev, DType: x.DType()}
	var y kernels.Tensor
	b.Affine(b.Keep(&y, kernels.Shape{x.Shape()[0], 1, x.Shape()[2], n}), x, w, bias)
	y, err := b.Result(y)
	if err != nil {
		return y, fmt.Errorf("%s: %w", name, err)
	}
	return splitHeads(y, heads), nil
}

var floats = []kernels.DType{kernels.F32, kernels.F16, kernels.BF16}

// splitHeads returns [B, 1, S, heads·D] memory as [B, heads, S, D].
func splitHeads(y kernels.Tensor, heads int) kernels.Tensor {
	shape, st := y.Shape(), y.Strides()
	d := shape[kernels.Dim] / heads
	split, _ := y.View(kernels.Shape{shape[0], heads, shape[2], d}, kernels.Strides{st[0], d * st[3], st[2], st[3]}, 0) // elements of y
	return split
}

// joinHeads undoes splitHeads.
func joinHeads(t kernels.Tensor) kernels.Tensor {
	shape, st := t.Shape(), t.Strides()
	joined, _ := t.View(kernels.Shape{shape[0], 1, shape[2], shape[1] * shape[3]}, kernels.Strides{st[0], st[0], st[2], st[3]}, 0)
	return joined
}

// allocHeads returns new memory for d elements of each head and row of x, whose heads are split.
func allocHeads(b *steps.Steps, x kernels.Tensor, heads, d int) kernels.Tensor {
	return splitHeads(b.Alloc(kernels.Shape{x.Shape()[0], 1, x.Shape()[2], heads * d}), heads)
}

// checkInput returns an error unless x is [B, 1, S, model] of floats.
func checkInput(x kernels.Tensor, model int) error {
	if err := x.Check("x", floats...); err != nil {
		return err
	}
	if s := x.Shape(); s != (kernels.Shape{s[0], 1, s[2], model}) {
		return fmt.Errorf("x has shape %v, it must be [B, 1, S, %d] for the layer: %w", s, model, kernels.ErrShape)
	}
	return nil
}

// checkConfig returns an error for the type of a layer's weights, its RoPE, which may be nil, for heads
// of a size, or the ε of its norms.
func checkConfig(dtype kernels.DType, r *RoPE, headDim int, epsilon float64) error {
	if !dtype.Float() {
		return fmt.Errorf("config: DType is %v, weights must be f32, f16 or bf16: %w", dtype, kernels.ErrDType)
	}
	if r != nil {
		if _, _, err := r.frequencies(headDim); err != nil {
			return fmt.Errorf("config: rope: %w", err)
		}
	}
	if epsilon != 0 && !(epsilon >= backend.MinEpsilon && epsilon <= backend.MaxEpsilon) { // or NaN
		return fmt.Errorf("config: Epsilon of norms is %v, it must be from 2^-100 to 1, or 0 for 1e-6: %w", epsilon, kernels.ErrOption)
	}
	return nil
}
