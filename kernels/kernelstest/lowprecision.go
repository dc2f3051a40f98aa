package kernelstest

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/oracle"
	"github.com/seed90331342/attn/kernels"
)

// lowPrecisionCases are calls with Options.LowPrecision, with keys and values of a type. Queries have
// it, too, except next to Q8, and to F8, where they are BF16 and F16 in turns.
func lowPrecisionCases(dtype backend.DType) []Case {
	f32, few, many := backend.F32, dims(2, 6, 2, 1, 700, 64, 64), dims(1, 4, 2, 70, 150, 64, 64)
	cases := []Case{
		{Name: "prefill", Dims: many},
		{Name: "causal", Dims: dims(2, 2, 2, 130, 130, 32, 32), Options: kernels.Options{Causal: true}},
		{Name: "decode", Dims: few},
		{Name: "decode of one head", Dims: dims(1, 1, 1, 1, 2100, 128, 128)},
		{Name: "few rows", Dims: dims(1, 6, 2, 3, 300, 80, 96)},
		{Name: "tiles of 16 rows", Dims: dims(1, 2, 1, 12, 300, 64, 64)},
		{Name: "odd head sizes", Dims: dims(1, 2, 1, 35, 140, 33, 31), Layout: Padded},
		{Name: "head size 1", Dims: dims(1, 1, 1, 20, 40, 1, 1)},
		{Name: "head size 256", Dims: dims(1, 1, 1, 33, 70, 256, 256), Layout: BSHD},
		{Name: "pages", Dims: many, PageSize: 16, Options: kernels.Options{Causal: true, Align: kernels.LowerRight}},
		{Name: "pages, decode", Dims: few, PageSize: 16, Options: kernels.Options{KLen: []int{700, 333}}},
		{Name: "mask", Dims: many, MaskShape: backend.Shape{1, 1, 70, 150}, HideRows: true},
		{Name: "bias, softcap", Dims: many, BiasShape: backend.Shape{1, 4, 70, 150}, BiasHides: true, Options: kernels.Options{Softcap: 3}},
		{Name: "window, alibi, sinks", Dims: many, Options: kernels.Options{Window: &kernels.Window{Left: 30, Right: 5}, ALiBi: slopes(4), Sinks: []float32{1, -2, 8, 0}}},
		{Name: "dropout", Dims: many, Options: kernels.Options{Dropout: kernels.Dropout{P: 0.99999, Seed: 3}}},
		{Name: "dropout, decode", Dims: few, Options: kernels.Options{Dropout: kernels.Dropout{P: 0.3, Seed: 4}}},
		{Name: "dropout, tiles of several heads", Dims: dims(1, 6, 2, 5, 300, 64, 64), Options: kernels.Options{Dropout: kernels.Dropout{P: 0.3, Seed: 5}}},
		{Name: "block mask", Dims: dims(1, 2, 2, 70, 300, 64, 64), BlockSize: 16, BlockShape: backend.Shape{1, 2, 5, 19}},
		{Name: "large logits", Dims: many, Gain: 30},
		{Name: "NaN in hidden values", Dims: many, Options: kernels.Options{KLen: []int{77}}, PoisonV: map[int]float32{77: float32(math.NaN())}},
		{Name: "Inf in visible values", Dims: many, PoisonV: map[int]float32{110: float32(math.Inf(-1))}, Options: kernels.Options{Causal: true, Align: kernels.LowerRight}},
		{Name: "NaN in visible keys", Dims: many, PoisonK: map[int]float32{3: float32(math.NaN())}, Options: kernels.Options{Causal: true}},
		{Name: "float32 queries", Dims: many, DType: f32, Keys: &dtype},
		{Name: "float32 queries, decode", Dims: few, DType: f32, Keys: &dtype},
	}
	switch dtype {
	case backend.Q8, backend.F8:
		cases = slices.DeleteFunc(cases, func(c Case) bool { return c.Dims.Dim%4 > 0 })
	case f32:
		cases = slices.DeleteFunc(cases, func(c Case) bool { return c.Keys != nil })
	}
	for i := range cases {
		c := &cases[i]
		switch {
		case dtype == backend.Q8:
			c.Keys = &dtype
		case dtype == backend.F8 && c.Keys == nil:
			c.Keys, c.DType = &dtype, []backend.DType{backend.BF16, backend.F16}[i%2]
		case c.Keys == nil:
			c.DType = dtype
		}
		c.Seed, c.Options.LowPrecision = uint64(900+i), true
	}
	return cases
}

