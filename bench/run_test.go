package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// small is a configuration that a fake computes quickly.
func small(seqs ...int) Config {
	cfg := of(Series{Seqs: seqs, Case: report.Case{Heads: 2, Dim: 4}})
	cfg.Seed = 7
	return cfg
}

// inBubble calls f in a bubble of package synctest: time passes only in calls of a fake.
func inBubble(t *testing.T, f func() (*report.Report, error)) (r *report.Report, err error) {
	t.Helper()
	synctest.Test(t, func(*testing.T) { r, err = f() })
	return r, err
}

func of(s Series) Config { return Config{Series: []Series{s}} }

// devices wraps backends.
func devices(backends ...backend.Backend) []*kernels.Device {
	var all []*kernels.Device
	for _, be := range backends {
		all = append(all, kernels.NewDevice(be))
	}
	return all
}

func runOn(t *testing.T, cfg Config, backends ...backend.Backend) *report.Report {
	t.Helper()
	return must.Get(inBubble(t, func() (*report.Report, error) { return Run(context.Background(), devices(backends...), cfg) }))(t)
}

// wantText fails the test unless what write writes has all these texts.
func wantText(t *testing.T, write func(io.Writer) error, texts ...string) {
	t.Helper()
	var out strings.Builder
	must.Do(t, write(&out))
	for _, want := range texts {
		if !strings.Contains(out.String(), want) {
			t.Errorf("it lacks %q:\n%s", want, &out)
		}
	}
}

func TestFiguresFollowFromTimesAndCeiling(t *testing.T) {
	be := &roofed{fake: fake{name: "cpu"}, peak: 2e9}
	cfg := small(16, 32)
	cfg.Series[0].KVHeads, cfg.Series[0].Causal, cfg.Series[0].Batch = 1, true, 3
	r := runOn(t, cfg, be)
	must.Do(t, r.Err())
	for i, c := range r.Cases {
		seq := []int{16, 32}[i]
		if c.SeqQ != seq || c.SeqK != seq || c.Batch != 3 || c.Heads != 2 || c.KVHeads != 1 || c.Dim != 4 || !c.Causal || c.DType != "f32" ||
			c.Backend != "cpu" || c.Threads != 0 || c.Variant != report.Fused || c.Plan.Path != "pretended" {
			t.Errorf("the case is not the one asked for: %+v", c)
		}
		// 1+2+...+S pairs a head.
		if want := int64(3 * 2 * seq * (seq + 1) / 2 * 4 * 4); c.FLOPs != want {
			t.Errorf("S=%d: %d FLOPs of visible pairs, want %d", seq, c.FLOPs, want)
		}
		if c.MedianS == nil || c.MinS == nil || c.GFLOPS == nil || c.CeilingGFLOPS == nil || c.PercentOfBound == nil ||
			c.SpeedupVsStages == nil || c.StagesS == nil || c.MaxError == nil || c.ErrorBound == nil || c.Allocs == nil {
			t.Fatalf("S=%d: a figure is missing: %+v", seq, c)
		}
		close := func(what string, got, want float64) {
			if got < want*(1-1e-12) || got > want*(1+1e-12) {
				t.Errorf("S=%d: %s is %v, want %v", seq, what, got, want)
			}
		}
		close("GFLOP/s", *c.GFLOPS, float64(c.FLOPs) / *c.MedianS / 1e9)
		close("ceiling", *c.CeilingGFLOPS, 2)
		close("percent", *c.PercentOfBound, *c.GFLOPS/2*100)
		close("speed-up", *c.SpeedupVsStages, *c.StagesS / *c.MedianS)
		if *c.MinS > *c.MedianS || c.Repetitions < minRounds {
			t.Errorf("S=%d: min %v s, median %v s of %d", seq, *c.MinS, *c.MedianS, c.Repetitions)
		}
		if *c.MaxError > *c.ErrorBound {
			t.Errorf("S=%d: error %v over %v and yet ok", seq, *c.MaxError, *c.ErrorBound)
		}
	}
}

func TestNoMeterNoCeiling(t *testing.T) {
	c := runOn(t, small(16), &fake{name: "cpu"}).Cases[0]
	if c.Status != report.OK || c.CeilingGFLOPS != nil || c.PercentOfBound != nil {
		t.Errorf("status %q, ceiling %v, percent %v: what no one measured must be null", c.Status, c.CeilingGFLOPS, c.PercentOfBound)
	}
}

