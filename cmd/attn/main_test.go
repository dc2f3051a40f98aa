package main

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cmd/attn/internal/devices"
	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

var attn, mustRun, mustFail = clitest.Named(program)

// TestMain runs the program instead of the tests in processes that tests start.
func TestMain(m *testing.M) {
	clitest.Main(m, func() {
		backend.Register("started", startedFamily)
		main()
	})
}

// TestHelp prints the help of the program and of each command.
func TestHelp(t *testing.T) {
	for _, command := range []string{"", "run", "explain", "devices", "heatmap", "bench", "compare", "tune", "version"} {
		if out := mustRun(t, strings.Fields(command+" --help")...); !strings.HasPrefix(out, "Usage: attn") {
			t.Errorf("attn %s --help printed %q", command, out)
		}
	}
}

// hostile is a family with a device whose texts would erase the screen, turn the direction
// of the text, and start a line of their own.
type hostile struct{ clitest.OnCPU }

const hostileText = "evil\x1b[2J\u202e\xff\ngpu: fast"

// Devices implements backend.Driver.
func (hostile) Devices() ([]backend.Info, error) {
	return []backend.Info{{Name: "hostile", Device: hostileText, Driver: hostileText}}, nil
}

// TestDevicesPlain lists a device with hostile texts.
func TestDevicesPlain(t *testing.T) {
	backend.Register("hostile", hostile{startedFamily})
	defer backend.Register("hostile", startedFamily)
	const plain = "evil\ufffd[2J\ufffd\ufffd; gpu: fast"
	out := mustRun(t, "devices")
	clitest.Contains(t, out, "\nhostile: "+plain+"\n", "  driver  "+plain+"\n")
	out = mustRun(t, "devices", "--json")
	if strings.ContainsAny(out, "\x1b\u202e") || !strings.Contains(out, `evil\u001b[2J\u202e\ufffd\ngpu: fast`) {
		t.Errorf("attn devices --json prints %q", out)
	}
}

// TestDevices lists the families of backends in both forms, including one without a device.
func TestDevices(t *testing.T) {
	backend.Register("none", startedFamily)
	out := mustRun(t, "devices")
	clitest.Contains(t, out, "cpu: ", "  threads", "  provider", "\nnone: none (no usable device)\n", "\nauto: ")
	var r devices.Report
	must.Do(t, json.Unmarshal([]byte(mustRun(t, "devices", "--json")), &r))
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
