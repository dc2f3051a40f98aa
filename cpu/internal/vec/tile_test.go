package vec

import (
	"fmt"
	"math/rand/v2"
	"testing"
)

// TestScoresAndValues compares the products of a tile with their twins, for keys and values in
// one run, in runs of any length and in pairs of runs.
func TestScoresAndValues(t *testing.T) {
	eachAssembly(t, func(t *testing.T, x, twin *Kernels, rng *rand.Rand) {
		w := x.Width
		for _, d := range []int{1, 2, 3, 4, 5, 7, 8, 15, 17, 64, 130} {
			for _, n := range []int{1, 2, 3, 4, 6, 9, 16, 31, 40, 112, 128} {
				ld := d + n%3
				k, qt := random(rng, n*ld), random(rng, d*w)
				runs := inRuns(rng, 1, n, k, ld, n, d)
				switch {
				case n == 128:
					runs = AppendRun(nil, k, ld, n, d, k)
				case n == 40: // no pair
					runs = append(inRuns(rng, 16, 16, k, ld, 16, d), inRuns(rng, 24, 24, k[16*ld:], ld, 24, d)...)
				case n%pairedRun == 0:
					runs = inRuns(rng, pairedRun, pairedRun, k, ld, n, d)
				}
				mx := random(rng, w)
				s, s2, mx2 := filled(n*w, 9), filled(n*w, 9), clone(mx)
				x.Scores(s, runs, ld, qt, d, Stairs{}, mx)
				twin.Scores(s2, runs, ld, qt, d, Stairs{}, mx2)
				what := fmt.Sprintf("%d keys of %d in %d runs", n, d, len(runs))
				within(t, "scores, "+what, s, s2, 0)
				within(t, "maximum, "+what, mx, mx2, 0)

				o, alpha := random(rng, d*w), random(rng, w)
				o2 := clone(o)
				valuesByLane(x, o, runs, ld, s, d, Stairs{}, alpha)
				twin.Values(o2, runs, ld, s, d, Stairs{}, alpha)
				within(t, "values, "+what, o, o2, 0)

				if len(runs) > 1 {
					continue
				}
				stairs := Stairs{Down: rng.IntN(min(w, n+1))}
				if !x.RowOutputs {
					stairs.Up = rng.IntN(min(w+3, n-stairs.Down+1))
				}
				x.Scores(s, runs, ld, qt, d, stairs, clone(mx))
				for u := range stairs.Down {
					clear(s[(n-stairs.Down+u)*w:][:u+1])
					clear(s2[(n-stairs.Down+u)*w:][:u+1])
				}
				for u := range stairs.Up {
					clear(s[(stairs.Up-u)*w-min(w, u+1) : (stairs.Up-u)*w])
					clear(s2[(stairs.Up-u)*w-min(w, u+1) : (stairs.Up-u)*w])
				}
				what = fmt.Sprintf("with %+v, %s", stairs, what)
				within(t, "scores "+what, s, s2, 0)
				valuesByLane(x, o, runs, ld, s, d, stairs, alpha)
				twin.Values(o2, runs, ld, s, d, Stairs{}, alpha)
				within(t, "values "+what, o, o2, 0)
			}
		}
	})
}

// valuesByLane is Values for outputs [d, Width], or RowValues where x has that.
func valuesByLane(x *Kernels, o []float32, runs []Run, ldv int, p []float32, d int, stairs Stairs, alpha []float32) {
	if !x.RowOutputs {
		x.Values(o, runs, ldv, p, d, stairs, alpha)
		return
	}
	ld := (d + x.Lanes - 1) / x.Lanes * x.Lanes
	rows := make([]float32, x.Width*ld)
	for i := range d * x.Width {
		rows[i%x.Width*ld+i/x.Width] = o[i]
	}
	x.RowValues(rows, runs, ldv, p, d, stairs, alpha)
	for i := range d * x.Width {
		o[i] = rows[i%x.Width*ld+i/x.Width]
	}
}
