package vec

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

func TestTanhError(t *testing.T) {
	var worst float64
	for u := uint32(0); u <= math.Float32bits(12); u += 97 {
		x := math.Float32frombits(u)
		if Tanh(-x) != -Tanh(x) {
			t.Fatalf("Tanh(%g) is not odd", x)
		}
		worst = max(worst, ulpsOff(Tanh(x), math.Tanh(float64(x))))
	}
	t.Logf("largest error: %.3f ulp", worst)
	if worst > 2 {
		t.Errorf("error is %.3f ulp, stated is 2", worst)
	}
	inf := float32(math.Inf(1))
	if Tanh(inf) != 1 || Tanh(-inf) != -1 || Tanh(100) != 1 {
		t.Error("Tanh does not end at ±1")
	}
	if nan := Tanh(float32(math.NaN())); nan == nan {
		t.Error("Tanh(NaN) is not NaN")
	}
}
