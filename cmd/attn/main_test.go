package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend"
)

// TestUsage shows what the program says without a command and with a wrong one,
// and that help is no failure.
func TestUsage(t *testing.T) {
	code, stdout, stderr := attn(t)
	wantFailure(t, code, stdout, stderr, "expected one of")
	code, stdout, stderr = attn(t, "sun")
	wantFailure(t, code, stdout, stderr, "sun")
	for _, command := range []string{"", "run", "explain", "devices", "onnx", "bench", "compare"} {
		if out := mustRun(t, strings.Fields(command+" --help")...); !strings.HasPrefix(out, "Usage: attn") {
			t.Errorf("attn %s --help printed %q", command, out)
		}
	}
}

// TestDevices lists the families of backends in both forms; one that has no
// device is listed with its reason.
func TestDevices(t *testing.T) {
	backend.Register("none", hookDriver{})
	out := mustRun(t, "devices")
	for _, want := range []string{"cpu: ", "  threads", "  provider", "\nnone: none (no usable device)\n", "\nauto: "} {
		if !strings.Contains(out, want) {
			t.Errorf("attn devices does not say %q:\n%s", want, out)
		}
	}
	var r devicesReport
	if err := json.Unmarshal([]byte(mustRun(t, "devices", "--json")), &r); err != nil {
		t.Fatal(err)
	}
	if r.Auto.Name == "" || r.Auto.Why == "" {
		t.Errorf("auto is %+v", r.Auto)
	}
	for _, f := range r.Families {
		switch {
		case f.Family == "cpu" && (len(f.Devices) != 1 || f.Devices[0].Name != "cpu"):
			t.Errorf("the cpu family is %+v", f)
		case f.Family == "none" && f.Error == "":
			t.Errorf("the family without a device is %+v", f)
		}
	}
}

// builtAttn is the program, built once for the tests that need a process.
var builtAttn string

func TestMain(m *testing.M) {
	quietDrivers()
	dir, err := os.MkdirTemp("", "attn-test-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	builtAttn = filepath.Join(dir, "attn.exe")
	if out, err := exec.Command("go", "build", "-o", builtAttn, ".").CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "go build: %v\n%s", err, out)
		os.Exit(1)
	}
	code := m.Run()
	os.RemoveAll(dir)
	os.Exit(code)
}
