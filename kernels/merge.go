package kernels

import (
	"context"
	"fmt"

	"github.com/seed90331342/attn/backend"
)

// Merge combines results over two disjoint sets of keys into the result over their union,
// in place of the first:
//
//	m = max(lse, lsePart)    a = exp(lse-m)    b = exp(lsePart-m)
//	o = (a·o + b·oPart)/(a+b)    lse = m + log(a+b)
//
//	r.O, part.O [B, H, Sq, Dv] F32    r.LSE, part.LSE [B, H, Sq, 1] F32
//
// Merge is associative up to rounding: the keys of a long sequence can be processed in any
// parts and on several machines. Give [Call.RunInto] an F32 output to keep parts of 16-bit
// inputs exact. A part with an LSE of -Inf changes nothing.
//
// Errors: ErrShape and ErrDType name the operand, ErrUnsupported when the backend is no
// [backend.Merger].
func (d *Device) Merge(ctx context.Context, r, part Result) error {
	if err := d.merge(ctx, r, part); err != nil {
		return fmt.Errorf("merge: %w", err)
	}
	return nil
}

func (d *Device) merge(ctx context.Context, r, part Result) error {
	m, ok := d.be.(backend.Merger)
	if !ok {
		return d.lacks("merge")
	}
	if err := floats(backend.Operand{Name: "o", Tensor: r.O}); err != nil {
		return err
	}
	rows := r.O.Shape()
	sums := rows
	sums[backend.Dim] = 1
	for _, o := range []struct {
		name  string
		t     backend.Tensor
		shape backend.Shape
	}{
		{"o", r.O, rows}, {"the part's o", part.O, rows}, {"lse", r.LSE, sums}, {"the part's lse", part.LSE, sums},
	} {
		if err := expect(o.name, o.t, o.shape, "[B, H, Sq, Dv] of o and [B, H, Sq, 1] of lse", backend.F32); err != nil {
			return err
		}
	}
	return m.Merge(ctx, r.O, r.LSE, part.O, part.LSE)
}
