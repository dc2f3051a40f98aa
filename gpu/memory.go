package gpu

import (
	"context"
	"fmt"
	"unsafe"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/port"
)

// transferBytes is how much goes up or comes down at a time: large enough to
// make the cost of a submission small, small enough for the memory in between.
const transferBytes = 16 << 20

// Alloc returns a contiguous tensor with unspecified contents.
// backend.ErrMemory when the device has no room or the tensor is larger than the
// adapter's largest buffer; backend.ErrShape for a negative or overlarge shape.
func (b *Backend) Alloc(ctx context.Context, dtype backend.DType, shape backend.Shape) (backend.Tensor, error) {
	if err := b.enter(ctx); err != nil {
		return backend.Tensor{}, err
	}
	defer b.leave()
	return b.alloc(dtype, shape)
}

func (b *Backend) alloc(dtype backend.DType, shape backend.Shape) (backend.Tensor, error) {
	n := shape.Elements()
	if n < 0 {
		return backend.Tensor{}, fmt.Errorf("alloc: shape %v is negative or too large: %w", shape, backend.ErrShape)
	}
	bytes := uint64(n) * uint64(dtype.Size())
	if bytes > b.limits.MaxBufferSize {
		return backend.Tensor{}, fmt.Errorf("alloc: %v of %v takes %d bytes, the largest buffer of %s (%s) has %d: %w",
			shape, dtype, bytes, b.info.Name, b.info.Device, b.limits.MaxBufferSize, backend.ErrMemory)
	}
	buf, err := b.pool.get(bytes, storageUsage)
	if err != nil {
		return backend.Tensor{}, translate(fmt.Sprintf("alloc: %v of %v, %d bytes", shape, dtype, bytes), err)
	}
	mem := backend.NewMemory(b, b.info.Name, int64(bytes), buf, func() { b.pool.put(buf, storageUsage) })
	t, err := backend.NewTensor(mem, dtype, shape)
	if err != nil {
		b.pool.put(buf, storageUsage)
	}
	return t, err
}

func bufferOf(t backend.Tensor) port.Buffer {
	if t.Memory() == nil {
		return nil // a tensor of a plan
	}
	buf, _ := t.Memory().Handle().(port.Buffer)
	return buf
}

// Upload copies a host tensor to the device, contiguous but for axes of stride
// zero, which stay so. backend.ErrDevice when it is not in host memory,
// backend.ErrMemory as for Alloc.
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
	src, err := hostBytes(host)
	if err != nil {
		return backend.Tensor{}, fmt.Errorf("upload: %w", err)
	}
	shape, strides := host.Shape(), host.Strides()
	stored := shape
	for i := range stored {
		if strides[i] == 0 && stored[i] > 1 {
			stored[i] = 1
		}
	}
	t, err := b.alloc(host.DType(), stored)
	if err != nil {
		return backend.Tensor{}, fmt.Errorf("upload: %w", err)
	}
	if err := b.upload(ctx, t, src, strides); err != nil {
		t.Release()
		return backend.Tensor{}, fmt.Errorf("upload: %w", err)
	}
	to := stored.Contiguous()
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

// upload fills t, fresh from alloc, with the elements that lie in src by strides.
func (b *Backend) upload(ctx context.Context, t backend.Tensor, src []byte, strides backend.Strides) error {
	size := t.DType().Size()
	total := t.Shape().Elements() * size
	dense := denseFrom(t.Shape(), strides)
	buf := bufferOf(t)
	next := rowReader(t.Shape(), strides, size, src)
	for at := 0; at < total; {
		n := min(transferBytes, total-at)
		var piece []byte
		if dense && n%4 == 0 {
			piece = src[at : at+n]
		} else {
			piece = make([]byte, (n+3)&^3)
			if dense {
				copy(piece, src[at:at+n])
			} else {
				next(piece[:n])
			}
		}
		if err := b.dev.Write(buf, uint64(at), piece); err != nil {
			return translate(b.info.Name, err)
		}
		at += n
		if at < total { // let go of what the library has copied
			if err := ctx.Err(); err != nil {
				return err
			}
			if err := b.submit(nil); err != nil {
				return err
			}
		}
	}
	return nil
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
	if err := b.download(ctx, dst, host, src); err != nil {
		return fmt.Errorf("download: %w", err)
	}
	return nil
}

