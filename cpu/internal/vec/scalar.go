package vec

import "math"

// The exponential works in float64 on 1/128 octaves (Tang 1989, Table-driven
// implementation of the exponential function): with y = n + f octaves/128, n an
// integer and |f| <= 1/2,
//
//	2^(y/128) = 2^(n>>7) · 2^((n&127)/128) · 2^(f/128)
//
// The middle factor comes from a table. The last is 1 + f·(c1 + f·c2), off by at
// most (ln2/256)³/6 = 3.3e-9. Adding roundMagic = 1.5·2^52 rounds y to the integer
// n and leaves n in the low bits of the sum.
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

// exp2 returns 2^y for y <= 127 to within 0.56 ulp, and 0 where that would be
// subnormal: such a weight is lost next to the row's largest, which is 1, and many
// processors multiply subnormals a hundred times more slowly.
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

// NoScore is the largest score of a row that has seen no key. It is finite, because
// -Inf - (-Inf) is NaN.
const NoScore = -math.MaxFloat32
