package backend

import (
	"fmt"
	"maps"
	"strings"
	"testing"

	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// fakeDriver lists infos, records selectors and opens nothing.
type fakeDriver struct {
	infos []Info
	err   error
	asked *[]string
}

type fakeBackend struct{ Backend }

func (d fakeDriver) Devices() ([]Info, error) { return d.infos, d.err }
func (d fakeDriver) Open(s string) (Backend, error) {
	if d.err != nil {
		return nil, d.err
	}
	*d.asked = append(*d.asked, s)
	return fakeBackend{}, nil
}

func TestOpenAndAuto(t *testing.T) {
	var cpu, gpu []string
	cpuInfo := []Info{{Name: "cpu", Type: CPU}}
	for _, c := range []struct {
		name     string
		gpus     []Info
		err      error
		want     string
		whySays  string
		gpuAsked string
	}{
		{"a discrete GPU after an integrated one", []Info{{Name: "gpu:0", Type: Integrated, Device: "small"}, {Name: "gpu:1", Type: Discrete, Device: "large"}}, nil, "gpu:1", "large", "1"},
		{"a GPU whose kind a browser hides", []Info{{Name: "gpu:0", Type: Other, Device: "hidden"}}, nil, "gpu:0", "hidden", "0"},
		{"a software driver", []Info{{Name: "gpu:0", Type: CPU}}, nil, "cpu", "software", ""},
		{"no adapter", nil, ErrNoDevice, "cpu", "no usable device", ""},
	} {
		cpu, gpu = nil, nil
		Register("cpu", fakeDriver{infos: cpuInfo, asked: &cpu})
		Register("gpu", fakeDriver{infos: c.gpus, err: c.err, asked: &gpu})
		name, why := Auto()
		if name != c.want || !strings.Contains(why, c.whySays) {
			t.Errorf("%s: auto is %q because %q, should be %q with %q", c.name, name, why, c.want, c.whySays)
		}
		if _, err := Open("auto"); err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		if c.gpuAsked != "" && (len(gpu) != 1 || gpu[0] != c.gpuAsked) || c.gpuAsked == "" && len(cpu) != 1 {
			t.Errorf("%s: asked cpu %q, gpu %q", c.name, cpu, gpu)
		}
	}
	saved := maps.Collect(drivers.Range)
	drivers.Clear()
	for _, name := range []string{"auto", "cpu", "gpu", "gpu:1"} {
		family := map[string]string{"auto": "cpu", "gpu:1": "gpu"}[name]
		if family == "" {
			family = name
		}
		must.Fail(t, fmt.Sprintf("%s without imports", name), must.Err(Open(name)), ErrNoBackend, `import _ "github.com/seed90331342/attn/`+family+`"`)
	}
	for family, d := range saved {
		drivers.Store(family, d)
	}
	must.Fail(t, "unknown backend", must.Err(Open("tpu")), ErrNoBackend, "auto, cpu, gpu")
	gpu = nil
	Register("gpu", fakeDriver{infos: cpuInfo, asked: &gpu})
	if _, err := Open("gpu:llvm pipe: 2"); err != nil || gpu[0] != "llvm pipe: 2" {
		t.Errorf("selector is %q, %v", gpu, err)
	}
}
