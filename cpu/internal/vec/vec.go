// Package vec is the arithmetic of attention on one core: the inner loops on blocks of Q, K and V that package tile prepares.
//
// A register tile has query rows as lanes. For a block of keys and values it computes
//
//	S[key][lane] = Σ_d K[key][d]·Qᵀ[d][lane]          Scores
//	P = 2^(S - m),  l = a·l + Σ P,  a = 2^(m_old - m)   Weights
//	Oᵀ[d][lane] = a·Oᵀ[d][lane] + Σ_key V[key][d]·P     Values
//
// K and V are read in place, at any distance between rows. No sum goes across lanes, and only Q and O are transposed.
// Scores are in units of log2 e: the caller multiplies Q by scale·log2(e) when it packs it. With few query rows, lanes
// would stay empty; then keys are lanes (Dots, Mix). A tile of 8 rows fills vectors of 16 with pairs of keys for Scores.
// In AVX-512, outputs of 8 and 16 rows have elements as lanes (RowValues). All layouts compute each sum in the same order.
// A row therefore has the same bits in each:
//
//	a score is summed over d upwards from 0, in one chain of FMAs
//	a block's weights are summed by fours, ((p0+p1)+(p2+p3)), upwards from 0
//	a block's values are summed over keys upwards from 0, in one chain of FMAs,
//	then o = a·o + sum in one more
//
// [Tiers] lists the tables of kernels that the machine runs: generated assembly (see _generate) for AVX-512F/DQ/VL, for
// AVX2 with FMA and F16C and for NEON, and blas32.Gemm with plain Go everywhere. The tests compare each with a twin in
// plain Go, within the errors that the methods state. NEON has only run on an emulator.
//
// Methods check that their slices are long enough, and do not read or write outside of the operands that they state.
// Assembly cannot be preempted, so one call of it is limited to some 10 microseconds (see budget).
package vec

import (
	"slices"
	"unsafe"

	"github.com/seed90331342/attn/backend"
)

//go:generate sh -c "cd _generate && GOWORK=off go run . -out ../vec_amd64.s -stubs ../vec_amd64.go -pkg vec"
//go:generate sh -c "cd _generate && GOWORK=off go run ./arm64 -out ../vec_arm64.s -stubs ../vec_arm64.go -pkg vec"

// Kernels are the kernels of one tier. The functions in its fields take pointers, and
// distances between rows in bytes, as the assembly does; callers use the methods.
type Kernels struct {
	// Tier is the name: "avx512", "avx2", "neon", "gonum".
	Tier string
	// Lanes is the number of float32 in a vector, Width the number of query rows in a tile, a multiple of Lanes.
	Lanes, Width int
	// OnlyKeyLanes is set in a table for tiles that always have keys as lanes. It lacks the kernels of the other layout: those of
	// tileKernels except fold. Its Dots and Mix read F32 only, and its Mix may skip weights of 0 even if their values are
	// not finite.
	OnlyKeyLanes bool
	// RowOutputs is set in a table that has RowValues and FoldRows. They need no transposition of the outputs, and use vectors in
	// full that the query rows of the tile do not fill.
	RowOutputs bool

	tile   tileKernels
	narrow []*Kernels // tables of the same tier with a smaller Width, in ascending order
	// ordered has dots and mix for adjacent rows of keys or values, which it prefetches in the order of their addresses.
	// Zen 5 reads them up to 1.5 times as fast. vbmi, which is nil without VBMI, has dots and mix for F8, which are 1.2 to
	// 1.5 times as fast there. They were not measured elsewhere.
	ordered, vbmi *Kernels
	zen5, zen4    bool // ordered and vbmi are used; narrow tiles take little longer, see Speed

	exp2       func(x *float32, vectors int, m float32)
	softcap    func(x *float32, vectors int, c float32)
	exp2Sum    func(x *float32, vectors int, m float32, sum *float32)
	scaleMax   func(x *float32, vectors int, c float32, mx *float32)
	rowWeights func(s *float32, lds, vectors, rows int, m, l, alpha *float32)
	bias, join func(x, b *float32, vectors int)
	nonFinite  func(x *float32, ld, rows, vectors int) (found int32)
	bound      func(x *float32, vectors int, limit float32)
	hideRow    func(x *float32, mask *bool, vectors int)
	dropRow    func(s *float32, vectors, step int, d *uint64, word int)
	pairUnit   string // inRegisters, or ""
	rowLanes   int    // the elements of a vector of dropRow, if more than Lanes
	transpose  func(dst *float32, ldd int, src *float32, lds int, mul *float32)
	rankOne    func(o *float32, ldo int, x, p, alpha *float32, rows, vectors, ahead int)
	productSum func(o, x, y, z *float32, vectors int)
	silu       func(x *float32, vectors int)
	sumsFrom   func(x, minus *float32, ld, rows, ref int, at *float32, vectors int)
	fma        func(n int, x, y float32) (operations int)
	read       func(p *byte, apart, n int)

	turn       func(dst *uint32, ldd int, src *uint16, lds, squares int)
	turnPairs  func(dst *uint32, ldd int, src *uint16, lds, squares int)
	roundPairs func(dst *uint32, src *float32, pairs, vectors int)
	tileFMA    func(config *byte, n int) (operations int)
	dotFMA     func(n int) (operations int)

	load  [elements]loadFunc
	store [elements]storeFunc // F16 and BF16
	dots  [Fixed + 1]dotsFunc
	mix   [elements][]registerTile[mixFunc]
}

