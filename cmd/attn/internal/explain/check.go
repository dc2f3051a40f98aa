package explain

import (
	"fmt"
	"math"
	"slices"

	"github.com/seed90331342/attn/backend/oracle"
	"github.com/seed90331342/attn/cmd/internal/matrix"
)

// u is the unit roundoff of float32.
const u = 0x1p-24

// tiny bounds what is lost where a device flushes subnormal numbers, as in package oracle.
const tiny = 0x1p-125

// estimate is a number in float64 with the largest error that the inputs explain: they were
// printed with few digits, or are rounded to float32.
type estimate struct{ value, radius float64 }

func (a estimate) plus(b estimate) estimate { return estimate{a.value + b.value, a.radius + b.radius} }

func (a estimate) times(b estimate) estimate {
	return estimate{a.value * b.value, math.Abs(a.value)*b.radius + math.Abs(b.value)*a.radius + a.radius*b.radius}
}

// input returns number i of an array: its error is its rounding to float32 and, if the array has
// as many decimals as the expected values, half a unit of the last one.
func (wt *walkthrough) input(a *numbers, i int) estimate {
	x := a.data[i]
	radius := math.Abs(x - float64(float32(x)))
	if wt.Digits != nil && *wt.Digits > 0 && a.decimals >= *wt.Digits {
		radius += 0.5 * math.Pow10(-*wt.Digits)
	}
	return estimate{x, radius}
}

