package gpu

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/port"
)

// What a call needs of tensors in host memory it brings to the device window by
// window, as its steps need them, keeps while there is room, and takes back when
// a step has written it. A window is a part of a tensor that one step meets, so
// that keys and values go up piece by piece while queries, outputs and state
// stay. The room is cut by shares: one each for what stays while a box goes
// through its pieces, for the windows of one piece, for those of the next one,
// which go up while the device computes, for the state, for what comes down, and
// for rounding up the sizes of buffers.
// shelf holds the windows of host memory that are on the device, the one that was
// used last at the end.
type shelf struct {
	room    uint64
	largest uint64 // buffer that the device makes
	held    []*leaf
	loaded  uint64 // bytes that went up
	taken   uint64 // bytes that came down
	most    uint64 // bytes that were held at a time
}

// leaf is a window of host memory on the device.
type leaf struct {
	of    *cut.Staged
	size  uint64      // of the buffer
	buf   port.Buffer // nil in a plan
	dirty bool
	step  int // the last one that used it
	push  int // no submission after this one uses it, unless it is queued yet
}

// leaf returns the leaf of a window for a step, and whether it was there; a new one
// has no buffer.
func (s *shelf) leaf(a *cut.Staged, step int, drop func(*leaf) error) (_ *leaf, found bool, err error) {
	for i, l := range s.held {
		if l.of.Of == a.Of && l.of.Lo == a.Lo && l.of.Hi == a.Hi {
			s.held = append(slices.Delete(s.held, i, i+1), l)
			l.step, l.dirty = step, l.dirty || a.Of.Use != cut.Read
			return l, true, nil
		}
	}
	l := &leaf{of: a, size: sizeClass(a.Size(), s.largest), step: step, dirty: a.Of.Use != cut.Read}
	return l, false, s.add(l, drop)
}

// add puts a leaf at the end, after drop has taken away those that were not used
// for the longest time, until there is room. Leaves of the current step stay.
func (s *shelf) add(l *leaf, drop func(*leaf) error) error {
	total := l.size
	for _, h := range s.held {
		total += h.size
	}
	room := s.room / cut.RoomShares * cut.HeldShares
	for len(s.held) > 0 && total > room && s.held[0].step != l.step {
		old := s.held[0]
		total -= old.size
		s.held = slices.Delete(s.held, 0, 1)
		if err := drop(old); err != nil {
			return err
		}
	}
	s.held = append(s.held, l)
	s.most = max(s.most, total)
	return nil
}

// bring gives a step the windows that are not there: those of host memory, and
// those that are gathered on the device, which are copied before each dispatch
// and back after it when it writes them.
func (r *runner) bring(s step) (step, error) {
	if !slices.ContainsFunc(s.windows, func(w cut.Window) bool { _, ok := w.Buf.(*cut.Staged); return ok }) {
		return s, nil
	}
	r.brought++
	if r.shelf != nil {
		r.shelf.note(r.landed+r.flying, len(r.steps) > 0)
	}
	s.windows = slices.Clone(s.windows)
	for j, w := range s.windows {
		a, ok := w.Buf.(*cut.Staged)
		if !ok {
			continue
		}
		var err error
		if a.Of.OnHost {
			s.windows[j].Buf, err = r.load(a)
		} else {
			s.windows[j].Buf, err = r.gather(&s, j, a)
		}
		if err != nil {
			return s, err
		}
	}
	return s, nil
}

// gather queues the copies that fill binding j of s, in a buffer that the binding
// has for the whole call.
func (r *runner) gather(s *step, j int, a *cut.Staged) (port.Buffer, error) {
	buf := r.gathers[j]
	if buf == nil || buf.Size() < a.Size() {
		var err error
		if buf, err = r.temp(a.Size()); err != nil {
			return nil, err
		}
		r.gathers[j] = buf
	}
	s.before = append(s.before, a.Copies(buf, false)...)
	if a.Of.Use != cut.Read {
		s.after = append(s.after, a.Copies(buf, true)...)
	}
	return buf, nil
}

// load returns a buffer with a window of host memory. What steps in the queue
// still need is not touched.
func (r *runner) load(a *cut.Staged) (port.Buffer, error) {
	if r.shelf == nil {
		// One streaming call at a time: each may take all the room that there is.
		select {
		case r.b.streaming <- struct{}{}:
		case <-r.ctx.Done():
			return nil, r.ctx.Err()
		}
		r.shelf = &shelf{room: r.b.deviceMemory().Room(), largest: r.b.limits.MaxBufferSize}
	}
	l, found, err := r.shelf.leaf(a, r.brought, r.unload)
	if err != nil || found {
		return l.buf, err
	}
	if l.buf, err = r.b.pool.get(a.Size(), storageUsage); err != nil {
		r.shelf.held = slices.DeleteFunc(r.shelf.held, func(x *leaf) bool { return x == l })
		return nil, translate(fmt.Sprintf("%s: %d bytes to stream %s through (Options.MemoryBytes bounds them)", r.b.info.Name, a.Size(), a.Of.Name), err)
	}
	if a.Of.Use == cut.Written {
		return l.buf, nil
	}
	began := time.Now()
	r.shelf.loaded += a.Size()
	t := a.Of.T
	if a.Of.Pages != nil {
		packed, host := make([]byte, a.Size()), cut.StoreOf(t).Host
		for _, x := range a.Runs {
			copy(packed[x.To:], host[x.Lo:min(x.Hi, uint64(len(host)))])
		}
		err = translate(r.b.info.Name, r.b.dev.Write(l.buf, 0, packed))
		moved(r.ctx, int64(a.Size()), began)
		return l.buf, err
	}
	err = cut.Pack(r.ctx, a.Strides, a.HostMemory(), t.Strides(), a.Shape(), t.DType().Size(), func(at uint64, data []byte) error {
		return translate(r.b.info.Name, r.b.dev.Write(l.buf, at, data))
	})
	moved(r.ctx, int64(a.Size()), began)
	return l.buf, err
}

