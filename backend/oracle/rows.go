package oracle

import (
	"math"

	"github.com/seed90331342/attn/backend"
)

// Element is an element of a result, and a bound of the error of float32 arithmetic.
type Element struct{ Value, Err float64 }

// Bound returns the error bound of the element when it is stored as out.
func (e Element) Bound(out backend.DType) float64 {
	bound := e.Err
	if out != backend.F32 {
		bound += out.UnitRoundoff() * (math.Abs(e.Value) + bound)
	}
	return bound + tiny(out, 1, 0)
}

// normed returns r of a row, the bound of its relative error, and the factors.
//
// A sum of n squares errs by (λ·√n + 1)·u, the mean by 2u more, its sum with ε by 2u and the square root and its
// reciprocal by 4u (2 ulp). Squares that are flushed are less than u/4 of ε. A root halves what comes before it:
//
//	ρ = u·(λ·√n/2 + 7)
func normed(x, w []float32, n backend.Norm) (r, rho float64, f []float64) {
	sum := 0.0
	f = make([]float64, len(x))
	for i, v := range x {
		sum += float64(v) * float64(v)
		f[i] = 1
		if w != nil {
			f[i] = float64(w[i])
		}
		if w != nil && n.PlusOne {
			f[i]++
		}
	}
	return 1 / math.Sqrt(sum/float64(len(x))+n.Epsilon), u * (lambda(len(x))/2 + 7), f
}

// Normalise returns the norm of a row of x, as backend.Normaliser defines it; nil as w means factors of 1. The factor
// and two products add 3u to ρ:
//
//	|y - ref| <= (ρ + 3u)·|ref| + 2^-125·(1 + |f|)
func Normalise(x, w []float32, n backend.Norm) []Element {
	r, rho, f := normed(x, w, n)
	y := make([]Element, len(x))
	for i, v := range x {
		ref := float64(v) * r * f[i]
		y[i] = Element{ref, (rho+3*u)*math.Abs(ref) + flushed*(1+math.Abs(f[i]))}
	}
	return y
}

// NormaliseBackward returns the gradients of Normalise from those of its result, dy. With y = x·r, the mean m of f·dy·y
// has the relative errors ρ + u of y, u·(λ·√n + 5) of its sum, three products and the mean, all of A = mean |f·dy·y|:
//
//	|dw - ref| <= (ρ + 2u)·|ref| + tiny
//	|dx - ref| <= r·((ρ + 6u)·|f·dy| + (3ρ + u·(λ·√n + 12))·A·|y|) + tiny    tiny = 2^-125·(1 + r·(1 + |f|)·(2 + |dy| + |y|))
func NormaliseBackward(dy, x, w []float32, n backend.Norm) (dx, dw []Element) {
	r, rho, f := normed(x, w, n)
	mean, size, of := 0.0, 0.0, float64(len(x))
	for i, v := range x {
		t := f[i] * float64(dy[i]) * float64(v) * r / of
		mean, size = mean+t, size+math.Abs(t)
	}
	dx, dw = make([]Element, len(x)), make([]Element, len(x))
	for i, v := range x {
		g, y := float64(dy[i]), float64(v)*r
		slack := flushed * (1 + r*(1+math.Abs(f[i]))*(2+math.Abs(g)+math.Abs(y)))
		dw[i] = Element{g * y, (rho+2*u)*math.Abs(g*y) + slack}
		dx[i] = Element{r * (f[i]*g - y*mean), r*((rho+6*u)*math.Abs(f[i]*g)+(3*rho+u*(lambda(len(x))+12))*size*math.Abs(y)) + slack}
	}
	return dx, dw
}

