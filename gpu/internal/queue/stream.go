package queue

import (
	"fmt"
	"slices"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/gpu/internal/resource"
	"github.com/seed90331342/attn/shaders"
)

// stream keeps windows of host memory on the device: uploaded when a step needs them, kept while there is room, and
// copied back after a step wrote them. Keys and values go up chunk by chunk while queries, outputs and state stay.
type stream struct {
	room     uint64
	largest  uint64 // buffer of the device
	resident []*resident
	// Bytes that were uploaded and downloaded, and the most on the device at a time.
	uploaded, downloaded, most uint64
}

// resident is a window of host memory on the device. A stream lists the window that was used last at the end.
type resident struct {
	of    *cut.Staged
	size  uint64      // of the buffer
	buf   port.Buffer // nil in a rehearsal
	dirty bool        // written since it was last copied back
	step  int         // the last one that used it
	push  int         // no submission after this one uses it, unless a queued step does
}

// find returns the resident window of a for a step, and whether it was there. A new one
// has no buffer. evict is called for the windows that make room.
func (s *stream) find(a *cut.Staged, step int, evict func(*resident) error) (_ *resident, found bool, err error) {
	writes := a.Of.Use != cut.Read
	for i, w := range s.resident {
		if w.of.Of == a.Of && w.of.Lo == a.Lo && w.of.Hi == a.Hi {
			s.resident = append(slices.Delete(s.resident, i, i+1), w)
			w.step, w.dirty = step, w.dirty || writes
			return w, true, nil
		}
	}
	w := &resident{of: a, size: resource.SizeClass(a.Size(), s.largest), step: step, dirty: writes}
	total := w.size
	for _, x := range s.resident {
		total += x.size
	}
	// The windows of the current step stay.
	for len(s.resident) > 0 && total > s.room/cut.RoomShares*cut.HeldShares && s.resident[0].step != step {
		old := s.resident[0]
		total -= old.size
		s.resident = slices.Delete(s.resident, 0, 1)
		if err := evict(old); err != nil {
			return w, false, err
		}
	}
	s.resident = append(s.resident, w)
	s.most = max(s.most, total)
	return w, false, nil
}

// note records, before a new step, the number of submissions that use the windows of the last step.
func (s *stream) note(submissions int) {
	for i := len(s.resident) - 1; i >= 0 && s.resident[i].step == s.resident[len(s.resident)-1].step; i-- {
		s.resident[i].push = submissions
	}
}

// stage gives a dispatch buffers for its staged windows, those of host memory and gathered ones.
// In a rehearsal it only follows what would be moved.
func (r *Runner) stage(x *dispatch) error {
	if slices.ContainsFunc(x.windows, func(w cut.Window) bool { _, ok := w.Buf.(*cut.Staged); return ok }) {
		r.staged++
		if r.stream != nil && !r.rehearsal {
			submissions := r.waited + len(r.pending)
			if len(r.batch.list) > 0 {
				submissions++
			}
			r.stream.note(submissions)
		}
	}
	for j, w := range x.windows {
		a, ok := w.Buf.(*cut.Staged)
		if !ok {
			continue
		}
		if err := r.fill(x, j, a); err != nil {
			return err
		}
	}
	if r.rehearsal {
		return nil
	}
	// WebGPU does not let a dispatch read and write one buffer, not even different parts
	// of it. The dispatch reads a copy of the part.
	kinds := x.pipeline.Kinds
	for j, w := range x.windows {
		if w.Buf == nil || kinds[j] != 'r' || !x.writes(w.Buf) {
			continue
		}
		buf := &r.held.gathers[j]
		if err := r.hold(buf, w.Size); err != nil {
			return err
		}
		x.windows[j] = cut.Window{Buf: *buf, Size: w.Size}
		x.before = append(x.before, cut.Copy{Src: w.Buf, SrcOffset: w.Offset, Dst: *buf, Size: w.Size})
	}
	return nil
}

// upload returns a buffer with a window of host memory. Buffers of queued steps stay. A
// rehearsal counts what would be moved, if it follows a stream.
func (r *Runner) upload(a *cut.Staged) (port.Buffer, error) {
	if r.stream == nil {
		if r.rehearsal {
			return nil, nil
		}
		// One call streams at a time, because each may take all the room.
		select {
		case r.d.streaming <- struct{}{}:
		case <-r.ctx.Done():
			return nil, r.ctx.Err()
		}
		r.stream = &stream{room: r.d.Memory().Room(), largest: r.d.Limits.MaxBufferSize}
	}
	w, found, err := r.stream.find(a, r.staged, r.evict)
	if err != nil || found {
		return w.buf, err
	}
	if a.Of.Use != cut.Written {
		r.stream.uploaded += a.Size()
	}
	if r.rehearsal {
		return nil, nil
	}
	if w.buf, err = r.d.Pool.Get(r.ctx, a.Size(), resource.StorageUsage); err != nil {
		r.stream.resident = slices.DeleteFunc(r.stream.resident, func(x *resident) bool { return x == w })
		return nil, Translate(fmt.Sprintf("%s: %d bytes to stream %s through (Options.MemoryBytes bounds them)", r.d.name, a.Size(), a.Of.Name), err)
	}
	if a.Of.Use == cut.Written {
		return w.buf, nil
	}
	defer Moved(r.ctx, int64(a.Size()), time.Now())
	t := a.Of.T
	if a.Of.Pages != nil {
		packed, err := backend.Make[byte](int(a.Size()))
		if err != nil {
			return nil, err
		}
		host := cut.StoreOf(t).Host
		for _, x := range a.Runs {
			copy(packed[x.To:], host[x.Lo:min(x.Hi, uint64(len(host)))])
		}
		return w.buf, r.d.wrap(r.d.Port.Write(w.buf, 0, packed))
	}
	return w.buf, cut.Pack(r.ctx, a.Strides, a.HostMemory(), t.Strides(), a.Shape(), t.DType().Size(), func(at uint64, data []byte) error {
		return r.d.wrap(r.d.Port.Write(w.buf, at, data))
	})
}

