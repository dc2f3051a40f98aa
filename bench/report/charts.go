//go:build !js

package report

import (
	"math"
	"slices"
	"strings"

	"github.com/seed90331342/attn/bench/internal/chart"
	"github.com/seed90331342/attn/bench/internal/format"
)

// curve is the cases of a report that form one line, by length.
type curve struct {
	name  string
	cases []*Measurement
}

// curves sorts the cases into curves.
func (r *Report) curves() []curve {
	var all []curve
	for _, m := range r.on(nil) {
		at := slices.IndexFunc(all, func(c curve) bool { return c.name == m.curve() })
		if at < 0 {
			at, all = len(all), append(all, curve{name: m.curve()})
		}
		all[at].cases = append(all[at].cases, m)
	}
	for _, c := range all {
		slices.SortStableFunc(c.cases, func(a, b *Measurement) int { return a.SeqK - b.SeqK })
	}
	return all
}

// curve names the curve of a case: its device and series.
func (m *Measurement) curve() string {
	threads := ""
	if m.Threads > 0 {
		threads = format.Count(m.Threads, "thread")
	}
	return strings.Join(nonEmpty(m.Backend, threads, m.Series), " · ")
}

// tip describes a row for the pointer: the columns of the text table.
func (m *Measurement) tip() string {
	lines := []string{m.curve()}
	for _, c := range columns {
		if text := c.unit.show(c.value(m)); c.width > 0 && text != "-" && text != "" {
			lines = append(lines, c.head+" "+text)
		}
	}
	return strings.Join(append(lines, m.outcome()), "\n")
}

// quantity is what a chart shows of each case, against the length.
type quantity struct {
	chart.Chart
	// of is the quantity of a case if a call takes that many seconds.
	of func(m *Measurement, seconds float64) float64
	// ceiling is the dashed line; nil for the quantity of the fastest call that the ceilings allow.
	ceiling func(m *Measurement) float64
}

var quantities = []quantity{
	{
		Chart: chart.Chart{Title: "Throughput", Y: chart.Axis{Label: "GFLOP/s", Format: format.Plain},
			About: "Operations a second on visible pairs; dashed: the limit by the ceilings measured with each case; hollow marks: predicted, not run."},
		of: func(m *Measurement, seconds float64) float64 { return float64(m.FLOPs) / seconds / 1e9 },
	}, {
		Chart: chart.Chart{Title: "Time of a call", Y: chart.Axis{Label: "time", Format: func(x float64) string { return tick(format.Duration(x)) }},
			About: "Median of the repetitions; dashed: the limit by the ceilings; hollow marks: predicted, not run."},
		of: func(_ *Measurement, seconds float64) float64 { return seconds },
	}, {
		Chart: chart.Chart{Title: "Memory of a call", Y: chart.Axis{Label: "memory", Format: func(x float64) string { return tick(format.Size(x)) }, Binary: true},
			About: "Operands and scratch memory, counted; dashed: what the S x S weights alone would take."},
		of: func(m *Measurement, _ float64) float64 { return float64(m.Memory.Counted()) },
		ceiling: func(m *Measurement) float64 {
			return 4 * float64(m.Batch) * float64(m.Heads) * float64(m.SeqQ) * float64(m.SeqK)
		},
	},
}

// charts returns the pictures for which the report has figures.
func (r *Report) charts() []chart.Chart {
	x := chart.Axis{Label: "S, sequence length", Format: func(x float64) string { return format.Length(int(math.Round(x))) }}
	for i := range r.Cases {
		x.Ticks = append(x.Ticks, float64(r.Cases[i].SeqK))
	}
	slices.Sort(x.Ticks)
	x.Ticks = slices.Compact(x.Ticks)
	var all []chart.Chart
	for _, q := range quantities {
		c := q.Chart
		c.X = x
		for _, curve := range r.curves() {
			if l := q.line(curve); len(l.Points) > 0 {
				c.Lines = append(c.Lines, l)
			}
		}
		if len(c.Lines) > 0 {
			all = append(all, c)
		}
	}
	return all
}

// line returns the line of a curve.
func (q *quantity) line(c curve) chart.Line {
	l := chart.Line{Name: c.name}
	for _, m := range c.cases {
		p := chart.Point{X: float64(m.SeqK), Tip: m.tip()}
		switch {
		case m.Status == OK && m.MedianS != nil:
			p.Y = q.of(m, *m.MedianS)
			if m.LowS != nil && m.HighS != nil {
				a, b := q.of(m, *m.LowS), q.of(m, *m.HighS)
				p.Low, p.High = min(a, b), max(a, b)
			}
		case m.Status == Predicted && m.PredictedS != nil:
			p.Y, p.Predicted = q.of(m, *m.PredictedS), true
		}
		if !(p.Y > 0) {
			continue
		}
		l.Points = append(l.Points, p)
		top := 0.0
		switch {
		case q.ceiling != nil:
			top = q.ceiling(m)
		case !p.Predicted && m.PercentOfBound != nil:
			top = q.of(m, *m.MedianS**m.PercentOfBound/100)
		}
		if top > 0 {
			l.Ceiling = append(l.Ceiling, chart.Point{X: p.X, Y: top})
		}
	}
	return l
}

// tick drops zeros after the decimal point: 20 ms, 4 GiB.
func tick(text string) string {
	number, unit, _ := strings.Cut(text, " ")
	if strings.Contains(number, ".") {
		number = strings.TrimRight(strings.TrimRight(number, "0"), ".")
	}
	return number + " " + unit
}
