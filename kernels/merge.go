package kernels

import (
	"context"
	"fmt"

	"github.com/seed90331342/attn/backend"
)

// Merge combines results over two disjoint sets of keys into the result over
// their union, in place of the first:
//
//	m = max(lse, lsePart)    a = exp(lse-m)    b = exp(lsePart-m)
//	o = (a·o + b·oPart)/(a+b)    lse = m + log(a+b)
//
//	r.O, part.O [B, H, Sq, Dv] F32    r.LSE, part.LSE [B, H, Sq, 1] F32
//
// It is associative up to rounding: long key sequences can come in parts, from
// anywhere, in any grouping. Ask [AttentionInto] for an F32 output to keep
// parts of 16-bit inputs exact. A part whose LSE is -Inf changes nothing.
//
// Errors: ErrShape and ErrDType for operands that are not as above,
// ErrUnsupported when the backend is no [backend.Merger], and the backend's.
func Merge(ctx context.Context, be backend.Backend, r, part Result) error {
	m, ok := be.(backend.Merger)
	if !ok {
		return fmt.Errorf("merge: %s: %w", be.Info().Name, backend.ErrUnsupported)
	}
	if err := floats(backend.Operand{Name: "o", Tensor: r.O}); err != nil {
		return fmt.Errorf("merge: %w", err)
	}
	rows := r.O.Shape()
	lse := rows
	lse[backend.Dim] = 1
	for _, o := range []struct {
		name  string
		t     backend.Tensor
		shape backend.Shape
	}{
		{"o", r.O, rows}, {"the part's o", part.O, rows}, {"lse", r.LSE, lse}, {"the part's lse", part.LSE, lse},
	} {
		if err := expect(o.name, o.t, o.shape, "[B, H, Sq, Dv] of o and [B, H, Sq, 1] of its lse", backend.F32); err != nil {
			return fmt.Errorf("merge: %w", err)
		}
	}
	if err := m.Merge(ctx, r.O, r.LSE, part.O, part.LSE); err != nil {
		return fmt.Errorf("merge: %w", err)
	}
	return nil
}
