package kernels

import (
	"cmp"
	"context"
	"fmt"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/internal/op"
)

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
	if err != nil {
		return err
	}
	if w, err = normWeights(w, x.Shape(), &n); err != nil {
		return err
	}
	if noElements(y) {
		return d.attend(ctx)
	}
	return b.Normalise(ctx, y, x, w, n)
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
	if err != nil {
		return err
	}
	if err := checkOptional("dw", dw, x.Shape(), "shape of x", F32); err != nil {
		return err
	}
	if w, err = normWeights(w, x.Shape(), &n); err != nil {
		return err
	}
	if noElements(dx) {
		return d.attend(ctx)
	}
	return b.NormaliseBackward(ctx, dx, dw, dy, x, w, n)
}

// normWeights returns w, broadcast to the shape of x, and sets the default of n.
func normWeights(w Tensor, x Shape, n *Norm) (Tensor, error) {
	n.Epsilon = cmp.Or(n.Epsilon, 1e-6)
	if !(n.Epsilon >= backend.MinEpsilon && n.Epsilon <= backend.MaxEpsilon) { // or NaN
		return w, fmt.Errorf("epsilon is %v, it must be from 2^-100 to 1, or 0 for 1e-6: %w", n.Epsilon, ErrOption)
	}
	if w.IsZero() {
		return w, nil
	}
	shape := Shape{1, 1, 1, x[Dim]}
	if w.Shape()[Heads] != 1 {
		shape[Heads] = x[Heads]
	}
	if err := w.CheckShape("w", shape, "[1, H or 1, 1, D] of x", floats...); err != nil {
		return w, err
	}
	return w.Broadcast(x)
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
	if err != nil {
		return err
	}
	if gate, err = gates(gate, x.Shape(), f); err != nil {
		return err
	}
	if noElements(y) {
		return d.attend(ctx)
	}
	return b.Gate(ctx, y, x, gate, f)
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
	if err != nil {
		return err
	}
	if err := dgate.CheckShape("dgate", x.Shape(), "shape of x", F32); err != nil {
		return err
	}
	if gate, err = gates(gate, x.Shape(), f); err != nil {
		return err
	}
	if noElements(dx) {
		return d.attend(ctx)
	}
	return b.GateBackward(ctx, dx, dgate, dy, x, gate, f)
}

// gates returns the gates of x, broadcast to its shape.
func gates(gate Tensor, x Shape, f Activation) (Tensor, error) {
	if f < Sigmoid || f > Identity {
		return gate, fmt.Errorf("activation is %d, it must be Sigmoid, SiLU, Softplus or Identity: %w", f, ErrOption)
	}
	shape := x
	if gate.Shape()[Dim] == 1 {
		shape[Dim] = 1
	}
	if err := gate.CheckShape("gate", shape, "[B, H, S, D] or [B, H, S, 1] of x", floats...); err != nil {
		return gate, err
	}
	return gate.Broadcast(x)
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
