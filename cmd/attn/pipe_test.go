//go:build linux || darwin

package main

import (
	"os"
	"testing"

	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
)

// TestInterruptPipe interrupts commands that read a pipe without content, and one that
// writes into a pipe that nobody reads. The first signal ends them.
func TestInterruptPipe(t *testing.T) {
	dir := t.TempDir()
	pipe := clitest.Pipe(t, dir, "pipe")
	x := clitest.Save(t, dir, "x.npy", "<f4", clitest.Normal(1, 1000*64), 1000, 64) // more than a pipe holds
	qk := []string{"--q", x, "--k", x}
	for _, c := range []struct {
		name string
		mode int // of the other end
		args []string
	}{
		{"a walkthrough", os.O_WRONLY, []string{"explain", pipe}},
		{"a report", os.O_WRONLY, []string{"compare", pipe, pipe}},
		{"a report to resume", os.O_WRONLY, []string{"bench", "--resume", pipe}},
		{"labels", os.O_WRONLY, append([]string{"heatmap", "--png", dir + "/h.png", "--labels", pipe}, qk...)},
		{"the output", os.O_RDONLY, append([]string{"run", "--backend=cpu", "--v", x, "--out", pipe}, qk...)},
		{"a picture", os.O_RDONLY, append([]string{"heatmap", "--backend=cpu", "--size=2048", "--svg", pipe}, qk...)},
	} {
		t.Run(c.name, func(t *testing.T) { clitest.InterruptedPipe(t, pipe, c.mode, c.args...) })
	}
}
