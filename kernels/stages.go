package kernels

import (
	"context"
	"fmt"

	"github.com/seed90331342/attn/backend"
)

// QK computes the first stage, s = q·kᵀ without a scale, and allocates s:
//
//	s [B, H, Sq, Sk] F32    q [B, H, Sq, D]    k [B, Hkv, Sk, D]
//
// Hkv divides H; q and k are F32, F16 or BF16 each on its own. It takes B·H·Sq·Sk·4 bytes: O(S²).
// Errors as for [Attention].
func QK(ctx context.Context, be backend.Backend, q, k backend.Tensor) (backend.Tensor, error) {
	if err := floats(backend.Operand{Name: "k", Tensor: k}); err != nil {
		return backend.Tensor{}, fmt.Errorf("qk: %w", err)
	}
	d, err := dims(q, k, k)
	if err != nil {
		return backend.Tensor{}, fmt.Errorf("qk: %w", err)
	}
	s, err := be.Alloc(ctx, backend.F32, backend.Shape{d.Batch, d.Heads, d.SeqQ, d.SeqK})
	if err != nil {
		return backend.Tensor{}, fmt.Errorf("qk: %w", err)
	}
	if err := be.QK(ctx, s, q, k); err != nil {
		s.Release()
		return backend.Tensor{}, fmt.Errorf("qk: %w", err)
	}
	return s, nil
}

// Softmax computes the second stage in place: each row of s, the unscaled scores
// that [QK] gives, becomes its softmax weights, with scale, softcap, bias and
// hiding as in [Options]. Options.Scale must be set, as scores do not tell the
// head size. lse, unless it is the zero Tensor, gets the rows' log-sum-exp:
//
//	s [B, H, Sq, Sk] F32    lse [B, H, Sq, 1] F32
//
// Errors as for [Attention].
func Softmax(ctx context.Context, be backend.Backend, s, lse backend.Tensor, opt Options) error {
	if err := floats(backend.Operand{Name: "s", Tensor: s}); err != nil {
		return fmt.Errorf("softmax: %w", err)
	}
	if s.DType() != backend.F32 {
		return fmt.Errorf("softmax: s is %v, scores are f32: %w", s.DType(), backend.ErrDType)
	}
	sh := s.Shape()
	d := Dims{Batch: sh[0], Heads: sh[1], SeqQ: sh[2], SeqK: sh[3]}
	p, err := opt.problem(d)
	if err != nil {
		return fmt.Errorf("softmax: %w", err)
	}
	if !lse.IsZero() {
		sh[backend.Dim] = 1
		if err := expect("lse", lse, sh, "[B, H, Sq, 1] of s", backend.F32); err != nil {
			return fmt.Errorf("softmax: %w", err)
		}
	}
	if err := softmax(ctx, be, s, lse, &p, d); err != nil {
		return fmt.Errorf("softmax: %w", err)
	}
	return nil
}

// softmax runs the stage, in the parts of p where it has some.
func softmax(ctx context.Context, be backend.Backend, s, lse backend.Tensor, p *problem, d Dims) error {
	if p.parts == nil && p.keys == d.SeqK {
		return be.Softmax(ctx, s, lse, &p.Problem)
	}
	d.SeqK = p.keys
	for _, x := range p.partsOf(d) {
		var cut slicer
		scores, sums, q := cut.pairs(s, x), cut.rows(lse, x), cut.problem(&p.Problem, d, x)
		if cut.err != nil {
			return cut.err
		}
		if err := be.Softmax(ctx, scores, sums, &q); err != nil {
			return err
		}
		if err := hideOutside(ctx, be, s, x); err != nil {
			return err
		}
	}
	return nil
}

// PV computes the third stage, o = w·v, and allocates o with v's dtype:
//
//	o [B, H, Sq, Dv]    w [B, H, Sq, Sk] F32    v [B, Hkv, Sk, Dv]
//
// A weight of exactly 0 hides its value, NaN included. Errors as for
// [Attention].
func PV(ctx context.Context, be backend.Backend, w, v backend.Tensor) (backend.Tensor, error) {
	if err := floats(backend.Operand{Name: "w", Tensor: w}, backend.Operand{Name: "v", Tensor: v}); err != nil {
		return backend.Tensor{}, fmt.Errorf("pv: %w", err)
	}
	ws, vs := w.Shape(), v.Shape()
	if w.DType() != backend.F32 {
		return backend.Tensor{}, fmt.Errorf("pv: w is %v, weights are f32: %w", w.DType(), backend.ErrDType)
	}
	if ws[backend.Batch] != vs[backend.Batch] || ws[backend.Dim] != vs[backend.Seq] {
		return backend.Tensor{}, fmt.Errorf("pv: w %v must have the batches of v %v and a weight for each of its keys: %w", ws, vs, backend.ErrShape)
	}
	if err := divides(ws[backend.Heads], vs[backend.Heads], "v", "w"); err != nil {
		return backend.Tensor{}, fmt.Errorf("pv: %w", err)
	}
	o, err := be.Alloc(ctx, v.DType(), backend.Shape{ws[0], ws[1], ws[2], vs[backend.Dim]})
	if err != nil {
		return backend.Tensor{}, fmt.Errorf("pv: %w", err)
	}
	if err := be.PV(ctx, o, w, v); err != nil {
		o.Release()
		return backend.Tensor{}, fmt.Errorf("pv: %w", err)
	}
	return o, nil
}
