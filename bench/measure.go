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
	"github.com/seed90331342/attn/kernels"
)

const (
	// maxWeights is the largest weights tensor, in bytes, that the three
	// stages are given.
	maxWeights = 1 << 30
	// maxStages is the longest call, in seconds, of the three stages that is
	// worth the comparison: twice a sweep's longest fused call.
	maxStages = 2 * sweepCall
	// stagesSeconds is what the calls of the three stages add up to, and those by
	// the device's clock: enough for their medians to settle.
	stagesSeconds = 0.4
	// warmSeconds is how long short calls are warmed up at least and warmLimit
	// at most: until caches and clocks have settled, which they have when
	// warmAlike calls one after the other lie within a settled part of their
	// median. warmCalls are enough in any case.
	warmSeconds = 0.03
	warmLimit   = 0.3
	warmCalls   = 50
	warmAlike   = 5
	settled     = 0.05
)

// timing is what the repetitions of one case gave; times in seconds.
type timing struct {
	warm   float64 // a call at the end of the warm-up
	rounds []round
	stages []float64
	// kernels are calls by the device's own clock, listened the same calls by
	// the wall's, which are no repetitions; clock says that there is one.
	clock             bool
	kernels, listened []float64
	plan              *backend.Plan // of the call, its operands in place
	// compile, compiled, move and moved are those of told, until the first
	// repetition.
	compile  time.Duration
	compiled int
	move     time.Duration
	moved    int64
	allocs   int64
	check    kernels.CheckReport
	// peak is the growth of the host's memory until the first calls were done;
	// negative when the system does not tell.
	peak int64
	// devicePeak is the most memory of the device that was held until then; negative
	// when it has none of its own or does not tell.
	devicePeak int64
	// others is the part of the backend's threads that others took; negative when
	// the system does not tell.
	others float64
}

// bencher measures one case on one backend.
type bencher struct {
	be backend.Backend
	c  Case
	// work ends calls: a while after Ctrl-C, or when the budget is spent.
	work context.Context
	// stop says, between repetitions, why to end; "" to go on.
	stop func() string
	// step is told what runs, for people who wait, and warmed, unless nil, how many
	// seconds a call takes as soon as that is known.
	step   func(what string)
	warmed func(seconds float64)
	// seed draws inputs and checked rows, of which there are rows.
	seed uint64
	rows int
	// stageTime predicts the seconds of the three stages; 0 when unknown.
	stageTime float64
	// left is the time left; negative when there is no budget.
	left func() time.Duration

	// limit is how long, in seconds, the rounds may take that only make the median
	// more precise.
	limit float64
	// alone says that the three stages are not measured beside the call.
	alone bool

	pace   *pacer // nil where the backend has no threads on the host
	op     operands
	staged kernels.Result // of the three stages; zero when they are skipped
	t      timing
	note   string          // what is missing, in words
	last   context.Context // of the check at the end
}

// run measures the case. When it is stopped early it returns what it has, and
// why in words. An error that comes from stopping is such a word, not an error.
func (b *bencher) run() (timing, string, error) {
	defer b.release()
	if more, err := b.begin(); !more {
		return b.t, b.note, err
	}
	each, began, load := perRound(b.t.warm), time.Now(), loadNow()
	for !b.t.enough(time.Since(began).Seconds(), b.limit) {
		if why := b.stop(); why != "" {
			defer b.cut(why)()
			break
		}
		b.step(fmt.Sprintf("round %d", len(b.t.rounds)+1))
		if err := b.round(&b.t, each); err != nil {
			return b.t, b.note, b.stopped(err) // what an ended call leaves is nothing to check
		}
	}
	b.t.others = load.others(b.be.Info().Threads)
	return b.t, b.note, b.end()
}

// stopped returns err, or nil when it comes from stopping, which it notes.
func (b *bencher) stopped(err error) error {
	if why := b.stop(); why != "" && b.work.Err() != nil {
		b.note = why
		return nil
	}
	return err
}

// cut notes why the repetitions end early and leaves little time for the check:
// some rows take milliseconds, and it gets no more than a running call. The
// caller calls free after that.
func (b *bencher) cut(why string) (free func()) {
	b.note = strings.TrimPrefix(b.note+", "+why, ", ")
	last, cancel := context.WithTimeout(context.WithoutCancel(b.work), grace)
	b.last = last
	return cancel
}

