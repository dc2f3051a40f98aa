package bench

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/kernels"
)

// turns are the names of contenders in the order in which they ran.
type turns []string

// contender returns a backend that behaves like f.
func (s *turns) contender(name string, f *fake) Contender {
	m := &metered{peak: 1e9, metered: func() { *s = append(*s, name) }}
	m.name, m.wrongFrom, m.before = "cpu", f.wrongFrom, f.before
	return Contender{Name: name, Device: kernels.NewDevice(m)}
}

func TestContendersTakeTurns(t *testing.T) {
	var s turns
	last, calls := 0.0, 0
	cfg := small(16, 32)
	cfg.Progress = func(p Progress) {
		if calls++; p.Done < last || p.Done > 1 {
			t.Errorf("done is %v after %v", p.Done, last)
		}
		last = p.Done
	}
	r, err := inBubble(t, func() (*report.Report, error) {
		return Compare(context.Background(), []Contender{s.contender("a", &fake{}), s.contender("b", &fake{})}, cfg)
	})
	if err != nil || r.Err() != nil {
		t.Fatal(err, r.Err())
	}
	var got []string
	for _, c := range r.Cases {
		got = append(got, fmt.Sprint(c.Contender, c.SeqK, c.Status))
		if c.Backend != "cpu" || c.MedianS == nil || c.Percent == nil || c.StagesS != nil || c.Note != "" || c.Repetitions < minCompare {
			t.Errorf("%+v", c)
		}
	}
	if want := "a16ok b16ok a32ok b32ok"; strings.Join(got, " ") != want {
		t.Errorf("%q, want %q", got, want)
	}
	// Round after round begins with the other.
	if turns, want := strings.Join(s, ""), "abbaabba"; !strings.HasPrefix(turns, want) {
		t.Errorf("turns %s, want %s...", turns, want)
	}
	if calls == 0 {
		t.Error("no progress")
	}
}

func TestComparisonOfUnequals(t *testing.T) {
	var s turns
	broken := fmt.Errorf("the device is on fire")
	r, err := inBubble(t, func() (*report.Report, error) {
		return Compare(context.Background(), []Contender{
			s.contender("good", &fake{}),
			s.contender("wrong", &fake{wrongFrom: 1}),
			s.contender("late", &fake{wrongFrom: warmUp + 2}),
			s.contender("failing", &fake{before: func(n int64) error {
				if n > warmUp+2 {
					return broken
				}
				return nil
			}}),
			s.contender("unable", &fake{before: func(int64) error { return fmt.Errorf("heads: %w", backend.ErrUnsupported) }}),
		}, small(16))
	})
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]report.Status{"good": report.OK, "wrong": report.Wrong, "late": report.Wrong, "failing": report.Failed, "unable": report.NotRun}
	for _, c := range r.Cases {
		if c.Status != want[c.Contender] || (c.MedianS != nil) != (c.Status == report.OK) {
			t.Errorf("%s: status %q, median %v, %s", c.Contender, c.Status, c.MedianS, c.Note)
		}
	}
	if err := r.Err(); err == nil || !strings.Contains(err.Error(), "wrong at S = 16") {
		t.Errorf("the report's error is %v", err)
	}
	var out strings.Builder
	if err := r.WriteTable(&out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"contender", "vs first", "       16      good ", "              wrong ", "1.00x", "WRONG: o[", "failing   failed: ", broken.Error(), "unable   not run: "} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the table lacks %q:\n%s", want, &out)
		}
	}
}

func TestCancelledComparison(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background()) // its channel belongs to the bubble that asks for it first
	defer cancel()
	var s turns
	r, err := inBubble(t, func() (*report.Report, error) {
		return Compare(ctx, []Contender{
			s.contender("a", &fake{}),
			s.contender("b", &fake{before: func(n int64) error {
				if n == warmUp+3 {
					cancel()
				}
				return nil
			}}),
		}, small(16, 32))
	})
	if err != nil || !r.Interrupted || len(r.Cases) != 4 {
		t.Fatalf("%v, interrupted %v, %d rows", err, r.Interrupted, len(r.Cases))
	}
	for i, c := range r.Cases {
		if c.SeqK == 32 && (c.Status != report.NotRun || c.Note != "not run: interrupted") || c.SeqK == 16 && !strings.Contains(c.Note, "interrupted") {
			t.Errorf("row %d: %q %q", i, c.Status, c.Note)
		}
	}
}

func TestComparisonWithoutLengths(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background()) // its channel belongs to the bubble that asks for it first
	cancel()
	var s turns
	r, err := inBubble(t, func() (*report.Report, error) { return Compare(ctx, []Contender{s.contender("a", &fake{})}, Config{}) })
	if err != nil || len(r.Cases) != len(compareSeqs) {
		t.Errorf("%v, %d cases", err, len(r.Cases))
	}
	if _, err := Compare(ctx, nil, of(Series{Dim: -1})); err == nil {
		t.Error("a negative head size passes")
	}
}