// project computes x·w + b. sizes are the sums of the magnitudes of the terms.
func (wt *walkthrough) project(p projection) (y []estimate, sizes []float64) {
	cols := p.columns(wt.model)
	for row := range wt.batch * wt.seq {
		for c := range cols {
			var sum estimate
			size := 0.0
			add := func(x estimate) { sum, size = sum.plus(x), size+math.Abs(x.value) }
			if p.w == nil {
				add(wt.input(wt.x, row*wt.model+c))
			} else {
				for m := range wt.model {
					add(wt.input(wt.x, row*wt.model+m).times(wt.input(p.w, m*cols+c)))
				}
			}
			if p.b != nil {
				add(wt.input(p.b, c))
			}
			y, sizes = append(y, sum), append(sizes, size)
		}
	}
	return y, sizes
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

// references computes the fields with expected values in float64, attention with package oracle on
// the queries, keys and values of the device, and compares the device's steps with it.
func (wt *walkthrough) references(st *steps) (map[string][]estimate, error) {
	refs := map[string][]estimate{}
	var off [3]float64 // the largest error of queries, keys and values
	for i, got := range []matrix.Matrix{st.q, st.k, st.v} {
		want, sizes := wt.project(wt.projections[i])
		for n, x := range got.Data {
			// A sum of n terms in any order has n roundings, and loses subnormal terms.
			bound := want[n].radius + float64(wt.model+2)*(u*sizes[n]+tiny)
			if err := wrong(wt.projections[i].name, x, want[n].value, bound, sizes[n]); err != nil {
				return nil, err
			}
			off[i] = max(off[i], want[n].radius+math.Abs(want[n].value-float64(x)))
		}
		refs[expectedFields[i]] = want
	}
	for b := range wt.batch {
		for i := range wt.seq {
			if err := wt.attend(st, b, i, off, refs); err != nil {
				return nil, err
			}
		}
	}
	if st.rounded != nil {
		return refs, weigh(st.rounded, off[2], refs)
	}
	return refs, nil
}

// weigh compares what follows from the rounded weights of st with float64, and adds it to refs. off is the error of values.
func weigh(st *steps, off float64, refs map[string][]estimate) error {
	for b := range st.weights.Batch {
		weights, v, output := st.weights.At(b), st.v.At(b), st.output.At(b)
		sums := make([]estimate, len(output.Data))
		sizes := make([]float64, len(sums))
		var all []estimate // of weights, a query after the other
		for _, w := range weights.Data {
			unit := math.Pow10(st.decimals)
			all = append(all, estimate{math.Round(float64(w)*unit) / unit, u * float64(w)})
		}
		for key := range weights.Cols {
			for query := range weights.Rows {
				for c, x := range v.Row(key) {
					y := all[query*weights.Cols+key].times(estimate{float64(x), off})
					refs[roundedFields[1]] = append(refs[roundedFields[1]], y)
					sums[query*v.Cols+c] = sums[query*v.Cols+c].plus(y)
					sizes[query*v.Cols+c] += math.Abs(y.value)
				}
			}
		}
		for i, y := range sums {
			if err := wrong("the output of rounded weights", output.Data[i], y.value, y.radius+float64(v.Rows+2)*(u*sizes[i]+tiny), sizes[i]); err != nil {
				return err
			}
		}
		refs[roundedFields[0]] = append(refs[roundedFields[0]], all...)
		refs[roundedFields[2]] = append(refs[roundedFields[2]], sums...)
	}
	return nil
}

// attend checks row i of batch b, and adds it to the scores, weights and outputs. off has the
// errors of queries, keys and values.
func (wt *walkthrough) attend(st *steps, b, i int, off [3]float64, refs map[string][]estimate) error {
	add := func(field string, x estimate) { refs[field] = append(refs[field], x) }
	q, k, v := st.q.At(b).Row(i), st.k.At(b), st.v.At(b)
	row := oracle.Row{Q: q, K: k.Data, V: v.Data, Dv: v.Cols, Scale: float32(wt.scale()), Softcap: float32(wt.Softcap)}
	answer := oracle.Solve(row)
	row.V, row.Softcap = nil, 0
	factor := estimate{wt.scale(), math.Abs(wt.scale() - float64(row.Scale))}
	scale := math.Abs(wt.scale())
	moved, largest := 0.0, 0.0 // the largest error of a score, and the largest number before one
	for j, s := range oracle.Solve(row).Scores {
		var sum estimate // of magnitudes
		for d, y := range k.Row(j) {
			sum = sum.plus(estimate{math.Abs(float64(q[d])), off[0]}.times(estimate{math.Abs(float64(y)), off[1]}))
		}
		size, radius := sum.value*max(1, scale), sum.times(factor).radius
		moved, largest = max(moved, radius), max(largest, size)
		add("scores", estimate{s, radius})
		bound := u*(oracle.Lambda*math.Sqrt(float64(len(q)))+3)*scale*sum.value + tiny*(1+scale*float64(len(q)))
		if err := wrong("a score", st.scores.At(b).Row(i)[j], s, bound, size); err != nil {
			return err
		}
	}
	// Scores that move by at most e change a weight w by at most w·(1-w)·(exp(2e) - 1): by the most
	// where its own score grows and the others fall.
	weight := func(w float64) estimate { return estimate{w, w * (1 - w) * math.Expm1(2*moved)} }
	for j, w := range answer.Weights {
		add("softmax", weight(w))
		if err := wrong("the softmax", st.weights.At(b).Row(i)[j], w, answer.WeightBounds[j], largest); err != nil {
			return err
		}
	}
	for c, o := range answer.O {
		var sum estimate
		size := largest
		for j, w := range answer.Weights {
			x := math.Abs(float64(v.Row(j)[c]))
			sum, size = sum.plus(weight(w).times(estimate{x, off[2]})), max(size, x*float64(v.Rows))
		}
		add("outputs_exact", estimate{o, sum.radius})
		if err := wrong("the output", st.output.At(b).Row(i)[c], o, answer.OBound[c], size); err != nil {
			return err
		}
	}
	return nil
}

// finding is a field that agrees, with the largest allowed difference of its elements.
type finding struct {
	field   string
	count   int
	allowed float64
}

// check compares the steps of the device with float64, and float64 with the expected values of
// the file. Its error names the first element that differs.
func (wt *walkthrough) check(st *steps) (found []finding, err error) {
	refs, err := wt.references(st)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", wt.path, err)
	}
	fields := expectedFields
	if n := wt.roundedDecimals(); st.rounded != nil && (n < 0 || n == st.rounded.decimals) {
		fields = slices.Concat(fields, roundedFields)
	}
	for _, field := range fields {
		want := wt.expected[field]
		if want == nil {
			continue
		}
		f := finding{field: field, count: len(want.data)}
		for i, w := range want.data {
			ref := refs[field][i]
			allowed := ref.radius + wt.printed(field, w, ref.value)
			f.allowed = max(f.allowed, allowed)
			if !(math.Abs(ref.value-w) <= allowed) {
				return nil, fmt.Errorf("%s: %s%s is %.9g, the file expects %v (allowed difference %.2g)",
					wt.path, field, matrix.Index(want.shape, i), ref.value, w, allowed)
			}
		}
		found = append(found, f)
	}
	return found, nil
}

// printed returns how far the expected value want may be off: half a unit of its last printed digit. That is a decimal
// where the file sets digits, else the 7th significant digit with two roundings of the float32 arithmetic behind it,
// and nothing for whole numbers. outputs_exact is in float64.
func (wt *walkthrough) printed(field string, want, ref float64) float64 {
	// Decimal fractions have no exact binary form: 1e-12 is far below any printed digit and far
	// above float64's own rounding.
	exact := 1e-12 * max(1, math.Abs(want))
	switch {
	case field == "outputs_exact":
		return exact
	case wt.Digits != nil:
		return exact + 0.5*math.Pow10(-*wt.Digits)
	case want == math.Trunc(want) && ref == math.Trunc(ref):
		return 0
	case want == 0:
		return tiny
	}
	return 2*u*math.Abs(want) + 0.5*math.Pow10(int(math.Floor(math.Log10(math.Abs(want))))-6)
}
