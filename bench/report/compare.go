package report

import (
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/seed90331342/attn/bench/internal/format"
	"github.com/seed90331342/attn/bench/internal/stats"
)

// Verdict is how a case changed from one report to another.
type Verdict string

const (
	// Same: the times differ by less than the threshold.
	Same Verdict = "same"
	// Slower and Faster: the times differ by at least the threshold, and by more than the
	// noise.
	Slower Verdict = "slower"
	Faster Verdict = "faster"
	// Unclear: the noise could hide a change as large as the threshold.
	Unclear Verdict = "unclear"
	// Broken: the case was measured and now is wrong or fails.
	Broken Verdict = "broken"
	// Fixed: the case was wrong or failed and now is measured.
	Fixed Verdict = "fixed"
	// Missing: only one of the reports has measured the case.
	Missing Verdict = "missing"
)

// Change is how one case changed.
type Change struct {
	// Old and New are the rows; nil where a report has none.
	Old, New *Measurement
	Verdict  Verdict
	// Percent is the increase of the time of a call, with Low to High as its 99%
	// confidence interval; 0 when there is nothing to compare.
	Percent, Low, High float64
	// By is the estimate with the narrower interval: "f" compares the fastest calls, which
	// the load of a machine disturbs least; "a" the ratios of calls and of the plain
	// arithmetic between them, which load slows down alike.
	By string
}

const (
	// chanceLimit is the p-value below which a difference is not noise. Six rounds of each
	// report can reach it, fewer cannot.
	chanceLimit = 0.005
	// floorAt is the quantile that stands for the fastest calls: low enough to be
	// undisturbed, high enough not to be an outlier.
	floorAt = 0.05
	// resamples is the number of bootstrap samples, tail the part outside of the interval
	// on either side.
	resamples = 400
	tail      = 0.005
)

// Compare compares the cases of two reports, in the order of the newer one. A change of at
// least percent that exceeds the noise makes a case Slower or Faster.
func Compare(old, new *Report, percent float64) []Change {
	var changes []Change
	paired := map[*Measurement]bool{}
	for i := range new.Cases {
		c := Change{New: &new.Cases[i]}
		for j := range old.Cases {
			if o := &old.Cases[j]; o.SameCase(c.New) && !paired[o] {
				c.Old, paired[o] = o, true
				break
			}
		}
		c.judge(percent, old.Environment.GoVersion == new.Environment.GoVersion)
		changes = append(changes, c)
	}
	for j := range old.Cases {
		if o := &old.Cases[j]; !paired[o] {
			changes = append(changes, Change{Old: o, Verdict: Missing})
		}
	}
	return changes
}

// SameCase reports whether m and o are figures of the same call by the same means.
func (m *Measurement) SameCase(o *Measurement) bool {
	return m.Backend == o.Backend && m.Contender == o.Contender && m.Variant == o.Variant && m.Threads == o.Threads && m.Name == o.Name
}

// judge compares the rows. paced is set when both have compiled the arithmetic between the
// calls to the same code.
func (c *Change) judge(percent float64, paced bool) {
	ok := func(m *Measurement) bool { return m != nil && m.Status == OK }
	bad := func(m *Measurement) bool { return m != nil && (m.Status == Wrong || m.Status == Failed) }
	switch {
	case ok(c.Old) && bad(c.New):
		c.Verdict = Broken
		return
	case bad(c.Old) && ok(c.New):
		c.Verdict = Fixed
		return
	case !ok(c.Old) || !ok(c.New):
		c.Verdict = Missing
		return
	}
	old, new := c.Old.Rounds, c.New.Rounds
	paced = paced && hasPace(old) && hasPace(new)
	estimates := map[string]estimate{"f": func(rounds []Round) float64 { return floor(rounds, paced) }}
	if paced {
		estimates["a"] = relativeToPace
	}
	narrowest, chance := math.Inf(1), 1.0
	for by, e := range estimates {
		if low, high := e.interval(old, new); high-low < narrowest || high-low == narrowest && by == "f" {
			narrowest = high - low
			c.By, c.Low, c.High = by, 100*(low-1), 100*(high-1)
			c.Percent = 100 * (e(new)/e(old) - 1)
			chance = stats.RankTest(e.rounds(old), e.rounds(new))
		}
	}
	half := (c.High - c.Low) / 2
	if c.Old.Bound == BoundRead && c.New.Bound == BoundRead && math.Abs(c.Percent) >= percent {
		// The place of the operands in memory varies between runs, and with it the rate at
		// which they can be read. Then the call is not the cause.
		relative := 100 * (relativeToRead(new)/relativeToRead(old) - 1)
		if confirmed := relative*c.Percent > 0 && math.Abs(relative) >= percent/2; !confirmed { // false for NaN
			c.Verdict = Unclear
			return
		}
	}
	switch {
	case chance < chanceLimit && math.Abs(c.Percent) >= percent && math.Abs(c.Percent) > half:
		c.Verdict = Slower
		if c.Percent < 0 {
			c.Verdict = Faster
		}
	case half > percent || math.Abs(c.Percent) >= percent:
		c.Verdict = Unclear
	default:
		c.Verdict = Same
	}
}

