package cpu

import (
	"math"

	"github.com/seed90331342/attn/backend"
)

// scoring turns dot products into scores: what comes between QKᵀ and softmax.
type scoring struct {
	p          *backend.Problem
	mask, bias view
}

// scoringOf opens the tensors of p.
func scoringOf(p *backend.Problem) (scoring, error) {
	mask, err := boolView("mask", p.Mask)
	if err != nil {
		return scoring{}, err
	}
	bias, err := floatView("bias", p.Bias)
	if err != nil {
		return scoring{}, err
	}
	return scoring{p: p, mask: mask, bias: bias}, nil
}

// score turns dot products of query row i with the keys of one key block into
// scores, in place, and returns the largest:
//
//	s = scale·s    s = softcap·tanh(s/softcap)    s = s + bias    hidden: -Inf
//
// row [keyBlock] belongs to the keys from j0 on, of which the row sees [lo, hi)
// by the visibility rule. Elements outside are overwritten with -Inf as far as
// the next multiple of 4 on either side, and not touched beyond. tmp holds
// keyBlock floats.
//
// NaN is no maximum, so that it comes out by itself and what is hidden beside it
// stays hidden: where there is nothing but NaN and -Inf the result is 0, and
// -Inf where there is nothing but -Inf.
func (sc *scoring) score(row []float32, lo, hi, b, h, i, j0 int, tmp []float32) float32 {
	fillEnds(row, lo, hi)
	s := row[lo:hi]
	scale := sc.p.Scale
	if sc.p.Softcap > 0 || !sc.mask.isZero() || !sc.bias.isZero() {
		sc.adjust(s, b, h, i, j0+lo, tmp)
		scale = 1
	}
	m := scaleMax(s, scale)
	if m == m {
		return m
	}
	m = negInf
	for _, x := range s {
		if x > m {
			m = x
		}
	}
	if m == negInf {
		return 0
	}
	return m
}

// fillEnds writes -Inf around elements [lo, hi) of row, out to the multiples of
// 4 that expRow works in.
func fillEnds(row []float32, lo, hi int) {
	for j := lo &^ 3; j < lo; j++ {
		row[j] = negInf
	}
	for j := hi; j < roundUp(hi); j++ {
		row[j] = negInf
	}
}

var negInf = float32(math.Inf(-1))

// scaleMax multiplies s by scale and returns the largest element, NaN when there
// is one. The max function needs no branch; a comparison for each element, taken
// whenever a row finds a new maximum, costs twice as much.
func scaleMax(s []float32, scale float32) float32 {
	m0, m1, m2, m3 := negInf, negInf, negInf, negInf
	for len(s) >= 4 {
		x0, x1, x2, x3 := s[0]*scale, s[1]*scale, s[2]*scale, s[3]*scale
		s[0], s[1], s[2], s[3] = x0, x1, x2, x3
		m0, m1, m2, m3 = max(m0, x0), max(m1, x1), max(m2, x2), max(m3, x3)
		s = s[4:]
	}
	for j, x := range s {
		x *= scale
		s[j] = x
		m0 = max(m0, x)
	}
	return max(m0, m1, m2, m3)
}

// adjust is score without the maximum, for calls that have a softcap, a mask or
// a bias. s belongs to the keys from j on.
func (sc *scoring) adjust(s []float32, b, h, i, j int, tmp []float32) {
	for n := range s {
		s[n] *= sc.p.Scale
	}
	if c := sc.p.Softcap; c > 0 {
		for n, x := range s {
			s[n] = c * tanh32(x/c)
		}
	}
	if !sc.bias.isZero() {
		tmp = tmp[:len(s)]
		sc.bias.pack(tmp, len(s), b, h, i, 1, j, len(s))
		for n, x := range tmp {
			if x == negInf {
				s[n] = negInf // not s+x: s may be NaN or +Inf
			} else {
				s[n] += bounded(x)
			}
		}
	}
	if !sc.mask.isZero() {
		step := sc.mask.stride[backend.Dim]
		at := sc.mask.index(b, h, i) + j*step
		for n := range s {
			if !sc.mask.bools[at] {
				s[n] = negInf
			}
			at += step
		}
	}
}

// bounded is a bias as it is added.
func bounded(x float32) float32 {
	if x > backend.MaxBias && x <= math.MaxFloat32 {
		return backend.MaxBias
	}
	if x < -backend.MaxBias && x >= -math.MaxFloat32 {
		return -backend.MaxBias
	}
	return x
}

// biasRow writes what is added to the scores of a row from key j on: its bias, or
// zeros, and -Inf where the mask hides.
func (sc *scoring) biasRow(dst []float32, b, h, i, j, n int) {
	dst = dst[:n]
	if sc.bias.isZero() {
		clear(dst)
	} else {
		sc.bias.pack(dst, n, b, h, i, 1, j, n)
	}
	if sc.mask.isZero() {
		return
	}
	step := sc.mask.stride[backend.Dim]
	at := sc.mask.index(b, h, i) + j*step
	for c := range dst {
		if !sc.mask.bools[at] {
			dst[c] = negInf
		}
		at += step
	}
}

// hides reports whether mask or bias hides key j from row i; the visibility rule
// is not asked.
func (sc *scoring) hides(b, h, i, j int) bool {
	if !sc.mask.isZero() && !sc.mask.bools[sc.mask.index(b, h, i)+j*sc.mask.stride[backend.Dim]] {
		return true
	}
	return !sc.bias.isZero() && sc.bias.at(b, h, i, j) == negInf
}
