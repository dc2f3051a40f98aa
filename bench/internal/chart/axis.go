package chart

import "math"

// Axis is logarithmic, with round numbers as ticks: powers of two if Binary.
type Axis struct {
	Label  string
	Format func(float64) string
	Binary bool
	// Ticks are the values that may be ticks; nil for round numbers.
	Ticks    []float64
	min, max float64
}

// maxTicks is the largest number of ticks whose labels do not collide.
const maxTicks = 9

// fit sets the limits, with a margin, and the ticks of an axis from lo to hi.
func (a *Axis) fit(lo, hi float64) {
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

// at returns the place of x on the axis, from 0 to 1.
func (a *Axis) at(x float64) float64 { return math.Log(x/a.min) / math.Log(a.max/a.min) }

// round returns round numbers within the axis, as densely as maxTicks allows.
func (a *Axis) round() []float64 {
	base, digits := 10.0, [][]float64{{1, 1.5, 2, 3, 4, 5, 6, 8}, {1, 2, 3, 5}, {1, 2, 5}, {1, 3}, {1}}
	if a.Binary {
		base, digits = 2, digits[4:]
	}
	for {
		var ticks []float64
		for power := math.Pow(base, math.Floor(math.Log(a.min)/math.Log(base))); power <= a.max; power *= base {
			for _, d := range digits[0] {
				if x := d * power; x >= a.min && x <= a.max {
					ticks = append(ticks, x)
				}
			}
		}
		switch {
		case len(ticks) <= maxTicks:
			return ticks
		case len(digits) > 1:
			digits = digits[1:]
		default:
			base *= base
		}
	}
}
