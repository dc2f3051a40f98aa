package gpu

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/queue"
)

// mostMemory is more than any device has, 1 TiB. A driver that is asked for a larger tensor
// grants parts of it until its memory is full.
const mostMemory = 1 << 40

// memoryFromEnv reads the bound on the device's memory where Options have none: bytes, or KiB,
// MiB or GiB; 0 when it is not set.
func memoryFromEnv() (int64, error) {
	const env = "ATTN_GPU_MEMORY"
	text := os.Getenv(env)
	if text == "" {
		return 0, nil
	}
	number, shift := text, 0
	for i, unit := range []string{"KiB", "MiB", "GiB"} {
		if n, ok := strings.CutSuffix(text, unit); ok {
			number, shift = n, 10*(i+1)
		}
	}
	n, err := strconv.ParseInt(number, 10, 64)
	if err != nil || n <= 0 || n > math.MaxInt64>>shift {
		return 0, fmt.Errorf("%s is %q, it must be a whole number of bytes, KiB, MiB or GiB, such as 256MiB: %w", env, text, backend.ErrOption)
	}
	return n << shift, nil
}

// PeakMemory implements backend.QueueMeter. It excludes what the pool keeps for later
// calls and what the driver allocates.
func (b *Backend) PeakMemory() int64 { return b.dev.Pool.TakePeak() }

// Alloc returns a contiguous tensor with unspecified contents: in one buffer, in several if it is larger than the
// adapter's largest, and in host memory if the device or Options.MemoryBytes have no room. Calls stream from and to
// host memory. It returns backend.ErrMemory when the host has no room either, and backend.ErrShape for a negative or
// overlarge shape. The driver is not asked for a tensor that no device can hold.
func (b *Backend) Alloc(ctx context.Context, dtype backend.DType, shape backend.Shape) (backend.Tensor, error) {
	return resultWithin(ctx, b, "alloc", func() (backend.Tensor, error) { return b.place(ctx, dtype, shape) })
}

// place is Alloc within a call.
func (b *Backend) place(ctx context.Context, dtype backend.DType, shape backend.Shape) (t backend.Tensor, err error) {
	if t, err = b.alloc(ctx, dtype, shape); !errors.Is(err, queue.ErrFull) {
		return t, err
	}
	host, err := backend.AllocHost(dtype, shape)
	if err == nil {
		t, err = b.onHost(host)
	}
	if err != nil {
		return t, fmt.Errorf("%s (%s) has no room, and the host: %w", b.info.Name, b.info.Device, err)
	}
	return t, nil
}

// alloc returns a contiguous tensor in device memory, or queue.ErrFull.
func (b *Backend) alloc(ctx context.Context, dtype backend.DType, shape backend.Shape) (backend.Tensor, error) {
	if shape.Elements() < 0 {
		return backend.Tensor{}, fmt.Errorf("shape %v is negative or too large: %w", shape, backend.ErrShape)
	}
	bytes := uint64(dtype.Bytes(shape))
	if bytes > mostMemory || b.info.Type == backend.CPU && backend.CheckMemory(int64(bytes)) != nil {
		return backend.Tensor{}, queue.ErrFull // a device that is the processor has the host's memory
	}
	s, free, err := b.dev.Alloc(ctx, bytes)
	if err != nil {
		return backend.Tensor{}, fmt.Errorf("%v of %v, %d bytes: %w", shape, dtype, bytes, err)
	}
	return b.tensorOn(s, int64(bytes), free, dtype, shape)
}

// tensorOn returns a contiguous tensor on the device memory s. free frees the memory after the
// last use of the tensor, also when a program forgets it, or after an error.
func (b *Backend) tensorOn(s *cut.Store, bytes int64, free func(), dtype backend.DType, shape backend.Shape) (backend.Tensor, error) {
	free = sync.OnceFunc(free)
	mem := backend.NewMemory(b, b.info.Name, bytes, s, free)
	runtime.AddCleanup(mem, func(free func()) { free() }, free)
	t, err := backend.NewTensor(mem, dtype, shape)
	if err != nil {
		free()
		return backend.Tensor{}, err
	}
	return t, nil
}

// onHost returns a tensor of this backend over the memory of a host tensor.
func (b *Backend) onHost(host backend.Tensor) (backend.Tensor, error) {
	data, err := backend.HostBytes(host)
	if err != nil {
		return backend.Tensor{}, err
	}
	n := len(data) / host.DType().Size()
	switch host.DType() { // one row as long as the memory
	case backend.Q8:
		n = max(n/4-1, 0) * 4 // after its scale
	case backend.F8:
		n = n / 4 * 4
	case backend.Q4:
		n = n / backend.Q4.Row(32) * 32
	}
	mem := backend.NewMemory(b, b.info.Name, int64(len(data)), &cut.Store{Host: data}, nil)
	t, err := backend.NewTensor(mem, host.DType(), backend.Shape{1, 1, 1, n})
	if err != nil {
		return t, err
	}
	return t.View(host.Shape(), host.Strides(), 0)
}

// Upload copies a host tensor to the device, contiguous except for axes of stride zero, which stay so. When the device
// or Options.MemoryBytes have no room it copies nothing: the result is an alias of the host tensor, from which calls
// stream. It returns backend.ErrDevice when the argument is not in host memory.
func (b *Backend) Upload(ctx context.Context, host backend.Tensor) (backend.Tensor, error) {
	return resultWithin(ctx, b, "upload", func() (t backend.Tensor, err error) {
		var pins backend.Pinned
		defer pins.Unpin()
		if err := pins.Pin(nil, "the host", nil, []backend.Operand{{Name: "host", Tensor: host}}); err != nil {
			return t, err
		}
		shape := host.Shape()
		if t, err = b.alloc(ctx, host.DType(), cut.Distinct(shape, host.Strides())); errors.Is(err, queue.ErrFull) {
			return b.onHost(host)
		}
		if err != nil {
			return t, err
		}
		began := time.Now()
		if err := b.dev.Upload(ctx, t, host); err != nil {
			t.Release()
			return t, err
		}
		queue.Moved(ctx, t.Bytes(), began)
		return t.Broadcast(shape)
	})
}

// Download copies src to host: same shape (backend.ErrShape), same dtype (backend.ErrDType), any strides on both sides.
func (b *Backend) Download(ctx context.Context, host, src backend.Tensor) error {
	return b.within(ctx, "download", func() error {
		if host.Shape() != src.Shape() {
			return fmt.Errorf("host has shape %v, src %v: %w", host.Shape(), src.Shape(), backend.ErrShape)
		}
		if host.DType() != src.DType() {
			return fmt.Errorf("host is %v, src %v: %w", host.DType(), src.DType(), backend.ErrDType)
		}
		var pins, hostPins backend.Pinned
		defer pins.Unpin()
		defer hostPins.Unpin()
		err := pins.Pin(b, b.info.Name, nil, []backend.Operand{{Name: "src", Tensor: src}})
		if err == nil {
			err = hostPins.Pin(nil, "the host", []backend.Operand{{Name: "host", Tensor: host}}, nil)
		}
		if err != nil || src.Shape().Elements() == 0 {
			return err
		}
		return b.read(ctx, host, src)
	})
}

// read copies src, which is pinned, to host.
func (b *Backend) read(ctx context.Context, host, src backend.Tensor) error {
	dst, err := backend.HostBytes(host)
	if err != nil {
		return err
	}
	if host, err = cut.Words(host); err != nil {
		return err
	}
	if src, err = cut.Words(src); err != nil {
		return err
	}
	return b.dev.Download(ctx, dst, host.Strides(), src)
}
