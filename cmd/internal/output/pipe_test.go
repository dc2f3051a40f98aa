//go:build linux || darwin

package output

import (
	"context"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestPipes: a pipe is written to and stays a pipe. Without a reader, the end of the context ends the wait.
func TestPipes(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Skip(err)
	}
	read := make(chan string)
	go func() {
		text, err := os.ReadFile(pipe)
		if err != nil {
			t.Error(err)
		}
		read <- string(text)
	}()
	must.Do(t, Write(t.Context(), pipe, put("content")))
	if text := <-read; text != "content" {
		t.Errorf("the reader got %q", text)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var s Set
	must.Do(t, s.Add("--out", pipe))
	must.Fail(t, "without a reader", s.Write(ctx, "--out", put("content")), context.Canceled)
	if info, err := os.Lstat(pipe); err != nil || info.Mode()&os.ModeNamedPipe == 0 {
		t.Errorf("the pipe became %v, %v", info.Mode(), err)
	}
	// The same pipe twice would mix two outputs.
	if err := s.Add("--lse", pipe); err == nil {
		t.Error("two outputs go to one pipe")
	}
	s.Discard()
	f, err := os.OpenFile(pipe, os.O_RDWR, 0) // ends the wait of the goroutine
	must.Do(t, err)
	f.Close()
}
