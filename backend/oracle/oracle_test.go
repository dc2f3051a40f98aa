package oracle

import (
	"math"
	"slices"
	"testing"

	"github.com/seed90331342/attn/backend"
)

// TestSolveByHand: two keys with scores 0 and ln 3, so weights 1/4 and 3/4.
func TestSolveByHand(t *testing.T) {
	a := Solve(Row{
		Q: []float32{1}, K: []float32{0, 2, 7}, V: []float32{4, 8, 100}, Dv: 1, Scale: float32(math.Log(3) / 2),
		Hidden: func(j int) bool { return j == 2 },
	})
	if math.Abs(a.Weights[1]-0.75) > 1e-7 || a.Weights[2] != 0 || math.Abs(a.O[0]-7) > 1e-6 || math.Abs(a.LSE-math.Log(4)) > 1e-7 {
		t.Errorf("got %+v", a)
	}
	if !(a.OBound[0] > 0 && a.OBound[0] < 1e-4) || !(a.LSEBound > 0 && a.LSEBound < 1e-4) {
		t.Errorf("bounds are %v and %v: not what a float32 check can use", a.OBound[0], a.LSEBound)
	}
}

func TestSolveEdges(t *testing.T) {
	nan, inf := float32(math.NaN()), float32(math.Inf(1))
	all := func(int) bool { return true }
	first := func(j int) bool { return j == 0 }
	minusInf := func(j int) float64 { return math.Inf(-1) }
	for _, c := range []struct {
		name   string
		row    Row
		o, lse float64
	}{
		{"nothing seen", Row{K: []float32{1, 2}, V: []float32{nan, inf}, Hidden: all}, 0, math.Inf(-1)},
		{"bias of -Inf everywhere", Row{K: []float32{nan, 2}, V: []float32{nan, inf}, Bias: minusInf}, 0, math.Inf(-1)},
		{"NaN hidden", Row{K: []float32{nan, 2}, V: []float32{nan, 5}, Hidden: first}, 5, 2},
		{"NaN key seen", Row{K: []float32{nan, 2}, V: []float32{1, 5}}, math.NaN(), math.NaN()},
		{"NaN value seen", Row{K: []float32{1, 1}, V: []float32{nan, 5}}, math.NaN(), 1 + math.Ln2},
		{"Inf value seen", Row{K: []float32{1, 1}, V: []float32{inf, 5}}, math.Inf(1), 1 + math.Ln2},
		{"softcap", Row{K: []float32{1e30, 1e30}, V: []float32{3, 5}, Softcap: 2}, 4, 2 + math.Ln2},
	} {
		c.row.Q, c.row.Dv, c.row.Scale = []float32{1}, 1, 1
		a := Solve(c.row)
		if Off(a.O[0], c.o, 1e-12) > 1 || Off(a.LSE, c.lse, 1e-12) > 1 {
			t.Errorf("%s: o %v, lse %v, should be %v and %v", c.name, a.O[0], a.LSE, c.o, c.lse)
		}
	}
}

// TestLargeScores: however large the scores of a row are, no bound exceeds what its weights and values may be, and the
// weight of a score that is far below the others has no error.
func TestLargeScores(t *testing.T) {
	for exponent := 20; exponent < 127; exponent++ {
		s := float32(math.Ldexp(1, exponent))
		for name, r := range map[string]Row{
			"plain": {}, "sink": {Sink: &s}, "softcap": {Softcap: 0x1p20}, "f16 weights": {Rounded: backend.F16, Out: backend.F16},
			"dropout": {Keeps: func(j int) bool { return j != 1 }, KeepFactor: 4. / 3},
		} {
			r.Q, r.K, r.V, r.Dv, r.Scale = []float32{1, 0}, []float32{s, 0, s * (1 - 0x1p-20), s, -s, s, 0, 0}, []float32{3, -2, 1, 2}, 1, 1
			a := Solve(r)
			if !(a.OBound[0] <= 7.01) || !(a.LSEBound < 1e-5*float64(s)) { // |ref| + 4/3·3
				t.Errorf("%s, 2^%d: the bound of o is %v, that of lse %v", name, exponent, a.OBound[0], a.LSEBound)
			}
			dq, dk, dv := make([]Sum, 2), make([]Sum, 8), make([]Sum, 4)
			Differentiate(r, []float32{0.5}, 0.25, RowGradients{DQ: dq, DK: dk, DV: dv, DSink: new(Sum)})
			for j := range dv {
				most, grad := 1.34, 0.67 // 4/3 and 4/3·0.5
				if j == 2 && exponent > 25 && r.Softcap == 0 {
					most, grad = 1e-37, 1e-37 // flushed numbers
				}
				if b, g := a.WeightBounds[j], dv[j].Bound(backend.F32); !(b <= most && g <= grad) {
					t.Errorf("%s, 2^%d: the bound of weight %d is %v, that of dv %v", name, exponent, j, b, g)
				}
			}
			for i, x := range append(dq, dk...) {
				if b := x.Bound(backend.F32); !(b <= 20*float64(s)) {
					t.Errorf("%s, 2^%d: the bound of element %d of dq and dk is %v", name, exponent, i, b)
				}
			}
		}
	}
}

