package cpu

import (
	"testing"

	"github.com/seed90331342/attn/backend"
)

// BenchmarkVariants measures the cost of options: GFLOP/s of the visible pairs.
func BenchmarkVariants(b *testing.B) {
	const heads, dim = 8, 64
	for _, c := range []struct {
		say    string
		sq, sk int
		dtype  backend.DType
		p      backend.Problem
	}{
		{"plain", 2048, 2048, backend.F32, backend.Problem{Visible: backend.Everything()}},
		{"causal", 2048, 2048, backend.F32, backend.Problem{Visible: backend.Visibility{Left: backend.Unbounded}}},
		{"window256", 2048, 2048, backend.F32, backend.Problem{Visible: backend.Visibility{Left: 256}}},
		{"softcap", 2048, 2048, backend.F32, backend.Problem{Softcap: 20, Visible: backend.Everything()}},
		{"f16", 2048, 2048, backend.F16, backend.Problem{Visible: backend.Everything()}},
		{"bf16", 2048, 2048, backend.BF16, backend.Problem{Visible: backend.Everything()}},
		{"short", 128, 128, backend.F32, backend.Problem{Visible: backend.Everything()}},
		{"decode", 1, 16384, backend.F32, backend.Problem{Visible: backend.Everything()}},
	} {
		b.Run(c.say, func(b *testing.B) {
			of := func(seed uint64, seq int) backend.Tensor {
				shape := backend.Shape{1, heads, seq, dim}
				x, err := backend.AllocHost(c.dtype, shape)
				if err != nil {
					b.Fatal(err)
				}
				to, err := openView("x", x)
				if err != nil {
					b.Fatal(err)
				}
				from, err := random(b, seed, shape).Float32s()
				if err != nil {
					b.Fatal(err)
				}
				for s := range heads * seq {
					to.store(from[s*dim:(s+1)*dim], 0, 0, s, 0)
				}
				return x
			}
			call := &backend.Call{Q: of(1, c.sq), K: of(2, c.sk), V: of(3, c.sk), O: of(4, c.sq), Problem: c.p}
			call.Scale = 0.125
			be := open(b, Options{})
			p, err := be.Plan(b.Context(), call)
			if err != nil {
				b.Fatal(err)
			}
			for b.Loop() {
				if err := be.Attention(b.Context(), call); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(p.FLOPs)*float64(b.N)/b.Elapsed().Seconds()/1e9, "GFLOP/s")
		})
	}
}
