package vec

import "math"

// The exponential works in float64 on 1/128 octaves (Tang 1989, Table-driven
// implementation of the exponential function): with y = n + f octaves/128, n an
// integer and |f| <= 1/2,
//
//	2^(y/128) = 2^(n>>7) · 2^((n&127)/128) · 2^(f/128)
//
// The middle factor comes from a table. The last is 1 + f·(c1 + f·c2), off by at most (ln2/256)³/6 = 3.3e-9. Adding
// roundMagic = 1.5·2^52 rounds y to the integer n and leaves n in the low bits of the sum.
const (
	expSteps   = 128
	expUnit    = expSteps / math.Ln2
	expC1      = math.Ln2 / expSteps
	expC2      = expC1 * expC1 / 2
	roundMagic = 0x1.8p52
)

// expTable holds the bits of 2^(i/128).
var expTable = func() (t [expSteps]uint64) {
	for i := range t {
		t[i] = math.Float64bits(math.Exp2(float64(i) / expSteps))
	}
	return t
}()

// expCore returns 2^(y/128); NaN stays NaN. It is small enough to be inlined.
func expCore(y float64) float64 {
	k := y + roundMagic
	f := y - (k - roundMagic)
	n := math.Float64bits(k)
	return (1 + f*(expC1+f*expC2)) * math.Float64frombits(expTable[n%expSteps]+n/expSteps<<52)
}

// exp2 returns 2^y for y <= 127 to within 0.56 ulp, and 0 where that would be subnormal: such a weight is lost next to
// the row's largest, which is 1, and many processors multiply subnormals a hundred times more slowly.
func exp2(y float32) float32 {
	if y < -126 {
		return 0
	}
	return float32(expCore(expSteps * float64(y)))
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

// Tanh returns tanh(x) to within 2 ulp; tanh(±Inf) is ±1, tanh(NaN) is NaN. It
// uses the polynomial for small x, where 1 - 2/(e^2x + 1) cancels (Cody & Waite
// 1980, ch. 12). From 9.02 on the result is 1 in float32.
func Tanh(x float32) float32 {
	a := math.Abs(float64(x))
	if a <= 0.625 {
		z := x * x
		return x + x*z*(((((tanh5*z+tanh4)*z+tanh3)*z+tanh2)*z+tanh1)*z+tanh0)
	}
	t := 1 - 2/(float32(expCore(2*min(a, 9.02)*expUnit))+1)
	return float32(math.Copysign(float64(t), float64(x)))
}

// NegInf is the score of a hidden key, and the LSE of no keys.
var NegInf = float32(math.Inf(-1))

// NoScore is the largest score of a row that has seen no key. It is finite, because -Inf - (-Inf) is NaN.
const NoScore = -math.MaxFloat32

// MergeLSE returns the factors of the outputs of two results in their merge, and its LSE:
//
//	m = max(x, y)    sum = exp(x - m) + exp(y - m)
//	ox = exp(x - m)/sum    oy = exp(y - m)/sum    lse = m + log(sum)
func MergeLSE(x, y float32) (ox, oy, lse float32) {
	switch NegInf {
	case y:
		return 1, 0, x
	case x:
		return 0, 1, y
	}
	m := float64(max(x, y)) // NaN when either is
	a, b := math.Exp(float64(x)-m), math.Exp(float64(y)-m)
	return float32(a / (a + b)), float32(b / (a + b)), float32(m + math.Log(a+b))
}

// RowLSE finishes a row whose scores, in units of log2 e, have the maximum m and the
// sum l of the powers 2^(s - m), with a sink, or without one if that is -Inf:
//
//	top = max(m, sink·log2 e)    sum = 2^(m - top)·l + 2^(sink·log2 e - top)
//
// It returns the natural log-sum-exp, and the factor of the row's output:
// 2^(m - top)/sum, or 1/l without a sink. For a row that has seen no key these are the
// sink and 0.
func RowLSE(m float32, l float64, sink float32) (lse, inv float32) {
	switch {
	case l == 0:
		return sink, 0
	case sink == NegInf:
		return float32((float64(m) + math.Log2(l)) * math.Ln2), float32(1 / l)
	}
	score, other := float64(m), float64(sink)*math.Log2E
	top := max(score, other)
	mine := math.Exp2(score - top)
	sum := mine*l + math.Exp2(other-top)
	return float32((top + math.Log2(sum)) * math.Ln2), float32(mine / sum)
}