// tileKernels are the kernels that depend on Width. Narrow tables lack outer and scoreGradients:
// the sums over the lanes of a tile would change.
type tileKernels struct {
	scores         []registerTile[scoresFunc]
	someScores     []registerTile[scoresFunc] // of some vectors of Width; nil if there are no such kernels, nor values with up and down
	values         []registerTile[valuesFunc]
	weights        func(s *float32, fours int, m, mx, l, alpha *float32)
	edge           func(s *float32, rows, key int, lo, hi *int32)
	columnMax      func(s *float32, rows int, mx *float32)
	fold           func(o, x *float32, rows int, a, b *float32)
	biasSquares    func(s, b *float32, ldb, squares int, limit float32, mx *float32)
	diagonal       func(s, b *float32, rows int, mx *float32)
	slopes         func(s, d, factors *float32, fours int, mx *float32)
	hide           func(s *float32, mask *bool, ld, squares int)
	drop           func(s *float32, times int, d *uint64)
	outer          []registerTile[outerFunc]
	scoreGradients func(ds, p, w *float32, rows int, dots *float32, factor float32)
	// For pairs of bf16, in tiles of AMX and in registers.
	pairScores, dotScores pairScoresFunc
	pairValues, dotValues pairValuesFunc
	pairWeights           func(s *float32, fours int, m, mx, l, alpha *float32, pairs *uint32)
	// For outputs with elements as lanes, or nil.
	rowValues func(o *float32, ldo int, runs *uintptr, n, ldv int, p *float32, first, d, stairs int, alpha *float32)
	foldRows  func(dst *float32, ldd int, x, y *float32, rows, vectors int, a, b *float32)
}

// registerTile is a kernel that computes rows by vectors sums at once. The rows are keys, elements of outputs, or
// heads. vectors is 0 if all tiles have those of Width. Lists of tiles are in descending order of size, and end with
// one row, of one vector. Small tiles are slower: they have too few independent sums to hide the latency of their FMAs.
type registerTile[F any] struct {
	rows, vectors int
	kernel        F
}

