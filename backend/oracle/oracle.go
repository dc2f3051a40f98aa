// Package oracle computes attention row by row in float64, in the plainest way, and bounds the error of float32
// arithmetic. The conformance suite compares every row of every backend with it; `attn run --check` and the benchmark
// compare random rows.
//
// The formula is that of [backend.Problem]. Hidden keys are left out.
//
// # The bound
//
// Let u = 2^-24 be the unit roundoff of float32. A sum of n numbers in any order has an error of at most λ·√n·u times
// the sum of their magnitudes, except with probability 2·exp(-λ²/2) (Higham & Mary 2019, A New Approach to
// Probabilistic Rounding Error Analysis, theorem 3.1). With λ = [Lambda] = 6 that is 3e-8, for the worst case of every
// rounding. The error of a score has these terms, in units of u·A, with A = max_j (scale·Σ_d |q_d·k_jd| + |bias_j| +
// |relative_j| + |slope·distance_j|) over the visible keys and the sink:
//
//	λ√D    the dot product
//	3      scale, and log2(e) multiplied into it or into q: three roundings
//	8      tanh and its division, whose slope is at most 1
//	5      the sum with up to three biases, one of which is a product: roundings of at most A each
//	8      s - m and its factor log2(e): two roundings of up to 2A for the weight, and as much for
//	       the rescaling over all changes of the running maximum, which add up to at most 2A
//
// Each weight, before it is normalised, then has the relative error expm1(e) + 8u, where e is the error of its exponent
// and 8u that of the exponential:
//
//	e = u·A·(λ√D + 24)
//
// The sums of the weights and of their products with v each add λ·√Sk·u for the accumulation over Sk keys and
// λ·√(Sk/64)·9u for one rescaling in each block of at least 64 keys, by an exponential and a product (9u): together
// λ·√Sk·(17/8)·u. A backend may merge the results of every 32,768 keys. The weight of such a result, exp(lse_part -
// lse), has the relative error u·(16 + 4·|lse|) for the rounding of its lse, the subtraction and the exponential; n =
// ⌈Sk/32768⌉ - 1 merges add μ = λ·√n·u·(16 + 4·|lse|). The errors of the weights count twice in o = Σ p·v / Σ p, and
// the division, the product and dropout add 6u. A log-sum-exp is off by no more than the largest error of its scores.
// With k the factor of kept weights, and W_j the error of w_j in the sum,
//
//	W_j = k·ω_j + (2μ + u·(λ·√Sk·17/4 + 22))·w_j + 2^-125    ω_j = (exp(2e) - 1)·w_j/k, see "Large scores"
//	|o - ref| <= Σ_j W_j·|v_j| + u_o·|ref| + tiny
//	|lse - ref| <= e + 8u + μ + u·(λ·√Sk·17/8 + 4 + 2·(|ref| + A))
//
// The bound of a weight is W_j with one sum and without merges: k·ω_j + u·(λ·√Sk·17/8 + 22)·w_j + 2^-125. u_o is the
// unit roundoff of the output's dtype if it is not float32. Subnormal numbers may be flushed: 2^-125 is for a weight,
// and tiny is 2^-125 for each product and half a subnormal step of the output's dtype.
//
// # Low precision
//
// Rounding weights to nearest in a type with the unit roundoff v, after they are summed and before they multiply
// values, adds to the bound of o
//
//	Σ_j max(v·(w_j + W_j), f·w⁺)·|v_j|
//
// v is 2^-8 for bf16 and 2^-11 for f16. f is half the distance between subnormal numbers of f16, 2^-25. For bf16 it
// is 2^-32: where a device has products of f16 only, its weights are f16 after a factor of 2^7.
// w⁺ is the largest w_j + W_j, of a weight that is 1 or more when it is rounded. Equal weights err equally: there is no √n
// to gain. A backend may rescale only where the maximum has risen by 8·log 2, in blocks of 8 keys or more. A weight that
// was rescaled i times is at most 2^(-8(i-1)) of the largest, so all rescalings together err by at most
// 9u·(2 + log2(Sk)/8) of the sum of the weights. That is below λ·√(Sk/64)·9u from 12 keys on; fewer keys are rescaled
// once. Products of 16-bit numbers are exact, but units for bf16 take subnormal operands and sums for 0: a score loses
// up to 2^-126·(|q_d| + |k_jd| + 2) for each product, which is in A over 24u, and tiny counts twice, as does the
// 2^-125 of each weight.
//
// With int8 keys a query may be rounded to integers, in units of max_d |q_d|/(127·2^8), whose products are summed
// exactly. Half a unit, with the roundings of unit and quotients, is less than (2^-16 + 2^-22)·max_d |q_d|. φ = max_j
// |scale|·Σ_d |k_jd| times that adds to e.
//
// A score mod f gets a score s with an error of at most e = u·A_j·(λ√D + 4) + φ_j, with A_j = |scale|·Σ_d |q_d·k_jd|, for
// the product, the scale, and the rounding to float32 with which the reference takes f. f itself errs by at most η = 8u·(1
// + |s| + |f|). Where f is monotonic or convex from s - e to s + e, no score between them is further from f(s) than one of
// the ends. With an η each for the reference, the device, and both sides of the difference,
//
//	δ_j = max |f(s ± e) - f(s)| + 4η
//
// takes the place of φ_j, and |f| that of A_j in A. A softcap after f has a slope of at most 1 and passes δ_j on. For
// gradients f' has the error δ' in the same way. The argument of the softcap's tanh errs by δ_j/softcap more, and
// c' = f'·c and γ' = |f'|·γ + δ'·(c + γ) + u·|c'| take the places of c and γ below.
//
// Float32 products may be split, as PyTorch's float32_matmul_precision "high" splits them: x = high + low/2^11, with high
// the nearest f16 and low the rest in f16, rounded either way, and x·y = high·high + (high·low + low·high)/2^11. A power
// of two brings x below 2^15. From 2^-14 on, low loses at most 2^-35 or the 24th bit of x: 8u of x. What is left
// out, low·low, is 4u of x·y. So φ_j = 21u·|scale|·Σ_d |q_d·k_jd| (8 + 8 + 4, and their products), and v = 16u. Weights go down to 0,
// and have a factor of 2^6: one loses 2u of itself or 2^-41 of the largest, and in a product below 2^-25 of it 2^-42 more.
// With 8u for its value and 4u for low·low that is below max(16u·w, f·w⁺) for f = 2^-39.
//
// # Large scores
//
// The distance between float32 scores is 2u·|s|: e reaches 1 at scores of some 2^17 to 2^20, and from 2^24 on rounding
// may exchange two scores that differ by 1. What remains is that weights are in [0, 1], and that o is a mean. A weight w
// = exp(x) with an error of e in x is off by at most
//
//	ω(x, e) = min(exp(x + e) - w, max(w, 1 - w))
//
// and ω_j = ω(s_j - lse, 2e). No mean of values exceeds the largest one, before sums and weights are rounded:
//
//	|o - ref| <= |ref| + (1 + u·(λ·√Sk·17/4 + 6) + v + Sk·f)·k·max_j |v_j| + u_o·|ref| + tiny
//
// holds too, and the lesser bound counts. v and f are those of low precision, or 0.
//
// # Gradients
//
// [Differentiate] computes, with do and dlse the gradients of the row's o and lse and f_j = keep_j / (1 - P),
//
//	t_j  = f_j·Σ_x do_x·v_jx - Σ_x do_x·o_x + dlse
//	ds_j = p_j·t_j                dx_j = scale·c_j·ds_j
//	c_j  = 1 - tanh²(x_j)         x_j = scale·Σ_d q_d·k_jd / softcap;  1 without softcap
//
// and sums them as kernels.Call.Backward states, with dslope -= ds_j·distance_j and dsink += exp(sink - lse)·(dlse - Σ_x
// do_x·o_x).
//
// A backend computes p_j = exp(min(s_j - lse, 0)) from the stored lse, which may be less than s_j. The error of its
// exponent is
//
//	e = u·(A·(λ√D + 17) + 3·|lse|) + [the bound of lse]
//
// for the score as above (16), lse times log2(e) (2|lse|) and the difference (A + |lse|). The minimum adds nothing:
// without errors it would have no effect. The error of p_j is α_j = ω(s_j - lse, e) + 8u·p_j, with which p_j + α_j is
// about 1 at most, however large the scores. The error of t_j is, with M_j = f_j·Σ|do·v_j|, N = Σ_x |do_x|·(|o_x| + [the bound of o_x]),
//
//	τ_j = u·((λ√Dv + 5)·(M_j + N) + 2·|dlse|) + Σ_x |do_x|·[the bound of o_x]
//
// for two dot products, the factor of dropout (3), two differences, and the stored o: its own bound includes the
// rounding of a 16-bit o. Therefore
//
//	|ds_j - ref| <= σ_j = (α_j + 2u·(p_j + α_j))·|t_j| + (1 + 2u)·(p_j + α_j)·τ_j
//
// The argument of tanh has the error ξ = u·(λ√D + 3)·Σ_d |scale·q_d·k_jd|/softcap, tanh and its division 12u. With c⁺
// the largest c_j within ξ of x_j,
//
//	|c_j - ref|  <= γ_j = 2·(c⁺·ξ + 12u) + 3u                        0 without softcap
//	|dx_j - ref| <= |scale|·(σ_j·(c_j + γ_j) + p_j·|t_j|·(γ_j + 3u))
//
// c_j is in [0, 1], and γ_j is 1 + 3u at most. The error of a weight of dv is (1 + 4u)·α_j + 4u·p_j. A gradient is a sum of n products, which adds u·(λ√n + 2)
// times the sum of their magnitudes to their errors. n counts the pairs of rows and keys that are visible, over all
// rows, heads and batches that share the element. Flushed subnormals add 2^-125 for each weight and each product, times
// the factors that follow, and the output's dtype adds its rounding as in o.
//
// In low precision with values of f16 or bf16, p_j and dx_j may be rounded to f16 before they multiply do, k and q: p_j after a factor of 2^15, dx_j after
// one for each sum, which brings the largest so far to [2^7, 2^15). With v = 2^-11, and 2^-25 for half the distance
// between subnormal numbers, that adds v·(p_j + α_j) + 2^-40, and p_j + α_j at most, to the error of p_j, and to that of dx_j, with ξ_j its own,
//
//	v·(|dx_j| + ξ_j) + 2^-32·max(|dx| + ξ)
//
// with the maximum over the terms of the sum. Products of two f16 are exact. Rescaling by powers of two adds nothing.
package oracle

