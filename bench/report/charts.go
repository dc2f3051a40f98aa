package report

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"

	"github.com/seed90331342/attn/bench/internal/chart"
	"github.com/seed90331342/attn/bench/internal/format"
	"github.com/seed90331342/attn/bench/internal/stats"
)

// WritePictures draws the report as PNG and SVG files: throughput, time, memory and percent
// of the ceiling by length, each with the ceilings, and the roofline. write is called with
// the name of each file and a function that writes its contents. It returns an error for a
// report without measured cases.
func (r *Report) WritePictures(write func(name string, contents func(io.Writer) error) error) error {
	charts := r.charts()
	if len(charts) == 0 {
		return errors.New("pictures: no case was measured, there is nothing to draw")
	}
	caption := r.caption()
	for _, c := range charts {
		for _, f := range []struct {
			ending string
			draw   func(w io.Writer, caption string) error
		}{{".png", c.WritePNG}, {".svg", c.WriteSVG}} {
			if err := write(c.Name+f.ending, func(w io.Writer) error { return f.draw(w, caption) }); err != nil {
				return fmt.Errorf("pictures: %w", err)
			}
		}
	}
	return nil
}

// caption is the shape, if all cases have the same, and the processor.
func (r *Report) caption() string {
	var shapes []string
	for i := range r.Cases {
		shapes = append(shapes, r.Cases[i].shape())
	}
	if shapes = slices.Compact(shapes); len(shapes) != 1 {
		return r.Environment.CPU
	}
	return shapes[0] + " · " + r.Environment.CPU
}

// curve is the cases of a report that form one line, by length.
type curve struct {
	who, threads, series, shape, variant string

	name   string
	colour int
	cases  []*Measurement
}

// identity returns the texts that a curve's name consists of.
func (c *curve) identity() [5]string {
	return [5]string{c.who, c.threads, c.series, c.shape, c.variant}
}

// curves sorts the cases into curves. Their names, which are the legend entries, contain
// only what differs between them.
func (r *Report) curves() []curve {
	var all []curve
	for i := range r.Cases {
		m := &r.Cases[i]
		c := curve{who: m.who(), series: m.Series, shape: m.shape(), variant: m.Variant, colour: len(all), cases: []*Measurement{m}}
		if m.Series == c.shape || m.Series == c.shape+" "+m.Variant {
			c.series = "" // it repeats the other parts
		}
		if m.Threads > 0 {
			c.threads = format.Count(m.Threads, "thread")
		}
		if at := slices.IndexFunc(all, func(o curve) bool { return o.identity() == c.identity() }); at >= 0 {
			all[at].cases = append(all[at].cases, m)
		} else {
			all = append(all, c)
		}
	}
	const who, threads, series, shape = 0, 1, 2, 3
	var varies [5]bool
	ambiguous := false // a series without a name, or with several shapes
	for _, c := range all {
		ambiguous = ambiguous || c.series == ""
		for _, o := range all {
			ambiguous = ambiguous || c.series == o.series && c.shape != o.shape
			for i, part := range c.identity() {
				// Another backend may have no threads; only one backend's are compared.
				varies[i] = varies[i] || part != o.identity()[i] && (i != threads || c.who == o.who)
			}
		}
	}
	varies[shape] = varies[shape] && (!varies[series] || ambiguous)
	for i := range all {
		c := &all[i]
		slices.SortStableFunc(c.cases, func(a, b *Measurement) int { return a.SeqK - b.SeqK })
		var name []string
		for j, part := range c.identity() {
			repeated := j > series && varies[series] && strings.Contains(c.series, part)
			if part != "" && (j == who || varies[j]) && !repeated {
				name = append(name, part)
			}
		}
		c.name = strings.Join(name, " · ")
	}
	return all
}