type (
	pairScoresFunc func(config *byte, s *float32, k *uint16, ldk int, q *uint32, keys, groups, steps int, scale float32, mx *float32)
	pairValuesFunc func(config *byte, o *float32, v *uint16, ldv int, p *uint32, groups, steps int, alpha, sums *float32)
	scoresFunc     func(s, k *float32, ldk int, run *uintptr, qt *float32, d, groups int, mx *float32)
	valuesFunc     func(o *float32, runs *uintptr, n, ldv int, p *float32, first, groups, up, down int, alpha *float32)
	storeFunc      func(dst *uint16, src *float32, vectors int)
	loadFunc       func(dst *float32, ldd int, src *byte, lds, rows, vectors int)
	dotsFunc       func(s *float32, lds int, k *byte, ldk int, run *uintptr, q *float32, ldq, heads, chunks, groups int)
	outerFunc      func(o *float32, ldo int, x *float32, ldx, n int, p *float32, groups int)
	mixFunc        func(o *float32, ldo int, runs *uintptr, n, ldv int, p *float32, ldp int, alpha *float32, first, strips int)
)

// tileCount returns the number of tiles t[i] that n rows are divided into, those that t[:i] leave.
func tileCount[F any](t []registerTile[F], i, n int) int {
	tiles := n / t[i].rows
	// One large tile less may leave whole tiles of the next size.
	if tiles > 0 && i+2 < len(t) && n%t[i].rows%t[i+1].rows != 0 && (n%t[i].rows+t[i].rows)%t[i+1].rows == 0 {
		tiles--
	}
	return tiles
}

// Tiers returns the tables that this machine runs, the fastest first. The gonum table is always there, and last.
func Tiers() []*Kernels { return append(slices.Clip(assembly), &kernelsGonum) }

// Narrow returns the table of x's tier with the smallest Width that is at least rows, or
// else x. It computes the same numbers, and lacks AddOuter and ScoreGradients.
func (x *Kernels) Narrow(rows int) *Kernels {
	for _, y := range x.narrow {
		if y.Width >= rows {
			return y
		}
	}
	return x
}

// Speed returns how many times as long x takes as the widest table of its tier, for each pair of a row and a key that it
// computes, and how many rows Scores and Values take at least: they leave out stairs of as many. It was measured with windows
// and causal masks: the shorter a tile's products, the more its other steps count. Zen 4, whose units have 256 bits, hides
// the latency of FMAs with fewer vectors; it was measured before stairs were left out.
func (x *Kernels) Speed() (times float64, rows int) {
	if x.rowLanes > x.Lanes { // the softmax fills half of each vector
		return 1.8, x.Width
	}
	vectors := min(x.Width/x.Lanes, 3) - 1
	if x.zen4 {
		return [3]float64{1.02, 1.025, 1}[vectors], x.Width
	}
	if rows = x.Width; x.tile.someScores != nil {
		rows = x.Lanes
	}
	return [3]float64{1.2, 1.06, 1}[vectors], rows
}

// The types of keys or values in memory. A row of Q8 begins with its scale, a float32.
const (
	F32, F16, BF16, Q8, Q4, F8 = backend.F32, backend.F16, backend.BF16, backend.Q8, backend.Q4, backend.F8

	elements = F8 + 1
	Fixed    = backend.I32 + 1 // Q8 in Dots, for query rows of Fix: a type that backend does not have, and so without a size
	MaxFixed = 512             // elements of such a row: sums of more products could exceed 32 bits
)

// Q8Lead is the size in bytes of the scale of a Q8 row.
const Q8Lead = 4

// budget is the most multiply-adds of whole vectors in one call of assembly: 11 microseconds at one a cycle and 3 GHz.
const budget = 1 << 15

// Weights turns a score tile into weights, with the maximum mx from Scores (which must be at least m):
//
//	alpha = 2^(m - mx)    m = mx    S = 2^(S - m)    l = alpha·l + Σ_key S
//
//	s [4·fours, Width]    m, mx, l, alpha [Width]
//
// With a finite m the weight of a score of -Inf is exactly 0, and so is a weight that
// would be subnormal. The power is within 2 ulp.
func (x *Kernels) Weights(s []float32, fours int, m, mx, l, alpha []float32) {
	w := x.Width
	_, _, _, _, _ = s[4*fours*w-1], m[w-1], mx[w-1], l[w-1], alpha[w-1]
	x.tile.weights(&s[0], fours, &m[0], &mx[0], &l[0], &alpha[0])
}

