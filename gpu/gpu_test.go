package gpu

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels/kernelstest"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// open opens the default adapter until the test ends. Without one the test is skipped, or fails
// where CI promises that there is one.
func open(t testing.TB, opt Options) *Backend {
	t.Helper()
	b, err := Open("", opt)
	if errors.Is(err, backend.ErrNoDevice) && os.Getenv("CI") != "true" {
		t.Skipf("needs a WebGPU adapter (CI=true makes that a failure): %v", err)
	}
	check(t, err)
	t.Cleanup(func() { _ = b.Close() })
	return b
}

// metaOf returns a tensor without memory.
func metaOf(t testing.TB, dtype backend.DType, shape backend.Shape) backend.Tensor {
	t.Helper()
	return must.Get(backend.Meta(dtype, shape))(t)
}

// TestConformance waits where it reads results and, for caches a second time, after each call. It also holds the output
// bits to those recorded for the software driver of that version, whose compiler decides the order of sums.
func TestConformance(t *testing.T) {
	every := 1
	if testing.Short() { // the software driver compiles a kernel with many options in two to seven seconds
		every = 12
	}
	kernelstest.Run(t, kernelstest.Harness{
		Digests: digests(t),
		Extent:  kernelstest.Extent{PairsEvery: every, GradientsEvery: 64, Draws: 50, AgainstDraws: 200}, // most draws have a kernel of their own
		Open: func(t testing.TB) backend.Backend {
			b := open(t, Options{})
			b.dev.Pipelines.Most = 512 // else the suite compiles most of its kernels again for each list
			return b
		},
		Again:   func(be backend.Backend) backend.Backend { return waiting{be.(*Backend)} },
		Against: func(testing.TB) backend.Backend { return cpu.New(cpu.Options{}) },
	})
}

// ofKernels are the parts of the suite whose results depend on the kernel of the forward pass. The others
// check what calls do around it, which TestConformance does once for all kernels.
var ofKernels = []string{"Cases", "Pairs", "Caches", "Batch", "Packed", "Edges", "HeadSizes", "Models", "ScoreMods",
	"KeyIndices", "LowPrecision", "Drawn", "Extremes", "Small", "Properties", "Merge", "Against"}

// conform runs the suite on devices opened with opt, with few random problems and at most a twelfth of the long lists, each
// configuration with its own. choose, unless nil, picks variants. With -short it is skipped; instead says why.
func conform(t *testing.T, instead string, opt Options, choose chooser, h kernelstest.Harness) {
	if testing.Short() {
		t.Skip("-short: " + instead)
	}
	h.Extent.PairsEvery, h.Extent.Draws = max(h.Extent.PairsEvery, 12), 5
	h.Open = func(t testing.TB) backend.Backend {
		b := open(t, opt)
		if choose != nil {
			b.choose = choose
		}
		return b
	}
	kernelstest.Run(t, h)
}

// digests returns the file with the recorded bits of the default adapter.
func digests(t testing.TB) string {
	b := open(t, Options{})
	device := strings.ToLower(strings.NewReplacer(" ", "-", "(", "", ")", "", ",", "", "/", "-").Replace(b.Info().Device))
	return filepath.Join("testdata", "digests-"+device+".txt")
}

// check ends the test with an error that is not nil.
func check(t testing.TB, err error) {
	t.Helper()
	must.Do(t, err)
}