// tip describes a row's figures for the pointer.
func (m *Measurement) tip(name string) string {
	lines := []string{fmt.Sprintf("%s, S = %s", name, format.Length(m.SeqK))}
	add := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	if m.Status == Predicted {
		add("not run, predicted: %s a call", seconds.show(m.PredictedS))
		return strings.Join(lines, "\n")
	}
	if m.LowS != nil && m.HighS != nil {
		add("%s (%s to %s) a call", seconds.show(m.MedianS), seconds.show(m.LowS), seconds.show(m.HighS))
	} else {
		add("%s a call", seconds.show(m.MedianS))
	}
	if m.GFLOPS != nil && m.FLOPs > 0 {
		add("%s GFLOP/s, %s GB/s", number.show(m.GFLOPS), number.show(m.GBS))
	}
	if m.PercentOfBound != nil {
		add("%.1f%% of the ceiling (%s)", *m.PercentOfBound, m.Bound)
	}
	memory := byteSize.show(m.Memory.Counted()) + " counted"
	if m.Memory.HostPeak != nil {
		memory += ", " + byteSize.show(m.Memory.HostPeak) + " measured on the host"
	}
	if m.Memory.DevicePeak != nil {
		memory += ", " + byteSize.show(m.Memory.DevicePeak) + " on the device"
	}
	add("%s", memory)
	return strings.Join(lines, "\n")
}

// quantity is what a chart shows of each case, against the length.
type quantity struct {
	of func(*Measurement) *float64
	// predicted is that of a case that did not run; nil for none.
	predicted func(*Measurement) *float64
	// ceiling is drawn as a dashed line with the name ceilingName.
	ceiling     func(*Measurement) *float64
	ceilingName string
	// interval is a confidence interval of y; low and high are the ends of the time's
	// interval relative to its median.
	interval func(y, low, high float64) (float64, float64)
}

// The intervals of a time, and of a rate, which is inversely proportional.
func timeInterval(y, low, high float64) (float64, float64) { return y * low, y * high }
func rateInterval(y, low, high float64) (float64, float64) { return y / high, y / low }

// charts returns the pictures for which the report has figures.
func (r *Report) charts() []chart.Chart {
	curves := r.curves()
	lengths := r.lengths()
	plain := chart.Axis{Format: format.Plain}
	overLengths := func(name, title, about string, y chart.Axis, label string, q quantity) chart.Chart {
		y.Label = label
		return chart.Chart{Name: name, Title: title, About: about, X: lengths, Y: y, Lines: q.lines(curves)}
	}
	percentage := overLengths("percent", "Percent of the ceiling", "The ceiling that limits each case: multiply-adds, reading, or a launch.",
		chart.Axis{Format: format.Plain, Linear: true}, "% of the ceiling", quantity{
			of:       func(m *Measurement) *float64 { return m.PercentOfBound },
			ceiling:  func(*Measurement) *float64 { return nil },
			interval: rateInterval,
		})
	percentage.Lines = append(percentage.Lines, at100(percentage.Lines))
	all := []chart.Chart{
		overLengths("throughput", "Throughput", "Operations a second on visible pairs; dashed: the limit by the ceilings measured with each case.",
			plain, "GFLOP/s", quantity{
				of:          func(m *Measurement) *float64 { return positive(m.GFLOPS) },
				ceiling:     func(m *Measurement) *float64 { return quotient(positive(m.GFLOPS), m.PercentOfBound) },
				ceilingName: "ceiling",
				interval:    rateInterval,
			}),
		overLengths("time", "Time of a call", "Median of the repetitions; dashed: the limit by the ceilings; hollow marks: predicted, not run.",
			chart.Axis{Format: durationTick}, "time", quantity{
				of: func(m *Measurement) *float64 { return m.MedianS },
				predicted: func(m *Measurement) *float64 {
					if m.Status != Predicted {
						return nil
					}
					return m.PredictedS
				},
				ceiling: func(m *Measurement) *float64 {
					if m.MedianS == nil || positive(m.PercentOfBound) == nil {
						return nil
					}
					return Figure(*m.MedianS * *m.PercentOfBound / 100)
				},
				ceilingName: "ceiling",
				interval:    timeInterval,
			}),
		overLengths("memory", "Memory of a call", "Operands and scratch memory, counted; dashed: what the S x S weights alone would take.",
			chart.Axis{Format: sizeTick, Binary: true}, "memory", quantity{
				of: func(m *Measurement) *float64 { return Positive(float64(m.Memory.Counted())) },
				ceiling: func(m *Measurement) *float64 {
					return Figure(4 * float64(m.Batch) * float64(m.Heads) * float64(m.SeqQ) * float64(m.SeqK))
				},
				ceilingName: "S x S weights",
			}),
		percentage,
		r.roofline(curves),
	}
	all = slices.DeleteFunc(all, func(c chart.Chart) bool {
		return !slices.ContainsFunc(c.Lines, func(l chart.Line) bool { return !l.Ceiling && len(l.Points) > 0 })
	})
	for i := range all {
		all[i].Fit()
	}
	return all
}

