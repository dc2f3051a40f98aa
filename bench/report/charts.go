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
	parts  [5]string // of the name; cases of one curve have the same
	name   string
	colour int
	cases  []*Measurement
}

// Parts of a curve's name: the fifth is the variant.
const who, threads, series, shape = 0, 1, 2, 3

// curves sorts the cases into curves. Their names, which are the legend entries, contain
// only what differs between them.
func (r *Report) curves() []curve {
	var all []curve
	for i := range r.Cases {
		m := &r.Cases[i]
		c := curve{parts: [5]string{m.who(), "", m.Series, m.shape(), m.Variant}, colour: len(all), cases: []*Measurement{m}}
		if m.Series == m.shape() || m.Series == m.shape()+" "+m.Variant {
			c.parts[series] = "" // it repeats the other parts
		}
		if m.Threads > 0 {
			c.parts[threads] = format.Count(m.Threads, "thread")
		}
		if at := slices.IndexFunc(all, func(o curve) bool { return o.parts == c.parts }); at >= 0 {
			all[at].cases = append(all[at].cases, m)
		} else {
			all = append(all, c)
		}
	}
	var varies [5]bool
	ambiguous := false // a series without a name, or with several shapes
	for _, c := range all {
		ambiguous = ambiguous || c.parts[series] == ""
		for _, o := range all {
			ambiguous = ambiguous || c.parts[series] == o.parts[series] && c.parts[shape] != o.parts[shape]
			for i, part := range c.parts {
				// Another backend may have no threads; only one backend's are compared.
				varies[i] = varies[i] || part != o.parts[i] && (i != threads || c.parts[who] == o.parts[who])
			}
		}
	}
	varies[who] = true
	varies[shape] = varies[shape] && (!varies[series] || ambiguous)
	for i := range all {
		c := &all[i]
		slices.SortStableFunc(c.cases, func(a, b *Measurement) int { return a.SeqK - b.SeqK })
		var name []string
		for j, part := range c.parts {
			repeated := j > series && varies[series] && strings.Contains(c.parts[series], part)
			if part != "" && varies[j] && !repeated {
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
	chart.Chart
	of func(*Measurement) *float64
	// power is that of the time which the quantity is proportional to: its confidence
	// interval and its ceiling follow from those of the time. 0 means that it does not
	// depend on the time.
	power float64
	// ceilingName is the name of a dashed line; "" for none. ceiling, unless nil, replaces
	// the ceiling that follows from the time's.
	ceilingName string
	ceiling     func(*Measurement) *float64
	// predicted adds the predicted times of cases that did not run.
	predicted bool
}

var quantities = []quantity{
	{
		Chart: chart.Chart{Name: "throughput", Title: "Throughput", Y: chart.Axis{Label: "GFLOP/s", Format: format.Plain},
			About: "Operations a second on visible pairs; dashed: the limit by the ceilings measured with each case."},
		of:          func(m *Measurement) *float64 { return positive(m.GFLOPS) },
		ceilingName: "ceiling",
		power:       -1,
	}, {
		Chart: chart.Chart{Name: "time", Title: "Time of a call", Y: chart.Axis{Label: "time", Format: durationTick},
			About: "Median of the repetitions; dashed: the limit by the ceilings; hollow marks: predicted, not run."},
		of:          func(m *Measurement) *float64 { return m.MedianS },
		ceilingName: "ceiling",
		power:       1,
		predicted:   true,
	}, {
		Chart: chart.Chart{Name: "memory", Title: "Memory of a call", Y: chart.Axis{Label: "memory", Format: sizeTick, Binary: true},
			About: "Operands and scratch memory, counted; dashed: what the S x S weights alone would take."},
		of: func(m *Measurement) *float64 { return Positive(float64(m.Memory.Counted())) },
		ceiling: func(m *Measurement) *float64 {
			return Figure(4 * float64(m.Batch) * float64(m.Heads) * float64(m.SeqQ) * float64(m.SeqK))
		},
		ceilingName: "S x S weights",
	}, {
		Chart: chart.Chart{Name: "percent", Title: "Percent of the ceiling", Y: chart.Axis{Label: "% of the ceiling", Format: format.Plain, Linear: true},
			About: "The ceiling that limits each case: multiply-adds, reading, or a launch."},
		of:    func(m *Measurement) *float64 { return m.PercentOfBound },
		power: -1,
	},
}

// charts returns the pictures for which the report has figures.
func (r *Report) charts() []chart.Chart {
	curves := r.curves()
	lengths := r.lengths()
	var all []chart.Chart
	for _, q := range quantities {
		c := q.Chart
		c.X, c.Lines = lengths, q.lines(curves)
		if q.Y.Linear {
			c.Lines = append(c.Lines, at100(c.Lines))
		}
		all = append(all, c)
	}
	all = slices.DeleteFunc(append(all, r.roofline(curves)), func(c chart.Chart) bool {
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

// limit returns the ceiling of a case, whose figure is y.
func (q *quantity) limit(m *Measurement, y *float64) *float64 {
	switch {
	case q.ceilingName == "" || m.Status != OK:
		return nil
	case q.ceiling != nil:
		return q.ceiling(m)
	case y == nil || positive(m.PercentOfBound) == nil:
		return nil
	}
	return Positive(*y * math.Pow(*m.PercentOfBound/100, q.power))
}

// point returns the point of a case, whose figure is y; false for none.
func (q *quantity) point(m *Measurement, y *float64) (chart.Point, bool) {
	p := chart.Point{X: float64(m.SeqK)}
	switch {
	case m.Status == OK && y != nil:
		p.Y = *y
		if q.power != 0 && m.spread() != nil {
			low, high := *y*math.Pow(*m.LowS / *m.MedianS, q.power), *y*math.Pow(*m.HighS / *m.MedianS, q.power)
			p.Low, p.High = min(low, high), max(low, high)
		}
	case q.predicted && m.Status == Predicted && m.PredictedS != nil:
		p.Y, p.Predicted = *m.PredictedS, true
	default:
		return p, false
	}
	return p, true
}

// lines returns a line for each curve, and a dashed one for its ceilings. Ceilings that
// almost coincide are drawn once.
func (q *quantity) lines(curves []curve) []chart.Line {
	var drawn, ceilings []chart.Line
	var owners []string // of the ceilings
	for _, c := range curves {
		l := chart.Line{Name: c.name, Colour: c.colour}
		top := chart.Line{Name: c.name, Colour: c.colour, Ceiling: true}
		for _, m := range c.cases {
			y := q.of(m)
			if p, ok := q.point(m, y); ok {
				p.Tip = m.tip(c.name)
				l.Points = append(l.Points, p)
			}
			if y := q.limit(m, y); y != nil {
				top.Points = append(top.Points, chart.Point{X: float64(m.SeqK), Y: *y})
			}
		}
		drawn = append(drawn, l)
		if same := slices.IndexFunc(ceilings, func(o chart.Line) bool { return coincide(o.Points, top.Points) }); same >= 0 {
			ceilings[same].Points = union(ceilings[same].Points, top.Points)
		} else if len(top.Points) > 0 {
			ceilings, owners = append(ceilings, top), append(owners, c.parts[who])
		}
	}
	for i, c := range ceilings {
		owner := owners[i]
		if slices.Contains(owners[:i], owner) || slices.Contains(owners[i+1:], owner) { // several curves of one backend
			owner = c.Name
		}
		c.Name = q.ceilingName
		if len(ceilings) > 1 {
			c.Name += " of " + owner
		}
		drawn = append(drawn, c)
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
		if !slices.Contains(done, l.parts[who]) {
			done = append(done, l.parts[who])
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
			if c.parts[who] == of.parts[who] && m.CeilingGFLOPS != nil && m.CeilingGBS != nil {
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
		return chart.Line{Name: fmt.Sprintf("%s roof, reading %s GB/s", of.parts[who], format.Number(read)), Colour: of.colour, Ceiling: true,
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
func durationTick(seconds float64) string { return tick(format.Duration(seconds)) }
func sizeTick(bytes float64) string       { return tick(format.Size(bytes)) }

// tick drops zeros after the decimal point.
func tick(text string) string {
	number, unit, _ := strings.Cut(text, " ")
	if strings.Contains(number, ".") {
		number = strings.TrimRight(strings.TrimRight(number, "0"), ".")
	}
	return number + " " + unit
}
