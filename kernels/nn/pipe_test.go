//go:build linux || darwin

package nn_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/seed90331342/attn/kernels"
)

// TestWeightsFromPipe refuses a pipe in a folder of weights and does not wait for its writer.
func TestWeightsFromPipe(t *testing.T) {
	dir := t.TempDir()
	if err := syscall.Mkfifo(filepath.Join(dir, "wq.npy"), 0o600); err != nil {
		t.Skip(err)
	}
	if _, err := small.LoadWeights(os.DirFS(dir)); !errors.Is(err, kernels.ErrFile) || !strings.Contains(err.Error(), "wq.npy: not a regular file") {
		t.Error(err)
	}
}
