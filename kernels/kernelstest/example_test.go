package kernelstest_test

import (
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels/kernelstest"
)

// The test of a new driver: it runs the suite on backends that its Open returns.
func Example() {
	open := func(testing.TB) backend.Backend { return cpu.New(cpu.Options{Threads: 2}) }
	_ = func(t *testing.T) { kernelstest.Run(t, kernelstest.Harness{Open: open}) } // TestConformance
}
