package kernelstest

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/oracle"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/internal/op"
)

// normGate is one call each of Normalise, Gate and their gradients.
type normGate struct {
	name    string
	shape   backend.Shape
	x, w, y backend.DType // of the inputs, of weights and gates, and of y, dy and dx
	layout  Layout
	factors backend.Shape // of the weights; the zero Shape means none
	norm    kernels.Norm
	gates   int // of a row; 0 means one for each element
}

// testNormGate compares norms, gates and their gradients with float64: in every type and layout, for rows that are
// shorter and longer than a workgroup, in place and not.
func testNormGate(t *testing.T, dev *kernels.Device) {
	if !implements[backend.Normaliser](dev) || !implements[backend.Gater](dev) {
		t.Logf("%s has no norms or gates", dev.Info().Name)
		return
	}
	f32, f16, bf16 := backend.F32, backend.F16, backend.BF16
	type shape = backend.Shape
	one := kernels.Norm{PlusOne: true}
	for i, c := range []normGate{
		{"no weights", shape{2, 3, 5, 64}, f32, f32, f32, Contiguous, shape{}, kernels.Norm{}, 0},
		{"one element", shape{2, 2, 6, 1}, f32, f32, f32, Padded, shape{1, 1, 1, 1}, kernels.Norm{}, 0},
		{"two elements of f16, gates of rows", shape{2, 3, 5, 2}, f16, bf16, f16, BSHD, shape{1, 1, 1, 2}, kernels.Norm{}, 1},
		{"bf16, weights of heads", shape{2, 3, 6, 3}, bf16, f32, bf16, Transposed, shape{1, 3, 1, 3}, one, 0},
		{"f32 to f16", shape{1, 3, 5, 80}, f32, bf16, f16, Padded, shape{1, 1, 1, 80}, kernels.Norm{Epsilon: 0.5}, 0},
		{"bf16 to f32", shape{3, 2, 1, 136}, bf16, f16, f32, Swapped, shape{1, 2, 1, 136}, kernels.Norm{Epsilon: op.MinEpsilon}, 1},
		{"f32 to bf16, long rows", shape{1, 2, 6, 576}, f32, f32, bf16, BSHD, shape{1, 1, 1, 576}, one, 0},
		{"a whole projection", shape{1, 1, 6, 4096}, f32, f32, f32, Padded, shape{1, 1, 1, 4096}, kernels.Norm{Epsilon: 1e-5}, 0},
		{"no rows", shape{2, 2, 0, 8}, f32, f32, f32, Contiguous, shape{1, 1, 1, 8}, one, 0},
	} {
		t.Run(c.name, func(t *testing.T) { c.test(t, dev, uint64(i)) })
	}
	t.Run("NaN and Inf", func(t *testing.T) { testRowsAlone(t, dev) })
	t.Run("gates of NaN and Inf", func(t *testing.T) { testGateLimits(t, dev) })
}

// magnitudes are those of rows in turns. The squares of the large ones exceed float32, those of the small ones vanish.
// The elements of the last are ±3e38: r is subnormal.
var magnitudes = []float32{1, 1e30, 0, 1e-30, 1 << 48, 3e38}

