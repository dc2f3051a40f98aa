package kernels

import (
	"cmp"
	"context"
	"fmt"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/internal/op"
	"github.com/seed90331342/attn/kernels/internal/region"
)

// QK computes the first stage and allocates s, for the caller to Release:
//
//	s = q·kᵀ, without a scale
//
//	s [B, H, Sq, Sk] F32    q [B, H, Sq, D]    k [B, Hkv, Sk, D]
//
// Hkv divides H; q and k are F32, F16 or BF16, each independently. s takes O(S²) memory.
// Errors as for [Device.Attention].
func (d *Device) QK(ctx context.Context, q, k Tensor) (s Tensor, err error) {
	defer op.Annotate(&err, "qk")
	dims, err := scoreDims(q, k)
	return d.filled(ctx, err, F32, Shape{dims.Batch, dims.Heads, dims.SeqQ, dims.SeqK}, func(s Tensor) error { return d.be.QK(ctx, s, q, k) })
}

// filled returns a new tensor that fill has filled, unless err, that of the checks before it, is not nil.
func (d *Device) filled(ctx context.Context, err error, dtype DType, shape Shape, fill func(Tensor) error) (t Tensor, _ error) {
	if err == nil {
		t, err = d.Alloc(ctx, dtype, shape)
	}
	if err == nil && shape.Elements() > 0 {
		err = fill(t)
	}
	if err != nil {
		t.Release()
		return Tensor{}, err
	}
	return t, nil
}

// Softmax computes the second stage in place: each row of s, unscaled scores from QK, becomes its softmax weights,
// with scale, softcap, biases and hiding as in [Options]. Options.Scale must be set, because scores do not determine
// the head size. lse, unless it is the zero Tensor, receives the log-sum-exp of each row:
//
//	s [B, H, Sq, Sk] F32    lse [B, H, Sq, 1] F32
//
// Errors as for [Device.Attention].
func (d *Device) Softmax(ctx context.Context, s, lse Tensor, opt Options) (err error) {
	defer op.Annotate(&err, "softmax")
	sh := s.Shape()
	p, err := opt.stage(backend.Dims{Batch: sh[0], Heads: sh[1], SeqQ: sh[2], SeqK: sh[3]})
	sh[Dim] = 1
	if err := cmp.Or(s.CheckDType("s", F32), err, checkOptional("lse", lse, sh, "[B, H, Sq, 1] of s", F32)); err != nil {
		return err
	}
	if p.Dims.SeqK == 0 && !lse.IsZero() {
		return d.noKeys(ctx, Tensor{}, lse, opt.Sinks)
	}
	if _, err := d.on(ctx); err != nil {
		return err
	}
	return p.Each(func(x region.Region, own backend.Problem, _ [][]int32) error {
		return d.softmax(ctx, s, x.Rows(lse), x, &own)
	})
}

// stage returns the problem of a stage alone, over scores of lengths d.
func (o *Options) stage(d backend.Dims) (region.Problem, error) {
	if err := op.CheckPath(o.Set(), op.StagePath); err != nil {
		return region.Problem{}, err
	}
	return o.problem(d)
}

// softmax turns x of the scores s, [B, H, Sq, Sk], into weights by p, and the other keys of its rows into zeros.
func (d *Device) softmax(ctx context.Context, s, lse Tensor, x region.Region, p *backend.Problem) error {
	if err := d.be.Softmax(ctx, x.Scores(s), lse, p); err != nil {
		return err
	}
	return outside(s, x, func(rest Tensor, hidden *backend.Problem) error {
		return d.be.Softmax(ctx, rest, Tensor{}, hidden)
	})
}

// noKeys writes what rows without keys yield: zeros to o, and -Inf or the sinks to lse. Either may be the zero Tensor.
func (d *Device) noKeys(ctx context.Context, o, lse Tensor, sinks []float32) error {
	return d.withoutKeys(ctx, o, lse, sinks, func(c *backend.Call) error { return d.attend(ctx, c) })
}

// withoutKeys calls f with the backend call of rows without keys, whose results are o and lse.
// Either may be the zero Tensor. A backend call needs a key, even if no row sees it.
func (d *Device) withoutKeys(ctx context.Context, o, lse Tensor, sinks []float32, f func(c *backend.Call) error) (err error) {
	rows := o.Shape()
	if o.IsZero() {
		rows = lse.Shape()
	}
	if rows.Elements() == 0 {
		return d.attend(ctx)
	}
	if o.IsZero() {
		if o, err = d.Alloc(ctx, F32, rows); err != nil {
			return err
		}
		defer o.Release()
	}
	zero, err := d.zero(ctx, o.DType())
	if err != nil {
		return err
	}
	defer zero.Release()
	c := backend.Call{O: o, LSE: lse, Problem: backend.Problem{Scale: 1, Visible: backend.Everything(), Sinks: sinks}}
	c.Visible.KLen = make([]int, rows[Batch])                    // zeros
	c.Q, _ = zero.Broadcast(Shape{rows[0], rows[1], rows[2], 1}) // a single element broadcasts to any shape
	c.K, _ = zero.Broadcast(Shape{rows[0], 1, 1, 1})
	c.V, _ = zero.Broadcast(Shape{rows[0], 1, 1, rows[3]})
	return f(&c)
}

