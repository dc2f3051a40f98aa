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
// Errors: ErrShape for different shapes or numbers of tensors, ErrUnsupported when the device does not copy.
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

// compute calls f, which computes results, unless err, that of the checks before it, is not nil. If no result has
// elements, it returns the errors of a closed device and of ctx.
func (d *Device) compute(ctx context.Context, err error, f func() error, results ...Tensor) error {
	switch {
	case err != nil:
		return err
	case slices.ContainsFunc(results, func(t Tensor) bool { return !noElements(t) }):
		return f()
	}
	return d.attend(ctx)
}

// Project computes a linear layer for each batch and head:
//
//	y = x·w + bias
//
//	y [B, H, S, N]    x [B, H, S, M]    w [B or 1, H or 1, M, N]    bias [1, 1, 1, N]
//
// All are F32, F16 or BF16, each independently. The zero Tensor as bias means none. A NaN in x or w propagates to y.
//
// Errors: ErrShape and ErrDType name the operand, ErrUnsupported when the device has no projections.
func (d *Device) Project(ctx context.Context, y, x, w, bias Tensor) (err error) {
	defer op.Annotate(&err, "project")
	p, err := need[backend.Projector](ctx, d, "projections")
	if err := cmp.Or(err, x.Check("x", floats...), w.Check("w", floats...)); err != nil {
		return err
	}
	xs, n := x.Shape(), w.Shape()[Dim]
	w, err = expanded("w", w, Shape{xs[Batch], xs[Heads], xs[Dim], n})
	err = cmp.Or(err, y.CheckShape("y", Shape{xs[Batch], xs[Heads], xs[Seq], n}, "[B, H, S, N] of x and w", floats...),
		checkOptional("bias", bias, Shape{1, 1, 1, n}, "[1, 1, 1, N] of w", floats...))
	return d.compute(ctx, err, func() error { return p.Project(ctx, y, x, w, bias) }, y)
}

// Angles are rotation angles in device memory, as cosines and sines, for example of nn.RoPE. Layers
// whose rows have the same positions can share them.
type Angles struct {
	// Cos and Sin are [B, H, S, R/2] F32. The first three lengths are those of the rotated tensor or 1.
	Cos, Sin Tensor
	// Rotation is which elements are pairs, and the direction.
	Rotation
}

// Release frees the memory of a.
func (a Angles) Release() {
	a.Cos.Release()
	a.Sin.Release()
}

// Rotation is how [Device.Rotate] rotates.
type Rotation struct {
	// Interleaved means that pair i of a row is (2i, 2i+1), not (i, i + R/2).
	Interleaved bool
	// Inverse rotates back: by -sin in place of sin. A rotation's gradient is rotated so.
	Inverse bool
}

// Rotate rotates pairs of elements of each row of x by a, see [Angles], and copies the other elements:
//
//	y_a = x_a·cos - x_b·sin    y_b = x_a·sin + x_b·cos
//
//	y, x [B, H, S, D] F32, F16 or BF16, each independently    R <= D
//
// Strides are arbitrary. y may be the same view as x, and must not overlap it otherwise.
//
// Errors: ErrShape and ErrDType name the operand, ErrUnsupported when the device does not rotate, and the backend's.
func (d *Device) Rotate(ctx context.Context, y, x Tensor, a Angles) (err error) {
	defer op.Annotate(&err, "rotate")
	r, err := ofRows[backend.Rotator](ctx, d, "rotary embedding", x, backend.Operand{Name: "y", Tensor: y})
	if err := cmp.Or(err, a.Cos.Check("cos", F32), a.Sin.Check("sin", F32)); err != nil {
		return err
	}
	shape := x.Shape()
	angles := shape
	angles[Dim] = a.Cos.Shape()[Dim]
	switch n := a.Sin.Shape()[Dim]; {
	case 2*angles[Dim] > shape[Dim]:
		return fmt.Errorf("cos %v rotates %d elements of a row, rows of x %v have %d: %w", a.Cos.Shape(), 2*angles[Dim], shape, shape[Dim], ErrShape)
	case n != angles[Dim]: // angles are not broadcast over the pairs of a row
		return fmt.Errorf("sin has %d angles a row, cos has %d: %w", n, angles[Dim], ErrShape)
	}
	cos, err := expanded("cos", a.Cos, angles)
	sin, bad := expanded("sin", a.Sin, angles)
	return d.compute(ctx, cmp.Or(err, bad), func() error { return r.Rotate(ctx, y, x, cos, sin, backend.Rotation(a.Rotation)) }, y)
}

