package bench

import (
	"context"
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync"
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
	// minRounds is the smallest number of rounds of calls that take seconds, settleRounds
	// that of short calls: six would cover the median with a probability of 95%, and a rank
	// test of six and six can just distinguish two reports.
	minRounds    = 3
	settleRounds = 10
	// Calls of longCall seconds have longRounds rounds: with the warm-up that is as long as
	// the next length.
	longCall   = 5.0
	longRounds = 2
	// maxRounds ends the repetitions of a case that does not become precise.
	maxRounds = 40
	// morePatience limits the time of a case to a multiple of its shortest time.
	morePatience = 5
	// caseSeconds limits the time of a case's rounds beyond minRounds, without a budget.
	caseSeconds = 3.0
	// ceilingSeconds is the time of the ceilings of one round.
	ceilingSeconds = 0.07
)

// timing is the result of the repetitions of one case; times are in seconds.
type timing struct {
	warm   float64 // of a call at the end of the warm-up
	rounds []report.Round
	stages []float64
	// kernels are calls by the device's clock, clocked the same calls by the host's, which
	// are not repetitions.
	kernels, clocked []float64
	plan             *backend.Plan // of the call with its operands in place
	once             traced        // before the first repetition
	allocs           int64
	check            kernels.CheckReport
	// hostPeak is the growth of the host's memory by the inputs and first calls, devicePeak
	// the most memory held on the device until then.
	hostPeak, devicePeak *int64
	// others is the percentage of the backend's threads that other processes used.
	others *float64
}

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

// enough reports whether the rounds may end after so many seconds: when the median is
// precise, or would take too long to become so.
func (t *timing) enough(took, limit float64) bool {
	n := len(t.rounds)
	limit = min(limit, max(morePatience*leastSeconds(t.warm), caseSeconds))
	switch {
	case n < leastRounds(t.warm):
		return false
	case n >= maxRounds || took+took/float64(n) > limit:
		return true
	}
	low, high, sure := stats.MedianInterval(t.medians())
	return sure >= stats.Confidence && (high-low)/2 <= precision*stats.Median(t.medians())
}

// medians returns the median time of a call in each round.
func (t *timing) medians() []float64 {
	of := make([]float64, len(t.rounds))
	for i, r := range t.rounds {
		of[i] = stats.Median(r.TimesS)
	}
	return of
}

// figures sets the figures of m.
func (t *timing) figures(m *report.Measurement) {
	if t.check.Rows > 0 {
		m.MaxError, m.ErrorBound = report.Figure(t.check.MaxError), report.Figure(t.check.Bound)
	}
	switch {
	case t.check.Rows > 0 && !t.check.OK():
		m.Status, m.Note = report.Wrong, "WRONG: "+t.check.Worst
		return
	case len(t.rounds) == 0:
		m.Status, m.Note = report.NotRun, "not run: "+m.Note
		return
	}
	var calls []float64
	for _, r := range t.rounds {
		calls = append(calls, r.TimesS...)
	}
	median := func(of func(r *report.Round) *float64) *float64 {
		var all []float64
		for i := range t.rounds {
			if x := of(&t.rounds[i]); x != nil {
				all = append(all, *x)
			}
		}
		return report.Positive(stats.Median(all))
	}
	mid := stats.Median(t.medians())
	low, high, sure := stats.MedianInterval(t.medians())
	m.Status, m.Rounds, m.Repetitions, m.Allocs = report.OK, t.rounds, len(calls), &t.allocs
	m.MedianS, m.MinS = report.Figure(mid), report.Figure(slices.Min(calls))
	m.LowS, m.HighS, m.Confidence = report.Figure(low), report.Figure(high), report.Figure(100*sure)
	m.Q1S, m.Q3S = report.Figure(stats.Quantile(calls, 0.25)), report.Figure(stats.Quantile(calls, 0.75))
	m.OthersPercent, m.Memory.HostPeak, m.Memory.DevicePeak = t.others, t.hostPeak, t.devicePeak
	m.CeilingGFLOPS = median(func(r *report.Round) *float64 { return r.CeilingGFLOPS })
	m.CeilingGBS = median(func(r *report.Round) *float64 { return r.CeilingGBS })
	m.LaunchS = median(func(r *report.Round) *float64 { return r.LaunchS })
	m.FindBound()
	m.FindRates()
	if len(t.kernels) > 0 {
		m.KernelS = report.Figure(stats.Median(t.kernels))
	}
	if t.once.compiled > 0 {
		m.CompileS, m.Compiled = report.Figure(t.once.compile.Seconds()), t.once.compiled
	}
	if t.once.moved > 0 {
		m.MoveS, m.MovedBytes = report.Figure(t.once.move.Seconds()), t.once.moved
	}
	if len(t.stages) > 0 {
		s := stats.Median(t.stages)
		m.StagesS, m.SpeedupVsStages = report.Figure(s), report.Figure(s/mid)
	}
}

