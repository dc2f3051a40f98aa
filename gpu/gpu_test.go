package gpu

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/backendtest"
	"github.com/seed90331342/attn/cpu"
)

// open opens the default adapter. Without one the test is skipped, or fails where
// CI promises that there is one.
func open(t testing.TB, opt Options) *Backend {
	t.Helper()
	b, err := Open("", opt)
	if errors.Is(err, backend.ErrNoDevice) && os.Getenv("CI") != "true" {
		t.Skipf("needs a WebGPU adapter (CI=true makes that a failure): %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestConformance waits where it reads results and, the second time, after each call. It also
// holds the output bits to those recorded for the software driver of that version, whose
// compiler decides the order of sums.
func TestConformance(t *testing.T) {
	backendtest.Run(t, backendtest.Harness{
		Digests:        digests(t),
		GradientsEvery: 64,
		Open:           func(t testing.TB) backend.Backend { return open(t, Options{}) },
		Again:          func(be backend.Backend) backend.Backend { return waiting{be.(*Backend)} },
		Against:        func(testing.TB) backend.Backend { return cpu.New(cpu.Options{}) },
	})
}

// digests returns the file with the recorded bits of the default adapter.
func digests(t testing.TB) string {
	b := open(t, Options{})
	defer b.Close()
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
