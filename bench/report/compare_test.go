package report

import (
	"math/rand/v2"
	"strings"
	"testing"
)

// reportOf is a report of one case. Its calls take seconds·noise, and the arithmetic between
// them is disturbed alike.
func reportOf(seconds float64, rounds int, noise func(round, call int) float64) *Report {
	m := Measurement{Backend: "cpu", Variant: "fused", Name: "f32/b1h8s256d64", Threads: 1, Status: OK, MedianS: &seconds}
	for r := range rounds {
		var one Round
		for c := range 10 {
			n := noise(r, c)
			one.TimesS, one.PaceS = append(one.TimesS, seconds*n), append(one.PaceS, 1e-6*n)
		}
		m.Rounds = append(m.Rounds, one)
	}
	return &Report{Schema: Schema, Cases: []Measurement{m}}
}

func TestDifference(t *testing.T) {
	calm := func(r, c int) float64 { return 1 + 0.01*float64((7*r+3*c)%10)/10 }
	// Half of the rounds take twice as long, and nothing is undisturbed.
	torn := func(r, c int) float64 { return calm(r, c) * (1.5 + float64((r+c)%2)) }
	for _, tc := range []struct {
		why      string
		was, now *Report
		want     Verdict
	}{
		{"nothing", reportOf(1, 8, calm), reportOf(1, 8, calm), Same},
		{"2% is less than what is looked for", reportOf(1, 8, calm), reportOf(1.02, 8, calm), Same},
		{"10% slower", reportOf(1, 8, calm), reportOf(1.1, 8, calm), Slower},
		{"10% faster", reportOf(1.1, 8, calm), reportOf(1, 8, calm), Faster},
		{"the same, the machine became busy", reportOf(1, 8, calm), reportOf(1, 8, torn), Same},
		{"10% slower, on a busy machine", reportOf(1, 8, torn), reportOf(1.1, 8, torn), Slower},
		{"10% slower, in too few rounds to be sure", reportOf(1, 3, calm), reportOf(1.1, 3, calm), Unclear},
	} {
		c := Compare(tc.was, tc.now, 4)
		if len(c) != 1 || c[0].Verdict != tc.want {
			t.Errorf("%s: %+v, want %s", tc.why, c, tc.want)
		}
	}
	// Without arithmetic between the calls, the noise of a busy machine hides everything.
	unpaced := func(r *Report) *Report {
		for i := range r.Cases[0].Rounds {
			r.Cases[0].Rounds[i].PaceS = nil
		}
		return r
	}
	wild := func(r, c int) float64 { return calm(r, c) * (1 + float64((r*5)%7)) }
	if c := Compare(unpaced(reportOf(1, 8, wild)), unpaced(reportOf(1, 8, func(r, c int) float64 { return wild(r+3, c) * 1.3 })), 4); c[0].Verdict != Unclear {
		t.Errorf("%+v", c)
	}
}

// If the operands are read more slowly, the call is not the cause.
func TestDifferenceOfReading(t *testing.T) {
	calm := func(r, c int) float64 { return 1 + 0.01*float64((7*r+3*c)%10)/10 }
	read := func(seconds, rate float64) *Report {
		r := reportOf(seconds, 8, calm)
		r.Cases[0].Bound = BoundRead
		for i := range r.Cases[0].Rounds {
			r.Cases[0].Rounds[i].CeilingGBS = &rate
		}
		return r
	}
	for _, tc := range []struct {
		why      string
		was, now *Report
		want     Verdict
	}{
		{"slower, read as fast", read(1, 50), read(1.2, 50), Slower},
		{"slower, and the operands too", read(1, 50), read(1.2, 41), Unclear},
		{"as fast, read faster", read(1, 50), read(1, 60), Same},
		{"the ceiling is not known", read(1, 0), read(1.2, 0), Unclear},
	} {
		if c := Compare(tc.was, tc.now, 4); c[0].Verdict != tc.want {
			t.Errorf("%s: %+v, want %s", tc.why, c, tc.want)
		}
	}
}

