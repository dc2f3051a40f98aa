package chart

import (
	"math"

	"gonum.org/v1/plot"
)

// Axis is logarithmic unless Linear, with round numbers as ticks: powers of two if Binary.
type Axis struct {
	Label  string
	Format func(float64) string
	Linear bool
	Binary bool
	// Ticks are the values that may be ticks; nil for round numbers.
	Ticks    []float64
	min, max float64
}

// maxTicks is the largest number of ticks whose labels do not collide.
const maxTicks = 9

// fit sets the limits, with a margin, and the ticks of an axis from lo to hi.
func (a *Axis) fit(lo, hi float64) {
	if a.Linear { // from 0, as percentages are
		a.min, a.max = 0, hi*1.08
		a.Ticks = nil
		for x, step := 0.0, roundStep(a.max/6); x <= a.max; x += step {
			a.Ticks = append(a.Ticks, x)
		}
		return
	}
	margin := math.Pow(hi/lo, 0.06) * 1.04
	if hi/lo < 2 && a.Ticks == nil { // an almost constant curve should look constant
		margin = 1.6
	}
	a.min, a.max = lo/margin, hi*margin
	if a.Ticks == nil {
		a.Ticks = a.round()
		return
	}
	var kept []float64
	least := math.Log(hi/lo) / (maxTicks + 2)
	for _, x := range a.Ticks {
		if len(kept) == 0 || math.Log(x/kept[len(kept)-1]) >= least {
			kept = append(kept, x)
		}
	}
	a.Ticks = kept
}

// round returns round numbers within the axis, as densely as maxTicks allows.
func (a *Axis) round() []float64 {
	between := func(base float64, digits []float64, every int) []float64 {
		var out []float64
		from := int(math.Floor(math.Log(a.min)/math.Log(base))) - 1
		to := int(math.Ceil(math.Log(a.max)/math.Log(base))) + 1
		for e := from; e <= to; e++ {
			if e%every != 0 {
				continue
			}
			for _, d := range digits {
				if x := d * math.Pow(base, float64(e)); x >= a.min && x <= a.max {
					out = append(out, x)
				}
			}
		}
		return out
	}
	base, finer := 10.0, [][]float64{{1, 1.5, 2, 3, 4, 5, 6, 8}, {1, 2, 3, 5}, {1, 2, 5}, {1, 3}}
	if a.Binary {
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

// roundStep returns the smallest of 1, 2, 2.5 and 5 times a power of ten that is at least x.
func roundStep(x float64) float64 {
	power := math.Pow(10, math.Floor(math.Log10(x)))
	for _, d := range []float64{1, 2, 2.5, 5} {
		if d*power >= x {
			return d * power
		}
	}
	return 10 * power
}

// apply sets an axis of a plot.
func (a *Axis) apply(to *plot.Axis) {
	to.Label.Text = a.Label
	to.Min, to.Max = a.min, a.max
	if !a.Linear {
		to.Scale = plot.LogScale{}
	}
	var ticks plot.ConstantTicks
	for _, x := range a.Ticks {
		ticks = append(ticks, plot.Tick{Value: x, Label: a.Format(x)})
	}
	to.Tick.Marker = ticks
}
