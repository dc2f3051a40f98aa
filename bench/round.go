package bench

import (
	"context"
	"fmt"
	"math"
	"runtime"
	"sync/atomic"
	"time"

	"gonum.org/v1/gonum/floats"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/bench/internal/stats"
	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/kernels"
)

const (
	// precision ends the repetitions: half of the median's interval relative to the median.
	precision = 0.02
	// roundSeconds is the total time of a round's calls: about that of its ceilings, and
	// long enough to fill caches with the case's own data.
	roundSeconds = 0.05
	// maxEach is the largest number of calls in a round.
	maxEach = 50
	// minRounds and settleRounds are the smallest numbers of rounds: of calls that take
	// seconds, and of short calls. Six rounds cover the median with a probability of 95%.
	minRounds    = 3
	settleRounds = 10
	// Calls of longCall seconds have longRounds rounds: with the warm-up that is as long as the next length.
	longCall   = 5.0
	longRounds = 2
	// maxRounds ends the repetitions of a case that does not become precise.
	maxRounds = 40
	// morePatience limits the time of a case with a budget, or in a sweep, to a multiple of its shortest time.
	morePatience = 5
	// caseSeconds limits the time of a case's rounds beyond minRounds in a sweep.
	caseSeconds = 3.0
	// ceilingSeconds is the time of the ceilings of one round.
	ceilingSeconds = 0.07
)

// perRound returns the number of calls in a round.
func perRound(seconds float64) int {
	if seconds <= 0 {
		return maxEach
	}
	return int(min(max(math.Ceil(roundSeconds/seconds), 1), maxEach))
}

// leastRounds returns the smallest number of rounds of calls that take that many seconds.
func leastRounds(seconds float64) int {
	if seconds >= longCall {
		return longRounds
	}
	return int(min(max(caseSeconds/oneRound(seconds), minRounds), settleRounds))
}

// leastSeconds returns the shortest time of a case: a warm-up and the rounds.
func leastSeconds(seconds float64) float64 {
	return seconds + float64(leastRounds(seconds))*oneRound(seconds)
}

// oneRound returns the seconds of a round.
func oneRound(seconds float64) float64 {
	return ceilingSeconds + float64(perRound(seconds))*(seconds+min(max(seconds, paceShortest), paceLongest))
}

// enough reports whether the rounds may end: when the median is precise, or would take too long to become so.
func (b *bencher) enough() bool {
	n, took := len(b.row.Rounds), time.Since(b.roundsBegan).Seconds()
	limit := b.limit
	if !math.IsInf(limit, 1) {
		limit = min(limit, max(morePatience*leastSeconds(b.warm), caseSeconds))
	}
	switch {
	case b.cfg.Rounds > 0:
		return n >= b.cfg.Rounds
	case n < leastRounds(b.warm):
		return false
	case n >= maxRounds || took+took/float64(n) > limit:
		return true
	}
	medians := b.row.Medians()
	low, high, sure := stats.MedianInterval(medians)
	return sure >= stats.Confidence && (high-low)/2 <= precision*stats.Median(medians)
}

// round measures once, close together in time: the ceilings, the calls with their
// allocations, a call by the device's clock, the three stages.
func (b *bencher) round() error {
	each := perRound(b.warm)
	peak, read, launch, err := meters(b.work, b.dev.Backend(), b.row.Plan.Matrices, b.op.reads()...)
	if err != nil {
		return fmt.Errorf("ceiling: %w", err)
	}
	r := report.Round{
		CeilingGFLOPS: report.Positive(peak / 1e9), CeilingGBS: report.Positive(read / 1e9), LaunchS: report.Positive(launch),
		TimesS: make([]float64, 0, each), PaceS: make([]float64, 0, each), // no growth while counting allocations
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	every := max(int(paceApart/b.warm), 1)
	for i := range each {
		switch {
		case b.pace == nil:
		case i%every == 0:
			r.PaceS = append(r.PaceS, b.pace.piece())
		default: // hardly any time has passed
			r.PaceS = append(r.PaceS, r.PaceS[i-1])
		}
		seconds, err := timed(b.work, b.op.run)
		if err != nil {
			return err
		}
		r.TimesS = append(r.TimesS, seconds)
		if b.stop() != "" {
			break
		}
	}
	runtime.ReadMemStats(&after)
	b.row.Rounds = append(b.row.Rounds, r)
	// The minimum excludes allocations of other goroutines.
	b.allocs = min(b.allocs, int64(after.Mallocs-before.Mallocs)/int64(len(r.TimesS)))
	if b.stop() != "" {
		return nil
	}
	if err := b.kernel(); err != nil {
		return err
	}
	if b.staged == nil || b.stop() != "" || floats.Sum(b.stages) > stagesSeconds && (len(b.stages) >= stagesRounds || !math.IsInf(b.limit, 1)) {
		return nil // the comparison needs fewer digits than the figure
	}
	seconds, err := timed(b.work, b.staged.run)
	if err != nil {
		return fmt.Errorf("three stages: %w", err)
	}
	b.stages = append(b.stages, seconds)
	b.row.Rounds[len(b.row.Rounds)-1].StagesS = report.Positive(seconds)
	return nil
}

// meters measures the peak rate in operations a second, of matrix units where so many of their products stand for
// one of the call, the rate of reading operands in bytes a second, and the seconds of an empty call; 0 for what the
// backend cannot measure.
func meters(ctx context.Context, be backend.Backend, matrices int, operands ...kernels.Tensor) (peak, read, launch float64, err error) {
	units, hasUnits := be.(backend.MatrixMeter)
	meter, hasMeter := be.(backend.Meter)
	switch {
	case hasUnits && matrices > 0:
		peak, err = units.MatrixFLOPS(ctx)
		peak /= float64(matrices)
	case hasMeter:
		peak, err = meter.PeakFLOPS(ctx)
	}
	if hasMeter && err == nil {
		read, err = meter.ReadBandwidth(ctx, operands...)
	}
	if queue, ok := be.(backend.QueueMeter); ok && err == nil {
		var took time.Duration
		took, err = queue.LaunchTime(ctx)
		launch = took.Seconds()
	}
	return peak, read, launch, err
}

// kernel times a call by the device's clock, if it has one. It is a separate call, because
// reading that clock takes time, and only one if calls are long.
func (b *bencher) kernel() error {
	if b.trace.pieces.Load() == 0 || float64(len(b.kernels))*b.warm > stagesSeconds {
		return nil
	}
	var trace recorder
	if err := b.op.run(trace.record(b.work)); err != nil {
		return err
	}
	if trace.pieces.Load() > 0 {
		b.kernels = append(b.kernels, time.Duration(trace.kernel.Load()).Seconds())
	}
	return nil
}

// recorder sums up what a backend reports of its calls (kernels.Trace). Timed repetitions
// are not recorded. Times are in nanoseconds.
type recorder struct {
	kernel, pieces    atomic.Int64 // by the device's clock, and the number of terms
	compile, compiled atomic.Int64 // the time of compiling and the number of kernels
	move, moved       atomic.Int64 // the time of moving inputs to the device and their bytes
}

// record returns a context whose calls are recorded.
func (h *recorder) record(ctx context.Context) context.Context {
	return kernels.WithTrace(ctx, &kernels.Trace{
		Kernel:  func(took time.Duration) { h.kernel.Add(int64(took)); h.pieces.Add(1) },
		Compile: func(_ string, took time.Duration) { h.compile.Add(int64(took)); h.compiled.Add(1) },
		Move:    func(bytes int64, took time.Duration) { h.move.Add(int64(took)); h.moved.Add(bytes) },
	})
}
