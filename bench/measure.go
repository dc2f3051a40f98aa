package bench

import (
	"context"
	"fmt"
	"math"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/bench/internal/format"
	"github.com/seed90331342/attn/bench/internal/machine"
	"github.com/seed90331342/attn/bench/internal/stats"
	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/internal/budget"
	"github.com/seed90331342/attn/kernels"
)

const (
	// maxWeights is the largest weights tensor, in bytes, of the three stages.
	maxWeights = 1 << 30
	// maxStages is the longest call, in seconds, of the three stages that is worth the
	// comparison.
	maxStages = 2 * sweepCall
	// stagesSeconds is the total time of the calls of the three stages, and of those with
	// the device's clock: enough for a median.
	stagesSeconds = 0.4
	// Calls are warmed up for warmSeconds at least and, until the last warmAlike of them
	// are within settled of their median, for warmLimit at most, but never with more than
	// warmCalls: then caches and clock rates have settled.
	warmSeconds = 0.03
	warmLimit   = 0.3
	warmCalls   = 50
	warmAlike   = 5
	settled     = 0.05
)

// bencher measures one case on one device.
type bencher struct {
	*runner
	dev *kernels.Device
	c   Case
	// weight is that of a call, see [cost].
	weight int64
	// step reports progress.
	step func(what string)
	// limit is the time, in seconds, of rounds that only make the median more precise.
	limit float64
	// alone leaves out the comparison with the three stages.
	alone bool

	pace *pacer // nil when the backend has no threads on the host
	op   *operands
	// stagesCall is the call as three stages, stagesOut their output; zero when left out.
	stagesCall *kernels.Call
	stagesOut  kernels.Result
	t          timing
	trace      recorder        // of what happens once: uploads and the first call
	note       string          // what is missing
	last       context.Context // of the check at the end
}

// run measures the case. Stopped early it keeps what it has and notes why; an error that
// results from stopping is not an error.
func (b *bencher) run() error {
	defer b.release()
	if more, err := b.begin(); !more {
		return err
	}
	began, load := time.Now(), machine.ReadLoad()
	for !b.t.enough(time.Since(began).Seconds(), b.limit) {
		if why := b.stop(); why != "" {
			defer b.cut(why)()
			break
		}
		b.step(fmt.Sprintf("round %d", len(b.t.rounds)+1))
		if err := b.round(); err != nil {
			return b.stopped(err) // the output of a cancelled call cannot be checked
		}
	}
	if others := load.Others(machine.ReadLoad(), b.dev.Info().Threads); others >= 0 {
		b.t.others = report.Figure(100 * others)
	}
	return b.end()
}

// stopped returns err, or notes the reason and returns nil when err results from stopping.
func (b *bencher) stopped(err error) error {
	if why := b.stop(); why != "" && b.work.Err() != nil {
		b.note = why
		return nil
	}
	return err
}

// cut notes why the repetitions end early and limits the time of the check to that of a
// running call; some rows take milliseconds. The caller calls free after the check.
func (b *bencher) cut(why string) (free func()) {
	b.note = strings.TrimPrefix(b.note+", "+why, ", ")
	last, cancel := context.WithTimeout(context.WithoutCancel(b.work), grace)
	b.last = last
	return cancel
}

// begin draws the inputs, warms the call up and checks its output. It reports whether there
// is more to measure. The caller releases b, also after an error.
func (b *bencher) begin() (more bool, err error) {
	b.t.allocs, b.last = math.MaxInt64, b.work
	b.step("inputs")
	before := machine.Resident()
	meter, metered := b.dev.Backend().(backend.MemoryMeter)
	if metered {
		meter.PeakMemory() // restarts it
	}
	if b.op, err = b.c.load(b.trace.record(b.work), b.dev, b.cfg.Seed); err != nil {
		return false, b.stopped(err)
	}
	// The plan differs from the one without tensors if some do not fit on the device.
	plan, err := b.op.call.Plan(b.work)
	if err != nil {
		return false, b.stopped(err)
	}
	b.t.plan = &plan
	if err := b.op.before(b.work); err != nil {
		return false, b.stopped(err)
	}
	// Garbage must not be collected during calls, nor count as their memory.
	debug.FreeOSMemory()
	reset := machine.ResetPeak()

	b.step("warm-up")
	if err = b.warm(); err != nil {
		return false, b.stopped(err)
	}
	b.call, b.seq = cost{b.t.warm, b.weight}, b.c.SeqK
	if peak := machine.PeakResident(); reset && before > 0 && peak > 0 {
		b.t.hostPeak = new(max(peak-before, 0))
	}
	if metered {
		b.t.devicePeak = new(meter.PeakMemory())
	}
	b.step("check")
	if b.t.check, err = b.op.check(b.work, kernels.CheckOptions{Rows: b.cfg.Rows, Seed: b.cfg.Seed}); err != nil || !b.t.check.OK() {
		return false, b.stopped(err)
	}
	if b.note = b.stop(); b.note != "" {
		return false, nil
	}
	// With new outputs, a repetition that writes nothing fails the check at the end.
	if err = b.op.renew(b.work); err != nil {
		return false, b.stopped(err)
	}
	if threads := b.dev.Info().Threads; threads > 0 {
		b.pace = newPacer(threads, b.t.warm)
	}
	if !b.alone && b.c.Variant == Fused {
		if b.note, err = b.prepareStages(); err != nil {
			return false, b.stopped(err)
		}
	}
	return true, nil
}

