package backendtest_test

import (
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/backendtest"
	"github.com/seed90331342/attn/cpu"
)

// The test of a new driver: it runs the suite on backends that its Open returns.
func Example() {
	open := func(testing.TB) backend.Backend { return cpu.New(cpu.Options{Threads: 2}) }
	_ = func(t *testing.T) { backendtest.Run(t, backendtest.Harness{Open: open}) } // TestConformance
}
