package bench

import (
	"bytes"
	"context"
	"strings"
	"testing"

	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

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
