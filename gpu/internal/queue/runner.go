package queue

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/gpu/internal/resource"
)

// Runner runs the operations of one call. Their steps run in the order in which they are
// queued, in shorter submissions near the deadline of the context.
//
// A rehearsal runs nothing on the device: it adds up the work, collects the pipelines
// that the call needs, and follows what streaming would move.
type Runner struct {
	d     *Device
	ctx   context.Context
	trace *backend.Trace
	// deadline is that of ctx, zero for none.
	deadline time.Time

	rehearsal bool
	needed    []*resource.Pipeline // in a rehearsal

	call       *inFlight
	unmeasured bool // a kernel runs for the first time on the device
	batch      batch
	pending    []sentWork // the submissions that the call has not waited for, oldest first
	waited     int        // how many it has waited for
	held       held
	stream     *stream     // nil until a step needs host memory
	staged     int         // steps that had staged windows
	checkpoint *checkpoint // nil unless the call may be interrupted

	// Operations of the call: all of them, known after a rehearsal, those that are done, and
	// all as its plan counts them, 0 if it has none.
	total, done, plan float64
}

// sentWork is a submission and its operations.
type sentWork struct {
	ticket port.Ticket
	work   float64
}

// held are the buffers that a call keeps to its end.
type held struct {
	all          []port.Buffer
	state, words port.Buffer                   // of a box, and of a shift
	size         uint64                        // of the state that was needed last
	gathers      [port.MaxBindings]port.Buffer // for gathered windows, by binding
}

// Work names a call in errors and lists the memory of its operands. An operand that is updated
// in place is listed as written and as read.
type Work struct {
	Name    string
	Written []Output
	Read    []*cut.Store
	FLOPs   float64 // as its plan states them, or 0; progress is reported in them
}

// Output is memory that a call writes to.
type Output struct {
	Store *cut.Store
	Whole bool // the call writes all of it
}

// Do runs the operations that ops returns for each of n parts of a call, in shared submissions. It asks for those of a part
// when those before are queued: a call of many parts does not hold the operations of all. When the context traces progress, a
// rehearsal adds up their work first, and asks for them too. When the call is interrupted and can be resumed, the error is a
// backend.Interrupted.
//
// Do returns when everything is submitted. It waits for the results of calls that stream or are
// traced, and of kernels that run for the first time, because their speed is not known. It returns
// the error of an earlier call that left an operand incomplete.
func (d *Device) Do(ctx context.Context, w Work, n int, ops func(i int) ([]*Op, error)) (err error) {
	c, err := d.sent.begin(w.Name, w.Written, w.Read)
	if err != nil {
		return err
	}
	r := d.newRunner(ctx, c)
	defer func() { r.Finish(err) }()
	rehearsals := []bool{false}
	if r.trace.Progress != nil {
		rehearsals, r.plan = []bool{true, false}, w.FLOPs
	}
	for _, r.rehearsal = range rehearsals {
		for i := 0; i < n && err == nil; i++ {
			list, refused := ops(i)
			if err = cmp.Or(refused, ctx.Err()); err == nil {
				err = r.Queue(list...)
			}
		}
	}
	if err == nil {
		err = r.push()
	}
	if err == nil && (r.unmeasured || r.stream != nil || r.trace.Kernel != nil || r.trace.Progress != nil) {
		err = r.Flush()
	}
	if err == nil {
		err = r.writeBack(r.staged)
	}
	if err != nil && r.checkpoint != nil {
		err = r.checkpoint.interrupted(err)
	}
	return err
}

// Warmup compiles the pipelines of operations, without running them.
func (d *Device) Warmup(ctx context.Context, ops ...*Op) (err error) {
	r := d.NewRunner(ctx)
	defer func() { r.Finish(err) }()
	r.rehearsal = true
	if err := r.Queue(ops...); err != nil {
		return err
	}
	for _, p := range r.needed {
		d.Pipelines.Start(p)
	}
	for _, p := range r.needed {
		if _, err := d.Pipelines.Acquire(ctx, p); err != nil {
			return err
		}
		d.Pipelines.Release(p)
	}
	return nil
}

