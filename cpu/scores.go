package cpu

import (
	"math"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// scoring turns dot products into scores: what comes between QKᵀ and softmax.
type scoring struct {
	p                               *backend.Problem
	mask, blockMask, bias, relative view
	heads, seqQ                     int
	masked, added                   bool // whether there is one of the first two, of the others or slopes
	hiding                          bool // whether anything but the visibility rule and blocks may keep a weight from its value
}

// scoringOf opens the tensors of p, for so many query heads and rows.
func scoringOf(p *backend.Problem, heads, seqQ int) (sc scoring, err error) {
	sc = scoring{p: p, heads: heads, seqQ: seqQ}
	if sc.mask, err = boolView("mask", p.Mask); err != nil {
		return sc, err
	}
	if sc.blockMask, err = boolView("blocks", p.Blocks); err != nil {
		return sc, err
	}
	if sc.bias, err = floatView("bias", p.Bias); err != nil {
		return sc, err
	}
	if sc.relative, err = floatView("relative", p.Relative); err != nil {
		return sc, err
	}
	sc.masked = !sc.mask.isZero() || !sc.blockMask.isZero()
	sc.hiding = !sc.mask.isZero() || !sc.bias.isZero() || !sc.relative.isZero() || p.Dropout.P > 0
	sc.added = !sc.bias.isZero() || !sc.relative.isZero() || p.Slopes != nil
	return sc, nil
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
	if sc.p.Softcap > 0 || sc.masked || sc.added {
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
	tmp = tmp[:len(s)]
	if sc.added {
		sc.addedRow(nil, tmp, b, h, i, j)
		for n, x := range tmp {
			if x == negInf {
				s[n] = negInf // not s+x: s may be NaN or +Inf
			} else {
				s[n] += x
			}
		}
	}
	if sc.masked {
		sc.maskRow(s, b, h, i, j)
	}
}

// addedRow writes what is added to the scores of a row from key j on: bias, and what
// is added by distance, as backend.Problem bounds them.
// Kernels, where there are some, are who bounds a bias that is alone.
func (sc *scoring) addedRow(k *vec.Kernels, dst []float32, b, h, i, j int) {
	if sc.bias.isZero() {
		sc.distances(dst, b, h, j-i)
		return
	}
	sc.loadBias(k, dst, len(dst), b, h, i, 1, j, len(dst))
	if sc.biasAlone() {
		if k == nil {
			for n, x := range dst {
				dst[n] = backend.Bound(x, backend.MaxBias)
			}
		}
		return
	}
	var table [keyBlock]float32
	for ; len(dst) > 0; j += len(table) {
		some := dst[:min(len(dst), len(table))]
		sc.distances(table[:len(some)], b, h, j-i)
		join(k, some, table[:])
		dst = dst[len(some):]
	}
}

// loadBias writes the biases of rows [i, i+m) of a head for n keys from j on, as they
// are, to rows of dst that are ld apart.
func (sc *scoring) loadBias(k *vec.Kernels, dst []float32, ld, b, h, i, m, j, n int) {
	whole := 0
	if k != nil && sc.bias.bits != nil && sc.bias.stride[backend.Dim] == 1 {
		whole = n / k.Lanes * k.Lanes
	}
	if whole > 0 {
		from, apart := sc.bias.bits[sc.bias.index(b, h, i)+j:], sc.bias.stride[backend.Seq]
		if sc.bias.dtype == backend.F16 {
			k.LoadF16(dst, ld, from, apart, m, whole)
		} else {
			k.LoadBF16(dst, ld, from, apart, m, whole)
		}
	}
	if whole < n {
		sc.bias.pack(dst[whole:], ld, b, h, i, m, j+whole, n-whole)
	}
}

// join adds to biases what is added by distance, as vec.Kernels.Join does.
func join(k *vec.Kernels, dst, by []float32) {
	whole := 0
	if k != nil {
		if whole = len(dst) / k.Lanes * k.Lanes; whole > 0 {
			k.Join(dst[:whole], by)
		}
	}
	for n := whole; n < len(dst); n++ {
		switch x, y := dst[n], by[n]; {
		case x == negInf:
		case y == negInf:
			dst[n] = y // not x+y, which may be NaN
		default:
			dst[n] = backend.Bound(backend.Bound(x, backend.MaxBias)+y, backend.MaxBias)
		}
	}
}

// biasAlone reports whether a bias is all that there is to add.
func (sc *scoring) biasAlone() bool {
	return !sc.bias.isZero() && sc.relative.isZero() && sc.p.Slopes == nil
}

// distances writes what is added to scores by distance, from that of keys d after
// their rows on; 0 for distances that no pair has.
func (sc *scoring) distances(dst []float32, b, h, d int) {
	if sc.relative.isZero() {
		clear(dst)
	} else {
		at := d + sc.seqQ - 1
		lo := min(len(dst), max(0, -at))
		hi := max(lo, min(len(dst), sc.relative.shape[backend.Dim]-at))
		clear(dst[:lo])
		clear(dst[hi:])
		if s := dst[lo:hi]; len(s) > 0 {
			sc.relative.pack(s, len(s), b, h, 0, 1, at+lo, len(s))
			for n, x := range s {
				s[n] = backend.Bound(x, backend.MaxRelative)
			}
		}
	}
	if slope := sc.p.Slope(b, h, sc.heads); slope != 0 {
		far := sc.p.Visible.Offset - d
		for n := range dst {
			dst[n] -= slope * float32(max(far-n, n-far))
		}
	}
}

// maskRow writes -Inf to what mask and blocks hide of a row from key j on.
func (sc *scoring) maskRow(s []float32, b, h, i, j int) {
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
	if sc.blockMask.isZero() {
		return
	}
	at, step := sc.blockMask.index(b, h, i/sc.p.BlockQ), sc.blockMask.stride[backend.Dim]
	for n := 0; n < len(s); {
		block := (j + n) / sc.p.BlockK
		end := min(len(s), (block+1)*sc.p.BlockK-j)
		if !sc.blockMask.bools[at+block*step] {
			fill(s[n:end], negInf)
		}
		n = end
	}
}

// biasRow writes what is added to the scores of a row from key j on, and -Inf for
// what is hidden.
func (sc *scoring) biasRow(k *vec.Kernels, dst []float32, b, h, i, j, n int) {
	dst = dst[:n]
	sc.addedRow(k, dst, b, h, i, j)
	if sc.masked {
		sc.maskRow(dst, b, h, i, j)
	}
}

// hides reports whether anything but the visibility rule hides key j from row i.
func (sc *scoring) hides(b, h, i, j int) bool {
	switch {
	case !sc.mask.isZero() && !sc.mask.bools[sc.mask.index(b, h, i)+j*sc.mask.stride[backend.Dim]],
		!sc.blockMask.isZero() && !sc.blockMask.bools[sc.blockMask.index(b, h, i/sc.p.BlockQ)+j/sc.p.BlockK*sc.blockMask.stride[backend.Dim]],
		!sc.bias.isZero() && sc.bias.at(b, h, i, j) == negInf,
		!sc.relative.isZero() && sc.relative.at(b, h, 0, j-i+sc.seqQ-1) == negInf:
		return true
	}
	return false
}

// drop makes the weights s of a row from key j on those that dropout leaves.
func (sc *scoring) drop(s []float32, b, h, i, j int) {
	d := &sc.p.Dropout
	if d.P == 0 {
		return
	}
	factor := d.Factor()
	for n := range s {
		if d.Keeps(b, h, i, j+n) {
			s[n] *= factor
		} else {
			s[n] *= 0 // NaN stays
		}
	}
}

// withSink returns the maximum and the sum of a row's exponentials, both with the
// head's sink, and what its sum and output so far are to be multiplied by for that.
func (sc *scoring) withSink(h int, m float32, sum float64) (float32, float64, float32) {
	sink := sc.p.Sink(h)
	if sink == negInf {
		return m, sum, 1
	}
	alpha := float32(1)
	if sink > m {
		alpha = exp32(m - sink)
		m = sink
	}
	return m, sum*float64(alpha) + float64(exp32(sink-m)), alpha
}

// keeps reports whether dropout leaves the weight of key j.
func (sc *scoring) keeps(b, h, i, j int) bool {
	return sc.p.Dropout.P == 0 || sc.p.Dropout.Keeps(b, h, i, j)
}
