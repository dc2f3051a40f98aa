package bench

import (
	"math"
	"slices"
)

// minGrowth is the fewest lengths that a growth is fitted to: any two lie on a line.
const minGrowth = 3

// growth fits how time and memory grow in each series of cases.
func growth(cases []Measurement) []Growth {
	type key struct {
		backend, contender, series, variant string
		threads                             int
	}
	fits := []Growth{}
	done := map[key]bool{}
	of := func(m *Measurement) key { return key{m.Backend, m.Contender, m.Series, m.Variant, m.Threads} }
	for i := range cases {
		k := of(&cases[i])
		if done[k] {
			continue
		}
		done[k] = true
		var rows []*Measurement
		for j := range cases {
			if m := &cases[j]; of(m) == k && m.Status == OK {
				rows = append(rows, m)
			}
		}
		slices.SortStableFunc(rows, func(a, b *Measurement) int { return a.SeqK - b.SeqK })
		if fit, ok := fitGrowth(rows); ok {
			fit.Backend, fit.Contender, fit.Series, fit.Variant, fit.Threads = k.backend, k.contender, k.series, k.variant, k.threads
			fits = append(fits, fit)
		}
	}
	return fits
}

// fitGrowth fits the longer half of rows, sorted by length, of which each has its own.
func fitGrowth(rows []*Measurement) (Growth, bool) {
	rows = rows[min(len(rows)/2, max(len(rows)-minGrowth, 0)):]
	for i := 1; i < len(rows); i++ {
		if rows[i].SeqK == rows[i-1].SeqK {
			return Growth{}, false // the series differs in something else
		}
	}
	if len(rows) < minGrowth {
		return Growth{}, false
	}
	var lengths, times, memory []float64
	for _, m := range rows {
		lengths = append(lengths, float64(m.SeqK))
		times = append(times, *m.MedianS)
		memory = append(memory, float64(m.Memory.Counted()))
	}
	return Growth{Lengths: len(rows), From: rows[0].SeqK, To: rows[len(rows)-1].SeqK,
		Time: exponent(lengths, times), Memory: exponent(lengths, memory)}, true
}

// exponent fits y = c·x^e by least squares in logarithms and returns e.
func exponent(x, y []float64) float64 {
	n := float64(len(x))
	var mx, my float64
	for i := range x {
		mx += math.Log(x[i]) / n
		my += math.Log(y[i]) / n
	}
	var top, bottom float64
	for i := range x {
		dx := math.Log(x[i]) - mx
		top += dx * (math.Log(y[i]) - my)
		bottom += dx * dx
	}
	return top / bottom
}
