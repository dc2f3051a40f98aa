package gpu

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/shaders"
)

// step is one dispatch: windows for all bindings but the uniform, which params fill.
type step struct {
	variant variant
	windows []cut.Window
	params  shaders.Params
	groups  [3]uint32
	work    float64 // floating point operations, for progress
	seconds float64 // that it is expected to take, for the size of submissions
	// Copies that gather windows before the dispatch and return them after it.
	before, after []cut.Copy
}

// maxSteps bounds the dispatches of one submission.
const maxSteps = 128

// runner collects steps into submissions, each of a time that is bounded by the
// budget, and runs them, up to maxFlight at a time. Commands of a call run in
// order. What it collects in is used again by later calls.
//
// With rehearse set it does nothing on the device: it adds up the work and gathers
// the pipelines that the call needs.
type runner struct {
	b     *Backend
	ctx   context.Context
	trace *backend.Trace

	rehearse bool
	pipes    []*pipe // that a rehearsal met
	total    float64 // operations of the call, where a rehearsal came before
	done     float64 // operations that have ended
	flops    float64 // of the call as Plan.FLOPs has them, where that is another total

	// What is queued: steps, their windows one after the other, and their
	// parameters as they will lie in the uniform buffer.
	steps   []queued
	windows []cut.Window
	data    []byte
	work    float64
	seconds float64

	// What push puts together.
	commands []port.Command
	bindings []port.Binding

	flights [maxFlight]flight
	flying  int
	ended   time.Time // when the last one that was waited for had ended
	landed  int       // how many were waited for

	state   port.Buffer
	scratch []port.Buffer // to give back at the end

	// As in stream.go: what was brought from host memory, how many steps needed
	// something brought, and buffers for what is gathered, one for each binding.
	shelf   *shelf
	brought int
	gathers [maxBindings]port.Buffer

	stateSize uint64  // that was asked for last
	keeper    *keeper // of a call that can be resumed
	several   bool    // it runs several calls, which leave nothing to go on from
}

// queued is a step in the runner's memory.
type queued struct {
	pipe         *pipe
	first, count int // of windows
	offset, size int // of data
	groups       [3]uint32

	before, after []cut.Copy
}

// flight is a submission that is on the device.
type flight struct {
	ticket  port.Ticket
	slot    port.Buffer   // the uniform buffer that it reads
	copies  []port.Buffer // that it reads in place of operands
	began   time.Time
	work    float64
	seconds float64 // expected
	pipe    *pipe   // that all of it runs, nil when there are several
}

// newRunner returns a runner for a call, which ends with finish.
func (b *Backend) newRunner(ctx context.Context) *runner {
	r := b.runners.Get().(*runner)
	r.b, r.ctx, r.trace = b, ctx, backend.TraceOf(ctx)
	return r
}

// add queues a step, and starts what is queued before it when the two are more
// than a submission.
func (r *runner) add(s step) error {
	p := r.b.pipe(s.variant)
	if r.rehearse {
		r.total += s.work
		if !slices.Contains(r.pipes, p) {
			r.pipes = append(r.pipes, p)
		}
		return nil
	}
	size := s.params.Size()
	if n := len(r.steps); n > 0 {
		at := cut.AlignUp(len(r.data), r.b.uniformAlign)
		tooLong := r.seconds+s.seconds > r.b.share() || r.b.maxWork > 0 && r.work+s.work > r.b.maxWork
		if tooLong || n == maxSteps || at+size > int(r.b.slots.size) {
			if err := r.push(); err != nil {
				return err
			}
		}
	}
	if size > int(r.b.slots.size) {
		return fmt.Errorf("kernel %s has %d bytes of parameters, a uniform buffer here has %d: %w",
			s.variant.kernel.Name, size, r.b.slots.size, backend.ErrUnsupported)
	}
	at := cut.AlignUp(len(r.data), r.b.uniformAlign)
	r.fill(at)
	r.data = s.params.Append(r.data)
	r.steps = append(r.steps, queued{p, len(r.windows), len(s.windows), at, size, s.groups, s.before, s.after})
	r.windows = append(r.windows, s.windows...)
	r.work += s.work
	r.seconds += s.seconds
	return nil
}

// fill appends zeros up to a length of the parameters.
func (r *runner) fill(length int) {
	for len(r.data) < length {
		r.data = append(r.data, 0)
	}
}

