package queue

import (
	"math"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/seed90331342/attn/backend"
)

// defaultBudget is how long a cancelled call may keep the device busy. Watchdogs of
// drivers act after 2 s or more.
const defaultBudget = 200 * time.Millisecond

// MaxFlight is the number of submissions of a call on the device at a time: while one
// computes, the next is assembled. They share the budget.
const MaxFlight = 2

// Operations a second that a kernel is assumed to do before its first run, by kind of
// adapter. They are low: an estimate that is too low costs a few submissions of some
// milliseconds, one that is too high a long submission.
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
	maxWork float64 // operations; 0 is no bound
	speed   float64 // of a pipeline before its first run
	lanes   int
	blocks  bool // Submit blocks while a submission runs, as that of software drivers
}

func newPacing(kind backend.DeviceType, c Config) pacing {
	p := pacing{budget: c.Budget, maxWork: max(c.MaxWork, 0)}
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

// A submission takes at most a deadlineShare of the time until the deadline of its call, but
// shortest seconds may pass: on software drivers a submission costs about a tenth of that.
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
	return within(p.budget.Seconds()/MaxFlight, deadline)
}

// ahead is the time in seconds that submissions may be expected to take when a call adds one. No
// context ends a Submit that blocks. Near its deadline a call therefore waits for them first.
func (p *pacing) ahead(deadline time.Time) float64 {
	if !p.blocks {
		deadline = time.Time{}
	}
	return within(maxAhead*p.budget.Seconds(), deadline)
}

// full reports whether a submission of so many seconds and operations is too long.
func (p *pacing) full(seconds, work float64, deadline time.Time) bool {
	return seconds > p.share(deadline) || p.maxWork > 0 && work > p.maxWork
}

// atOnce returns the number of workgroups, of each operations, that one dispatch may
// have on a pipeline of a speed.
func (p *pacing) atOnce(speed, each float64, deadline time.Time) int {
	if each <= 0 {
		return math.MaxInt32
	}
	n := max(speed*p.share(deadline)/each, float64(p.lanes))
	if p.maxWork > 0 {
		n = min(n, p.maxWork/each)
	}
	return int(min(max(n, 1), math.MaxInt32))
}

// seconds is the expected time of n workgroups of each operations.
func (p *pacing) seconds(speed float64, n int, each float64) float64 {
	return each * float64(max(n, p.lanes)) / speed
}

// pace is the speed of a pipeline in operations a second: an assumption at first, then
// what its submissions show.
type pace struct{ bits atomic.Uint64 }

// Bounds of a speed. No clock that stops or jumps can make submissions endless or single
// workgroups.
const (
	minSpeed = 1e7
	maxSpeed = 1e15
)

func (p *pace) set(speed float64) { p.bits.Store(math.Float64bits(speed)) }

func (p *pace) speed() float64 { return math.Float64frombits(p.bits.Load()) }

// maxStep bounds the factor by which one measurement may correct the speed.
const maxStep = 16

// measured corrects the speed after a submission that took ratio times its expected
// time. The new speed is the geometric mean of the old and the measured one: three or
// four submissions correct a factor of 16 to within a fifth, and each halves the effect
// of a disturbance. Of concurrent corrections one may be lost.
func (p *pace) measured(ratio float64) {
	if ratio <= 0 || math.IsNaN(ratio) {
		return
	}
	ratio = min(max(ratio, 1./maxStep), maxStep)
	p.set(min(max(p.speed()/math.Sqrt(ratio), minSpeed), maxSpeed))
}