// begin draws the inputs, warms the call up and checks what it wrote, and reports
// whether there is more to measure. The caller releases b, also beside an error.
func (b *bencher) begin() (more bool, err error) {
	b.t.allocs, b.last, b.t.peak, b.t.devicePeak, b.t.others = math.MaxInt64, b.work, -1, -1, -1
	b.step("inputs")
	before := resident()
	meter, meters := b.be.(backend.MemoryMeter)
	if meters {
		meter.PeakMemory() // from here on
	}
	var h heard
	if b.op, err = b.c.load(h.listen(b.work), b.be, b.seed); err != nil {
		return false, b.stopped(err)
	}
	loaded := h.take()
	b.t.move, b.t.moved = loaded.move, loaded.moved
	// What has no room on the device makes another plan than the one without memory.
	plan, err := kernels.Plan(b.be, b.op.q, b.op.k, b.op.v, b.c.plannedOptions(b.op.bias))
	if err != nil {
		return false, b.stopped(err)
	}
	b.t.plan = &plan
	if err := b.before(b.work); err != nil {
		return false, b.stopped(err)
	}
	// What is garbage by now must not be collected on the time of calls, nor count
	// as their memory.
	debug.FreeOSMemory()
	reset := resetPeak()

	b.step("warm-up")
	if b.t.warm, err = b.warm(); err != nil {
		return false, b.stopped(err)
	}
	if b.warmed != nil {
		b.warmed(b.t.warm)
	}
	if peak := peakResident(); reset && before > 0 && peak > 0 {
		b.t.peak = max(peak-before, 0)
	}
	if meters {
		b.t.devicePeak = meter.PeakMemory()
	}
	b.step("check")
	if b.t.check, err = b.verify(b.work, b.seed); err != nil || !b.t.check.OK() {
		return false, b.stopped(err)
	}
	if b.note = b.stop(); b.note != "" {
		return false, nil
	}
	// Another output than the warm-up's: a repetition that leaves it as it is
	// must not pass for a fast one.
	if err = b.renew(); err != nil {
		return false, b.stopped(err)
	}
	if threads := b.be.Info().Threads; threads > 0 {
		b.pace = newPacer(threads, b.t.warm)
	}
	if !b.alone && b.c.Variant == Fused {
		if b.note, err = b.prepareStages(b.t.warm); err != nil {
			return false, b.stopped(err)
		}
	}
	return true, nil
}

// end checks what the repetitions wrote.
func (b *bencher) end() error {
	if len(b.t.rounds) == 0 {
		return nil
	}
	b.step("check")
	check, err := b.verify(b.last, b.seed+1) // other rows than before
	if err != nil && b.last.Err() != nil {
		return nil // the time is over; the warm-up was checked
	}
	if check.Off > b.t.check.Off || math.IsNaN(check.Off) {
		b.t.check = check
	}
	return err
}

// release gives the tensors back and ends the pacer.
func (b *bencher) release() {
	if b.pace != nil {
		b.pace.close()
		b.pace = nil
	}
	b.op.release()
	b.staged.Release()
}

// renew puts new outputs in the place of those that were written.
func (b *bencher) renew() error {
	_, _, _, shape := b.c.shapes()
	o, err := b.be.Alloc(b.work, b.c.DType, shape)
	if err != nil {
		return err
	}
	b.op.o.Release()
	b.op.o = o
	if b.c.Variant != QK && b.c.Variant != Stages {
		return nil
	}
	b.op.w.Release()
	b.op.w, err = b.be.Alloc(b.work, backend.F32, b.c.weightsShape())
	return err
}

// probe times the call and, beside the fused one, the three stages, only to predict
// longer ones.
func (b *bencher) probe() (t timing, err error) {
	b.step("probe")
	if b.op, err = b.c.load(b.work, b.be, b.seed); err != nil {
		return t, err
	}
	defer b.release()
	if err = b.before(b.work); err != nil {
		return t, err
	}
	if t.warm, err = b.warm(); err != nil {
		return t, err
	}
	t.compile, t.compiled = b.t.compile, b.t.compiled
	if b.c.Variant != Fused {
		return t, nil
	}
	if _, err = b.prepareStages(t.warm); err != nil || b.staged.Weights.IsZero() {
		return t, err
	}
	seconds, err := b.timeStages()
	t.stages = append(t.stages, seconds)
	return t, err
}

