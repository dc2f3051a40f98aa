package gpu

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
)

// TestKernelTime checks that the pieces of a call take no longer by the device's clock than
// the call by the host's.
func TestKernelTime(t *testing.T) {
	b := open(t, Options{})
	defer b.Close()
	const n, d = 256, 64
	data := make([]float32, n*d)
	for i := range data {
		data[i] = float32(i%17) / 17
	}
	x, err := kernels.NewDevice(b).FromFloat32(t.Context(), backend.F32, data, backend.Shape{1, 1, n, d})
	if err != nil {
		t.Fatal(err)
	}
	defer x.Release()
	o, err := b.Alloc(t.Context(), backend.F32, backend.Shape{1, 1, n, d})
	if err != nil {
		t.Fatal(err)
	}
	defer o.Release()
	var kernel atomic.Int64
	var pieces atomic.Int32
	ctx := backend.WithTrace(t.Context(), &backend.Trace{Kernel: func(took time.Duration) {
		kernel.Add(int64(took))
		pieces.Add(1)
	}})
	call := func(ctx context.Context) time.Duration {
		t.Helper()
		begin := time.Now()
		if err := prepare(t, b, x, x, x, kernels.Options{}).RunInto(ctx, kernels.Result{O: o}); err != nil {
			t.Fatal(err)
		}
		return time.Since(begin)
	}
	call(ctx) // compiles, and starts the clock
	kernel.Store(0)
	pieces.Store(0)
	wall := call(ctx)
	if pieces.Load() == 0 {
		t.Skip("this device or library has no timestamps")
	}
	if k := time.Duration(kernel.Load()); k <= 0 || k > wall+wall/50 {
		t.Errorf("%d pieces took %v by the device's clock, the call %v", pieces.Load(), k, wall)
	}
	t.Logf("%d pieces, %v of %v", pieces.Load(), time.Duration(kernel.Load()), wall)
}