// testLowPrecision runs calls with Options.LowPrecision.
func testLowPrecision(t *testing.T, dev *kernels.Device, h Harness) {
	plain := Case{Name: "f32", Dims: dims(1, 2, 2, 40, 70, 16, 16)}
	low := plain
	low.Options.LowPrecision = true
	splits := planOf(t, dev, low).Matrices > 0
	for i, dtype := range []backend.DType{backend.BF16, backend.F16, backend.Q8, backend.F8, backend.F32} {
		if dtype == backend.F32 && !splits {
			break // the same kernels as without the option
		}
		cases := lowPrecisionCases(dtype)
		for j, c := range cases {
			if !h.takes(i*len(cases) + j) {
				continue
			}
			t.Run(dtype.String()+" "+c.Name, func(t *testing.T) {
				needs(t, dev, c)
				testCase(t, dev, c, new(digests))
			})
		}
		for _, rows := range []int{1, 70} {
			if dtype.Quantised() || dtype == backend.F32 { // a device need not round
				break
			}
			t.Run(fmt.Sprintf("%v reaches the bound, %d rows", dtype, rows), func(t *testing.T) { reachesBound(t, dev, dtype, rows) })
		}
	}
	if !splits {
		t.Run("f32", func(t *testing.T) { sameBits(t, plain.build().once(t, dev, fused), low.build().once(t, dev, fused)) })
	}
	t.Run("rows alone", func(t *testing.T) { rowsAlone(t, dev, backend.BF16, 70, 1, 16) })
	t.Run("rows alone, f16", func(t *testing.T) { rowsAlone(t, dev, backend.F16, 70, 1, 19) })
	t.Run("rows alone, q8", func(t *testing.T) { rowsAlone(t, dev, backend.Q8, 6, 1, 3) })
	t.Run("rows alone, f8", func(t *testing.T) { rowsAlone(t, dev, backend.F8, 70, 1, 17) })
	if implements[backend.Differentiator](dev) {
		testLowGradients(t, dev, h)
	}
	t.Run("refused", func(t *testing.T) {
		on := Case{Dims: dims(1, 1, 1, 4, 4, 8, 8), DType: backend.BF16, Options: kernels.Options{LowPrecision: true, LSE: true}}.build().on(t, dev)
		defer on.release()
		_, err := dev.Scores(t.Context(), on.q.view, on.k.view, kernels.Scaled, on.opt)
		wantError(t, "scores", backend.ErrUnsupported, err)
	})
}

