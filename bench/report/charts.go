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
)

// WritePictures draws the report as PNG and SVG files: throughput, time, memory and percent
// of the ceiling by length, each with the ceilings. write is called with the name of each file and a function that writes its contents. It returns an error for a
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

// Parts of a curve's name in their order.
const who, threads, series, shape, variant = 0, 1, 2, 3, 4

// curves sorts the cases into curves. Their names, which are the legend entries, contain no
// more than what distinguishes them.
func (r *Report) curves() []curve {
	var all []curve
	for i := range r.Cases {
		m := &r.Cases[i]
		c := curve{parts: [5]string{m.Backend, "", m.Series, m.shape(), m.Variant}, colour: len(all)}
		if m.Series == m.shape() || m.Series == m.shape()+" "+m.Variant {
			c.parts[series] = "" // it repeats the other parts
		}
		if m.Threads > 0 {
			c.parts[threads] = format.Count(m.Threads, "thread")
		}
		at := slices.IndexFunc(all, func(o curve) bool { return o.parts == c.parts })
		if at < 0 {
			at, all = len(all), append(all, c)
		}
		all[at].cases = append(all[at].cases, m)
	}
	var shown [5]bool
	for _, next := range []int{who, threads, series, variant, shape} {
		shown[next] = next == who || slices.ContainsFunc(all, func(c curve) bool { return c.parts[next] != all[0].parts[next] })
		names := map[string]bool{}
		for i := range all {
			var name []string
			for part, text := range all[i].parts {
				if shown[part] {
					name = append(name, text)
				}
			}
			all[i].name = strings.Join(nonEmpty(name...), " · ")
			names[all[i].name] = true
		}
		if len(names) == len(all) {
			break
		}
	}
	for _, c := range all {
		slices.SortStableFunc(c.cases, func(a, b *Measurement) int { return a.SeqK - b.SeqK })
	}
	return all
}

// tip describes a row's figures for the pointer.
func (m *Measurement) tip(name string) string {
	head := fmt.Sprintf("%s, S = %s", name, format.Length(m.SeqK))
	if m.Status == Predicted {
		return fmt.Sprintf("%s\nnot run, predicted: %s a call", head, seconds.show(m.PredictedS))
	}
	var interval, speed, ceiling, host, device string
	if m.LowS != nil && m.HighS != nil {
		interval = fmt.Sprintf(" (%s to %s)", seconds.show(m.LowS), seconds.show(m.HighS))
	}
	if m.GFLOPS != nil && m.FLOPs > 0 {
		speed = fmt.Sprintf("%s GFLOP/s, %s GB/s", number.show(m.GFLOPS), number.show(m.GBS))
	}
	if m.PercentOfBound != nil {
		ceiling = fmt.Sprintf("%.1f%% of the ceiling (%s)", *m.PercentOfBound, m.Bound)
	}
	if m.Memory.HostPeak != nil {
		host = fmt.Sprintf(", %s measured on the host", byteSize.show(m.Memory.HostPeak))
	}
	if m.Memory.DevicePeak != nil {
		device = fmt.Sprintf(", %s on the device", byteSize.show(m.Memory.DevicePeak))
	}
	return strings.Join(nonEmpty(head, seconds.show(m.MedianS)+interval+" a call", speed, ceiling,
		byteSize.show(m.Memory.Counted())+" counted"+host+device), "\n")
}

// quantity is what a chart shows of each case, against the length.
type quantity struct {
	chart.Chart
	of func(*Measurement) *float64
	// The quantity is proportional to the time of a call to this power, from which its
	// confidence interval and its ceiling follow. 0 means that it does not depend on it.
	power float64
	// ceiling, unless nil, replaces the ceiling that follows from the time's; ceilingName, unless
	// "", the name of the dashed line.
	ceiling     func(*Measurement) *float64
	ceilingName string
	// predicted adds the predicted times of cases that did not run.
	predicted bool
}

var quantities = []quantity{
	{
		Chart: chart.Chart{Name: "throughput", Title: "Throughput", Y: chart.Axis{Label: "GFLOP/s", Format: format.Plain},
			About: "Operations a second on visible pairs; dashed: the limit by the ceilings measured with each case."},
		of:    func(m *Measurement) *float64 { return m.GFLOPS },
		power: -1,
	}, {
		Chart: chart.Chart{Name: "time", Title: "Time of a call", Y: chart.Axis{Label: "time", Format: durationTick},
			About: "Median of the repetitions; dashed: the limit by the ceilings; hollow marks: predicted, not run."},
		of:        func(m *Measurement) *float64 { return m.MedianS },
		power:     1,
		predicted: true,
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
		all = append(all, c)
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

// limit returns the ceiling of a case, whose figure is y.
func (q *quantity) limit(m *Measurement, y *float64) *float64 {
	switch {
	case m.Status == OK && q.ceiling != nil:
		return q.ceiling(m)
	case m.Status != OK || y == nil || m.PercentOfBound == nil:
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
	owners := map[string]int{} // the number of ceilings by backend
	var owner []string
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
			ceilings, owner = append(ceilings, top), append(owner, c.parts[who])
			owners[c.parts[who]]++
		}
	}
	for i, c := range ceilings {
		of := owner[i]
		if owners[of] > 1 { // several curves of one backend
			of = c.Name
		}
		c.Name = cmp.Or(q.ceilingName, "ceiling")
		if len(ceilings) > 1 {
			c.Name += " of " + of
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
			if p.X == q.X && math.Abs(math.Log(p.Y/q.Y)) > 0.1 {
				return false
			}
			common = common || p.X == q.X
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