// round measures once, close together in time: the ceilings, the calls with their
// allocations, a call by the device's clock, the three stages.
func (b *bencher) round() error {
	t, each := &b.t, perRound(b.t.warm)
	peak, read, launch, err := meters(b.work, b.dev.Backend(), b.op.reads()...)
	if err != nil {
		return fmt.Errorf("ceiling: %w", err)
	}
	r := report.Round{
		CeilingGFLOPS: report.Positive(peak / 1e9), CeilingGBS: report.Positive(read / 1e9), LaunchS: report.Positive(launch),
		TimesS: make([]float64, 0, each), PaceS: make([]float64, 0, each), // no growth while counting allocations
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	every := max(int(paceApart/t.warm), 1)
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
	t.rounds = append(t.rounds, r)
	// The minimum excludes allocations of other goroutines.
	t.allocs = min(t.allocs, int64(after.Mallocs-before.Mallocs)/int64(len(r.TimesS)))
	if b.stop() != "" {
		return nil
	}
	if err := b.kernel(); err != nil {
		return err
	}
	if b.stagesCall == nil || b.stop() != "" || floats.Sum(t.stages) > stagesSeconds {
		return nil // the comparison needs fewer digits than the figure
	}
	seconds, err := timed(b.work, b.runStages)
	if err != nil {
		return fmt.Errorf("three stages: %w", err)
	}
	t.stages = append(t.stages, seconds)
	return nil
}

// meters measures the peak rate in operations a second, the rate of reading operands in
// bytes a second, and the seconds of an empty call; 0 for what the backend cannot measure.
func meters(ctx context.Context, be backend.Backend, operands ...backend.Tensor) (peak, read, launch float64, err error) {
	if meter, ok := be.(backend.PeakMeter); ok {
		if peak, err = meter.PeakFLOPS(ctx); err != nil {
			return 0, 0, 0, err
		}
	}
	if meter, ok := be.(backend.BandwidthMeter); ok {
		if read, err = meter.ReadBandwidth(ctx, operands...); err != nil {
			return 0, 0, 0, err
		}
	}
	if meter, ok := be.(backend.LaunchMeter); ok {
		took, err := meter.LaunchTime(ctx)
		if err != nil {
			return 0, 0, 0, err
		}
		launch = took.Seconds()
	}
	return peak, read, launch, nil
}

// kernel times a call by the device's clock, if it has one. It is a separate call, because
// reading that clock takes time, and only one if calls are long.
func (b *bencher) kernel() error {
	t := &b.t
	if t.once.pieces == 0 || floats.Sum(t.clocked) > stagesSeconds {
		return nil
	}
	var trace recorder
	seconds, err := timed(trace.record(b.work), b.op.run)
	if err != nil {
		return err
	}
	t.clocked = append(t.clocked, seconds)
	if sums := trace.sums(); sums.pieces > 0 {
		t.kernels = append(t.kernels, sums.kernel.Seconds())
	}
	return nil
}

// recorder records what a backend reports of its calls (backend.Trace). Timed repetitions
// are not recorded.
type recorder struct {
	mu sync.Mutex
	traced
}

// traced are sums over calls.
type traced struct {
	kernel time.Duration // by the device's clock
	pieces int           // number of terms in kernel
	// compile is the time of compiling, move that of moving moved bytes to the device.
	compile  time.Duration
	compiled int
	move     time.Duration
	moved    int64
}

// record returns a context whose calls are recorded.
func (h *recorder) record(ctx context.Context) context.Context {
	add := func(f func(t *traced)) {
		h.mu.Lock()
		defer h.mu.Unlock()
		f(&h.traced)
	}
	return backend.WithTrace(ctx, &backend.Trace{
		Kernel:  func(took time.Duration) { add(func(t *traced) { t.kernel += took; t.pieces++ }) },
		Compile: func(_ string, took time.Duration) { add(func(t *traced) { t.compile += took; t.compiled++ }) },
		Move:    func(bytes int64, took time.Duration) { add(func(t *traced) { t.move += took; t.moved += bytes }) },
	})
}

// sums returns what was recorded.
func (h *recorder) sums() traced {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.traced
}
