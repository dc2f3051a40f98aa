//go:build linux || darwin

package main

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/seed90331342/attn/cmd/attn/internal/cli"
	"github.com/seed90331342/attn/cmd/attn/internal/cli/clitest"
)

// TestInterruptPipe interrupts commands that read a pipe without content, and one that
// writes into a pipe that nobody reads. The first signal ends them.
func TestInterruptPipe(t *testing.T) {
	dir := t.TempDir()
	pipe := filepath.Join(dir, "model.onnx")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Skip(err)
	}
	x := clitest.Save(t, dir, "x.npy", "<f4", clitest.Normal(1, 1000*64), 1000, 64) // more than a pipe holds
	qk := []string{"--q", x, "--k", x}
	for _, c := range []struct {
		name string
		mode int // of the other end
		args []string
	}{
		{"a problem", os.O_WRONLY, []string{"run", "--out", dir + "/o.npy", "--problem", pipe}},
		{"a walkthrough", os.O_WRONLY, []string{"explain", pipe}},
		{"a report", os.O_WRONLY, []string{"compare", pipe, pipe}},
		{"a report to resume", os.O_WRONLY, []string{"bench", "--resume", pipe}},
		{"labels", os.O_WRONLY, append([]string{"heatmap", "--png", dir + "/h.png", "--labels", pipe}, qk...)},
		{"a model", os.O_WRONLY, []string{"onnx", "--backend=cpu", dir}},
		{"operator tests", os.O_WRONLY, []string{"onnx", "--jsonc", "--backend=cpu", pipe}},
		{"the output", os.O_RDONLY, append([]string{"run", "--backend=cpu", "--v", x, "--out", pipe}, qk...)},
		{"a picture", os.O_RDONLY, append([]string{"heatmap", "--backend=cpu", "--size=2048", "--svg", pipe}, qk...)},
	} {
		t.Run(c.name, func(t *testing.T) {
			cmd := program(c.args...)
			var stdout, stderr bytes.Buffer
			cmd.Stdout, cmd.Stderr = &stdout, &stderr
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			ended := make(chan error)
			go func() {
				err := cmd.Wait()
				// A program that did not open its end must not block the test. Closed before the
				// next case begins, which would take this for its program's end.
				if both, err := os.OpenFile(pipe, os.O_RDWR, 0); err == nil {
					both.Close()
				}
				ended <- err
			}()
			other, err := os.OpenFile(pipe, c.mode, 0) // returns when the program opens its end
			if err != nil {
				t.Fatal(err)
			}
			defer other.Close()
			_ = cmd.Process.Signal(os.Interrupt) // fails if it has ended
			var exit *exec.ExitError
			if err := <-ended; !errors.As(err, &exit) {
				t.Fatalf("it ended with %v, in spite of the signal", err)
			}
			clitest.WantFailure(t, exit.ExitCode(), stdout.String(), stderr.String(), "interrupted, no file was written")
			if exit.ExitCode() != cli.ExitInterrupted {
				t.Errorf("exit code %d, should be %d", exit.ExitCode(), cli.ExitInterrupted)
			}
			if names := clitest.Files(t, dir); len(names) != 2 {
				t.Errorf("the folder holds %v", names)
			}
		})
	}
}
