package bench_test

import (
	"fmt"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/bench"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
)

// Every element type gives figures on the CPU, with the ceiling of its threads.
func TestOnTheCPU(t *testing.T) {
	be := cpu.New(cpu.Options{Threads: 1})
	defer be.Close()
	for _, dtype := range []backend.DType{backend.F32, backend.F16, backend.BF16} {
		r, err := bench.Run(t.Context(), []backend.Backend{be}, bench.Config{Series: []bench.Series{{
			Seqs: []int{64, 100}, Batch: 2, Heads: 2, KVHeads: 1, Dim: 16, Causal: true, DType: dtype}}})
		if err != nil {
			t.Fatal(err)
		}
		if err := r.Err(); err != nil {
			t.Errorf("%v: %v", dtype, err)
		}
		for _, c := range r.Cases {
			if c.Status != bench.OK || c.Threads != 1 || c.DType != dtype.String() || c.GFLOPS == nil || c.SpeedupVsStages == nil || *c.MaxError > *c.ErrorBound {
				t.Errorf("%v: %+v", dtype, c)
			}
		}
	}
}

// The benchmark's name is its case, so that other tools can tell cases apart:
//
//	BenchmarkAttention/cpu/f32/b1h8s1024d64
func BenchmarkAttention(b *testing.B) {
	be := cpu.New(cpu.Options{})
	defer be.Close()
	for _, causal := range []bool{false, true} {
		for _, seq := range []int{256, 1024, 4096} {
			c := bench.Case{Variant: bench.Fused, Causal: causal,
				Dims: backend.Dims{Batch: 1, Heads: 8, KVHeads: 8, SeqQ: seq, SeqK: seq, Dim: 64, ValueDim: 64}}
			b.Run(fmt.Sprintf("%s/%v", be.Info().Name, c), func(b *testing.B) { attention(b, be, c) })
		}
	}
}

func attention(b *testing.B, be *cpu.Backend, c bench.Case) {
	ctx := b.Context()
	q, err := be.Alloc(ctx, c.DType, backend.Shape{c.Dims.Batch, c.Dims.Heads, c.Dims.SeqQ, c.Dims.Dim})
	if err != nil {
		b.Fatal(err)
	}
	opt := kernels.Options{Causal: c.Causal}
	// Speed does not depend on the numbers as long as they are ordinary: one
	// tensor of zeros serves as all operands.
	out, err := kernels.Attention(ctx, be, q, q, q, opt)
	if err != nil {
		b.Fatal(err)
	}
	plan, err := kernels.Plan(be, q, q, q, opt)
	if err != nil {
		b.Fatal(err)
	}
	peak, err := be.PeakFLOPS(ctx)
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		if err := kernels.AttentionInto(ctx, be, out, q, q, q, opt); err != nil {
			b.Fatal(err)
		}
	}
	rate := float64(plan.FLOPs) * float64(b.N) / b.Elapsed().Seconds()
	b.ReportMetric(rate/1e9, "GFLOP/s")
	if peak > 0 {
		b.ReportMetric(100*rate/peak, "%ceiling")
	}
}