func TestDifferenceOfWhatIsNotMeasured(t *testing.T) {
	one := func(name string, s Status) *Report {
		x := 1.0
		return &Report{Cases: []Measurement{{Backend: "cpu", Name: name, Status: s, Note: "why", MedianS: &x, Rounds: []Round{{TimesS: []float64{1}}}}}}
	}
	for _, tc := range []struct {
		was, now *Report
		want     []Verdict
		fails    bool
	}{
		{one("a", OK), one("a", Wrong), []Verdict{Broken}, true},
		{one("a", OK), one("a", Failed), []Verdict{Broken}, true},
		{one("a", Wrong), one("a", OK), []Verdict{Fixed}, false},
		{one("a", OK), one("a", Predicted), []Verdict{Missing}, false},
		{one("a", OK), one("b", OK), []Verdict{Missing, Missing}, false},
	} {
		changes := Compare(tc.was, tc.now, 4)
		var got []Verdict
		for _, c := range changes {
			got = append(got, c.Verdict)
		}
		if len(got) != len(tc.want) || got[0] != tc.want[0] {
			t.Errorf("%q, want %q", got, tc.want)
		}
		if (Worst(changes, 5) != nil) != tc.fails {
			t.Errorf("%q: a gate fails for %+v", got, Worst(changes, 5))
		}
	}
}

func TestChangesForPeople(t *testing.T) {
	calm := func(r, c int) float64 { return 1 + 0.01*float64((7*r+3*c)%10)/10 }
	was, now := reportOf(0.001, 8, calm), reportOf(0.0011, 8, calm)
	was.Environment.CPU, now.Environment.CPU = "old one", "new one"
	changes := Compare(was, now, 4)
	if w := Worst(changes, 5); w == nil || w.Percent < 9.9 || w.Percent > 10.1 {
		t.Errorf("%+v", w)
	}
	if w := Worst(changes, 15); w != nil {
		t.Errorf("10%% is over 15%%: %+v", w)
	}
	var out strings.Builder
	if err := WriteChanges(&out, was, now, changes, 4); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"they differ in CPU: \"old one\" and \"new one\"\n", "cpu f32/b1h8s256d64  1.00 ms  1.10 ms  +10.0% ", "  slower\n", "\n1 case: 1 slower\n"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("it lacks %q:\n%s", want, &out)
		}
	}
}

// Of pairs of runs on busy machines, Compare reports no change where there is none and
// finds a slowdown by a tenth; one of twenty may fail of either kind. The machines vary as
// measured ones do: the clock rate drifts from round to round, some rounds share the
// processor with another process, single calls are interrupted, and the arithmetic between
// the calls sees the same except for jitter of its own.
func TestPairsOfRuns(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	run := func(seconds float64) *Report {
		busy := rng.Float64() // how often a round is disturbed differs from run to run
		return reportOf(seconds, 12, func() func(round, call int) float64 {
			clock, shared := 1.0, false
			return func(_, call int) float64 {
				if call == 0 {
					clock = 1 + 0.03*rng.Float64()
					shared = rng.Float64() < busy
				}
				x := clock * (1 + 0.005*rng.ExpFloat64())
				if shared {
					x *= 1 + rng.Float64()
				}
				if rng.IntN(20) == 0 {
					x *= 3
				}
				return x
			}
		}())
	}
	jitter := func(r *Report) *Report {
		for i := range r.Cases[0].Rounds {
			paces := r.Cases[0].Rounds[i].PaceS
			for j := range paces {
				paces[j] *= 1 + 0.01*rng.ExpFloat64()
			}
		}
		return r
	}
	const pairs = 20
	falseAlarms, missed := 0, 0
	for range pairs {
		old, same, slower := jitter(run(1)), jitter(run(1)), jitter(run(1.1))
		if v := Compare(old, same, 4)[0].Verdict; v == Slower || v == Faster {
			falseAlarms++
		}
		if c := Compare(old, slower, 4)[0]; c.Verdict != Slower {
			missed++
			t.Logf("missed: %+v", c)
		}
	}
	if falseAlarms > pairs/20 || missed > pairs/20 {
		t.Errorf("of %d pairs: %d false alarms, %d of the slowed ones missed", pairs, falseAlarms, missed)
	}
}
