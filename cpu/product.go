package cpu

import (
	"gonum.org/v1/gonum/blas"
	"gonum.org/v1/gonum/blas/blas32"
)

// The tile: queryBlock rows against keyBlock keys, and products into at most
// colBlock columns. gonum's Gemm starts goroutines of its own, and cuts its sums
// in another way, from four blocks of 64 x 64 results on; one row of blocks and
// at most three columns of them stay below, so that one tile is one goroutine.
//
// keyBlock also fixes the arithmetic: key blocks start at multiples of it,
// whatever the queries, the batch and the number of threads are, and every sum
// over keys is a sum over whole blocks, padded with zeros.
//
// Of that sum, stretches of sumBlock zeros at either end are left out. gonum's
// dot product adds the elements of each 16 to the same 8 partial sums, which a
// zero product does not change (they start at +0, so they are never -0), and so
// its bits stay those of the whole block; tests hold it to that.
const (
	queryBlock = 64
	keyBlock   = 128
	colBlock   = 192
	sumBlock   = 16
)

// sumSpan returns the part of a key block that a sum over its elements [lo, hi)
// must take in: the stretches of sumBlock that they lie in.
func sumSpan(lo, hi int) (int, int) {
	return lo / sumBlock * sumBlock, ceilDiv(hi, sumBlock) * sumBlock
}

// mulNT computes c = a·bᵀ in one goroutine. A row of c depends on the same row
// of a and on b alone, bit by bit, however many rows there are.
//
//	a [m, k] rows lda apart    b [n, k] rows ldb apart    c [m, n] rows ldc apart
//
// m is at most queryBlock; n is any, and cut into pieces of colBlock. b's rows
// must be aligned, see [aligned].
func mulNT(m, n, k int, a []float32, lda int, b []float32, ldb int, c []float32, ldc int) {
	for j := 0; j < n; j += colBlock {
		w := min(colBlock, n-j)
		blas32.Gemm(blas.NoTrans, blas.Trans, 1,
			blas32.General{Rows: m, Cols: k, Stride: lda, Data: a},
			blas32.General{Rows: w, Cols: k, Stride: ldb, Data: b[j*ldb:]},
			0, blas32.General{Rows: m, Cols: w, Stride: ldc, Data: c[j:]})
	}
}
