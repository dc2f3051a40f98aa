package bench

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/kernels"
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
		saved = append(saved, len(r.Cases))
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
	noError(t, first.WriteJSON(&file))
	cfg.Measured = nil
	if cfg.Resume, err = report.Read(&file); err != nil {
		t.Fatal(err)
	}
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
	third.Resume = second
	be.calls.Store(0)
	if runOn(t, third, be); be.calls.Load() != 0 {
		t.Errorf("nothing was left to measure, %d calls were made", be.calls.Load())
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
		if _, err := Run(t.Context(), devices(be), cfg); !errors.Is(err, kernels.ErrOption) || !strings.Contains(err.Error(), tc.what) {
			t.Errorf("%s: %v", tc.what, err)
		}
	}
}
