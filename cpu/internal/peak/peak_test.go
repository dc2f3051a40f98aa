package peak

import (
	"bytes"
	"context"
	"testing"

	"github.com/seed90331342/attn/cpu/internal/vec"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestKernels shows that each loop counts the operations that it does. Rates are
// positive on any machine; BenchmarkCalls measures them.
func TestKernels(t *testing.T) {
	turns := map[string]int{"avx512": 16 * 16 * 2, "avx2": 12 * 8 * 2, "neon": 16 * 4 * 2, "gonum": 8 * 2}
	for _, k := range vec.Tiers() {
		do := operations(k)
		if rate, err := best(t.Context(), 1, []work{do}); err != nil || !(rate > 0) {
			t.Errorf("%s does %g FLOPS, %v", k.Tier, rate, err)
		}
		if got, want := do(), float64(8*fmaTurns*turns[k.Tier]); got != want {
			t.Errorf("%s counts %g operations, want %g", k.Tier, got, want)
		}
	}
}

// BenchmarkCalls measures the rate of each loop and the length of one call, which
// should be at most 20 microseconds, because assembly cannot be preempted.
func BenchmarkCalls(b *testing.B) {
	parts := split([][]byte{bytes.Repeat([]byte{1}, 4<<20)}, 1) // pages of zeros are one page
	for _, k := range vec.Tiers() {
		b.Run(k.Tier+"/fma", func(b *testing.B) {
			operations := 0
			for b.Loop() {
				operations += k.FMA(fmaTurns, 0.5, 1)
			}
			b.ReportMetric(float64(operations)/b.Elapsed().Seconds()/1e9, "GFLOP/s")
		})
		b.Run(k.Tier+"/read", func(b *testing.B) {
			read, loaded := 0, 0
			for b.Loop() {
				r := parts[0][read%len(parts[0])]
				k.Read(r.from, r.apart, r.turns)
				read, loaded = read+1, loaded+r.bytes()
			}
			b.ReportMetric(float64(loaded)/b.Elapsed().Seconds()/1e9, "GB/s")
		})
	}
}

func TestFLOPSOfEachTier(t *testing.T) {
	for _, k := range vec.Tiers() {
		for threads := 1; threads <= 3; threads += 2 {
			rate, err := FLOPS(t.Context(), k, threads)
			if err != nil || !(rate > 0) {
				t.Errorf("tier %q, %d threads: %g FLOPS, %v", k.Tier, threads, rate, err)
			}
			t.Logf("tier %q, %d threads: %.1f GFLOPS", k.Tier, threads, rate/1e9)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	must.Fail(t, "cancelled", must.Err(FLOPS(ctx, vec.Tiers()[0], 1)), context.Canceled)
}
