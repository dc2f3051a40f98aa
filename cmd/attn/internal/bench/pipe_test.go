//go:build linux || darwin

package bench

import (
	"bytes"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/seed90331342/attn/bench/report"
)

// TestBenchIntoPipe writes one report of two cases into a pipe, and the table into a device. Both stay.
func TestBenchIntoPipe(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Skip(err)
	}
	read := make(chan []byte)
	go func() {
		text, err := os.ReadFile(pipe)
		if err != nil {
			t.Error(err)
		}
		read <- text
	}()
	code, _, stderr := benchmark(t.Context(), "--seq", "64,128", "--heads", "1", "--backend", "cpu", "--threads", "1", "--rounds", "3", "--json", pipe, "--gobench", os.DevNull)
	if code != 0 {
		t.Fatalf("exit code %d: %s", code, stderr)
	}
	if r, err := report.Read(bytes.NewReader(<-read)); err != nil || len(r.Cases) != 2 {
		t.Errorf("the reader got %+v, %v", r, err)
	}
	for path, mode := range map[string]os.FileMode{pipe: os.ModeNamedPipe, os.DevNull: os.ModeDevice} {
		if info, err := os.Lstat(path); err != nil || info.Mode()&mode == 0 {
			t.Errorf("%s became %v, %v", path, info.Mode(), err)
		}
	}
}
