package port_test

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/seed90331342/attn/gpu/internal/port"
)

// resident returns the resident memory of this process in MiB.
func resident(t *testing.T) int {
	t.Helper()
	data, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		t.Skipf("needs /proc/self/statm: %v", err)
	}
	var size, pages int
	if _, err := fmt.Sscan(string(data), &size, &pages); err != nil {
		t.Fatal(err)
	}
	return pages * os.Getpagesize() >> 20
}

// longKernel returns a kernel whose compiled form takes some MiB in a software driver.
func longKernel() port.PipelineDesc {
	var body strings.Builder
	for i := range 150 {
		fmt.Fprintf(&body, "\th = (h ^ (h >> %du)) * %du + tile[(t + %du) %% 64u];\n", 1+i%13, 2*i+1, i%64)
	}
	return port.PipelineDesc{Label: "long", Entry: "main", Bindings: []port.BindingKind{port.ReadWrite}, WGSL: `
@group(0) @binding(0) var<storage, read_write> x: array<u32>;
var<workgroup> tile: array<u32, 64>;
@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) t: u32) {
	var h = x[t];
	tile[t] = h;
	workgroupBarrier();
` + body.String() + `	x[t] = h;
}`}
}

// run compiles a kernel and runs it.
func run(t *testing.T, d port.Device, desc port.PipelineDesc) port.Pipeline {
	t.Helper()
	p, err := d.CreatePipeline(desc)
	if err != nil {
		t.Fatal(err)
	}
	buf, err := d.CreateBuffer(256, storage)
	if err != nil {
		t.Fatal(err)
	}
	defer buf.Release()
	ticket, err := d.Submit([]port.Command{{Pipeline: p, Bindings: []port.Binding{{Buffer: buf, Size: 256}}, Groups: [3]uint32{1, 1, 1}}})
	if err == nil {
		err = d.Wait(ticket)
	}
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// Closing a device and releasing a pipeline return their memory: a program that does
// either again and again does not grow.
func TestMemoryIsReturned(t *testing.T) {
	kernel := longKernel()
	shared := open(t, nil)
	for _, c := range []struct {
		name  string
		round func(t *testing.T)
	}{
		{"pipelines released", func(t *testing.T) { run(t, shared, kernel).Release() }},
		{"devices closed", func(t *testing.T) {
			all, err := port.Adapters()
			if err != nil {
				t.Fatal(err)
			}
			d, err := all[0].Open(all[0].Limits())
			for _, a := range all {
				a.Release()
			}
			if err != nil {
				t.Fatal(err)
			}
			defer d.Close()
			run(t, d, kernel)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var before int
			const warm, rounds = 10, 20
			for i := range warm + rounds {
				if i == warm {
					before = resident(t)
				}
				c.round(t)
			}
			grown := resident(t) - before
			t.Logf("%d MiB after %d rounds, %d MiB more after %d", before, warm, grown, warm+rounds)
			if grown > 3*rounds/2 {
				t.Errorf("%d rounds kept %d MiB", rounds, grown)
			}
		})
	}
}
