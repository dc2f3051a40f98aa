package vec

import (
	"math"
	"math/rand/v2"
	"testing"
)

// TestGonumProducts shows that the products of the gonum kernels are within the
// error bound of their sums, that a row has the same bits among other rows and
// alone, and that neither runs nor the placement of keys change a bit.
func TestGonumProducts(t *testing.T) {
	x, rng := &kernelsGonum, rand.New(rand.NewPCG(1, 2))
	for _, c := range []struct{ rows, n, d int }{{1, 4, 4}, {64, 128, 64}, {65, 132, 20}, {9, 260, 400}} {
		rows, n, d := c.rows, c.n, c.d
		k, q, p, o := random(rng, n*d), random(rng, rows*d), random(rng, rows*n), random(rng, rows*d)
		alpha, all := random(rng, rows), AppendRun(nil, k, d, n, d, k)
		s, before := make([]float32, rows*n), clone(o)
		x.Dots(F32, s, n, all, d, q, d, rows, d)
		x.Mix(F32, o, d, all, d, p, n, alpha, rows, d)
		near := func(what string, got float32, want, size float64, terms int) {
			// As many roundings as there are terms (Higham 2002, ch. 3).
			if !(math.Abs(float64(got)-want) <= float64(terms+2)*0x1p-24*size) {
				t.Fatalf("%v: %s is %v, should be %v", c, what, got, want)
			}
		}
		for r := range rows {
			for j := range n {
				var want, size float64
				for e := range d {
					y := float64(q[r*d+e]) * float64(k[j*d+e])
					want, size = want+y, size+math.Abs(y)
				}
				near("a score", s[r*n+j], want, size, d)
			}
			for e := range d {
				want := float64(alpha[r]) * float64(before[r*d+e])
				size := math.Abs(want)
				for j := range n {
					y := float64(p[r*n+j]) * float64(k[j*d+e])
					want, size = want+y, size+math.Abs(y)
				}
				near("an output", o[r*d+e], want, size, n)
			}
		}
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

// TestGonumZeros shows that weights of 0 around the others change no bit of an output.
func TestGonumZeros(t *testing.T) {
	const n, d = 128, 20
	x, rng := &kernelsGonum, rand.New(rand.NewPCG(1, 2))
	v, p, one := random(rng, n*d), random(rng, n), []float32{1}
	for lo := 0; lo < n; lo += 4 {
		for hi := lo + 4; hi <= n; hi += 4 {
			padded, all, some := make([]float32, n), make([]float32, d), make([]float32, d)
			copy(padded[lo:hi], p[lo:hi])
			x.Mix(F32, all, d, AppendRun(nil, v, d, n, d, v), d, padded, n, one, 1, d)
			x.Mix(F32, some, d, AppendRun(nil, v[lo*d:], d, hi-lo, d, v), d, p[lo:], n, one, 1, d)
			within(t, "outputs", all, some, 0)
		}
	}
}
