package main

import (
	"bytes"
	"context"
	"io"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// started is the CPU backend. It closes file descriptor 3 when a call begins.
type started struct{ backend.Backend }

var startedFamily = clitest.OnCPU(func(be backend.Backend) backend.Backend { return started{be} })

func (s started) Attention(ctx context.Context, calls ...*backend.Call) error {
	os.NewFile(3, "started").Close()
	return s.Backend.Attention(ctx, calls...)
}

// TestInterrupt sends real signals to the program during a call of more than a minute.
// The program ends the call, reports it in a line, and leaves no file.
func TestInterrupt(t *testing.T) {
	for _, sig := range []os.Signal{os.Interrupt, syscall.SIGTERM} {
		t.Run(sig.String(), func(t *testing.T) {
			dir := t.TempDir()
			// 2·128·131072² operations are more than a minute's work.
			x := clitest.Save(t, dir, "x.npy", "<f4", clitest.Normal(1, 131072*64), 131072, 64)
			cmd := clitest.Process("run", "--backend=started", "--q", x, "--k", x, "--v", x, "--out", dir+"/o.npy")
			begun, inChild, err := os.Pipe()
			must.Do(t, err)
			defer begun.Close()
			cmd.ExtraFiles = []*os.File{inChild}
			clitest.Interrupted(t, cmd, sig, func() {
				inChild.Close()
				if _, err := io.ReadAll(begun); err != nil { // ends when the call begins
					t.Error(err)
				}
			}, func() {})
			if got := clitest.Files(t, dir); !slices.Equal(got, []string{"x.npy"}) {
				t.Errorf("the folder holds %v", got)
			}
		})
	}
}

// TestProcess runs the program as a process on each backend. Drivers print nothing.
func TestProcess(t *testing.T) {
	for _, name := range []string{"cpu", "gpu"} {
		t.Run(name, func(t *testing.T) {
			clitest.NeedBackend(t, name)
			dir := t.TempDir()
			x := clitest.Save(t, dir, "x.npy", "<f4", clitest.Normal(1, 2*300*40), 2, 300, 40)
			cmd := clitest.Process("run", "--backend", name, "--check", "--causal", "--q", x, "--k", x, "--v", x, "--out", dir+"/o.npy")
			cmd.Env = append(cmd.Env, "XDG_RUNTIME_DIR=") // as over ssh
			var stdout, stderr bytes.Buffer
			cmd.Stdout, cmd.Stderr = &stdout, &stderr
			if err := cmd.Run(); err != nil || stderr.Len() > 0 || !strings.HasPrefix(stdout.String(), "check: ") {
				t.Fatalf("%v, stdout %q, stderr %q", err, stdout.String(), stderr.String())
			}
			// Row 0 sees key 0 alone: its output is value 0.
			o, _, _ := clitest.Load(t, dir+"/o.npy")
			clitest.Near(t, "row 0", o[:40], clitest.Normal(1, 40), 0)
		})
	}
}