import (
	"cmp"
	"fmt"
	"math"

	"github.com/seed90331342/attn/backend"
)

// Lambda is λ of the package comment's bound.
const Lambda = 6

// lambda returns λ·√n.
func lambda(n int) float64 { return Lambda * math.Sqrt(float64(n)) }

// Row is a query row with the keys and values that it may see.
type Row struct {
	Q, K               []float32 // [D], [Sk, D]
	V                  []float32 // [Sk, Dv]; nil when only the weights matter
	Dv                 int
	Scale, Softcap     float32
	Mod, ModDerivative func(j int, s float32) float32 // replaces score j, unless nil
	Hidden             func(j int) bool               // whether key j is hidden, unless nil
	Listed             int                            // keys of a list, if Hidden hides all others: Sk in the bound; 0 means all
	// Bias and Relative, of which -Inf hides, and -Slope·Distance are added to score j, unless nil.
	Bias, Relative, Distance func(j int) float64
	Slope                    float64
	Sink                     *float32         // in the denominator, unless nil
	Keeps                    func(j int) bool // whether weight j is kept, unless nil
	KeepFactor               float64          // of kept weights; 0 is 1
	Out                      backend.DType    // of the output
	Rounded                  backend.DType    // to which weights are rounded before they multiply values, or F32
	Fixed                    bool             // whether the query may be rounded to integers of 16 bits
	Split                    bool             // whether products of float32 may be split
}

