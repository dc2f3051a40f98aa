package cpu

import (
	"math"
	"testing"
)

// ulpsOff returns |got-want| in units of the last place of want as a float32.
func ulpsOff(got float32, want float64) float64 {
	w := float32(want)
	if float64(got) == want || (got != got && want != want) {
		return 0
	}
	if math.IsInf(float64(w), 0) || math.IsInf(float64(got), 0) {
		if got == w {
			return 0
		}
		return math.Inf(1)
	}
	_, e := math.Frexp(want)
	return math.Abs(float64(got)-want) / math.Ldexp(1, max(e-24, -149))
}

// TestExpError steps through the bits of every float32 that has a finite,
// nonzero exponential: all bounds of exp32 are maxima over this set.
func TestExpError(t *testing.T) {
	step := uint32(97) // every 97th number; a prime, so that all low bits occur
	var normal, subnormal float64
	for _, sign := range []uint32{0, 1 << 31} {
		for u := uint32(0); u <= math.Float32bits(104); u += step {
			x := math.Float32frombits(u | sign)
			want := math.Exp(float64(x))
			err := ulpsOff(exp32(x), want)
			if want < 0x1p-126 {
				subnormal = max(subnormal, err)
			} else {
				normal = max(normal, err)
			}
		}
	}
	t.Logf("largest error: %.3f ulp, %.3f where the result is subnormal", normal, subnormal)
	if normal > 0.56 || subnormal > 0.56 {
		t.Errorf("error is %.3f ulp, stated is 0.56; %.3f where subnormal", normal, subnormal)
	}
}

func TestExpEdges(t *testing.T) {
	inf := float32(math.Inf(1))
	for _, c := range []struct{ x, want float32 }{
		{0, 1}, {-inf, 0}, {inf, inf}, {-200, 0}, {89, inf}, {-104, 0}, {float32(math.NaN()), float32(math.NaN())},
		{math.MaxFloat32, inf}, {-math.MaxFloat32, 0}, {math.SmallestNonzeroFloat32, 1},
	} {
		if got := exp32(c.x); math.Float32bits(got) != math.Float32bits(c.want) && (got == got || c.want == c.want) {
			t.Errorf("exp32(%g) = %g, want %g", c.x, got, c.want)
		}
	}
}

// TestExpRow shows that a row is exp32 of each element, and that hidden keys
// (-Inf) at its ends do not change the sum.
func TestExpRow(t *testing.T) {
	row := make([]float32, 64)
	for j := range row {
		row[j] = float32(math.Sin(float64(j)) * 20)
	}
	const m = 20
	want := make([]float32, len(row))
	for j, x := range row {
		want[j] = exp32(x - m)
	}
	padded := make([]float32, 128)
	for j := range padded {
		padded[j] = float32(math.Inf(-1))
	}
	copy(padded[16:], row)
	sum, padSum := expRow(row, m), expRow(padded, m)
	for j := range row {
		if row[j] != want[j] || padded[16+j] != want[j] {
			t.Fatalf("element %d is %g and %g, exp32 gives %g", j, row[j], padded[16+j], want[j])
		}
	}
	if sum != padSum {
		t.Errorf("sum %g, with hidden keys around %g", sum, padSum)
	}
}

func TestTanhError(t *testing.T) {
	var worst float64
	for u := uint32(0); u <= math.Float32bits(12); u += 97 {
		x := math.Float32frombits(u)
		if tanh32(-x) != -tanh32(x) {
			t.Fatalf("tanh32(%g) is not odd", x)
		}
		worst = max(worst, ulpsOff(tanh32(x), math.Tanh(float64(x))))
	}
	t.Logf("largest error: %.3f ulp", worst)
	if worst > 2 {
		t.Errorf("error is %.3f ulp, stated is 2", worst)
	}
	inf := float32(math.Inf(1))
	if tanh32(inf) != 1 || tanh32(-inf) != -1 || tanh32(100) != 1 {
		t.Error("tanh32 does not end at ±1")
	}
	if nan := tanh32(float32(math.NaN())); nan == nan {
		t.Error("tanh32(NaN) is not NaN")
	}
}

var expSink float64

func BenchmarkExpRow(b *testing.B) {
	src, row := make([]float32, 128), make([]float32, 128)
	for j := range src {
		src[j] = -float32(j) / 8
	}
	for b.Loop() {
		copy(row, src)
		expSink = expRow(row, 0)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/128, "ns/exp")
}
