//go:build linux || darwin

package files

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestPipes reads a pipe to its end. Without a writer, the end of the context ends the wait. Open refuses it at once.
func TestPipes(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Skip(err)
	}
	if _, _, err := Open(pipe); err == nil || !strings.Contains(err.Error(), "a pipe, whose size is unknown") {
		t.Errorf("opened: %v", err)
	}
	go func() {
		if err := os.WriteFile(pipe, []byte("content"), 0); err != nil {
			t.Error(err)
		}
	}()
	if text, err := Read(t.Context(), pipe, MaxText); err != nil || string(text) != "content" {
		t.Errorf("%q, %v", text, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	must.Fail(t, "without a writer", must.Err(Read(ctx, pipe, MaxText)), context.Canceled)
	f, err := os.OpenFile(pipe, os.O_RDWR, 0) // ends the wait of the goroutine
	must.Do(t, err)
	f.Close()
}