func (c normGate) test(t *testing.T, dev *kernels.Device, seed uint64) {
	ctx, d := t.Context(), c.shape[backend.Dim]
	rng := rand.New(rand.NewPCG(seed, 0x6e6f726d))
	x, dy, gated := drawn(rng, c.shape, c.x), drawn(rng, c.shape, c.y), drawn(rng, c.shape, c.x) // of norms, of both, of gates
	for i := range x.data {
		if c.x != backend.F16 && c.y != backend.F16 { // which lack these numbers
			y, m := x.data[i], magnitudes[i/d%len(magnitudes)]
			if x.data[i] = c.x.Round(y * m); m > 1e38 {
				x.data[i] = c.x.Round(float32(math.Copysign(float64(m), float64(y))))
			}
			gated.data[i] = c.x.Round(gated.data[i] * min(m, 1e30)) // whose products are finite
		}
	}
	gates := c.shape
	if c.gates > 0 {
		gates[backend.Dim] = c.gates
	}
	gate := drawn(rng, gates, c.w)
	for i := range gate.data {
		gate.data[i] = c.w.Round(gate.data[i] * []float32{1, 20, 200}[i%3])
	}
	var w operand
	var weights flat
	if (c.factors != backend.Shape{}) {
		w = drawn(rng, c.factors, c.w)
		weights = put(t, dev, w, Contiguous)
		defer weights.release()
	}
	forward, gatedOn, gateOn := put(t, dev, x, c.layout), put(t, dev, gated, c.layout), put(t, dev, gate, c.layout)
	defer forward.release()
	defer gatedOn.release()
	defer gateOn.release()
	of := func(o operand, row int) []float32 { // the row, or what is broadcast to it
		if o.data == nil {
			return nil
		}
		r := make([]float32, d)
		for i := range r {
			r[i] = o.data[broadcastIndex(o.shape, row/c.shape[2]/c.shape[1], row/c.shape[2]%c.shape[1], row%c.shape[2], i)]
		}
		return r
	}
	norm := backend.Norm(c.norm)
	if norm.Epsilon == 0 {
		norm.Epsilon = 1e-6
	}
	type rowCall struct {
		name string
		own  operand // which y may replace
		run  func(y, terms, own backend.Tensor) error
		want func(row int) (y, terms []oracle.Element)
	}
	calls := []rowCall{
		{"y of a norm", x, func(y, _, x backend.Tensor) error { return dev.Normalise(ctx, y, x, weights.view, c.norm) },
			func(row int) (y, terms []oracle.Element) { return oracle.Normalise(of(x, row), of(w, row), norm), nil }},
		{"gradients of a norm", dy, func(dx, dw, dy backend.Tensor) error {
			return dev.NormaliseBackward(ctx, dx, dw, dy, forward.view, weights.view, c.norm)
		}, func(row int) (y, terms []oracle.Element) {
			return oracle.NormaliseBackward(of(dy, row), of(x, row), of(w, row), norm)
		}},
	}
	for f := kernels.Sigmoid; f <= kernels.Identity; f++ {
		calls = append(calls, rowCall{fmt.Sprintf("y of gate %d", f), gated, func(y, _, x backend.Tensor) error { return dev.Gate(ctx, y, x, gateOn.view, f) },
			func(row int) (y, terms []oracle.Element) { return oracle.Gate(of(gated, row), of(gate, row), f), nil }},
			rowCall{fmt.Sprintf("gradients of gate %d", f), dy, func(dx, dgate, dy backend.Tensor) error {
				return dev.GateBackward(ctx, dx, dgate, dy, gatedOn.view, gateOn.view, f)
			}, func(row int) (y, terms []oracle.Element) {
				return oracle.GateBackward(of(dy, row), of(gated, row), of(gate, row), f)
			}})
	}
	for _, call := range calls {
		nan := float32(math.NaN())
		own, y, terms := put(t, dev, call.own, c.layout), put(t, dev, filled(nan, c.shape, c.y), c.layout), put(t, dev, filled(nan, c.shape, backend.F32), c.layout)
		defer own.release()
		defer y.release()
		defer terms.release()
		noError(t, call.run(y.view, terms.view, own.view))
		if x.shape.Elements() == 0 {
			continue
		}
		got, gotTerms := y.get(t, dev, call.name), terms.get(t, dev, call.name)
		var worst oracle.Worst
		for row := range len(got) / d {
			want, wantTerms := call.want(row)
			for i, e := range want {
				worst.See(float64(got[row*d+i]), e.Value, e.Bound(c.y), func() string { return fmt.Sprintf("%s, row %d, element %d", call.name, row, i) })
			}
			for i, e := range wantTerms {
				worst.See(float64(gotTerms[row*d+i]), e.Value, e.Bound(backend.F32), func() string { return fmt.Sprintf("%s, term of row %d, element %d", call.name, row, i) })
			}
		}
		if err := worst.Err(); err != nil {
			t.Error(err)
		}
		t.Logf("%s: %.2g of the bound at worst, at %s", call.name, worst.Off, worst.Where)
		if call.own.dtype != c.y {
			continue
		}
		noError(t, call.run(own.view, terms.view, own.view))
		if !slices.Equal(own.get(t, dev, call.name), got) || !slices.EqualFunc(terms.get(t, dev, call.name), gotTerms, sameNumber) {
			t.Errorf("%s: other results in place", call.name)
		}
	}
}

