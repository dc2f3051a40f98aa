package kernels

import (
	"context"
	"fmt"

	"github.com/seed90331342/attn/backend"
)

// Projections are the linear layers in front of self-attention:
//
//	q = x·Wq + Bq    k = x·Wk + Bk    v = x·Wv + Bv
//
//	Wq [1, 1, M, Heads·D]    Wk [1, 1, M, KVHeads·D]    Wv [1, 1, M, KVHeads·Dv]
//
// with M the model size, that is x's last length. A bias is [1, 1, 1, N], N the
// columns of its weight, or the zero Tensor for none. All are in the backend's
// memory, F32, F16 or BF16.
type Projections struct {
	Wq, Wk, Wv backend.Tensor
	Bq, Bk, Bv backend.Tensor
	// Heads splits the columns of Wq; 0 means 1. KVHeads splits those of Wk
	// and Wv; 0 means Heads.
	Heads, KVHeads int
}

// Apply computes q, k and v from x [B, 1, S, M] with x's dtype and splits their
// heads: q [B, Heads, S, D], k [B, KVHeads, S, D], v [B, KVHeads, S, Dv], each
// a view of [B, S, heads·D] memory for the caller to Release.
//
// Errors: ErrShape and ErrDType name the operand; ErrUnsupported when the
// backend is no [backend.Projector].
func (p Projections) Apply(ctx context.Context, be backend.Backend, x backend.Tensor) (q, k, v backend.Tensor, err error) {
	if q, k, v, err = p.apply(ctx, be, x, x); err != nil {
		return q, k, v, fmt.Errorf("projections: %w", err)
	}
	return q, k, v, nil
}

// apply computes q from x and k and v from z.
func (p Projections) apply(ctx context.Context, be backend.Backend, x, z backend.Tensor) (q, k, v backend.Tensor, err error) {
	fail := func(err error) (backend.Tensor, backend.Tensor, backend.Tensor, error) {
		q.Release()
		k.Release()
		v.Release()
		none := backend.Tensor{}
		return none, none, none, err
	}
	heads := max(p.Heads, 1)
	kvHeads := p.KVHeads
	if kvHeads == 0 {
		kvHeads = heads
	}
	if p.Heads < 0 || kvHeads < 0 {
		return fail(fmt.Errorf("heads is %d and kvHeads is %d, neither may be negative: %w", p.Heads, p.KVHeads, backend.ErrOption))
	}
	if q, err = project(ctx, be, "q", x, p.Wq, p.Bq, heads); err != nil {
		return fail(err)
	}
	if k, err = project(ctx, be, "k", z, p.Wk, p.Bk, kvHeads); err != nil {
		return fail(err)
	}
	if v, err = project(ctx, be, "v", z, p.Wv, p.Bv, kvHeads); err != nil {
		return fail(err)
	}
	return q, k, v, nil
}

// project computes x·w + b and splits the columns into heads.
func project(ctx context.Context, be backend.Backend, name string, x, w, b backend.Tensor, heads int) (backend.Tensor, error) {
	none := backend.Tensor{}
	pr, ok := be.(backend.Projector)
	if !ok {
		return none, fmt.Errorf("%s: %w", be.Info().Name, backend.ErrUnsupported)
	}
	if err := floats(backend.Operand{Name: "x", Tensor: x}, backend.Operand{Name: "w" + name, Tensor: w}); err != nil {
		return none, err
	}
	xs, ws := x.Shape(), w.Shape()
	if xs[backend.Heads] != 1 {
		return none, fmt.Errorf("x has shape %v, it must be [B, 1, S, M]: %w", xs, backend.ErrShape)
	}
	if ws[0] != 1 || ws[1] != 1 || ws[2] != xs[backend.Dim] {
		return none, fmt.Errorf("w%s has shape %v, x has %v: it must be [1, 1, %d, N]: %w", name, ws, xs, xs[backend.Dim], backend.ErrShape)
	}
	n := ws[3]
	if n%heads != 0 {
		return none, fmt.Errorf("w%s has %d columns, %d heads must divide them: %w", name, n, heads, backend.ErrShape)
	}
	if !b.IsZero() {
		if err := expect("b"+name, b, backend.Shape{1, 1, 1, n}, "[1, 1, 1, N] of its weight", backend.F32, backend.F16, backend.BF16); err != nil {
			return none, err
		}
	}
	w, err := w.Broadcast(backend.Shape{xs[0], 1, ws[2], n})
	if err != nil {
		return none, err
	}
	y, err := be.Alloc(ctx, x.DType(), backend.Shape{xs[0], 1, xs[2], n})
	if err != nil {
		return none, err
	}
	if err := pr.Project(ctx, y, x, w, b); err != nil {
		y.Release()
		return none, err
	}
	split, err := splitHeads(y, heads)
	if err != nil {
		y.Release()
		return none, err
	}
	return split, nil
}

// splitHeads returns [B, 1, S, heads·D] memory as [B, heads, S, D].
func splitHeads(y backend.Tensor, heads int) (backend.Tensor, error) {
	shape, st := y.Shape(), y.Strides()
	d := shape[backend.Dim] / heads
	return y.View(backend.Shape{shape[0], heads, shape[2], d}, backend.Strides{st[0], d * st[3], st[2], st[3]}, 0)
}

// SelfAttention computes attention of x [B, 1, S, M] with itself through p, for
// the caller to Release:
//
//	O = softmax(scale·(x·Wq)(x·Wk)ᵀ + bias)·(x·Wv)    [B, Heads, S, Dv]
//
// Nothing leaves the device in between. Errors as for [Projections.Apply] and
// [Attention].
func SelfAttention(ctx context.Context, be backend.Backend, x backend.Tensor, p Projections, opt Options) (Result, error) {
	q, k, v, err := p.Apply(ctx, be, x)
	if err != nil {
		return Result{}, fmt.Errorf("self-attention: %w", err)
	}
	defer q.Release()
	defer k.Release()
	defer v.Release()
	return Attention(ctx, be, q, k, v, opt)
}
