package bench_test

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/seed90331342/attn/bench"
	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// Every element type yields figures on the CPU, with the ceiling of its threads.
func TestOnTheCPU(t *testing.T) {
	dev := kernels.NewDevice(cpu.New(cpu.Options{Threads: 1}))
	defer dev.Close()
	for _, dtype := range slices.Sorted(maps.Keys(report.DTypes)) {
		r, err := bench.Run(t.Context(), []*kernels.Device{dev}, bench.Config{Rounds: 3, Series: []bench.Series{{
			Seqs: []int{64, 100}, Case: report.Case{Batch: 2, Heads: 2, KVHeads: 1, Dim: 16, Causal: true, DType: dtype}}}})
		must.Do(t, err)
		must.Pass(t, fmt.Sprintf("%v", dtype), r.Err())
		for _, c := range r.Cases {
			if c.Status != report.OK || c.Threads != 1 || c.DType != dtype || c.GFLOPS == nil || c.SpeedupVsStages == nil || *c.MaxError > *c.ErrorBound {
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
	kernelstest.Benchmark(b, dev)
}