// activation returns f(g) and f'(g), and bounds of their errors. The relative error ε of σ and 1 - σ consists of 2u·|g|
// for the exponent and its constant, 4u for the exponential and 7u for a sum, a division and a product. The tail
// log1p(exp -|g|) of Softplus has the first two and 9u: 6u for s = e/(2+e), and 3u for 2·(s + s³/3 + ..).
//
//	Sigmoid     ε·f                         (2ε + u)·f'
//	SiLU        (ε + u)·|f|                 (2ε + 3u)·(σ + |f|·(1 - σ))    f' = σ + f·(1 - σ)
//	Softplus    (ε + 2u)·tail + u·f         ε·f'
//	Identity    0                           0
func activation(f backend.Activation, g float64) (value, slope, err, slopeErr float64) {
	s, rest, eps := 1/(1+math.Exp(-g)), 1/(1+math.Exp(g)), u*(2*math.Abs(g)+11)
	switch f {
	case backend.Sigmoid:
		return s, s * rest, eps * s, (2*eps + u) * s * rest
	case backend.SiLU:
		y := g * s
		return y, s + y*rest, (eps + u) * math.Abs(y), (2*eps + 3*u) * (s + math.Abs(y)*rest)
	case backend.Softplus:
		tail := math.Log1p(math.Exp(-math.Abs(g)))
		return max(g, 0) + tail, s, (eps+2*u)*tail + u*(max(g, 0)+tail), eps * s
	}
	return g, 1, 0, 0
}

// Gate returns x·f(gate), with the error e of f. The product adds u, and a σ or a tail below 2^-125 may be 0:
//
//	|y - ref| <= |x|·(e + u·|f|) + 2^-125·(1 + |x|)·(1 + |gate|)
func Gate(x, gate []float32, f backend.Activation) []Element {
	y := make([]Element, len(x))
	for i, v := range x {
		v, g := float64(v), float64(gate[i])
		value, _, err, _ := activation(f, g)
		y[i] = Element{v * value, times(err+u*math.Abs(value), math.Abs(v)) + flushed*(1+math.Abs(v))*(1+math.Abs(g))}
	}
	return y
}

// GateBackward returns the gradients of Gate from those of its result, dy: dx as Gate bounds it, and with the error e of f'
//
//	|dgate - ref| <= |dy·x|·(e + 2u·|f'|) + 2^-125·(1 + |x|)·(1 + |dy|)·(1 + |gate|)
func GateBackward(dy, x, gate []float32, f backend.Activation) (dx, dgate []Element) {
	dgate = make([]Element, len(x))
	for i, v := range x {
		dy, v, g := float64(dy[i]), float64(v), float64(gate[i])
		_, slope, _, err := activation(f, g)
		dgate[i] = Element{dy * v * slope, times(err+2*u*math.Abs(slope), math.Abs(dy*v)) + flushed*(1+math.Abs(v))*(1+math.Abs(dy))*(1+math.Abs(g))}
	}
	return Gate(dy, gate, f), dgate
}

// IndexScores returns the scores Σ_h w_h·max(0, q_h·k_j) of a query row, q [Hi, Di] and w [Hi], for each key of k [Sk, Di]. With
// a_h = Σ_d |q_hd·k_jd|, a product q_h·k_j errs by at most δ_h = u·(λ·√Di + 1)·a_h, and max(0, ·) does not increase that. The
// product with w_h errs by u more, and the sum by λ·√Hi·u of its terms:
//
//	|I - ref| <= Σ_h |w_h|·(δ_h + u·(λ·√Hi + 1)·(max(0, q_h·k_j) + δ_h)) + tiny    tiny = 2^-125·Hi·(1 + Di·max(1, |w|))
//
// A backend chooses key a and not key b only if its score of a is at least that of b. If it chooses n keys, and a is not among
// the n largest, then it leaves out one of these, b. The score of a is therefore at least the n-th largest minus the bounds of a and b.
func IndexScores(q, k, w []float32) []Element {
	heads := len(w)
	dim := len(q) / heads
	all := make([]Element, len(k)/dim)
	for j := range all {
		e := &all[j]
		for h, weight := range w {
			p, a, weight := 0.0, 0.0, float64(weight)
			for i, x := range q[h*dim:][:dim] {
				term := float64(x) * float64(k[j*dim+i])
				p, a = p+term, a+math.Abs(term)
			}
			p = max(p, 0)
			delta := u * (lambda(dim) + 1) * a
			e.Value += weight * p
			e.Err += math.Abs(weight)*(delta+u*(lambda(heads)+1)*(p+delta)) + flushed*(1+float64(dim)*max(1, math.Abs(weight)))
		}
	}
	return all
}
