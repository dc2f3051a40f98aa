package queue

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/gpu/internal/resource"
	"github.com/seed90331342/attn/shaders"
)

// Bounds of one submission. The parameters of 36 dispatches of the largest kernel fit, 1,552 bytes
// each at an alignment of 256.
const (
	maxDispatches = 128
	batchBytes    = 64 << 10
)

// dispatch is one dispatch of a step.
type dispatch struct {
	pipeline *resource.Pipeline
	windows  []cut.Window
	params   shaders.Params
	grid     [3]uint32
	work     float64 // operations, for progress
	seconds  float64 // expected
	// Copies that fill windows before the dispatch and return them after it.
	before, after []cut.Copy

	offset uint64 // of the parameters in the batch
}

// batch is the submission that is being assembled. Its slices are used again by later calls.
type batch struct {
	list    []dispatch
	data    []byte // parameters as they are written to the ring
	work    float64
	seconds float64

	compiled []port.Pipeline // of list
	commands []port.Command
	bindings []port.Binding
}

// add queues a dispatch, and submits what is queued before it when both together exceed a submission.
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

// add adds x with its present parameters.
func (b *batch) add(x dispatch, align int) {
	x.offset = uint64(cut.AlignUp(len(b.data), align))
	b.data = append(b.data, make([]byte, int(x.offset)-len(b.data))...)
	b.data = x.params.Append(b.data)
	b.list = append(b.list, x)
	b.work += x.work
	b.seconds += x.seconds
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
	for len(r.pending) == MaxPending {
		if err := r.waitOldest(r.ctx); err != nil {
			return err
		}
	}
	for i := range r.batch.list {
		r.unmeasured = r.unmeasured || !r.batch.list[i].pipeline.Measured.Load()
	}
	t, err := r.batch.send(r.ctx, r.d, r.call, r.trace.Kernel != nil)
	if err == nil {
		r.pending = append(r.pending, sentWork{t, r.batch.work})
	}
	return err
}

// send submits b for c.
func (b *batch) send(ctx context.Context, d *Device, c *inFlight, timed bool) (t port.Ticket, err error) {
	defer func() {
		for i := range b.compiled {
			if err != nil { // else they are released when the submission has ended
				d.Pipelines.Release(b.list[i].pipeline)
			}
		}
	}()
	for i := range b.list {
		d.Pipelines.Start(b.list[i].pipeline)
	}
	for i := range b.list {
		p, err := d.Pipelines.Acquire(ctx, b.list[i].pipeline)
		if err != nil {
			return 0, err
		}
		b.compiled = append(b.compiled, p)
	}
	s := d.sent
	select {
	case s.submitting <- struct{}{}:
		defer func() { <-s.submitting }()
	case <-ctx.Done():
		return 0, ctx.Err()
	}
	f, err := d.room(ctx, uint64(len(b.data)), b.seconds)
	if err != nil {
		return 0, err
	}
	if err = b.record(d, f); err == nil {
		f.call, f.began = c, time.Now()
		t, err = d.Port.Submit(b.commands, timed)
		f.ticket, err = t, d.wrap(err)
	}
	if err != nil {
		s.mu.Lock()
		s.recycle(f)
		s.mu.Unlock()
		return 0, err
	}
	s.noteStart(f)
	return t, nil
}

// record writes the parameters to f's part of the ring and makes the commands of b.
func (b *batch) record(d *Device, f *submission) error {
	ring := &d.sent.ring
	if err := d.Port.Write(ring.buf, f.lo, b.data); err != nil {
		return d.wrap(err)
	}
	for i := range b.list {
		x := &b.list[i]
		f.pipelines = append(f.pipelines, x.pipeline)
		b.copies(x.before)
		from := len(b.bindings)
		for j, w := range x.windows {
			if w.Buf == nil {
				w = cut.Window{Buf: d.blank[j], Size: resource.MinBytes}
			}
			b.bindings = append(b.bindings, port.Binding{Buffer: w.Buf, Offset: w.Offset, Size: w.Size})
		}
		b.bindings = slices.Insert(b.bindings, from+x.pipeline.Uniform,
			port.Binding{Buffer: ring.buf, Offset: f.lo + x.offset, Size: uint64(x.params.Size())})
		b.commands = append(b.commands, port.Command{Pipeline: b.compiled[i], Bindings: b.bindings[from:len(b.bindings):len(b.bindings)], Groups: x.grid})
		b.copies(x.after)
	}
	return nil
}

// copies records copies between buffers.
func (b *batch) copies(list []cut.Copy) {
	for _, c := range list {
		b.commands = append(b.commands, port.Command{Src: c.Src, SrcOffset: c.SrcOffset, Dst: c.Dst, DstOffset: c.DstOffset, Size: c.Size})
	}
}

// clear empties b.
func (b *batch) clear() {
	clear(b.list)
	clear(b.compiled)
	clear(b.commands)
	clear(b.bindings)
	*b = batch{list: b.list[:0], data: b.data[:0], compiled: b.compiled[:0], commands: b.commands[:0], bindings: b.bindings[:0]}
}

// writes reports whether x writes to buf.
func (x *dispatch) writes(buf cut.Buffer) bool {
	for j, w := range x.windows {
		if w.Buf == buf && x.pipeline.Kinds[j] == 'w' {
			return true
		}
	}
	return false
}

// ring is the uniform buffer of a device. Parameters follow one another and are overwritten
// when their submission has ended. Calls share it, and therefore find their bind groups again.
type ring struct {
	buf   port.Buffer
	size  uint64
	align int // of the parameters of a dispatch
	most  int // bytes of the parameters of a submission
	head  uint64
}

// ringBytes is the size of the ring.
const ringBytes = 1 << 20

// ringStep divides where the parameters of a submission begin. With one provider, bind groups depend on the remainder.
const ringStep = 256

func newRing(dev port.Device) (r ring, err error) {
	l := dev.Limits()
	r.size, r.align = min(ringBytes, l.MaxBufferSize&^15), max(int(l.MinUniformBufferOffsetAlignment), 16)
	r.most = int(min(r.size, batchBytes))
	r.buf, err = dev.CreateBuffer(r.size, resource.UniformUsage)
	return r, err
}

// find returns where bytes fit next to those of list.
func (r *ring) find(bytes uint64, list []*submission) (at uint64, ok bool) {
	if len(list) == 0 {
		return 0, true
	}
	end, first := r.size, list[0].lo
	if r.head <= first {
		end = first
	}
	step := uint64(max(r.align, ringStep))
	switch at = (r.head + step - 1) / step * step; {
	case at+bytes <= end:
		return at, true
	case r.head > first && bytes <= first:
		return 0, true
	}
	return 0, false
}
