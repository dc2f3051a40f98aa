package oracle

import (
	"math"
)

// Linear is one query head and one state head of linear attention, as backend.LinearAttention defines it.
type Linear struct {
	K, V        int       // lengths
	Q, Key      []float32 // [T, K]
	Value       []float32 // [T, V]
	Decay, Beta []float32 // [T, 1 or K], [T]; nil means none
	State       []float32 // [K, V] before the first token; nil means zeros
	Scale       float32
	Chunk       int // the most tokens that a backend computes together
}

// Attend returns the outputs [T, V] and the state [K, V] after the last token, by the recurrence in float64.
//
// # The bound
//
// Let s be a column of the state, ε a bound of the 2-norm of its error, a the largest decay of a token, and
// m = a·m + |k|·|d|, from |s| on, a bound of all terms that s consists of. In a step s becomes (I - β·kᵀk)·diag(exp g)·s + β·kᵀv,
// which multiplies an error by at most a·γ, with γ = max(1, |1 - β·|k|²|), or 1 without the delta rule. What it adds is, with
//
//	κ = λ·√(K + C) + 40, and 200 more with decays of channels
//	δ = u·κ·β·(|v| + |k|·a·m)                          of d
//	ε = a·γ·ε + |k|·δ + u·κ·(a·m + |k|·|d|)
//	|o - ref| <= |scale|·|q|·(ε + u·κ·m) + u·|ref|
//
// A chunk of C tokens solves (I + A)·D = R, a row d after the other, with rows r = β·(v - exp(G)·k·S). Rounding errors of a
// row are those of a recurrence with another v: δ. Terms of d are sums over K products and over the rows before, each at
// most |k|·|k_j|·|d_j|, of which m has the sum: λ·√(K + C). Outputs and states are such sums, too. A decay is
// exp(G_i - G_j) for sums G in float64, with 8u for the exponential and 2u·|G_i - G_j| for its argument, whose product
// with the decay is at most u. A decay of channels is a product of two exponentials, whose arguments of up to 44 cancel:
// 16u + 4·44·u. The scale, β and other products stay below 20u. Flushed subnormals add 2^-60 of 1 + |v| + m for each
// product, as exp(44) = 2^63.5 may multiply 2^-125.
func (p Linear) Attend() (o, state []Element) {
	n := len(p.Q) / p.K
	s, off, mass := make([]float64, p.K*p.V), make([]float64, p.V), make([]float64, p.V)
	for c, x := range p.State {
		s[c] = float64(x)
		mass[c%p.V] = math.Hypot(mass[c%p.V], s[c])
	}
	kappa := u * (Lambda*math.Sqrt(float64(p.K+p.Chunk)) + 40)
	channels := len(p.Decay) > n
	if channels {
		kappa += 200 * u
	}
	for t := range n {
		q, k, v := p.Q[t*p.K:][:p.K], p.Key[t*p.K:][:p.K], p.Value[t*p.V:][:p.V]
		lenQ, lenK, a, beta, gamma := norm(q), norm(k), 1.0, 1.0, 1.0
		for i := range k {
			g := 0.0
			switch {
			case channels:
				g = float64(p.Decay[t*p.K+i])
			case p.Decay != nil:
				g = float64(p.Decay[t])
			}
			if i == 0 || math.Exp(g) > a {
				a = math.Exp(g)
			}
			for c := range v {
				s[i*p.V+c] *= math.Exp(g)
			}
		}
		if p.Beta != nil {
			beta = float64(p.Beta[t])
			gamma = math.Max(1, math.Abs(1-beta*lenK*lenK))
		}
		for c := range v {
			d, ref := float64(v[c]), 0.0
			for i := range k {
				if p.Beta != nil {
					d -= s[i*p.V+c] * float64(k[i])
				}
			}
			d *= beta
			for i, x := range k {
				s[i*p.V+c] += float64(x) * d
				ref += s[i*p.V+c] * float64(q[i])
			}
			size, old := math.Abs(float64(v[c])), a*mass[c]
			mass[c] = old + lenK*math.Abs(d)
			local := kappa * math.Abs(beta) * (size + lenK*old)
			off[c] = a*gamma*off[c] + lenK*local + kappa*mass[c] + 0x1p-60*(1+lenK)*(1+size+mass[c])
			scale := math.Abs(float64(p.Scale))
			o = append(o, Element{float64(p.Scale) * ref, scale*lenQ*(off[c]+kappa*mass[c]+0x1p-60*(1+mass[c])) + u*scale*math.Abs(ref)})
		}
	}
	for c, x := range s {
		state = append(state, Element{x, off[c%p.V]})
	}
	return o, state
}

// norm returns the 2-norm of x.
func norm(x []float32) (sum float64) {
	for _, y := range x {
		sum = math.Hypot(sum, float64(y))
	}
	return sum
}

// CausalConv returns the output of one channel of a causal convolution at a token, as backend.CausalConv defines it, from
// the W elements of x that end there. A sum of W products and the bias has the error u·(λ·√(W+1) + 2)·(Σ|w·x| + |bias|).
// The slope of SiLU is at most 1.1, and σ(y) errs by 2u·|y| + 11u:
//
//	|y - ref| <= 1.1·e + u·(2·|sum| + 12)·|ref| + 2^-125·(1 + W + |sum|)    e = the error of the sum
func CausalConv(x, w []float32, bias float32, silu bool) Element {
	sum, size := float64(bias), math.Abs(float64(bias))
	for i, y := range x {
		sum += float64(y) * float64(w[i])
		size += math.Abs(float64(y) * float64(w[i]))
	}
	e := Element{sum, u * (Lambda*math.Sqrt(float64(len(x)+1)) + 2) * size}
	if silu {
		y := sum / (1 + math.Exp(-sum))
		e = Element{y, 1.1*e.Err + times(u*(2*math.Abs(sum)+12), math.Abs(y))}
	}
	e.Err += flushed * (1 + float64(len(x)) + math.Abs(sum))
	return e
}