func TestAllocationsAreTheCallsOwn(t *testing.T) {
	a := *runOn(t, small(16), &fake{name: "cpu"}).Cases[0].Allocs
	b := *runOn(t, small(16), &fake{name: "cpu", allocs: 50}).Cases[0].Allocs
	if b-a != 50 {
		t.Errorf("a call with 50 more allocations counts %d, without %d", b, a)
	}
}

func TestWrongResultsGetNoFigure(t *testing.T) {
	for _, tc := range []struct {
		why string
		be  *fake
	}{
		{"wrong from the start", &fake{name: "cpu", wrongFrom: 1}},
		{"NaN", &fake{name: "cpu", wrongFrom: 1, nan: true}},
		{"nothing written after the warm-up", &fake{name: "cpu", idleFrom: warmUp + 1}},
		{"right in the warm-up only", &fake{name: "cpu", wrongFrom: warmUp + 2}},
	} {
		r := runOn(t, small(16), tc.be)
		c := r.Cases[0]
		if c.Status != report.Wrong || !strings.HasPrefix(c.Note, "WRONG") {
			t.Errorf("%s: status %q, note %q", tc.why, c.Status, c.Note)
		}
		if c.MedianS != nil || c.MinS != nil || c.GFLOPS != nil || c.PercentOfBound != nil || c.SpeedupVsStages != nil {
			t.Errorf("%s: a wrong result has figures: %+v", tc.why, c)
		}
		if !tc.be.nan && (c.MaxError == nil || *c.MaxError <= *c.ErrorBound) {
			t.Errorf("%s: error %v, bound %v", tc.why, c.MaxError, c.ErrorBound)
		}
		if err := r.Err(); err == nil || !strings.Contains(err.Error(), "wrong") {
			t.Errorf("%s: the report's error is %v", tc.why, err)
		}
		wantText(t, r.WriteTable, "WRONG: o[")
	}
}

func TestFailuresAreRows(t *testing.T) {
	broken := errors.New("the device is on fire")
	be := &fake{name: "cpu"}
	for _, right := range []int64{0, warmUp + 2} { // calls before that, up to some in a round
		be.calls.Store(0)
		be.before = func(call int64) error {
			if call > right {
				return broken
			}
			return nil
		}
		r := runOn(t, small(16, 32), be)
		for _, c := range r.Cases {
			if c.Status != report.Failed || !strings.Contains(c.Note, broken.Error()) || c.MedianS != nil || len(c.Rounds) > 0 {
				t.Errorf("status %q, note %q, median %v", c.Status, c.Note, c.MedianS)
			}
		}
		if err := r.Err(); err == nil || len(r.Cases) != 2 {
			t.Errorf("%d rows, error %v", len(r.Cases), err)
		}
	}
	be.before = func(int64) error { return fmt.Errorf("head size 4: %w", kernels.ErrUnsupported) }
	r := runOn(t, small(16), be, &fake{name: "other"})
	if c := r.Cases[0]; c.Status != report.NotRun || r.Err() != nil {
		t.Errorf("what a backend does not do is not a failure of the run: %q %v", c.Status, r.Err())
	}
}

func TestSweepEndsWhenACallTakesTooLong(t *testing.T) {
	// 2 heads · 256² pairs take 0.13 s, 512² are predicted to take half a
	// second, 1024² two.
	be := &fake{name: "cpu", delay: time.Second}
	cfg := small()
	cfg.Series[0].Dim = 1
	r := runOn(t, cfg, be)
	var got []string
	for _, c := range r.Cases {
		got = append(got, fmt.Sprint(c.SeqQ, " ", c.Status))
	}
	if want := "256 ok, 512 ok, 1024 predicted"; strings.Join(got, ", ") != want {
		t.Errorf("the sweep is %q, want %q", got, want)
	}
	last := r.Cases[len(r.Cases)-1]
	if last.PredictedS == nil || !strings.HasPrefix(last.Note, "predicted ") || !strings.Contains(last.Note, "each, a sweep ends at") {
		t.Errorf("why it ended: %q", last.Note)
	}
	if r.Err() != nil {
		t.Errorf("a sweep that ends is no error: %v", r.Err())
	}
}

