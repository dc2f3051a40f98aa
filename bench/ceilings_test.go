package bench

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
)

func TestCeilings(t *testing.T) {
	var turns []string
	named := func(name string, be backend.Backend) Contender {
		return Contender{Name: name, Device: kernels.NewDevice(be)}
	}
	turn := func(name string) func() { return func() { turns = append(turns, name) } }
	all := &roofed{metered: metered{fake: fake{name: "cpu", threads: 2}, peak: 4e9, metered: turn("all")}, read: 2e9}
	queued := &device{roofed: roofed{metered: metered{fake: fake{name: "gpu:0"}, peak: 5e9, metered: turn("gpu:0")}, read: 1e9}, launch: 20 * time.Microsecond}
	r, err := Ceilings(t.Context(), []Contender{
		named("all", all), named("peak", &metered{fake: fake{name: "cpu", threads: 2}, peak: 3e9, metered: turn("peak")}), named("none", &fake{name: "cpu", threads: 2}),
		named("gpu:0", queued)}, "npu · none")
	if err != nil || r.Err() != nil {
		t.Fatal(err, r.Err())
	}
	if len(r.Ceilings) != 4 || strings.Join(turns[:6], " ") != "all peak gpu:0 all peak gpu:0" {
		t.Fatalf("%+v after %v", r.Ceilings, turns)
	}
	c := r.Ceilings[0]
	if *c.GFLOPS != 4 || *c.MemoryGBS != 2 || *c.CacheGBS != 2 || c.Threads != 2 || all.asked != 2*cacheBytes {
		t.Errorf("%+v, and %d bytes were read last", c, all.asked)
	}
	if c := r.Ceilings[1]; *c.GFLOPS != 3 || c.MemoryGBS != nil || c.CacheGBS != nil {
		t.Errorf("%+v: what no one measured must be null", c)
	}
	if c := r.Ceilings[3]; *c.GFLOPS != 5 || *c.LaunchS != 20e-6 || queued.asked != deviceCacheBytes {
		t.Errorf("the best of what a device measures is %+v; %d bytes were read last", c, queued.asked)
	}
	wantText(t, r.WriteTable, "     all        2             4.00               2.00              2.00\n",
		"    none        2                -                  -                 -\n",
		"   gpu:0        -             5.00               1.00              1.00\n",
		"\ngpu:0 · pretended · fake v1\n  empty launch   20.0 µs\n")
}

// broken is a fake whose ceiling cannot be measured.
type broken struct{ metered }

var errBroken = errors.New("no clock")

func (b *broken) PeakFLOPS(context.Context) (float64, error) { return 0, errBroken }

func TestCeilingsThatFail(t *testing.T) {
	if _, err := Ceilings(t.Context(), []Contender{{Name: "x", Device: kernels.NewDevice(&broken{})}}); !errors.Is(err, errBroken) || !strings.Contains(err.Error(), "ceilings of x") {
		t.Errorf("the error is %v", err)
	}
}
