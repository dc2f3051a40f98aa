package kernels_test

import (
	"testing"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
)

// BenchmarkRegions times calls of several regions and the plain call of the same tensors,
// in turns, and reports the speed for each visible pair as percent of plain.
func BenchmarkRegions(b *testing.B) {
	dev := kernels.NewDevice(cpu.New(cpu.Options{}))
	defer dev.Close()
	const heads, seq, dim = 8, 2048, 64
	s := backend.Shape{1, heads, seq, dim}
	tensor := func(seed uint64) backend.Tensor {
		x, err := dev.FromFloat32(b.Context(), backend.F32, normal(s.Elements(), seed), s)
		if err != nil {
			b.Fatal(err)
		}
		return x
	}
	q, k, v, o := tensor(1), tensor(2), tensor(3), tensor(4)
	ids := make([]int32, seq)
	mixed := make([]int32, seq)
	cu := []int{0}
	for i := range ids {
		ids[i] = int32(i / 256)
		mixed[i] = int32(min(i/32, 32)) // 32 documents of 32, one of 1024
	}
	for i := 32; i <= 1024; i += 32 {
		cu = append(cu, i)
	}
	cu = append(cu, seq)
	run := func(opt kernels.Options) (backend.Plan, func() error) {
		c := prepare(b, dev, q, k, v, opt)
		p, err := c.Plan(b.Context())
		if err != nil {
			b.Fatal(err)
		}
		return p, func() error { return c.RunInto(b.Context(), kernels.Result{O: o}) }
	}
	for _, c := range []struct {
		name string
		opt  kernels.Options
	}{
		{"causal", kernels.Options{Causal: true}},
		{"prefix of half", kernels.Options{Causal: true, Prefix: []int{seq / 2}}},
		{"8 documents of 256", kernels.Options{QSegments: [][]int32{ids}}},
		{"32 documents of 32 and one of 1024", kernels.Options{QSegments: [][]int32{mixed}}},
		{"32 documents of 32 and one of 1024, causal", kernels.Options{Causal: true, QSegments: [][]int32{mixed}}},
		{"packed sequences of the same", kernels.Options{CuQ: cu}},
	} {
		b.Run(c.name, func(b *testing.B) {
			all, plain := run(kernels.Options{})
			part, call := run(c.opt)
			var took [2]time.Duration
			for b.Loop() {
				for n, f := range []func() error{plain, call} {
					began := time.Now()
					if err := f(); err != nil {
						b.Fatal(err)
					}
					took[n] += time.Since(began)
				}
			}
			rate := func(p backend.Plan, d time.Duration) float64 {
				return float64(p.FLOPs) * float64(b.N) / d.Seconds() / 1e9
			}
			b.ReportMetric(rate(part, took[1]), "GFLOP/s")
			b.ReportMetric(100*rate(part, took[1])/rate(all, took[0]), "%plain")
		})
	}
}
