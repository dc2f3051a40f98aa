package vec

import (
	"math"
	"unsafe"
)

// RankOne computes, with the product of p and x rounded,
//
//	O[r][c] = alpha[r]·O[r][c] + p[r]·x[c]
//
//	o [rows, d], rows ldo apart    x [d]    p, alpha [rows]
//
// d is a multiple of Lanes. On an amd64 it prefetches what lies ahead elements after o.
func (x *Kernels) RankOne(o []float32, ldo int, v, p, alpha []float32, rows, d, ahead int) {
	_, _, _, _ = o[(rows-1)*ldo+d-1], v[d-1], p[rows-1], alpha[rows-1]
	for r, most := 0, max(1, budget/d); r < rows; r += most {
		x.rankOne(&o[r*ldo], 4*ldo, &v[0], &p[r], &alpha[r], min(most, rows-r), d/x.Lanes, 4*ahead)
	}
}

// ProductSum computes o = x·y + z. The length of o is a multiple of Lanes; the others are at least as long, and may be o.
func (x *Kernels) ProductSum(o, a, b, c []float32) {
	n := len(o)
	x.productSum(&o[0], &a[:n][0], &b[:n][0], &c[:n][0], n/x.Lanes)
}

// SiLU replaces s by s/(1 + exp(-s)), as -s·exp(s)/(1 + exp(s)) where s is negative. The length of s is a multiple of
// Lanes.
func (x *Kernels) SiLU(s []float32) { x.silu(&s[0], len(s)/x.Lanes) }

// SumsFrom replaces the rows of x by their sums, in float64, from row ref on, in units of log2 e:
//
//	at = log2(e)·Σ_j≤ref x[j]    x[i] = log2(e)·(Σ_j≤i x[j] - Σ_j≤ref x[j])    minus = -x
//
//	x, minus [rows, d], rows d apart    at [d]
//
// d is a multiple of Lanes.
func (x *Kernels) SumsFrom(s, minus []float32, rows, ref int, at []float32) {
	d := len(at)
	_, _, _ = s[rows*d-1], minus[rows*d-1], s[ref*d]
	x.sumsFrom(&s[0], &minus[0], 4*d, rows, ref, &at[0], d/x.Lanes)
}

func rankOneGonum(o *float32, ldo int, x, p, alpha *float32, rows, vectors, _ int) {
	ps, alphas, row := unsafe.Slice(p, rows), unsafe.Slice(alpha, rows), unsafe.Slice(x, 4*vectors)
	for r, a := range alphas {
		out := unsafe.Slice((*float32)(unsafe.Add(unsafe.Pointer(o), r*ldo)), len(row))
		for c, y := range row {
			out[c] = float32(a*out[c]) + float32(ps[r]*y)
		}
	}
}

func productSumGonum(o, x, y, z *float32, vectors int) {
	n := 4 * vectors
	b, c, to := unsafe.Slice(y, n), unsafe.Slice(z, n), unsafe.Slice(o, n)
	for i, a := range unsafe.Slice(x, n) {
		to[i] = float32(a*b[i]) + c[i]
	}
}

func siluGonum(x *float32, vectors int) {
	s := unsafe.Slice(x, 4*vectors)
	for i, y := range s {
		p, factor := exp2(-log2e*float32(math.Abs(float64(y)))), float32(1)
		if y < 0 {
			factor = p
		}
		s[i] = y * factor / (1 + p)
	}
}

func sumsFromGonum(x, minus *float32, ld, rows, ref int, at *float32, vectors int) {
	d := 4 * vectors
	s, m := unsafe.Slice(x, rows*d), unsafe.Slice(minus, rows*d)
	for c := range unsafe.Slice(at, d) {
		sum, before := 0.0, 0.0
		for i := c; i <= ref*d+c; i += d {
			before += float64(s[i])
		}
		for i := c; i < rows*d; i += d {
			sum += float64(s[i])
			s[i] = float32((sum - before) * math.Log2E)
			m[i] = -s[i]
		}
		unsafe.Slice(at, d)[c] = float32(before * math.Log2E)
	}
}