// hasPace reports whether all rounds have arithmetic between their calls.
func hasPace(rounds []Round) bool {
	return !slices.ContainsFunc(rounds, func(r Round) bool { return len(r.PaceS) == 0 || len(r.PaceS) != len(r.TimesS) })
}

// estimate computes the time of a call from rounds.
type estimate func(rounds []Round) float64

// floor is the time of the fastest calls; if paced, in units of the fastest arithmetic,
// which depends on the processor's clock rate.
func floor(rounds []Round, paced bool) float64 {
	var times, paces []float64
	for _, r := range rounds {
		times, paces = append(times, r.TimesS...), append(paces, r.PaceS...)
	}
	at := stats.Quantile(times, floorAt)
	if paced {
		at /= stats.Quantile(paces, floorAt)
	}
	return at
}

// relativeToPace is the median of the ratios of calls and arithmetic.
func relativeToPace(rounds []Round) float64 {
	var ratios []float64
	for _, r := range rounds {
		for i, t := range r.TimesS {
			ratios = append(ratios, t/r.PaceS[i])
		}
	}
	return stats.Median(ratios)
}

// relativeToRead is the median over rounds of the time of the fastest calls relative to the
// time of reading their operands; NaN when a rate is unknown.
func relativeToRead(rounds []Round) float64 {
	var all []float64
	for i, r := range rounds {
		if r.CeilingGBS == nil {
			return math.NaN()
		}
		all = append(all, floor(rounds[i:i+1], false)**r.CeilingGBS)
	}
	return stats.Median(all)
}

// rounds returns the estimate from each round.
func (e estimate) rounds(rounds []Round) []float64 {
	all := make([]float64, len(rounds))
	for i := range rounds {
		all[i] = e(rounds[i : i+1])
	}
	return all
}

// interval returns the confidence interval of the ratio of the new time to the old one by
// bootstrap over rounds (Efron 1979): variation between rounds then counts as it would
// between runs. The random numbers are always the same.
func (e estimate) interval(old, new []Round) (low, high float64) {
	rng := rand.New(rand.NewPCG(1, 2))
	resampled := func(rounds []Round) []Round { // with replacement
		drawn := make([]Round, len(rounds))
		for i := range drawn {
			drawn[i] = rounds[rng.IntN(len(rounds))]
		}
		return drawn
	}
	factors := make([]float64, resamples)
	for i := range factors {
		factors[i] = e(resampled(new)) / e(resampled(old))
	}
	return stats.Quantile(factors, tail), stats.Quantile(factors, 1-tail)
}

// Worst returns the change that a gate fails for: the first broken case, else the one with
// the largest slowdown above limit percent; nil when there is none.
func Worst(changes []Change, limit float64) *Change {
	var worst *Change
	for i := range changes {
		c := &changes[i]
		if c.Verdict == Broken {
			return c
		}
		if c.Verdict == Slower && c.Percent > limit && (worst == nil || c.Percent > worst.Percent) {
			worst = c
		}
	}
	return worst
}