func TestBudgetIsKeptAndSaid(t *testing.T) {
	slow := &fake{name: "slow", delay: 5 * time.Second} // 0.16 s at S=128, two heads
	quick := &fake{name: "quick", delay: time.Second}
	cfg := small(16, 128, 2048)
	cfg.Budget = 1500 * time.Millisecond
	r := must.Get(inBubble(t, func() (*report.Report, error) {
		began := time.Now()
		r, err := Run(context.Background(), devices(slow, quick), cfg)
		// Hard: the deadline is the budget, what is beyond it is only the way out.
		if took := time.Since(began); took > cfg.Budget+5*time.Second {
			t.Errorf("a budget of %v took %v", cfg.Budget, took)
		}
		return r, err
	}))(t)
	if len(r.Cases) != 6 {
		t.Fatalf("%d rows, every case needs one", len(r.Cases))
	}
	for _, c := range r.Cases {
		if c.SeqQ == 2048 && (c.Status != report.Predicted || c.PredictedS == nil || !strings.Contains(c.Note, "budget")) {
			t.Errorf("%s S=%d: %q %q", c.Backend, c.SeqQ, c.Status, c.Note)
		}
		if c.Status == report.NotRun && !strings.HasPrefix(c.Note, "not run: ") {
			t.Errorf("%s S=%d has no reason: %q", c.Backend, c.SeqQ, c.Note)
		}
	}
	// The slow one ate its own half only.
	if c := r.Cases[3]; c.Status != report.OK {
		t.Errorf("%s S=%d: %q %q", c.Backend, c.SeqQ, c.Status, c.Note)
	}
	if r.Interrupted || r.Err() != nil {
		t.Errorf("a spent budget is neither an interruption nor an error: %v", r.Err())
	}
	cfg = small(16, 32)
	cfg.Budget = 5 * callTime // spent in the first warm-up
	for _, c := range runOn(t, cfg, &fake{name: "cpu"}).Cases {
		if c.Status == report.Failed || c.Status == report.OK || !strings.Contains(c.Note, "the budget is spent") {
			t.Errorf("S=%d without budget: %q %q", c.SeqQ, c.Status, c.Note)
		}
	}
}

func TestCancelKeepsWhatWasMeasured(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background()) // the bubble that first uses its channel owns it
	defer cancel()
	be := &fake{name: "cpu"}
	be.before = func(call int64) error {
		if call == warmUp+3 { // in the repetitions of the first case
			cancel()
		}
		return nil
	}
	r := must.Get(inBubble(t, func() (*report.Report, error) { return Run(ctx, devices(be, &fake{name: "other"}), small(16, 32)) }))(t)
	if !r.Interrupted || r.Err() == nil || len(r.Cases) != 4 {
		t.Fatalf("interrupted %v, %d rows, error %v", r.Interrupted, len(r.Cases), r.Err())
	}
	first := r.Cases[0]
	if first.Status != report.OK || first.MedianS == nil || !strings.Contains(first.Note, "interrupted") {
		t.Errorf("the first case was measured: %q %q %v", first.Status, first.Note, first.MedianS)
	}
	for _, c := range r.Cases[1:] {
		if c.Status != report.NotRun || c.Note != "not run: interrupted" {
			t.Errorf("%s S=%d: %q %q", c.Backend, c.SeqQ, c.Status, c.Note)
		}
	}
	wantText(t, r.WriteTable, "interrupted: the cases after that were not measured")
}

func TestCancelEndsALongCall(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background()) // the bubble that first uses its channel owns it
	defer cancel()
	be := &fake{name: "cpu", delay: time.Hour}
	be.before = func(int64) error { cancel(); return nil }
	r := must.Get(inBubble(t, func() (*report.Report, error) {
		began := time.Now()
		r, err := Run(ctx, devices(be), small(256))
		if took := time.Since(began); took > grace {
			t.Errorf("it went on for %v", took)
		}
		return r, err
	}))(t)
	if c := r.Cases[0]; c.Status != report.NotRun || c.Note != "not run: interrupted" || c.MedianS != nil {
		t.Errorf("%q %q", c.Status, c.Note)
	}
}

