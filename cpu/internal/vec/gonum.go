package vec

import (
	"math"
	"runtime"
	"sync"
	"unsafe"

	"gonum.org/v1/gonum/blas"
	"gonum.org/v1/gonum/blas/blas32"

	"github.com/seed90331342/attn/backend"
)

// kernelsGonum computes both products with blas32.Gemm, and everything between
// them in plain Go. Its tiles always have keys as lanes, because both products
// of a tile of query rows are then level-3 calls without a transposition:
//
//	S = Q·Kᵀ    O = alpha·O + P·V
//
// gonum computes a row of either product from that row of Q or P alone: a score
// is one dot product, and an output is summed over keys upwards from 0. The
// bits of a row therefore do not depend on the other rows of the tile.
var kernelsGonum = Kernels{
	Tier: "gonum", Lanes: 4, Width: gonumWidth, OnlyKeyLanes: true, tile: tileKernels{fold: foldGonum}, transpose: transposeGonum,
	exp2: exp2Gonum, exp2Sum: exp2SumGonum, scaleMax: scaleMaxGonum, rowWeights: rowWeightsGonum, softcap: softcapGonum,
	bias: biasGonum, join: joinGonum, bound: boundGonum, hideRow: hideRowGonum, dropRow: dropRowGonum, nonFinite: nonFiniteGonum,
	store: [elements]storeFunc{F16: storeGonum(F16), BF16: storeGonum(BF16)}, rankOne: rankOneGonum, productSum: productSumGonum, silu: siluGonum, sumsFrom: sumsFromGonum, fma: fmaGonum, read: readGonum,
}

const gonumWidth = 64

// gonum's Gemm starts goroutines, and splits its sums differently, from four
// blocks of 64 x 64 results on. One row of blocks and at most three columns of
// them stay below that, so one call is one goroutine.
const (
	gemmRows = 64
	gemmCols = 192
)

// Gemm, unless nil, takes the place of blas32.Gemm. A sum continues from beta·c, term after term.
var Gemm func(tb blas.Transpose, m, n, k int, a []float32, lda int, b []float32, ldb int, beta float32, c []float32, ldc int)

// gemm computes c = a·b + beta·c, or a·bᵀ with tb = blas.Trans.
//
//	a [m, k]    b [k, n] or [n, k]    c [m, n]
func gemm(tb blas.Transpose, m, n, k int, a []float32, lda int, b []float32, ldb int, beta float32, c []float32, ldc int) {
	if Gemm != nil {
		Gemm(tb, m, n, k, a, lda, b, ldb, beta, c, ldc)
		return
	}
	for i := 0; i < m; i += gemmRows {
		rows := min(gemmRows, m-i)
		for j := 0; j < n; j += gemmCols {
			cols := min(gemmCols, n-j)
			right := b[j:]
			if tb == blas.Trans {
				right = b[j*ldb:]
			}
			blas32.Implementation().Sgemm(blas.NoTrans, tb, rows, cols, k, 1, a[i*lda:], lda, right, ldb, beta, c[i*ldc+j:], ldc)
		}
	}
}

// buffers holds the *[]float32 that products use between two Gemm calls.
var buffers = sync.Pool{New: func() any { return new([]float32) }}

// buffer returns n floats with unspecified contents that begin at a multiple of
// 4 elements; buffers.Put takes the pointer.
func buffer(n int) (*[]float32, []float32) {
	b := buffers.Get().(*[]float32)
	if cap(*b) < n+3 {
		*b = make([]float32, n+3)
	}
	s := (*b)[:cap(*b)]
	s = s[-misalignment(s)&3:]
	return b, s[:n]
}

// misalignment returns the offset of s in memory from a multiple of 4 elements.
// gonum's dot product adds the elements of its second operand that come before
// such a boundary one at a time, so the order of the sum, and with it the last
// bit, would depend on the address.
func misalignment(s []float32) int {
	return int(uintptr(unsafe.Pointer(unsafe.SliceData(s))) / 4 & 3)
}