// Exp2 replaces x by 2^(x-m), as Weights does; the length is a multiple of Lanes.
func (x *Kernels) Exp2(s []float32, m float32) { x.exp2(&s[0], len(s)/x.Lanes, m) }

// Exp2Sum is Exp2, and adds the powers to sum, that of index i to lane i modulo Lanes.
// The length of s is a multiple of Lanes.
//
//	sum [Lanes]
func (x *Kernels) Exp2Sum(s []float32, m float32, sum []float32) {
	_ = sum[x.Lanes-1]
	x.exp2Sum(&s[0], len(s)/x.Lanes, m, &sum[0])
}

// ScaleMax multiplies s by c and returns the largest product that is not NaN, or -Inf if all are NaN. The length of s
// is a multiple of Lanes; lanes has room for Lanes elements.
func (x *Kernels) ScaleMax(s []float32, c float32, lanes []float32) float32 {
	lanes = lanes[:x.Lanes]
	x.scaleMax(&s[0], len(s)/x.Lanes, c, &lanes[0])
	return lanes[0]
}

// RowWeights is Weights for rows of scores with keys as lanes. Scores that are NaN do not count as maxima:
//
//	m' = max(m, max_key S)    alpha = 2^(m - m')    m = m'    S = 2^(S - m)    l = alpha·l + Σ_key S
//
//	s [rows, n], rows lds apart    m, l, alpha [rows]
//
// n is a multiple of Lanes.
func (x *Kernels) RowWeights(s []float32, lds, n, rows int, m, l, alpha []float32) {
	_, _, _, _ = s[(rows-1)*lds+n-1], m[rows-1], l[rows-1], alpha[rows-1]
	x.rowWeights(&s[0], 4*lds, n/x.Lanes, rows, &m[0], &l[0], &alpha[0])
}

// Softcap replaces s by c·tanh(s), to within 4 ulp for tanh and half an ulp for the
// product; the length is a multiple of Lanes. NaN stays NaN.
func (x *Kernels) Softcap(s []float32, c float32) { x.softcap(&s[0], len(s)/x.Lanes, c) }

// Bias adds log2(e)·b to s, with finite b bounded to ±2^127. Where b is infinite the
// result is b for any s. The length of s is a multiple of Lanes.
func (x *Kernels) Bias(s, b []float32) { x.bias(&s[0], &b[:len(s)][0], len(s)/x.Lanes) }

// Join adds the biases b, which are within ±2^127 if finite, to the biases s, and bounds finite s and sums to the same
// range. The sum is -Inf where either bias is, and else +Inf where either is. The length of s is a multiple of Lanes.
func (x *Kernels) Join(s, b []float32) { x.join(&s[0], &b[:len(s)][0], len(s)/x.Lanes) }

// Bound clamps finite elements of s to ±limit. The length of s is a multiple of Lanes.
func (x *Kernels) Bound(s []float32, limit float32) { x.bound(&s[0], len(s)/x.Lanes, limit) }

// BiasSquares is Bias for squares of a score tile, with the biases of a lane in a row and finite biases bounded to
// ±limit, and computes mx = max(mx, S) over the squares as Scores does:
//
//	S[r][lane] += log2(e)·b[lane][r]
//
//	s [squares·Lanes, Lanes], rows Width apart    b [Lanes, squares·Lanes], rows ldb apart    mx [Lanes]
func (x *Kernels) BiasSquares(s, b []float32, ldb, squares int, limit float32, mx []float32) {
	n := x.Lanes
	_, _, _ = s[(squares*n-1)*x.Width+n-1], b[(n-1)*ldb+squares*n-1], mx[n-1]
	x.tile.biasSquares(&s[0], &b[0], 4*ldb, squares, limit, &mx[0])
}

// Diagonal is Bias for a score tile with a bias by distance, and computes mx = max(mx, S) as Scores does:
//
//	S[r][lane] += log2(e)·b[rows-1-r+lane]
//
//	s [rows, Width]    b [rows-1 + Width]    mx [Width]
func (x *Kernels) Diagonal(s, b []float32, rows int, mx []float32) {
	_, _, _ = s[rows*x.Width-1], b[rows+x.Width-2], mx[x.Width-1]
	x.tile.diagonal(&s[0], &b[rows-1], rows, &mx[0])
}