// testRowsAlone puts a NaN and an Inf in rows, and compares the others with those of a call without them.
func testRowsAlone(t *testing.T, dev *kernels.Device) {
	const d = 20
	shape := backend.Shape{1, 1, 4, d}
	rng := rand.New(rand.NewPCG(3, 0x6e616e))
	clean, dy := drawn(rng, shape, backend.F32), drawn(rng, shape, backend.F32)
	spoilt := operand{shape, backend.F32, slices.Clone(clean.data)}
	spoilt.data[1*d+7], spoilt.data[2*d+3] = float32(math.NaN()), float32(math.Inf(1))
	up := put(t, dev, dy, Contiguous)
	defer up.release()
	results := func(o operand) (all [][]float32) {
		x, to, terms := put(t, dev, o, Contiguous), put(t, dev, dy, Contiguous), put(t, dev, dy, Contiguous)
		defer x.release()
		defer to.release()
		defer terms.release()
		noError(t, dev.Normalise(t.Context(), to.view, x.view, backend.Tensor{}, kernels.Norm{}))
		all = append(all, to.get(t, dev, "y"))
		noError(t, dev.NormaliseBackward(t.Context(), to.view, terms.view, up.view, x.view, backend.Tensor{}, kernels.Norm{}))
		all = append(all, to.get(t, dev, "dx"), terms.get(t, dev, "dw"))
		noError(t, dev.Gate(t.Context(), to.view, up.view, x.view, kernels.Sigmoid))
		all = append(all, to.get(t, dev, "gated"))
		noError(t, dev.GateBackward(t.Context(), to.view, terms.view, up.view, up.view, x.view, kernels.Sigmoid))
		return append(all, to.get(t, dev, "dx of a gate"), terms.get(t, dev, "dgate"))
	}
	want := results(clean)
	for n, got := range results(spoilt) {
		for i, x := range got {
			row, element := i/d, i%d
			isNaN, gates := x != x, n >= 3
			switch {
			case row == 0 || row == 3:
				if x != want[n][i] {
					t.Errorf("result %d: element %d of row %d is %v next to rows with NaN and Inf, else %v", n, element, row, x, want[n][i])
				}
			case row == 1 && isNaN != (!gates || element == 7):
				t.Errorf("result %d: element %d of the row with a NaN is %v", n, element, x)
			case row == 2 && n == 0 && (isNaN != (element == 3) || !isNaN && x != 0):
				t.Errorf("y: element %d of the row with an Inf is %v", element, x)
			case row == 2 && gates && isNaN:
				t.Errorf("result %d: element %d of a row with a gate of Inf is NaN", n, element)
			}
		}
	}
}

// testGateLimits compares functions and derivatives at gates of -Inf, Inf and NaN with their limits.
func testGateLimits(t *testing.T, dev *kernels.Device) {
	inf, nan := float32(math.Inf(1)), float32(math.NaN())
	shape := backend.Shape{1, 1, 1, 3}
	gate, one := put(t, dev, operand{shape, backend.F32, []float32{-inf, inf, nan}}, Contiguous), put(t, dev, filled(1, shape, backend.F32), Contiguous)
	y, terms := put(t, dev, filled(7, shape, backend.F32), Contiguous), put(t, dev, filled(7, shape, backend.F32), Contiguous)
	for _, x := range []flat{gate, one, y, terms} {
		defer x.release()
	}
	for f, want := range [][2][]float32{
		kernels.Sigmoid:  {{0, 1, nan}, {0, 0, nan}},
		kernels.SiLU:     {{0, inf, nan}, {0, 1, nan}},
		kernels.Softplus: {{0, inf, nan}, {0, 1, nan}},
		kernels.Identity: {{-inf, inf, nan}, {1, 1, 1}},
	} {
		noError(t, dev.GateBackward(t.Context(), y.view, terms.view, one.view, one.view, gate.view, kernels.Activation(f)))
		for i, got := range [][]float32{y.get(t, dev, "f"), terms.get(t, dev, "f'")} {
			if !slices.EqualFunc(got, want[i], func(x, y float32) bool { return x == y || x != x && y != y }) {
				t.Errorf("derivative %d of function %d is %v at -Inf, Inf and NaN, should be %v", i, f, got, want[i])
			}
		}
	}
}
