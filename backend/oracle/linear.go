package oracle

import (
	"math"

	"github.com/seed90331342/attn/backend"
)

// Linear is one query head and one state head of linear attention, as backend.LinearAttention defines it.
type Linear struct {
	K, V        int       // lengths
	Q, Key      []float32 // [T, K]
	Value       []float32 // [T, V]
	Decay, Beta []float32 // [T, 1 or K], [T]; nil means none
	State       []float32 // [K, V] before the first token; nil means zeros
	Scale       float32
	Chunk       int // C, the most tokens that a backend computes together
}

// inverted is the most rows of I + A that a backend may invert, see Attend.
const inverted = 16

// Attend returns the outputs [T, V] and the state [K, V] after the last token, by the recurrence in float64.
//
// # The bound
//
// Let s be a column of the state, ε a bound of the 2-norm of its error, and of a token a the largest decay and η the
// largest |g|·exp(g) of a channel. All terms that s consists of, weighted by 1 and by |ΣG| of the decays since, are at most
//
//	m = a·m + |k|·|d|        from |s| before the first token on
//	h = a·h + η·m            m before the token
//
// A step turns s into (I - β·kᵀk)·diag(exp g)·s + β·kᵀv, which multiplies an error by at most a·γ, with
// γ = max(1, |1 - β·|k|²|), or 1 without the delta rule. The errors that it adds are, with n = K + C for chunks of C tokens,
//
//	κ = u·(λ·(√K + √n) + 40), and 200u more with decays of channels
//	ρ = β·(|v| + |k|·a·m)                         |β·(v - Sᵀk)|, and the terms of d
//	δ = κ·ρ + u·β·|k|·(a·h + η·m) + D             of d
//	ε = a·γ·ε + |k|·δ + u·η·m + κ·(a·m + |k|·|d|)
//	|o - ref| <= |scale|·|q|·(ε + κ·m) + u·|ref|
//
// A chunk solves (I + A)·D = R with rows r = β·(v - exp(G)·k·S). A rounding error of a row of R or A is one of v in the
// recurrence. A row is a sum of n products, where those of A are sums of K: λ·(√K + √n). The exponentials, β, the scale and
// other products are 40u. The argument of exp(G_i - G_j) errs by u·|G_i - G_j|: h. A decay of channels is a product
// of two exponentials with arguments of up to 44, 2·(8 + 2·44)·u < 200u.
//
// I + A is inverted in blocks of up to B = 16 rows by forward substitution, which is not as stable as the substitution of
// D. The inverse T has |T_ij| <= β_i·|k_i|·P_ij·|k_j|, where P has the a of the tokens after j up to i, and the γ of
// those between: it is what the recurrence makes of one row of R. Sums over the B-1 tokens before i bound the rows of |T|·|R|,
//
//	z_i = ρ_i + β_i·|k_i|·Σ_j P_ij·|k_j|·ρ_j
//	D_i = u·(λ·√B + 2)·(z_i + β_i·|k_i|·Σ_j P'_ij·|k_j|·z_j)      P' has the a only
//
// The first term is that of T·R. The second one is that of T: (I + A)·T = I + F with |F| <= u·(λ·√B + 2)·|A|·|T|, and F·R
// is an error of R. Forward substitution of D itself has no such term.
//
// A backend may add the decays of a head in a chunk of 16 tokens in float32. A sum x then errs by up to 8u·|x|, and its
// exponential by less than 3u where x < 0. Where decays grow, that is within the 40u up to x = 4. Flushed subnormals add 2^-60
// of 1 + |v| + m for each product, as exp(44) = 2^63.5 may multiply 2^-125.
func (p Linear) Attend() (o, state []Element) {
	n := len(p.Q) / p.K
	s, off, mass, drift := make([]float64, p.K*p.V), make([]float64, p.V), make([]float64, p.V), make([]float64, p.V)
	for c, x := range p.State {
		s[c] = float64(x)
		mass[c%p.V] = math.Hypot(mass[c%p.V], s[c])
	}
	kappa, kappaT := u*(lambda(p.K)+lambda(p.K+p.Chunk)+40), u*(lambda(inverted)+2)
	channels := len(p.Decay) > n
	if channels {
		kappa += 200 * u
	}
	lens, grow, shrink := make([]float64, n), make([]float64, n), make([]float64, n) // |k|, γ and a
	rho, z := make([]float64, n*p.V), make([]float64, n*p.V)
	// recent returns the sum over the tokens before t of |k|·x, times their P with growth, else P'.
	recent := func(x []float64, t, c int, growth bool) (sum float64) {
		for j, f := t-1, shrink[t]; j > t-inverted && j >= 0; j-- {
			sum += f * lens[j] * x[j*p.V+c]
			if f *= shrink[j]; growth {
				f *= grow[j]
			}
		}
		return sum
	}
	for t := range n {
		q, k, v := p.Q[t*p.K:][:p.K], p.Key[t*p.K:][:p.K], p.Value[t*p.V:][:p.V]
		lenQ, lenK, a, eta, beta, gamma := norm(q), norm(k), 0.0, 0.0, 1.0, 1.0
		for i := range k {
			g := 0.0
			switch {
			case channels:
				g = float64(p.Decay[t*p.K+i])
			case p.Decay != nil:
				g = float64(p.Decay[t])
			}
			e := math.Exp(g)
			a, eta = math.Max(a, e), math.Max(eta, times(e, math.Abs(g)))
			for c := range v {
				s[i*p.V+c] *= e
			}
		}
		if p.Beta != nil {
			beta = float64(p.Beta[t])
			gamma = math.Max(1, math.Abs(1-beta*lenK*lenK))
		}
		lens[t], grow[t], shrink[t] = lenK, gamma, a
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
			size, old, bk, at := math.Abs(float64(v[c])), a*mass[c], math.Abs(beta)*lenK, t*p.V+c
			aged := eta * mass[c]
			drift[c] = a*drift[c] + aged
			mass[c] = old + lenK*math.Abs(d)
			rho[at] = math.Abs(beta) * (size + lenK*old)
			local := kappa*rho[at] + u*bk*drift[c]
			if p.Beta != nil {
				z[at] = rho[at] + bk*recent(rho, t, c, true)
				local += kappaT * (z[at] + bk*recent(z, t, c, false))
			}
			off[c] = a*gamma*off[c] + lenK*local + u*aged + kappa*mass[c] + 0x1p-60*(1+lenK)*(1+size+mass[c])
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
	e := Element{sum, u * (lambda(len(x)+1) + 2) * size}
	if silu {
		y, _, err, _ := activation(backend.SiLU, sum)
		e = Element{y, 1.1*e.Err + err}
	}
	e.Err += flushed * (1 + float64(len(x)) + math.Abs(sum))
	return e
}