// Slopes adds a bias in proportion to the distance between row and key, which it does not
// bound, and computes mx = max(mx, S) as Scores does:
//
//	S[r][lane] += log2(e)·(factors[lane]·|d[lane]+r|)
//
//	s [4·fours, Width]    d, factors, mx [Width]
//
// float32 has all distances exactly.
func (x *Kernels) Slopes(s, d, factors []float32, fours int, mx []float32) {
	w := x.Width
	_, _, _, _ = s[4*fours*w-1], d[w-1], factors[w-1], mx[w-1]
	x.tile.slopes(&s[0], &d[0], &factors[0], fours, &mx[0])
}

// Hide hides scores in squares of a tile: where mask[lane][r] is false, S[r][lane] = -Inf.
//
//	s [squares·Lanes, Lanes], rows Width apart    mask [Lanes, squares·Lanes], rows ld apart
func (x *Kernels) Hide(s []float32, mask []bool, ld, squares int) {
	n := x.Lanes
	_, _ = s[(squares*n-1)*x.Width+n-1], mask[(n-1)*ld+squares*n-1]
	x.tile.hide(&s[0], &mask[0], ld, squares)
}

// HideRow replaces s by -Inf where mask is false. The length of s is a multiple of Lanes.
func (x *Kernels) HideRow(s []float32, mask []bool) {
	x.hideRow(&s[0], &mask[:len(s)][0], len(s)/x.Lanes)
}

// Edge hides the keys outside of each lane's range: where key+r is not in [lo, hi) of the lane, S[r][lane] = -Inf.
//
//	s [rows, Width]    lo, hi [Width]
func (x *Kernels) Edge(s []float32, rows, key int, lo, hi []int32) {
	_, _, _ = s[rows*x.Width-1], lo[x.Width-1], hi[x.Width-1]
	x.tile.edge(&s[0], rows, key, &lo[0], &hi[0])
}

// ColumnMax computes mx = max(mx, S) as Scores does.
//
//	s [rows, Width]    mx [Width]
func (x *Kernels) ColumnMax(s []float32, rows int, mx []float32) {
	_, _ = s[rows*x.Width-1], mx[x.Width-1]
	x.tile.columnMax(&s[0], rows, &mx[0])
}

// Fold computes o = o·a + t·b, with each operation rounded.
//
//	o, t [rows, Width]    a, b [Width]
func (x *Kernels) Fold(o, t []float32, rows int, a, b []float32) {
	_, _, _, _ = o[rows*x.Width-1], t[rows*x.Width-1], a[x.Width-1], b[x.Width-1]
	x.tile.fold(&o[0], &t[0], rows, &a[0], &b[0])
}

// AddOuter adds sums over the lanes of a tile, each the same sum as in Mix:
//
//	O[key][d] += Σ_lane X[lane][d]·P[key][lane]
//
//	o [keys, d], rows ldo apart    rows [lanes, d], rows ldr apart    p [keys, Width]
//
// d is a multiple of Lanes.
func (x *Kernels) AddOuter(o []float32, ldo int, rows []float32, ldr, lanes int, p []float32, keys, d int) {
	w := x.Width
	_, _, _ = o[(keys-1)*ldo+d-1], rows[(lanes-1)*ldr+d-1], p[(keys-1)*w+lanes-1]
	for c := 0; c < d; {
		r, vectors := 0, 0
		for _, t := range x.tile.outer {
			if vectors == 0 && c+t.vectors*x.Lanes <= d {
				vectors = t.vectors
			}
			for most := max(1, budget/(t.rows*t.vectors*lanes)); t.vectors == vectors && r+t.rows <= keys; {
				groups := min(most, (keys-r)/t.rows)
				t.kernel(&o[r*ldo+c], 4*ldo, &rows[c], 4*ldr, lanes, &p[r*w], groups)
				r += groups * t.rows
			}
		}
		c += vectors * x.Lanes
	}
}

