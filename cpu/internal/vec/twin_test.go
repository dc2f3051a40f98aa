package vec

import (
	"math"
	"unsafe"

	"github.com/x448/float16"

	"github.com/seed90331342/attn/backend"
)

// newTwin returns kernels in plain Go with that many lanes and that width, which
// the tiers are tested against. They are written to be read, not to be fast.
func newTwin(lanes, width int) *Kernels {
	t := twin{lanes, width}
	x := &Kernels{Tier: "go", Lanes: lanes, Width: width,
		tile: tileKernels{
			scores:  []registerTile[scoresFunc]{{4, 0, t.scores(4)}, {1, 0, t.scores(1)}},
			values:  []registerTile[valuesFunc]{{4, 0, t.values(4)}, {1, 0, t.values(1)}},
			outer:   []registerTile[outerFunc]{{3, 2, t.outer(3, 2)}, {3, 1, t.outer(3, 1)}, {1, 2, t.outer(1, 2)}, {1, 1, t.outer(1, 1)}},
			weights: t.weights, edge: t.edge, fold: t.fold,
			biasSquares: t.biasSquares, diagonal: t.diagonal, slopes: t.slopes, hide: t.hide, scoreGradients: t.scoreGradients,
		},
		exp2: t.exp2, exp2Sum: t.exp2Sum, scaleMax: t.scaleMax, bias: t.bias,
		transpose: t.transpose,
		join:      t.join, bound: t.bound, hideRow: t.hideRow,
		store: [elements]storeFunc{F16: t.store(F16), BF16: t.store(BF16)}, rankOne: t.rankOne, productSum: t.productSum, sumsFrom: t.sumsFrom}
	for e := range elements {
		x.load[e], x.dots[e], x.mix[e] = t.load(e), t.dots(e), []registerTile[mixFunc]{{4, 2, t.mix(e, 4, 2)}, {4, 1, t.mix(e, 4, 1)}, {1, 1, t.mix(e, 1, 1)}}
	}
	return x
}

type twin struct{ lanes, width int }

// floats returns the first n elements of row r, with rows ld bytes apart.
func floats[T any](p *T, ld, r, n int) []T {
	return unsafe.Slice((*T)(unsafe.Add(unsafe.Pointer(p), r*ld)), n)
}

// fma returns a·b + c with one rounding. The sum of the exact product and c is rounded to
// odd in float64: where it is not exact its last bit is 1, so that rounding it to float32
// sees on which side of a tie it was (Boldo & Melquiond 2008).
func fma(a, b, c float32) float32 {
	p, z := float64(a)*float64(b), float64(c)
	s := p + z
	if lost := (p - (s - (s - p))) + (z - (s - p)); lost != 0 && lost-lost == 0 && math.Float64bits(s)&1 == 0 { // Knuth's sum, of finite numbers
		s = math.Nextafter(s, math.Inf(int(math.Copysign(1, lost))))
	}
	return float32(s)
}

// larger returns the larger of two scores; it ignores NaN.
func larger(a, b float32) float32 {
	if a > b {
		return a
	}
	return b
}

// chain returns Σ a_j·b_j for j < n, upwards from 0 in one chain of FMAs.
func chain(n int, a, b func(j int) float32) (sum float32) {
	for j := range n {
		sum = fma(a(j), b(j), sum)
	}
	return sum
}

func (t twin) scores(rows int) scoresFunc {
	return func(s, k *float32, ldk int, _ *uintptr, qt *float32, d, groups int, mx *float32) {
		m := floats(mx, 0, 0, t.width)
		for r := range groups * rows {
			out, key := floats(s, 4*t.width, r, t.width), floats(k, ldk, r, d)
			for lane := range out {
				out[lane] = chain(d, func(i int) float32 { return key[i] }, func(i int) float32 { return floats(qt, 4*t.width, i, t.width)[lane] })
				m[lane] = larger(out[lane], m[lane])
			}
		}
	}
}

