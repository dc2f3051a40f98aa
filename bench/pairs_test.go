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
	"github.com/seed90331342/attn/cpu"
)

var (
	pairs      = flag.Int("pairs", 2, "pairs of runs that TestPairsOfRuns compares")
	pairPreset = flag.String("pair-preset", "", "preset that they measure; two of the cases of ci when empty")
)

// slowed is the CPU backend with work after each call that takes a tenth of what the
// call takes when nothing disturbs it.
type slowed struct {
	*cpu.Backend
	turns map[backend.Dims]int
}

func (s *slowed) Attention(ctx context.Context, c *backend.Call) error {
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
	err := s.Backend.Attention(ctx, c)
	turned = spin(n)
	return err
}

// turned keeps what spin computes.
var turned float64

func spin(turns int) float64 {
	x := 1.0
	for range turns {
		x = x*0.5 + 1
	}
	return x
}

// Of pairs of short runs on whatever machine this is, however busy, attn compare finds
// no change where there is none and finds a tenth that was added; one of either kind
// may fail, as in 20 of them (go test -run PairsOfRuns -pairs 20 -pair-preset ci).
func TestPairsOfRuns(t *testing.T) {
	if testing.Short() {
		t.Skip("measures for some ten seconds")
	}
	cfg := bench.Config{Series: []bench.Series{
		{Name: "plain", Seqs: []int{64}, Heads: 4},
		{Name: "decode", Seqs: []int{512}, Heads: 4, KVHeads: 1, SeqQ: 1},
	}}
	if *pairPreset != "" {
		i := slices.IndexFunc(bench.Presets(), func(p bench.Preset) bool { return p.Name == *pairPreset })
		if i < 0 {
			t.Fatalf("there is no preset %q", *pairPreset)
		}
		cfg.Series, cfg.Budget = bench.Presets()[i].Series, bench.Presets()[i].Budget
	}
	be := cpu.New(cpu.Options{Threads: 1})
	defer be.Close()
	run := func(b backend.Backend) *bench.Report {
		r, err := bench.Run(t.Context(), []backend.Backend{b}, cfg)
		if err != nil {
			t.Fatal(err)
		}
		if err := r.Err(); err != nil {
			t.Fatal(err)
		}
		return r
	}
	falseAlarms, missed := 0, 0
	verdicts := map[string]map[bench.Verdict]int{"unchanged": {}, "slowed": {}}
	judge := func(kind string, was, now *bench.Report) (slower, faster bool) {
		for _, c := range bench.Difference(was, now, 4) {
			verdicts[kind][c.Verdict]++
			slower, faster = slower || c.Verdict == bench.Slower, faster || c.Verdict == bench.Faster
			if want := map[string]bench.Verdict{"unchanged": bench.Same, "slowed": bench.Slower}[kind]; c.Verdict != want && c.New != nil {
				t.Logf("%s %s: %s, %+.1f%% (%+.1f to %+.1f%%, by %s, chance %.4f, %d and %d rounds)", kind, c.New.Name, c.Verdict, c.Percent, c.Low, c.High, c.By, c.Chance, len(c.Old.Rounds), len(c.New.Rounds))
			}
		}
		return slower, faster
	}
	for range *pairs {
		was, now, later := run(be), run(be), run(&slowed{be, map[backend.Dims]int{}})
		if slower, faster := judge("unchanged", was, now); slower || faster {
			falseAlarms++
		}
		if slower, faster := judge("slowed", was, later); !slower || faster {
			missed++
		}
	}
	t.Logf("of %d pairs: %d false alarms, %d of the slowed ones missed; cases by verdict: unchanged %v, slowed %v",
		*pairs, falseAlarms, missed, verdicts["unchanged"], verdicts["slowed"])
	if falseAlarms > 1 || missed > 1 {
		t.Error("that is too many: at most one of either kind")
	}
}
