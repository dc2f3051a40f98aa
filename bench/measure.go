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
	"github.com/seed90331342/attn/kernels"
)

const (
	// maxWeights is the largest weights tensor, in bytes, of the three stages.
	maxWeights = 1 << 30
	// maxStages is the longest call, in seconds, of the three stages that is worth the comparison.
	maxStages = 2 * sweepCall
	// stagesSeconds is the total time of the calls of the three stages, and of those with the device's clock: enough
	// for a median. Without a limit of time there are stagesRounds calls of the stages, whose range is a 95% interval.
	stagesSeconds = 0.4
	stagesRounds  = 6
	// A warm-up lets caches and clock rates settle. It takes at least warmSeconds. It ends when the last warmAlike
	// calls are within settled of their median, after warmLimit, or after warmCalls calls.
	warmSeconds = 0.03
	warmLimit   = 0.3
	warmCalls   = 50
	warmAlike   = 5
	settled     = 0.05
	// wakeSeconds of calls raise the clock rate of a GPU, which falls to a fifth while the host checks or compiles.
	wakeSeconds = 0.5
)

// bencher measures one case on one device. Times are in seconds.
type bencher struct {
	*runner
	c   call
	row report.Measurement
	// plain is the row without figures, for a case that fails or is wrong.
	plain report.Measurement
	// runs is set when there is no reason against running the case.
	runs bool
	// step reports progress.
	step func(what string)
	// limit is the time of rounds that only make the median more precise.
	limit float64

	pace *pacer // nil when the backend has no threads on the host
	op   *operands
	// staged are op's inputs with outputs for the three stages; nil when they are left out.
	staged *operands
	trace  recorder // of what happens once: uploads and the first call
	note   string   // what is missing

	warm        float64 // of a call at the end of the warm-up
	roundsBegan time.Time
	stages      []float64
	kernels     []float64 // times of separate calls by the device's clock
	allocs      int64
	check       kernels.CheckReport
}

// run measures the case, completes its row and releases the tensors.
func (b *bencher) run() {
	defer b.release()
	b.allocs, b.plain = math.MaxInt64, b.row
	err := b.warmUp()
	if err == nil && b.check.OK() && b.note == "" {
		err = b.repeat()
	}
	if why := b.stop(); err != nil && why != "" && b.work.Err() != nil { // it results from stopping
		b.note, err = why, nil
	}
	b.record(err)
}

// warmUp draws the inputs, runs the call until its time settles and checks its output.
func (b *bencher) warmUp() (err error) {
	b.step("inputs")
	before := machine.Resident()
	meter, metered := b.dev.Backend().(backend.QueueMeter)
	if metered {
		meter.PeakMemory() // restarts it
	}
	if b.op, err = b.c.load(b.trace.record(b.work), b.dev, b.cfg.Seed); err != nil {
		return err
	}
	// The plan differs from the one without tensors if some do not fit on the device.
	plan, err := b.c.planOf(b.work, b.op.call)
	if err != nil {
		return err
	}
	b.row.Plan, b.plain.Plan = &plan, &plan
	if err := b.op.before(b.work); err != nil {
		return err
	}
	// Garbage must not be collected during calls, nor count as their memory.
	debug.FreeOSMemory()
	reset := machine.ResetPeak()

	b.step("warm-up")
	if err = b.settle(); err != nil {
		return err
	}
	if peak := machine.PeakResident(); reset && before > 0 && peak > 0 {
		b.row.Memory.HostPeak = new(max(peak-before, 0))
	}
	if metered {
		b.row.Memory.DevicePeak = new(meter.PeakMemory())
	}
	b.step("check")
	if b.check, err = b.op.check(b.work, kernels.CheckOptions{Rows: checkedRows, Seed: b.cfg.Seed}); err != nil || !b.check.OK() {
		return err
	}
	if b.note = b.stop(); b.note != "" {
		return nil
	}
	if threads := b.dev.Info().Threads; threads > 0 {
		b.pace = newPacer(threads, b.warm)
	}
	// With new outputs, a repetition that writes nothing fails the check at the end.
	return b.op.renew(b.work)
}