func (t twin) values(rows int) valuesFunc {
	return func(o *float32, runs *uintptr, n, ldv int, p *float32, first, groups, _, _ int, alpha *float32) {
		a, values := floats(alpha, 0, 0, t.width), allRows(F32, runs, n, ldv, first, groups*rows)
		for c := range groups * rows {
			out := floats(o, 4*t.width, c, t.width)
			for lane := range out {
				sum := chain(len(values), func(j int) float32 { return values[j][c] }, func(j int) float32 { return floats(p, 4*t.width, j, t.width)[lane] })
				out[lane] = fma(a[lane], out[lane], sum)
			}
		}
	}
}

// expCoefficients are those of 1 + c1·f + ... + c6·f⁶ for 2^f on [0, 1]; the generator's remez computes them.
var expCoefficients = [7]float32{1, 0.693147063, 0.240229309, 0.0554852821, 0.00967545155, 0.0012467847, 0.000216129149}

// power returns 2^y as the assembly does.
func power(y float32) float32 {
	if y < -126 {
		return 0
	}
	n := float32(math.Floor(float64(y)))
	f := y - n
	r := expCoefficients[6]
	for i := 5; i >= 0; i-- {
		r = fma(r, f, expCoefficients[i])
	}
	return float32(math.Ldexp(float64(r), int(n)))
}

func (t twin) weights(s *float32, fours int, m, mx, l, alpha *float32) {
	ms, mxs, ls, as := floats(m, 0, 0, t.width), floats(mx, 0, 0, t.width), floats(l, 0, 0, t.width), floats(alpha, 0, 0, t.width)
	for lane := range t.width {
		as[lane] = power(ms[lane] - mxs[lane])
		ms[lane] = mxs[lane]
		sum := float32(0)
		for r := range fours {
			var p [4]float32
			for u := range p {
				x := &floats(s, 4*t.width, 4*r+u, t.width)[lane]
				*x = power(*x - ms[lane])
				p[u] = *x
			}
			sum += (p[0] + p[1]) + (p[2] + p[3])
		}
		ls[lane] = float32(as[lane]*ls[lane]) + sum
	}
}

func (t twin) exp2(x *float32, vectors int, m float32) {
	s := floats(x, 0, 0, vectors*t.lanes)
	for i, y := range s {
		s[i] = power(y - m)
	}
}

func (t twin) exp2Sum(x *float32, vectors int, m float32, sum *float32) {
	t.exp2(x, vectors, m)
	sums := floats(sum, 0, 0, t.lanes)
	for i, p := range floats(x, 0, 0, vectors*t.lanes) {
		sums[i%t.lanes] += p
	}
}

func (t twin) scaleMax(x *float32, vectors int, c float32, mx *float32) {
	*mx = float32(math.Inf(-1))
	for i, s := 0, floats(x, 0, 0, vectors*t.lanes); i < len(s); i++ {
		s[i] *= c
		*mx = larger(s[i], *mx)
	}
}

func (t twin) bias(x, b *float32, vectors int) {
	s, bias := floats(x, 0, 0, vectors*t.lanes), floats(b, 0, 0, vectors*t.lanes)
	for i, y := range bias {
		s[i] = biased(s[i], y, 0x1p127)
	}
}

func biased(s, y, limit float32) float32 {
	if math.IsInf(float64(y), 0) {
		return y
	}
	return fma(math.Log2E, max(-limit, min(y, limit)), s)
}

func (t twin) biasSquares(s, b *float32, ldb, squares int, limit float32, mx *float32) {
	m := floats(mx, 0, 0, t.lanes)
	for lane := range t.lanes {
		for r, y := range floats(b, ldb, lane, squares*t.lanes) {
			x := &floats(s, 4*t.width, r, t.lanes)[lane]
			*x = biased(*x, y, limit)
			m[lane] = larger(*x, m[lane])
		}
	}
}

func (t twin) join(x, b *float32, vectors int) {
	s := floats(x, 0, 0, vectors*t.lanes)
	for i, y := range floats(b, 0, 0, len(s)) {
		s[i] = joined(s[i], y)
	}
}

func joined(x, y float32) float32 {
	inf := math.Inf(1)
	switch a, b := float64(x), float64(y); {
	case a == -inf || b == -inf:
		return float32(-inf)
	case a == inf || b == inf:
		return float32(inf)
	}
	return max(-0x1p127, min(max(-0x1p127, min(x, 0x1p127))+y, 0x1p127))
}

