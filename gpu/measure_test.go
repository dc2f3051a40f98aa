package gpu

import (
	"context"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// plausible reports whether a rate lies between that of a slow disk and that of all registers of the largest GPU.
func plausible(rate float64) bool { return rate > 1e6 && rate < 1e16 }

// TestCeilings measures rates and the time of a launch.
func TestCeilings(t *testing.T) {
	ones := func(b *Backend, n int) backend.Tensor {
		return filled(t, b, backend.F32, slices.Repeat([]float32{1}, n), backend.Shape{1, 1, 1, n})
	}
	b := open(t, Options{})
	launch, err := b.LaunchTime(t.Context())
	if err != nil || launch <= 0 || launch.Seconds() > 1 {
		t.Errorf("launch %v, %v", launch, err)
	}
	peak, err := b.PeakFLOPS(t.Context())
	if err != nil || !plausible(peak) || peak < 1e9 {
		t.Errorf("peak %v, %v", peak, err)
	}
	x, y := ones(b, 1<<21), ones(b, 1000)
	read, err := b.ReadBandwidth(t.Context(), x, backend.Tensor{}, y)
	if err != nil || !plausible(read) {
		t.Errorf("reads %v bytes/s, %v", read, err)
	}
	t.Logf("launch %v, peak %.3g GFLOP/s, read %.3g GB/s", launch, peak/1e9, read/1e9)
	if rate, err := b.ReadBandwidth(t.Context(), y); rate != 0 || err != nil {
		t.Errorf("4 KB: %v, %v", rate, err)
	}
	must.Fail(t, "a tensor of another device", must.Err(b.ReadBandwidth(t.Context(), ones(open(t, Options{}), 4))), backend.ErrDevice)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	must.Fail(t, "cancelled", must.Err(b.PeakFLOPS(ctx)), context.Canceled)
}

// TestKernelTime checks that the chunks of a call take no longer by the device's clock than the call by the host's.
func TestKernelTime(t *testing.T) {
	b := open(t, Options{})
	const n, d = 256, 64
	x := upload(t, b, host(t, backend.Shape{1, 1, n, d}, func(i int) float32 { return float32(i%17) / 17 }))
	o := alloc(t, b, backend.F32, x.Shape())
	var kernel atomic.Int64
	var chunks atomic.Int32
	ctx := backend.WithTrace(t.Context(), &backend.Trace{Kernel: func(took time.Duration) {
		kernel.Add(int64(took))
		chunks.Add(1)
	}})
	call := func(ctx context.Context) time.Duration {
		t.Helper()
		begin := time.Now()
		check(t, prepare(t, b, x, x, x, kernels.Options{}).RunInto(ctx, kernels.Result{O: o}))
		return time.Since(begin)
	}
	call(ctx) // compiles, and starts the clock
	kernel.Store(0)
	chunks.Store(0)
	wall := call(ctx)
	if chunks.Load() == 0 {
		t.Skip("this device or library has no timestamps")
	}
	if k := time.Duration(kernel.Load()); k <= 0 || k > wall+wall/50 {
		t.Errorf("%d chunks took %v by the device's clock, the call %v", chunks.Load(), k, wall)
	}
	t.Logf("%d chunks, %v of %v", chunks.Load(), time.Duration(kernel.Load()), wall)
}
