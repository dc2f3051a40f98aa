package explain

import (
	"cmp"
	"math"
	"slices"
)

// roundRow rounds a row of weights to so many decimals and keeps its sum, which is
// 1. It cuts each weight and gives the missing units to those that lost most (the
// method of largest remainders; ties go to the larger weight, then the earlier key).
//
// For nearly all rows that is rounding to nearest. It differs where the rounded
// weights would not add up: the published walk-through of three tokens has the
// weights 0.063, 0.468, 0.468 as 0.0, 0.5, 0.5 and not as 0.1, 0.5, 0.5.
func roundRow(w []float64, decimals int) []float64 {
	unit := math.Pow10(decimals)
	out := make([]float64, len(w))
	order := make([]int, len(w))
	var sum, cut float64
	for i, x := range w {
		order[i] = i
		// 0.3 is not exact in float32: a number within 8 roundings of a whole
		// number of units is that number.
		units := x * unit
		if near := math.Round(units); math.Abs(units-near) <= 8*u*units {
			units = near
		}
		out[i] = math.Floor(units)
		sum += units
		cut += out[i]
	}
	lost := func(i int) float64 { return w[i]*unit - out[i] }
	slices.SortStableFunc(order, func(a, b int) int {
		return cmp.Or(cmp.Compare(lost(b), lost(a)), cmp.Compare(w[b], w[a]))
	})
	missing := int(math.Round(sum - cut))
	for _, i := range order[:max(0, min(missing, len(order)))] {
		out[i]++
	}
	for i := range out {
		out[i] /= unit
	}
	return out
}
