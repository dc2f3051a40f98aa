package backendtest

import (
	"errors"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
)

// Benchmark measures the named cases of [Cases] on a device as sub-benchmarks of b: prepared
// calls with preallocated outputs. The cases are short: what differs between them is the
// cost of an option in a short call. Cases that the device does not support are skipped.
func Benchmark(b *testing.B, dev *kernels.Device) {
	for _, c := range Cases() {
		b.Run(c.Name, func(b *testing.B) {
			on := c.build().on(b, dev)
			defer on.release()
			call, err := dev.Prepare(on.q.view, on.k.view, on.v.view, on.opt)
			if err != nil {
				b.Fatal(err)
			}
			out, err := call.Run(b.Context())
			if errors.Is(err, backend.ErrUnsupported) {
				b.Skip(err)
			}
			if err != nil {
				b.Fatal(err)
			}
			defer out.Release()
			plan, err := call.Plan(b.Context())
			if err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			for b.Loop() {
				if err := call.RunInto(b.Context(), out); err != nil {
					b.Fatal(err)
				}
				if err := dev.Wait(b.Context()); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(plan.FLOPs)*float64(b.N)/b.Elapsed().Seconds()/1e9, "GFLOP/s")
		})
	}
}
