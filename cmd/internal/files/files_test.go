package files

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestRead reads files of at most a number of bytes. A device without an end has a bound too.
func TestRead(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "x")
	must.Do(t, os.WriteFile(path, []byte("12345"), 0o600))
	if text, err := Read(t.Context(), path, 5); err != nil || string(text) != "12345" {
		t.Errorf("%q, %v", text, err)
	}
	if text, err := Read(t.Context(), path, 4); err == nil || err.Error() != "it has more than 4 bytes, the most that is read" {
		t.Errorf("%q, %v", text, err)
	}
	stop := backend.FailMemory(1)
	if text, err := Read(t.Context(), path, 5); !errors.Is(err, kernels.ErrMemory) {
		t.Errorf("without memory: %q, %v", text, err)
	}
	stop()
	if _, err := Read(t.Context(), dir+"/none", 4); err == nil || err.Error() != "no such file or directory" {
		t.Errorf("a missing file: %v", err)
	}
	if _, err := Read(t.Context(), dir, 1<<40); err == nil {
		t.Error("a folder was read")
	}
	if _, err := os.Stat("/dev/zero"); err != nil {
		t.Skip(err)
	}
	if text, err := Read(t.Context(), "/dev/zero", 1<<40); err == nil || !strings.Contains(err.Error(), "more than 67108864 bytes") {
		t.Errorf("%d bytes of a device, %v", len(text), err)
	}
}

// TestSparse refuses a file of 1 TiB at once.
func TestSparse(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x")
	must.Do(t, os.WriteFile(path, nil, 0o600))
	if err := os.Truncate(path, 1<<40); err != nil {
		t.Skip(err)
	}
	if _, err := Read(t.Context(), path, MaxText); err == nil || !strings.Contains(err.Error(), "more than 67108864 bytes") {
		t.Error(err)
	}
}
