package bench

import (
	"math"
	"slices"

	"gonum.org/v1/plot"
)

// scale is an axis of a chart: logarithmic unless linear, with round numbers as
// ticks (powers of two where binary).
type scale struct {
	format   func(float64) string
	linear   bool
	binary   bool
	min, max float64
	ticks    []float64 // those that are named
}

// maxTicks is how many numbers an axis has at most.
const maxTicks = 9

// lengthScale is the axis of the lengths that a report has, a tick at each as long
// as they are few.
func lengthScale(r *Report) scale {
	s := scale{format: lengthText, binary: true}
	var lengths []float64
	for i := range r.Cases {
		lengths = append(lengths, float64(r.Cases[i].SeqK))
	}
	slices.Sort(lengths)
	if lengths = slices.Compact(lengths); len(lengths) <= maxTicks {
		s.ticks = lengths
	}
	return s
}

// fit makes the axes wide enough for what is drawn, with some air, and chooses
// their ticks.
func (c *chart) fit() {
	xs, ys := [2]float64{math.Inf(1), 0}, [2]float64{math.Inf(1), 0}
	for _, l := range c.lines {
		for _, p := range l.points {
			xs = [2]float64{min(xs[0], p.x), max(xs[1], p.x)}
			ys = [2]float64{min(ys[0], p.y), max(ys[1], p.y)}
			if p.low > 0 {
				ys = [2]float64{min(ys[0], p.low), max(ys[1], p.high)}
			}
		}
	}
	c.x.fit(xs[0], xs[1])
	c.y.fit(ys[0], ys[1])
}

func (s *scale) fit(lo, hi float64) {
	if s.linear { // from 0, as percentages are
		s.min, s.max = 0, hi*1.08
		step := roundStep(s.max / 6)
		for x := 0.0; x <= s.max; x += step {
			s.ticks = append(s.ticks, x)
		}
		return
	}
	given := s.ticks
	air := math.Pow(hi/lo, 0.06) * 1.04
	s.min, s.max = lo/air, hi*air
	if hi/lo < 2 && given == nil { // a line that is all but flat is drawn as such
		s.min, s.max = lo/1.6, hi*1.6
	}
	if given != nil {
		s.ticks = thinned(given, lo, hi)
		return
	}
	s.ticks = s.round()
}

// thinned leaves out lengths that stand too close together on the axis for their
// names.
func thinned(ticks []float64, lo, hi float64) []float64 {
	var out []float64
	least := math.Log(hi/lo) / (maxTicks + 2)
	for _, x := range ticks {
		if len(out) == 0 || math.Log(x/out[len(out)-1]) >= least {
			out = append(out, x)
		}
	}
	return out
}

// round returns round numbers within the axis: of all steps the finest that does
// not crowd it.
func (s *scale) round() []float64 {
	between := func(base float64, digits []float64, every int) []float64 {
		var out []float64
		from := int(math.Floor(math.Log(s.min)/math.Log(base))) - 1
		to := int(math.Ceil(math.Log(s.max)/math.Log(base))) + 1
		for e := from; e <= to; e++ {
			if ((e%every)+every)%every != 0 {
				continue
			}
			for _, d := range digits {
				if x := d * math.Pow(base, float64(e)); x >= s.min && x <= s.max {
					out = append(out, x)
				}
			}
		}
		return out
	}
	base, finer := 10.0, [][]float64{{1, 1.5, 2, 3, 4, 5, 6, 8}, {1, 2, 3, 5}, {1, 2, 5}, {1, 3}}
	if s.binary {
		base, finer = 2, nil
	}
	for _, digits := range finer {
		if ticks := between(base, digits, 1); len(ticks) <= maxTicks {
			return ticks
		}
	}
	for every := 1; ; every++ {
		if ticks := between(base, []float64{1}, every); len(ticks) <= maxTicks {
			return ticks
		}
	}
}

// roundStep returns 1, 2, 2.5 or 5 times a power of ten, the next from x up.
func roundStep(x float64) float64 {
	power := math.Pow(10, math.Floor(math.Log10(x)))
	for _, d := range []float64{1, 2, 2.5, 5} {
		if d*power >= x {
			return d * power
		}
	}
	return 10 * power
}

// put sets the axis of a plot.
func (s *scale) put(a *plot.Axis, label string) {
	a.Label.Text = label
	a.Min, a.Max = s.min, s.max
	if !s.linear {
		a.Scale = plot.LogScale{}
	}
	var ticks plot.ConstantTicks
	for _, x := range s.ticks {
		ticks = append(ticks, plot.Tick{Value: x, Label: s.format(x)})
	}
	a.Tick.Marker = ticks
}