// dispatch queues total workgroups of a step, each operations each, in as many
// dispatches as the time of one submission and the limit of workgroups a dimension
// ask for. Each gets its range of workgroups in params, which are shaders.Ranged.
func (r *runner) dispatch(s step, total int, each float64) error {
	p := r.b.pipe(s.variant)
	var err error
	if r.rehearse {
		err = r.foresee(s)
	} else {
		s, err = r.bring(s)
	}
	if err != nil {
		return err
	}
	atOnce := func() int { return r.b.atOnce(s.variant, each) }
	return split(total, atOnce, int(r.b.limits.MaxComputeWorkgroupsPerDimension), func(first, n, x, y int) error {
		s.params.(shaders.Ranged).SetRange(first, first+n)
		s.groups = [3]uint32{uint32(x), uint32(y), 1}
		s.work = float64(n) * each
		s.seconds = r.b.seconds(p, n, each)
		return r.add(s)
	})
}

// split cuts total workgroups into ranges of at most atOnce, which is asked before
// each, and grids: f gets the first, how many, and the grid that holds them.
func split(total int, atOnce func() int, maxDim int, f func(first, n, x, y int) error) error {
	maxDim = min(maxDim, math.MaxInt32)
	for first := 0; first < total; {
		n := min(total-first, atOnce(), maxDim*maxDim)
		x := min(n, maxDim)
		if err := f(first, n, x, (n+x-1)/x); err != nil {
			return err
		}
		first += n
	}
	return nil
}

// stateFor returns a buffer of at least size bytes for what pieces of a call
// leave to one another, nil in a rehearsal. Boxes of a call follow one another in
// the queue, so they can share it.
func (r *runner) stateFor(size uint64) (port.Buffer, error) {
	r.stateSize = size
	if r.rehearse || r.state != nil && r.state.Size() >= size {
		return r.state, nil
	}
	buf, err := r.temp(size)
	r.state = buf
	return buf, err
}

// temp returns a buffer of at least size bytes with unspecified contents that goes
// back to the pool when the call ends; nil in a rehearsal.
func (r *runner) temp(size uint64) (port.Buffer, error) {
	if r.rehearse {
		return nil, nil
	}
	buf, err := r.b.pool.get(size, storageUsage)
	if err != nil {
		return nil, translate(fmt.Sprintf("%s: scratch of %d bytes", r.b.info.Name, size), err)
	}
	r.scratch = append(r.scratch, buf)
	return buf, nil
}

// flush runs what is queued and waits for all that runs.
func (r *runner) flush() error {
	if err := r.push(); err != nil {
		return err
	}
	for r.flying > 0 {
		if err := r.land(); err != nil {
			return err
		}
	}
	return nil
}

// finish ends a call that ended with err: it waits for what still runs, which is
// the budget of a cancelled call, and gives back what the call had. The runner must
// not be used any more.
func (r *runner) finish(err error) {
	for r.flying > 0 {
		_ = r.land() // the call has its error
	}
	r.endStream(err)
	for _, buf := range r.scratch {
		r.give(buf, err)
	}
	r.forget()
	clear(r.pipes)
	clear(r.scratch)
	b := r.b
	*r = runner{
		pipes: r.pipes[:0], steps: r.steps, windows: r.windows, data: r.data,
		commands: r.commands, bindings: r.bindings, scratch: r.scratch[:0],
	}
	b.runners.Put(r)
}

// push starts what is queued.
func (r *runner) push() error {
	defer r.forget()
	if err := r.ctx.Err(); err != nil {
		return err
	}
	if len(r.steps) == 0 {
		return nil
	}
	for r.flying == maxFlight {
		if err := r.land(); err != nil {
			return err
		}
	}
	slot, err := r.slot()
	if err != nil {
		return err
	}
	f := flight{slot: slot, work: r.work, seconds: r.seconds, pipe: r.steps[0].pipe}
	for _, q := range r.steps {
		if q.pipe != f.pipe {
			f.pipe = nil
		}
	}
	err = r.record(&f)
	if err == nil {
		f.began = time.Now()
		f.ticket, err = r.submit()
	}
	if err != nil {
		r.giveFlight(&f, err)
		return err
	}
	r.flights[r.flying] = f
	r.flying++
	return nil
}

// forget empties the queue.
func (r *runner) forget() {
	clear(r.steps)
	clear(r.windows)
	clear(r.commands)
	clear(r.bindings)
	r.steps, r.windows, r.data = r.steps[:0], r.windows[:0], r.data[:0]
	r.commands, r.bindings = r.commands[:0], r.bindings[:0]
	r.work, r.seconds = 0, 0
}

// slot takes a uniform buffer. Only a call that has nothing on the device waits for
// others to give theirs back, so that calls never wait for one another in a ring.
func (r *runner) slot() (port.Buffer, error) {
	for {
		if slot := r.b.slots.try(); slot != nil {
			return slot, nil
		}
		if r.flying == 0 {
			return r.b.slots.wait(r.ctx)
		}
		if err := r.land(); err != nil {
			return nil, err
		}
	}
}

