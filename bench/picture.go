package bench

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"
	"gonum.org/v1/plot/vg/vgsvg"

	"github.com/seed90331342/attn/bench/page"
)

// chart is a picture of a report: lines over an axis of lengths or of arithmetic
// intensity.
type chart struct {
	name   string // of the file
	title  string
	about  string // what is drawn, in a sentence
	x, y   scale
	xLabel string
	yLabel string
	lines  []chartLine
}

// chartLine is one line of a chart.
type chartLine struct {
	name    string
	who     string // what ran it
	colour  int    // an index into the palette, whose use is the same in all charts
	ceiling bool   // dashed and without marks
	points  []chartPoint
}

// chartPoint is a figure.
type chartPoint struct {
	x, y float64
	// low and high are the ends of the interval that y is known within; 0 is
	// 'not known'.
	low, high float64
	// predicted is a figure that was not measured: its mark is hollow.
	predicted bool
	// about is the figure in words, for the pointer.
	about string
}

// seriesKey tells the lines of a report apart.
type seriesKey struct{ who, threads, series, shape, variant string }

// curve is the cases of a report that make one line, by length.
type curve struct {
	seriesKey
	name    string
	backend string
	colour  int
	cases   []*Measurement
}

// lines sorts the cases into lines. Their names say what tells them apart and no
// more.
func (r *Report) lines() []curve {
	var all []curve
	for i := range r.Cases {
		m := &r.Cases[i]
		key := seriesKey{m.who(), "", m.Series, m.shapeText(), m.Variant}
		if m.Series == key.shape || m.Series == key.shape+" "+m.Variant {
			key.series = "" // named after what it is of: the other parts say that
		}
		if m.Threads > 0 {
			key.threads = count(m.Threads, "thread")
		}
		at := slices.IndexFunc(all, func(l curve) bool { return l.seriesKey == key })
		if at < 0 {
			at = len(all)
			all = append(all, curve{seriesKey: key, backend: m.Backend, colour: at})
		}
		all[at].cases = append(all[at].cases, m)
	}
	parts := []func(k seriesKey) string{
		func(k seriesKey) string { return k.who },
		func(k seriesKey) string { return k.threads },
		func(k seriesKey) string { return k.series },
		func(k seriesKey) string { return k.shape },
		func(k seriesKey) string { return k.variant },
	}
	// Threads tell lines of one backend apart; another has them or not.
	varies := make([]bool, len(parts))
	for _, l := range all {
		for _, other := range all {
			for i, part := range parts {
				varies[i] = varies[i] || part(l.seriesKey) != part(other.seriesKey) && (i != 1 || l.who == other.who)
			}
		}
	}
	ambiguous := func(l curve) bool { // a series' name does not say which shape it is
		return l.series == "" || slices.ContainsFunc(all, func(other curve) bool { return l.series == other.series && l.shape != other.shape })
	}
	varies[3] = varies[3] && (!varies[2] || slices.ContainsFunc(all, ambiguous))
	for i := range all {
		l := &all[i]
		slices.SortStableFunc(l.cases, func(a, b *Measurement) int { return a.SeqK - b.SeqK })
		var name []string
		for j, part := range parts {
			text := part(l.seriesKey)
			if text == "" || j > 0 && !varies[j] || j > 2 && varies[2] && strings.Contains(l.series, text) {
				continue // "", alike, or a part of the series' name
			}
			name = append(name, text)
		}
		l.name = strings.Join(name, " · ")
	}
	return all
}

// shapeText is what a case is but for its length and variant.
func (m *Measurement) shapeText() string {
	var b strings.Builder
	plain := *m
	plain.Variant = Fused
	plain.shape(&b)
	return b.String()
}

// inWords says all that a row's figures say, for the pointer.
func (m *Measurement) inWords(name string) string {
	lines := []string{fmt.Sprintf("%s, S = %s", name, lengthText(float64(m.SeqK)))}
	add := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	if m.Status == Predicted {
		add("not run, predicted: %s a call", shown(m.PredictedS, duration))
		return strings.Join(lines, "\n")
	}
	if m.LowS != nil && m.HighS != nil {
		add("%s (%s to %s) a call", shown(m.MedianS, duration), duration(*m.LowS), duration(*m.HighS))
	} else {
		add("%s a call", shown(m.MedianS, duration))
	}
	if m.GFLOPS != nil && m.FLOPs > 0 {
		add("%s GFLOP/s, %s GB/s", number3(*m.GFLOPS), shown(m.GBS, number3))
	}
	if m.PercentOfBound != nil {
		add("%.1f%% of the ceiling (%s)", *m.PercentOfBound, m.Bound)
	}
	memory := size(float64(m.Memory.Counted())) + " counted"
	if m.Memory.HostPeak != nil {
		memory += ", " + size(float64(*m.Memory.HostPeak)) + " measured on the host"
	}
	if m.Memory.DevicePeak != nil {
		memory += ", " + size(float64(*m.Memory.DevicePeak)) + " on the device"
	}
	add("%s", memory)
	return strings.Join(lines, "\n")
}

