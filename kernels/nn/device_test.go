package nn_test

import (
	"math/rand/v2"
	"testing"

	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/kernels/nn"
)

// onCPU returns a device that the test closes.
func onCPU(t *testing.T) *kernels.Device {
	t.Helper()
	dev := kernels.NewDevice(cpu.New(cpu.Options{}))
	t.Cleanup(func() { dev.Close() })
	return dev
}

// random returns a tensor of normal numbers that the test releases.
func random(t *testing.T, dev *kernels.Device, seed uint64, shape ...int) kernels.Tensor {
	t.Helper()
	s := kernels.Shape(shape)
	data, rng := make([]float32, s.Elements()), rand.New(rand.NewPCG(seed, 1))
	for i := range data {
		data[i] = float32(rng.NormFloat64())
	}
	x := must.Get(dev.FromFloat32(t.Context(), kernels.F32, data, s))(t)
	t.Cleanup(x.Release)
	return x
}

// wrongCall is a call of a layer that is refused.
type wrongCall struct {
	name string
	x    kernels.Tensor
	opt  nn.MultiHeadOptions
	want error
	text string
}

// refused checks the error of the call.
func (c wrongCall) refused(t *testing.T, err error) {
	t.Helper()
	must.Fail(t, c.name, err, c.want, c.text)
}
