package oracle

import (
	"math"
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
	bits := map[backend.DType]int{backend.BF16: 8, backend.F16: 11} // of a significand
	// rounded rounds w to significant bits, and multiples of least.
	rounded := func(w float64, significant int, least float64, to func(float64) float64) float64 {
		_, exp := math.Frexp(w)
		step := math.Max(math.Ldexp(1, exp-significant), least)
		return to(w/step) * step
	}
	for dtype, n := range bits {
		least := map[backend.DType]float64{backend.F16: 0x1p-24}[dtype]
		u := dtype.UnitRoundoff()
		worst := [4]float64{}
		for _, w := range []float64{(1 + 0.98*u) / 2, (1 + 2*0.99*u) / 2, 0x1.04p-25, 0x1.01p-17} {
			const keys = 300
			row := Row{Q: []float32{1}, K: make([]float32, keys), V: make([]float32, keys), Dv: 1, Scale: 1, Rounded: dtype}
			sum, outs := 1.0, [4]float64{}
			for j := 1; j < keys; j++ {
				row.K[j], row.V[j] = float32(math.Log(w)), 1
				p := math.Exp(float64(row.K[j]))
				sum += p
				for i, r := range [4]float64{rounded(p, n, least, math.RoundToEven), rounded(p, n, least, math.Floor),
					rounded(p, n-1, least, math.RoundToEven), rounded(p, n, 1024*least, math.Floor)} {
					outs[i] += r
				}
			}
			ref := Solve(row)
			for i, o := range outs {
				worst[i] = math.Max(worst[i], Off(o/sum, ref.O[0], ref.OBound[0]))
			}
		}
		t.Logf("%v: %.3f of the bound; truncated %.2f, a bit less %.2f, flushed %.2f", dtype, worst[0], worst[1], worst[2], worst[3])
		if worst[0] < 0.9 || worst[0] > 1 || worst[1] <= 1.5 || worst[2] <= 1.5 || dtype == backend.F16 && worst[3] <= 1.5 {
			t.Errorf("%v: the bound is not tight: %v", dtype, worst)
		}
	}
}