// charts returns the pictures of a report: those that it has figures for.
func (r *Report) charts() []chart {
	lines := r.lines()
	lengths := lengthScale(r)
	all := []chart{
		{name: "throughput", title: "Throughput", about: "Operations on visible pairs a second; dashed is what the machine's ceilings, measured beside each case, allow.",
			y: scale{format: plainText}, yLabel: "GFLOP/s",
			lines: overLengths(lines, "ceiling", func(m *Measurement) *float64 { return aboveZero(m.GFLOPS) }, nil, (*Measurement).ceilingGFLOPS, asRate)},
		{name: "time", title: "Time of a call", about: "Median of the repetitions; dashed is the least that the ceilings allow; hollow marks were predicted and not run.",
			y: scale{format: durationTick}, yLabel: "time",
			lines: overLengths(lines, "ceiling", func(m *Measurement) *float64 { return m.MedianS }, (*Measurement).predictedS, (*Measurement).ceilingS, asTime)},
		{name: "memory", title: "Memory of a call", about: "Operands and what is taken beside them, as counted; dashed is what the S x S weights alone would take.",
			y: scale{format: sizeTick, binary: true}, yLabel: "memory",
			lines: memoryLines(lines)},
		{name: "percent", title: "Percent of the ceiling", about: "Of the ceiling that binds each case: multiply-adds, reading, or a launch.",
			y: scale{format: plainText, linear: true}, yLabel: "% of the ceiling",
			lines: percentLines(lines)},
	}
	for i := range all {
		all[i].x, all[i].xLabel = lengths, "S, length of the sequence"
	}
	all = append(all, r.roofline(lines))
	all = slices.DeleteFunc(all, func(c chart) bool {
		return !slices.ContainsFunc(c.lines, func(l chartLine) bool { return !l.ceiling && len(l.points) > 0 })
	})
	for i := range all {
		all[i].fit()
	}
	return all
}

// aboveZero returns x unless it is 0, which a logarithm has no place for.
func aboveZero(x *float64) *float64 {
	if x == nil || !(*x > 0) {
		return nil
	}
	return x
}

// ceilingGFLOPS is what GFLOPS would be at the ceiling that binds, and ceilingS the
// time.
func (m *Measurement) ceilingGFLOPS() *float64 {
	if m.GFLOPS == nil || !(*m.GFLOPS > 0) || m.PercentOfBound == nil || !(*m.PercentOfBound > 0) {
		return nil
	}
	return figure(*m.GFLOPS / *m.PercentOfBound * 100)
}

func (m *Measurement) ceilingS() *float64 {
	if m.MedianS == nil || m.PercentOfBound == nil || !(*m.PercentOfBound > 0) {
		return nil
	}
	return figure(*m.MedianS * *m.PercentOfBound / 100)
}

// predictedS is the time of a case that did not run.
func (m *Measurement) predictedS() *float64 {
	if m.Status != Predicted {
		return nil
	}
	return m.PredictedS
}

// overLengths makes a line of each line's figures and, dashed, of its ceilings, of
// which those that lie together are drawn once for all. interval turns a figure and
// the ends of the time's interval, as parts of its median, into the figure's own.
func overLengths(lines []curve, ceilingName string, of, predicted, ceiling func(*Measurement) *float64, interval func(y, low, high float64) (float64, float64)) []chartLine {
	var out, ceilings []chartLine
	for _, l := range lines {
		drawn := chartLine{name: l.name, who: l.who, colour: l.colour}
		top := chartLine{name: l.name, who: l.who, colour: l.colour, ceiling: true}
		for _, m := range l.cases {
			x := float64(m.SeqK)
			if y := of(m); y != nil && m.Status == OK {
				p := chartPoint{x: x, y: *y, about: m.inWords(l.name)}
				if interval != nil && m.MedianS != nil && m.LowS != nil && m.HighS != nil {
					p.low, p.high = interval(*y, *m.LowS / *m.MedianS, *m.HighS / *m.MedianS)
				}
				drawn.points = append(drawn.points, p)
			} else if predicted != nil {
				if y := predicted(m); y != nil {
					drawn.points = append(drawn.points, chartPoint{x: x, y: *y, predicted: true, about: m.inWords(l.name)})
				}
			}
			if y := ceiling(m); y != nil && m.Status == OK {
				top.points = append(top.points, chartPoint{x: x, y: *y})
			}
		}
		out = append(out, drawn)
		if len(top.points) == 0 {
			continue
		}
		same := slices.IndexFunc(ceilings, func(c chartLine) bool { return together(c, top) })
		if same < 0 {
			ceilings = append(ceilings, top)
			continue
		}
		ceilings[same].join(top)
	}
	// A ceiling is named after what ran, or after its line where that has several.
	for i := range ceilings {
		c := &ceilings[i]
		alone := true
		for j := range ceilings {
			alone = alone && (i == j || ceilings[j].who != c.who)
		}
		switch {
		case len(ceilings) == 1:
			c.name = ceilingName
		case alone:
			c.name = ceilingName + " of " + c.who
		default:
			c.name = ceilingName + " of " + c.name
		}
	}
	return append(out, ceilings...)
}

