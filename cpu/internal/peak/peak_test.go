package peak

import (
	"context"
	"errors"
	"testing"
)

// TestKernels shows that each loop counts the operations that it does. Rates are
// positive on any machine; BenchmarkCalls measures them.
func TestKernels(t *testing.T) {
	for _, k := range kernels() {
		if rate, err := best(t.Context(), 1, []work{k.operations}); err != nil || !(rate > 0) {
			t.Errorf("%s does %g FLOPS, %v", k.tier, rate, err)
		}
		const calls = 8
		if got, want := k.operations(), float64(calls*fmaTurns*k.flops); got != want {
			t.Errorf("%s counts %g operations, want %g", k.tier, got, want)
		}
		// 2 operations in each lane of at least 8 vectors of 1 lane.
		if k.flops < 16 || k.flops%16 != 0 {
			t.Errorf("%s does %d operations a turn", k.tier, k.flops)
		}
	}
}

// BenchmarkCalls measures the rate of each loop and the length of one call, which
// should be at most 20 microseconds, because assembly cannot be preempted.
func BenchmarkCalls(b *testing.B) {
	data := make([]byte, 4<<20)
	parts := split([][]byte{data}, 1)
	for _, k := range kernels() {
		b.Run(k.tier+"/fma", func(b *testing.B) {
			for b.Loop() {
				k.fma(fmaTurns, 0.5, 1)
			}
			b.ReportMetric(float64(fmaTurns*k.flops)*float64(b.N)/b.Elapsed().Seconds()/1e9, "GFLOP/s")
		})
		b.Run(k.tier+"/read", func(b *testing.B) {
			read, bytes := 0, 0
			for b.Loop() {
				r := parts[0][read%len(parts[0])]
				k.read(r.p, r.apart, r.turns)
				read, bytes = read+1, bytes+r.bytes()
			}
			b.ReportMetric(float64(bytes)/b.Elapsed().Seconds()/1e9, "GB/s")
		})
	}
}

func TestFLOPSOfEachTier(t *testing.T) {
	tiers := []string{""}
	for _, k := range kernels() {
		tiers = append(tiers, k.tier)
	}
	if tiers[len(tiers)-1] != "go" {
		t.Errorf("tiers are %v, the last must be plain Go", tiers)
	}
	for _, tier := range tiers {
		for threads := 1; threads <= 3; threads += 2 {
			rate, err := FLOPS(t.Context(), tier, threads)
			if err != nil || !(rate > 0) {
				t.Errorf("tier %q, %d threads: %g FLOPS, %v", tier, threads, rate, err)
			}
			t.Logf("tier %q, %d threads: %.1f GFLOPS", tier, threads, rate/1e9)
		}
	}
	if _, err := FLOPS(t.Context(), "avx1024", 1); !errors.Is(err, ErrTier) {
		t.Errorf("a tier that is not there: error %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := FLOPS(ctx, "", 1); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: error %v", err)
	}
}
