package gpu

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
)

// unknownMemory stands for the machine's memory where the system does not say:
// half of what Go's allocator can address on 64 bit machines (2^48), or on 32
// bit ones.
const unknownMemory = 1 << (31 + 16*(^uint(0)>>63))

var _ backend.MemoryMeter = (*Backend)(nil)

// PeakMemory implements backend.MemoryMeter. What the pool keeps for later calls is not
// counted, nor what the driver takes for itself.
func (b *Backend) PeakMemory() int64 { return b.pool.takePeak() }

// Alloc returns a contiguous tensor with unspecified contents: in one buffer of
// the device, in several where it is larger than the adapter's largest, and in
// host memory where the device has no room or Options.MemoryBytes leave none;
// calls stream from and to that. backend.ErrMemory when the host has no room
// either; backend.ErrShape for a negative or overlarge shape.
func (b *Backend) Alloc(ctx context.Context, dtype backend.DType, shape backend.Shape) (backend.Tensor, error) {
	if err := b.enter(ctx); err != nil {
		return backend.Tensor{}, err
	}
	defer b.leave()
	t, err := b.alloc(dtype, shape)
	if !errors.Is(err, errBeyond) {
		return t, err
	}
	if bytes := uint64(dtype.Bytes(shape)); bytes > hostMemory() {
		return t, fmt.Errorf("alloc: %v of %v takes %d bytes, %s (%s) has no room and the host has %d: %w",
			shape, dtype, bytes, b.info.Name, b.info.Device, hostMemory(), backend.ErrMemory)
	}
	host, err := backend.AllocHost(dtype, shape)
	if err != nil {
		return t, fmt.Errorf("alloc: %w", err)
	}
	data, err := cut.HostBytes(host)
	if err != nil {
		return t, fmt.Errorf("alloc: %w", err)
	}
	strides, _ := dtype.Contiguous(shape)
	return b.aside(data, dtype, shape, strides)
}

// Upload copies a host tensor to the device, contiguous but for axes of stride
// zero, which stay so. Where the device has no room, or Options.MemoryBytes leave
// none, it copies nothing: the result is an alias of the host tensor, from which
// calls stream. backend.ErrDevice when the argument is not in host memory.
func (b *Backend) Upload(ctx context.Context, host backend.Tensor) (backend.Tensor, error) {
	if err := b.enter(ctx); err != nil {
		return backend.Tensor{}, err
	}
	defer b.leave()
	var pins backend.Pinned
	if err := pins.Pin(nil, "the host", nil, []backend.Operand{{Name: "host", Tensor: host}}); err != nil {
		return backend.Tensor{}, fmt.Errorf("upload: %w", err)
	}
	defer pins.Unpin()
	shape, strides := host.Shape(), host.Strides()
	stored := cut.Distinct(shape, strides)
	t, err := b.alloc(host.DType(), stored)
	if errors.Is(err, errBeyond) {
		src, err := cut.HostBytes(host)
		if err != nil {
			return t, fmt.Errorf("upload: %w", err)
		}
		if t, err = b.aside(src, host.DType(), shape, strides); err != nil {
			return t, fmt.Errorf("upload: %w", err)
		}
		return t, nil
	}
	if err != nil {
		return backend.Tensor{}, fmt.Errorf("upload: %w", err)
	}
	began := time.Now()
	if err := b.upload(ctx, t, host); err != nil {
		t.Release()
		return backend.Tensor{}, fmt.Errorf("upload: %w", err)
	}
	moved(ctx, t.Bytes(), began)
	to := t.Strides()
	for i := range stored {
		if stored[i] != shape[i] {
			to[i] = 0
		}
	}
	v, err := t.View(shape, to, 0)
	if err != nil {
		t.Release()
	}
	return v, err
}

// upload copies host's elements, what repeats once, to a contiguous tensor of this
// backend's that has room for them.
func (b *Backend) upload(ctx context.Context, t, host backend.Tensor) error {
	src, err := cut.HostBytes(host)
	if err != nil {
		return err
	}
	from, err := cut.Words(host)
	if err != nil {
		return err
	}
	shape := cut.Distinct(from.Shape(), from.Strides())
	return cut.Pack(ctx, shape.Contiguous(), src, from.Strides(), shape, from.DType().Size(), func(at uint64, data []byte) error {
		return b.write(cut.StoreOf(t), at, data)
	})
}

// moved tells the context's trace of a transfer that began at a time.
func moved(ctx context.Context, bytes int64, began time.Time) {
	if f := backend.TraceOf(ctx).Move; f != nil {
		f(bytes, time.Since(began))
	}
}

// Download copies src to host: same shape (backend.ErrShape), same dtype
// (backend.ErrDType), any strides on both sides.
func (b *Backend) Download(ctx context.Context, host, src backend.Tensor) error {
	if err := b.enter(ctx); err != nil {
		return err
	}
	defer b.leave()
	if host.Shape() != src.Shape() {
		return fmt.Errorf("download: host has shape %v, src %v: %w", host.Shape(), src.Shape(), backend.ErrShape)
	}
	if host.DType() != src.DType() {
		return fmt.Errorf("download: host is %v, src %v: %w", host.DType(), src.DType(), backend.ErrDType)
	}
	var pins, hostPins backend.Pinned
	if err := pins.Pin(b, b.info.Name, nil, []backend.Operand{{Name: "src", Tensor: src}}); err != nil {
		return fmt.Errorf("download: %w", err)
	}
	defer pins.Unpin()
	if err := hostPins.Pin(nil, "the host", []backend.Operand{{Name: "host", Tensor: host}}, nil); err != nil {
		return fmt.Errorf("download: %w", err)
	}
	defer hostPins.Unpin()
	dst, err := cut.HostBytes(host)
	if err != nil {
		return fmt.Errorf("download: %w", err)
	}
	if src.Shape().Elements() == 0 {
		return nil
	}
	to, err := cut.Words(host)
	if err == nil {
		src, err = cut.Words(src)
	}
	if err == nil {
		err = b.download(ctx, dst, to.Strides(), src)
	}
	if err != nil {
		return fmt.Errorf("download: %w", err)
	}
	return nil
}

// download copies a tensor's elements to dst, by strides.
func (b *Backend) download(ctx context.Context, dst []byte, strides backend.Strides, src backend.Tensor) error {
	size := src.DType().Size()
	s := cut.StoreOf(src)
	first := src.Offset() * size
	if s.Host != nil {
		cut.Scatter(dst, strides, s.Host[first:], src.Strides(), src.Shape(), size)
		return nil
	}
	began := time.Now()
	defer func() { moved(ctx, src.Bytes(), began) }()
	lo := first &^ 3
	hi := (first + cut.Extent(src.Shape(), src.Strides())*size + 3) &^ 3
	if first == lo && cut.SameOrder(src.Shape(), strides, src.Strides()) && (hi-lo) == src.Shape().Elements()*size {
		return b.read(ctx, s, uint64(lo), dst[:hi-lo])
	}
	span := make([]byte, hi-lo)
	if err := b.read(ctx, s, uint64(lo), span); err != nil {
		return err
	}
	cut.Scatter(dst, strides, span[first-lo:], src.Strides(), src.Shape(), size)
	return nil
}
