package gpu

import (
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
)

// TestPeakMemory checks that the peak counts what tensors and calls hold on the device, and
// starts again when it is read.
func TestPeakMemory(t *testing.T) {
	be := open(t, Options{})
	before := be.PeakMemory()
	if be.PeakMemory() > before {
		t.Error("the peak rises without an allocation")
	}
	before = be.PeakMemory()
	shape := backend.Shape{1, 2, 64, 32}
	bytes := int64(4 * shape.Elements())
	q, err := kernels.NewDevice(be).FromFloat32(t.Context(), backend.F32, make([]float32, shape.Elements()), shape)
	if err != nil {
		t.Fatal(err)
	}
	defer q.Release()
	r, err := kernels.NewDevice(be).Attention(t.Context(), q, q, q, kernels.Options{})
	if err != nil {
		t.Fatal(err)
	}
	r.Release()
	// Q and O at the same time, and at most a few times that for transfers.
	if peak := be.PeakMemory() - before; peak < 2*bytes || peak > 64*bytes {
		t.Errorf("two tensors of %d bytes held %d", bytes, peak)
	}
	if now := be.PeakMemory() - before; now < bytes || now >= 2*bytes {
		t.Errorf("one tensor of %d bytes is left, %d are held", bytes, now)
	}
}