// Answer is the reference result of a row with the error bounds.
type Answer struct {
	Scores, Weights []float64 // [Sk], NaN and 0 where hidden
	O, OBound       []float64 // [Dv]
	LSE, LSEBound   float64
	WeightBounds    []float64 // [Sk]
	reach, shift    float64   // A, and φ or δ
	visible         []int     // the keys that are not hidden
}

// hides reports whether key j is hidden.
func (r *Row) hides(j int) bool {
	return r.Hidden != nil && r.Hidden(j) || r.Mod != nil && math.IsInf(float64(r.Mod(j, 0)), -1) || r.Bias != nil && math.IsInf(r.Bias(j), -1) ||
		r.Relative != nil && math.IsInf(r.Relative(j), -1)
}

// product returns scale·q·k_j, the sum of the magnitudes of its terms, and φ_j.
func (r *Row) product(j int) (s, abs, fixed float64) {
	flushed, top, scale := 0.0, 0.0, float64(r.Scale)
	if r.Rounded == backend.BF16 {
		flushed = 0x1p-106
	}
	for i, q := range r.Q {
		x, y := float64(q), float64(r.K[j*len(r.Q)+i])
		s += x * y
		abs += math.Abs(x*y) + flushed*(math.Abs(x)+math.Abs(y)+2)
		top, fixed = math.Max(top, math.Abs(x)), fixed+math.Abs(y)
	}
	abs *= math.Abs(scale)
	switch {
	case r.Fixed:
		fixed *= (0x1p-16 + 0x1p-22) * math.Abs(scale) * top
	case r.Split:
		fixed = 21 * u * abs
	default:
		fixed = 0
	}
	return s * scale, abs, fixed
}

