package explain

import (
	"math"
	"path/filepath"
	"testing"

	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
	"github.com/seed90331342/attn/cmd/internal/matrix"
	"github.com/seed90331342/attn/kernels"
)

// differentiated parses a file and computes all its steps.
func differentiated(t *testing.T, dev *kernels.Device, text string) (*walkthrough, *steps, *gradients) {
	t.Helper()
	wt := &walkthrough{}
	clitest.NoError(t, wt.parse([]byte(text)))
	st, err := computeSteps(t.Context(), dev, wt)
	clitest.NoError(t, err)
	t.Cleanup(st.close)
	g, err := st.differentiate(t.Context(), wt)
	clitest.NoError(t, err)
	return wt, st, g
}

// near compares a step with the expected numbers.
func near(t *testing.T, name string, got matrix.Matrix, want []float64, within float64) {
	t.Helper()
	if len(got.Data) != len(want) {
		t.Fatalf("%s has %d numbers, should have %d", name, len(got.Data), len(want))
	}
	for i, x := range got.Data {
		if !(math.Abs(float64(x)-want[i]) <= within) {
			t.Errorf("%s is %v, should be %v", name, got.Data, want)
			return
		}
	}
}

// TestGradientsByHand: x is the identity, so that Q, K and V are the projections. Each query is
// orthogonal to the difference of the keys, so that its two scores are equal and all weights
// are 1/2, with any softcap:
//
//	Q = 0 2   K =  1 1   V = 1 2   scores = 1/2·Q·Kᵀ = 1 1   P = 1/2 1/2   O = P·V = 2 4
//	    0 4       -1 1       3 6                       2 2       1/2 1/2             2 4
//
//	dO = 1  0   dV = Pᵀ·dO = 1 -1/2   dP = dO·Vᵀ =  1  3   D = 1·2        =  2
//	     1 -1                1 -1/2                -1 -3       1·2 - 1·4     -2
//
//	dS = P∘(dP - D) = 1/2·(1 - 2)   1/2·(3 - 2)  = -1/2  1/2
//	                  1/2·(-1 + 2)  1/2·(-3 + 2)    1/2 -1/2
//
//	dQ = 1/2·dS·K = 1/2·(-1/2·(1, 1) + 1/2·(-1, 1)) = -1/2 0   dK = 1/2·dSᵀ·Q = 1/2·(-1/2·(0, 2) + 1/2·(0, 4)) = 0  1/2
//	                1/2·(1/2·(1, 1) - 1/2·(-1, 1))     1/2 0                    1/2·(1/2·(0, 2) - 1/2·(0, 4))    0 -1/2
//
// With a softcap of 2/ln 3, tanh(1/softcap) = (√3 - 1/√3)/(√3 + 1/√3) = 1/2 and
// tanh(2/softcap) = (3 - 1/3)/(3 + 1/3) = 4/5. The first row of dS is multiplied by
// 1 - 1/4 = 3/4, the second by 1 - 16/25 = 9/25:
//
//	dX = -3/8   3/8    dQ = 1/2·(-3/8·(1, 1) + 3/8·(-1, 1))    = -3/8  0   dK = 1/2·(-3/8·(0, 2) + 9/50·(0, 4)) = 0 -3/200
//	     9/50  -9/50        1/2·(9/50·(1, 1) - 9/50·(-1, 1))     9/50  0        1/2·(3/8·(0, 2) - 9/50·(0, 4))    0  3/200
func TestGradientsByHand(t *testing.T) {
	const file = `{"x": [[1, 0], [0, 1]], "scale": 0.5, "w_query": [[0, 2], [0, 4]], "w_key": [[1, 1], [-1, 1]], "w_value": [[1, 2], [3, 6]],
		"d_outputs": [[1, 0], [1, -1]]`
	for _, be := range []string{"cpu", "gpu"} {
		t.Run(be, func(t *testing.T) {
			dev := clitest.Open(t, be)
			for _, c := range []struct {
				name, text string
				within     float64
				dX, dQ, dK []float64
			}{
				{"no softcap", file + "}", 0, []float64{-.5, .5, .5, -.5}, []float64{-.5, 0, .5, 0}, []float64{0, .5, 0, -.5}},
				{"softcap", file + `, "softcap": 1.8204784532536746}`, 1e-6, []float64{-.375, .375, .18, -.18}, []float64{-.375, 0, .18, 0}, []float64{0, -.015, 0, .015}},
			} {
				t.Run(c.name, func(t *testing.T) {
					_, st, g := differentiated(t, dev, c.text)
					near(t, "P", st.weights, []float64{.5, .5, .5, .5}, c.within)
					near(t, "dV", g.dV, []float64{1, -.5, 1, -.5}, c.within)
					near(t, "dP", g.dP, []float64{1, 3, -1, -3}, c.within)
					near(t, "D", g.dots, []float64{2, -2}, c.within)
					near(t, "dS", g.dS, []float64{-.5, .5, .5, -.5}, c.within)
					near(t, "dX", g.dX, c.dX, c.within)
					near(t, "dQ", g.dQ, c.dQ, c.within)
					near(t, "dK", g.dK, c.dK, c.within)
				})
			}
		})
	}
}

// TestGradientsAreThoseOfBackward compares the steps of the published examples, and of one with
// a softcap, with the fused backward pass.
func TestGradientsAreThoseOfBackward(t *testing.T) {
	texts := []string{`{"x": [[1, 2], [0.5, -1], [3, 0.25]], "softcap": 1.5, "d_outputs": [[1, 0.5], [-1, 2], [0.25, 3]]}`}
	examples, err := filepath.Glob("../../../../kernels/kernelstest/testdata/worked-examples/*.json")
	if err != nil || len(examples) < 3 {
		t.Fatal(examples, err)
	}
	for _, path := range examples {
		text := clitest.ReadFile(t, path)
		texts = append(texts, string(text))
	}
	dev := clitest.Open(t, "cpu")
	for _, text := range texts {
		wt, st, g := differentiated(t, dev, text)
		call, err := dev.Prepare(st.device[0], st.device[1], st.device[2], kernels.Options{Scale: new(wt.scale()), Softcap: wt.Softcap, LSE: true})
		clitest.NoError(t, err)
		r, err := call.Run(t.Context())
		clitest.NoError(t, err)
		defer r.Release()
		dO, err := st.upload(t.Context(), g.dO)
		clitest.NoError(t, err)
		grads, err := call.AllocGradients(t.Context(), call.Gradients().Operands())
		clitest.NoError(t, err)
		defer grads.Release()
		clitest.NoError(t, call.Backward(t.Context(), grads, kernels.Result{O: dO}, r))
		for name, of := range map[string]struct {
			got  matrix.Matrix
			want kernels.Tensor
		}{"dQ": {g.dQ, grads.Q}, "dK": {g.dK, grads.K}, "dV": {g.dV, grads.V}} {
			data, err := dev.ToFloat32(t.Context(), of.want)
			clitest.NoError(t, err)
			want := make([]float64, len(data))
			for i, x := range data {
				want[i] = float64(x)
			}
			near(t, name+" of "+wt.Title, of.got, want, 2e-5) // of numbers up to 30
		}
	}
}
