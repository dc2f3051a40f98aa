package vec

import (
	"math"
	"math/rand/v2"
	"testing"
)

// TestGradientSteps compares the kernels of the backward pass with their twins, at sizes that
// need every kind of register tile, and shows that they write no other elements.
func TestGradientSteps(t *testing.T) {
	each(t, assembly, func(t *testing.T, x, twin *Kernels, rng *rand.Rand) {
		w := x.Width
		for _, keys := range []int{1, 3, 4, 5, 6, 13, 128} {
			for _, vectors := range []int{1, 2, 3, 4, 5, 9} {
				for _, lanes := range []int{1, 2, 3, 4, 7, w - 1, w} {
					d := vectors * x.Lanes
					ldo, ldr := d+3, d+5
					o, rows, p := random(rng, keys*ldo), random(rng, lanes*ldr), random(rng, keys*w)
					o2 := clone(o)
					x.AddOuter(o, ldo, rows, ldr, lanes, p, keys, d)
					twin.AddOuter(o2, ldo, rows, ldr, lanes, p, keys, d)
					within(t, "outer sums", o, o2, 0)
				}
			}
		}
		const rows = 5
		inf, nan := float32(math.Inf(1)), float32(math.NaN())
		ds, p, dots := random(rng, (rows+1)*w), random(rng, rows*w), random(rng, w)
		dropped := clone(p)
		for i := range p {
			switch rng.IntN(6) {
			case 0:
				p[i], dropped[i] = 0, 0
				ds[i] = []float32{inf, nan, -inf, 1}[rng.IntN(4)]
			case 1:
				dropped[i] = 0
				ds[i] = []float32{inf, nan, -inf, 1}[rng.IntN(4)]
			}
		}
		dots[1], dots[2], p[5], dropped[5] = nan, inf, nan, nan
		ds2 := clone(ds)
		x.ScoreGradients(ds, p, dropped, rows, dots, 1.25)
		twin.ScoreGradients(ds2, p, dropped, rows, dots, 1.25)
		within(t, "gradients of scores", ds, ds2, 0)
		for i, weight := range p {
			if weight == 0 && ds[i] != 0 {
				t.Fatalf("the gradient of a score with weight 0 is %v", ds[i])
			}
		}
	})
}
