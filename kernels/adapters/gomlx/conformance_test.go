package gomlx

import (
	"errors"
	"os"
	"testing"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/support/backendtest"
	_ "github.com/seed90331342/attn/cpu"
	_ "github.com/seed90331342/attn/gpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// open returns a device, or skips the test where there is none of that name.
func open(t testing.TB, name string) *kernels.Device {
	dev, err := kernels.Open(name)
	if name == "gpu" && errors.Is(err, kernels.ErrNoDevice) && os.Getenv("CI") != "true" {
		t.Skip(err)
	}
	must.Do(t, err)
	t.Cleanup(func() { dev.Close() })
	return dev
}

// on returns a backend on dev.
func on(t testing.TB, dev *kernels.Device) compute.Backend {
	return must.Get(New(dev, ""))(t)
}

// eachDevice runs f on the CPU, which shares memory with gomlx, and on a GPU, which does not.
func eachDevice(t *testing.T, f func(t *testing.T, dev *kernels.Device)) {
	for _, name := range []string{"cpu", "gpu"} {
		t.Run(name, func(t *testing.T) { f(t, open(t, name)) })
	}
}

// TestConformance runs gomlx's suite of all operations. It takes ErrNotImplemented as a reason to skip, but attn
// implements all of its cases of attention: TestOperands compares the same options with float64.
func TestConformance(t *testing.T) {
	b := on(t, open(t, "cpu"))
	backendtest.RunAll(t, b, nil)
	t.Run("FusedOps on a GPU", func(t *testing.T) { backendtest.TestFusedOps(t, on(t, open(t, "gpu"))) })
}

// TestRegistry opens the backend as GOMLX_BACKEND does.
func TestRegistry(t *testing.T) {
	b := must.Get(compute.NewWithConfig("attn:cpu,parallelism=1"))(t)
	if b.Name() != Name {
		t.Errorf("the backend is %q", b.Name())
	}
	dev := b.(*backend).dev
	b.Finalize()
	if _, err := dev.Alloc(t.Context(), kernels.F32, kernels.Shape{1, 1, 1, 1}); !errors.Is(err, kernels.ErrClosed) || !b.IsFinalized() {
		t.Errorf("Finalize left the device open: %v", err)
	}
	must.Fail(t, "an unknown device", must.Err(compute.NewWithConfig("attn:nowhere")), kernels.ErrNoBackend)
	if _, err := compute.NewWithConfig("attn:cpu,nonsense"); err == nil {
		t.Error("an unknown option of the Go backend is accepted")
	}
}