// asTime and asRate give the interval of a time, and of what is in inverse
// proportion to it.
func asTime(y, low, high float64) (float64, float64) { return y * low, y * high }
func asRate(y, low, high float64) (float64, float64) { return y / high, y / low }

// together reports whether two lines have lengths in common and are within a tenth
// of each other at all of these.
func together(a, b chartLine) bool {
	common := false
	for _, p := range a.points {
		for _, q := range b.points {
			if p.x != q.x {
				continue
			}
			if math.Abs(math.Log(p.y/q.y)) > 0.1 {
				return false
			}
			common = true
		}
	}
	return common
}

// join adds the points of another line at lengths that l does not have.
func (l *chartLine) join(other chartLine) {
	for _, p := range other.points {
		if !slices.ContainsFunc(l.points, func(q chartPoint) bool { return q.x == p.x }) {
			l.points = append(l.points, p)
		}
	}
	slices.SortFunc(l.points, func(p, q chartPoint) int { return cmp.Compare(p.x, q.x) })
}

// memoryLines are the counted bytes, and those of the weights that are not kept.
func memoryLines(lines []curve) []chartLine {
	return overLengths(lines, "S x S weights", func(m *Measurement) *float64 {
		return positive(float64(m.Memory.Counted()))
	}, nil, func(m *Measurement) *float64 {
		return figure(4 * float64(m.Batch) * float64(m.Heads) * float64(m.SeqQ) * float64(m.SeqK))
	}, nil)
}

// percentLines are the percentages, under a line at 100.
func percentLines(lines []curve) []chartLine {
	drawn := overLengths(lines, "", func(m *Measurement) *float64 { return m.PercentOfBound }, nil, func(*Measurement) *float64 { return nil }, asRate)
	all := chartLine{name: "ceiling", ceiling: true}
	for _, l := range drawn {
		for _, p := range l.points {
			all.join(chartLine{points: []chartPoint{{x: p.x, y: 100}}})
		}
	}
	return append(drawn, all)
}

// roofline is the classic picture (Williams et al. 2009): speed against operations a
// byte, under the rates of reading and of multiply-adds.
func (r *Report) roofline(lines []curve) chart {
	c := chart{name: "roofline", title: "Roofline", xLabel: "operations a byte", yLabel: "GFLOP/s",
		about: "Speed against arithmetic intensity, under the measured rates of reading and of multiply-adds; each mark is a length.",
		x:     scale{format: plainText}, y: scale{format: plainText}}
	for _, l := range lines {
		drawn := chartLine{name: l.name, colour: l.colour}
		for _, m := range l.cases {
			if m.Status == OK && m.Intensity > 0 && aboveZero(m.GFLOPS) != nil {
				drawn.points = append(drawn.points, chartPoint{x: m.Intensity, y: *m.GFLOPS, about: m.inWords(l.name)})
			}
		}
		c.lines = append(c.lines, drawn)
	}
	return c.underRoofs(lines)
}

