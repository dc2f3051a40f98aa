package report

import (
	"io"
	"math"
	"math/rand/v2"
	"testing"
)

// reportOf is a report of one case. Its calls take seconds·noise, and the arithmetic between them is disturbed alike.
func reportOf(seconds float64, rounds int, noise func(round, call int) float64) *Report {
	m := Measurement{Backend: "cpu", Case: Case{Variant: "fused"}, Name: "f32/b1h8s256d64", Threads: 1, Status: OK}
	for r := range rounds {
		var one Round
		for c := range 10 {
			n := noise(r, c)
			one.TimesS, one.PaceS = append(one.TimesS, seconds*n), append(one.PaceS, 1e-6*n)
		}
		m.Rounds = append(m.Rounds, one)
	}
	m.summarize()
	return &Report{Schema: Schema, Cases: []Measurement{m}}
}

func TestDifference(t *testing.T) {
	calm := func(r, c int) float64 { return 1 + 0.01*float64((7*r+3*c)%10)/10 }
	// Half of the rounds take twice as long, and nothing is undisturbed.
	torn := func(r, c int) float64 { return calm(r, c) * (1.5 + float64((r+c)%2)) }
	held := func(r, c int) float64 {
		if r+c == 0 {
			return 1
		}
		return 1.1 * calm(r, c)
	}
	wavering := func(r, c int) float64 { return calm(r, c) * (1 + 0.05*float64(r%2)) }
	unpaced := func(r *Report) *Report {
		for i := range r.Cases[0].Rounds {
			r.Cases[0].Rounds[i].PaceS = nil
		}
		return r
	}
	for _, tc := range []struct {
		why      string
		was, now *Report
		want     Verdict
	}{
		{"nothing", reportOf(1, 8, calm), reportOf(1, 8, calm), Same},
		{"2% is less than what is looked for", reportOf(1, 8, calm), reportOf(1.02, 8, calm), Same},
		{"10% slower", reportOf(1, 8, calm), reportOf(1.1, 8, calm), Slower},
		{"10% faster", reportOf(1.1, 8, calm), reportOf(1, 8, calm), Faster},
		{"the same, the machine became slower", reportOf(1, 8, calm), reportOf(1, 8, torn), Unclear},
		{"all but one call became slower", unpaced(reportOf(1, 8, calm)), unpaced(reportOf(1, 8, held)), Unclear},
		{"10% slower, some calls are disturbed in every round", reportOf(1, 8, torn), reportOf(1.1, 8, torn), Slower},
		{"10% slower, in a single round", reportOf(1, 1, calm), reportOf(1.1, 1, calm), Unclear},
		{"10% slower, in two rounds that vary by 5%", reportOf(1, 2, wavering), reportOf(1.1, 2, wavering), Unclear},
		{"10% slower, other processes were busy before", noisy(65, reportOf(1, 8, calm)), reportOf(1.1, 8, calm), Unclear},
		{"10% slower, other processes are busy now", reportOf(1, 8, calm), noisy(5, reportOf(1.1, 8, calm)), Unclear},
		{"10% slower, other processes used little", noisy(4, reportOf(1, 8, calm)), noisy(4, reportOf(1.1, 8, calm)), Slower},
		{"the same, other processes were busy", noisy(65, reportOf(1, 8, calm)), noisy(65, reportOf(1, 8, calm)), Unclear},
	} {
		c := Compare(tc.was, tc.now, 4)
		if len(c) != 1 || c[0].Verdict != tc.want || (c[0].Why != "") != (tc.want == Unclear) {
			t.Errorf("%s: %+v, want %s", tc.why, c, tc.want)
		}
	}
	wild := func(r, c int) float64 { return calm(r, c) * (1 + float64((r*5)%7)) }
	if c := Compare(unpaced(reportOf(1, 8, wild)), unpaced(reportOf(1, 8, func(r, c int) float64 { return wild(r+3, c) * 1.3 })), 4); c[0].Verdict != Unclear {
		t.Errorf("%+v", c)
	}
}

// If the ceiling of a case fell as much, the call is not the cause.
func TestDifferenceOfTheCeiling(t *testing.T) {
	calm := func(r, c int) float64 { return 1 + 0.01*float64((7*r+3*c)%10)/10 }
	at := func(seconds, rate float64, bound Bound) *Report {
		r := reportOf(seconds, 8, calm)
		r.Cases[0].Bound = bound
		for i := range r.Cases[0].Rounds {
			if x := &r.Cases[0].Rounds[i]; bound == BoundFMA {
				x.CeilingGFLOPS = &rate
			} else {
				x.CeilingGBS = &rate
			}
		}
		return r
	}
	for _, tc := range []struct {
		why             string
		seconds, before float64
		after           float64
		want            Verdict
	}{
		{"slower at the same ceiling", 1.2, 50, 50, Slower},
		{"slower, and the ceiling fell as much", 1.2, 50, 41, Unclear},
		{"slower by more than the ceiling fell", 1.3, 50, 43, Slower},
		{"as fast, the ceiling rose", 1, 50, 60, Same},
		{"the ceiling is not known", 1.2, 0, 0, Unclear},
	} {
		for _, bound := range []Bound{BoundRead, BoundFMA} {
			if c := Compare(at(1, tc.before, bound), at(tc.seconds, tc.after, bound), 4); c[0].Verdict != tc.want {
				t.Errorf("%s: %s: %+v, want %s", bound, tc.why, c, tc.want)
			}
		}
	}
	if c := Compare(at(1, 50, ""), at(1.2, 41, ""), 4); c[0].Verdict != Slower {
		t.Errorf("a ceiling that does not bind the case: %+v", c)
	}
}

