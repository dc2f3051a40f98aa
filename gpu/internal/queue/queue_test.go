package queue

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/gpu/internal/port"
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
		var p pace
		p.set(c.guess)
		for range c.within {
			p.measured(p.speed() / c.real) // took so many times the expected
		}
		if off := p.speed() / c.real; off < 0.8 || off > 1.25 {
			t.Errorf("%s: %.3g after %d submissions, it is %.3g", c.name, p.speed(), c.within, c.real)
		}
	}
	var p pace
	p.set(1e9)
	p.measured(math.NaN())
	p.measured(-1)
	if p.speed() != 1e9 {
		t.Errorf("clocks that jump changed the speed to %g", p.speed())
	}
	for range 200 {
		p.measured(math.Inf(1))
	}
	if p.speed() != minSpeed {
		t.Errorf("stuck at %g", p.speed())
	}
	for range 200 {
		p.measured(1e-300)
	}
	if p.speed() != maxSpeed {
		t.Errorf("stuck at %g", p.speed())
	}
}

// The time of submissions changes the speed of the pipeline that they have in common, unless
// they were short or it is not known when they began or ended. The wait for the submission
// before them does not count.
func TestLearn(t *testing.T) {
	share := (&pacing{budget: time.Hour}).share(time.Time{}) // long enough that no pause of this test matters
	now := time.Now()
	ago := func(seconds float64) time.Time { return now.Add(-time.Duration(seconds * 1e9)) }
	for _, c := range []struct {
		name            string
		began, ended    time.Time // of these submissions, of the one before
		exact, blocked  bool      // that was waited for, and these are
		n               int       // submissions, of which each
		seconds, factor float64   // was expected to take
	}{
		{"as expected", ago(share), time.Time{}, false, true, 1, share, 1},
		{"four times as long", ago(4 * share), time.Time{}, false, true, 1, share, 0.5},
		{"four times as long, after one that ended before", ago(4 * share), ago(5 * share), false, true, 1, share, 0.5},
		{"four times as long, three of them behind another", ago(4 * share), ago(share), true, true, 1, share, 1},
		{"four of them", ago(4 * share), time.Time{}, false, true, 4, share, 1},
		{"two of them, twice as long", ago(4 * share), time.Time{}, false, true, 2, share, math.Sqrt2 / 2},
		{"behind another that ended at an unknown time", ago(4 * share), ago(3 * share), false, true, 1, share, 1},
		{"found ended four times as late", ago(4 * share), time.Time{}, false, false, 1, share, 1},
		{"found ended early", ago(share / 4), time.Time{}, false, false, 1, share, 2},
		{"in no time", ago(1e-9), time.Time{}, false, true, 1, share, 4}, // by maxStep
		{"a short one that took long for that", ago(share / 100), time.Time{}, false, true, 1, share / 1000, 1},
	} {
		var p, q Pipeline
		learn := func(pipelines ...*Pipeline) float64 {
			p.pace.set(1e9)
			s := sent{ended: c.ended, exact: c.exact}
			var list []*flight
			for range c.n {
				list = append(list, &flight{began: c.began, seconds: c.seconds, pipelines: pipelines})
			}
			s.learn(list, c.blocked, now, share)
			if s.ended != now || s.exact != c.blocked {
				t.Errorf("%s: ended at %v, exact %v", c.name, s.ended, s.exact)
			}
			return p.pace.speed() / 1e9
		}
		if got := learn(&p, &p); !(math.Abs(got/c.factor-1) <= 0.05) {
			t.Errorf("%s: the speed changed by %.3g, not %.3g", c.name, got, c.factor)
		}
		if learn(&p, &q) != 1 {
			t.Errorf("%s: a submission of several pipelines changed the speed", c.name)
		}
	}
}

// TestSplitCoversAllWorkgroups checks that dispatches cover each workgroup once, within
// the limits on a dimension and on work.
func TestSplitCoversAllWorkgroups(t *testing.T) {
	for _, c := range []struct {
		total, maxDim int
		each, max     float64
	}{{1, 65535, 1, 1e9}, {7, 3, 1, 1e9}, {10, 3, 1, 1e9}, {100, 3, 1, 1e9}, {100, 65535, 10, 25}, {5, 1, 1, 1}, {70000, 65535, 1, 1e9}, {3, 65535, 1e12, 1}} {
		t.Run(fmt.Sprint(c), func(t *testing.T) {
			d := &Device{
				Limits:    gputypes.Limits{MaxComputeWorkgroupsPerDimension: uint32(c.maxDim)},
				pacing:    pacing{budget: time.Hour, maxWork: c.max, speed: maxSpeed, lanes: 1},
				pipelines: pipelines{all: map[shaders.Variant]*Pipeline{}},
			}
			next := 0
			err := d.split(Step{Kernel: shaders.Peak, Groups: c.total, Each: c.each}, time.Time{}, func(first, n int, grid [3]uint32) error {
				x, y := int(grid[0]), int(grid[1])
				if first != next || n < 1 || x*y < n || x > c.maxDim || y > c.maxDim {
					t.Errorf("range %d+%d in a grid of %d x %d, expected it at %d", first, n, x, y, next)
				}
				if float64(n)*c.each > c.max && n > 1 {
					t.Errorf("%d workgroups are over the bound on work", n)
				}
				next = first + n
				return nil
			})
			if err != nil || next != c.total {
				t.Errorf("covered %d of %d, %v", next, c.total, err)
			}
		})
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
	d := &Device{
		Port: f, Limits: gputypes.Limits{MaxComputeWorkgroupStorageSize: 1 << 20, MaxComputeInvocationsPerWorkgroup: 1024},
		pipelines: pipelines{all: map[shaders.Variant]*Pipeline{}, most: most},
	}
	pipeline := func(n int) *Pipeline {
		return d.Pipeline(shaders.Attention{DVB: n + 1})
	}
	use := func(n int) *Pipeline {
		t.Helper()
		p := pipeline(n)
		if _, err := d.Acquire(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		return p
	}
	held := use(0)
	for n := 1; n <= 5; n++ {
		d.Release(use(n))
	}
	if f.live != most || f.compiled != 6 {
		t.Errorf("%d live pipelines after %d were compiled, want %d", f.live, f.compiled, most)
	}
	if !d.Compiled(held) {
		t.Error("a pipeline in use was released")
	}
	d.Release(use(4)) // is still there
	d.Release(use(1)) // was released
	if f.compiled != 7 {
		t.Errorf("%d were compiled, want 7", f.compiled)
	}
	d.Release(held)
	d.Release(use(6))
	if d.Compiled(held) || f.live != most {
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