// underRoofs adds the roof of each backend, from half the smallest to twice the
// largest intensity: at the least and at the most that was read of its cases'
// operands, which memory and the caches give.
func (c chart) underRoofs(lines []curve) chart {
	lo, hi := math.Inf(1), 0.0
	for _, l := range c.lines {
		for _, p := range l.points {
			lo, hi = min(lo, p.x/2), max(hi, p.x*2)
		}
	}
	var done []string
	for _, l := range lines {
		if slices.Contains(done, l.who) {
			continue
		}
		done = append(done, l.who)
		var peaks, reads []float64
		for _, other := range lines {
			for _, m := range other.cases {
				if other.who == l.who && m.CeilingGFLOPS != nil && m.CeilingGBS != nil {
					peaks, reads = append(peaks, *m.CeilingGFLOPS), append(reads, *m.CeilingGBS)
				}
			}
		}
		if len(peaks) == 0 || !(hi > 0) {
			continue
		}
		peak := median(peaks)
		// The slower slope ends at the roof that the faster one carries on to.
		least, most := slices.Min(reads), slices.Max(reads)
		for i, read := range []float64{most, least} {
			ridge := peak / read
			from := min(lo, ridge/2)
			roof := chartLine{name: fmt.Sprintf("%s roof, reading %s GB/s", l.who, number3(read)), colour: l.colour, ceiling: true}
			roof.points = []chartPoint{{x: from, y: from * read}, {x: ridge, y: peak}}
			switch {
			case i == 0:
				roof.points = append(roof.points, chartPoint{x: max(hi, ridge*2), y: peak})
			case most < 1.25*least: // as good as the same
				continue
			}
			c.lines = append(c.lines, roof)
		}
	}
	return c
}

// WritePictures draws the report into a folder, which is made where it does not
// exist, as PNG and as SVG: throughput, time, memory and percent of the ceiling
// against the length, with the ceilings, and the roofline. It returns the paths.
// A report without a measured case has no pictures: an error.
func (r *Report) WritePictures(folder string) (paths []string, err error) {
	charts := r.charts()
	if len(charts) == 0 {
		return nil, errors.New("pictures: no case was measured, there is nothing to draw")
	}
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return nil, fmt.Errorf("pictures: %w", err)
	}
	caption := r.caption()
	for _, c := range charts {
		p := c.layout(pictureWidth, pictureHeight, pictureMargin, c.title, caption)
		for _, f := range []struct {
			ending string
			write  func(w io.Writer) error
		}{{".png", p.writePNG}, {".svg", p.writeSVG}} {
			path := filepath.Join(folder, c.name+f.ending)
			var b bytes.Buffer
			if err := f.write(&b); err != nil {
				return nil, fmt.Errorf("pictures: %w", err)
			}
			if err := writeFile(path, b.Bytes()); err != nil {
				return nil, err
			}
			paths = append(paths, path)
		}
	}
	return paths, nil
}

// caption says in a line what was measured where.
func (r *Report) caption() string {
	var parts []string
	lines := r.lines()
	if len(lines) > 0 && !slices.ContainsFunc(lines, func(l curve) bool { return l.shape != lines[0].shape }) {
		parts = append(parts, lines[0].shape)
	}
	return strings.Join(append(parts, r.Environment.CPU), " · ")
}

func (p *picture) writePNG(w io.Writer) error {
	canvas := vgimg.NewWith(vgimg.UseWH(p.width, p.height), vgimg.UseDPI(pictureDPI), vgimg.UseBackgroundColor(white))
	p.draw(draw.New(canvas))
	_, err := vgimg.PngCanvas{Canvas: canvas}.WriteTo(w)
	return err
}

func (p *picture) writeSVG(w io.Writer) error {
	canvas := vgsvg.New(p.width, p.height)
	dc := draw.New(canvas)
	dc.SetColor(white)
	dc.Fill(vg.Rectangle{Max: vg.Point{X: p.width, Y: p.height}}.Path())
	p.draw(dc)
	var b strings.Builder
	if _, err := canvas.WriteTo(&b); err != nil {
		return err
	}
	_, err := io.WriteString(w, page.Fonts(b.String()))
	return err
}

// lengthText writes a length as the command line takes it: 4k, 1M.
func lengthText(x float64) string {
	n := int(math.Round(x))
	switch {
	case n >= 1<<20 && n%(1<<20) == 0:
		return strconv.Itoa(n>>20) + "M"
	case n >= 1<<10 && n%(1<<10) == 0:
		return strconv.Itoa(n>>10) + "k"
	}
	return strconv.Itoa(n)
}

// durationTick and sizeTick write round numbers: 20 ms, 4 GiB.
func durationTick(seconds float64) string {
	for _, u := range []struct {
		of   float64
		name string
	}{{1, "s"}, {1e-3, "ms"}, {1e-6, "µs"}} {
		if seconds >= u.of*0.999 {
			return plainText(seconds/u.of) + " " + u.name
		}
	}
	return plainText(seconds*1e9) + " ns"
}

func sizeTick(bytes float64) string { return strings.Replace(size(bytes), ".0 ", " ", 1) }

func plainText(x float64) string { return strconv.FormatFloat(x, 'g', 7, 64) }
