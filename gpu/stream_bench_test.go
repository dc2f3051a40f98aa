package gpu

import (
	"testing"
	"time"

	"github.com/seed90331342/attn/backend"
)

// BenchmarkStreamed runs a call with its operands on the device and in host memory, in
// turns, and reports the speed of the second relative to the first. On hardware it has 256k
// keys and queries of 64 columns, 256 MiB of operands, and device memory lowered to 256 MiB,
// none of it for operands. On a software driver, where it only shows that streaming works,
// it has a 16th of the keys and 512 queries.
func BenchmarkStreamed(b *testing.B) {
	resident := open(b, Options{})
	defer resident.Close()
	sq, sk, memory := 256<<10, 256<<10, int64(256<<20)
	if resident.Info().Type == backend.CPU {
		sq, sk, memory = 512, 16<<10, 8<<20
	}
	streamed := openFull(b, Options{MemoryBytes: memory})
	defer streamed.Close()
	var took [2]time.Duration
	var calls [2]*backend.Call
	for i, be := range []*Backend{resident, streamed} {
		q, k := host(b, backend.Shape{1, 1, sq, 64}, wave), host(b, backend.Shape{1, 1, sk, 64}, wave)
		calls[i] = &backend.Call{
			Q: upload(b, be, q), K: upload(b, be, k), V: upload(b, be, k), O: alloc(b, be, backend.F32, q.Shape()),
			Problem: backend.Problem{Scale: 0.125, Visible: backend.Everything()},
		}
		if err := be.Attention(b.Context(), calls[i]); err != nil { // compiles
			b.Fatal(err)
		}
	}
	plan, err := streamed.Plan(b.Context(), calls[1])
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		for i, be := range []*Backend{resident, streamed} {
			start := time.Now()
			if err := be.Attention(b.Context(), calls[i]); err != nil {
				b.Fatal(err)
			}
			if err := be.Wait(b.Context()); err != nil {
				b.Fatal(err)
			}
			took[i] += time.Since(start)
		}
	}
	b.ReportMetric(100*took[0].Seconds()/took[1].Seconds(), "%-of-resident")
	b.ReportMetric(float64(plan.FLOPs)*float64(b.N)/took[1].Seconds()/1e9, "GFLOP/s")
	b.ReportMetric(float64(plan.Streamed)*float64(b.N)/took[1].Seconds()/1e9, "streamed-GB/s")
}