func TestConfigRefuses(t *testing.T) {
	for _, tc := range []struct {
		cfg  Config
		want error
	}{
		{of(Series{Case: report.Case{Dim: -1}}), kernels.ErrShape},
		{of(Series{Case: report.Case{Heads: -8}}), kernels.ErrShape},
		{of(Series{Case: report.Case{Batch: -1}}), kernels.ErrShape},
		{of(Series{Case: report.Case{Heads: 8, KVHeads: 3}}), kernels.ErrShape},
		{of(Series{Seqs: []int{256, 0}}), kernels.ErrShape},
		{of(Series{Seqs: []int{maxSeq}, Case: report.Case{Heads: 1 << 30, Dim: 1 << 30}}), kernels.ErrShape},
		{of(Series{Case: report.Case{DType: "bool"}}), kernels.ErrDType},
		{Config{Budget: -1}, kernels.ErrOption},
		{of(Series{Case: report.Case{SeqQ: -1}}), kernels.ErrShape},
		{of(Series{Case: report.Case{SeqQ: maxSeq + 1}}), kernels.ErrShape},
		{of(Series{Case: report.Case{WindowLeft: new(-1)}}), kernels.ErrOption},
		{of(Series{Case: report.Case{WindowRight: new(-1)}}), kernels.ErrOption},
		{of(Series{Case: report.Case{Softcap: -1}}), kernels.ErrOption},
		{of(Series{Case: report.Case{Softcap: math.NaN()}}), kernels.ErrOption},
		{of(Series{Case: report.Case{Softcap: math.Inf(1)}}), kernels.ErrOption},
		{of(Series{Case: report.Case{LowPrecision: true, Variant: report.QK}}), kernels.ErrOption},
		{of(Series{Case: report.Case{Cache: "bf16"}}), kernels.ErrDType},
		{of(Series{Case: report.Case{Cache: "q4", Dim: 40}}), kernels.ErrDType},
		{of(Series{Case: report.Case{Cache: "q8", Variant: report.Backward}}), kernels.ErrOption},
	} {
		r, err := inBubble(t, func() (*report.Report, error) { return Run(context.Background(), nil, tc.cfg) })
		if !errors.Is(err, tc.want) || r != nil {
			t.Errorf("%+v: error %v, want %v", tc.cfg, err, tc.want)
		}
	}
}

func TestMoreThanTheMachineHolds(t *testing.T) {
	cfg := of(Series{Seqs: []int{maxSeq}, Case: report.Case{Heads: 64, Dim: 128}})
	c := runOn(t, cfg, &fake{name: "cpu"}).Cases[0]
	if c.Status != report.NotRun || !strings.Contains(c.Note, "TiB") {
		t.Errorf("%q %q", c.Status, c.Note)
	}
}

func TestProgressNamesWhatRuns(t *testing.T) {
	cfg := small(16, 32)
	steps, seen := 0, map[string]bool{}
	cases := map[string]int{"af32/b1h2s16d4": 0, "af32/b1h2s32d4": 1, "bf32/b1h2s16d4": 2, "bf32/b1h2s32d4": 3}
	cfg.Progress = func(p Progress) {
		if p.Of != 4 || p.Cases != cases[p.Backend+p.Case.Name()] {
			t.Errorf("%s of %s: %d of %d cases done", p.Step, p.Backend, p.Cases, p.Of)
		}
		steps++
		seen[p.Backend+" "+p.Case.Name()] = true
	}
	runOn(t, cfg, &fake{name: "a"}, &fake{name: "b"})
	for _, want := range []string{"a f32/b1h2s16d4", "a f32/b1h2s32d4", "b f32/b1h2s16d4", "b f32/b1h2s32d4"} {
		if !seen[want] {
			t.Errorf("%q was never said to run, of %v", want, seen)
		}
	}
	if steps < 10 {
		t.Errorf("only %d steps", steps)
	}
}