// lengths is the axis of the lengths, with a tick at each if they are few.
func (r *Report) lengths() chart.Axis {
	a := chart.Axis{Label: "S, sequence length", Format: func(x float64) string { return format.Length(int(math.Round(x))) }, Binary: true}
	var lengths []float64
	for i := range r.Cases {
		lengths = append(lengths, float64(r.Cases[i].SeqK))
	}
	slices.Sort(lengths)
	if lengths = slices.Compact(lengths); len(lengths) <= maxLengthTicks {
		a.Ticks = lengths
	}
	return a
}

// maxLengthTicks is the largest number of lengths that all have a tick.
const maxLengthTicks = 9

// positive returns x if it is positive: a logarithmic axis has no 0.
func positive(x *float64) *float64 {
	if x == nil {
		return nil
	}
	return Positive(*x)
}

// quotient returns x divided by a percentage; null where a figure is null or 0.
func quotient(x, percent *float64) *float64 {
	if x == nil || positive(percent) == nil {
		return nil
	}
	return Figure(*x / *percent * 100)
}

// lines returns a line for each curve, and a dashed one for its ceilings. Ceilings that
// almost coincide are drawn once.
func (q quantity) lines(curves []curve) []chart.Line {
	var drawn []chart.Line
	type ceilingLine struct {
		chart.Line
		who string
	}
	var ceilings []ceilingLine
	for _, c := range curves {
		l := chart.Line{Name: c.name, Colour: c.colour}
		top := ceilingLine{chart.Line{Name: c.name, Colour: c.colour, Ceiling: true}, c.who}
		for _, m := range c.cases {
			p := chart.Point{X: float64(m.SeqK), Tip: m.tip(c.name)}
			if y := q.of(m); y != nil && m.Status == OK {
				p.Y = *y
				if q.interval != nil && m.MedianS != nil && m.LowS != nil && m.HighS != nil {
					p.Low, p.High = q.interval(*y, *m.LowS / *m.MedianS, *m.HighS / *m.MedianS)
				}
				l.Points = append(l.Points, p)
			} else if q.predicted != nil {
				if y := q.predicted(m); y != nil {
					p.Y, p.Predicted = *y, true
					l.Points = append(l.Points, p)
				}
			}
			if y := q.ceiling(m); y != nil && m.Status == OK {
				top.Points = append(top.Points, chart.Point{X: p.X, Y: *y})
			}
		}
		drawn = append(drawn, l)
		if len(top.Points) == 0 {
			continue
		}
		if same := slices.IndexFunc(ceilings, func(o ceilingLine) bool { return coincide(o.Points, top.Points) }); same >= 0 {
			ceilings[same].Points = union(ceilings[same].Points, top.Points)
		} else {
			ceilings = append(ceilings, top)
		}
	}
	for _, c := range ceilings {
		shared := slices.ContainsFunc(ceilings, func(o ceilingLine) bool { return o.who == c.who && o.Name != c.Name })
		switch {
		case len(ceilings) == 1:
			c.Name = q.ceilingName
		case shared: // several curves of one backend
			c.Name = q.ceilingName + " of " + c.Name
		default:
			c.Name = q.ceilingName + " of " + c.who
		}
		drawn = append(drawn, c.Line)
	}
	return drawn
}

// coincide reports whether two lines have points at common positions and differ by less
// than a tenth at all of these.
func coincide(a, b []chart.Point) bool {
	common := false
	for _, p := range a {
		for _, q := range b {
			if p.X != q.X {
				continue
			}
			if math.Abs(math.Log(p.Y/q.Y)) > 0.1 {
				return false
			}
			common = true
		}
	}
	return common
}