// end checks the output of the repetitions on other rows than before.
func (b *bencher) end() error {
	if len(b.t.rounds) == 0 {
		return nil
	}
	b.step("check")
	check, err := b.op.check(b.last, kernels.CheckOptions{Rows: b.cfg.Rows, Seed: b.cfg.Seed + 1})
	if err != nil && b.last.Err() != nil {
		return nil // no time is left; the output of the warm-up was checked
	}
	if check.Off > b.t.check.Off || math.IsNaN(check.Off) {
		b.t.check = check
	}
	return err
}

func (b *bencher) release() {
	if b.pace != nil {
		b.pace.close()
		b.pace = nil
	}
	if b.op != nil {
		b.op.release()
	}
	b.stagesOut.Release()
}

// probe times the call and, for the fused one, the three stages, to predict longer cases.
func (b *bencher) probe() (err error) {
	b.step("probe")
	if b.op, err = b.c.load(b.work, b.dev, b.cfg.Seed); err != nil {
		return err
	}
	defer b.release()
	if err = b.op.before(b.work); err != nil {
		return err
	}
	if err = b.warm(); err != nil || b.c.Variant != Fused {
		return err
	}
	if _, err = b.prepareStages(); err != nil || b.stagesCall == nil {
		return err
	}
	seconds, err := timed(b.work, b.runStages)
	b.t.stages = append(b.t.stages, seconds)
	return err
}

// warm runs the call until its time settles and sets b.t.warm to the median of the last ones.
func (b *bencher) warm() error {
	var last []float64
	for n, total := 0, 0.0; n == 0 || n < warmCalls && (total < warmSeconds || total < warmLimit && !alike(last)); n++ {
		ctx := b.work
		if n == 0 { // this one compiles
			ctx = b.trace.record(ctx)
		}
		seconds, err := timed(ctx, b.op.run)
		if err != nil {
			return err
		}
		total += seconds
		if last = append(last, seconds); len(last) > warmAlike || n == 1 { // the first call is not typical
			last = last[1:]
		}
	}
	b.t.once = b.trace.sums()
	b.t.warm = stats.Median(last)
	return nil
}

// alike reports whether the last calls of a warm-up have settled.
func alike(last []float64) bool {
	return len(last) >= warmAlike && slices.Max(last)-slices.Min(last) <= 2*settled*stats.Median(last)
}

// timed returns the seconds of a call until its completion.
func timed(ctx context.Context, call func(context.Context) error) (float64, error) {
	begin := time.Now()
	err := call(ctx)
	return time.Since(begin).Seconds(), err
}

// runStages runs the three stages once.
func (b *bencher) runStages(ctx context.Context) error { return b.stagesCall.RunInto(ctx, b.stagesOut) }

// prepareStages runs the three stages once, or returns why they are left out.
func (b *bencher) prepareStages() (note string, err error) {
	limit := min(float64(maxWeights), float64(budget.Free())/2)
	bytes, left, stage := 4*b.c.weights(), b.left(), b.stage.predict(int64(b.c.weights()))
	switch {
	case bytes > limit:
		return fmt.Sprintf("stages skipped: %s of weights", format.Size(bytes)), nil
	case stage > maxStages:
		return fmt.Sprintf("stages skipped: predicted %s each", format.Duration(stage)), nil
	case left >= 0 && leastSeconds(b.t.warm)+stage*float64(1+leastRounds(b.t.warm)) > left.Seconds():
		return fmt.Sprintf("stages skipped: %s of the budget is left", format.Duration(left.Seconds())), nil
	}
	b.step("three stages")
	staged := b.c
	staged.Variant = Stages
	if b.stagesCall, err = b.dev.Prepare(b.op.q, b.op.k, b.op.v, staged.options(b.op.bias)); err == nil {
		b.stagesOut, err = b.stagesCall.Run(b.work)
	}
	if err == nil {
		return "", nil
	}
	b.stagesCall = nil
	if stop := b.work.Err(); stop != nil {
		return "", stop
	}
	// The fused call is the one that is measured; it can do without the comparison.
	return "stages skipped: " + err.Error(), nil
}