func (t twin) slopes(s, d, factors *float32, fours int, mx *float32) {
	m := floats(mx, 0, 0, t.width)
	for r := range 4 * fours {
		for lane, x := range floats(d, 0, 0, t.width) {
			y := &floats(s, 4*t.width, r, t.width)[lane]
			far := float32(math.Abs(float64(x + float32(r))))
			*y = fma(math.Log2E, floats(factors, 0, 0, t.width)[lane]*far, *y)
			m[lane] = larger(*y, m[lane])
		}
	}
}

func (t twin) diagonal(s, b *float32, rows int, mx *float32) {
	m := floats(mx, 0, 0, t.width)
	for r := range rows {
		row := floats(s, 4*t.width, r, t.width)
		for lane, y := range floats(b, -4, r, t.width) {
			row[lane] = biased(row[lane], y, 0x1p127)
			m[lane] = larger(row[lane], m[lane])
		}
	}
}

func (t twin) hide(s *float32, mask *bool, ld, squares int) {
	for lane := range t.lanes {
		for r, sees := range floats(mask, ld, lane, squares*t.lanes) {
			if !sees {
				floats(s, 4*t.width, r, t.lanes)[lane] = float32(math.Inf(-1))
			}
		}
	}
}

func (t twin) bound(x *float32, vectors int, limit float32) {
	s := floats(x, 0, 0, vectors*t.lanes)
	for i, y := range s {
		s[i] = backend.Bound(y, limit)
	}
}

func (t twin) hideRow(x *float32, mask *bool, vectors int) {
	for i, sees := range floats(mask, 0, 0, vectors*t.lanes) {
		if !sees {
			floats(x, 0, 0, vectors*t.lanes)[i] = float32(math.Inf(-1))
		}
	}
}

func (t twin) edge(s *float32, rows, key int, lo, hi *int32) {
	los, his := floats(lo, 0, 0, t.width), floats(hi, 0, 0, t.width)
	for r := range rows {
		row := floats(s, 4*t.width, r, t.width)
		for lane := range row {
			if j := int32(key + r); j < los[lane] || j >= his[lane] {
				row[lane] = float32(math.Inf(-1))
			}
		}
	}
}

func (t twin) fold(o, x *float32, rows int, a, b *float32) {
	as, bs := floats(a, 0, 0, t.width), floats(b, 0, 0, t.width)
	for r := range rows {
		out, in := floats(o, 4*t.width, r, t.width), floats(x, 4*t.width, r, t.width)
		for lane := range out {
			out[lane] = float32(out[lane]*as[lane]) + float32(in[lane]*bs[lane])
		}
	}
}

func (t twin) outer(rows, vectors int) outerFunc {
	return func(o *float32, ldo int, x *float32, ldx, n int, p *float32, groups int) {
		for r := range groups * rows {
			out, weights := floats(o, ldo, r, vectors*t.lanes), floats(p, 4*t.width, r, n)
			for c := range out {
				out[c] += chain(n, func(lane int) float32 { return floats(x, ldx, lane, vectors*t.lanes)[c] }, func(lane int) float32 { return weights[lane] })
			}
		}
	}
}

func (t twin) scoreGradients(ds, p, w *float32, rows int, dots *float32, factor float32) {
	n := rows * t.width
	d, weights, dropped, D := floats(ds, 0, 0, n), floats(p, 0, 0, n), floats(w, 0, 0, n), floats(dots, 0, 0, t.width)
	for i, weight := range weights {
		x := d[i] * factor
		if dropped[i] == 0 {
			x = 0
		}
		if d[i] = weight * (x - D[i%t.width]); weight == 0 {
			d[i] = 0
		}
	}
}

func (t twin) transpose(dst *float32, ldd int, src *float32, lds int, mul *float32) {
	m := floats(mul, 0, 0, t.lanes)
	for r := range t.lanes {
		for c, x := range floats(src, lds, r, t.lanes) {
			floats(dst, ldd, c, t.lanes)[r] = float32(x*m[c]) + 0
		}
	}
}

func f16(b uint16) float32  { return float16.Frombits(b).Float32() }
func bf16(b uint16) float32 { return math.Float32frombits(uint32(b) << 16) }