// WriteChanges writes changes as text for people: differences between the environments, a
// row for each case, and the meaning of the columns. percent is the threshold given to
// Compare.
func WriteChanges(w io.Writer, old, new *Report, changes []Change, percent float64) error {
	var b strings.Builder
	for _, r := range []struct {
		name string
		e    *Environment
	}{{"old", &old.Environment}, {"new", &new.Environment}} {
		fmt.Fprintf(&b, "%s  %s\n", r.name, strings.Join(nonEmpty(r.e.Date, r.e.CPU, r.e.GoVersion, r.e.revision()), " · "))
	}
	for _, f := range old.Environment.Differences(&new.Environment) {
		fmt.Fprintf(&b, "they differ in %s: %q and %q\n", f.Name, f.Old, f.New)
	}
	b.WriteByte('\n')
	t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "case\told\tnew\tchange\t99% interval\tverdict")
	for i := range changes {
		fmt.Fprintln(t, strings.Join(changes[i].cells(), "\t"))
	}
	t.Flush()
	fmt.Fprintf(&b, `
%s

change   of the time of a call, by the more certain of two estimates: f, the fastest calls; a, calls relative to the arithmetic
         that ran between them, which a busy machine slows down alike. old and new are plain medians
verdict  slower or faster: at least %g%%, more than half of the interval, and significant (Mann and Whitney's test, %g%%)
         unclear: the noise could hide a change of %g%%, or reading the operands explains it; measure longer, or on a quiet machine
`, summary(changes), percent, 100*chanceLimit, percent)
	_, err := io.WriteString(w, b.String())
	return err
}

// Difference is a setting that two environments disagree on.
type Difference struct{ Name, Old, New string }

// Differences returns the settings that affect speed and differ between two environments.
func (e *Environment) Differences(o *Environment) []Difference {
	var d []Difference
	add := func(name, old, new string) {
		if old != new {
			d = append(d, Difference{name, old, new})
		}
	}
	add("CPU", e.CPU, o.CPU)
	add("CPUs", fmt.Sprint(e.CPUs), fmt.Sprint(o.CPUs))
	add("Go version", e.GoVersion, o.GoVersion)
	add("system", e.OS+"/"+e.Arch, o.OS+"/"+o.Arch)
	add("variables", strings.Join(e.Variables, " "), strings.Join(o.Variables, " "))
	add("seed", fmt.Sprint(e.Seed), fmt.Sprint(o.Seed))
	for _, a := range e.Backends {
		for _, b := range o.Backends {
			if a.Name == b.Name && a.Threads == b.Threads {
				add(a.Name, strings.Join([]string{a.Device, a.Provider, a.Driver}, " · "), strings.Join([]string{b.Device, b.Provider, b.Driver}, " · "))
			}
		}
	}
	return d
}

// cells returns the row of a change.
func (c *Change) cells() []string {
	m := c.New
	if m == nil {
		m = c.Old
	}
	name := m.who() + " " + m.Name
	if m.Variant != Fused {
		name += " " + m.Variant
	}
	time := func(m *Measurement) string {
		switch {
		case m == nil:
			return "-"
		case m.Status != OK:
			return string(m.Status)
		}
		return seconds.show(m.MedianS)
	}
	change, interval := "-", "-"
	if c.By != "" {
		change, interval = fmt.Sprintf("%+.1f%% %s", c.Percent, c.By), fmt.Sprintf("%+.1f to %+.1f%%", c.Low, c.High)
	}
	return []string{name, time(c.Old), time(c.New), change, interval, string(c.Verdict)}
}

// summary counts the verdicts.
func summary(changes []Change) string {
	n := map[Verdict]int{}
	for _, c := range changes {
		n[c.Verdict]++
	}
	var parts []string
	for _, v := range []Verdict{Broken, Slower, Faster, Fixed, Unclear, Same, Missing} {
		if n[v] > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n[v], v))
		}
	}
	return fmt.Sprintf("%s: %s", format.Count(len(changes), "case"), strings.Join(parts, ", "))
}
