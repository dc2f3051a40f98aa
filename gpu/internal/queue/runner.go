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
	"github.com/seed90331342/attn/shaders"
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

	call       *call
	first      bool // a kernel runs for the first time on the device
	batch      batch
	flights    []sentWork // the submissions that the call has not waited for, oldest first
	landed     int        // how many it has waited for
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
}

// Output is memory that a call writes to.
type Output struct {
	Store *cut.Store
	Whole bool // the call writes all of it
}

// Do runs a call: f queues its operations. When the context traces progress, f runs in a
// rehearsal first. When the call is interrupted and can be resumed, the error is a
// backend.Interrupted.
//
// Do returns when everything is submitted. It waits for the results of calls that stream or are
// traced, and of kernels that run for the first time, because their speed is not known. It returns
// the error of an earlier call that left an operand incomplete.
func (d *Device) Do(ctx context.Context, w Work, f func(r *Runner) error) (err error) {
	c, err := d.sent.begin(w.Name, w.Written, w.Read)
	if err != nil {
		return err
	}
	r := d.newRunner(ctx, c)
	defer func() { r.Finish(err) }()
	if r.trace.Progress != nil {
		r.rehearsal = true
		if err := f(r); err != nil {
			return err
		}
		r.rehearsal = false
	}
	if err = f(r); err == nil {
		err = r.push()
	}
	if err == nil && (r.first || r.stream != nil || r.trace.Kernel != nil || r.trace.Progress != nil) {
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

// Warmup compiles the pipelines of the call that f queues, without running it.
func (d *Device) Warmup(ctx context.Context, f func(r *Runner) error) (err error) {
	r := d.NewRunner(ctx)
	defer func() { r.Finish(err) }()
	r.rehearsal = true
	if err := f(r); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
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

// Streamed returns the bytes that op moves between host and device and the most device
// memory that it uses for them.
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
func (d *Device) NewRunner(ctx context.Context) *Runner { return d.newRunner(ctx, new(call)) }

func (d *Device) newRunner(ctx context.Context, c *call) *Runner {
	r := d.runners.Get().(*Runner)
	r.d, r.ctx, r.trace, r.call = d, ctx, backend.TraceOf(ctx), c
	r.deadline, _ = ctx.Deadline()
	return r
}

// Context returns the context of the call.
func (r *Runner) Context() context.Context { return r.ctx }

// Expect sets the work of the call as its plan states it, in operations. total is called
// only where progress is traced.
func (r *Runner) Expect(total func() float64) {
	if r.rehearsal && r.trace.Progress != nil {
		r.plan = total()
	}
}

// Queue cuts op into dispatches and adds them to the batch. It submits a batch that is full; Do
// submits the last one.
func (r *Runner) Queue(op *Op) error {
	if err := r.separate(); err != nil {
		return err
	}
	if c := op.Call; c != nil && (op.Cutter.Room > 0 || c.Resume != nil) {
		if err := r.keep(op); err != nil {
			return err
		}
	}
	op.Cutter.Share = r.d.pacing.share(r.deadline) / r.d.pacing.share(time.Time{})
	var table port.Buffer
	if n := op.tableBytes(); n > 0 && !r.rehearsal {
		if err := r.hold(&table, n); err != nil {
			return err
		}
	}
	if op.Fill != nil {
		if err := r.Queue(op.Fill(cut.Window{Buf: table, Size: op.Filled})); err != nil {
			return err
		}
	} else if table != nil {
		if err := r.d.wrap(r.d.Port.Write(table, 0, op.Table)); err != nil {
			return err
		}
	}
	var box cut.Box
	return op.walk(table, r.stateOf, func(p Chunk, s Step) error {
		if op.Chained && p.Of.Box != box {
			if err := r.separate(); err != nil {
				return err
			}
			box = p.Of.Box
		}
		return r.dispatch(s)
	})
}

// dispatch queues a step after copies. Its parameters are shaders.Ranged.
func (r *Runner) dispatch(s Step, before ...cut.Copy) error {
	x := dispatch{pipeline: r.d.Pipelines.Of(s.Kernel), windows: s.Windows, params: s.Params, before: before}
	if n := len(x.pipeline.Kinds); n < len(s.Windows) {
		_, err := shaders.Render(s.Kernel)
		return fmt.Errorf("a kernel binds %d buffers and gets %d (%v): %w", n, len(s.Windows), err, backend.ErrUnsupported)
	}
	if err := r.stage(&x); err != nil {
		return err
	}
	return r.d.split(s, r.deadline, func(first, n int, grid [3]uint32) error {
		s.Params.(shaders.Ranged).SetRange(first, first+n)
		x.grid = grid
		x.work = float64(n) * s.Each
		x.seconds = r.d.pacing.seconds(x.pipeline.Pace.Speed(), n, s.Each)
		return r.add(&x)
	})
}

// Dispatch queues one dispatch of a kernel on a row of workgroups, whatever time it takes. The
// probes of the device's ceilings use it.
func (r *Runner) Dispatch(k shaders.Variant, windows []cut.Window, p shaders.Params, groups int) error {
	return r.add(&dispatch{pipeline: r.d.Pipelines.Of(k), windows: windows, params: p, grid: [3]uint32{uint32(groups), 1, 1}})
}

// add queues a dispatch, and submits what is queued before it when both together exceed
// a submission.
func (r *Runner) add(x *dispatch) error {
	if r.rehearsal {
		r.total += x.work
		if !slices.Contains(r.needed, x.pipeline) {
			r.needed = append(r.needed, x.pipeline)
		}
		return nil
	}
	ring := &r.d.sent.ring
	if size := x.params.Size(); size > ring.most {
		return fmt.Errorf("kernel %s has %d bytes of parameters, a uniform buffer has %d: %w", x.pipeline.Kernel.Name(), size, ring.most, backend.ErrUnsupported)
	}
	b := &r.batch
	if len(b.list) > 0 && (cut.AlignUp(len(b.data), ring.align)+x.params.Size() > ring.most || len(b.list) == maxDispatches ||
		r.d.pacing.full(b.seconds+x.seconds, b.work+x.work, r.deadline)) {
		if err := r.push(); err != nil {
			return err
		}
	}
	b.add(*x, ring.align)
	x.before = nil // later dispatches of the step find the windows filled
	return nil
}

// stateOf returns a buffer of at least size bytes for the state of a box, nil in a
// rehearsal. The boxes of a call share it, because their steps follow one another.
func (r *Runner) stateOf(size uint64) (port.Buffer, error) {
	h := &r.held
	h.size = size
	if r.rehearsal {
		return nil, nil
	}
	err := r.hold(&h.state, size)
	return h.state, err
}

// hold makes buf a buffer of at least size bytes that the call keeps to its end.
func (r *Runner) hold(buf *port.Buffer, size uint64) error {
	if *buf != nil && (*buf).Size() >= size {
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

// push submits what is queued.
func (r *Runner) push() error {
	defer r.batch.clear()
	if err := r.ctx.Err(); err != nil {
		return err
	}
	if len(r.batch.list) == 0 {
		return nil
	}
	for len(r.flights) == MaxFlight {
		if err := r.land(r.ctx); err != nil {
			return err
		}
	}
	for i := range r.batch.list {
		r.first = r.first || !r.batch.list[i].pipeline.Measured.Load()
	}
	t, err := r.batch.send(r.ctx, r.d, r.call, r.trace.Kernel != nil)
	if err == nil {
		r.flights = append(r.flights, sentWork{t, r.batch.work})
	}
	return err
}

// land waits for the submission that was started first. After an error of the context the
// submission still runs.
func (r *Runner) land(ctx context.Context) error {
	t, work := r.flights[0].ticket, r.flights[0].work
	var err error
	if running, _ := r.d.sent.runs(t); running {
		err = r.d.await(ctx, t)
	}
	if err != nil && errors.Is(err, ctx.Err()) {
		return err
	}
	r.flights = slices.Delete(r.flights, 0, 1)
	r.landed++
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
	for len(r.flights) > 0 {
		if err := r.land(r.ctx); err != nil {
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

// grace is how long a streamed call whose context has ended waits for its running
// submissions: several times the default budget. Those of a device that hangs are left to
// it.
const grace = time.Second

// Finish ends a call that returned err and releases what it held. It does not wait for
// submissions, except those of a call that streams, because the next such call takes the same
// memory: at most for the grace or the budget. The Runner must not be used afterwards.
func (r *Runner) Finish(err error) {
	d := r.d
	if r.stream != nil {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(r.ctx), max(grace, d.pacing.budget))
		for len(r.flights) > 0 && ctx.Err() == nil {
			_ = r.land(ctx) // the call has its error
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
	*r = Runner{needed: r.needed[:0], batch: r.batch, flights: r.flights[:0], held: held{all: r.held.all[:0]}}
	d.runners.Put(r)
}
