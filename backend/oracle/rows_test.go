package oracle

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/seed90331342/attn/backend"
)

// TestGradientsOfRows compares the gradients of norms and gates with differences of the results in float64. The steps,
// of 2^-8, are exact; differences of second order err by h²/6 times a third derivative, which is below 30 here.
func TestGradientsOfRows(t *testing.T) {
	const d, h = 6, 0x1p-8
	rng := rand.New(rand.NewPCG(5, 0))
	draw := func() []float32 {
		x := make([]float32, d)
		for i := range x {
			x[i] = float32(math.Round(rng.NormFloat64()*256) / 256)
		}
		return x
	}
	x, w, dy := draw(), draw(), draw()
	loss := func(y []Element) (sum float64) {
		for i, e := range y {
			sum += e.Value * float64(dy[i])
		}
		return sum
	}
	compare := func(name string, of []float32, got []Element, forward func() []Element) {
		for i, v := range of {
			of[i] = v + h
			up := loss(forward())
			of[i] = v - h
			down := loss(forward())
			of[i] = v
			if want := (up - down) / (2 * h); math.Abs(got[i].Value-want) > 5*h*h {
				t.Errorf("%s[%d] is %v, differences give %v", name, i, got[i].Value, want)
			}
		}
	}
	for _, n := range []backend.Norm{{Epsilon: 0.25}, {Epsilon: 1e-6, PlusOne: true}} {
		dx, dw := NormaliseBackward(dy, x, w, n)
		norm := func() []Element { return Normalise(x, w, n) }
		compare("dx", x, dx, norm)
		compare("dw", w, dw, norm)
	}
	dx, _ := NormaliseBackward(dy, x, nil, backend.Norm{Epsilon: 1e-6})
	compare("dx without weights", x, dx, func() []Element { return Normalise(x, nil, backend.Norm{Epsilon: 1e-6}) })
	for f := backend.Sigmoid; f <= backend.Identity; f++ {
		dx, dgate := GateBackward(dy, x, w, f)
		gate := func() []Element { return Gate(x, w, f) }
		compare("dx of a gate", x, dx, gate)
		compare("dgate", w, dgate, gate)
	}
}