// record writes the parameters and turns what is queued into commands.
func (r *runner) record(f *flight) error {
	if err := r.b.dev.Write(f.slot, 0, r.data); err != nil {
		return translate(r.b.info.Name, err)
	}
	for i := range r.steps {
		q := &r.steps[i]
		p, err := r.b.pipeline(r.ctx, q.pipe)
		if err != nil {
			return err
		}
		r.copies(q.before)
		windows := r.windows[q.first : q.first+q.count]
		kinds, uniform := q.pipe.kinds, port.Binding{Buffer: f.slot, Offset: uint64(q.offset), Size: uint64(q.size)}
		from := len(r.bindings)
		for j, w := range windows {
			if j == q.pipe.uniform {
				r.bindings = append(r.bindings, uniform)
			}
			if w.Buf == nil {
				w = cut.Window{Buf: r.b.blank[j], Size: blankBytes}
			} else if kinds[j] == 'r' && written(windows, kinds, w.Buf) {
				// WebGPU does not let a dispatch read and write one buffer, even
				// in different parts of it: read from a copy of the part.
				c, err := r.b.pool.get(w.Size, storageUsage)
				if err != nil {
					return translate(r.b.info.Name, err)
				}
				f.copies = append(f.copies, c)
				r.commands = append(r.commands, port.Command{Src: w.Buf, SrcOffset: w.Offset, Dst: c, Size: w.Size})
				w = cut.Window{Buf: c, Size: w.Size}
			}
			r.bindings = append(r.bindings, port.Binding{Buffer: w.Buf, Offset: w.Offset, Size: w.Size})
		}
		if len(windows) == q.pipe.uniform {
			r.bindings = append(r.bindings, uniform)
		}
		r.commands = append(r.commands, port.Command{Pipeline: p, Bindings: r.bindings[from:len(r.bindings):len(r.bindings)], Groups: q.groups})
		r.copies(q.after)
	}
	return nil
}

// copies records copies between buffers.
func (r *runner) copies(list []cut.Copy) {
	for _, c := range list {
		r.commands = append(r.commands, port.Command{Src: c.Src, SrcOffset: c.SrcOffset, Dst: c.Dst, DstOffset: c.DstOffset, Size: c.Size})
	}
}

// written reports whether a dispatch with these windows writes to buf.
func written(windows []cut.Window, kinds string, buf cut.Buffer) bool {
	for j, w := range windows {
		if w.Buf == buf && kinds[j] == 'w' {
			return true
		}
	}
	return false
}

// submit starts the commands, between two looks at the device's clock when somebody
// wants to know.
func (r *runner) submit() (port.Ticket, error) {
	submit := r.b.dev.Submit
	if r.trace.Kernel != nil {
		submit = r.b.dev.SubmitTimed
	}
	t, err := submit(r.commands)
	return t, translate(r.b.info.Name, err)
}

// land waits for the submission that was started first, learns from what it took
// and gives back what it had.
func (r *runner) land() error {
	f := r.flights[0]
	copy(r.flights[:], r.flights[1:])
	r.flights[maxFlight-1] = flight{}
	r.flying--
	r.landed++
	err := r.b.dev.Wait(f.ticket)
	if err == nil && r.trace.Kernel != nil {
		var took time.Duration
		var ok bool
		if took, ok, err = r.b.dev.Took(f.ticket); ok && err == nil {
			r.trace.Kernel(took)
		}
	}
	err = translate(r.b.info.Name, err)
	r.giveFlight(&f, err)
	if err != nil {
		return err
	}
	r.learn(&f)
	r.done += f.work
	if r.trace.Progress != nil {
		scale := 1.0
		if r.flops > 0 && r.total > 0 {
			scale = r.flops / r.total
		}
		r.trace.Progress(r.done*scale, max(r.total, r.done)*scale)
	}
	return nil
}

// learn compares what a submission took with what was expected. Short ones say more
// of what a submission costs than of the kernel, and endanger nobody.
func (r *runner) learn(f *flight) {
	now := time.Now()
	from := f.began
	if r.ended.After(from) {
		from = r.ended // it waited for the one before
	}
	r.ended = now
	took := now.Sub(from).Seconds()
	if f.pipe != nil && f.seconds > 0 && max(took, f.seconds) > r.b.share()/8 {
		f.pipe.pace.measured(took / f.seconds)
	}
}

func (r *runner) giveFlight(f *flight, err error) {
	for _, c := range f.copies {
		r.give(c, err)
	}
	r.b.slots.give(f.slot)
}

// give puts a buffer into the pool, or lets it go after an error, when a
// submission may still use it.
func (r *runner) give(buf port.Buffer, err error) {
	if err == nil {
		r.b.pool.put(buf, storageUsage)
	} else {
		r.b.pool.drop(buf)
	}
}