// lowGradientCases are calls with Options.LowPrecision whose gradients are computed, with operands of a type.
func lowGradientCases(dtype backend.DType) []Case {
	many := dims(1, 4, 2, 70, 150, 32, 32)
	cases := []Case{
		{Name: "plain", Dims: dims(2, 2, 2, 37, 75, 32, 32)},
		{Name: "causal, grouped heads", Dims: many, Options: kernels.Options{Causal: true, Align: kernels.LowerRight}},
		{Name: "window, lengths", Dims: dims(2, 2, 1, 70, 90, 16, 24), Options: kernels.Options{Window: &kernels.Window{Left: 20, Right: 3}, KLen: []int{77, 33}}},
		{Name: "odd head sizes", Dims: dims(1, 2, 1, 35, 40, 33, 31), Layout: Padded},
		{Name: "head size 128", Dims: dims(1, 1, 1, 33, 70, 128, 32), Layout: BSHD},
		{Name: "head size 160", Dims: dims(1, 1, 1, 20, 20, 160, 16)},
		{Name: "mask, bias, softcap", Dims: many, MaskShape: backend.Shape{1, 1, 70, 150}, HideRows: true, BiasShape: backend.Shape{1, 4, 70, 150}, BiasHides: true, Options: kernels.Options{Softcap: 3}},
		{Name: "dropout, alibi, sinks", Dims: many, Options: kernels.Options{ALiBi: slopes(4), Sinks: []float32{1, -2, 8, 0}, Dropout: kernels.Dropout{P: 0.3, Seed: 3}}},
		{Name: "steep slopes", Dims: dims(1, 2, 1, 37, 75, 32, 24), Options: kernels.Options{ALiBi: []float32{1, 1.5}}}, // dS grow by more than 2^7 a tile
		{Name: "block mask", Dims: dims(1, 2, 2, 70, 100, 32, 32), BlockSize: 16, BlockShape: backend.Shape{1, 2, 5, 7}},
		{Name: "large logits", Dims: dims(1, 1, 1, 33, 70, 64, 64), Gain: 30},
		{Name: "small scale", Dims: dims(1, 1, 1, 20, 40, 8, 16), Options: kernels.Options{Scale: new(1e-9)}},
		{Name: "NaN in hidden keys and values", Dims: many, Options: kernels.Options{KLen: []int{77}}, PoisonK: map[int]float32{77: float32(math.NaN())}, PoisonV: map[int]float32{80: float32(math.Inf(1))}},
		{Name: "Inf in visible values", Dims: many, PoisonV: map[int]float32{110: float32(math.Inf(-1))}, Options: kernels.Options{Causal: true, Align: kernels.LowerRight}},
		{Name: "NaN in visible keys", Dims: many, PoisonK: map[int]float32{73: float32(math.NaN())}, Options: kernels.Options{Causal: true}},
	}
	for i := range cases {
		c := &cases[i]
		// do has the type of the operands.
		c.DType, c.Seed, c.Options.LowPrecision = dtype, uint64(902+5*i), true
	}
	return cases
}

// testLowGradients compares gradients of calls with Options.LowPrecision with the oracle.
func testLowGradients(t *testing.T, dev *kernels.Device, h Harness) {
	for i, dtype := range []backend.DType{backend.F16, backend.BF16} {
		cases := lowGradientCases(dtype)
		for j, c := range cases {
			if !h.takes(i*len(cases) + j) {
				continue
			}
			t.Run(dtype.String()+" gradients, "+c.Name, func(t *testing.T) {
				needs(t, dev, c)
				worst, err := checkGradients(t, dev, c)
				must(0, err)(t)
				for n, w := range worst {
					t.Logf("%s: at most %.2g of the bound", gradientNames[n], w.Off)
				}
			})
		}
	}
}

// planOf returns the plan of a case.
func planOf(t *testing.T, dev *kernels.Device, c Case) kernels.Plan {
	on := c.build().on(t, dev)
	defer on.release()
	return must(prepare(t, dev, on.q.view, on.k.view, on.v.view, on.opt).Plan(t.Context()))(t)
}

// rowsAlone compares some rows of a call with all of them: they have the same bits, unless plans name
// different units for the products.
func rowsAlone(t *testing.T, dev *kernels.Device, keys backend.DType, rows int, some ...int) {
	c := Case{Name: "rows alone", Dims: dims(1, 4, 2, rows, 701, 64, 64), DType: keys, Options: kernels.Options{LowPrecision: true}, Seed: 7}
	switch keys {
	case backend.Q8:
		c.DType, c.Keys = backend.F32, &keys
	case backend.F8:
		c.DType, c.Keys = backend.BF16, &keys
	}
	needs(t, dev, c)
	on := c.build().on(t, dev)
	defer on.release()
	run := func(from, to int) (o []float32, unit string) {
		q := must(on.q.view.Slice(backend.Seq, from, to))(t)
		c := prepare(t, dev, q, on.k.view, on.v.view, on.opt)
		out := must(c.Run(t.Context()))(t)
		defer out.Release()
		_, unit, _ = strings.Cut(must(c.Plan(t.Context()))(t).Path, "products of ")
		return read(t, dev, must(out.O.Slice(backend.Heads, 0, 1))(t)), unit
	}
	all, unit := run(0, rows)
	for _, n := range some {
		for _, from := range []int{0, rows / 2, rows - n} {
			part, own := run(from, from+n)
			if own != unit {
				continue // float32 products of few rows, whose sums have another order
			}
			for i, x := range part {
				if y := all[from*64+i]; !sameNumber(x, y) {
					t.Errorf("element %d of row %d is %v, in a call of %d rows it is %v", i%64, from+i/64, y, n, x)
				}
			}
		}
	}
}

