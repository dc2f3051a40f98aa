package main

import (
	"context"
	"fmt"
	"math"
)

// u is the unit roundoff of float32.
const u = 0x1p-24

// fuzzy is a number in float64 and how far a float32 computation may honestly
// be from it: because the inputs were printed with few digits, and because
// float32 rounds (to first order in u, in any order of summation, with WGSL's
// accuracy of exp and of division).
type fuzzy struct{ mid, rad float64 }

// dot adds up a·b: the products carry the operands' radii, the n roundings of
// the sum add (n+1)·u·Σ|ab|, unless all of it is integers below 2^24, which
// float32 adds exactly.
func dot(n int, a, b func(i int) fuzzy) fuzzy {
	var sum, carried, size float64
	exact := true
	for i := range n {
		x, y := a(i), b(i)
		sum += x.mid * y.mid
		size += math.Abs(x.mid * y.mid)
		carried += math.Abs(x.mid)*y.rad + math.Abs(y.mid)*x.rad + x.rad*y.rad
		exact = exact && x.mid == math.Trunc(x.mid) && y.mid == math.Trunc(y.mid)
	}
	if exact && size <= 1<<24 {
		return fuzzy{sum, carried}
	}
	return fuzzy{sum, carried + float64(n+1)*u*size}
}

// reference is a walk-through in float64, one batch: plain loops that share
// nothing with the backends.
type reference struct {
	q, k, v, scores, weights, output [][]fuzzy
}

// leaf returns element i of an input. A number that is written with as many
// decimals as the file prints its results with was rounded too: it may be off by
// half a unit of its last decimal.
func (wt *walkthrough) leaf(a *array, i int) fuzzy {
	f := fuzzy{mid: a.data[i], rad: math.Abs(a.data[i] - float64(float32(a.data[i])))}
	if d := a.decimals[i]; wt.Digits != nil && d > 0 && d >= *wt.Digits {
		f.rad += 0.5 * math.Pow10(-d)
	}
	return f
}

// solve computes batch b with the scale of the call.
func (wt *walkthrough) solve(b int, scale float64) *reference {
	var r reference
	xAt := func(i, m int) fuzzy { return wt.leaf(wt.x, (b*wt.seq+i)*wt.model+m) }
	for n, p := range wt.projections() {
		y := make([][]fuzzy, wt.seq)
		for i := range y {
			y[i] = make([]fuzzy, p.columns(wt.model))
			for c := range y[i] {
				y[i][c] = wt.project(p, c, func(m int) fuzzy { return xAt(i, m) })
			}
		}
		*[]*[][]fuzzy{&r.q, &r.k, &r.v}[n] = y
	}
	r.scores = make([][]fuzzy, wt.seq)
	r.weights = make([][]fuzzy, wt.seq)
	r.output = make([][]fuzzy, wt.seq)
	for i := range wt.seq {
		r.scores[i] = make([]fuzzy, wt.seq)
		for j := range r.scores[i] {
			s := dot(wt.dim, func(d int) fuzzy { return r.q[i][d] }, func(d int) fuzzy { return r.k[j][d] })
			r.scores[i][j] = scaled(s, scale)
		}
		r.weights[i] = softmax(r.scores[i])
		r.output[i] = weigh(r.weights[i], r.v)
	}
	return &r
}

func (wt *walkthrough) project(p projection, c int, x func(m int) fuzzy) fuzzy {
	if p.w == nil { // the identity: exact, plus the bias
		y := x(c)
		if p.b != nil {
			bias := wt.leaf(p.b, c)
			y = dot(2, func(i int) fuzzy { return []fuzzy{y, bias}[i] }, func(int) fuzzy { return fuzzy{mid: 1} })
		}
		return y
	}
	n := wt.model
	w := func(m int) fuzzy { return wt.leaf(p.w, m*p.w.shape[1]+c) }
	if p.b == nil {
		return dot(n, x, w)
	}
	// The bias is one more product, with 1.
	return dot(n+1,
		func(m int) fuzzy {
			if m == n {
				return fuzzy{mid: 1}
			}
			return x(m)
		},
		func(m int) fuzzy {
			if m == n {
				return wt.leaf(p.b, c)
			}
			return w(m)
		})
}

// scaled multiplies by the scale, rounded to float32 as backends have it, and
// rounds once more unless the product is exact.
func scaled(s fuzzy, scale float64) fuzzy {
	f := float64(float32(scale))
	y := fuzzy{scale * s.mid, math.Abs(f)*s.rad + math.Abs(f-scale)*math.Abs(s.mid)}
	if float64(float32(f*s.mid)) != f*s.mid {
		y.rad += u * math.Abs(y.mid)
	}
	return y
}

// softmax is exact interval arithmetic for what the scores carry: weight j is
// largest when score j is at its upper end and all others at their lower. The
// arithmetic adds, relative to a weight: exp of x = s - max is good to 3+2|x|
// ulp in WGSL and x itself is rounded, the sum has n roundings and the mean of
// its terms' errors, the division 2.5 ulp; an ulp is at most 2u.
func softmax(s []fuzzy) []fuzzy {
	top := math.Inf(-1)
	for _, x := range s {
		top = math.Max(top, x.mid)
	}
	ratio := func(j int, sign float64) float64 { // weight j with score j shifted by sign, the others against it
		own := math.Exp(s[j].mid - top + sign*s[j].rad)
		sum := own
		for i, x := range s {
			if i != j {
				sum += math.Exp(x.mid - top - sign*x.rad)
			}
		}
		return own / sum
	}
	expError := func(x float64) float64 { return u * (2*(3+2*math.Abs(x)) + math.Abs(x)) }
	w := make([]fuzzy, len(s))
	denominator := float64(len(s)) * u
	for j := range s {
		w[j].mid = ratio(j, 0)
		denominator += w[j].mid * expError(s[j].mid-top)
	}
	for j := range s {
		w[j].rad = math.Max(ratio(j, 1)-w[j].mid, w[j].mid-ratio(j, -1)) +
			w[j].mid*(expError(s[j].mid-top)+denominator+5*u)
	}
	return w
}