// union adds the points of b at positions that a does not have.
func union(a, b []chart.Point) []chart.Point {
	for _, p := range b {
		if !slices.ContainsFunc(a, func(q chart.Point) bool { return q.X == p.X }) {
			a = append(a, p)
		}
	}
	slices.SortFunc(a, func(p, q chart.Point) int { return cmp.Compare(p.X, q.X) })
	return a
}

// at100 is the line at 100% above all points.
func at100(lines []chart.Line) chart.Line {
	top := chart.Line{Name: "ceiling", Ceiling: true}
	for _, l := range lines {
		for _, p := range l.Points {
			top.Points = union(top.Points, []chart.Point{{X: p.X, Y: 100}})
		}
	}
	return top
}

// roofline is the chart of Williams et al. (2009): speed against operations a byte, below
// the rates of reading and of multiply-adds.
func (r *Report) roofline(curves []curve) chart.Chart {
	c := chart.Chart{Name: "roofline", Title: "Roofline",
		About: "Speed against arithmetic intensity, below the measured rates of reading and of multiply-adds; a mark for each length.",
		X:     chart.Axis{Label: "operations a byte", Format: format.Plain}, Y: chart.Axis{Label: "GFLOP/s", Format: format.Plain}}
	lo, hi := math.Inf(1), 0.0 // half the smallest and twice the largest intensity
	for _, l := range curves {
		line := chart.Line{Name: l.name, Colour: l.colour}
		for _, m := range l.cases {
			if m.Status == OK && m.Intensity > 0 && positive(m.GFLOPS) != nil {
				line.Points = append(line.Points, chart.Point{X: m.Intensity, Y: *m.GFLOPS, Tip: m.tip(l.name)})
				lo, hi = min(lo, m.Intensity/2), max(hi, m.Intensity*2)
			}
		}
		c.Lines = append(c.Lines, line)
	}
	if !(hi > 0) {
		return c
	}
	var done []string
	for _, l := range curves {
		if !slices.Contains(done, l.who) {
			done = append(done, l.who)
			c.Lines = append(c.Lines, roofs(curves, l, lo, hi)...)
		}
	}
	return c
}

// roofs returns the roof of the backend of a curve, with the slopes of the highest and the
// lowest rate at which its cases' operands were read: from a cache and from memory.
func roofs(curves []curve, of curve, lo, hi float64) []chart.Line {
	var peaks, reads []float64
	for _, c := range curves {
		for _, m := range c.cases {
			if c.who == of.who && m.CeilingGFLOPS != nil && m.CeilingGBS != nil {
				peaks, reads = append(peaks, *m.CeilingGFLOPS), append(reads, *m.CeilingGBS)
			}
		}
	}
	if len(peaks) == 0 {
		return nil
	}
	peak, least, most := stats.Median(peaks), slices.Min(reads), slices.Max(reads)
	slope := func(read float64) chart.Line {
		ridge := peak / read
		from := min(lo, ridge/2)
		return chart.Line{Name: fmt.Sprintf("%s roof, reading %s GB/s", of.who, format.Number(read)), Colour: of.colour, Ceiling: true,
			Points: []chart.Point{{X: from, Y: from * read}, {X: ridge, Y: peak}}}
	}
	roof := slope(most)
	roof.Points = append(roof.Points, chart.Point{X: max(hi, 2*peak/most), Y: peak})
	if most < 1.25*least { // one rate
		return []chart.Line{roof}
	}
	return []chart.Line{roof, slope(least)}
}

// durationTick and sizeTick write round numbers: 20 ms, 4 GiB.
func durationTick(seconds float64) string {
	for _, u := range []struct {
		of   float64
		name string
	}{{1, "s"}, {1e-3, "ms"}, {1e-6, "µs"}} {
		if seconds >= u.of*0.999 {
			return format.Plain(seconds/u.of) + " " + u.name
		}
	}
	return format.Plain(seconds*1e9) + " ns"
}

func sizeTick(bytes float64) string { return strings.Replace(format.Size(bytes), ".0 ", " ", 1) }
