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

// The exponential works in float64 on 1/128 octaves (Tang 1989, Table-driven
// implementation of the exponential function): with y = x·128/ln2 = n + f, n an
// integer and |f| <= 1/2,
//
//	e^x = 2^(n>>7) · 2^((n&127)/128) · 2^(f/128)
//
// The middle factor is looked up. The last is 1 + f·(c1 + f·c2), off by at most
// (ln2/256)³/6 = 3.3e-9. Adding roundMagic = 1.5·2^52 rounds y to the integer n
// and leaves n in the low bits of the sum.
const (
	expSteps   = 128
	expUnit    = expSteps / math.Ln2
	expC1      = math.Ln2 / expSteps
	expC2      = expC1 * expC1 / 2
	roundMagic = 0x1.8p52
)

// Below expZero half of the smallest positive float32 is not reached, and below
// expFlush the result is subnormal. Above expInf nothing is finite; the numbers
// just below it become infinite in the conversion to float32.
const (
	expZero  = -103.972084
	expFlush = -87.33654
	expInf   = 89
)

// expTable holds the bits of 2^(i/128).
var expTable = func() (t [expSteps]uint64) {
	for i := range t {
		t[i] = math.Float64bits(math.Exp2(float64(i) / expSteps))
	}
	return t
}()

// exp32 returns e^x to within 0.56 ulp of the true value, subnormal results
// included. exp(-Inf) is 0, exp(+Inf) is +Inf, exp(NaN) is NaN.
func exp32(x float32) float32 {
	switch {
	case x > expInf:
		return float32(math.Inf(1))
	case x < expZero:
		return 0
	}
	return float32(expCore(x))
}

// expCore returns e^x for expZero <= x <= expInf, before it is rounded to
// float32. NaN stays NaN. It is small enough to be compiled into its callers.
func expCore(x float32) float64 {
	y := float64(x) * expUnit
	k := y + roundMagic
	f := y - (k - roundMagic)
	n := math.Float64bits(k)
	return (1 + f*(expC1+f*expC2)) * math.Float64frombits(expTable[n%expSteps]+n/expSteps<<52)
}

// expWeight returns e^x for x <= 0, and 0 where that is subnormal in float32:
// such a weight is lost beside the row's largest, which is 1, and many a
// processor multiplies subnormals a hundred times slower.
func expWeight(x float32) float64 {
	if x < expFlush {
		return 0
	}
	return expCore(x)
}

// expRow replaces each element of s by exp(s-m) and returns the sum of the
// exponentials before their rounding; m is at least the largest element. The
// length of s is a multiple of 4. Element j is added to partial sum j mod 4, so
// that hidden keys (-Inf, which give 0) at either end change no bit of the sum.
//
// m is finite, or +Inf, which makes NaN of the elements that are.
func expRow(s []float32, m float32) float64 {
	var s0, s1, s2, s3 float64
	for len(s) >= 4 {
		p0 := expWeight(s[0] - m)
		p1 := expWeight(s[1] - m)
		p2 := expWeight(s[2] - m)
		p3 := expWeight(s[3] - m)
		s[0], s[1], s[2], s[3] = float32(p0), float32(p1), float32(p2), float32(p3)
		s0 += p0
		s1 += p1
		s2 += p2
		s3 += p3
		s = s[4:]
	}
	return (s0 + s2) + (s1 + s3)
}

// Coefficients of q in tanh(x) = x + x³·q(x²) for |x| <= 0.625, a Chebyshev fit
// of degree 5 in 40 digits; its relative error in tanh(x) is below 1e-9.
const (
	tanh0 = -0.333333331494
	tanh1 = 0.133333001462
	tanh2 = -0.0539584616275
	tanh3 = 0.0217625029074
	tanh4 = -0.00832318705828
	tanh5 = 0.00226950168416
)

// tanh32 returns tanh(x) to within 2 ulp of the true value; tanh(±Inf) is ±1,
// tanh(NaN) is NaN. Small x take the polynomial above, as 1 - 2/(e^2x + 1)
// cancels there (Cody & Waite 1980, ch. 12); from 9.02 on the result is 1 in
// float32.
func tanh32(x float32) float32 {
	a := x
	if a < 0 {
		a = -a
	}
	switch {
	case a <= 0.625:
		z := x * x
		return x + x*z*(((((tanh5*z+tanh4)*z+tanh3)*z+tanh2)*z+tanh1)*z+tanh0)
	case a <= 9.02:
		t := 1 - 2/(exp32(2*a)+1)
		if x < 0 {
			return -t
		}
		return t
	case x > 0:
		return 1
	case x < 0:
		return -1
	}
	return x // NaN
}
