package gpu

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/meter"
	"github.com/seed90331342/attn/kernels"
)

// BenchmarkProvider times the same work through the WebGPU library of the build, to compare
// the libraries:
//
//	go test -run '^$' -bench Provider ./gpu
//	CGO_ENABLED=0 go test -run '^$' -bench Provider ./gpu
func BenchmarkProvider(b *testing.B) {
	be := open(b, Options{})
	defer be.Close()
	seq, heads := 4096, 16
	if be.info.Type == backend.CPU { // half a second on a software driver, not minutes
		seq, heads = 512, 4
	}
	const dim, keys = 64, 32768

	b.Run("launch", func(b *testing.B) {
		var times []float64
		for b.Loop() {
			took, err := be.LaunchTime(b.Context())
			if err != nil {
				b.Fatal(err)
			}
			times = append(times, float64(took))
		}
		b.ReportMetric(median(times), "ns/launch")
	})
	for _, c := range []struct {
		name  string
		dtype backend.DType
		seqQ  int
		seqK  int
	}{
		{"attention/f32", backend.F32, seq, seq},
		{"attention/bf16", backend.BF16, seq, seq},
		{"decode/f32", backend.F32, 1, keys},
	} {
		b.Run(c.name, func(b *testing.B) {
			q := drawn(b, be, c.dtype, backend.Shape{1, heads, c.seqQ, dim})
			k := drawn(b, be, c.dtype, backend.Shape{1, heads, c.seqK, dim})
			v := drawn(b, be, c.dtype, backend.Shape{1, heads, c.seqK, dim})
			o := drawn(b, be, c.dtype, backend.Shape{1, heads, c.seqQ, dim})
			call := prepare(b, be, q, k, v, kernels.Options{})
			repeat(b, be, 4*float64(heads*c.seqQ*c.seqK*dim), func(ctx context.Context) error {
				return call.RunInto(ctx, kernels.Result{O: o})
			})
		})
	}
	b.Run("stages", func(b *testing.B) {
		x := drawn(b, be, backend.F32, backend.Shape{1, heads, seq, dim})
		o := drawn(b, be, backend.F32, backend.Shape{1, heads, seq, dim})
		s := drawn(b, be, backend.F32, backend.Shape{1, heads, seq, seq})
		flops := 2 * float64(heads*seq*seq*dim)
		b.Run("QK", func(b *testing.B) {
			repeat(b, be, flops, func(ctx context.Context) error { return be.QK(ctx, s, x, x) })
		})
		b.Run("softmax", func(b *testing.B) {
			p := &backend.Problem{Scale: 1, Visible: backend.Everything()}
			repeat(b, be, 0, func(ctx context.Context) error { return be.Softmax(ctx, s, backend.Tensor{}, p) })
		})
		b.Run("PV", func(b *testing.B) {
			repeat(b, be, flops, func(ctx context.Context) error { return be.PV(ctx, o, s, x) })
		})
	})
	for _, c := range []struct {
		name    string
		measure func(ctx context.Context) (float64, error)
		unit    string
	}{
		{"fma", be.PeakFLOPS, "GFLOP/s"},
		{"copy", func(ctx context.Context) (float64, error) {
			return meter.Copy(ctx, be.dev, be.info.Type == backend.CPU)
		}, "GB/s"},
		{"workgroup memory", func(ctx context.Context) (float64, error) { return meter.WorkgroupMemory(ctx, be.dev) }, "GB/s"},
		{"upload", func(ctx context.Context) (float64, error) { return meter.Upload(ctx, be.dev, be) }, "GB/s"},
		{"download", func(ctx context.Context) (float64, error) { return meter.Download(ctx, be.dev, be) }, "GB/s"},
	} {
		b.Run(c.name, func(b *testing.B) {
			var rates []float64
			for b.Loop() {
				rate, err := c.measure(b.Context())
				if err != nil {
					b.Fatal(err)
				}
				rates = append(rates, rate/1e9)
			}
			b.ReportMetric(median(rates), c.unit)
		})
	}
}

// drawn returns a tensor of numbers between 0 and 1, released at the end of b.
func drawn(b *testing.B, be *Backend, dtype backend.DType, shape backend.Shape) backend.Tensor {
	b.Helper()
	data := make([]float32, shape.Elements())
	for i := range data {
		data[i] = float32(i*7919%1024) / 1024
	}
	t, err := kernels.NewDevice(be).FromFloat32(b.Context(), dtype, data, shape)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(t.Release)
	return t
}

// repeat times call after a warm-up. It reports the medians by the host's clock and the
// device's, if there is one, and the operations a second.
func repeat(b *testing.B, be *Backend, flops float64, call func(ctx context.Context) error) {
	b.Helper()
	var walls, kernels []float64
	for n := -1; n < 0 || b.Loop(); n++ {
		begin := time.Now()
		if err := call(b.Context()); err != nil {
			b.Fatal(err)
		}
		if err := be.Wait(b.Context()); err != nil {
			b.Fatal(err)
		}
		if n >= 0 {
			walls = append(walls, time.Since(begin).Seconds())
		}
	}
	var kernel time.Duration
	ctx := backend.WithTrace(b.Context(), &backend.Trace{Kernel: func(took time.Duration) { kernel += took }})
	for range min(len(walls), 5) {
		kernel = 0
		if err := call(ctx); err != nil {
			b.Fatal(err)
		}
		kernels = append(kernels, kernel.Seconds())
	}
	b.ReportMetric(median(walls)*1e3, "ms/median")
	if k := median(kernels); k > 0 {
		b.ReportMetric(k*1e3, "kernel-ms")
	}
	if flops > 0 {
		b.ReportMetric(flops/median(walls)/1e9, "GFLOP/s")
	}
}

func median(xs []float64) float64 {
	slices.Sort(xs)
	return xs[len(xs)/2]
}
