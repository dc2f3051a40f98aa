package main

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/seed90331342/attn/backend"
)

// TestInterrupt sends real signals to the program in the middle of a call that
// takes many seconds: it ends soon, says so in a line, and leaves nothing.
func TestInterrupt(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("Windows has no way to send Ctrl-C to one process")
	}
	for _, sig := range []os.Signal{os.Interrupt, syscall.SIGTERM} {
		t.Run(sig.String(), func(t *testing.T) {
			dir := t.TempDir()
			// 2·128·131072² operations are more than a minute's work.
			x := save(t, dir, "x.npy", "<f4", normal(1, 131072*64), 131072, 64)
			cmd := exec.Command(builtAttn, "run", "--backend=cpu", "--q", x, "--k", x, "--v", x, "--out", dir+"/o.npy")
			var stdout, stderr bytes.Buffer
			cmd.Stdout, cmd.Stderr = &stdout, &stderr
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			time.Sleep(500 * time.Millisecond) // the files are read and the call runs
			start := time.Now()
			if err := cmd.Process.Signal(sig); err != nil {
				t.Fatal(err)
			}
			err := cmd.Wait()
			if waited := time.Since(start); waited > 5*time.Second {
				t.Errorf("it ended %v after the signal", waited)
			}
			var exit *exec.ExitError
			if !errors.As(err, &exit) {
				t.Fatalf("it ended with %v before the signal", err)
			}
			wantFailure(t, exit.ExitCode(), stdout.String(), stderr.String(), "interrupted, no file was written")
			if exit.ExitCode() != exitInterrupted {
				t.Errorf("exit code %d, should be %d", exit.ExitCode(), exitInterrupted)
			}
			if got := files(t, dir); !slices.Equal(got, []string{"x.npy"}) {
				t.Errorf("the folder holds %v", got)
			}
		})
	}
}

// TestBinary shows that the program as built does what its tests call, on each
// backend, and that its drivers keep quiet.
func TestBinary(t *testing.T) {
	for _, name := range []string{"cpu", "gpu"} {
		t.Run(name, func(t *testing.T) {
			needBackend(t, name)
			dir := t.TempDir()
			x := save(t, dir, "x.npy", "<f4", normal(1, 2*300*40), 2, 300, 40)
			cmd := exec.Command(builtAttn, "run", "--backend", name, "--check", "--causal", "--q", x, "--k", x, "--v", x, "--out", dir+"/o.npy")
			cmd.Env = append(os.Environ(), "XDG_RUNTIME_DIR=") // as over ssh
			var stdout, stderr bytes.Buffer
			cmd.Stdout, cmd.Stderr = &stdout, &stderr
			if err := cmd.Run(); err != nil || stderr.Len() > 0 || !strings.HasPrefix(stdout.String(), "check: ") {
				t.Fatalf("%v, stdout %q, stderr %q", err, stdout.String(), stderr.String())
			}
			// Row 0 sees key 0 alone: its output is value 0.
			o, _, _ := load(t, dir+"/o.npy")
			near(t, "row 0", o[:40], normal(1, 40), 0)
		})
	}
}

// needBackend skips a test whose backend has no device here; on a CI machine
// that is a failure.
func needBackend(t *testing.T, name string) {
	t.Helper()
	be, err := backend.Open(name)
	switch {
	case err == nil:
		if err := be.Close(); err != nil {
			t.Fatal(err)
		}
	case errors.Is(err, backend.ErrNoDevice) && os.Getenv("CI") != "true":
		t.Skipf("%s has no device here: %v", name, err)
	default:
		t.Fatal(err)
	}
}
