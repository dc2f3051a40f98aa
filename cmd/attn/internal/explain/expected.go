package explain

import (
	"context"
	"fmt"
	"math"
	"slices"

	"github.com/seed90331342/attn/cmd/internal/matrix"
)

// u is the unit roundoff of float32.
const u = 0x1p-24

// fuzzy is a number in float64 and the largest honest error of a float32
// computation of it: inputs were printed with few digits, and float32 rounds (to
// first order in u, in any order of summation, with WGSL's accuracy of exp and
// division).
type fuzzy struct{ mid, rad float64 }

// dot returns Σ a·b. The products carry the radii of the operands. The n roundings
// of the sum add (n+1)·u·Σ|ab|. Nothing is rounded where all numbers are integers and
// sum up to at most 2^24, and where one product, by 1, is not 0.
func dot(a, b []fuzzy) fuzzy {
	var sum, carried, size float64
	terms, whole, ones := 0, true, true
	for i, x := range a {
		y := b[i]
		if x == (fuzzy{}) || y == (fuzzy{}) {
			continue
		}
		terms++
		sum += x.mid * y.mid
		size += math.Abs(x.mid * y.mid)
		carried += math.Abs(x.mid)*y.rad + math.Abs(y.mid)*x.rad + x.rad*y.rad
		whole = whole && x.mid == math.Trunc(x.mid) && y.mid == math.Trunc(y.mid)
		ones = ones && (x.mid == 1 || y.mid == 1)
	}
	if exact := whole && size <= 1<<24 || ones && terms <= 1; !exact {
		carried += float64(len(a)+1) * u * size
	}
	return fuzzy{sum, carried}
}

// product returns a·bᵀ.
func product(a, b [][]fuzzy) [][]fuzzy {
	out := make([][]fuzzy, len(a))
	for i := range a {
		for j := range b {
			out[i] = append(out[i], dot(a[i], b[j]))
		}
	}
	return out
}

func transposed(a [][]fuzzy) [][]fuzzy {
	out := make([][]fuzzy, len(a[0]))
	for _, row := range a {
		for j, x := range row {
			out[j] = append(out[j], x)
		}
	}
	return out
}

// rows returns n rows of an input, starting at element at. A number with as many
// decimals as the results of the file was rounded like them, by up to half a unit
// of its last decimal.
func (wt *walkthrough) rows(a *numbers, at, n int) [][]fuzzy {
	cols := a.shape[len(a.shape)-1]
	out := make([][]fuzzy, n)
	for i := at; i < at+n*cols; i++ {
		f := fuzzy{mid: a.data[i], rad: math.Abs(a.data[i] - float64(float32(a.data[i])))}
		if d := a.decimals[i]; wt.Digits != nil && d > 0 && d >= *wt.Digits {
			f.rad += 0.5 * math.Pow10(-d)
		}
		out[(i-at)/cols] = append(out[(i-at)/cols], f)
	}
	return out
}

// solve computes the fields of batch b in float64, by plain loops that share nothing
// with the backends. decimals are those of the rounded variant, -1 for none.
func (wt *walkthrough) solve(b int, scale float64, decimals int) map[string][][]fuzzy {
	x := wt.rows(wt.x, b*wt.seq*wt.model, wt.seq)
	q, k, v := wt.project(x, wt.projections[0]), wt.project(x, wt.projections[1]), wt.project(x, wt.projections[2])
	scores := product(q, k)
	var weights, rounded, weighted [][]fuzzy
	for _, row := range scores {
		for j, s := range row {
			row[j] = scaled(s, scale)
		}
		weights = append(weights, softmax(wt.capped(row)))
	}
	fields := map[string][][]fuzzy{"queries": q, "keys": k, "values": v, "scores": scores, "softmax": weights, "outputs_exact": product(weights, transposed(v))}
	if decimals < 0 {
		return fields
	}
	for _, row := range weights {
		mids := make([]float64, len(row))
		for j, w := range row {
			mids[j] = w.mid
		}
		var exact []fuzzy
		for _, w := range roundRow(mids, decimals) {
			exact = append(exact, fuzzy{w, math.Abs(w - float64(float32(w)))})
		}
		rounded = append(rounded, exact)
	}
	for key, values := range v {
		for _, row := range rounded {
			weighted = append(weighted, product([][]fuzzy{row[key : key+1]}, transposed([][]fuzzy{values}))...)
		}
	}
	fields["softmax_rounded"], fields["weighted_values_rounded"], fields["outputs_rounded"] = rounded, weighted, product(rounded, transposed(v))
	return fields
}

