package gpu

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
)

// keeper holds on the host what a streamed call has finished, so that another one
// can go on from it. It looks after each turn of the room, when as many bytes have
// gone up as the room holds: what it takes down of the state is at most a share of that.
type keeper struct {
	r      *runner
	c      *backend.Call
	cut    *cut.Cutter
	kernel string
	now    backend.Partial
	ended  []backend.Rows // finished, but not yet all on the host
	loaded uint64         // bytes that had gone up at the last look
	step   int            // the last one of the last box that ended
}

// keep makes a call go on from c.Resume, if that is set, and keep what it finishes
// if it streams. kernel is the one that makes its state.
func (r *runner) keep(c *backend.Call, cutter *cut.Cutter, kernel variant) error {
	if cutter.Room == 0 && c.Resume == nil || r.several {
		return nil
	}
	k := &keeper{r: r, c: c, cut: cutter, kernel: kernel.key()}
	k.now.Call = signature(c)
	if p := c.Resume; p != nil {
		if p.Call != k.now.Call {
			return fmt.Errorf("resume is of another call, %s, this one is %s: %w", p.Call, k.now.Call, backend.ErrOption)
		}
		k.now = backend.Partial{Call: p.Call, Done: slices.Clone(p.Done), Work: p.Work}
	}
	cutter.Follow(k)
	if r.rehearse {
		return nil
	}
	for _, t := range []struct {
		name     string
		to, from backend.Tensor
		now      *backend.Tensor
	}{{"o", c.O, resumed(c).O, &k.now.O}, {"lse", c.LSE, resumed(c).LSE, &k.now.LSE}} {
		if t.to.IsZero() {
			continue
		}
		var err error
		if *t.now, err = k.outputs(t.to, t.from); err != nil {
			return fmt.Errorf("resume: %s: %w", t.name, err)
		}
	}
	if cutter.Room > 0 {
		r.keeper = k
	}
	return nil
}

// resumed is c.Resume, or one without anything.
func resumed(c *backend.Call) *backend.Partial {
	if c.Resume == nil {
		return new(backend.Partial)
	}
	return c.Resume
}

// signature says in words what a call computes, but for its operands' contents.
func signature(c *backend.Call) string {
	s := fmt.Sprintf("%+v of %v to %v, lse %t, mask %t, bias %t, scale %v, softcap %v, visible %+v", c.Dims(), storage(c), c.O.DType(),
		!c.LSE.IsZero(), !c.Mask.IsZero(), !c.Bias.IsZero(), c.Scale, c.Softcap, c.Visible)
	for _, o := range []struct {
		is   bool
		text string
	}{
		{c.Pages != nil, fmt.Sprintf("pages of %d", c.K.Shape()[backend.Seq])},
		{c.Slopes != nil, fmt.Sprintf("slopes %v", c.Slopes)},
		{!c.Relative.IsZero(), "relative"},
		{!c.Blocks.IsZero(), fmt.Sprintf("blocks of %d by %d", c.BlockQ, c.BlockK)},
		{c.Sinks != nil, fmt.Sprintf("sinks %v", c.Sinks)},
		{c.Dropout.P > 0, fmt.Sprintf("dropout %+v", c.Dropout)},
	} {
		if o.is {
			s += ", " + o.text
		}
	}
	return s
}

// outputs gives an output the rows that are done, which lie in from, and returns
// the host tensor that is to have them: the output itself where it is one.
func (k *keeper) outputs(to, from backend.Tensor) (backend.Tensor, error) {
	s := cut.StoreOf(to)
	if len(k.now.Done) > 0 && (from.Shape() != to.Shape() || from.DType() != to.DType()) {
		return from, fmt.Errorf("it has shape %v of %v, the call's has %v of %v: %w", from.Shape(), from.DType(), to.Shape(), to.DType(), backend.ErrShape)
	}
	if s.Host != nil {
		for _, rows := range k.now.Done {
			if err := copyRows(s.Host[to.Offset()*to.DType().Size():], to, from, rows); err != nil {
				return from, err
			}
		}
		return cut.HostTensor(to)
	}
	if len(k.now.Done) == 0 {
		return backend.AllocHost(to.DType(), to.Shape())
	}
	// The rows may lie between others: read what there is, and write all of it back.
	size := to.DType().Size()
	first := to.Offset() * size
	lo, hi := first&^3, (first+cut.Extent(to.Shape(), to.Strides())*size+3)&^3
	span := make([]byte, hi-lo)
	if err := k.r.b.read(k.r.ctx, s, uint64(lo), span); err != nil {
		return from, err
	}
	for _, rows := range k.now.Done {
		if err := copyRows(span[first-lo:], to, from, rows); err != nil {
			return from, err
		}
	}
	return from, k.r.b.write(s, uint64(lo), span)
}

