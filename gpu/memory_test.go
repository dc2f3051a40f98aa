package gpu

import (
	"fmt"
	"slices"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestHugeTensors shows that a tensor that no device can have is refused before the driver is asked for any part of it.
func TestHugeTensors(t *testing.T) {
	b, dev := faulty(t, Options{})
	asked := 0
	dev.Watch(func(string) { asked++ })
	for _, typ := range []backend.DeviceType{backend.CPU, backend.Discrete} {
		b.info.Type = typ
		for _, shape := range []backend.Shape{{1, 1, 1 << 20, 1 << 20}, {1 << 10, 1 << 10, 1 << 15, 1 << 15}} { // 4 TiB, 4 PiB
			_, err := b.Alloc(t.Context(), backend.F32, shape)
			want := fmt.Sprintf("%d bytes requested, ", backend.F32.Bytes(shape))
			must.Fail(t, fmt.Sprintf("%v on a device of type %v", shape, typ), err, backend.ErrMemory, want)
		}
	}
	if asked > 0 {
		t.Errorf("the device was asked %d times", asked)
	}
}

// TestFullDevice fills a device. An allocation gets the memory that the pool kept. One that
// the device has no room for is in host memory, and calls stream it through what is left,
// with the same bits. When nothing is left, they return ErrMemory.
func TestFullDevice(t *testing.T) {
	const sq, sk, d = 40, 8000, 64 // 2 MiB each for k and v
	full, _ := faulty(t, Options{})
	want := result(t, t.Context(), full, streamedCall(t, full, sq, sk, d))

	b, dev := faulty(t, Options{})
	onHost := func(x backend.Tensor) bool { return cut.StoreOf(x).Host != nil }
	alloc(t, b, backend.F32, backend.Shape{1, 1, 1, 1 << 20}).Release()
	dev.room = dev.Live().Bytes
	if x := alloc(t, b, backend.F32, backend.Shape{1, 1, 1, 3 << 18}); onHost(x) {
		t.Error("the pool kept its memory")
	}

	dev.room = dev.Live().Bytes + 3<<19
	c := streamedCall(t, b, sq, sk, d)
	if !onHost(c.K) || !onHost(c.V) {
		t.Fatal("the device has room")
	}
	if !slices.Equal(result(t, t.Context(), b, c), want) {
		t.Error("other bits than the resident call's")
	}
	b.dev.Pool.Drain()
	dev.room = dev.Live().Bytes
	must.Fail(t, "with no memory left", b.Attention(t.Context(), c), backend.ErrMemory)
	dev.room = 0
	if !slices.Equal(result(t, t.Context(), b, c), want) {
		t.Error("other bits afterwards")
	}
}

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
	q := input(t, be, shape)
	r := must.Get(kernels.NewDevice(be).Attention(t.Context(), q, q, q, kernels.Options{}))(t)
	r.Release()
	// Q and O at the same time, and at most a few times that for transfers.
	if peak := be.PeakMemory() - before; peak < 2*bytes || peak > 64*bytes {
		t.Errorf("two tensors of %d bytes held %d", bytes, peak)
	}
	if now := be.PeakMemory() - before; now < bytes || now >= 2*bytes {
		t.Errorf("one tensor of %d bytes is left, %d are held", bytes, now)
	}
}