// scoresGonum computes S = Q·Kᵀ.
//
//	s [rows, n]    k [n, d]    q [rows, d]
func scoresGonum(s []float32, lds int, k []float32, ldk, n int, q []float32, ldq, rows, d int) {
	if misalignment(k) != 0 || ldk%4 != 0 {
		b, to := buffer(n * d)
		defer buffers.Put(b)
		for r := range n {
			copy(to[r*d:(r+1)*d], k[r*ldk:])
		}
		k, ldk = to, d
	}
	gemm(blas.Trans, rows, n, d, q, ldq, k, ldk, 0, s, lds)
}

// valuesGonum computes O = alpha·O + P·V over the values of all runs.
//
//	o [rows, d]    p [rows, n]    alpha [rows]
func valuesGonum(o []float32, ldo int, runs []Run, ldv int, p []float32, ldp int, alpha []float32, rows, d int) {
	b, sum := buffer(rows * d)
	defer buffers.Put(b)
	beta, first := float32(0), 0
	for _, r := range runs {
		gemm(blas.NoTrans, rows, d, r.n, p[first:], ldp, r.float32s(ldv, d), ldv, beta, sum, d)
		first, beta = first+r.n, 1
	}
	for r := range rows {
		out, a := o[r*ldo:r*ldo+d], alpha[r]
		for c, x := range sum[r*d : (r+1)*d] {
			out[c] = float32(a*out[c]) + x
		}
	}
}

// float32s returns the rows of r, whose type is F32.
func (r Run) float32s(ld, d int) []float32 {
	return unsafe.Slice((*float32)(unsafe.Pointer(r.rows)), (r.n-1)*ld+d)
}

// The kernels below work on vectors of 4 elements.

func exp2Gonum(x *float32, vectors int, m float32) {
	s := unsafe.Slice(x, 4*vectors)
	for i, y := range s {
		s[i] = exp2(y - m)
	}
}

func exp2SumGonum(x *float32, vectors int, m float32, sum *float32) {
	s, sums := unsafe.Slice(x, 4*vectors), (*[4]float32)(unsafe.Pointer(sum))
	exp2Gonum(x, vectors, m)
	for i, y := range s {
		sums[i%4] += y
	}
}

func scaleMaxGonum(x *float32, vectors int, c float32, mx *float32) {
	m := NegInf
	s := unsafe.Slice(x, 4*vectors)
	for i, y := range s {
		y *= c
		s[i] = y
		if y > m { // the max function takes twice as long
			m = y
		}
	}
	*mx = m
}

func rowWeightsGonum(s *float32, lds, vectors, rows int, m, l, alpha *float32) {
	ms, ls, factors := unsafe.Slice(m, rows), unsafe.Slice(l, rows), unsafe.Slice(alpha, rows)
	for r := range rows {
		row := (*float32)(unsafe.Add(unsafe.Pointer(s), r*lds))
		scaleMaxGonum(row, vectors, 1, &factors[r])
		largest := max(ms[r], factors[r])
		factors[r] = exp2(ms[r] - largest)
		ms[r] = largest
		exp2Gonum(row, vectors, largest)
		sum := float32(0)
		for p := unsafe.Slice(row, 4*vectors); len(p) >= 4; p = p[4:] {
			sum += (p[0] + p[1]) + (p[2] + p[3])
		}
		ls[r] = float32(factors[r]*ls[r]) + sum
	}
}

func softcapGonum(x *float32, vectors int, c float32) {
	s := unsafe.Slice(x, 4*vectors)
	for i, y := range s {
		s[i] = c * Tanh(y)
	}
}

// log2e is log2(e) in float32, as the assembly has it.
const log2e = 0x1.715476p+0

func biasGonum(x, b *float32, vectors int) {
	s, bias := unsafe.Slice(x, 4*vectors), unsafe.Slice(b, 4*vectors)
	for i, y := range bias {
		if math.Abs(float64(y)) > math.MaxFloat32 {
			s[i] = y // not s+y, which may be NaN
			continue
		}
		s[i] = float32(math.FMA(log2e, float64(backend.Bound(y, backend.MaxBias)), float64(s[i])))
	}
}