// Merge combines results over two disjoint sets of keys into the result over their union, in place of the first:
//
//	m = max(lse, lsePart)    a = exp(lse-m)    b = exp(lsePart-m)
//	o = (a·o + b·oPart)/(a+b)    lse = m + log(a+b)
//
//	r.O, part.O [B, H, Sq, Dv] F32    r.LSE, part.LSE [B, H, Sq, 1] F32
//
// Merge is associative up to rounding: the keys of a long sequence can be divided in any way, also over several
// machines. [Call.RunInto] with an F32 output rounds nothing before the merge. A fully masked row changes nothing: its
// LSE is -Inf, or +Inf in results of FlashAttention 2. No call returns +Inf, because a row that sees an infinite score
// is NaN. [Call.Backward] takes +Inf in the same way. A NaN propagates.
//
// Errors: ErrShape and ErrDType name the operand, ErrUnsupported when the device does not merge.
func (d *Device) Merge(ctx context.Context, r, part Result) (err error) {
	defer op.Annotate(&err, "merge")
	m, err := need[backend.Merger](ctx, d, "merge")
	rows := r.O.Shape()
	sums := rows
	sums[Dim] = 1
	const rule = "[B, H, Sq, Dv] of o and [B, H, Sq, 1] of lse"
	err = cmp.Or(err, r.O.Check("o", F32), part.O.CheckShape("the part's o", rows, rule, F32),
		r.LSE.CheckShape("lse", sums, rule, F32), part.LSE.CheckShape("the part's lse", sums, rule, F32))
	return d.compute(ctx, err, func() error { return m.Merge(ctx, r.O, r.LSE, part.O, part.LSE) }, r.O)
}

// Norm is how [Device.Normalise] normalises.
type Norm struct {
	// Epsilon is ε, which is added to the mean of squares, from 2^-100 to 1. 0 means 1e-6.
	Epsilon float64
	// PlusOne means that the factor of element i is 1 + w_i, as in Gemma 3 and Qwen3-Next, not w_i.
	PlusOne bool
}

// Normalise computes the root-mean-square norm of each row of x (Zhang and Sennrich 2019), as models do with
// queries and keys:
//
//	r = 1/sqrt(mean_i x_i² + ε)    y_i = x_i·r·f_i    f_i = w_i, or 1 + w_i with PlusOne
//
//	y, x [B, H, S, D]    w [1, H or 1, 1, D]
//
// All are F32, F16 or BF16, each independently, and strides are arbitrary. The zero Tensor as w means factors of 1.
// The arithmetic is in float32, and y is rounded once. y may be the same view as x, and must not overlap it
// otherwise. A row of zeros yields zeros, and the squares of large elements do not overflow. A NaN makes its row NaN;
// an Inf becomes NaN and the rest of its row 0. Other rows do not change.
//
// The L2 norm of a row, x/sqrt(Σ x_i² + ε), is a norm with ε/D and weights of 1/sqrt(D).
//
// Errors: ErrShape and ErrDType name the operand, ErrOption for an ε that is neither 0 nor between 2^-100 and 1,
// ErrUnsupported when the device does not normalise, and the backend's.
func (d *Device) Normalise(ctx context.Context, y, x, w Tensor, n Norm) (err error) {
	defer op.Annotate(&err, "normalise")
	b, err := ofRows[backend.Normaliser](ctx, d, "norms", x, backend.Operand{Name: "y", Tensor: y})
	w, bad := normWeights(w, x.Shape(), &n)
	return d.compute(ctx, cmp.Or(err, bad), func() error { return b.Normalise(ctx, y, x, w, backend.Norm(n)) }, y)
}

// NormaliseBackward computes the gradients of [Device.Normalise] with respect to x and w from dy, that with respect to y:
//
//	dx_i = r·(f_i·dy_i - x_i·r²·mean_j f_j·dy_j·x_j)    dw_i = dy_i·x_i·r
//
//	dx, dy [B, H, S, D] F32, F16 or BF16    dw [B, H, S, D] F32    x, w as for Normalise
//
// dw has a term for each row, and their sum over the rows that share w is the gradient of w. [Device.Project] with ones
// as x computes the sum over S. The zero Tensor as dw means that it is not requested. dx may be the same view as dy.
//
// Errors as for Normalise.
func (d *Device) NormaliseBackward(ctx context.Context, dx, dw, dy, x, w Tensor, n Norm) (err error) {
	defer op.Annotate(&err, "normalise backward")
	b, err := ofRows[backend.Normaliser](ctx, d, "norms", x, backend.Operand{Name: "dy", Tensor: dy}, backend.Operand{Name: "dx", Tensor: dx})
	err = cmp.Or(err, checkOptional("dw", dw, x.Shape(), "shape of x", F32))
	w, bad := normWeights(w, x.Shape(), &n)
	return d.compute(ctx, cmp.Or(err, bad), func() error { return b.NormaliseBackward(ctx, dx, dw, dy, x, w, backend.Norm(n)) }, dx)
}

