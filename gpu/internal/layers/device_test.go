package layers_test

import (
	"errors"
	"math/rand/v2"
	"os"
	"testing"

	"github.com/seed90331342/attn/cpu"
	_ "github.com/seed90331342/attn/gpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// onCPU returns a device that the test closes.
func onCPU(t *testing.T) *kernels.Device {
	t.Helper()
	dev := kernels.NewDevice(cpu.New(cpu.Options{}))
	t.Cleanup(func() { dev.Close() })
	return dev
}

// onGPU returns a device that the test closes. Without an adapter it skips the test, but fails under CI.
func onGPU(t *testing.T) *kernels.Device {
	t.Helper()
	dev, err := kernels.Open("gpu")
	if errors.Is(err, kernels.ErrNoDevice) && os.Getenv("CI") != "true" {
		t.Skipf("no WebGPU adapter: %v", err)
	}
	must.Do(t, err)
	t.Cleanup(func() { dev.Close() })
	return dev
}

// each runs f on the CPU and on the GPU.
func each(t *testing.T, f func(t *testing.T, dev *kernels.Device)) {
	t.Run("cpu", func(t *testing.T) { f(t, onCPU(t)) })
	t.Run("gpu", func(t *testing.T) { f(t, onGPU(t)) })
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
