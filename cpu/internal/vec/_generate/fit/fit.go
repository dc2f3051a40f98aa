// Package fit has the polynomials that the generators of all instruction sets use, so that
// every set computes the same bits.
package fit

import (
	"math"
	"slices"
)

// Tanh are the coefficients of q in tanh(x) = x + x³·q(x²) for |x| <= 0.625, a Chebyshev fit
// of degree 5 in 40 digits: below 1e-9 of relative error.
var Tanh = [6]float32{-0.333333331494, 0.133333001462, -0.0539584616275, 0.0217625029074, -0.00832318705828, 0.00226950168416}

// Exp2Minus1 are the coefficients of q in 2^x - 1 = x·q(x) for |x| <= 0.5, a Remez fit of degree 5: below 1.1e-8 of
// relative error.
var Exp2Minus1 = [6]float32{0.6931471879156843, 0.24022649796317436, 0.055503574869676754, 0.009618237385205734, 0.00133907068993446, 0.0001540351283364286}

// Bits returns the bits of the coefficients of Exp2 and Tanh and of what follows them in a table.
func Bits(more ...float32) (bits []uint32) {
	exp2 := Exp2()
	for _, x := range slices.Concat(exp2[:], Tanh[:], more) {
		bits = append(bits, math.Float32bits(x))
	}
	return bits
}

// Exp2 returns the coefficients of the polynomial 1 + c1·x + ... + c6·x⁶ with the
// smallest relative error from 2^x on [0, 1] (Remez exchange; Muller, Elementary
// Functions, ch. 3). With the constant term fixed at 1, exp2 of an integer is exact,
// and a row's largest weight is 1.
func Exp2() [7]float32 {
	const n = 6
	var xs [n + 1]float64 // where the error alternates
	for i := range xs {
		xs[i] = 0.5 - 0.5*math.Cos(math.Pi*float64(i+1)/(n+1))
	}
	var c [n + 1]float64
	for range 30 {
		// Σ c_k·x^k ± e·2^x = 2^x - 1 at each of the points
		var m [n + 1][n + 2]float64
		for i, x := range xs {
			for k := range n {
				m[i][k] = math.Pow(x, float64(k+1))
			}
			m[i][n] = math.Exp2(x) * float64(1-2*(i&1))
			m[i][n+1] = math.Expm1(x * math.Ln2)
		}
		for i := range m {
			pivot := i
			for r := i; r <= n; r++ {
				if math.Abs(m[r][i]) > math.Abs(m[pivot][i]) {
					pivot = r
				}
			}
			m[i], m[pivot] = m[pivot], m[i]
			for r := range m {
				if r != i {
					f := m[r][i] / m[i][i]
					for k := i; k < n+2; k++ {
						m[r][k] -= f * m[i][k]
					}
				}
			}
		}
		c[0] = 1
		for k := range n {
			c[k+1] = m[k][n+1] / m[k][k]
		}
		// The next points are where the error is largest between its zeros.
		var extrema []float64
		var last, best, at float64
		const steps = 20000
		for j := 1; j <= steps; j++ {
			x := float64(j) / steps
			y := 0.0
			for k := n; k >= 0; k-- {
				y = y*x + c[k]
			}
			e := y*math.Exp2(-x) - 1
			if j > 1 && e*last < 0 {
				extrema = append(extrema, at)
				best = 0
			}
			if math.Abs(e) > best {
				best, at = math.Abs(e), x
			}
			last = e
		}
		extrema = append(extrema, at)
		if len(extrema) < n+1 {
			break
		}
		copy(xs[:], extrema[len(extrema)-n-1:])
	}
	var r [7]float32
	for i := range r {
		r[i] = float32(c[i])
	}
	return r
}
