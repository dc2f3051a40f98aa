package port_test

import (
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const quietChild = "ATTN_PORT_QUIET"

// TestQuiet opens a device in a process without XDG_RUNTIME_DIR. Its drivers print nothing,
// and its own child processes get no such variable.
func TestQuiet(t *testing.T) {
	if os.Getenv(quietChild) != "" {
		open(t, nil)
		if out, err := exec.CommandContext(t.Context(), "sh", "-c", "echo $XDG_RUNTIME_DIR").Output(); err != nil || strings.TrimSpace(string(out)) != "" {
			t.Errorf("child processes have XDG_RUNTIME_DIR=%s, %v", out, err)
		}
		return
	}
	adapter(t)
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestQuiet$")
	cmd.Env = append(slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "XDG_RUNTIME_DIR=") }), quietChild+"=1")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	if out, err := cmd.Output(); err != nil || stderr.Len() > 0 {
		t.Errorf("%v, standard error %q\n%s", err, stderr.String(), out)
	}
}
