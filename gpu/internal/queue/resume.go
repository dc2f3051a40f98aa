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
	"github.com/seed90331342/attn/shaders"
)

// checkpoint keeps on the host what a streamed call has finished, so that another call can
// continue from it. It does so each time the call has uploaded as many bytes as the room for
// streaming holds: the state that it downloads is a small share of the uploads.
type checkpoint struct {
	r      *Runner
	call   *backend.Call
	cutter *cut.Cutter
	kernel string
	now    backend.Partial
	// ended are rows that are finished but not on the host yet, step the step that finished the last of them.
	ended    []backend.Rows
	step     int
	uploaded uint64 // at the last time
}

// keep returns the checkpoint from which op, which has a Call, continues: that of its Resume, if there is one. If op
// streams, the runner keeps the boxes that it finishes.
func (r *Runner) keep(op *Op) (k *checkpoint, err error) {
	c := op.Call
	old := cmp.Or(c.Resume, new(backend.Partial))
	k = &checkpoint{r: r, call: c, cutter: op.Cutter, kernel: shaders.Key(op.Kernel)}
	k.now = backend.Partial{Call: c.Signature(), Done: slices.Clone(old.Done), Work: old.Work}
	if r.rehearsal {
		return k, nil
	}
	for _, t := range []struct {
		name     string
		to, from backend.Tensor
		now      *backend.Tensor
	}{{"o", c.O, old.O, &k.now.O}, {"lse", c.LSE, old.LSE, &k.now.LSE}} {
		if t.to.IsZero() {
			continue
		}
		if *t.now, err = k.restore(t.to, t.from); err != nil {
			return nil, fmt.Errorf("resume: %s: %w", t.name, err)
		}
	}
	if op.Cutter.Room > 0 {
		r.checkpoint = k
	}
	return k, nil
}

// restore copies the rows of from that are done to an output. It returns the host tensor in which the checkpoint holds
// the output, which is the output itself if that is in host memory.
func (k *checkpoint) restore(to, from backend.Tensor) (backend.Tensor, error) {
	s, size := cut.StoreOf(to), to.DType().Size()
	if len(k.now.Done) > 0 && (from.Shape() != to.Shape() || from.DType() != to.DType()) {
		return from, fmt.Errorf("it has shape %v of %v, the call's has %v of %v: %w", from.Shape(), from.DType(), to.Shape(), to.DType(), backend.ErrShape)
	}
	if s.Host != nil {
		if err := k.copyDone(s.Host[to.Offset()*size:], to, from); err != nil {
			return from, err
		}
		return cut.HostTensor(to)
	}
	if len(k.now.Done) == 0 {
		return backend.AllocHost(to.DType(), to.Shape())
	}
	// The rows may be interleaved with others, so the whole span is read and written.
	lo, hi := words(to)
	span, err := backend.Make[byte](hi - lo)
	if err != nil {
		return from, err
	}
	if err := k.r.d.Read(k.r.ctx, s, uint64(lo), span); err != nil {
		return from, err
	}
	if err := k.copyDone(span[to.Offset()*size-lo:], to, from); err != nil {
		return from, err
	}
	return from, k.r.d.Write(k.r.ctx, s, uint64(lo), span)
}

// copyDone copies the rows of a host tensor that are done to memory that begins with the
// first element of to and has its strides.
func (k *checkpoint) copyDone(dst []byte, to, from backend.Tensor) error {
	for _, rows := range k.now.Done {
		part, src, err := hostRows(from, rows)
		if err != nil {
			return err
		}
		at := 0
		for i, lo := range rows.Lo {
			at += lo * to.Strides()[i]
		}
		size := to.DType().Size()
		cut.Scatter(dst[at*size:], to.Strides(), src, part.Strides(), part.Shape(), size)
	}
	return nil
}

// slice returns the view of some rows of t.
func slice(t backend.Tensor, rows backend.Rows) (backend.Tensor, error) {
	for axis := range rows.Lo {
		var err error
		if t, err = t.Slice(axis, rows.Lo[axis], rows.Hi[axis]); err != nil {
			return t, err
		}
	}
	return t, nil
}

