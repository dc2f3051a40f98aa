package explain

import (
	"fmt"
	"math"

	"github.com/seed90331342/attn/backend/oracle"
	"github.com/seed90331342/attn/cmd/internal/matrix"
)

// u is the unit roundoff of float32.
const u = 0x1p-24

// tiny bounds what is lost where a device flushes subnormal numbers, as in package oracle.
const tiny = 0x1p-125

// reference is a step in float64, with the largest error of each number that its inputs explain:
// they were printed with few digits, and are rounded to float32.
type reference struct{ values, radius []float64 }

func (r *reference) add(value, radius float64) {
	r.values, r.radius = append(r.values, value), append(r.radius, radius)
}

// radius returns the error of number i of an input: its rounding to float32 and, if it has as
// many decimals as the results of the file, half a unit of the last one.
func (wt *walkthrough) radius(a *numbers, i int) float64 {
	r := math.Abs(a.data[i] - float64(float32(a.data[i])))
	if d := a.decimals[i]; wt.Digits != nil && d > 0 && d >= *wt.Digits {
		r += 0.5 * math.Pow10(-d)
	}
	return r
}

// wrong reports a number of the device outside the bound of float32 arithmetic around the
// reference. size is the largest intermediate number: beyond the range of float32 results are
// printed as they are. A bound is NaN for scores so large that their rounding decides the weights.
func wrong(step string, got float32, want, bound, size float64) error {
	if math.IsNaN(bound) || !(size < math.MaxFloat32) || oracle.Off(float64(got), want, bound) <= 1 {
		return nil
	}
	return fmt.Errorf("%s has %v, which is %v in float64: the difference may be %.2g", step, got, want, bound)
}

// project computes x·w + b in float64 and compares the device's result with it.
func (wt *walkthrough) project(p projection, got []float32) (*reference, error) {
	r, cols := &reference{}, p.columns(wt.model)
	for i := range wt.batch * wt.seq {
		for c := range cols {
			var sum, radius, size float64
			at := i * wt.model
			if p.w == nil {
				sum, radius = wt.x.data[at+c], wt.radius(wt.x, at+c)
				size = math.Abs(sum)
			} else {
				for m := range wt.model {
					x, w := wt.x.data[at+m], p.w.data[m*cols+c]
					rx, rw := wt.radius(wt.x, at+m), wt.radius(p.w, m*cols+c)
					sum += x * w
					size += math.Abs(x * w)
					radius += math.Abs(x)*rw + math.Abs(w)*rx + rx*rw
				}
			}
			if p.b != nil {
				sum += p.b.data[c]
				size += math.Abs(p.b.data[c])
				radius += wt.radius(p.b, c)
			}
			r.add(sum, radius)
			// A sum of n terms in any order has n roundings, and loses subnormal terms.
			bound := radius + float64(wt.model+2)*(u*size+tiny)
			if err := wrong(p.name, got[i*cols+c], sum, bound, size); err != nil {
				return nil, err
			}
		}
	}
	return r, nil
}

// rounding returns the largest error of the device's numbers as the inputs of the next step.
func (r *reference) rounding(got []float32) (most float64) {
	for i, x := range r.values {
		most = max(most, r.radius[i]+math.Abs(x-float64(got[i])))
	}
	return most
}

// references computes every step in float64, attention with package oracle on the queries, keys
// and values of the device, and compares the device's steps with it. decimals are those of the
// rounded variant, -1 for none.
func (wt *walkthrough) references(st *steps, decimals int) (map[string]*reference, error) {
	refs := map[string]*reference{}
	for _, field := range expectedFields {
		refs[field] = &reference{}
	}
	var radius [3]float64 // of queries, keys and values
	for i, got := range []matrix.Matrix{st.q, st.k, st.v} {
		r, err := wt.project(wt.projections[i], got.Data)
		if err != nil {
			return nil, err
		}
		refs[expectedFields[i]], radius[i] = r, r.rounding(got.Data)
	}
	for b := range wt.batch {
		v := st.v.At(b)
		rounded := make([][]float64, wt.seq)
		for i := range wt.seq {
			weights, err := wt.attend(st, b, i, radius, refs)
			if err != nil {
				return nil, err
			}
			if decimals < 0 {
				continue
			}
			rounded[i] = roundRow(weights, decimals)
			for _, w := range rounded[i] {
				refs["softmax_rounded"].add(w, 0)
			}
			for c := range v.Cols {
				sum := 0.0
				for j, w := range rounded[i] {
					sum += w * float64(v.Row(j)[c])
				}
				refs["outputs_rounded"].add(sum, radius[2])
			}
		}
		for j := 0; decimals >= 0 && j < v.Rows; j++ { // [key][query][channel]
			for _, w := range rounded {
				for _, x := range v.Row(j) {
					refs["weighted_values_rounded"].add(w[j]*float64(x), w[j]*radius[2])
				}
			}
		}
	}
	return refs, nil
}

