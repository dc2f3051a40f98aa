package vec

import (
	"fmt"
	"math/rand/v2"
	"testing"
)

// TestColumns compares the kernels for some columns of a tile with those for all of them.
func TestColumns(t *testing.T) {
	eachAssembly(t, func(t *testing.T, x, _ *Kernels, rng *rand.Rand) {
		if x.Columns() == 0 {
			t.Skip("takes all columns only")
		}
		w, all := x.Width, x.Columns()
		for _, d := range []int{1, 4, 5, 7, 64, 130} {
			for _, n := range []int{1, 2, 4, 7, 12, 16, 31, 64, 128} {
				ld := d + n%3
				k, qt := random(rng, n*ld), random(rng, d*w)
				s, mx := filled(n*w, 9), filled(w, -9)
				runs := AppendRun(nil, k, ld, n, d, k)
				x.Scores(s, runs, ld, qt, d, mx)
				for from := range all {
					for to := from + 1; to <= all; to++ {
						s2, mx2 := filled(n*w, 9), filled(w, -9)
						x.ScoresOf(from, to, s2, runs, ld, qt, d, mx2)
						what := fmt.Sprintf("columns %d to %d, %d keys of %d", from, to, n, d)
						for r := 0; r < n*w; r += w {
							within(t, what, s2[r+from*x.Lanes:r+to*x.Lanes], s[r+from*x.Lanes:r+to*x.Lanes], 0)
						}
						within(t, "maxima, "+what, mx2[from*x.Lanes:to*x.Lanes], mx[from*x.Lanes:to*x.Lanes], 0)
					}
				}
				for range 10 {
					steps := make([]int, 2*all-1)
					for range (n + 3) / 4 {
						steps[rng.IntN(len(steps))] += 4
					}
					for i := len(steps) - 1; i >= 0; i-- {
						if steps[i] > 0 { // the last keys need not be four
							steps[i] -= (n+3)/4*4 - n
							break
						}
					}
					p, r := random(rng, n*w), 0
					for step, keys := range steps {
						for range keys {
							for c := range all {
								if c < step+1-all || c > step {
									clear(p[r*w+c*x.Lanes : r*w+(c+1)*x.Lanes])
								}
							}
							r++
						}
					}
					o, alpha := random(rng, d*w), random(rng, w)
					o2 := clone(o)
					x.ValuesOf(steps, o, runs, ld, p, d, alpha)
					x.Values(o2, runs, ld, p, d, alpha)
					within(t, fmt.Sprintf("values of %d, keys %d", d, steps), o, o2, 0)
				}
			}
		}
	})
}
