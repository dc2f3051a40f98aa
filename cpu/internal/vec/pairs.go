package vec

import (
	"slices"
	"unsafe"

	"golang.org/x/sys/cpu"
)

// PairStep is the number of elements over which a unit for pairs of bf16 sums at once. Such a sum
// does not depend on anything else. The sums are added upwards from 0. They have another order
// than those of the other kernels, and subnormal numbers count as 0.
const PairStep = 32

// PairSums is the number of sums that PairValues computes at once: four tiles.
const PairSums = 4 * 16 * 16

// inRegisters is the unit of AMD's processors. Those of Intel have it, too, but their FMAs of float32
// are twice as fast.
const inRegisters = "AVX512-BF16"

// PairUnit names the unit that multiplies pairs of bf16 for tiles of the Width of x; "" if there
// is none, and then the methods below must not be called.
func (x *Kernels) PairUnit() string {
	if x.pairUnit == "" && x.tile.pairScores != nil && tilesPermitted() {
		return "AMX-BF16"
	}
	return x.pairUnit
}

// WithoutTiles returns x without AMX, for tests of the other unit, if the machine has both.
func (x Kernels) WithoutTiles() *Kernels {
	if x.narrow = slices.Clone(x.narrow); x.tile.pairScores != nil && cpu.X86.HasAVX512BF16 {
		x.pairUnit, x.tile.pairScores, x.tile.pairValues = inRegisters, x.tile.dotScores, x.tile.dotValues
	}
	for i, y := range x.narrow {
		x.narrow[i] = y.WithoutTiles()
	}
	return &x
}

// PairScores is Scores for keys and queries of bf16, times scale:
//
//	S[key][lane] = scale·Σ_d K[key][d]·Qᵀ[d][lane]    mx[lane] = max(mx[lane], max_key S)
//
//	s [n, Width]    k [n, d], rows ldk apart    q [d/2, Width] of pairs    mx [Width]
//
// d is a multiple of PairStep. Rows up to a multiple of 16 may be read and written, too.
func (x *Kernels) PairScores(s []float32, k []uint16, ldk, n int, q []uint32, d int, scale float32, mx []float32) {
	w, groups := x.Width, (n+15)/16
	_, _, _, _ = s[16*groups*w-1], k[(16*groups-1)*ldk+d-1], q[d/2*w-1], mx[w-1]
	x.tile.pairScores(&wholeTiles[0], &s[0], &k[0], 2*ldk, &q[0], n, groups, d/PairStep, scale, &mx[0])
}

// PairValues is Values for values and weights of bf16:
//
//	Oᵀ[d][lane] = alpha[lane]·Oᵀ[d][lane] + Σ_key V[key][d]·P[key][lane]
//
//	o [d, Width]    vt [d, n], rows ldv apart    p [n/2, Width] of pairs    alpha [Width]
//
// d is a multiple of 16, n one of PairStep. sums is memory for PairSums numbers.
func (x *Kernels) PairValues(o []float32, vt []uint16, ldv int, p []uint32, d, n int, alpha, sums []float32) {
	w := x.Width
	_, _, _, _, _ = o[d*w-1], vt[(d-1)*ldv+n-1], p[n/2*w-1], alpha[w-1], sums[PairSums-1]
	x.tile.pairValues(&wholeTiles[0], &o[0], &vt[0], 2*ldv, &p[0], d/16, n/PairStep, &alpha[0], &sums[0])
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
	x.turn(&dst[0], 4*ldd, &src[0], 2*lds, pairs/16)
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
	x.turnPairs((*uint32)(unsafe.Pointer(&dst[0])), 2*ldd, &src[0], 2*lds, cols/16)
}

// RoundPairs rounds rows to bf16, to nearest even, and writes the pairs of rows 2r and 2r+1.
//
//	dst [rows/2, cols]    src [rows, cols]
//
// rows is even, cols a multiple of 16.
func (x *Kernels) RoundPairs(dst []uint32, src []float32, rows, cols int) {
	_, _ = dst[rows/2*cols-1], src[rows*cols-1]
	x.roundPairs(&dst[0], &src[0], rows/2, cols/16)
}

// PairWeights is Weights and RoundPairs. Weights are not written to s, whose contents become unspecified.
//
//	pairs [2·fours, Width]
func (x *Kernels) PairWeights(pairs []uint32, s []float32, fours int, m, mx, l, alpha []float32) {
	w := x.Width
	_, _, _, _, _, _ = pairs[2*fours*w-1], s[4*fours*w-1], m[w-1], mx[w-1], l[w-1], alpha[w-1]
	x.tile.pairWeights(&s[0], fours, &m[0], &mx[0], &l[0], &alpha[0], &pairs[0])
}

// PairLoops are loops with the products of the unit for pairs, to measure its ceiling.
type PairLoops struct{ *Kernels }

// FMA computes the products n times, or an eighth of that, because those of tiles take longer.
func (x PairLoops) FMA(n int, _, _ float32) (operations int) {
	if x.pairUnit == inRegisters {
		return x.dotFMA(n)
	}
	return x.tileFMA(&wholeTiles[0], n/8)
}

// wholeTiles is the configuration of AMX with eight tiles of 16 rows of 64 bytes.
var wholeTiles = func() (c [64]byte) {
	c[0] = 1 // palette
	for t := range 8 {
		c[16+2*t], c[48+t] = 64, 16
	}
	return c
}()
