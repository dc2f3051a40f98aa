package cpu

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/backendtest/must"
)

// BenchmarkQuantised reports the least times of decoding in q8, q4 and f8, by turns.
//
//	go test -run '^$' -bench Quantised -benchtime 9x ./cpu
func BenchmarkQuantised(b *testing.B) {
	for _, d := range []struct{ keys, dim, share, threads int }{{131072, 128, 1, 2}, {131072, 128, 4, 2}, {131072, 64, 1, 2}, {131072, 128, 1, 1}, {1024, 128, 1, 1}, {1024, 128, 4, 1}, {1024, 128, 8, 1}} {
		b.Run(fmt.Sprintf("k%dd%d/share%d/threads%d", d.keys, d.dim, d.share, d.threads), func(b *testing.B) {
			be := open(b, Options{Threads: d.threads})
			types, calls := []backend.DType{backend.Q8, backend.Q4, backend.F8}, []*backend.Call(nil)
			for _, dtype := range types {
				c := plain(b, 4, d.keys, d.dim)
				for i, t := range []*backend.Tensor{&c.Q, &c.K, &c.V, &c.O} {
					shape, dtype := t.Shape(), dtype
					if i%3 == 0 {
						shape[backend.Heads] *= d.share
						shape[backend.Seq], dtype = 1, backend.F32
					}
					var err error
					*t, err = backend.AllocHost(dtype, shape)
					must.Do(b, err)
					must.Do(b, be.Copy(b.Context(), []backend.Tensor{*t}, []backend.Tensor{random(b, uint64(i), shape)}))
				}
				calls = append(calls, c)
			}
			least := []float64{math.Inf(1), math.Inf(1), math.Inf(1)}
			for b.Loop() {
				for i, c := range calls {
					start := time.Now()
					must.Do(b, be.Attention(b.Context(), c))
					least[i] = min(least[i], time.Since(start).Seconds())
				}
			}
			for i, c := range calls {
				b.ReportMetric(1e3*least[i], "ms-"+types[i].String())
				b.ReportMetric(1e-9*float64(backend.NewPlan(c).Bytes)/least[i], "GB/s-"+types[i].String())
			}
			b.ReportMetric(least[0]/least[1], "q8/q4")
			b.ReportMetric(least[0]/least[2], "q8/f8")
		})
	}
}