func (t twin) store(e backend.DType) storeFunc {
	return func(dst *uint16, src *float32, vectors int) {
		out := floats(dst, 0, 0, vectors*t.lanes)
		for i, x := range floats(src, 0, 0, vectors*t.lanes) {
			switch big := float64(x); {
			case e == F16:
				out[i] = float16.Fromfloat32(x).Bits()
			case x != x:
				out[i] = uint16(math.Float32bits(x)>>16) | 1<<6 // quiet
			default: // the nearer one of two numbers, or the even one
				low := math.Float32bits(x) >> 16
				down, up := float64(bf16(uint16(low))), float64(bf16(uint16(low+1)))
				if math.IsInf(up, 0) && !math.IsInf(down, 0) {
					up = math.Copysign(0x1p128, up)
				}
				if a, b := math.Abs(big-down), math.Abs(up-big); !math.IsInf(big, 0) && (b < a || b == a && low&1 == 1) {
					low++
				}
				out[i] = uint16(low)
			}
		}
	}
}

// row decodes n elements of a row of type e from byte first on.
func row(e backend.DType, p *byte, first, n int) []float32 {
	out := make([]float32, n)
	switch at := unsafe.Pointer(p); e {
	case F32:
		copy(out, unsafe.Slice((*float32)(unsafe.Add(at, first)), n))
	case Q8:
		scale := *(*float32)(at)
		for i, x := range unsafe.Slice((*int8)(unsafe.Add(at, Q8Lead+first)), n) {
			out[i] = scale * float32(x)
		}
	case Q4, F8:
		e.Dequantise(out, unsafe.Slice((*byte)(unsafe.Add(at, first)), e.Row(n)))
	default:
		decode := f16
		if e == BF16 {
			decode = bf16
		}
		for i, x := range unsafe.Slice((*uint16)(unsafe.Add(at, first)), n) {
			out[i] = decode(x)
		}
	}
	return out
}

// allRows is row for the rows of n runs, ld bytes apart.
func allRows(e backend.DType, runs *uintptr, n, ld, first, elements int) (rows [][]float32) {
	for _, r := range unsafe.Slice((*Run)(unsafe.Pointer(runs)), n) {
		for j := range r.n {
			rows = append(rows, row(e, &floats(r.rows, ld, j, 1)[0], first, elements))
		}
	}
	return rows
}

func (t twin) load(e backend.DType) loadFunc {
	return func(dst *float32, ldd int, src *byte, lds, rows, vectors int) {
		for r := range rows {
			copy(floats(dst, ldd, r, vectors*t.lanes), row(e, &floats(src, lds, r, 1)[0], 0, vectors*t.lanes))
		}
	}
}

func (t twin) dots(e backend.DType) dotsFunc {
	return func(s *float32, lds int, k *byte, ldk int, run *uintptr, q *float32, ldq, heads, chunks, groups int) {
		runs := unsafe.Slice((*Run)(unsafe.Pointer(run)), 1)
		for j := range groups * t.lanes {
			from, i := k, j
			if groups*t.lanes > runs[0].n && j >= runs[0].n {
				from, i = unsafe.Slice(&runs[0], 2)[1].rows, j-runs[0].n
			}
			key := row(e, &floats(from, ldk, i, 1)[0], 0, chunks*t.lanes)
			for h := range heads {
				query := floats(q, ldq, h, len(key))
				floats(s, lds, h, j+1)[j] = chain(len(key), func(i int) float32 { return key[i] }, func(i int) float32 { return query[i] })
			}
		}
	}
}

func (t twin) mix(e backend.DType, heads, vectors int) mixFunc {
	return func(o *float32, ldo int, runs *uintptr, n, ldv int, p *float32, ldp int, alpha *float32, first, strips int) {
		values := allRows(e, runs, n, ldv, first, strips*vectors*t.lanes)
		for h := range heads {
			a := floats(alpha, 4, h, 1)[0]
			out := floats(o, ldo, h, strips*vectors*t.lanes)
			for c := range out {
				weights := floats(p, ldp, h, len(values))
				out[c] = fma(a, out[c], chain(len(values), func(j int) float32 { return values[j][c] }, func(j int) float32 { return weights[j] }))
			}
		}
	}
}
