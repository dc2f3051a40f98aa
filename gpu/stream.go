package gpu

import (
	"fmt"
	"slices"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/port"
)

// What a call needs of tensors in host memory it brings to the device window by
// window, as its steps need them, keeps while there is room, and takes back when
// a step has written it. A window is a part of a tensor that one step meets, so
// that keys and values go up piece by piece while queries, outputs and state
// stay. The room is cut by shares: a share each for what stays while a box goes
// through its pieces, for the windows of one piece, for those of the next one,
// which go up while the device computes, for the state, and one for rounding.
const roomShares = 5

// unknownRoom is the room where Options do not bound the device's memory, and it
// was full when a tensor came.
const unknownRoom = 512 << 20

// room is how much device memory a call may take for what it streams, when
// tensors take so much.
func (b *Backend) room(tensors int64) uint64 {
	if b.memory == 0 {
		return unknownRoom
	}
	return uint64(max(b.memory-b.memory/8*poolEighths-tensors, 0))
}

// shelf holds the windows of host memory that are on the device, the one that was
// used last at the end.
type shelf struct {
	room uint64
	held []*leaf
}

// leaf is a window of host memory on the device.
type leaf struct {
	of    *absent
	buf   port.Buffer // nil in a plan
	dirty bool
	step  int // the last one that used it
	push  int // no submission after this one uses it, unless it is queued yet
}

func (l *leaf) size() uint64 {
	if l.buf == nil {
		return l.of.size
	}
	return l.buf.Size()
}

// find returns the leaf of a window, moved to the end, or nil.
func (s *shelf) find(a *absent) *leaf {
	for i, l := range s.held {
		if l.of.o == a.o && l.of.lo == a.lo && l.of.hi == a.hi {
			s.held = append(slices.Delete(s.held, i, i+1), l)
			return l
		}
	}
	return nil
}

// add puts a leaf at the end, after drop has taken away those that were not used
// for the longest time, until there is room. Leaves of the current step stay.
func (s *shelf) add(l *leaf, drop func(*leaf) error) error {
	total := l.of.size
	for _, h := range s.held {
		total += h.size()
	}
	most := s.room / roomShares * (roomShares - 1)
	for len(s.held) > 0 && total > most && s.held[0].step != l.step {
		old := s.held[0]
		total -= old.size()
		s.held = slices.Delete(s.held, 0, 1)
		if err := drop(old); err != nil {
			return err
		}
	}
	s.held = append(s.held, l)
	return nil
}

// bring gives a step the windows that are not there: those of host memory, and
// those that are gathered on the device, which are copied before each dispatch
// and back after it when it writes them.
func (r *runner) bring(s step) (step, error) {
	if !slices.ContainsFunc(s.windows, func(w window) bool { _, ok := w.buf.(*absent); return ok }) {
		return s, nil
	}
	r.brought++
	if r.shelf != nil {
		r.shelf.note(r.landed+r.flying, len(r.steps) > 0)
	}
	s.windows = slices.Clone(s.windows)
	for j, w := range s.windows {
		a, ok := w.buf.(*absent)
		if !ok {
			continue
		}
		var err error
		if a.o.host {
			s.windows[j].buf, err = r.load(a)
		} else {
			s.windows[j].buf, err = r.gather(&s, j, a)
		}
		if err != nil {
			return s, err
		}
	}
	return s, nil
}

// gather queues the copies that fill binding j of s, in a buffer that the binding
// has for the whole call.
func (r *runner) gather(s *step, j int, a *absent) (port.Buffer, error) {
	buf := r.gathers[j]
	if buf == nil || buf.Size() < a.size {
		var err error
		if buf, err = r.temp(a.size); err != nil {
			return nil, err
		}
		r.gathers[j] = buf
	}
	s.before = append(s.before, a.copies(buf, false)...)
	if a.o.use != isRead {
		s.after = append(s.after, a.copies(buf, true)...)
	}
	return buf, nil
}

// load returns a buffer with a window of host memory. What steps in the queue
// still need is not touched.
func (r *runner) load(a *absent) (port.Buffer, error) {
	if r.shelf == nil {
		// One streaming call at a time: each may take all the room that there is.
		select {
		case r.b.streaming <- struct{}{}:
		case <-r.ctx.Done():
			return nil, r.ctx.Err()
		}
		r.shelf = &shelf{room: r.b.room(r.b.tensors.Load())}
	}
	if l := r.shelf.find(a); l != nil {
		l.step, l.dirty = r.brought, l.dirty || a.o.use != isRead
		return l.buf, nil
	}
	l := &leaf{of: a, step: r.brought, dirty: a.o.use != isRead}
	if err := r.shelf.add(l, r.unload); err != nil {
		return nil, err
	}
	var err error
	if l.buf, err = r.b.pool.get(a.size, storageUsage); err != nil {
		r.shelf.held = slices.DeleteFunc(r.shelf.held, func(x *leaf) bool { return x == l })
		return nil, translate(fmt.Sprintf("%s: %d bytes to stream %s through (Options.MemoryBytes bounds them)", r.b.info.Name, a.size, a.o.name), err)
	}
	if a.o.use == isWritten {
		return l.buf, nil
	}
	began := time.Now()
	t := a.o.t
	err = put(r.ctx, a.strides, a.host(), t.Strides(), a.shape(), t.DType().Size(), func(at uint64, data []byte) error {
		return translate(r.b.info.Name, r.b.dev.Write(l.buf, at, data))
	})
	moved(r.ctx, int64(a.size), began)
	return l.buf, err
}

// host is the host memory of a window's tensor from the window's first element on.
func (a *absent) host() []byte {
	first := a.o.t.Offset()
	for i, s := range a.o.t.Strides() {
		first += a.lo[i] * s
	}
	return storeOf(a.o.t).host[first*a.o.t.DType().Size():]
}

// shape is the window's, with axes of stride zero once.
func (a *absent) shape() backend.Shape {
	var shape backend.Shape
	for i := range shape {
		shape[i] = a.hi[i] - a.lo[i]
	}
	return once(shape, a.o.t.Strides())
}

// unload gives a leaf's buffer back, after taking what was written to the host.
func (r *runner) unload(l *leaf) error {
	if err := r.settle(l); err != nil {
		l.buf.Release() // a submission may still use it
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

// takeBack copies what steps wrote into a leaf to the host; they must have ended.
func (r *runner) takeBack(l *leaf) error {
	if !l.dirty {
		return nil
	}
	began := time.Now()
	a := l.of
	packed := make([]byte, a.size)
	if err := r.b.read(r.ctx, &store{parts: []port.Buffer{l.buf}, part: l.buf.Size()}, 0, packed); err != nil {
		return err
	}
	scatter(a.host(), a.o.t.Strides(), packed, a.strides, a.shape(), a.o.t.DType().Size())
	l.dirty = false
	moved(r.ctx, int64(a.size), began)
	return nil
}

// takeAllBack copies everything that steps wrote into windows of host memory
// there; all steps must have ended.
func (r *runner) takeAllBack() error {
	if r.shelf == nil {
		return nil
	}
	for _, l := range r.shelf.held {
		if err := r.takeBack(l); err != nil {
			return err
		}
	}
	return nil
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