// TestBoundSeesAMissingKey: leaving out one key of 1,024 is further off than the bound allows.
func TestBoundSeesAMissingKey(t *testing.T) {
	const n, d = 1024, 64
	numbers := func(n int, f func(i float64) float64) []float32 {
		x := make([]float32, n)
		for i := range x {
			x[i] = float32(f(float64(i)))
		}
		return x
	}
	row := Row{Q: numbers(d, math.Cos), K: numbers(n*d, math.Sin), Dv: 1, Scale: 0.125,
		V: numbers(n, func(i float64) float64 { return 1 + math.Mod(i, 7) })}
	ref := Solve(row)
	row.Hidden = func(j int) bool { return j == 700 }
	if off := Off(Solve(row).O[0], ref.O[0], ref.OBound[0]); off <= 1 {
		t.Errorf("a missing key is %v of the bound", off)
	}
	for _, out := range []backend.DType{backend.F16, backend.BF16} {
		row.Hidden, row.Out = nil, out
		if a := Solve(row); a.OBound[0] <= ref.OBound[0] {
			t.Errorf("bound of %v output is no larger than that of f32", out)
		}
	}
}

func TestOff(t *testing.T) {
	nan, inf := math.NaN(), math.Inf(1)
	for _, c := range []struct{ got, ref, bound, want float64 }{
		{1, 1, 0, 0}, {nan, nan, 1, 0}, {inf, inf, 1, 0}, {1.5, 1, 1, 0.5}, {3, 1, 1, 2},
		{nan, 1, 1, inf}, {1, nan, 1, inf}, {inf, 1, 1, inf}, {-inf, inf, 1, inf}, {1, inf, 1, inf}, {1, 2, nan, inf}, {1, 2, 0, inf},
	} {
		if got := Off(c.got, c.ref, c.bound); got != c.want {
			t.Errorf("Off(%v, %v, %v) is %v, should be %v", c.got, c.ref, c.bound, got, c.want)
		}
	}
	var w Worst
	w.See(1, 1.5, 1, func() string { return "a" })
	w.See(1, 4, 1, func() string { return "b" })
	w.See(1, 2, 1, func() string { return "c" })
	if w.Where != "b" || w.Considered != 3 || w.Err() == nil {
		t.Errorf("worst is %+v", w)
	}
}

// TestRoundedWeights: weights that are rounded to nearest reach 0.9 of the bound, and wrong roundings exceed it.
func TestRoundedWeights(t *testing.T) {
	for dtype, bits := range map[backend.DType]int{backend.BF16: 8, backend.F16: 11} { // of a significand
		u, small := dtype.UnitRoundoff(), map[backend.DType]float64{backend.F16: 0x1p-24}[dtype]
		for name, c := range map[string]struct {
			bits       int
			small      float64 // the smallest number
			to         func(float64) float64
			from, most float64 // of the bound
		}{
			"to nearest": {bits, small, math.RoundToEven, 0.9, 1}, "toward zero": {bits, small, math.Floor, 1.5, 3},
			"a bit less": {bits - 1, small, math.RoundToEven, 1.5, 3}, "flushed": {bits - 1, 1024 * small, math.RoundToEven, 1.5, 1e6},
		} {
			worst := 0.0
			for _, w := range []float64{(1 + 0.98*u) / 2, (1 + 2*0.99*u) / 2, 0x1.04p-25, 0x1.01p-17} {
				row := Row{Q: []float32{1}, K: slices.Repeat([]float32{float32(math.Log(w))}, 200), V: slices.Repeat([]float32{1}, 200), Dv: 1, Scale: 1, Rounded: dtype}
				row.K[0], row.V[0] = 0, 0
				p := math.Exp(float64(row.K[1]))
				_, exp := math.Frexp(p)
				step, ref := math.Max(math.Ldexp(1, exp-c.bits), c.small), Solve(row)
				worst = math.Max(worst, Off(199*c.to(p/step)*step/(1+199*p), ref.O[0], ref.OBound[0]))
			}
			if t.Logf("%v %s: %.3f of the bound", dtype, name, worst); worst < c.from || worst > c.most {
				t.Errorf("%v %s: %v of the bound, should be from %v to %v", dtype, name, worst, c.from, c.most)
			}
		}
	}
}

// TestFixedQueries: the log-sum-exp of a query whose elements all err by half a step in one direction reaches 0.9
// of the bound, and with steps of twice that size it exceeds the bound.
func TestFixedQueries(t *testing.T) {
	for _, c := range []struct{ steps, from, most float64 }{{127 << 8, 0.9, 1}, {127 << 7, 1.5, 2}} {
		row := Row{Q: make([]float32, 64), K: slices.Repeat([]float32{1}, 64), V: []float32{1}, Dv: 1, Scale: 1, Fixed: true}
		shift := 0.0
		for i := range row.Q[1:] {
			row.Q[i] = float32(100.499 / c.steps)
			shift += math.RoundToEven(float64(row.Q[i])*c.steps)/c.steps - float64(row.Q[i])
		}
		row.Q[63] = 1
		ref := Solve(row)
		if off := Off(ref.LSE+shift, ref.LSE, ref.LSEBound); off < c.from || off > c.most {
			t.Errorf("%v steps: %v of the bound, should be from %v to %v", c.steps, off, c.from, c.most)
		}
	}
}
