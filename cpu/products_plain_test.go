package cpu

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"gonum.org/v1/gonum/blas"
	"gonum.org/v1/gonum/blas/blas32"
)

// TestPlainGemm compares the products that wasm takes with those of gonum, within the roundings of
// both: as many as there are terms (Higham 2002, ch. 3).
func TestPlainGemm(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for _, c := range []struct{ m, n, k int }{{1, 4, 4}, {4, 8, 64}, {7, 13, 20}, {64, 128, 64}, {5, 1, 1}} {
		for _, tb := range []blas.Transpose{blas.NoTrans, blas.Trans} {
			for _, beta := range []float32{0, 1, 0.5} {
				a, b, got := drawn(rng, c.m*(c.k+3)), drawn(rng, (c.k+2)*(c.n+c.k)), drawn(rng, c.m*(c.n+1))
				ldb := c.n + 2
				if tb == blas.Trans {
					ldb = c.k + 2
				}
				want := slices.Clone(got)
				right := blas32.General{Rows: c.k, Cols: c.n, Stride: ldb, Data: b}
				if tb == blas.Trans {
					right.Rows, right.Cols = c.n, c.k
				}
				blas32.Gemm(blas.NoTrans, tb, 1, blas32.General{Rows: c.m, Cols: c.k, Stride: c.k + 3, Data: a}, right, beta,
					blas32.General{Rows: c.m, Cols: c.n, Stride: c.n + 1, Data: want})
				plainGemm(tb, c.m, c.n, c.k, a, c.k+3, b, ldb, beta, got, c.n+1)
				for i := range got {
					// The operands are below 8 in magnitude.
					if bound := float64(2*c.k+4) * 0x1p-24 * 64 * float64(c.k+1); math.Abs(float64(got[i]-want[i])) > bound {
						t.Fatalf("%v, %v, beta %v: element %d is %v, gonum has %v", c, tb, beta, i, got[i], want[i])
					}
				}
			}
		}
	}
}

// drawn returns n normal numbers.
func drawn(rng *rand.Rand, n int) []float32 {
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(rng.NormFloat64())
	}
	return x
}
