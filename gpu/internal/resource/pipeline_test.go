package resource

import (
	"math"
	"testing"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/shaders"
)

// The speed follows what submissions take, up and down, within its bounds.
func TestPace(t *testing.T) {
	for _, c := range []struct {
		name        string
		guess, real float64
		within      int // submissions until it is within a fifth
	}{
		{"as guessed", 1e12, 1e12, 1},
		{"16 times as fast", 1e12, 1.6e13, 4},
		{"1000 times as fast", 1e9, 1e12, 8},
		{"16 times as slow", 1e12, 6.25e10, 4},
		{"1000 times as slow", 1e12, 1e9, 8},
	} {
		var p Pace
		p.Set(c.guess)
		for range c.within {
			p.Measured(p.Speed() / c.real) // took so many times the expected
		}
		if off := p.Speed() / c.real; off < 0.8 || off > 1.25 {
			t.Errorf("%s: %.3g after %d submissions, it is %.3g", c.name, p.Speed(), c.within, c.real)
		}
	}
	var p Pace
	p.Set(1e9)
	p.Measured(math.NaN())
	p.Measured(-1)
	if p.Speed() != 1e9 {
		t.Errorf("clocks that jump changed the speed to %g", p.Speed())
	}
	for range 200 {
		p.Measured(math.Inf(1))
	}
	if p.Speed() != minSpeed {
		t.Errorf("stuck at %g", p.Speed())
	}
	for range 200 {
		p.Measured(1e-300)
	}
	if p.Speed() != maxSpeed {
		t.Errorf("stuck at %g", p.Speed())
	}
}

// fakePort compiles pipelines and counts those that are not released.
type fakePort struct {
	port.Device
	live, compiled int
}

func (f *fakePort) CreatePipeline(port.PipelineDesc) (port.Pipeline, error) {
	f.live++
	f.compiled++
	return &fakePipeline{f: f}, nil
}

type fakePipeline struct {
	f        *fakePort
	released bool
}

func (p *fakePipeline) Release() {
	if !p.released {
		p.released = true
		p.f.live--
	}
}

// TestPipelinesAreBounded compiles more variants than a device keeps: the least recently
// used ones are released, none that is in use, and compiled again when needed.
func TestPipelinesAreBounded(t *testing.T) {
	const most = 3
	f := &fakePort{}
	c := NewPipelines(f, PipelineConfig{Limits: gputypes.Limits{MaxComputeWorkgroupStorageSize: 1 << 20, MaxComputeInvocationsPerWorkgroup: 1024}})
	c.Most = most
	pipeline := func(n int) *Pipeline {
		return c.Of(shaders.Attention{DVB: n + 1})
	}
	use := func(n int) *Pipeline {
		t.Helper()
		p := pipeline(n)
		must.Get(c.Acquire(t.Context(), p))(t)
		return p
	}
	held := use(0)
	for n := 1; n <= 5; n++ {
		c.Release(use(n))
	}
	if f.live != most || f.compiled != 6 {
		t.Errorf("%d live pipelines after %d were compiled, want %d", f.live, f.compiled, most)
	}
	if !c.Compiled(held) {
		t.Error("a pipeline in use was released")
	}
	c.Release(use(4)) // is still there
	c.Release(use(1)) // was released
	if f.compiled != 7 {
		t.Errorf("%d were compiled, want 7", f.compiled)
	}
	c.Release(held)
	c.Release(use(6))
	if c.Compiled(held) || f.live != most {
		t.Errorf("%d live pipelines, want %d without the oldest", f.live, most)
	}
	// All in use: none can go.
	for n := 10; n < 15; n++ {
		use(n)
	}
	if f.live < 5 {
		t.Errorf("%d live pipelines, 5 are in use", f.live)
	}
}
