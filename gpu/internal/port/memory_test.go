package port_test

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/gpu/internal/port/libraries"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// longKernel returns a kernel whose compiled form takes some MiB in a software driver.
func longKernel() port.PipelineDesc {
	var body strings.Builder
	for i := range 150 {
		fmt.Fprintf(&body, "\th = (h ^ (h >> %du)) * %du + tile[(t + %du) %% 64u];\n", 1+i%13, 2*i+1, i%64)
	}
	return port.PipelineDesc{Label: "long", Entry: "main", Bindings: []gputypes.BufferBindingType{port.ReadWrite}, WGSL: `
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
	p := must.Get(d.CreatePipeline(desc))(t)
	buf := buffer(t, d, 256, storage)
	defer buf.Release()
	submit(t, d, port.Command{Pipeline: p, Bindings: []port.Binding{{Buffer: buf, Size: 256}}, Groups: [3]uint32{1, 1, 1}})
	return p
}

// usage is what the process has of the system, in the order of usageNames.
type usage [4]int

var usageNames = []string{"MiB resident", "MiB mapped", "threads", "files"}

func usageNow(t *testing.T) usage {
	t.Helper()
	data, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		t.Skipf("needs /proc/self/statm: %v", err)
	}
	var mapped, resident int // pages
	must.Get(fmt.Sscan(string(data), &mapped, &resident))(t)
	entries := func(dir string) int { return len(must.Get(os.ReadDir(dir))(t)) }
	mib := func(pages int) int { return pages * os.Getpagesize() >> 20 }
	return usage{mib(resident), mib(mapped), entries("/proc/self/task"), entries("/proc/self/fd")}
}

// Closing a device and releasing a pipeline or a buffer return what they took: a program
// that does one of them again and again does not grow.
func TestMemoryIsReturned(t *testing.T) {
	if runtime.GOOS == "js" {
		t.Skip("Dawn frees buffers at the next submission, and pipelines and devices when JavaScript collects them")
	}
	kernel := longKernel()
	shared := open(t, nil)
	// For Go's heap and threads, and for what the driver caches, whatever the rounds.
	most := usage{24, 256, 4, 2}
	for _, c := range []struct {
		name        string
		short, long int // rounds
		round       func(t *testing.T)
	}{
		{"pipelines released", 40, 500, func(t *testing.T) { run(t, shared, kernel).Release() }},
		{"buffers released without a submission", 200, 5000, func(t *testing.T) {
			buffer(t, shared, 16<<20, storage).Release()
		}},
		{"devices closed", 40, 500, func(t *testing.T) {
			all := must.Get(libraries.Adapters(""))(t)
			d, err := all[0].Open(all[0].Limits())
			for _, a := range all {
				a.Release()
			}
			must.Do(t, err)
			defer d.Close()
			run(t, d, kernel)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			rounds := c.long
			if testing.Short() {
				rounds = c.short
			}
			const warm = 20
			var before usage
			for i := range warm + rounds {
				if i == warm {
					before = usageNow(t)
				}
				if i%100 == 0 {
					t.Logf("%d rounds: %v", i, usageNow(t))
				}
				c.round(t)
			}
			// Dawn frees some memory at later events. What has leaked stays.
			after := usageNow(t)
			for end := time.Now().Add(port.HangLimit); after[1] > before[1]+most[1] && time.Now().Before(end); after = usageNow(t) {
				run(t, shared, kernel).Release()
			}
			t.Logf("%v: %v after %d rounds, %v after %d more", usageNames, before, warm, after, rounds)
			for i, name := range usageNames {
				if after[i] > before[i]+most[i] {
					t.Errorf("%d rounds: %d %s, %d before", rounds, after[i], name, before[i])
				}
			}
		})
	}
}