// unload gives a leaf's buffer back, after taking what was written to the host.
func (r *runner) unload(l *leaf) error {
	if err := r.settle(l); err != nil {
		r.b.pool.drop(l.buf) // a submission may still use it
		return err
	}
	err := r.takeBack(l)
	r.give(l.buf, err)
	return err
}

// note says how many submissions were started before a new step, and whether
// steps wait for the next: the leaves of the last step are used in no later one.
func (s *shelf) note(started int, queued bool) {
	if queued {
		started++
	}
	for i := len(s.held) - 1; i >= 0 && s.held[i].step == s.held[len(s.held)-1].step; i-- {
		s.held[i].push = started
	}
}

// settle waits until no step that is queued or runs uses a leaf; those after it go
// on.
func (r *runner) settle(l *leaf) error {
	if r.landed+r.flying < l.push {
		if err := r.push(); err != nil {
			return err
		}
	}
	for r.landed < l.push && r.flying > 0 {
		if err := r.land(); err != nil {
			return err
		}
	}
	return nil
}

// takeBack copies what steps wrote into a leaf to the host, or counts it in a
// rehearsal; they must have ended.
func (r *runner) takeBack(l *leaf) error {
	if !l.dirty {
		return nil
	}
	a := l.of
	l.dirty = false
	r.shelf.taken += a.Size()
	if r.rehearse {
		return nil
	}
	began := time.Now()
	packed := make([]byte, a.Size())
	if err := r.b.read(r.ctx, &cut.Store{Parts: []cut.Buffer{l.buf}, Part: l.buf.Size()}, 0, packed); err != nil {
		return err
	}
	cut.Scatter(a.HostMemory(), a.Of.T.Strides(), packed, a.Strides, a.Shape(), a.Of.T.DType().Size())
	moved(r.ctx, int64(a.Size()), began)
	return nil
}

// takeAllBack copies everything that steps up to one wrote into windows of host
// memory there; they must have ended.
func (r *runner) takeAllBack(step int) error {
	if r.shelf == nil {
		return nil
	}
	for _, l := range r.shelf.held {
		if l.step > step {
			continue
		}
		if err := r.takeBack(l); err != nil {
			return err
		}
	}
	return nil
}

// foresee does in a rehearsal what bring would do to the shelf, where there is one.
func (r *runner) foresee(s step) error {
	r.brought++
	for _, w := range s.windows {
		a, ok := w.Buf.(*cut.Staged)
		if !ok || !a.Of.OnHost || r.shelf == nil {
			continue
		}
		_, found, err := r.shelf.leaf(a, r.brought, r.takeBack)
		if err != nil {
			return err
		}
		if !found && a.Of.Use != cut.Written {
			r.shelf.loaded += a.Size()
		}
	}
	return nil
}

// planStream adds to the plan of a call what it streams.
func (b *Backend) planStream(c *backend.Call, p *backend.Plan) error {
	a, err := b.newAttention(c)
	if err != nil || a.cut.Room == 0 {
		return err
	}
	r := b.newRunner(context.Background())
	defer func() { r.finish(err) }()
	r.rehearse = true
	s := &shelf{room: a.cut.Room, largest: b.limits.MaxBufferSize}
	r.shelf = s
	if x := a.decodes(); x != nil {
		err = x.queue(r)
	} else {
		err = a.queue(r)
	}
	if err == nil {
		err = r.takeAllBack(r.brought)
	}
	r.shelf = nil
	var names []string
	for _, o := range a.cut.Operands {
		if o.OnHost {
			names = append(names, o.Name)
		}
	}
	p.Path = "streamed " + p.Path
	p.Streamed = int64(s.loaded + s.taken)
	p.Scratch += int64(s.most)
	p.Why += fmt.Sprintf("; the device's memory has no room for %s, which stay in host memory: windows of them go up while the device computes, within %d KiB of it",
		strings.Join(names, ", "), a.cut.Room>>10)
	return err
}

// endStream gives back what load took, after the call that ended with err.
func (r *runner) endStream(err error) {
	if r.shelf == nil {
		return
	}
	for _, l := range r.shelf.held {
		r.give(l.buf, err)
	}
	r.shelf = nil
	<-r.b.streaming
}