// repeat runs rounds until the median is precise, notes what other processes used meanwhile,
// and checks the output on other rows than before.
func (b *bencher) repeat() (err error) {
	if b.c.Variant == report.Fused && b.c.Cache == "" && !b.cfg.NoStages {
		if b.note, err = b.prepareStages(); err != nil {
			return err
		}
	}
	if b.dev.Info().Type != backend.CPU {
		for total := 0.0; err == nil && total < wakeSeconds && b.warm < wakeSeconds && b.stop() == ""; {
			var seconds float64
			seconds, err = timed(b.work, b.op.run)
			total += seconds
		}
	}
	b.roundsBegan = time.Now()
	load := machine.ReadLoad()
	for err == nil && !b.enough() && b.stop() == "" {
		b.step(fmt.Sprintf("round %d", len(b.row.Rounds)+1))
		err = b.round()
	}
	if others := load.Others(machine.ReadLoad(), b.dev.Info().Threads); others >= 0 {
		b.row.OthersPercent = report.Figure(100 * others)
	}
	if err != nil { // the output of a cancelled call cannot be checked
		return err
	}
	ctx := b.work
	if why := b.stop(); why != "" && !b.enough() {
		// Some rows take milliseconds: the check takes no longer than a running call may.
		b.note = strings.TrimPrefix(b.note+", "+why, ", ")
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), grace)
		defer cancel()
	}
	if len(b.row.Rounds) == 0 {
		return nil
	}
	b.step("check")
	check, err := b.op.check(ctx, kernels.CheckOptions{Rows: checkedRows, Seed: b.cfg.Seed + 1})
	if err != nil && ctx.Err() != nil {
		return nil // no time is left; the output of the warm-up was checked
	}
	if check.Off > b.check.Off || math.IsNaN(check.Off) {
		b.check = check
	}
	return err
}

// record completes the row of the case and remembers its cost.
func (b *bencher) record(err error) {
	m := &b.row
	defer m.Derive()
	if err != nil {
		*m = b.plain
		fail(m, err)
		return
	}
	if len(b.stages) > 0 {
		m.StagesS = report.Figure(stats.Median(b.stages))
	}
	m.Derive()
	b.learn(m, b.warm)
	right := b.check.Rows == 0 || b.check.OK()
	if !right || len(m.Rounds) == 0 {
		*m = b.plain
	}
	if b.check.Rows > 0 {
		m.MaxError, m.ErrorBound = report.Figure(b.check.MaxError), report.Figure(b.check.Bound)
	}
	switch {
	case !right:
		m.Status, m.Note = report.Wrong, "WRONG: "+b.check.Worst
	case len(m.Rounds) == 0:
		skip(m, b.note)
	default:
		m.Status, m.Note, m.Allocs = report.OK, b.note, &b.allocs
		m.KernelS = report.Positive(stats.Median(b.kernels))
		m.CompileS, m.Compiled = report.Positive(time.Duration(b.trace.compile.Load()).Seconds()), int(b.trace.compiled.Load())
		m.MoveS, m.MovedBytes = report.Positive(time.Duration(b.trace.move.Load()).Seconds()), b.trace.moved.Load()
	}
}

func (b *bencher) release() {
	if b.pace != nil {
		b.pace.close()
	}
	if b.op != nil {
		b.op.release()
	}
	if b.staged != nil {
		b.staged.releaseOutputs()
	}
}

// settle runs the call until its time settles and sets b.warm to the median of the last ones.
func (b *bencher) settle() error {
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
	b.warm = stats.Median(last)
	b.learn(&b.row, b.warm)
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

// prepareStages runs the three stages once, or returns why they are left out.
func (b *bencher) prepareStages() (note string, err error) {
	free, _ := backend.HostMemory()
	limit := min(float64(maxWeights), float64(free)/2)
	bytes, left, stage := 4*b.c.weights(), b.left(), b.stage.predict(int64(b.c.weights()))
	switch {
	case bytes > limit:
		return fmt.Sprintf("stages skipped: %s of weights", format.Size(bytes)), nil
	case stage > maxStages:
		return fmt.Sprintf("stages skipped: predicted %s each", format.Duration(stage)), nil
	case left >= 0 && leastSeconds(b.warm)+stage*float64(1+leastRounds(b.warm)) > left.Seconds():
		return fmt.Sprintf("stages skipped: %s of the budget is left", format.Duration(left.Seconds())), nil
	}
	b.step("three stages")
	b.staged = b.op.inputs(report.Stages)
	if err = b.staged.renew(b.work); err == nil {
		err = b.staged.run(b.work)
	}
	if err == nil {
		return "", nil
	}
	b.staged.releaseOutputs()
	b.staged = nil
	if stop := b.work.Err(); stop != nil {
		return "", stop
	}
	// The fused call is the one that is measured; it can do without the comparison.
	return "stages skipped: " + err.Error(), nil
}