func (b *Backend) download(ctx context.Context, dst []byte, host, src backend.Tensor) error {
	size := src.DType().Size()
	first := uint64(src.Offset() * size)
	last := first
	for i, l := range src.Shape() {
		last += uint64((l - 1) * src.Strides()[i] * size)
	}
	lo, hi := first&^3, (last+uint64(size)+3)&^3
	skip := int(first - lo)
	span := make([]byte, hi-lo)
	chunk := min(transferBytes, b.limits.MaxBufferSize&^3)
	staging, err := b.pool.get(min(chunk, hi-lo), stagingUsage)
	if err != nil {
		return translate(b.info.Name, err)
	}
	defer b.pool.put(staging, stagingUsage)
	for at := lo; at < hi; at += chunk {
		if err := ctx.Err(); err != nil {
			return err
		}
		n := min(chunk, hi-at)
		if err := b.submit([]port.Command{{Src: bufferOf(src), SrcOffset: at, Dst: staging, Size: n}}); err != nil {
			return err
		}
		if err := b.dev.Read(staging, 0, span[at-lo:at-lo+n]); err != nil {
			return translate(b.info.Name, err)
		}
	}
	scatter(dst, host.Strides(), span[skip:], src.Strides(), src.Shape(), size)
	return nil
}

// submit runs commands and waits for them.
func (b *Backend) submit(commands []port.Command) error {
	t, err := b.dev.Submit(commands)
	if err == nil {
		err = b.dev.Wait(t)
	}
	return translate(b.info.Name, err)
}

// hostBytes returns the bytes of a host tensor's memory from its first element.
func hostBytes(t backend.Tensor) ([]byte, error) {
	switch t.DType() {
	case backend.F32:
		s, err := t.Float32s()
		return bytesOf(s), err
	case backend.Bool:
		s, err := t.Bools()
		return bytesOf(s), err
	default:
		s, err := t.Bits()
		return bytesOf(s), err
	}
}

func bytesOf[T any](s []T) []byte {
	if len(s) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(&s[0])), len(s)*int(unsafe.Sizeof(s[0])))
}

// denseFrom reports whether elements lie row by row without gaps.
func denseFrom(shape backend.Shape, strides backend.Strides) bool {
	want := shape.Contiguous()
	for i, l := range shape {
		if l > 1 && strides[i] != want[i] {
			return false
		}
	}
	return true
}

// rowReader returns a function that fills its argument with the next elements
// of src, by strides, in the order of a contiguous tensor.
func rowReader(shape backend.Shape, strides backend.Strides, size int, src []byte) func([]byte) {
	var at [4]int
	return func(dst []byte) {
		for len(dst) > 0 {
			from := 0
			for i, x := range at {
				from += x * strides[i]
			}
			copy(dst[:size], src[from*size:])
			dst = dst[size:]
			for i := 3; i >= 0; i-- {
				if at[i]++; at[i] < shape[i] {
					break
				}
				at[i] = 0
			}
		}
	}
}

// scatter copies every element from src to dst, each by its strides in elements.
func scatter(dst []byte, ds backend.Strides, src []byte, ss backend.Strides, shape backend.Shape, size int) {
	rows := shape[3]
	run := ds[3] == 1 && ss[3] == 1 || rows == 1
	for b := range shape[0] {
		for h := range shape[1] {
			for s := range shape[2] {
				to := (b*ds[0] + h*ds[1] + s*ds[2]) * size
				from := (b*ss[0] + h*ss[1] + s*ss[2]) * size
				if run {
					copy(dst[to:to+rows*size], src[from:])
					continue
				}
				for d := range rows {
					copy(dst[to+d*ds[3]*size:][:size], src[from+d*ss[3]*size:])
				}
			}
		}
	}
}
