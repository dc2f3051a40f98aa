package main

import (
	"cmp"
	"math"
	"slices"
)

// roundRow rounds a row of weights to so many decimals such that it still adds
// up to what it did, which is 1: each weight is cut, and the units that are then
// missing go to those that lost most (the method of largest remainders; the
// larger weight, then the earlier key, first when they lost the same).
//
// For nearly all rows that is rounding to nearest. It is not where this would
// add up to more or less: the published walk-through of three tokens has the
// weights 0.063, 0.468, 0.468 as 0.0, 0.5, 0.5, where rounding each by itself
// gives 0.1, 0.5, 0.5.
func roundRow(w []float64, decimals int) []float64 {
	unit := math.Pow10(decimals)
	out := make([]float64, len(w))
	order := make([]int, len(w))
	var sum, cut float64
	for i, x := range w {
		order[i] = i
		// float32 has 0.3 as a little more or less: within 8 roundings of a
		// whole number of units it is that number.
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