func TestCaseNames(t *testing.T) {
	cfg := must.Get(Series{Case: report.Case{KVHeads: 2, Causal: true, DType: "bf16"}}.withDefaults())(t)
	c := cfg.at(1024)
	c.SeqQ = 1
	if got, want := c.Name(), "bf16/b1h8s1024d64/kv2/q1/causal"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	c.WindowLeft, c.Softcap, c.LowPrecision, c.Mask = new(256), 50, true, "f32"
	if got, want := c.Name(), "bf16/b1h8s1024d64/kv2/q1/causal/window256,inf/softcap50/low/mask"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// TestOutOfMemory refuses requests for memory: each of the first, which differ, and one of
// eleven or, with -short, of fifty of the others, which calls and checked rows repeat. A run
// ends with ErrMemory, or its report names the case that lacked memory and has the other.
func TestOutOfMemory(t *testing.T) {
	cfg := small(16, 32)
	bench := func() (*report.Report, error) {
		return inBubble(t, func() (*report.Report, error) {
			return Run(context.Background(), devices(&fake{name: "cpu"}), cfg)
		})
	}
	refused, every := 0, 11
	if testing.Short() {
		every = 50
	}
	for n := 1; ; n++ {
		if n > 20 {
			n += every - 1
		}
		stop := backend.FailMemory(n)
		r, err := bench()
		if requests := stop(); requests < n {
			if err != nil || r.Err() != nil {
				t.Errorf("nothing refused: %v, %v", err, r.Err())
			}
			break
		}
		refused++
		if err != nil {
			must.Fail(t, fmt.Sprintf("request %d refused", n), err, kernels.ErrMemory)
			continue
		}
		lacking, ok := 0, 0
		for _, c := range r.Cases {
			switch {
			case strings.Contains(c.Note, "out of memory"):
				lacking++
			case c.Status == report.OK:
				ok++
			default:
				t.Errorf("request %d refused: %s: %s %q", n, c.Shape(), c.Status, c.Note)
			}
		}
		if lacking != 1 || ok != 1 {
			t.Errorf("request %d refused: %d cases lack memory, %d are ok, want one of each", n, lacking, ok)
		}
	}
	t.Logf("%d requests refused", refused)
	if refused == 0 {
		t.Error("no request was refused")
	}
}

// A run that was stopped goes on with the cases that it had not measured, also when the
// report comes back from its file.
func TestResume(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background()) // its channel belongs to the bubble that asks for it first
	defer cancel()
	be := &fake{name: "cpu"}
	cfg := small(16, 32, 48)
	var saved []int
	cfg.Measured = func(r *report.Report) {
		if saved = append(saved, len(r.Cases)); !r.Interrupted {
			t.Error("a report that is saved during the run claims to be complete")
		}
		if len(r.Cases) == 1 {
			be.before = func(call int64) error {
				if be.calls.Load() > 3*warmUp {
					cancel() // in the rounds of the second case
				}
				return nil
			}
			be.calls.Store(0)
		}
	}
	first, err := inBubble(t, func() (*report.Report, error) { return Run(ctx, devices(be), cfg) })
	if err != nil || !first.Interrupted || first.Cases[0].Status != report.OK || !strings.Contains(first.Cases[1].Note, "interrupted") || first.Cases[2].Status != report.NotRun {
		t.Fatalf("%v %+v", err, first)
	}
	if len(saved) != 3 || saved[0] != 1 || saved[2] != 3 {
		t.Errorf("the report was shown with %v cases", saved)
	}
	var file bytes.Buffer
	must.Do(t, first.WriteJSON(&file))
	cfg.Measured = nil
	cfg.Resume = must.Get(report.Read(&file))(t)
	be.before = nil
	be.calls.Store(0)
	second := runOn(t, cfg, be)
	if second.Interrupted || second.Err() != nil || len(second.Cases) != 3 {
		t.Fatalf("%+v", second)
	}
	for i, c := range second.Cases {
		if c.Status != report.OK || c.Resumed != (i == 0) {
			t.Errorf("case %d: %q, resumed %v", i, c.Status, c.Resumed)
		}
	}
	if *second.Cases[0].MedianS != *first.Cases[0].MedianS || len(second.Cases[0].Rounds) != len(first.Cases[0].Rounds) {
		t.Error("a case that was measured has other figures")
	}
	third := cfg
	third.Resume, third.Measured = second, func(r *report.Report) {
		if len(r.Cases) != 3 || !r.Interrupted {
			t.Errorf("a killed program would leave %d of 3 cases, interrupted %v", len(r.Cases), r.Interrupted)
		}
	}
	be.calls.Store(0)
	if runOn(t, third, be); be.calls.Load() != 0 {
		t.Errorf("nothing was left to measure, %d calls were made", be.calls.Load())
	}
}

