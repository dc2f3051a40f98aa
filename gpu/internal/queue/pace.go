package queue

import (
	"cmp"
	"fmt"
	"math"
	"runtime"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/shaders"
)

// defaultBudget is how long a cancelled call may keep the device busy. Watchdogs of drivers act after 2 s or more.
const defaultBudget = 200 * time.Millisecond

// MaxPending is the number of submissions of a call on the device at a time: while one
// computes, the next is assembled. They share the budget.
const MaxPending = 2

// Operations a second that a kernel is assumed to do before its first run, by kind of adapter. They are low: an
// estimate that is too low costs a few submissions of some milliseconds, one that is too high a long submission.
const (
	speedCPU        = 2e9
	speedIntegrated = 1e11
	speedDiscrete   = 1e12
)

// Workgroups that any busy adapter of a kind runs at the same time. A dispatch of fewer
// takes as long as one of that many.
const (
	lanesIntegrated = 16
	lanesDiscrete   = 128
)

// pacing sizes submissions by time and by work.
type pacing struct {
	budget  time.Duration
	maxWork float64 // operations
	speed   float64 // of a pipeline before its first run
	lanes   int
	blocks  bool // Submit blocks while a submission runs, as that of software drivers
}

func newPacing(kind backend.DeviceType, c Config) pacing {
	p := pacing{budget: c.Budget, maxWork: cmp.Or(max(c.MaxWork, 0), math.Inf(1))}
	if p.budget <= 0 {
		p.budget = defaultBudget
	}
	switch kind {
	case backend.Discrete:
		p.speed, p.lanes = speedDiscrete, lanesDiscrete
	case backend.Integrated, backend.Virtual, backend.Other:
		p.speed, p.lanes = speedIntegrated, lanesIntegrated
	default: // a software driver has a thread for each processor
		p.speed, p.lanes, p.blocks = speedCPU, runtime.NumCPU(), true
	}
	return p
}

// A submission takes at most a deadlineShare of the time until the deadline of its call, or
// shortest seconds: on software drivers a submission costs about a tenth of that.
const (
	deadlineShare = 1. / 8
	shortest      = 1e-3
)

// within returns seconds, or less near a deadline. The zero Time is none.
func within(seconds float64, deadline time.Time) float64 {
	if deadline.IsZero() {
		return seconds
	}
	return min(seconds, max(time.Until(deadline).Seconds()*deadlineShare, shortest))
}

// share is the time in seconds of one submission of a call.
func (p *pacing) share(deadline time.Time) float64 {
	return within(p.budget.Seconds()/MaxPending, deadline)
}

// ahead is the time in seconds that submissions may be expected to take when a call adds one. No
// context ends a Submit that blocks. Near its deadline a call therefore waits for others first.
func (p *pacing) ahead(deadline time.Time) float64 {
	if !p.blocks {
		deadline = time.Time{}
	}
	return within(maxAhead*p.budget.Seconds(), deadline)
}

// full reports whether a submission of so many seconds and operations is too long.
func (p *pacing) full(seconds, work float64, deadline time.Time) bool {
	return seconds > p.share(deadline) || work > p.maxWork
}

// groupsFrom returns the number of workgroups of the dispatch that begins with workgroup first of a step, and the grid that contains
// them. They respect the time of a submission, by the deadline of its call, and the limit of workgroups a dimension.
func (d *Device) groupsFrom(s *Step, first int, deadline time.Time) (n int, grid [3]uint32) {
	dim := min(int(d.Limits.MaxComputeWorkgroupsPerDimension), math.MaxInt32)
	n = min(s.Groups-first, d.pacing.atOnce(d.Pipelines.Of(s.Kernel).Pace.Speed(), s.OpsPerGroup, deadline), dim*dim)
	x := min(n, dim)
	return n, [3]uint32{uint32(x), uint32((n + x - 1) / x), 1}
}

// atOnce returns the number of workgroups that one dispatch may have on a pipeline of a speed. each is the operations of a
// workgroup.
func (p *pacing) atOnce(speed, each float64, deadline time.Time) int {
	if each <= 0 {
		return math.MaxInt32
	}
	n := min(max(speed*p.share(deadline)/each, float64(p.lanes)), p.maxWork/each)
	return int(min(max(n, 1), math.MaxInt32))
}

// seconds is the expected time of n workgroups, of so many operations each.
func (p *pacing) seconds(speed float64, n int, each float64) float64 {
	return each * float64(max(n, p.lanes)) / speed
}

// ChunkWork returns the most operations that one workgroup of k may do in a dispatch. With
// all lanes busy they take the time of one submission.
func (d *Device) ChunkWork(k shaders.Variant) float64 {
	p := &d.pacing
	return min(d.Pipelines.Of(k).Pace.Speed()*p.share(time.Time{})/float64(p.lanes), p.maxWork)
}

// Pacing describes for plans how submissions of k are sized.
func (d *Device) Pacing(k shaders.Variant) string {
	p := &d.pacing
	s := fmt.Sprintf("a submission takes up to %v at %.3g operations a second", p.budget/MaxPending, d.Pipelines.Of(k).Pace.Speed())
	if !math.IsInf(p.maxWork, 1) {
		s += fmt.Sprintf(" and %.3g operations", p.maxWork)
	}
	return s
}