// score returns score j before softcap, its A, and φ_j or δ_j.
func (r *Row) score(j int) (s, abs, shift float64) {
	if r.Mod == nil {
		return r.product(j)
	}
	if s, shift = r.around(r.Mod, j); math.IsInf(s, -1) { // the weight is 0
		return s, 0, 0
	}
	return s, math.Abs(s), shift
}

// around returns what f makes of score j, and δ_j.
func (r *Row) around(f func(j int, s float32) float32, j int) (y, shift float64) {
	s, abs, e := r.product(j)
	e += u * abs * (lambda(len(r.Q)) + 4)
	y = float64(f(j, float32(s)))
	for _, x := range [2]float64{s - e, s + e} {
		if z := float64(f(j, float32(x))); z != y { // both may be infinite
			shift = math.Max(shift, math.Abs(z-y))
		}
	}
	return y, shift + 32*u*(1+math.Abs(s)+math.Abs(y))
}

// sink returns the score of the sink, clamped; -Inf without one.
func (r *Row) sink() float64 {
	if r.Sink == nil {
		return math.Inf(-1)
	}
	return float64(backend.Bound(*r.Sink, backend.MaxBias))
}

// Solve computes the reference of r and its bounds.
func Solve(r Row) Answer {
	n := len(r.K) / len(r.Q)
	a := Answer{Scores: make([]float64, n), Weights: make([]float64, n), WeightBounds: make([]float64, n), O: make([]float64, r.Dv), OBound: make([]float64, r.Dv)}
	sink := r.sink()
	m := sink
	for j := range n {
		if r.hides(j) {
			a.Scores[j] = math.NaN()
			continue
		}
		a.visible = append(a.visible, j)
		s, abs, shift := r.score(j)
		if r.Softcap > 0 && (r.Mod == nil || !math.IsInf(s, -1)) {
			s = float64(r.Softcap) * math.Tanh(s/float64(r.Softcap))
		}
		added := 0.0
		add := func(x float64) {
			added += x
			abs += math.Abs(x)
		}
		if r.Bias != nil {
			add(float64(backend.Bound(float32(r.Bias(j)), backend.MaxBias)))
		}
		if r.Relative != nil {
			add(float64(backend.Bound(float32(r.Relative(j)), backend.MaxRelative)))
		}
		if r.Distance != nil {
			add(-r.Slope * r.Distance(j))
		}
		if !math.IsInf(added, 0) {
			added = math.Max(-backend.MaxBias, math.Min(added, backend.MaxBias))
		}
		s += added
		a.Scores[j] = s
		m = math.Max(m, s) // NaN when any is NaN
		a.reach, a.shift = math.Max(a.reach, abs), math.Max(a.shift, shift)
	}

	if !math.IsInf(sink, 0) {
		a.reach = math.Max(a.reach, math.Abs(sink))
	}
	n = cmp.Or(r.Listed, n)
	e := u*a.reach*(lambda(len(r.Q))+24) + a.shift
	sums := u * lambda(n) * 17 / 8
	if math.IsInf(m, -1) {
		a.LSE = m
		return a
	}

	sum := math.Exp(sink - m)
	for _, j := range a.visible {
		a.Weights[j] = math.Exp(a.Scores[j] - m)
		sum += a.Weights[j]
	}
	a.LSE = m + math.Log(sum)
	merges := u * lambda((n-1)/32768) * (16 + 4*math.Abs(a.LSE))
	a.LSEBound = e + 8*u + sums + merges + u*(4+2*(math.Abs(a.LSE)+a.reach))
	offW := func(j int) float64 { return a.WeightBounds[j] + (sums+2*merges)*a.Weights[j] } // W_j
	kept, factor, top := make([]int, 0, len(a.visible)), cmp.Or(r.KeepFactor, 1), 0.0
	for _, j := range a.visible {
		a.Weights[j] *= factor / sum
		a.WeightBounds[j] = factor*weightError(a.Scores[j]-a.LSE, 2*e) + (22*u+sums)*a.Weights[j] + 0x1p-125
		top = math.Max(top, a.Weights[j]+offW(j)) // w⁺
		if r.Keeps == nil || r.Keeps(j) {
			kept = append(kept, j)
		} else {
			a.Weights[j] *= 0 // NaN stays
			a.WeightBounds[j] = 0
		}
	}
	if r.V == nil {
		return a
	}
	off, all, largest := make([]float64, r.Dv), make([]float64, r.Dv), make([]float64, r.Dv)
	unit, least, flushes := 0.0, 0.0, 0 // v, f
	switch r.Rounded {
	case backend.F16:
		unit, least = 0x1p-11, 0x1p-25
	case backend.BF16:
		unit, least, flushes = 0x1p-8, 0x1p-32, 1
	default:
		if r.Split {
			unit, least = 16*u, 0x1p-39
		}
	}
	for _, j := range kept {
		w, wOff := a.Weights[j], offW(j)
		for i, v := range r.V[j*r.Dv : (j+1)*r.Dv] {
			size := math.Abs(float64(v))
			a.O[i] += w * float64(v)
			off[i] += (wOff + math.Max(unit*(w+wOff), least*top)) * size
			all[i] += size
			largest[i] = math.Max(largest[i], size)
		}
	}
	for i, o := range a.O {
		a.O[i] += 0 * a.LSE // a NaN denominator propagates even if dropout drops all weights
		mean := math.Abs(o) + (1+2*sums+6*u+unit+float64(n)*least)*factor*largest[i]
		a.OBound[i] = math.Min(off[i], mean) + tiny(r.Out, (1+flushes)*n, float64(flushes)*all[i])
		if r.Out != backend.F32 {
			a.OBound[i] += r.Out.UnitRoundoff() * math.Abs(o)
		}
	}
	return a
}