// project computes x·w + b: the bias is one more product, with 1.
func (wt *walkthrough) project(x [][]fuzzy, p projection) [][]fuzzy {
	var w [][]fuzzy
	if p.w != nil {
		w = wt.rows(p.w, 0, wt.model)
	} else {
		for i := range wt.model {
			w = append(w, make([]fuzzy, wt.model))
			w[i][i].mid = 1
		}
	}
	if p.b == nil {
		return product(x, transposed(w))
	}
	y := make([][]fuzzy, len(x))
	for i, row := range x {
		y[i] = append(slices.Clone(row), fuzzy{mid: 1})
	}
	return product(y, transposed(append(w, wt.rows(p.b, 0, 1)[0])))
}

// scaled multiplies by the scale, rounded to float32 as in backends, and rounds
// once more unless the product is exact.
func scaled(s fuzzy, scale float64) fuzzy {
	f := float64(float32(scale))
	y := fuzzy{scale * s.mid, math.Abs(f)*s.rad + math.Abs(f-scale)*math.Abs(s.mid)}
	if float64(float32(f*s.mid)) != f*s.mid {
		y.rad += u * math.Abs(y.mid)
	}
	return y
}

// capped returns a row of scores after the softcap, whose slope is at most 1.
func (wt *walkthrough) capped(row []fuzzy) []fuzzy {
	if wt.Softcap == 0 {
		return row
	}
	out := make([]fuzzy, len(row))
	for j, s := range row {
		out[j] = fuzzy{wt.Softcap * math.Tanh(s.mid/wt.Softcap), s.rad + 8*u*math.Abs(s.mid)}
	}
	return out
}

// softmax uses exact interval arithmetic for the radii of the scores: weight j is
// largest when score j is at its upper end and all others at their lower. The
// arithmetic adds, relative to a weight: exp of x = s - max has an error of 3+2|x|
// ulp in WGSL and x itself is rounded, the sum has n roundings and the mean error of
// its terms, the division 2.5 ulp; an ulp is at most 2u.
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

// finding is a field that agrees, with the largest allowed difference of its
// elements.
type finding struct {
	field   string
	count   int
	allowed float64
}

// checkExpected compares the computed steps with the expected values of the file.
// Its error names the first element that differs.
func checkExpected(ctx context.Context, wt *walkthrough, st *steps) ([]finding, error) {
	if len(wt.expected) == 0 {
		return nil, nil
	}
	got := map[string][]float32{
		"queries": st.q.Data, "keys": st.k.Data, "values": st.v.Data,
		"scores": st.scores.Data, "softmax": st.weights.Data, "outputs_exact": st.output.Data,
	}
	rounding := wt.roundingDecimals()
	if rounding >= 0 {
		w, o, err := st.rounded(ctx, rounding)
		if err != nil {
			return nil, err
		}
		got["softmax_rounded"], got["outputs_rounded"] = w.Data, o.Data
		for b := range wt.batch {
			got["weighted_values_rounded"] = append(got["weighted_values_rounded"], weighted(w.At(b), st.v.At(b))...)
		}
	}
	refs := map[string][]fuzzy{}
	for b := range wt.batch {
		for field, rows := range wt.solve(b, st.scale, rounding) {
			refs[field] = append(refs[field], slices.Concat(rows...)...)
		}
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
				return nil, fmt.Errorf("%s: %s%s is %v, the file expects %v (allowed difference %.2g)",
					wt.path, field, matrix.Index(want.shape, i), got[field][i], w, allowed)
			}
		}
		found = append(found, f)
	}
	return found, nil
}

// roundingDecimals returns the decimals of the rounded variant of the file: those of
// softmax_rounded, one without it (as in the published walk-throughs), -1 for a file
// without the variant.
func (wt *walkthrough) roundingDecimals() int {
	switch {
	case wt.expected["softmax_rounded"] != nil:
		return max(1, wt.expected["softmax_rounded"].maxDecimals())
	case wt.expected["weighted_values_rounded"] != nil, wt.expected["outputs_rounded"] != nil:
		return 1
	}
	return -1
}

// allowed returns the largest allowed difference from the expected value want: the
// uncertainty of the computation, and half a unit of the last printed digit of want.
// That is a decimal where the file sets digits, else the 7th significant digit, and
// nothing for numbers that float32 represents exactly. outputs_exact is in float64.
func (wt *walkthrough) allowed(field string, want float64, ref fuzzy) float64 {
	switch {
	case field == "outputs_exact":
		return ref.rad
	case wt.Digits != nil:
		// Decimal fractions have no exact binary form: 1e-12 is far below any
		// printed digit and far above float64's own rounding.
		return ref.rad + 0.5*math.Pow10(-*wt.Digits) + 1e-12
	case ref.rad == 0 || want == 0:
		return ref.rad
	}
	return ref.rad + 0.5*math.Pow10(int(math.Floor(math.Log10(math.Abs(want))))-6)
}