// ScoreGradients turns the gradients of weights into those of scores. With dropout w are the
// weights p after it, and factor is that of the weights that are kept:
//
//	DS[key][lane] = P·((DS·factor, or 0 where W = 0) - dots[lane]), or 0 where P = 0
//
//	ds, p, w [rows, Width]    dots [Width]
func (x *Kernels) ScoreGradients(ds, p, w []float32, rows int, dots []float32, factor float32) {
	n := rows * x.Width
	_, _, _, _ = ds[n-1], p[n-1], w[n-1], dots[x.Width-1]
	x.tile.scoreGradients(&ds[0], &p[0], &w[0], rows, &dots[0], factor)
}

// NonFinite reports whether any of the elements is NaN or infinite.
//
//	v [rows, d], rows ld apart
func (x *Kernels) NonFinite(v []float32, ld, rows, d int) bool {
	_ = v[(rows-1)*ld+d-1]
	if vectors := d / x.Lanes; vectors > 0 && x.nonFinite(&v[0], 4*ld, rows, vectors) != 0 {
		return true
	}
	found := false
	for r := 0; r < rows && d%x.Lanes > 0; r++ {
		for _, y := range v[r*ld+d/x.Lanes*x.Lanes : r*ld+d] {
			found = found || y-y != 0
		}
	}
	return found
}

// Transpose transposes squares for n keys or elements, and multiplies the columns of the source by mul:
//
//	dst[c][r] = src[r][c]·mul[c] + 0
//
//	src, dst [Lanes, Lanes], rows lds and ldd apart, squares Lanes·along and Lanes·down apart    mul [Lanes]
//
// The product is rounded before 0 is added, so no zero is negative. One FMA would leave -0
// where a negative product underflows.
func (x *Kernels) Transpose(dst []float32, ldd, down int, src []float32, lds, along, n int, mul []float32) {
	l := x.Lanes
	for at := 0; at < n; at += l {
		_, _, _ = dst[at*down+(l-1)*ldd+l-1], src[at*along+(l-1)*lds+l-1], mul[l-1]
		x.transpose(&dst[at*down], 4*ldd, &src[at*along], 4*lds, &mul[0])
	}
}

// Load writes F16, BF16, Q8, Q4 or F8 as float32, exactly. cols is a multiple of Lanes.
//
//	dst [rows, cols], rows ldd apart    src [rows, cols] of type e, rows lds apart
//
// For Q8 src begins with the scale of the first row, and lds is in bytes, as it is for Q4.
func Load[T uint16 | byte](x *Kernels, e backend.DType, dst []float32, ldd int, src []T, lds, rows, cols int) {
	_, _ = dst[(rows-1)*ldd+cols-1], src[(rows-1)*lds+e.Row(cols)-1]
	if x.load[e] != nil {
		x.load[e](&dst[0], 4*ldd, (*byte)(unsafe.Pointer(&src[0])), e.Size()*lds, rows, cols/x.Lanes)
	}
	for r := 0; x.load[e] == nil && r < rows; r++ {
		switch row := any(src[r*lds:]).(type) {
		case []byte:
			e.Dequantise(dst[r*ldd:][:cols], row)
		case []uint16:
			for i := range cols {
				dst[r*ldd+i] = e.Decode(row[i])
			}
		}
	}
}

// Store rounds src to type e, F16 or BF16, to nearest even; NaN stays NaN. The length of src is a multiple of Lanes.
func (x *Kernels) Store(e backend.DType, dst []uint16, src []float32) {
	x.store[e](&dst[:len(src)][0], &src[0], len(src)/x.Lanes)
}

// FMA computes c = c·a + b, n times in each of some registers, and returns the number of operations.
func (x *Kernels) FMA(n int, a, b float32) (operations int) { return x.fma(n, a, b) }

// Read loads 256·n bytes from each of s[0], s[apart], s[2·apart] and s[3·apart] on.
func (x *Kernels) Read(s []byte, apart, n int) {
	_ = s[3*apart+256*n-1]
	x.read(&s[0], apart, n)
}