// TestResumeKeepsCases: a run that would drop cases of the report to resume is refused with the settings
// that differ, and one that adds cases keeps them.
func TestResumeKeepsCases(t *testing.T) {
	be := &fake{name: "cpu"}
	was := runOn(t, small(16, 32), be)
	was.Environment.Args = []string{"bench", "--seq=16,32"}
	of := func(change func(s *Series)) Config {
		cfg := small(16, 32)
		change(&cfg.Series[0])
		return cfg
	}
	for _, c := range []struct {
		cfg  Config
		be   *fake
		want string // "" to keep all
	}{
		{small(16, 32, 48), be, ""},
		{Config{Series: append(small(16, 32).Series, Series{Seqs: []int{16}, Case: report.Case{Dim: 4}}), Seed: 7}, be, ""},
		{small(16), be, "cpu f32/b1h2s32d4, which this run would drop: --seq was 32 and is 16 now: give the flags of that run (attn bench --seq=16,32)"},
		{Config{Seed: 7, Series: []Series{{Case: report.Case{Heads: 2, Dim: 4}}}}, be, "--seq was 16 and is 256 now"},
		{of(func(s *Series) { s.Dim = 3 }), be, "drop: --dim was 4 and is 3 now: give"},
		{of(func(s *Series) { s.Heads = 3 }), be, "drop: --heads was 2 and is 3 now: give"},
		{of(func(s *Series) { s.KVHeads = 1 }), be, "--kv-heads was that of --heads and is 1 now"},
		{of(func(s *Series) { s.SeqQ = 1 }), be, "drop: --seq-q was that of --seq and is 1 now: give"},
		{of(func(s *Series) { s.Causal, s.Softcap = true, 2 }), be, "drop: --causal was false and is true now, --softcap was 0 and is 2 now: give"},
		{of(func(s *Series) { s.Cache, s.Dim = "q4", 32 }), be, "--cache was none and is q4 now"},
		{of(func(s *Series) { s.LowPrecision = true }), be, "drop: --low-precision was false and is true now: give"},
		{of(func(s *Series) { s.WindowLeft = new(3) }), be, "drop: --window was inf,inf and is 3,inf now: give"},
		{of(func(s *Series) { s.Mask = "f32" }), be, "drop: --mask was false and is true now: give"},
		{of(func(s *Series) { s.DType = "f16" }), be, "drop: --dtype was f32 and is f16 now: give"},
		{small(16, 32), &fake{name: "gpu:0"}, "drop: --backend was cpu and is gpu:0 now: give"},
		{small(16, 32), &fake{name: "cpu", threads: 1}, "drop: --threads was 0 and is 1 now: give"},
	} {
		c.cfg.Resume = was
		r, err := inBubble(t, func() (*report.Report, error) { return Run(context.Background(), devices(c.be), c.cfg) })
		if c.want != "" {
			must.Fail(t, "the resumed run", err, kernels.ErrOption, c.want)
			continue
		}
		if must.Do(t, err); !r.Cases[0].Resumed || !r.Cases[1].Resumed || r.Cases[2].Resumed {
			t.Errorf("%+v", r.Cases)
		}
	}
}

func TestResumeRefusesAnotherMachine(t *testing.T) {
	be := &fake{name: "cpu"}
	r := runOn(t, small(16), be)
	for _, tc := range []struct {
		what   string
		change func(e *report.Environment)
	}{
		{"CPU", func(e *report.Environment) { e.CPU = "another" }},
		{"version", func(e *report.Environment) { e.Version = "another" }},
		{"Go version", func(e *report.Environment) { e.GoVersion = "go0" }},
		{"seed", func(e *report.Environment) { e.Seed++ }},
		{"fake v1", func(e *report.Environment) {
			e.Backends = []kernels.Info{e.Backends[0]}
			e.Backends[0].Provider = "fake v0"
		}},
	} {
		was := *r
		tc.change(&was.Environment)
		cfg := small(16)
		cfg.Resume = &was
		must.Fail(t, tc.what, must.Err(Run(t.Context(), devices(be), cfg)), kernels.ErrOption, tc.what)
	}
}
