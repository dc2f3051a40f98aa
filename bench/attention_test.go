package bench_test

import (
	"fmt"
	"testing"

	"github.com/seed90331342/attn/backend/backendtest"
	"github.com/seed90331342/attn/bench"
	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
)

// Every element type yields figures on the CPU, with the ceiling of its threads.
func TestOnTheCPU(t *testing.T) {
	dev := kernels.NewDevice(cpu.New(cpu.Options{Threads: 1}))
	defer dev.Close()
	for _, dtype := range []kernels.DType{kernels.F32, kernels.F16, kernels.BF16} {
		r, err := bench.Run(t.Context(), []*kernels.Device{dev}, bench.Config{Series: []bench.Series{{
			Seqs: []int{64, 100}, Batch: 2, Heads: 2, KVHeads: 1, Dim: 16, Causal: true, DType: dtype}}})
		if err != nil {
			t.Fatal(err)
		}
		if err := r.Err(); err != nil {
			t.Errorf("%v: %v", dtype, err)
		}
		for _, c := range r.Cases {
			if c.Status != report.OK || c.Threads != 1 || c.DType != dtype.String() || c.GFLOPS == nil || c.SpeedupVsStages == nil || *c.MaxError > *c.ErrorBound {
				t.Errorf("%v: %+v", dtype, c)
			}
			for _, r := range c.Rounds {
				if len(r.PaceS) != len(r.TimesS) {
					t.Errorf("%v: %d calls with %d pieces of arithmetic", dtype, len(r.TimesS), len(r.PaceS))
				}
			}
		}
	}
}

// BenchmarkCases measures the named cases of the conformance suite:
//
//	go test -run '^$' -bench 'Cases/causal' ./bench
func BenchmarkCases(b *testing.B) {
	dev := kernels.NewDevice(cpu.New(cpu.Options{}))
	defer dev.Close()
	backendtest.Benchmark(b, dev)
}

// The benchmark's name is its case, so that other tools can distinguish cases:
//
//	BenchmarkAttention/cpu/f32/b1h8s1024d64
func BenchmarkAttention(b *testing.B) {
	be := cpu.New(cpu.Options{})
	defer be.Close()
	for _, causal := range []bool{false, true} {
		for _, seq := range []int{256, 1024, 4096} {
			c := bench.Case{Series: bench.Series{Batch: 1, Heads: 8, KVHeads: 8, Dim: 64, Causal: causal}, SeqK: seq}
			b.Run(fmt.Sprintf("%s/%v", be.Info().Name, c), func(b *testing.B) { attention(b, be, c) })
		}
	}
}

func attention(b *testing.B, be *cpu.Backend, c bench.Case) {
	ctx, dev := b.Context(), kernels.NewDevice(be)
	q, err := dev.Alloc(ctx, c.DType, kernels.Shape{c.Batch, c.Heads, c.SeqK, c.Dim})
	if err != nil {
		b.Fatal(err)
	}
	// Speed does not depend on the numbers, if they are ordinary: one tensor of zeros
	// serves as all operands.
	call, err := dev.Prepare(q, q, q, kernels.Options{Causal: c.Causal})
	if err != nil {
		b.Fatal(err)
	}
	out, err := call.Run(ctx)
	if err != nil {
		b.Fatal(err)
	}
	plan, err := call.Plan(ctx)
	if err != nil {
		b.Fatal(err)
	}
	peak, err := be.PeakFLOPS(ctx)
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		if err := call.RunInto(ctx, out); err != nil {
			b.Fatal(err)
		}
	}
	rate := float64(plan.FLOPs) * float64(b.N) / b.Elapsed().Seconds()
	b.ReportMetric(rate/1e9, "GFLOP/s")
	if peak > 0 {
		b.ReportMetric(100*rate/peak, "%ceiling")
	}
}