// reachesBound compares keys whose weights, once rounded, all err in one direction by nearly
// as much as is allowed: the error must be at least 0.9 of the bound where the plan names the products. A
// backend that does not round, or that divides by the sum of rounded weights, stays far below, and one
// that truncates, drops a bit or flushes subnormal numbers exceeds the bound. Where bf16 is multiplied as f16, the
// weights are f16: the error of normal ones must reach the bound of f16. Other plans have the bits of float32 weights.
func reachesBound(t *testing.T, dev *kernels.Device, dtype backend.DType, rows int) {
	const keys, d = 200, 4 // fewer keys than a backend may give a maximum of their own
	c := Case{Dims: dims(1, 1, 1, rows, keys, d, d), DType: dtype, Options: kernels.Options{Scale: new(1.0), LowPrecision: true}}
	rounded := dtype
	plan := planOf(t, dev, c)
	if plan.Matrices > 0 {
		rounded = backend.F16
	}
	rounds := plan.Matrices > 0 || strings.Contains(plan.Path, "products of ")
	u := rounded.UnitRoundoff()
	weights := map[string]float64{ // of all keys but the first, whose weight is 1
		"just under half a step above 1/2":   (1 + u*0.98) / 2,
		"just over half a step above 1/2":    (1 + u*1.02) / 2,
		"just under one step above 1/2":      (1 + 2*u*0.99) / 2, // which errs little: a truncation errs by 2·u
		"just over half the smallest number": 0x1.04p-25,
		"128.49 times the smallest number":   128.49 * 0x1p-24,
	}
	reached := 0
	for name, w := range weights {
		c.Name = name
		r := recorded{q: make([]float32, rows*d), k: make([]float32, keys*d), v: make([]float32, keys*d)}
		for i := range r.q {
			r.q[i] = 1
		}
		for i := d; i < keys*d; i += d {
			rest := math.Log(w) // in a sum of three numbers
			for x := range 3 {
				r.k[i+x] = dtype.Round(float32(rest))
				rest -= float64(r.k[i+x])
			}
			for x := range d {
				r.v[i+x] = 1
			}
		}
		c.recorded = &r
		b := c.build()
		on := b.on(t, dev)
		o := must(dev.Alloc(t.Context(), backend.F32, backend.Shape{1, 1, rows, d}))(t)
		run := func(low bool) []float32 {
			on.opt.LowPrecision = low
			noError(t, runInto(t.Context(), dev, kernels.Result{O: o}, on.q.view, on.k.view, on.v.view, on.opt))
			return read(t, dev, o)
		}
		result := run(true)
		if !rounds && !slices.Equal(result, run(false)) {
			t.Errorf("%s: the result is not that of float32 weights, but the plan is %q", name, plan.Path)
		}
		row := b.row(0, 0, 0)
		row.Out = backend.F32
		ref, least := oracle.Solve(row), math.Inf(1)
		row.Rounded = rounded
		reach := oracle.Solve(row).OBound[0]
		for i, got := range result {
			off := oracle.Off(float64(got), ref.O[0], ref.OBound[0])
			least = min(least, oracle.Off(float64(got), ref.O[0], reach))
			if off > 1 {
				t.Errorf("%s: o[%d] is %v, should be %v: %v of the bound", name, i, got, ref.O[0], off)
			}
		}
		if least >= 0.9 {
			reached++
		}
		t.Logf("%s: %.3f of the bound", name, least)
		o.Release()
		on.release()
	}
	if want := map[backend.DType]int{backend.BF16: 2, backend.F16: 4}[dtype]; rounds && reached < want {
		t.Errorf("%d weights reach the bound, should be %d: the weights are not rounded as they should be", reached, want)
	}
}
