package queue

import (
	"cmp"
	"context"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/gpu/internal/resource"
)

// Write copies data to the bytes of a store from at on; both are multiples of 4. Each time cut.TransferBytes are
// written it waits for the copies, so that the library frees its own buffers.
func (d *Device) Write(ctx context.Context, s *cut.Store, at uint64, data []byte) error {
	n := len(data)
	for w := range s.Spans(at, at+uint64(n)) {
		if err := d.wrap(d.Port.Write(w.Buf, w.Offset, data[:w.Size])); err != nil {
			return err
		}
		data = data[w.Size:]
	}
	if d.written.Add(int64(n)) >= cut.TransferBytes {
		return d.Submit(ctx, nil)
	}
	_, err := d.submit(ctx, nil) // starts the copies: a library may not order those of one submission
	return err
}

// Read copies the bytes of a store from at on to dst; at and len(dst) are multiples of 4. It
// waits for the calls that write to the store, and returns their error.
func (d *Device) Read(ctx context.Context, s *cut.Store, at uint64, dst []byte) (err error) {
	if len(dst) == 0 {
		return nil
	}
	most := min(cut.TransferBytes, uint64(len(dst)), d.cutLimits().Part())
	staging, err := d.Pool.Get(ctx, most, resource.StagingUsage)
	if err != nil {
		return d.wrap(err)
	}
	defer func() {
		if err != nil { // it may be in use, or still mapped
			d.Pool.Drop(staging)
		} else {
			d.Pool.Put(staging, resource.StagingUsage, false)
		}
	}()
	for w := range s.Spans(at, at+uint64(len(dst))) {
		for w.Size > 0 {
			if err := ctx.Err(); err != nil {
				return err
			}
			some := min(w.Size, most)
			err := d.Submit(ctx, []port.Command{{Src: w.Buf, SrcOffset: w.Offset, Dst: staging, Size: some}})
			if err = cmp.Or(d.sent.errorOf(s), err); err != nil {
				return err
			}
			if err := d.Port.Read(staging, 0, dst[:some]); err != nil {
				return d.wrap(err)
			}
			w.Offset, w.Size, dst = w.Offset+some, w.Size-some, dst[some:]
		}
	}
	return nil
}

// Upload copies the distinct elements of host to a contiguous tensor of the device.
func (d *Device) Upload(ctx context.Context, t, host backend.Tensor) error {
	src, err := backend.HostBytes(host)
	if err != nil {
		return err
	}
	from, err := cut.Words(host)
	if err != nil {
		return err
	}
	shape := cut.Distinct(from.Shape(), from.Strides())
	return cut.Pack(ctx, shape.Contiguous(), src, from.Strides(), shape, from.DType().Size(), func(at uint64, data []byte) error {
		return d.Write(ctx, cut.StoreOf(t), at, data)
	})
}

// Download copies a tensor's elements to dst, by strides.
func (d *Device) Download(ctx context.Context, dst []byte, strides backend.Strides, src backend.Tensor) error {
	size := src.DType().Size()
	s := cut.StoreOf(src)
	first := src.Offset() * size
	if s.Host != nil {
		cut.Scatter(dst, strides, s.Host[first:], src.Strides(), src.Shape(), size)
		return nil
	}
	defer Moved(ctx, src.Bytes(), time.Now())
	lo, hi := words(src)
	if first == lo && cut.SameOrder(src.Shape(), strides, src.Strides()) && (hi-lo) == src.Shape().Elements()*size {
		return d.Read(ctx, s, uint64(lo), dst[:hi-lo])
	}
	span, err := backend.Make[byte](hi - lo)
	if err != nil {
		return err
	}
	if err := d.Read(ctx, s, uint64(lo), span); err != nil {
		return err
	}
	cut.Scatter(dst, strides, span[first-lo:], src.Strides(), src.Shape(), size)
	return nil
}

// words returns the span of bytes, of whole words, that contains the elements of t.
func words(t backend.Tensor) (lo, hi int) {
	size := t.DType().Size()
	first := t.Offset() * size
	return first &^ 3, (first + cut.Extent(t.Shape(), t.Strides())*size + 3) &^ 3
}

// Moved reports a transfer to the context's trace.
func Moved(ctx context.Context, bytes int64, began time.Time) {
	if f := backend.TraceOf(ctx).Move; f != nil {
		f(bytes, time.Since(began))
	}
}

// Submit runs commands and waits for them and all that was submitted before.
func (d *Device) Submit(ctx context.Context, commands []port.Command) error {
	written := d.written.Load()
	t, err := d.submit(ctx, commands)
	if err != nil {
		return err
	}
	if err := d.await(ctx, t); err != nil {
		return err
	}
	d.written.CompareAndSwap(written, 0)
	return nil
}

// submit starts commands. Where Submit would block it waits for the running submissions first if
// ctx has a deadline, because ctx can end that.
func (d *Device) submit(ctx context.Context, commands []port.Command) (port.Ticket, error) {
	if _, ok := ctx.Deadline(); ok && d.pacing.blocks {
		if err := d.Idle(ctx); err != nil {
			return 0, err
		}
	}
	t, err := d.Port.Submit(commands, false)
	return t, d.wrap(err)
}

// single returns a store of one buffer.
func single(b port.Buffer) *cut.Store {
	return &cut.Store{Parts: []cut.Buffer{b}, Part: b.Size()}
}