// evict waits until no queued or running step uses a window, copies it back if it was written,
// and releases its buffer. Later submissions continue.
func (r *Runner) evict(w *resident) (err error) {
	if r.waited+len(r.pending) < w.push {
		err = r.push()
	}
	for err == nil && r.waited < w.push && len(r.pending) > 0 {
		err = r.waitOldest(r.ctx)
	}
	if err == nil {
		err = r.download(w)
	}
	if w.buf != nil {
		r.d.Pool.Put(w.buf, resource.StorageUsage, err != nil)
	}
	return err
}

// download copies what steps wrote to w to the host, or counts it in a rehearsal. The steps must have ended.
func (r *Runner) download(w *resident) error {
	if !w.dirty {
		return nil
	}
	a := w.of
	w.dirty = false
	r.stream.downloaded += a.Size()
	if r.rehearsal {
		return nil
	}
	defer Moved(r.ctx, int64(a.Size()), time.Now())
	packed, err := backend.Make[byte](int(a.Size()))
	if err != nil {
		return err
	}
	if err := r.d.Read(r.ctx, single(w.buf), 0, packed); err != nil {
		return err
	}
	cut.Scatter(a.HostMemory(), a.Of.T.Strides(), packed, a.Strides, a.Shape(), a.Of.T.DType().Size())
	return nil
}

// writeBack downloads everything that steps up to one wrote to windows of host memory. The steps must have ended.
func (r *Runner) writeBack(step int) error {
	if r.stream == nil {
		return nil
	}
	for _, w := range r.stream.resident {
		if w.step > step {
			continue
		}
		if err := r.download(w); err != nil {
			return err
		}
	}
	return nil
}

// dropWindows releases the windows on the device. err is that of the call.
func (r *Runner) dropWindows(err error) {
	for _, w := range r.stream.resident {
		if w.buf != nil {
			r.d.Pool.Put(w.buf, resource.StorageUsage, err != nil)
		}
	}
	r.stream.resident = nil
}

// fill gives window j of a step a buffer that is filled before it, and copied back after a step that
// writes a gathered window.
func (r *Runner) fill(x *dispatch, j int, a *cut.Staged) (err error) {
	if a.Of.OnHost {
		x.windows[j].Buf, err = r.upload(a)
		return err
	}
	buf, whole := &r.held.gathers[j], []cut.Copy(nil)
	if !r.rehearsal {
		if err := r.hold(buf, a.Size()); err != nil {
			return err
		}
		x.windows[j].Buf = *buf
		whole = a.Copies(a.Runs, *buf, false)
		if a.Of.Use != cut.Read {
			x.after = append(x.after, a.Copies(a.Runs, *buf, true)...)
		}
	}
	for _, run := range a.Shifts() {
		s := shift(run, a)
		if !r.rehearsal {
			if err := r.hold(&r.held.words, a.Size()); err != nil {
				return err
			}
			s.Windows[0].Buf, s.Windows[1].Buf = r.held.words, *buf
			whole = append(whole, a.Copies([]cut.Run{run.Words()}, r.held.words, false)...)
		}
		if err := r.queueStep(s, whole...); err != nil {
			return err
		}
		whole = nil
	}
	x.before = append(x.before, whole...)
	return nil
}

// shift returns the step that moves the elements of a run to the window of a, without buffers. convert.wgsl
// takes 256 units, elements or pairs, of about 40 operations each a workgroup.
func shift(r cut.Run, a *cut.Staged) Step {
	units, to, pairs := int(r.Hi-r.Lo)/2, int(r.To/2), 0
	if (units|to)%2 == 0 {
		units, pairs = units/2, 1
	}
	return Step{
		Kernel: shaders.Convert{}, Windows: []cut.Window{{Size: a.Size()}, {Size: a.Size()}}, Groups: (units + 255) / 256, OpsPerGroup: 256 * 40,
		Params: &shaders.ConvertParams{
			Heads: 1, Rows: 1, Units: units, All: units, Pairs: pairs, InType: int(shaders.F16), OutType: int(shaders.F16),
			Src: shaders.Strides{Base: int(r.Lo % 4 / 2), D: 1}, O: shaders.Strides{Base: to, D: 1},
		},
	}
}

// shifts returns the shifts of the windows of s.
func (s *Step) shifts() (list []Step) {
	for _, w := range s.Windows {
		if a, ok := w.Buf.(*cut.Staged); ok && !a.Of.OnHost {
			for _, run := range a.Shifts() {
				list = append(list, shift(run, a))
			}
		}
	}
	return list
}
