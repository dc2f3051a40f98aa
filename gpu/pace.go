package gpu

import (
	"fmt"
	"math"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/seed90331342/attn/backend"
)

// defaultBudget is how long the work that a cancelled call leaves on the device
// may take. Watchdogs of drivers act after 2 s or more.
const defaultBudget = 200 * time.Millisecond

// maxFlight is how many submissions of a call are on the device at a time: while
// one computes, the next is put together. They share the budget.
const maxFlight = 2

// Operations a second that a kernel is taken to do before it has run, by the kind
// of adapter, on the low side: too low costs a few submissions of some
// milliseconds, too high one that is long.
const (
	speedCPU        = 2e9
	speedIntegrated = 1e11
	speedDiscrete   = 1e12
)

// Workgroups that run at the same time, at least so many on any adapter of a kind
// that is busy. A dispatch of fewer takes as long as one of so many.
const (
	lanesIntegrated = 16
	lanesDiscrete   = 128
)

func firstSpeed(t backend.DeviceType) (speed float64, lanes int) {
	switch t {
	case backend.Discrete:
		return speedDiscrete, lanesDiscrete
	case backend.Integrated, backend.Virtual, backend.Other:
		return speedIntegrated, lanesIntegrated
	default: // a software driver has a thread for each processor
		return speedCPU, runtime.NumCPU()
	}
}

// pace is how many operations a second a pipeline does. A guess at first, then
// what its submissions took.
type pace struct{ bits atomic.Uint64 }

// Bounds of a speed, so that no clock that stood still or jumped can make
// submissions endless or single workgroups.
const (
	minSpeed = 1e7
	maxSpeed = 1e15
)

func (p *pace) start(speed float64) { p.bits.Store(math.Float64bits(speed)) }

func (p *pace) speed() float64 { return math.Float64frombits(p.bits.Load()) }

// maxStep bounds how far off one measurement can say that the speed is.
const maxStep = 16

// measured is told that a submission took so many times as long as the speed let
// one expect. The new speed is the geometric mean of the old and the measured: in
// three or four submissions it comes within a fifth of a speed 16 times as high,
// and half of what disturbs a single one is forgotten with the next.
//
// Calls that run at the same time may both tell it; then one of the two counts.
func (p *pace) measured(ratio float64) {
	if ratio <= 0 || math.IsNaN(ratio) {
		return
	}
	ratio = min(max(ratio, 1./maxStep), maxStep)
	p.start(min(max(p.speed()/math.Sqrt(ratio), minSpeed), maxSpeed))
}

// share is the time that one submission may take.
func (b *Backend) share() float64 { return b.budget.Seconds() / maxFlight }

// atOnce returns how many workgroups, of each operations a workgroup, one dispatch
// of v may have.
func (b *Backend) atOnce(v variant, each float64) int {
	if each <= 0 {
		return math.MaxInt32
	}
	n := max(b.pipe(v).pace.speed()*b.share()/each, float64(b.lanes))
	if b.maxWork > 0 {
		n = min(n, b.maxWork/each)
	}
	return int(min(max(n, 1), math.MaxInt32))
}

// pieceWork returns how many operations one workgroup of v may do in a dispatch:
// what it can in the time of a submission, when the device has all its lanes full.
func (b *Backend) pieceWork(v variant) float64 {
	work := b.pipe(v).pace.speed() * b.share() / float64(b.lanes)
	if b.maxWork > 0 {
		work = min(work, b.maxWork)
	}
	return work
}

// seconds is how long a step of n workgroups, each operations each, is expected to
// take.
func (b *Backend) seconds(p *pipe, n int, each float64) float64 {
	return each * float64(max(n, b.lanes)) / p.pace.speed()
}

// pacing says in words how submissions of v are sized.
func (b *Backend) pacing(v variant) string {
	s := fmt.Sprintf("a submission takes up to %v at %.3g operations a second", b.budget/maxFlight, b.pipe(v).pace.speed())
	if b.maxWork > 0 {
		s += fmt.Sprintf(" and %.3g operations", b.maxWork)
	}
	return s
}
