package gpu

import (
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/backendtest"
)

// TestConformanceOfDecode runs the suite with every call on the decode path.
func TestConformanceOfDecode(t *testing.T) {
	backendtest.Run(t, backendtest.Harness{
		Open:  func(t testing.TB) backend.Backend { return open(t, Options{decodeRows: 1 << 20}) },
		Draws: 10,
	})
}
