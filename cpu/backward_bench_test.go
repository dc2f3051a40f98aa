package cpu

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/seed90331342/attn/backend"
)

// backwardCases are the rows of the table that BenchmarkBackward prints.
var backwardCases = []vectorCase{
	{name: "s1024d64", heads: 8, sq: 1024, dim: 64, want: [2]float64{78, 78}},
	{name: "s4096d64", heads: 8, sq: 4096, dim: 64, want: [2]float64{78, 78}},
	{name: "s8192d64", heads: 8, sq: 8192, dim: 64, want: [2]float64{78, 78}},
	{name: "s1024d128", heads: 8, sq: 1024, dim: 128, want: [2]float64{78, 78}},
	{name: "s4096d128", heads: 8, sq: 4096, dim: 128, want: [2]float64{78, 78}},
	{name: "s4096d64/causal", heads: 8, sq: 4096, dim: 64, window: -1, want: [2]float64{72, 72}},
	{name: "s4096d128/causal", heads: 8, sq: 4096, dim: 128, window: -1, want: [2]float64{72, 72}},
	{name: "h1s4096d64", heads: 1, sq: 4096, dim: 64},
	{name: "s2048d64/bias", heads: 8, sq: 2048, dim: 64, bias: true},
	{name: "s2048d64/softcap", heads: 8, sq: 2048, dim: 64, softcap: 20},
	{name: "s2048d64/f16", heads: 8, sq: 2048, dim: 64, dtype: backend.F16},
	{name: "s1024d64/gonum", heads: 8, sq: 1024, dim: 64, tier: tierGonum},
}

// BenchmarkBackward is BenchmarkVector for gradients of q, k and v: 2.5 times the operations
// of the forward call.
func BenchmarkBackward(b *testing.B) {
	for _, c := range backwardCases {
		for _, threads := range []int{1, 2} {
			b.Run(fmt.Sprintf("%s/threads%d", c.name, threads), func(b *testing.B) {
				be, err := Open(Options{Threads: threads, Tier: c.tier})
				if err != nil {
					b.Skip(err)
				}
				defer be.Close()
				g := backwardOf(b, be, *c.call(b))
				p, err := be.PlanBackward(b.Context(), g)
				if err != nil {
					b.Fatal(err)
				}
				benchCeiling(b, c.want[threads-1], "GFLOP/s", float64(p.FLOPs),
					func() (float64, error) { return be.PeakFLOPS(b.Context()) },
					func() error { return be.Backward(b.Context(), g) })
			})
		}
	}
}

// benchCeiling measures calls of run, which does work operations or reads work bytes, and the
// ceiling in turns. It reports the median of their ratios in percent, next to want.
func benchCeiling(b *testing.B, want float64, unit string, work float64, ceiling func() (float64, error), run func() error) {
	b.Helper()
	if err := run(); err != nil {
		b.Fatal(err)
	}
	var shares, rates []float64
	for b.Loop() {
		most, err := ceiling()
		if err != nil {
			b.Fatal(err)
		}
		calls, start := 0, time.Now()
		for time.Since(start) < 40*time.Millisecond {
			if err := run(); err != nil {
				b.Fatal(err)
			}
			calls++
		}
		rate := work * float64(calls) / time.Since(start).Seconds()
		shares, rates = append(shares, 100*rate/most), append(rates, rate/1e9)
	}
	slices.Sort(shares)
	slices.Sort(rates)
	b.ReportMetric(shares[len(shares)/2], "%ofCeiling")
	b.ReportMetric(want, "%wanted")
	b.ReportMetric(rates[len(rates)/2], unit)
	b.ReportMetric(0, "ns/op")
}
