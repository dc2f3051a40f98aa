package kernels

import (
	"context"
	"fmt"

	"github.com/seed90331342/attn/backend"
)

// Angles are rotation angles in device memory, as cosines and sines. Angles of a position
// embedding come from nn.RoPE; those of any other one can be filled in directly. Layers
// whose rows have the same positions can share them.
type Angles struct {
	// Cos and Sin are [B, H, S, R/2] F32. The first three lengths are those of the
	// rotated tensor or 1.
	Cos, Sin backend.Tensor
	// Interleaved means that pair i of a row is its elements 2i and 2i+1, not i and
	// i+R/2.
	Interleaved bool
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
//	y, x [B, H, S, D] F32, F16 or BF16, each on its own    R <= D
//
// y may be x itself, the same view; no other overlap. Any strides.
//
// Errors: ErrShape and ErrDType name the operand, ErrUnsupported when the device is no
// [backend.Rotator], and the backend's.
func (d *Device) Rotate(ctx context.Context, y, x backend.Tensor, a Angles) error {
	if err := d.rotate(ctx, y, x, a); err != nil {
		return fmt.Errorf("rotate: %w", err)
	}
	return nil
}

func (d *Device) rotate(ctx context.Context, y, x backend.Tensor, a Angles) error {
	r, ok := d.be.(backend.Rotator)
	if !ok {
		return d.lacks("rotary embedding")
	}
	if err := floats(backend.Operand{Name: "x", Tensor: x}, backend.Operand{Name: "cos", Tensor: a.Cos}); err != nil {
		return err
	}
	shape := x.Shape()
	if err := expect("y", y, shape, "shape of x", backend.F32, backend.F16, backend.BF16); err != nil {
		return err
	}
	angles := shape
	angles[backend.Dim] = a.Cos.Shape()[backend.Dim]
	if 2*angles[backend.Dim] > shape[backend.Dim] {
		return fmt.Errorf("cos %v rotates %d elements of a row, rows of x %v have %d: %w", a.Cos.Shape(), 2*angles[backend.Dim], shape, shape[backend.Dim], backend.ErrShape)
	}
	var parts [2]backend.Tensor
	for i, o := range []backend.Operand{{Name: "cos", Tensor: a.Cos}, {Name: "sin", Tensor: a.Sin}} {
		if o.Tensor.DType() != backend.F32 {
			return fmt.Errorf("%s is %v, angles are f32: %w", o.Name, o.Tensor.DType(), backend.ErrDType)
		}
		// Angles are not broadcast over the pairs of a row.
		if got := o.Tensor.Shape()[backend.Dim]; got != angles[backend.Dim] {
			return fmt.Errorf("%s has %d angles a row, cos has %d: %w", o.Name, got, angles[backend.Dim], backend.ErrShape)
		}
		var err error
		if parts[i], err = o.Tensor.Broadcast(angles); err != nil {
			return fmt.Errorf("%s: %w", o.Name, err)
		}
	}
	return r.Rotate(ctx, y, x, parts[0], parts[1], a.Interleaved)
}