// weigh computes one row of weights·v.
func weigh(w []fuzzy, v [][]fuzzy) []fuzzy {
	o := make([]fuzzy, len(v[0]))
	for c := range o {
		o[c] = dot(len(w), func(j int) fuzzy { return w[j] }, func(j int) fuzzy { return v[j][c] })
	}
	return o
}

// finding is how a field with expected values compares: the allowed difference
// that is largest among its elements.
type finding struct {
	field   string
	count   int
	allowed float64
}

// checkExpected compares what the backend computed with what the file expects,
// and returns an error that names the first element that differs.
func checkExpected(ctx context.Context, wt *walkthrough, st *steps) ([]finding, error) {
	if len(wt.expected) == 0 {
		return nil, nil
	}
	got := map[string][]float32{
		"queries": st.q.data, "keys": st.k.data, "values": st.v.data,
		"scores": st.scores.data, "softmax": st.weights.data, "outputs_exact": st.output.data,
	}
	rounding := wt.roundingDecimals()
	if rounding >= 0 {
		w, o, err := st.rounded(ctx, rounding)
		if err != nil {
			return nil, err
		}
		got["softmax_rounded"], got["outputs_rounded"] = w.data, o.data
		for b := range wt.batch {
			got["weighted_values_rounded"] = append(got["weighted_values_rounded"], weighted(w.at(b), st.v.at(b))...)
		}
	}
	refs := map[string][]fuzzy{}
	for b := range wt.batch {
		wt.solve(b, st.scale).collect(refs, rounding)
	}
	var found []finding
	for _, field := range expectedFields {
		want := wt.expected[field]
		if want == nil {
			continue
		}
		f := finding{field: field, count: len(want.data)}
		for i, w := range want.data {
			allowed := wt.allowed(field, w, refs[field][i])
			f.allowed = max(f.allowed, allowed)
			if g := float64(got[field][i]); !(math.Abs(g-w) <= allowed) {
				return nil, fmt.Errorf("%s: %s%s is %v, the file expects %v (allowed difference %.2g)", wt.path, field, want.index(i), got[field][i], w, allowed)
			}
		}
		found = append(found, f)
	}
	return found, nil
}

// roundingDecimals is how many decimals the rounded variant of the file keeps:
// those that softmax_rounded is written with, one where there is none (as in
// the published walk-throughs), -1 when the file has no such variant.
func (wt *walkthrough) roundingDecimals() int {
	switch {
	case wt.expected["softmax_rounded"] != nil:
		return max(1, wt.expected["softmax_rounded"].maxDecimals())
	case wt.expected["weighted_values_rounded"] != nil, wt.expected["outputs_rounded"] != nil:
		return 1
	}
	return -1
}

// collect appends a batch to what the fields should hold.
func (r *reference) collect(refs map[string][]fuzzy, rounding int) {
	for field, rows := range map[string][][]fuzzy{
		"queries": r.q, "keys": r.k, "values": r.v, "scores": r.scores, "softmax": r.weights, "outputs_exact": r.output,
	} {
		for _, row := range rows {
			refs[field] = append(refs[field], row...)
		}
	}
	if rounding < 0 {
		return
	}
	rounded := make([][]fuzzy, len(r.weights))
	for i, row := range r.weights {
		mids := make([]float64, len(row))
		for j, w := range row {
			mids[j] = w.mid
		}
		for _, w := range roundRow(mids, rounding) {
			rounded[i] = append(rounded[i], fuzzy{w, math.Abs(w - float64(float32(w)))})
		}
		refs["softmax_rounded"] = append(refs["softmax_rounded"], rounded[i]...)
		refs["outputs_rounded"] = append(refs["outputs_rounded"], weigh(rounded[i], r.v)...)
	}
	for key := range r.v {
		for query := range rounded {
			w := rounded[query][key]
			for _, v := range r.v[key] {
				refs["weighted_values_rounded"] = append(refs["weighted_values_rounded"],
					dot(1, func(int) fuzzy { return w }, func(int) fuzzy { return v }))
			}
		}
	}
}

// allowed is how far a result may be from the value want that the file prints:
// what is uncertain about the computation, and half a unit of the last digit
// that want is printed with. That is a decimal where the file says digits; else the 7th significant digit, and nothing for numbers that float32 has
// exactly. outputs_exact is in float64, so that only the computation counts.
func (wt *walkthrough) allowed(field string, want float64, ref fuzzy) float64 {
	switch {
	case field == "outputs_exact":
		return ref.rad
	case wt.Digits != nil:
		// Decimal fractions have no exact binary form: 1e-12 is far below any
		// digit that is printed and far above float64's own rounding.
		return ref.rad + 0.5*math.Pow10(-*wt.Digits) + 1e-12
	case ref.rad == 0 || want == 0:
		return ref.rad
	}
	return ref.rad + 0.5*math.Pow10(int(math.Floor(math.Log10(math.Abs(want))))-6)
}
