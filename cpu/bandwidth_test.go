package cpu

import (
	"context"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestCeilings shows that each tier measures its ceilings in its own instructions, and reads the operands that it is given.
func TestCeilings(t *testing.T) {
	eachTier(t, func(t *testing.T, tier string) {
		be := New(Options{Threads: 2, Tier: tier})
		if got := be.loops().Tier; tier != tierGonum && got != tier {
			t.Errorf("the ceiling is measured in %q", got)
		}
		if rate, err := be.PeakFLOPS(t.Context()); err != nil || !(rate > 0) {
			t.Errorf("%g operations a second, %v", rate, err)
		}
		var all []backend.Tensor
		for _, dtype := range []backend.DType{backend.F32, backend.F16, backend.BF16, backend.Bool, backend.Q8} {
			x := must.Get(be.Alloc(t.Context(), dtype, backend.Shape{1, 4, 1024, 16}))(t)
			all = append(all, x, backend.Tensor{}) // the zero Tensor has nothing to read
		}
		if rate, err := be.ReadBandwidth(t.Context(), all...); err != nil || !(rate > 0) {
			t.Errorf("%g bytes a second, %v", rate, err)
		}
		if rate, err := be.ReadBandwidth(t.Context()); rate != 0 || err != nil {
			t.Errorf("of nothing: %g, %v", rate, err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		must.Fail(t, "cancelled", must.Err(be.ReadBandwidth(ctx, all[0])), context.Canceled)
		all[0].Release()
		must.Fail(t, "released", must.Err(be.ReadBandwidth(t.Context(), all[0])), backend.ErrReleased)
		must.Do(t, be.Close())
		must.Fail(t, "after Close", must.Err(be.PeakFLOPS(t.Context())), backend.ErrClosed)
	})
}

// TestMemoryOfViews shows that a view's memory ends with its last element, whatever its strides.
func TestMemoryOfViews(t *testing.T) {
	x := must.Get(backend.AllocHost(backend.F32, backend.Shape{1, 2, 3, 4}))(t)
	for _, c := range []struct {
		why     string
		shape   backend.Shape
		strides backend.Strides
		offset  int
		want    int // bytes
	}{
		{"all", backend.Shape{1, 2, 3, 4}, backend.Strides{24, 12, 4, 1}, 0, 96},
		{"the last row", backend.Shape{1, 1, 1, 4}, backend.Strides{0, 0, 4, 1}, 20, 16},
		{"one head between two", backend.Shape{1, 1, 3, 4}, backend.Strides{24, 4, 8, 1}, 4, 80},
		{"a row repeated", backend.Shape{7, 7, 7, 4}, backend.Strides{0, 0, 0, 1}, 0, 16},
		{"nothing", backend.Shape{1, 0, 3, 4}, backend.Strides{24, 12, 4, 1}, 0, 0},
	} {
		s := must.Get(x.View(c.shape, c.strides, c.offset))(t)
		if got := len(memoryOf(&s)); got != c.want {
			t.Errorf("%s: %d bytes, want %d", c.why, got, c.want)
		}
	}
}