// hostRows returns the view of some rows of a host tensor and its memory.
func hostRows(t backend.Tensor, rows backend.Rows) (part backend.Tensor, data []byte, err error) {
	if part, err = slice(t, rows); err == nil {
		data, err = backend.HostBytes(part)
	}
	return part, data, err
}

// done reports whether a box is finished already.
func (k *checkpoint) done(x cut.Box) bool {
	rows := x.Rows()
	return slices.ContainsFunc(k.now.Done, func(r backend.Rows) bool {
		for axis := range r.Lo {
			if rows.Lo[axis] < r.Lo[axis] || rows.Hi[axis] > r.Hi[axis] {
				return false
			}
		}
		return true
	})
}

// start returns the index along the inner axis at which the chunks of a box begin, and uploads the state with which they
// continue.
func (k *checkpoint) start(x cut.Box) (int, error) {
	w, held := k.now.Work, &k.r.held
	if w == nil || w.Rows != x.Rows() || w.Kernel != k.kernel || uint64(len(w.State)) != held.size ||
		w.Keys <= x.Lo[cut.Col] || w.Keys >= x.Hi[cut.Col] || w.Keys%k.cutter.Granule != 0 {
		return x.Lo[cut.Col], nil
	}
	if k.r.rehearsal {
		return w.Keys, nil
	}
	if err := k.r.Flush(); err != nil { // of boxes that still use the state
		return 0, err
	}
	return w.Keys, k.r.d.Write(k.r.ctx, single(held.state), 0, w.State)
}

// queued follows the progress of a call: after each chunk of a box but the last, and with end after each box.
func (k *checkpoint) queued(x cut.Box, end bool) error {
	r, s := k.r, k.r.stream
	if end {
		k.ended, k.step = append(k.ended, x.Rows()), r.staged
	}
	if s == nil || s.uploaded < k.uploaded+s.room {
		return nil
	}
	k.uploaded = s.uploaded
	if err := r.Flush(); err != nil {
		return err
	}
	if err := r.writeBack(k.step); err != nil {
		return err
	}
	for _, rows := range k.ended {
		if err := k.download(rows); err != nil {
			return err
		}
	}
	k.now.Done, k.ended = append(k.now.Done, k.ended...), nil
	if k.now.Work = nil; end {
		return nil
	}
	w := &backend.Work{Rows: x.Rows(), Keys: x.Hi[cut.Col], Kernel: k.kernel}
	s.downloaded += r.held.size
	if !r.rehearsal {
		defer Moved(r.ctx, int64(r.held.size), time.Now())
		var err error
		if w.State, err = backend.Make[byte](int(r.held.size)); err != nil {
			return err
		}
		if err := r.d.Read(r.ctx, single(r.held.state), 0, w.State); err != nil {
			return err
		}
	}
	k.now.Work = w
	return nil
}

// download copies rows of the outputs in device memory to the host, or counts them in a rehearsal.
func (k *checkpoint) download(rows backend.Rows) error {
	for _, t := range []struct{ from, to backend.Tensor }{{k.call.O, k.now.O}, {k.call.LSE, k.now.LSE}} {
		if t.from.IsZero() || k.cutter.OnHost(t.from) {
			continue
		}
		src, err := slice(t.from, rows)
		if err != nil {
			return err
		}
		k.r.stream.downloaded += uint64(src.Bytes())
		if k.r.rehearsal {
			continue
		}
		to, dst, err := hostRows(t.to, rows)
		if err != nil {
			return err
		}
		if err := k.r.d.Download(k.r.ctx, dst, to.Strides(), src); err != nil {
			return err
		}
	}
	return nil
}

// interrupted wraps the error of a call from which another can continue.
func (k *checkpoint) interrupted(err error) error {
	for _, why := range []error{backend.ErrDeviceLost, context.Canceled, context.DeadlineExceeded} {
		if errors.Is(err, why) {
			return &backend.Interrupted{Partial: &k.now, Err: err}
		}
	}
	return err
}
