package bench

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
)

// WriteChanges writes what [Difference] says of two reports for people: what differs in
// how they were measured, a row a case, and how to read it. percent is what Difference
// was asked with.
func WriteChanges(w io.Writer, was, now *Report, changes []Change, percent float64) error {
	var b strings.Builder
	for _, r := range []struct {
		name string
		e    *Environment
	}{{"old", &was.Environment}, {"new", &now.Environment}} {
		fmt.Fprintf(&b, "%s  %s · %s · %s", r.name, r.e.Date, r.e.CPU, r.e.GoVersion)
		if r.e.Commit != "" {
			fmt.Fprintf(&b, " · %.10s", r.e.Commit)
			if r.e.Modified {
				b.WriteString("+")
			}
		}
		b.WriteByte('\n')
	}
	for _, d := range departures(was, now) {
		fmt.Fprintf(&b, "they differ in %s\n", d)
	}
	b.WriteByte('\n')
	t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "case\told\tnew\tchange\t99% interval\tverdict\t")
	for i := range changes {
		fmt.Fprintln(t, strings.Join(changes[i].cells(), "\t")+"\t")
	}
	t.Flush() // into a strings.Builder, which takes everything
	fmt.Fprintf(&b, `
%s

change   of the time of a call, by what is more certain of two: the fastest calls (f), or the quotients of calls and of the
         arithmetic that ran between them (a), which a busy machine slows down alike; old and new are plain medians
verdict  slower or faster: at least %g%%, more than half of the interval, and not by chance (Mann and Whitney's test, %g%%)
         unclear: a change of %g%% could hide in the noise, or reading the operands explains it; measure longer, or when it is quiet
`, summary(changes), percent, 100*chanceLimit, percent)
	lines := strings.Split(b.String(), "\n")
	for i := range lines {
		lines[i] = strings.TrimRight(lines[i], " ")
	}
	_, err := io.WriteString(w, strings.Join(lines, "\n"))
	return err
}

// departures says in what the environments differ that decides how fast calls are.
func departures(was, now *Report) []string {
	var d []string
	for _, f := range []struct{ what, was, now string }{
		{"CPU", was.Environment.CPU, now.Environment.CPU},
		{"CPUs", fmt.Sprint(was.Environment.CPUs), fmt.Sprint(now.Environment.CPUs)},
		{"Go version", was.Environment.GoVersion, now.Environment.GoVersion},
		{"system", was.Environment.OS + "/" + was.Environment.Arch, now.Environment.OS + "/" + now.Environment.Arch},
		{"variables", strings.Join(was.Environment.Variables, " "), strings.Join(now.Environment.Variables, " ")},
		{"seed", fmt.Sprint(was.Environment.Seed), fmt.Sprint(now.Environment.Seed)},
	} {
		if f.was != f.now {
			d = append(d, fmt.Sprintf("%s: %q and %q", f.what, f.was, f.now))
		}
	}
	for _, o := range was.Environment.Backends {
		for _, n := range now.Environment.Backends {
			if o.Name != n.Name || o.Threads != n.Threads {
				continue
			}
			a, b := strings.Join([]string{o.Device, o.Provider, o.Driver}, " · "), strings.Join([]string{n.Device, n.Provider, n.Driver}, " · ")
			if a != b {
				d = append(d, fmt.Sprintf("%s: %q and %q", o.Name, a, b))
			}
		}
	}
	return d
}

// cells are the cells of the row.
func (c *Change) cells() []string {
	m := c.New
	if m == nil {
		m = c.Old
	}
	name := m.Backend + " " + m.Name
	if m.Contender != "" {
		name = m.Contender + " " + m.Name
	}
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
		return shown(m.MedianS, duration)
	}
	change, interval := "-", "-"
	if c.By != "" {
		by := "f"
		if c.By == ByPace {
			by = "a"
		}
		change, interval = fmt.Sprintf("%+.1f%% %s", c.Percent, by), fmt.Sprintf("%+.1f to %+.1f%%", c.Low, c.High)
	}
	return []string{name, time(c.Old), time(c.New), change, interval, string(c.Verdict)}
}

// summary counts verdicts in words.
func summary(changes []Change) string {
	var parts []string
	for _, v := range []Verdict{Broken, Slower, Faster, Fixed, Unclear, Same, Missing} {
		n := 0
		for _, c := range changes {
			if c.Verdict == v {
				n++
			}
		}
		if n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n, v))
		}
	}
	return fmt.Sprintf("%s: %s", count(len(changes), "case"), strings.Join(parts, ", "))
}

// Worst returns the change that a gate fails for: the first broken case, else the one that
// became slower by the most; nil when there is none. limit is the least percentage.
func Worst(changes []Change, limit float64) *Change {
	if i := slices.IndexFunc(changes, func(c Change) bool { return c.Verdict == Broken }); i >= 0 {
		return &changes[i]
	}
	var worst *Change
	for i := range changes {
		if c := &changes[i]; c.Verdict == Slower && c.Percent > limit && (worst == nil || c.Percent > worst.Percent) {
			worst = c
		}
	}
	return worst
}
