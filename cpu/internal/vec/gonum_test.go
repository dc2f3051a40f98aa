package vec

import (
	"math/rand/v2"
	"testing"
)

// TestGonumProducts shows that a row has the same bits among other rows and alone, and that neither runs nor the placement
// of keys change a bit.
func TestGonumProducts(t *testing.T) {
	x, rng := &kernelsGonum, rand.New(rand.NewPCG(1, 2))
	for _, c := range []struct{ rows, n, d int }{{1, 4, 4}, {64, 128, 64}, {65, 132, 20}, {9, 260, 400}} {
		rows, n, d := c.rows, c.n, c.d
		k, q, p, o := random(rng, n*d), random(rng, rows*d), random(rng, rows*n), random(rng, rows*d)
		alpha, all := random(rng, rows), AppendRun(nil, k, d, n, d, k)
		s, before := make([]float32, rows*n), clone(o)
		x.Dots(F32, s, n, all, d, q, d, rows, d)
		x.Mix(F32, o, d, all, d, p, n, alpha, rows, d)
		for r := range rows {
			one, out := make([]float32, n), clone(before[r*d:(r+1)*d])
			x.Dots(F32, one, n, all, d, q[r*d:], d, 1, d)
			within(t, "scores of a row alone", one, s[r*n:(r+1)*n], 0)
			x.Mix(F32, out, d, all, d, p[r*n:], n, alpha[r:], 1, d)
			within(t, "outputs of a row alone", out, o[r*d:(r+1)*d], 0)
		}
		for off := range 4 {
			ld := d + off
			moved := make([]float32, off+n*ld)
			for j := range n {
				copy(moved[off+j*ld:], k[j*d:(j+1)*d])
			}
			runs := inRuns(rng, 4, n, moved[off:], ld, n, d)
			for _, runs := range [][]Run{runs, AppendRun(nil, moved[off:], ld, n, d, k)} {
				s2, o2 := make([]float32, rows*n), clone(before)
				x.Dots(F32, s2, n, runs, ld, q, d, rows, d)
				within(t, "scores of other runs", s2, s, 0)
				x.Mix(F32, o2, d, runs, ld, p, n, alpha, rows, d)
				within(t, "outputs of other runs", o2, o, 0)
			}
		}
	}
}