// attend adds row i of batch b to scores, softmax and outputs_exact, from queries, keys and
// values with the errors radius, and returns the weights.
func (wt *walkthrough) attend(st *steps, b, i int, radius [3]float64, refs map[string]*reference) ([]float64, error) {
	q, k, v := st.q.At(b).Row(i), st.k.At(b), st.v.At(b)
	row := oracle.Row{Q: q, K: k.Data, V: v.Data, Dv: v.Cols, Scale: float32(st.scale), Softcap: float32(wt.Softcap)}
	answer := oracle.Solve(row)
	row.V, row.Softcap = nil, 0
	moved, largest := 0.0, 0.0 // the largest error of a score, and the largest number before one
	for j, s := range oracle.Solve(row).Scores {
		var size, r float64
		for d, y := range k.Row(j) {
			x, y := math.Abs(float64(q[d])), math.Abs(float64(y))
			size += x * y
			r += x*radius[1] + y*radius[0] + radius[0]*radius[1]
		}
		r = math.Abs(st.scale)*r + math.Abs(st.scale-float64(row.Scale))*size
		moved, largest = max(moved, r), max(largest, size*max(1, math.Abs(st.scale)))
		refs["scores"].add(s, r)
		bound := u * (oracle.Lambda*math.Sqrt(float64(len(q))) + 3) * math.Abs(st.scale) * size
		bound += tiny * (1 + math.Abs(st.scale)*float64(len(q)))
		if err := wrong("a score", st.scores.At(b).Row(i)[j], s, bound, size*max(1, math.Abs(st.scale))); err != nil {
			return nil, err
		}
	}
	// Scores that move by at most e change a weight w by at most w·(1-w)·(exp(2e) - 1): by the most
	// where its own score grows and the others fall.
	change := func(w float64) float64 { return w * (1 - w) * math.Expm1(2*moved) }
	for j, w := range answer.Weights {
		refs["softmax"].add(w, change(w))
		if err := wrong("the softmax", st.weights.At(b).Row(i)[j], w, answer.WeightBound*w+tiny, largest); err != nil {
			return nil, err
		}
	}
	for c, o := range answer.O {
		r, size := radius[2], largest
		for j, w := range answer.Weights {
			size = max(size, math.Abs(float64(v.Row(j)[c]))*float64(v.Rows))
			r += change(w) * (math.Abs(float64(v.Row(j)[c])) + radius[2])
		}
		refs["outputs_exact"].add(o, r)
		if err := wrong("the output", st.output.At(b).Row(i)[c], o, answer.OBound[c], size); err != nil {
			return nil, err
		}
	}
	return answer.Weights, nil
}

// finding is a field that agrees, with the largest allowed difference of its
// elements.
type finding struct {
	field   string
	count   int
	allowed float64
}

// check compares the steps of the device with float64, and float64 with the expected values of
// the file. Its error names the first element that differs.
func (wt *walkthrough) check(st *steps) ([]finding, error) {
	refs, err := wt.references(st, wt.roundingDecimals())
	if err != nil {
		return nil, fmt.Errorf("%s: %w", wt.path, err)
	}
	var found []finding
	for _, field := range expectedFields {
		want := wt.expected[field]
		if want == nil {
			continue
		}
		f := finding{field: field, count: len(want.data)}
		for i, w := range want.data {
			ref := refs[field].values[i]
			allowed := wt.allowed(field, w, ref, refs[field].radius[i])
			f.allowed = max(f.allowed, allowed)
			if !(math.Abs(ref-w) <= allowed) {
				return nil, fmt.Errorf("%s: %s%s is %.9g, the file expects %v (allowed difference %.2g)",
					wt.path, field, matrix.Index(want.shape, i), ref, w, allowed)
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

// allowed returns the largest allowed difference of the expected value want from the reference:
// the error of the inputs, and half a unit of the last printed digit of want. That is a decimal
// where the file sets digits, else the 7th significant digit with two roundings of the float32
// arithmetic behind it, and nothing for whole numbers. outputs_exact is in float64, and rounded
// weights are decimals.
func (wt *walkthrough) allowed(field string, want, ref, radius float64) float64 {
	whole := want == math.Trunc(want) && ref == math.Trunc(ref)
	// Decimal fractions have no exact binary form: 1e-12 is far below any printed digit and far
	// above float64's own rounding.
	exact := radius + 1e-12*max(1, math.Abs(want))
	switch {
	case field == "outputs_exact", field == "softmax_rounded":
		return exact
	case wt.Digits != nil:
		return exact + 0.5*math.Pow10(-*wt.Digits)
	case whole:
		return radius
	case want == 0:
		return radius + tiny
	}
	return radius + 2*u*math.Abs(want) + 0.5*math.Pow10(int(math.Floor(math.Log10(math.Abs(want))))-6)
}
