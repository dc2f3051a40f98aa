package vec

import "unsafe"

// pairKernels multiply pairs of bf16 and add the products in float32, in a unit for that.
// Sums have another order than those of the other kernels, and subnormal numbers count as 0.
type pairKernels struct {
	unit       string
	product    func(config *byte, c *float32, ldc int, a *uint16, lda int, b *uint32, ldb, groups, steps, vectors int)
	turn       func(dst *uint32, ldd int, src *uint16, lds, squares int)
	turnPairs  func(dst *uint32, ldd int, src *uint16, lds, squares int)
	roundPairs func(dst *uint32, src *float32, pairs, vectors int)
}

// PairStep is the number of elements of A's rows that Product takes at once.
const PairStep = 32

// PairUnit names the unit that multiplies pairs of bf16 in tiles of the Width of x; "" if
// there is none, and then the methods below must not be called.
func (x *Kernels) PairUnit() string {
	if x.Lanes != 16 || x.pairs() == nil {
		return ""
	}
	return x.pairs().unit
}

// Product computes C = A·B of bf16, where element (k, n) of B is the pair of elements of its
// rows 2k and 2k+1, the first in the lower half. A sum over PairStep elements does not
// depend on anything else, and these are added upwards from 0.
//
//	c [16·groups, cols], rows ldc apart    a [16·groups, 32·steps], rows lda apart    b [16·steps, cols] of pairs, rows ldb apart
//
// cols is a multiple of 16.
func (x *Kernels) Product(c []float32, ldc int, a []uint16, lda int, b []uint32, ldb, groups, steps, cols int) {
	_, _, _ = c[(16*groups-1)*ldc+cols-1], a[(16*groups-1)*lda+PairStep*steps-1], b[(16*steps-1)*ldb+cols-1]
	x.pairs().product(&wholeTiles[0], &c[0], 4*ldc, &a[0], 2*lda, &b[0], 4*ldb, groups, steps, cols/16)
}

// Turn transposes pairs of adjacent bf16:
//
//	dst[c][r] = src[r][2c], src[r][2c+1]
//
//	dst [pairs, 16], rows ldd apart    src [16, 2·pairs], rows lds apart
//
// pairs is a multiple of 16.
func (x *Kernels) Turn(dst []uint32, ldd int, src []uint16, lds, pairs int) {
	_, _ = dst[(pairs-1)*ldd+15], src[15*lds+2*pairs-1]
	x.pairs().turn(&dst[0], 4*ldd, &src[0], 2*lds, pairs/16)
}

// TurnPairs transposes bf16:
//
//	dst[c][2r], dst[c][2r+1] = src[2r][c], src[2r+1][c]
//
//	dst [cols, 32], rows ldd apart    src [32, cols], rows lds apart
//
// cols is a multiple of 16.
func (x *Kernels) TurnPairs(dst []uint16, ldd int, src []uint16, lds, cols int) {
	_, _ = dst[(cols-1)*ldd+31], src[31*lds+cols-1]
	x.pairs().turnPairs((*uint32)(unsafe.Pointer(&dst[0])), 2*ldd, &src[0], 2*lds, cols/16)
}

// RoundPairs rounds rows to bf16, to nearest even, and writes the pairs of rows 2r and 2r+1.
//
//	dst [rows/2, cols]    src [rows, cols]
//
// rows is even, cols a multiple of 16.
func (x *Kernels) RoundPairs(dst []uint32, src []float32, rows, cols int) {
	_, _ = dst[rows/2*cols-1], src[rows*cols-1]
	x.pairs().roundPairs(&dst[0], &src[0], rows/2, cols/16)
}

// wholeTiles is the configuration of AMX with eight tiles of 16 rows of 64 bytes.
var wholeTiles = func() (c [64]byte) {
	c[0] = 1 // palette
	for t := range 8 {
		c[16+2*t], c[48+t] = 64, 16
	}
	return c
}()
