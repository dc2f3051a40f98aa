package bench

import (
	"context"
	"fmt"
	"math"
	"runtime"
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
	// warmSeconds and warmCalls bound the warm-up of short calls: until caches
	// and clocks have settled.
	warmSeconds = 0.03
	warmCalls   = 10
)

// timing is what the repetitions of one case gave; times in seconds.
type timing struct {
	warm          float64 // the last call of the warm-up
	calls, stages []float64
	peaks         []float64 // fused multiply-adds, operations a second
	reads         []float64 // of the operands, bytes a second
	launches      []float64 // of an empty kernel, seconds
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
}

// bencher measures one case on one backend.
type bencher struct {
	be backend.Backend
	c  Case
	// work ends calls: a while after Ctrl-C, or when the budget is spent.
	work context.Context
	// stop says, between repetitions, why to end; "" to go on.
	stop func() string
	// step is told what runs, for people who wait.
	step func(what string)
	// seed draws inputs and checked rows, of which there are rows.
	seed uint64
	rows int
	// stageTime predicts the seconds of the three stages; 0 when unknown.
	stageTime float64
	// left is the time left; negative when there is no budget.
	left func() time.Duration

	// alone says that the three stages are not measured beside the call.
	alone bool

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
	rounds, each := repetitions(b.t.warm)
	for r := range rounds {
		if why := b.stop(); why != "" {
			defer b.cut(why)()
			break
		}
		b.step(fmt.Sprintf("repetition %d/%d", r*each+1, rounds*each))
		if err := b.round(&b.t, each); err != nil {
			return b.t, b.note, b.stopped(err) // what an ended call leaves is nothing to check
		}
	}
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
	b.t.allocs, b.last = math.MaxInt64, b.work
	b.step("inputs")
	var h heard
	if b.op, err = b.c.load(h.listen(b.work), b.be, b.seed); err != nil {
		return false, b.stopped(err)
	}
	loaded := h.take()
	b.t.move, b.t.moved = loaded.move, loaded.moved
	// What has no room on the device makes another plan than the one without memory.
	plan, err := kernels.Plan(b.be, b.op.q, b.op.k, b.op.v, b.c.options(b.op.bias))
	if err != nil {
		return false, b.stopped(err)
	}
	b.t.plan = &plan
	// Garbage of the case before must not be collected on this one's time.
	runtime.GC()

	b.step("warm-up")
	if b.t.warm, err = b.warm(); err != nil {
		return false, b.stopped(err)
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
	if !b.alone {
		if b.note, err = b.prepareStages(b.t.warm); err != nil {
			return false, b.stopped(err)
		}
	}
	return true, nil
}

// end checks what the repetitions wrote.
func (b *bencher) end() error {
	if len(b.t.calls) == 0 {
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

// release gives the tensors back.
func (b *bencher) release() {
	b.op.release()
	b.staged.Release()
}

// renew puts a new output in the place of the one that was written.
func (b *bencher) renew() error {
	_, _, _, shape := b.c.shapes()
	o, err := b.be.Alloc(b.work, b.c.DType, shape)
	if err != nil {
		return err
	}
	b.op.o.Release()
	b.op.o = o
	return nil
}

// probe times the fused call and the three stages, only to predict longer ones.
func (b *bencher) probe() (t timing, err error) {
	b.step("probe")
	if b.op, err = b.c.load(b.work, b.be, b.seed); err != nil {
		return t, err
	}
	defer b.op.release()
	defer func() { b.staged.Release() }()
	if t.warm, err = b.warm(); err != nil {
		return t, err
	}
	t.compile, t.compiled = b.t.compile, b.t.compiled
	if _, err = b.prepareStages(t.warm); err != nil || b.staged.Weights.IsZero() {
		return t, err
	}
	seconds, err := b.time(b.staged)
	t.stages = append(t.stages, seconds)
	return t, err
}

// warm runs the call until short ones have settled and returns the seconds of
// the last one.
func (b *bencher) warm() (float64, error) {
	total, last := 0.0, 0.0
	var h heard
	for n := 0; n == 0 || n < warmCalls && total < warmSeconds; n++ {
		ctx := b.work
		if n == 0 { // the one that compiles
			ctx = h.listen(ctx)
		}
		var err error
		if last, err = b.timeIn(ctx, b.op.result()); err != nil {
			return 0, err
		}
		total += last
	}
	b.t.prepared(h.take())
	return last, nil
}

// time runs one call into out and returns its seconds, its completion included.
func (b *bencher) time(out kernels.Result) (float64, error) { return b.timeIn(b.work, out) }

// timeIn is time in a context of its own.
func (b *bencher) timeIn(ctx context.Context, out kernels.Result) (float64, error) {
	begin := time.Now()
	err := kernels.AttentionInto(ctx, b.be, out, b.op.q, b.op.k, b.op.v, b.c.options(b.op.bias))
	return time.Since(begin).Seconds(), err
}

// verify recomputes rows of the output in float64.
func (b *bencher) verify(ctx context.Context, seed uint64) (kernels.CheckReport, error) {
	return kernels.Check(ctx, b.be, b.op.q, b.op.k, b.op.v, b.op.result(), b.c.options(b.op.bias),
		kernels.CheckOptions{Rows: b.rows, Seed: seed})
}

// round measures once around: the ceilings, the calls with their allocations, a call
// by the device's clock, the three stages. What is compared lies close together in time.
func (b *bencher) round(t *timing, each int) error {
	if err := b.ceilings(t); err != nil {
		return fmt.Errorf("ceiling: %w", err)
	}
	var before, after runtime.MemStats
	first := len(t.calls)
	t.calls = append(t.calls, make([]float64, each)...)[:first] // not grown while counting
	runtime.ReadMemStats(&before)
	for range each {
		seconds, err := b.time(b.op.result())
		if err != nil {
			return err
		}
		t.calls = append(t.calls, seconds)
		if b.stop() != "" {
			break
		}
	}
	runtime.ReadMemStats(&after)
	// Another goroutine's allocations can only add: the least is the call's.
	t.allocs = min(t.allocs, int64(after.Mallocs-before.Mallocs)/int64(len(t.calls)-first))
	if b.stop() != "" {
		return nil
	}
	if err := b.kernel(t); err != nil {
		return err
	}
	if b.staged.Weights.IsZero() || b.stop() != "" || sum(t.stages) > targetSeconds {
		return nil // a comparison needs fewer digits than the figure
	}
	seconds, err := b.time(b.staged)
	if err != nil {
		return fmt.Errorf("three stages: %w", err)
	}
	t.stages = append(t.stages, seconds)
	return nil
}

// prepareStages allocates outputs for the three stages and warms them up, or
// says why they are skipped. fused is the time in seconds of a fused call.
func (b *bencher) prepareStages(fused float64) (note string, err error) {
	limit := float64(maxWeights)
	if free := freeMemory(); free > 0 {
		limit = min(limit, float64(free)/2)
	}
	bytes := 4 * product(b.c.weightsShape())
	rounds, _ := repetitions(fused)
	left := b.left()
	switch {
	case bytes > limit:
		return fmt.Sprintf("stages skipped: %s of weights", size(bytes)), nil
	case b.stageTime > maxStages:
		return fmt.Sprintf("stages skipped: predicted %s each", duration(b.stageTime)), nil
	case left >= 0 && caseSeconds(fused)+b.stageTime*float64(1+rounds) > left.Seconds():
		return fmt.Sprintf("stages skipped: %s of the budget is left", duration(left.Seconds())), nil
	}
	b.step("three stages")
	if err = b.allocStages(); err == nil {
		if _, err = b.time(b.staged); err == nil {
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
