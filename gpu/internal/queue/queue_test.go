package queue

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/gpu/internal/resource"
	"github.com/seed90331342/attn/shaders"
)

// The time of submissions changes the speed of the pipeline that they have in common, unless they were short or it is
// not known when they began or ended. The wait for the submission before them does not count.
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
		var p, q resource.Pipeline
		learn := func(pipelines ...*resource.Pipeline) float64 {
			p.Pace.Set(1e9)
			s := sent{ended: c.ended, exact: c.exact}
			var list []*submission
			for range c.n {
				list = append(list, &submission{began: c.began, seconds: c.seconds, pipelines: pipelines})
			}
			s.learn(list, c.blocked, now, share)
			if s.ended != now || s.exact != c.blocked {
				t.Errorf("%s: ended at %v, exact %v", c.name, s.ended, s.exact)
			}
			return p.Pace.Speed() / 1e9
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
				pacing:    pacing{budget: time.Hour, maxWork: c.max, speed: 1e15, lanes: 1},
				Pipelines: resource.NewPipelines(nil, resource.PipelineConfig{Speed: 1e15}),
			}
			next := 0
			for next < c.total {
				n, grid := d.groupsFrom(&Step{Kernel: shaders.Peak, Groups: c.total, OpsPerGroup: c.each}, next, time.Time{})
				x, y := int(grid[0]), int(grid[1])
				if n < 1 || x*y < n || x > c.maxDim || y > c.maxDim {
					t.Fatalf("range %d+%d in a grid of %d x %d", next, n, x, y)
				}
				if float64(n)*c.each > c.max && n > 1 {
					t.Errorf("%d workgroups are over the bound on work", n)
				}
				next += n
			}
			if next != c.total {
				t.Errorf("covered %d of %d", next, c.total)
			}
		})
	}
}