func joinGonum(x, b *float32, vectors int) {
	s, bias := unsafe.Slice(x, 4*vectors), unsafe.Slice(b, 4*vectors)
	const limit = backend.MaxBias
	for i, y := range bias {
		switch x := s[i]; {
		case x == NegInf || y == NegInf:
			s[i] = NegInf // not x+y, which may be NaN
		case x == -NegInf || y == -NegInf:
			s[i] = -NegInf
		default:
			s[i] = max(-limit, min(max(-limit, min(x, limit))+y, limit))
		}
	}
}

func boundGonum(x *float32, vectors int, limit float32) {
	s := unsafe.Slice(x, 4*vectors)
	for i, y := range s {
		if y > limit || y < -limit { // hardly ever
			s[i] = backend.Bound(y, limit)
		}
	}
}

// hideRowGonum has no branches, which a mask without a pattern would have mispredicted.
func hideRowGonum(x *float32, mask *bool, vectors int) {
	s, seen := unsafe.Slice((*uint32)(unsafe.Pointer(x)), 4*vectors), unsafe.Slice((*uint8)(unsafe.Pointer(mask)), 4*vectors)
	for i, one := range seen {
		hidden := uint32(one) - 1 // all bits
		s[i] = s[i]&^hidden | 0xff800000&hidden
	}
}

func foldGonum(o, x *float32, rows int, a, b *float32) {
	as, bs, out := (*[gonumWidth]float32)(unsafe.Pointer(a)), (*[gonumWidth]float32)(unsafe.Pointer(b)), unsafe.Slice(o, gonumWidth*rows)
	for i, y := range unsafe.Slice(x, len(out)) {
		lane := i % gonumWidth
		out[i] = float32(out[i]*as[lane]) + float32(y*bs[lane])
	}
}

func transposeGonum(dst *float32, ldd int, src *float32, lds int, mul *float32) {
	factors := (*[4]float32)(unsafe.Pointer(mul))
	for r := range 4 {
		for c, x := range (*[4]float32)(unsafe.Add(unsafe.Pointer(src), r*lds)) {
			to := (*[4]float32)(unsafe.Add(unsafe.Pointer(dst), c*ldd))
			to[r] = float32(x*factors[c]) + 0
		}
	}
}

func dropRowGonum(x *float32, vectors, _ int, d *uint64, _ int) {
	draw := (*Draw)(unsafe.Pointer(d))
	s := unsafe.Slice(x, 4*vectors)
	for j := range s {
		s[j] *= draw.factorOf(0, 0, j)
	}
}

func nonFiniteGonum(x *float32, ld, rows, vectors int) int32 {
	var seen uint32 // bit 31 is set by an exponent of all ones
	for r := range rows {
		row := unsafe.Slice((*float32)(unsafe.Add(unsafe.Pointer(x), r*ld)), 4*vectors)
		for _, y := range row {
			seen |= math.Float32bits(y)&0x7fffffff + 0x00800000
		}
	}
	return int32(seen >> 31)
}

func storeGonum(e backend.DType) storeFunc {
	return func(dst *uint16, src *float32, vectors int) {
		to := unsafe.Slice(dst, 4*vectors)
		for i, x := range unsafe.Slice(src, 4*vectors) {
			to[i] = e.Encode(x)
		}
	}
}

// fmaGonum has 8 variables, and not vectors: its rate is a lower bound.
func fmaGonum(n int, x, y float32) int {
	c0, c1, c2, c3, c4, c5, c6, c7 := x, x, x, x, x, x, x, x
	for range n {
		c0, c1, c2, c3 = c0*x+y, c1*x+y, c2*x+y, c3*x+y
		c4, c5, c6, c7 = c4*x+y, c5*x+y, c6*x+y, c7*x+y
	}
	runtime.KeepAlive(c0 + c1 + c2 + c3 + c4 + c5 + c6 + c7) // else the compiler drops the loop
	return 2 * 8 * n
}

func readGonum(p *byte, apart, n int) {
	var seen [4]uint64
	for i := range seen {
		for _, word := range unsafe.Slice((*uint64)(unsafe.Add(unsafe.Pointer(p), i*apart)), 256/8*n) {
			seen[i] |= word
		}
	}
	runtime.KeepAlive(seen) // else the compiler drops the loop
}
