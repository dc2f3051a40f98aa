package cpu

import "math"

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
