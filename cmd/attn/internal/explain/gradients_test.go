package explain

import (
	"math"
	"path/filepath"
	"testing"

	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
	"github.com/seed90331342/attn/cmd/internal/matrix"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// differentiated parses a file and computes all its steps.
func differentiated(t *testing.T, dev *kernels.Device, text string) (*walkthrough, *steps, *gradients) {
	t.Helper()
	wt := &walkthrough{}
	must.Do(t, wt.parse([]byte(text)))
	st := must.Get(computeSteps(t.Context(), dev, wt))(t)
	t.Cleanup(st.close)
	g := must.Get(st.differentiate(t.Context(), wt))(t)
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
	for _, be := range []string{"cpu", "gpu"} {
		t.Run(be, func(t *testing.T) {
			dev := clitest.Open(t, be)
			for _, text := range texts {
				wt, st, g := differentiated(t, dev, text)
				call := must.Get(dev.Prepare(st.device[0], st.device[1], st.device[2], kernels.Options{Scale: new(wt.scale()), Softcap: wt.Softcap, LSE: true}))(t)
				r := must.Get(call.Run(t.Context()))(t)
				defer r.Release()
				dO := must.Get(st.upload(t.Context(), g.dO))(t)
				grads := must.Get(call.AllocGradients(t.Context(), call.Gradients().Operands()))(t)
				defer grads.Release()
				must.Do(t, call.Backward(t.Context(), grads, kernels.Result{O: dO}, r))
				for name, of := range map[string]struct {
					got  matrix.Matrix
					want kernels.Tensor
				}{"dQ": {g.dQ, grads.Q}, "dK": {g.dK, grads.K}, "dV": {g.dV, grads.V}} {
					data := must.Get(dev.ToFloat32(t.Context(), of.want))(t)
					want := make([]float64, len(data))
					for i, x := range data {
						want[i] = float64(x)
					}
					near(t, name+" of "+wt.Title, of.got, want, 2e-5) // of numbers up to 30
				}
			}
		})
	}
}