// normWeights returns w, broadcast to the shape of x, and sets the default of n.
func normWeights(w Tensor, x Shape, n *Norm) (Tensor, error) {
	n.Epsilon = cmp.Or(n.Epsilon, 1e-6)
	if !(n.Epsilon >= op.MinEpsilon && n.Epsilon <= op.MaxEpsilon) { // or NaN
		return w, fmt.Errorf("epsilon is %v, it must be from 2^-100 to 1, or 0 for 1e-6: %w", n.Epsilon, ErrOption)
	}
	if w.IsZero() {
		return w, nil
	}
	w, err := repeated("w", w, Shape{1, x[Heads], 1, x[Dim]}, Heads, "[1, H or 1, 1, D] of x")
	if err != nil {
		return w, err
	}
	return w.Broadcast(x)
}

// repeated returns an operand of a shape, or with one element along axis, repeated to that shape.
func repeated(name string, t Tensor, shape Shape, axis int, rule string) (Tensor, error) {
	stored := shape
	if t.Shape()[axis] == 1 {
		stored[axis] = 1
	}
	if err := t.CheckShape(name, stored, rule, floats...); err != nil {
		return t, err
	}
	return t.Broadcast(shape)
}

// Gate multiplies each element of x by a function of its gate, as models do with the output of attention, in feed-forward
// layers and for the decays of linear attention:
//
//	y = x·f(gate)    f is Sigmoid, SiLU, Softplus or Identity
//
//	y, x [B, H, S, D]    gate [B, H, S, D] or [B, H, S, 1]
//
// All are F32, F16 or BF16, each independently, and strides are arbitrary. y may be the same view as x, and must not
// overlap it otherwise. The arithmetic is in float32.
//
// At a gate of ±Inf, f is its limit: 0 or 1 for Sigmoid, 0 or +Inf for SiLU and Softplus, ±Inf for Identity. A NaN
// makes its element NaN. Results of f below 2^-125 may become 0, as Softplus does for gates below -86.
//
// Errors: ErrShape and ErrDType name the operand, ErrOption for another f, ErrUnsupported when the device has no gates,
// and the backend's.
func (d *Device) Gate(ctx context.Context, y, x, gate Tensor, f Activation) (err error) {
	defer op.Annotate(&err, "gate")
	b, err := ofRows[backend.Gater](ctx, d, "gates", x, backend.Operand{Name: "y", Tensor: y})
	gate, bad := gates(gate, x.Shape(), f)
	return d.compute(ctx, cmp.Or(err, bad), func() error { return b.Gate(ctx, y, x, gate, f) }, y)
}

// GateBackward computes the gradients of [Device.Gate] with respect to x and gate from dy, that with respect to y:
//
//	dx = dy·f(gate)    dgate = dy·x·f'(gate)
//
//	dx, dy [B, H, S, D] F32, F16 or BF16    dgate [B, H, S, D] F32    x, gate as for Gate
//
// dgate has a term for each element: the gradient of a gate [B, H, S, 1] is their sum over D. dx may be the same view
// as dy.
//
// Errors as for Gate.
func (d *Device) GateBackward(ctx context.Context, dx, dgate, dy, x, gate Tensor, f Activation) (err error) {
	defer op.Annotate(&err, "gate backward")
	b, err := ofRows[backend.Gater](ctx, d, "gates", x, backend.Operand{Name: "dy", Tensor: dy}, backend.Operand{Name: "dx", Tensor: dx})
	err = cmp.Or(err, dgate.CheckShape("dgate", x.Shape(), "shape of x", F32))
	gate, bad := gates(gate, x.Shape(), f)
	return d.compute(ctx, cmp.Or(err, bad), func() error { return b.GateBackward(ctx, dx, dgate, dy, x, gate, f) }, dx)
}

// gates returns the gates of x, broadcast to its shape.
func gates(gate Tensor, x Shape, f Activation) (Tensor, error) {
	if f < Sigmoid || f > Identity {
		return gate, fmt.Errorf("activation is %d, it must be Sigmoid, SiLU, Softplus or Identity: %w", f, ErrOption)
	}
	return repeated("gate", gate, x, Dim, "[B, H, S, D] or [B, H, S, 1] of x")
}

// ofRows checks the operands of a call that computes rows, x and those of its shape, and returns an ability of d.
func ofRows[T any](ctx context.Context, d *Device, ability string, x Tensor, same ...backend.Operand) (T, error) {
	b, err := need[T](ctx, d, ability)
	err = cmp.Or(err, x.Check("x", floats...))
	for _, o := range same {
		err = cmp.Or(err, o.Tensor.CheckShape(o.Name, x.Shape(), "shape of x", floats...))
	}
	return b, err
}
