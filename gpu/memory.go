package gpu

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/seed90331342/attn/backend"
)

// transferBytes is how much goes up or comes down at a time: large enough to
// make the cost of a submission small, small enough for the memory in between.
const transferBytes = 16 << 20

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
	data, err := hostBytes(host)
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
	stored := once(shape, strides)
	t, err := b.alloc(host.DType(), stored)
	if errors.Is(err, errBeyond) {
		src, err := hostBytes(host)
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
	src, err := hostBytes(host)
	if err != nil {
		return err
	}
	from, err := words(host)
	if err != nil {
		return err
	}
	shape := once(from.Shape(), from.Strides())
	return put(ctx, shape.Contiguous(), src, from.Strides(), shape, from.DType().Size(), func(at uint64, data []byte) error {
		return b.write(storeOf(t), at, data)
	})
}

// moved tells the context's trace of a transfer that began at a time.
func moved(ctx context.Context, bytes int64, began time.Time) {
	if f := backend.TraceOf(ctx).Move; f != nil {
		f(bytes, time.Since(began))
	}
}

// once returns shape with every axis of stride zero cut to one element.
func once(shape backend.Shape, strides backend.Strides) backend.Shape {
	for i := range shape {
		if strides[i] == 0 && shape[i] > 1 {
			shape[i] = 1
		}
	}
	return shape
}

// put hands the elements of shape that lie in src by strides ss to write, so that
// they lie by ds in what it fills: row by row in some order of the axes. Gaps, if
// ds has any, get unspecified bytes. Offsets and lengths are multiples of 4, so
// that up to 3 bytes follow the last element; no piece is longer than transferBytes
// unless a row is.
func put(ctx context.Context, ds backend.Strides, src []byte, ss backend.Strides, shape backend.Shape, size int, write func(at uint64, data []byte) error) error {
	total := spanOf(shape, ds) * size
	if sameOrder(shape, ds, ss) {
		whole := total &^ 3
		for at := 0; at < whole; at += transferBytes {
			if err := ctx.Err(); err != nil {
				return err
			}
			if err := write(uint64(at), src[at:min(at+transferBytes, whole)]); err != nil {
				return err
			}
		}
		if whole == total {
			return nil
		}
		var last [4]byte
		copy(last[:], src[whole:total])
		return write(uint64(whole), last[:])
	}
	// In slices along the outermost axis, so that the copy on the host is small.
	outer := outermost(shape, ds)
	step := ds[outer] * size
	rows := shape[outer]
	if n := transferBytes / max(step, 1); n < rows && step%4 == 0 {
		rows = max(n, 1)
	}
	var packed []byte
	for lo := 0; lo < shape[outer]; lo += rows {
		if err := ctx.Err(); err != nil {
			return err
		}
		part := shape
		part[outer] = min(rows, shape[outer]-lo)
		n := (spanOf(part, ds)*size + 3) &^ 3
		if cap(packed) < n {
			packed = make([]byte, n)
		}
		scatter(packed[:n], ds, src[lo*ss[outer]*size:], ss, part, size)
		if err := write(uint64(lo*step), packed[:n]); err != nil {
			return err
		}
	}
	return nil
}

// spanOf is how many elements lie from the first to the last, both included.
func spanOf(shape backend.Shape, strides backend.Strides) int {
	n := 1
	for i, l := range shape {
		if l == 0 {
			return 0
		}
		n += (l - 1) * strides[i]
	}
	return n
}

// outermost is the axis with the largest stride of those that are longer than 1.
func outermost(shape backend.Shape, strides backend.Strides) int {
	best := 0
	for i := range shape {
		if shape[i] > 1 && (shape[best] == 1 || strides[i] > strides[best]) {
			best = i
		}
	}
	return best
}

// sameOrder reports whether elements lie by both strides in the same places and
// without gaps, so that they can be copied as one.
func sameOrder(shape backend.Shape, a, b backend.Strides) bool {
	for i, l := range shape {
		if l > 1 && a[i] != b[i] {
			return false
		}
	}
	return spanOf(shape, a) == shape.Elements()
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
	dst, err := hostBytes(host)
	if err != nil {
		return fmt.Errorf("download: %w", err)
	}
	if src.Shape().Elements() == 0 {
		return nil
	}
	to, err := words(host)
	if err == nil {
		src, err = words(src)
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
	s := storeOf(src)
	first := src.Offset() * size
	if s.host != nil {
		scatter(dst, strides, s.host[first:], src.Strides(), src.Shape(), size)
		return nil
	}
	began := time.Now()
	defer func() { moved(ctx, src.Bytes(), began) }()
	lo := first &^ 3
	hi := (first + spanOf(src.Shape(), src.Strides())*size + 3) &^ 3
	if first == lo && sameOrder(src.Shape(), strides, src.Strides()) && (hi-lo) == src.Shape().Elements()*size {
		return b.read(ctx, s, uint64(lo), dst[:hi-lo])
	}
	span := make([]byte, hi-lo)
	if err := b.read(ctx, s, uint64(lo), span); err != nil {
		return err
	}
	scatter(dst, strides, span[first-lo:], src.Strides(), src.Shape(), size)
	return nil
}

// scatter copies every element from src to dst, each by its strides in elements.
func scatter(dst []byte, ds backend.Strides, src []byte, ss backend.Strides, shape backend.Shape, size int) {
	if shape.Elements() == 0 {
		return
	}
	// The outermost axis of src first, so that runs are as long as they can be.
	order := []int{0, 1, 2, 3}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(ss[b], ss[a]) })
	var n backend.Shape
	var d, s backend.Strides
	for to, from := range order {
		n[to], d[to], s[to] = shape[from], ds[from]*size, ss[from]*size
	}
	// Merge what lies without gaps on both sides into one run of bytes.
	run := size
	for i := 3; i >= 0 && (n[i] == 1 || d[i] == run && s[i] == run); i-- {
		run *= n[i]
		n[i], d[i], s[i] = 1, 0, 0
	}
	for w := range n[0] {
		for x := range n[1] {
			for y := range n[2] {
				to, from := w*d[0]+x*d[1]+y*d[2], w*s[0]+x*s[1]+y*s[2]
				for range n[3] {
					copy(dst[to:to+run], src[from:])
					to += d[3]
					from += s[3]
				}
			}
		}
	}
}
