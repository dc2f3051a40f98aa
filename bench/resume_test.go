package bench

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend"
)

// A run that was stopped goes on with the cases that it had not measured, also when the
// report comes back from its file.
func TestResume(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background()) // its channel belongs to the bubble that asks for it first
	defer cancel()
	be := &fake{name: "cpu"}
	cfg := small(16, 32, 48)
	var saved []int
	cfg.Measured = func(r *Report) {
		saved = append(saved, len(r.Cases))
		if len(r.Cases) == 1 {
			be.before = func(call int64) error {
				if be.calls.Load() > 3*warmCalls {
					cancel() // in the rounds of the second case
				}
				return nil
			}
			be.calls.Store(0)
		}
	}
	first, err := inBubble(t, func() (*Report, error) { return Run(ctx, []backend.Backend{be}, cfg) })
	if err != nil || !first.Interrupted || first.Cases[0].Status != OK || !strings.Contains(first.Cases[1].Note, "interrupted") || first.Cases[2].Status != NotRun {
		t.Fatalf("%v %+v", err, first)
	}
	if len(saved) != 3 || saved[0] != 1 || saved[2] != 3 {
		t.Errorf("the report was shown with %v cases", saved)
	}
	path := filepath.Join(t.TempDir(), "r.json")
	if err := first.WriteFile(path); err != nil {
		t.Fatal(err)
	}
	cfg.Measured = nil
	if cfg.Resume, err = ReadFile(path); err != nil {
		t.Fatal(err)
	}
	be.before = nil
	be.calls.Store(0)
	second := runOn(t, cfg, be)
	if second.Interrupted || second.Err() != nil || len(second.Cases) != 3 || len(second.Growth) != 1 {
		t.Fatalf("%+v", second)
	}
	for i, c := range second.Cases {
		if c.Status != OK || c.Resumed != (i == 0) {
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
		change func(e *Environment)
	}{
		{"CPU", func(e *Environment) { e.CPU = "another" }},
		{"commit", func(e *Environment) { e.Commit = "another" }},
		{"Go version", func(e *Environment) { e.GoVersion = "go0" }},
		{"seed", func(e *Environment) { e.Seed++ }},
		{"fake v1", func(e *Environment) {
			e.Backends = []backend.Info{e.Backends[0]}
			e.Backends[0].Provider = "fake v0"
		}},
	} {
		was := *r
		tc.change(&was.Environment)
		cfg := small(16)
		cfg.Resume = &was
		if _, err := Run(t.Context(), []backend.Backend{be}, cfg); !errors.Is(err, backend.ErrOption) || !strings.Contains(err.Error(), tc.what) {
			t.Errorf("%s: %v", tc.what, err)
		}
	}
}

func TestReadFileRefuses(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"no JSON": "abc", "another thing": "{}", "an older form": `{"schema": 1}`, "a newer form": `{"schema": 99}`, "half a file": `{"schema": 2, "cases": [`,
		"no median": `{"schema": 2, "cases": [{"status": "ok", "rounds": [{"times_s": [1]}]}]}`, "no rounds": `{"schema": 2, "cases": [{"status": "ok", "median_s": 1}]}`,
		"no time": `{"schema": 2, "cases": [{"status": "ok", "median_s": 1, "rounds": [{"times_s": [0]}]}]}`} {
		path := filepath.Join(dir, "f")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if r, err := ReadFile(path); !errors.Is(err, backend.ErrOption) {
			t.Errorf("%s: %v %v", name, r, err)
		}
	}
	if _, err := ReadFile(filepath.Join(dir, "absent")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%v", err)
	}
}