// zero returns a tensor of one zero, for the caller to Release.
func (d *Device) zero(ctx context.Context, dtype DType) (Tensor, error) {
	host, err := AllocHost(dtype, Shape{1, 1, 1, 1})
	if err != nil {
		return host, err
	}
	return d.Upload(ctx, host)
}

// outside calls f with the rows of x of t, [B, H, Sq, Sk], and the keys before and after
// those of x, and with a problem in which all keys are hidden.
func outside(t Tensor, x region.Region, f func(rest Tensor, hidden *backend.Problem) error) error {
	for _, keys := range [2][2]int{{0, x.Lo[region.Key]}, {x.Hi[region.Key], t.Shape()[Dim]}} {
		if keys[0] == keys[1] {
			continue
		}
		rest := region.Slice(x.Rows(t), Dim, keys[0], keys[1])
		hidden := backend.Problem{Scale: 1, Visible: backend.Everything()}
		hidden.Visible.KLen = make([]int, rest.Shape()[Batch]) // zeros
		if err := f(rest, &hidden); err != nil {
			return err
		}
	}
	return nil
}

// PV computes the third stage and allocates o, of v's dtype, for the caller to Release:
//
//	o = w·v
//
//	o [B, H, Sq, Dv]    w [B, H, Sq, Sk] F32    v [B, Hkv, Sk, Dv]
//
// A weight of exactly 0 hides its value, NaN included. Errors as for [Device.Attention].
func (d *Device) PV(ctx context.Context, w, v Tensor) (o Tensor, err error) {
	defer op.Annotate(&err, "pv")
	if err := cmp.Or(w.CheckDType("w", F32), v.CheckDType("v", floats...)); err != nil {
		return o, err
	}
	ws, vs := w.Shape(), v.Shape()
	if ws[Batch] != vs[Batch] || ws[Dim] != vs[Seq] {
		return o, fmt.Errorf("w %v must have the batches of v %v and a weight for each of its keys: %w", ws, vs, ErrShape)
	}
	return d.filled(ctx, divides(ws[Heads], vs[Heads], "v", "w"), v.DType(), Shape{ws[0], ws[1], ws[2], vs[Dim]}, func(o Tensor) error {
		if vs[Seq] == 0 {
			return d.noKeys(ctx, o, Tensor{}, nil)
		}
		return d.be.PV(ctx, o, w, v)
	})
}

// Scores computes the scores at a point before the softmax and allocates them, for the caller to Release:
//
//	s [B, H, Sq, Sk] F32    q [B, H, Sq, D]    k [B, Hkv, Sk, D]
//
// At [Scaled] and [Capped] no key is hidden, at [Biased] hidden keys have -Inf. These points and the
// weights are the modes of qk_matmul_output in ONNX. s takes O(S²) memory. Errors as for
// [Device.Attention], and ErrUnsupported when the device returns no scores.
func (d *Device) Scores(ctx context.Context, q, k Tensor, at ScorePoint, opt Options) (s Tensor, err error) {
	defer op.Annotate(&err, "scores")
	dims, err := scoreDims(q, k)
	switch {
	case err != nil:
		return s, err
	case at < Scaled || at > Biased:
		return s, fmt.Errorf("the point is %d, it must be Scaled, Capped or Biased: %w", at, ErrOption)
	case at == Capped && opt.ScoreMod != nil:
		return s, fmt.Errorf("ScoreMod is set, its positions are those of visible keys: take the scores at Biased: %w", ErrUnsupported)
	}
	p, err := opt.stage(dims)
	scorer, bad := need[backend.Scorer](ctx, d, "scores")
	return d.filled(ctx, cmp.Or(err, bad), F32, Shape{dims.Batch, dims.Heads, dims.SeqQ, dims.SeqK}, func(s Tensor) error {
		if err := d.be.QK(ctx, s, q, k); err != nil {
			return err
		}
		if at < Biased {
			return scorer.Scores(ctx, s, &p.Problem, at)
		}
		return p.Each(func(x region.Region, own backend.Problem, _ [][]int32) error {
			if err := scorer.Scores(ctx, x.Scores(s), &own, at); err != nil {
				return err
			}
			return outside(s, x, func(rest Tensor, hidden *backend.Problem) error {
				return scorer.Scores(ctx, rest, hidden, at)
			})
		})
	})
}