// warm runs the call until short ones have settled and returns the median seconds of
// the last ones.
func (b *bencher) warm() (float64, error) {
	var last []float64
	var h heard
	for n, total := 0, 0.0; n == 0 || n < warmCalls && total < warmSeconds || n < warmCalls && total < warmLimit && !alike(last); n++ {
		ctx := b.work
		if n == 0 { // the one that compiles
			ctx = h.listen(ctx)
		}
		seconds, err := b.timeIn(ctx)
		if err != nil {
			return 0, err
		}
		total += seconds
		if last = append(last, seconds); len(last) > warmAlike || n == 1 { // the first one is no guide to others
			last = last[1:]
		}
	}
	b.t.prepared(h.take())
	return median(last), nil
}

// alike reports whether the last calls of a warm-up have settled.
func alike(last []float64) bool {
	if len(last) < warmAlike {
		return false
	}
	return slices.Max(last)-slices.Min(last) <= 2*settled*median(last)
}

// time runs one call and returns its seconds, its completion included.
func (b *bencher) time() (float64, error) { return b.timeIn(b.work) }

// timeIn is time in a context of its own.
func (b *bencher) timeIn(ctx context.Context) (float64, error) {
	begin := time.Now()
	err := b.call(ctx)
	return time.Since(begin).Seconds(), err
}

// timeStages runs the three stages once, beside the fused call.
func (b *bencher) timeStages() (float64, error) {
	begin := time.Now()
	err := kernels.AttentionInto(b.work, b.be, b.staged, b.op.q, b.op.k, b.op.v, b.c.options(b.op.bias))
	return time.Since(begin).Seconds(), err
}

// verify recomputes rows of the output in float64.
func (b *bencher) verify(ctx context.Context, seed uint64) (kernels.CheckReport, error) {
	if err := b.complete(ctx); err != nil {
		return kernels.CheckReport{}, err
	}
	return kernels.Check(ctx, b.be, b.op.q, b.op.k, b.op.v, b.op.result(), b.c.options(b.op.bias),
		kernels.CheckOptions{Rows: b.rows, Seed: seed})
}

// prepareStages allocates outputs for the three stages and warms them up, or
// says why they are skipped. fused is the time in seconds of a fused call.
func (b *bencher) prepareStages(fused float64) (note string, err error) {
	limit := float64(maxWeights)
	if free := freeMemory(); free > 0 {
		limit = min(limit, float64(free)/2)
	}
	bytes := 4 * product(b.c.weightsShape())
	rounds := leastRounds(fused)
	left := b.left()
	switch {
	case bytes > limit:
		return fmt.Sprintf("stages skipped: %s of weights", size(bytes)), nil
	case b.stageTime > maxStages:
		return fmt.Sprintf("stages skipped: predicted %s each", duration(b.stageTime)), nil
	case left >= 0 && leastSeconds(fused)+b.stageTime*float64(1+rounds) > left.Seconds():
		return fmt.Sprintf("stages skipped: %s of the budget is left", duration(left.Seconds())), nil
	}
	b.step("three stages")
	if err = b.allocStages(); err == nil {
		if _, err = b.timeStages(); err == nil {
			return "", nil
		}
	}
	b.staged.Release()
	b.staged = kernels.Result{}
	if stop := b.work.Err(); stop != nil {
		return "", stop
	}
	// The fused call is what is measured; it goes on without.
	return "stages skipped: " + err.Error(), nil
}

// allocStages allocates the outputs of the three stages: apart from the fused
// call's, which is checked.
func (b *bencher) allocStages() (err error) {
	_, _, _, o := b.c.shapes()
	if b.staged.O, err = b.be.Alloc(b.work, b.c.DType, o); err != nil {
		return err
	}
	b.staged.Weights, err = b.be.Alloc(b.work, backend.F32, b.c.weightsShape())
	return err
}

// product returns the elements of a shape, which may exceed an int.
func product(s backend.Shape) float64 {
	n := 1.0
	for _, l := range s {
		n *= float64(l)
	}
	return n
}
