package gpu

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/backendtest"
	"github.com/seed90331342/attn/backend/backendtest/must"
	"github.com/seed90331342/attn/cpu"
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

// TestConformance waits where it reads results and, for caches a second time, after each call. It
// also holds the output bits to those recorded for the software driver of that version, whose
// compiler decides the order of sums.
func TestConformance(t *testing.T) {
	every, against := 1, 1000
	if testing.Short() {
		every = 12 // the software driver compiles a kernel with many options in two to seven seconds
		against = 200
	}
	backendtest.Run(t, backendtest.Harness{
		Digests:        digests(t),
		PairsEvery:     every,
		GradientsEvery: 64,
		Open: func(t testing.TB) backend.Backend {
			b := open(t, Options{})
			b.dev.Pipelines.Most = 512 // else the suite compiles most of its kernels again for each list
			return b
		},
		Again:   func(be backend.Backend) backend.Backend { return waiting{be.(*Backend)} },
		Against: func(testing.TB) backend.Backend { return cpu.New(cpu.Options{}) }, AgainstDraws: against,
	})
}

// conform runs the suite on devices opened with opt, with fewer random problems and a twelfth of the long
// lists, each configuration with its own. choose, unless nil, picks variants. With -short it is skipped, because of what else is tested.
func conform(t *testing.T, instead string, opt Options, choose chooser, h backendtest.Harness) {
	if testing.Short() {
		t.Skip("-short: " + instead)
	}
	h.PairsEvery, h.Draws = 12, 10
	h.Open = func(t testing.TB) backend.Backend {
		b := open(t, opt)
		if choose != nil {
			b.choose = choose
		}
		return b
	}
	backendtest.Run(t, h)
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
	if err != nil {
		t.Fatal(err)
	}
}
