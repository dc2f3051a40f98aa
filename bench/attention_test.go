package bench_test

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/seed90331342/attn/backend"
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

var (
	pairs = flag.Int("pairs", 1, "pairs of runs of the same program that BenchmarkPairsOfRuns compares, and as many slowed ones")
	shift = flag.Float64("shift", 5, "percent that the later run of a slowed pair takes longer")
)

// pairReport is the environment variable that has the file to which a process of
// BenchmarkPairsOfRuns writes its report.
const pairReport = "ATTN_PAIR_REPORT"

// slowed is the CPU backend with calls that take longer by a fraction.
type slowed struct {
	*cpu.Backend
	by float64
}

func (s slowed) Attention(ctx context.Context, calls ...*backend.Call) error {
	begin := time.Now()
	err := s.Backend.Attention(ctx, calls...)
	for end := time.Duration(float64(time.Since(begin)) * (1 + s.by)); time.Since(begin) < end; {
	}
	return err
}

// BenchmarkPairsOfRuns measures pairs of short runs, each in a process of its own, and counts
// the verdicts of report.Compare. It fails if a case of the same program is called slower or
// faster, or if the gate of attn compare --fail-over passes for more than one of 10 slowed pairs:
//
//	go test -run '^$' -bench PairsOfRuns -benchtime 1x -timeout 0 ./bench -pairs 40
//
// TestPairsOfRuns of package report asserts the same on simulated machines.
func BenchmarkPairsOfRuns(b *testing.B) {
	if path := os.Getenv(pairReport); path != "" {
		measurePair(b, path)
		return
	}
	for b.Loop() {
		wrong, missed := 0, 0
		for pair := range *pairs {
			for _, by := range []float64{0, *shift} {
				changes := report.Compare(runApart(b, 0), runApart(b, by), 4)
				for _, c := range changes { // the log of a benchmark is cut after ten lines
					fmt.Printf("pair %d, slowed by %g%%: %+.1f%% (%+.1f to %+.1f%%) %s %s\n", pair+1, by, c.Percent, c.Low, c.High, c.Verdict, c.Why)
					if by == 0 && (c.Verdict == report.Slower || c.Verdict == report.Faster) {
						wrong++
					}
				}
				if by > 0 && report.Worst(changes, 0) == nil {
					missed++
				}
			}
		}
		if wrong > 0 || missed > *pairs/10 {
			b.Errorf("of %d pairs, %d verdicts report a change where there is none; %d slowed pairs pass the gate", *pairs, wrong, missed)
		}
		b.ReportMetric(float64(wrong), "false-verdicts")
		b.ReportMetric(float64(*pairs-missed), "slowed-pairs-caught")
	}
}

// runApart returns the report of another process, whose calls take longer by shift percent.
func runApart(b *testing.B, shift float64) *report.Report {
	path := filepath.Join(b.TempDir(), "report.json")
	c := exec.CommandContext(b.Context(), os.Args[0], "-test.run=^$", "-test.bench=PairsOfRuns", "-test.benchtime=1x", "-test.timeout=0", fmt.Sprint("-shift=", shift))
	c.Env = append(os.Environ(), pairReport+"="+path)
	if out, err := c.CombinedOutput(); err != nil {
		b.Fatalf("%v: %s", err, out)
	}
	f := must.Get(os.Open(path))(b)
	defer f.Close()
	return must.Get(report.Read(f))(b)
}

// measurePair is the process of one report.
func measurePair(b *testing.B, path string) {
	cfg := bench.Config{Budget: 8 * time.Second, Series: []bench.Series{
		{Name: "plain", Seqs: []int{64, 128}, Case: report.Case{Heads: 4}},
		{Name: "decode", Seqs: []int{512}, Case: report.Case{Heads: 4, KVHeads: 1, SeqQ: 1}},
	}}
	be := cpu.New(cpu.Options{Threads: 1})
	defer be.Close()
	r := must.Get(bench.Run(b.Context(), []*kernels.Device{kernels.NewDevice(slowed{be, *shift / 100})}, cfg))(b)
	must.Do(b, r.Err())
	must.Do(b, r.WriteJSON(must.Get(os.Create(path))(b)))
}