// Streamed returns the bytes that op moves between host and device and the most device memory that it uses for them.
func (d *Device) Streamed(op *Op) (moved, memory uint64, err error) {
	if op.Cutter.Room == 0 {
		return 0, 0, nil
	}
	r := d.NewRunner(context.Background())
	r.rehearsal = true
	s := &stream{room: op.Cutter.Room, largest: d.Limits.MaxBufferSize}
	r.stream = s
	if err = r.Queue(op); err == nil {
		err = r.writeBack(r.staged)
	}
	r.stream = nil // it holds no buffers
	r.Finish(err)
	return s.uploaded + s.downloaded, s.most, err
}

// NewRunner returns a Runner. The caller must Finish it.
func (d *Device) NewRunner(ctx context.Context) *Runner { return d.newRunner(ctx, new(inFlight)) }

func (d *Device) newRunner(ctx context.Context, c *inFlight) *Runner {
	r := d.runners.Get().(*Runner)
	r.d, r.ctx, r.trace, r.call = d, ctx, backend.TraceOf(ctx), c
	r.deadline, _ = ctx.Deadline()
	return r
}

// hold makes buf a buffer of at least size bytes that the call keeps to its end. A rehearsal needs none.
func (r *Runner) hold(buf *port.Buffer, size uint64) error {
	if size == 0 || r.rehearsal || *buf != nil && (*buf).Size() >= size {
		return nil
	}
	b, err := r.d.Pool.Get(r.ctx, size, resource.StorageUsage)
	if err != nil {
		return Translate(fmt.Sprintf("%s: scratch of %d bytes", r.d.name, size), err)
	}
	*buf = b
	r.held.all = append(r.held.all, b)
	return nil
}

// waitOldest waits for the submission that was started first. After an error of the context the submission still runs.
func (r *Runner) waitOldest(ctx context.Context) error {
	t, work := r.pending[0].ticket, r.pending[0].work
	var err error
	if running, _ := r.d.sent.runs(t); running {
		err = r.d.await(ctx, t)
	}
	if err != nil && errors.Is(err, ctx.Err()) {
		return err
	}
	r.pending = slices.Delete(r.pending, 0, 1)
	r.waited++
	if err == nil {
		err = r.d.sent.result(r.call)
	}
	if err != nil {
		return err
	}
	if r.trace.Kernel != nil {
		took, ok, err := r.d.Port.Took(t)
		if err != nil {
			return r.d.wrap(err)
		}
		if ok {
			r.trace.Kernel(took)
		}
	}
	r.done += work
	if r.trace.Progress != nil && r.total > 0 {
		scale := cmp.Or(r.plan, r.total) / r.total
		r.trace.Progress(r.done*scale, max(r.total, r.done)*scale)
	}
	return nil
}

// Flush submits what is queued and waits for all submissions.
func (r *Runner) Flush() error {
	if err := r.push(); err != nil {
		return err
	}
	for len(r.pending) > 0 {
		if err := r.waitOldest(r.ctx); err != nil {
			return err
		}
	}
	return nil
}

// separate ends one of several operations that may write other rows of the same tensor
// in host memory: what it wrote is copied back before the next one begins.
func (r *Runner) separate() error {
	if r.stream == nil {
		return nil
	}
	if !r.rehearsal {
		if err := r.Flush(); err != nil {
			return err
		}
	}
	if err := r.writeBack(r.staged); err != nil {
		return err
	}
	r.dropWindows(nil) // later windows may overlap them
	return nil
}

// grace is how long a streamed call whose context has ended waits for its running submissions: several times the
// default budget. Those of a device that hangs are left to it.
const grace = time.Second

// Finish ends a call that returned err and releases what it held. It does not wait for
// submissions, except those of a call that streams, because the next such call takes the same
// memory: at most for the grace or the budget. The Runner must not be used afterwards.
func (r *Runner) Finish(err error) {
	d := r.d
	if r.stream != nil {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(r.ctx), max(grace, d.pacing.budget))
		for len(r.pending) > 0 && ctx.Err() == nil {
			_ = r.waitOldest(ctx) // the call has its error
		}
		cancel()
		r.dropWindows(err)
		<-d.streaming
	}
	d.sent.end(r.call, err)
	for _, buf := range r.held.all {
		d.Pool.Put(buf, resource.StorageUsage, true)
	}
	r.batch.clear()
	clear(r.needed)
	clear(r.held.all)
	*r = Runner{needed: r.needed[:0], batch: r.batch, pending: r.pending[:0], held: held{all: r.held.all[:0]}}
	d.runners.Put(r)
}
