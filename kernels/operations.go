package kernels

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/internal/op"
)

// Copy writes dst[i] = src[i] for each i in order, rounded to the dtype of dst[i], so that a
// copy sees the results of the earlier ones. Tensors are F32, F16, BF16, Q8, Q4 or F8.
//
// Errors: ErrShape for different shapes or numbers of tensors, ErrUnsupported when the
// device does not copy.
func (d *Device) Copy(ctx context.Context, dst, src []Tensor) (err error) {
	defer op.Annotate(&err, "copy")
	c, err := need[backend.Copier](ctx, d, "copies")
	if err != nil {
		return err
	}
	if len(dst) != len(src) {
		return fmt.Errorf("there are %d destinations and %d sources: %w", len(dst), len(src), ErrShape)
	}
	for i := range dst {
		if err := cmp.Or(dst[i].Check("dst", numbers...), src[i].Check("src", numbers...)); err != nil {
			return err
		}
		if dst[i].Shape() != src[i].Shape() {
			return fmt.Errorf("dst has shape %v, src has %v: they must be equal: %w", dst[i].Shape(), src[i].Shape(), ErrShape)
		}
	}
	if slices.ContainsFunc(dst, noElements) {
		dst, src = slices.DeleteFunc(slices.Clone(dst), noElements), slices.DeleteFunc(slices.Clone(src), noElements)
	}
	return c.Copy(ctx, dst, src)
}

// noElements reports whether t has an axis of length 0.
func noElements(t Tensor) bool { return t.Shape().Elements() == 0 }

// Project computes a linear layer for each batch and head:
//
//	y = x·w + bias
//
//	y [B, H, S, N]    x [B, H, S, M]    w [B or 1, H or 1, M, N]    bias [1, 1, 1, N]
//
// All are F32, F16 or BF16, each independently. The zero Tensor as bias means none. A NaN in
// x or w propagates to y.
//
// Errors: ErrShape and ErrDType name the operand, ErrUnsupported when the device has no
// projections.
func (d *Device) Project(ctx context.Context, y, x, w, bias Tensor) (err error) {
	defer op.Annotate(&err, "project")
	p, err := need[backend.Projector](ctx, d, "projections")
	if err != nil {
		return err
	}
	if err := cmp.Or(x.Check("x", floats...), w.Check("w", floats...)); err != nil {
		return err
	}
	xs, n := x.Shape(), w.Shape()[Dim]
	w, err = w.Broadcast(Shape{xs[Batch], xs[Heads], xs[Dim], n})
	if err != nil {
		return fmt.Errorf("w: %w", err)
	}
	if err := y.CheckShape("y", Shape{xs[Batch], xs[Heads], xs[Seq], n}, "[B, H, S, N] of x and w", floats...); err != nil {
		return err
	}
	if err := checkOptional("bias", bias, Shape{1, 1, 1, n}, "[1, 1, 1, N] of w", floats...); err != nil {
		return err
	}
	if noElements(y) {
		return d.attend(ctx)
	}
	return p.Project(ctx, y, x, w, bias)
}

// Angles are rotation angles in device memory, as cosines and sines, for example of nn.RoPE. Layers
// whose rows have the same positions can share them.
type Angles struct {
	// Cos and Sin are [B, H, S, R/2] F32. The first three lengths are those of the
	// rotated tensor or 1.
	Cos, Sin Tensor
	// Rotation is which elements are pairs, and the direction.
	Rotation
}

// Release frees the memory of a.
func (a Angles) Release() {
	a.Cos.Release()
	a.Sin.Release()
}

// Rotate rotates pairs of elements of each row of x by a, see [Angles], and copies the
// other elements:
//
//	y_a = x_a·cos - x_b·sin    y_b = x_a·sin + x_b·cos
//
//	y, x [B, H, S, D] F32, F16 or BF16, each independently    R <= D
//
// Strides are arbitrary. y may be the same view as x, and must not overlap it otherwise.
//
// Errors: ErrShape and ErrDType name the operand, ErrUnsupported when the device does not
// rotate, and the backend's.
func (d *Device) Rotate(ctx context.Context, y, x Tensor, a Angles) (err error) {
	defer op.Annotate(&err, "rotate")
	r, err := need[backend.Rotator](ctx, d, "rotary embedding")
	if err != nil {
		return err
	}
	if err := cmp.Or(x.Check("x", floats...), a.Cos.Check("cos", F32), a.Sin.Check("sin", F32)); err != nil {
		return err
	}
	shape := x.Shape()
	if err := y.CheckShape("y", shape, "shape of x", floats...); err != nil {
		return err
	}
	angles := shape
	angles[Dim] = a.Cos.Shape()[Dim]
	if 2*angles[Dim] > shape[Dim] {
		return fmt.Errorf("cos %v rotates %d elements of a row, rows of x %v have %d: %w", a.Cos.Shape(), 2*angles[Dim], shape, shape[Dim], ErrShape)
	}
	// Angles are not broadcast over the pairs of a row.
	if n := a.Sin.Shape()[Dim]; n != angles[Dim] {
		return fmt.Errorf("sin has %d angles a row, cos has %d: %w", n, angles[Dim], ErrShape)
	}
	cos, err := a.Cos.Broadcast(angles)
	if err != nil {
		return fmt.Errorf("cos: %w", err)
	}
	sin, err := a.Sin.Broadcast(angles)
	if err != nil {
		return fmt.Errorf("sin: %w", err)
	}
	if noElements(y) {
		return d.attend(ctx)
	}
	return r.Rotate(ctx, y, x, cos, sin, a.Rotation)
}

// Merge combines results over two disjoint sets of keys into the result over their union,
// in place of the first:
//
//	m = max(lse, lsePart)    a = exp(lse-m)    b = exp(lsePart-m)
//	o = (a·o + b·oPart)/(a+b)    lse = m + log(a+b)
//
//	r.O, part.O [B, H, Sq, Dv] F32    r.LSE, part.LSE [B, H, Sq, 1] F32
//
// Merge is associative up to rounding: the keys of a long sequence can be divided in any way, also
// over several machines. [Call.RunInto] with an F32 output rounds nothing before the merge. A fully
// masked row changes nothing: its LSE is -Inf, or +Inf in results of FlashAttention 2. No call
// returns +Inf, because a row that sees an infinite score is NaN. [Call.Backward] takes +Inf in the
// same way. A NaN propagates.
//
// Errors: ErrShape and ErrDType name the operand, ErrUnsupported when the device does not
// merge.
func (d *Device) Merge(ctx context.Context, r, part Result) (err error) {
	defer op.Annotate(&err, "merge")
	m, err := need[backend.Merger](ctx, d, "merge")
	if err != nil {
		return err
	}
	if err := r.O.Check("o", F32); err != nil {
		return err
	}
	rows := r.O.Shape()
	sums := rows
	sums[Dim] = 1
	const rule = "[B, H, Sq, Dv] of o and [B, H, Sq, 1] of lse"
	if err := cmp.Or(part.O.CheckShape("the part's o", rows, rule, F32), r.LSE.CheckShape("lse", sums, rule, F32),
		part.LSE.CheckShape("the part's lse", sums, rule, F32)); err != nil {
		return err
	}
	if noElements(r.O) {
		return d.attend(ctx)
	}
	return m.Merge(ctx, r.O, r.LSE, part.O, part.LSE)
}
