package gpu

import (
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/backendtest"
)

// openFull opens a backend whose device memory is full of tensors, so that every
// further one stays in host memory and calls stream; the rest is for that.
func openFull(t testing.TB, opt Options) *Backend {
	t.Helper()
	b := open(t, opt)
	b.tensors.Add(b.memory / 8 * tensorEighths)
	return b
}

// TestConformanceStreamed runs the suite with every tensor in host memory.
func TestConformanceStreamed(t *testing.T) {
	backendtest.Run(t, backendtest.Harness{
		Open:  func(t testing.TB) backend.Backend { return openFull(t, Options{MemoryBytes: 2 << 20}) },
		Draws: 10,
	})
}
