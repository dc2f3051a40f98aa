package bench_test

import (
	"context"
	"flag"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/bench"
	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
)

var (
	pairs      = flag.Int("pairs", 2, "pairs of runs that BenchmarkPairsOfRuns compares")
	pairPreset = flag.String("pair-preset", "", "preset that they measure; by default two of the cases of ci")
)

// slowed is the CPU backend with work after each call that takes a tenth of the time of an
// undisturbed call.
type slowed struct {
	*cpu.Backend
	turns map[backend.Dims]int
}

func (s *slowed) Attention(ctx context.Context, calls ...*backend.Call) error {
	c := calls[0]
	n, ok := s.turns[c.Dims()]
	if !ok {
		best, turn := math.Inf(1), math.Inf(1)
		for range 50 {
			begin := time.Now()
			if err := s.Backend.Attention(ctx, c); err != nil {
				return err
			}
			best = min(best, time.Since(begin).Seconds())
			begin = time.Now()
			turned = spin(1000)
			turn = min(turn, time.Since(begin).Seconds()/1000)
		}
		n = int(0.1 * best / turn)
		s.turns[c.Dims()] = n
	}
	err := s.Backend.Attention(ctx, calls...)
	turned = spin(n)
	return err
}

// turned keeps the compiler from removing spin.
var turned float64

func spin(turns int) float64 {
	x := 1.0
	for range turns {
		x = x*0.5 + 1
	}
	return x
}

// BenchmarkPairsOfRuns measures pairs of short runs on this machine, whatever its load, of
// which one may be slowed down by a tenth, and reports how often report.Compare is right:
//
//	go test -run '^$' -bench PairsOfRuns -benchtime 1x ./bench -pairs 20 -pair-preset ci
//
// TestPairsOfRuns of package report asserts the same on simulated machines.
func BenchmarkPairsOfRuns(b *testing.B) {
	cfg := bench.Config{Series: []bench.Series{
		{Name: "plain", Seqs: []int{64}, Heads: 4},
		{Name: "decode", Seqs: []int{512}, Heads: 4, KVHeads: 1, SeqQ: 1},
	}}
	if *pairPreset != "" {
		i := slices.IndexFunc(bench.Presets(), func(p bench.Preset) bool { return p.Name == *pairPreset })
		if i < 0 {
			b.Fatalf("there is no preset %q", *pairPreset)
		}
		cfg.Series, cfg.Budget = bench.Presets()[i].Series, bench.Presets()[i].Budget
	}
	be := cpu.New(cpu.Options{Threads: 1})
	defer be.Close()
	run := func(be backend.Backend) *report.Report {
		r, err := bench.Run(b.Context(), []*kernels.Device{kernels.NewDevice(be)}, cfg)
		if err == nil {
			err = r.Err()
		}
		if err != nil {
			b.Fatal(err)
		}
		return r
	}
	changed := func(old, new *report.Report) (slower, faster bool) {
		for _, c := range report.Compare(old, new, 4) {
			slower, faster = slower || c.Verdict == report.Slower, faster || c.Verdict == report.Faster
		}
		return slower, faster
	}
	falseAlarms, missed := 0, 0
	for b.Loop() {
		for range *pairs {
			old, same, later := run(be), run(be), run(&slowed{be, map[backend.Dims]int{}})
			if slower, faster := changed(old, same); slower || faster {
				falseAlarms++
			}
			if slower, faster := changed(old, later); !slower || faster {
				missed++
			}
		}
	}
	b.ReportMetric(float64(falseAlarms)/float64(b.N), "false-alarms")
	b.ReportMetric(float64(missed)/float64(b.N), "missed")
}