// weightError returns ω(x, e) of the package comment for x <= 0.
func weightError(x, e float64) float64 {
	w := math.Exp(x)
	off := w * math.Expm1(e)
	if e > 1 { // else one factor may be 0 and the other one infinite
		off = math.Exp(x+e) - w
	}
	if most := math.Max(w, 1-w); !(off <= most) { // e is infinite where a score mod is
		off = most
	}
	return off
}

// tiny bounds the loss of flushed subnormal numbers in an output.
func tiny(out backend.DType, keys int, sumAbsV float64) float64 {
	t := 0x1p-125 * (sumAbsV + float64(keys))
	if out == backend.F16 {
		t += 0x1p-25 // half of the smallest f16
	}
	return t
}

// Off returns |got - ref| / bound; at most 1 is correct. It is +Inf if only one of them is NaN
// or if they are different and one is infinite.
func Off(got, ref, bound float64) float64 {
	if math.IsNaN(got) && math.IsNaN(ref) || got == ref {
		return 0
	}
	if r := math.Abs(got-ref) / bound; r >= 0 {
		return r
	}
	return math.Inf(1) // one of them, or the bound, is NaN
}

// Worst is the value with the largest error relative to its bound.
type Worst struct {
	Off, Error, Bound float64 // |got - ref| / bound, over 1 is wrong; |got - ref|; bound
	Got, Ref          float64
	Where             string
	Considered        int // values compared
}

// See compares a value; where returns its name and is called only for a new worst.
func (w *Worst) See(got, ref, bound float64, where func() string) {
	off := Off(got, ref, bound)
	if w.Considered == 0 || off > w.Off {
		*w = Worst{Off: off, Error: math.Abs(got - ref), Bound: bound, Got: got, Ref: ref, Where: where(), Considered: w.Considered}
	}
	w.Considered++
}

// Err returns an error that describes the worst value if it is wrong.
func (w *Worst) Err() error {
	if w.Off <= 1 {
		return nil
	}
	return fmt.Errorf("%s is %v, should be %v: off by %.3g, bound %.3g", w.Where, w.Got, w.Ref, w.Error, w.Bound)
}