// copyRows copies rows of a host tensor to where to has them, in memory that
// begins with to's first element.
func copyRows(dst []byte, to, from backend.Tensor, rows backend.Rows) error {
	part, err := slice(from, rows)
	if err != nil {
		return err
	}
	src, err := cut.HostBytes(part)
	if err != nil {
		return err
	}
	at := 0
	for i, lo := range rows.Lo {
		at += lo * to.Strides()[i]
	}
	cut.Scatter(dst[at*to.DType().Size():], to.Strides(), src, part.Strides(), part.Shape(), to.DType().Size())
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

// Done reports whether all rows of a box are.
func (k *keeper) Done(x cut.Box) bool {
	return slices.ContainsFunc(k.now.Done, func(r backend.Rows) bool { return r.Has(x.Rows()) })
}

// Start returns the key at which the pieces of a box go on, with the state that
// they left in place.
func (k *keeper) Start(x cut.Box) (int, error) {
	w := k.now.Work
	if w == nil || w.Rows != x.Rows() || w.Kernel != k.kernel || w.Keys <= x.Lo[cut.Col] || w.Keys >= x.Hi[cut.Col] || w.Keys%k.cut.Granule != 0 {
		return x.Lo[cut.Col], nil
	}
	if k.r.rehearse {
		return w.Keys, nil
	}
	if err := k.r.flush(); err != nil { // of boxes that the state belongs to still
		return 0, err
	}
	buf, err := k.r.stateFor(uint64(len(w.State)))
	if err != nil {
		return 0, err
	}
	return w.Keys, k.r.b.write(&cut.Store{Parts: []cut.Buffer{buf}, Part: buf.Size()}, 0, w.State)
}

// Queued is told that a piece of a box was queued, or with end the last one.
func (k *keeper) Queued(x cut.Box, end bool) error {
	r := k.r
	if end {
		k.ended, k.step = append(k.ended, x.Rows()), r.brought
	}
	if r.shelf == nil || r.shelf.loaded < k.loaded+r.shelf.room {
		return nil
	}
	k.loaded = r.shelf.loaded
	if err := r.flush(); err != nil {
		return err
	}
	if err := r.takeAllBack(k.step); err != nil {
		return err
	}
	for _, rows := range k.ended {
		if err := k.takeDown(rows); err != nil {
			return err
		}
	}
	k.now.Done, k.ended = append(k.now.Done, k.ended...), nil
	if k.now.Work = nil; end {
		return nil
	}
	w := &backend.Work{Rows: x.Rows(), Keys: x.Hi[cut.Col], Kernel: k.kernel}
	r.shelf.taken += r.stateSize
	if !r.rehearse {
		began := time.Now()
		w.State = make([]byte, r.stateSize)
		if err := r.b.read(r.ctx, &cut.Store{Parts: []cut.Buffer{r.state}, Part: r.state.Size()}, 0, w.State); err != nil {
			return err
		}
		moved(r.ctx, int64(r.stateSize), began)
	}
	k.now.Work = w
	return nil
}

// takeDown copies rows of the outputs that are on the device to the host, or counts
// them in a rehearsal.
func (k *keeper) takeDown(rows backend.Rows) error {
	for _, t := range []struct{ from, to backend.Tensor }{{k.c.O, k.now.O}, {k.c.LSE, k.now.LSE}} {
		if t.from.IsZero() || k.cut.OnHost(t.from) {
			continue
		}
		src, err := slice(t.from, rows)
		if err != nil {
			return err
		}
		k.r.shelf.taken += uint64(src.Bytes())
		if k.r.rehearse {
			continue
		}
		to, err := slice(t.to, rows)
		if err != nil {
			return err
		}
		dst, err := cut.HostBytes(to)
		if err != nil {
			return err
		}
		if err := k.r.b.download(k.r.ctx, dst, to.Strides(), src); err != nil {
			return err
		}
	}
	return nil
}

// interrupted wraps the error of a call that another can go on from.
func (r *runner) interrupted(err error) error {
	if r.keeper == nil {
		return err
	}
	for _, why := range []error{backend.ErrDeviceLost, context.Canceled, context.DeadlineExceeded} {
		if errors.Is(err, why) {
			return &backend.Interrupted{Partial: &r.keeper.now, Err: err}
		}
	}
	return err
}
