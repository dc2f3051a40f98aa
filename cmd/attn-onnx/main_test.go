package main

import (
	"strings"
	"testing"

	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
)

var attnONNX, mustRun, _ = clitest.Named(program)

// TestMain runs the program instead of the tests in processes that tests start.
func TestMain(m *testing.M) { clitest.Main(m, main) }

// TestUsage: wrong usage exits with 2 and prints one line.
func TestUsage(t *testing.T) {
	if out := mustRun(t, "--help"); !strings.HasPrefix(out, "Usage: attn-onnx") {
		t.Errorf("--help printed %q", out)
	}
	for _, c := range []struct{ args, want string }{
		{"", "<case>"},
		{"--foo", "unknown flag --foo"},
		{"--backend foo c", `backend "foo"`},
	} {
		code, stdout, stderr := attnONNX(t, strings.Fields(c.args)...)
		if code != 2 {
			t.Errorf("attn-onnx %s: exit code %d, want 2", c.args, code)
		}
		clitest.WantFailure(t, code, stdout, stderr, c.want)
	}
}
