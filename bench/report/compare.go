package report

import (
	"fmt"
	"io"
	"math"
	"strings"
	"text/tabwriter"

	"github.com/seed90331342/attn/bench/internal/format"
	"github.com/seed90331342/attn/bench/internal/stats"
	"github.com/seed90331342/attn/kernels"
)

// Verdict is how a case changed from one report to another.
type Verdict string

const (
	// Same: the times differ by less than the threshold.
	Same Verdict = "same"
	// Slower and Faster: the times differ by at least the threshold and by more than the
	// noise, and the machine does not explain the difference.
	Slower Verdict = "slower"
	Faster Verdict = "faster"
	// Unclear: other processes were busy, the noise could hide a change as large as the
	// threshold, or the machine explains the change.
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
	// Why is the reason for Unclear.
	Why string
	// Percent is the increase of the median time of a call, with Low to High as its 95%
	// confidence interval; 0 when there is nothing to compare.
	Percent, Low, High float64
}

// betweenRuns is the variation between processes that no single run can show, relative to a time: about three standard
// deviations. The medians of 24 processes of one program on an otherwise idle core had standard deviations of 0.2 and
// 0.5% in two cases; the change between two processes varies by √2 of that.
const betweenRuns = 0.02

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
	return m.Backend == o.Backend && m.Variant == o.Variant && m.Threads == o.Threads && m.Name == o.Name
}

// judge compares the rows. paced is set when both have compiled the arithmetic between the calls to the same code.
func (c *Change) judge(percent float64, paced bool) {
	ok := func(m *Measurement) bool { return m != nil && m.Status == OK && m.MinS != nil }
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
	old, new := c.Old.Medians(), c.New.Medians()
	ratio := stats.Median(new) / stats.Median(old)
	within := math.Hypot(stats.DriftingInterval(old), stats.DriftingInterval(new))
	half := 100 * ratio * math.Hypot(within, betweenRuns)
	c.Percent = 100 * (ratio - 1)
	c.Low, c.High = c.Percent-half, c.Percent+half
	changed := math.Abs(c.Percent) >= percent
	// The machine is the cause of a change if less than half of percent remains of it in the
	// ratio of a figure that the machine affects less than the median.
	explains := func(ratio float64) bool {
		remains := 100 * (ratio - 1)
		return !(remains*c.Percent > 0 && math.Abs(remains) >= percent/2) // true for NaN
	}
	inUnits := func(rate func(r *Round) *float64) float64 { return relative(c.New, rate) / relative(c.Old, rate) }
	pace := inUnits(func(r *Round) *float64 { return Positive(1 / stats.Median(r.PaceS)) }) // of no paces +Inf: nil
	ceiling := inUnits(func(r *Round) *float64 {
		return map[Bound]*float64{BoundFMA: r.CeilingGFLOPS, BoundMatrix: r.CeilingGFLOPS, BoundRead: r.CeilingGBS}[c.New.Bound]
	})
	c.Verdict = Unclear
	switch {
	case c.Old.noisy() || c.New.noisy():
		c.Why = c.noise()
	case changed && math.Abs(c.Percent) <= half:
		c.Why = "the interval contains 0"
	case !changed && half > percent:
		c.Why = fmt.Sprintf("the interval is wider than ±%g%%", percent)
	case !changed:
		c.Verdict = Same
	case explains(*c.New.MinS / *c.Old.MinS):
		// Other work slows most calls down, but hardly ever all of them.
		c.Why = "the fastest call did not change"
	case paced && !math.IsNaN(pace) && explains(pace):
		c.Why = "plain arithmetic between the calls changed too"
	case c.Old.Bound == c.New.Bound && c.New.Bound != BoundLaunch && c.New.Bound != "" && explains(ceiling):
		// The place of the operands in memory varies between runs, and with it the rate at which they can be read. A
		// neighbour on the same core slows a whole run down, and no counter shows it.
		c.Why = "the ceiling measured between the calls changed too"
	case c.Percent > 0:
		c.Verdict = Slower
	default:
		c.Verdict = Faster
	}
}

// noise names the reports in which the case is noisy.
func (c *Change) noise() string {
	var shares []string
	for i, m := range []*Measurement{c.Old, c.New} {
		if m.noisy() {
			shares = append(shares, fmt.Sprintf("%.0f%% (%s)", *m.OthersPercent, [...]string{"old", "new"}[i]))
		}
	}
	return fmt.Sprintf("noisy: other processes used %s of the CPU time", strings.Join(shares, " and "))
}

// relative is the median over rounds of the time of a call in a unit that was measured in the same round: the
// arithmetic between the calls, or the calls that the ceiling allows. It is NaN when a round has none.
func relative(m *Measurement, rate func(r *Round) *float64) float64 {
	var all []float64
	for i := range m.Rounds {
		x := rate(&m.Rounds[i])
		if x == nil {
			return math.NaN()
		}
		all = append(all, stats.Median(m.Rounds[i].TimesS)**x)
	}
	return stats.Median(all)
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

// WriteChanges writes changes as text for people: differences between the environments, a row for each case, and the
// meaning of the columns. percent is the threshold given to Compare.
func WriteChanges(w io.Writer, old, new *Report, changes []Change, percent float64) error {
	var b strings.Builder
	for i, e := range []*Environment{&old.Environment, &new.Environment} {
		fmt.Fprintf(&b, "%s  %s\n", [...]string{"old", "new"}[i], strings.Join(nonEmpty(e.Date, e.CPU, e.GoVersion, e.Version), " · "))
	}
	for _, f := range old.Environment.Differences(&new.Environment) {
		fmt.Fprintf(&b, "they differ in %s: %q and %q\n", f.Name, f.Old, f.New)
	}
	b.WriteByte('\n')
	t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "case\told\tnew\tchange\tinterval\tverdict")
	for i := range changes {
		fmt.Fprintln(t, strings.Join(changes[i].cells(), "\t"))
	}
	t.Flush()
	fmt.Fprintf(&b, `
%s

change    of the median time of a call, from old to new
interval  95%%, from the variation between the rounds of each report, and %g%% for the variation between processes
verdict   slower or faster: at least %g%%, more than half of the interval, and not explained by the machine
          unclear: other processes were busy, the noise could hide a change of %[3]g%%, or the machine itself changed
`, summary(changes), 100*betweenRuns, percent)
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
	library := func(b kernels.Info) string { return strings.Join([]string{b.Device, b.Provider, b.Driver}, " · ") }
	for _, a := range e.Backends {
		for _, b := range o.Backends {
			if a.Name == b.Name && a.Threads == b.Threads {
				add(a.Name, library(a), library(b))
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
	name := m.Backend + " " + m.Name
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
	change, interval, verdict := "-", "-", string(c.Verdict)
	switch c.Verdict {
	case Same, Slower, Faster, Unclear:
		change, interval = fmt.Sprintf("%+.1f%%", c.Percent), fmt.Sprintf("%+.1f to %+.1f%%", c.Low, c.High)
	}
	if c.Why != "" {
		verdict += ", " + c.Why
	}
	return []string{name, time(c.Old), time(c.New), change, interval, verdict}
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