func TestDifferenceOfWhatIsNotMeasured(t *testing.T) {
	one := func(name string, s Status) *Report {
		x := 1.0
		return &Report{Cases: []Measurement{{Backend: "cpu", Name: name, Status: s, Note: "why", Times: Times{MedianS: &x, MinS: &x}, Rounds: []Round{{TimesS: []float64{1}}}}}}
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
	wantText(t, written(was, now, changes), "they differ in CPU: \"old one\" and \"new one\"\n", "cpu f32/b1h8s256d64  1.00 ms  1.10 ms  +10.0% ", "  slower\n", "\n1 case: 1 slower\n")
}

// written is WriteChanges of what is compared.
func written(was, now *Report, changes []Change) func(io.Writer) error {
	return func(w io.Writer) error { return WriteChanges(w, was, now, changes, 4) }
}

// The change is that of the figures next to it, of which the fastest calls differ by more.
func TestChangeIsThatOfTheFigures(t *testing.T) {
	calm := func(_, _ int) float64 { return 1 }
	spread := func(_, c int) float64 { // one call of a round is faster, and one slower
		switch c {
		case 0:
			return 0.93
		case 9:
			return 1.07
		}
		return 1
	}
	was, now := reportOf(195e-6, 10, spread), reportOf(201e-6, 10, calm)
	wantText(t, written(was, now, Compare(was, now, 4)), "  195 µs  201 µs  +3.1%   +1.0 to +5.1%  same\n")
	busy := Compare(noisy(61, was), noisy(73, now), 4)
	wantText(t, written(was, now, busy), "  unclear, noisy: other processes used 61% (old) and 73% (new) of the CPU time\n", "\n1 case: 1 unclear\n")
	if w := Worst(busy, 0); w != nil {
		t.Errorf("a gate fails for a noisy case: %+v", w)
	}
}

// noisy returns r with a case during which other processes used percent of the CPU time.
func noisy(percent float64, r *Report) *Report {
	r.Cases[0].OthersPercent = &percent
	return r
}

// Of pairs of runs, Compare reports no change where there is none and finds one by 5% on a quiet machine. The machines
// vary as measured ones do, and what varies from run to run or from round to round is no independent draw of a call.
func TestPairsOfRuns(t *testing.T) {
	const pairs, rounds = 200, 12
	for _, tc := range []struct {
		machine string
		// run returns the factors of a run's rounds on the calls and on the arithmetic between them.
		run    func(rng *rand.Rand) (calls, pace func() float64)
		others float64 // percent of the CPU time that other processes use
		// alarms limits the changes found where there is none, missed those of 5% not found.
		alarms, missed int
	}{
		{"quiet: processes differ by 0.3%, rounds by 0.5%, and one of 20 rounds is disturbed", func(rng *rand.Rand) (calls, pace func() float64) {
			process := 1 + 0.003*rng.NormFloat64()
			return func() float64 {
				x := process * (1 + 0.005*rng.NormFloat64())
				if rng.IntN(20) == 0 {
					x *= 1.05 + 0.2*rng.Float64()
				}
				return x
			}, func() float64 { return 1 }
		}, 0, 0, pairs / 10},
		{"caches and memory are shared: the calls drift, the arithmetic does not", func(rng *rand.Rand) (calls, pace func() float64) {
			drift := 0.05 * rng.NormFloat64()
			return func() float64 {
				drift = 0.7*drift + 0.05*math.Sqrt(1-0.7*0.7)*rng.NormFloat64()
				return math.Exp(drift)
			}, func() float64 { return 1 }
		}, 0, pairs / 20, pairs},
		{"the clock rate differs by 5% between processes", func(rng *rand.Rand) (calls, pace func() float64) {
			clock := 1 + 0.05*rng.NormFloat64()
			same := func() float64 { return clock * (1 + 0.002*rng.NormFloat64()) }
			return same, same
		}, 0, 0, pairs},
		{"busy: others take a part of the calls that differs from run to run", func(rng *rand.Rand) (calls, pace func() float64) {
			share := rng.Float64()
			return func() float64 { return 1 + share*(1+0.1*rng.NormFloat64()) }, func() float64 { return 1 + share/2 }
		}, 65, 0, pairs},
	} {
		rng := rand.New(rand.NewPCG(5, 6))
		run := func(seconds float64) *Report {
			calls, pace := tc.run(rng)
			factor := 0.0
			r := reportOf(seconds, rounds, func(_, call int) float64 {
				if call == 0 {
					factor = calls()
				}
				x := factor * (1 + 0.002*rng.ExpFloat64())
				if rng.IntN(20) == 0 { // an interruption
					x *= 3
				}
				return x
			})
			for i := range r.Cases[0].Rounds {
				factor, paces := pace(), r.Cases[0].Rounds[i].PaceS
				for j := range paces {
					paces[j] = 1e-6 * factor * (1 + 0.002*rng.ExpFloat64())
				}
			}
			return noisy(tc.others, r)
		}
		alarms, missed := 0, 0
		for range pairs {
			old, same, slower := run(1), run(1), run(1.05)
			if v := Compare(old, same, 4)[0].Verdict; v == Slower || v == Faster {
				alarms++
			}
			if Compare(old, slower, 4)[0].Verdict != Slower {
				missed++
			}
		}
		if alarms > tc.alarms || missed > tc.missed {
			t.Errorf("%s: of %d pairs %d false alarms, %d of the slowed ones missed", tc.machine, pairs, alarms, missed)
		}
	}
}
