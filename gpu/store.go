package gpu

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/port"
)

// deviceMemory is the memory that tensors may take, and what they take now.
func (b *Backend) deviceMemory() cut.Memory {
	return cut.Memory{Bound: b.memory, Used: b.tensors.Load()}
}

// maxWindowBytes keeps indices into a window in 32 bits, with room.
const maxWindowBytes = 1 << 31

// maxWindow is the largest span that is bound.
func maxWindow(l gputypes.Limits) uint64 {
	return min(l.MaxStorageBufferBindingSize, maxWindowBytes) &^ 3
}

// cutLimits are the limits that calls are cut by.
func (b *Backend) cutLimits() cut.Limits {
	return cut.Limits{Binding: maxWindow(b.limits), Buffer: b.limits.MaxBufferSize, Align: uint64(b.limits.MinStorageBufferOffsetAlignment)}
}

// newCutter returns a cutter for the device and its memory.
func (b *Backend) newCutter(inner, granule int, operands ...*cut.Operand) *cut.Cutter {
	return cut.New(b.cutLimits(), b.deviceMemory(), inner, granule, operands...)
}

// errBeyond says that a tensor does not fit into the device's memory, and so
// goes to host memory.
var errBeyond = errors.New("beyond the device's memory")

// memoryEnv bounds the device's memory where Options do not.
const memoryEnv = "ATTN_GPU_MEMORY"

// memoryFromEnv reads memoryEnv: bytes, or KiB, MiB or GiB; 0 when it is not set.
func memoryFromEnv() (int64, error) {
	text := os.Getenv(memoryEnv)
	if text == "" {
		return 0, nil
	}
	number, shift := text, 0
	for unit, bits := range map[string]int{"KiB": 10, "MiB": 20, "GiB": 30} {
		if n, ok := strings.CutSuffix(text, unit); ok {
			number, shift = n, bits
		}
	}
	n, err := strconv.ParseInt(number, 10, 64)
	if err != nil || n <= 0 || n > math.MaxInt64>>shift {
		return 0, fmt.Errorf("%s is %q, it must be a whole number of bytes, KiB, MiB or GiB, such as 256MiB: %w", memoryEnv, text, backend.ErrOption)
	}
	return n << shift, nil
}

// reserve counts bytes as taken by a tensor, unless that is more than may be.
func (b *Backend) reserve(bytes int64) error {
	for {
		now := b.tensors.Load()
		if !(cut.Memory{Bound: b.memory, Used: now}).Fits(bytes) {
			return errBeyond
		}
		if b.tensors.CompareAndSwap(now, now+bytes) {
			return nil
		}
	}
}

// alloc returns a contiguous tensor in device memory; errBeyond when there is no
// room for it.
func (b *Backend) alloc(dtype backend.DType, shape backend.Shape) (backend.Tensor, error) {
	n := shape.Elements()
	if n < 0 {
		return backend.Tensor{}, fmt.Errorf("alloc: shape %v is negative or too large: %w", shape, backend.ErrShape)
	}
	bytes := uint64(dtype.Bytes(shape))
	if err := b.reserve(int64(bytes)); err != nil {
		return backend.Tensor{}, err
	}
	s := &cut.Store{Part: b.cutLimits().Part()}
	free := func() {
		for _, buf := range s.Parts {
			b.pool.put(buf, storageUsage)
		}
		b.tensors.Add(-int64(bytes))
	}
	for at := uint64(0); at < bytes || at == 0; at += s.Part {
		buf, err := b.pool.get(min(s.Part, bytes-at), storageUsage)
		if err != nil {
			free()
			if errors.Is(err, port.ErrMemory) {
				return backend.Tensor{}, fmt.Errorf("%w: %w", err, errBeyond)
			}
			return backend.Tensor{}, translate(fmt.Sprintf("alloc: %v of %v, %d bytes", shape, dtype, bytes), err)
		}
		s.Parts = append(s.Parts, buf)
	}
	t, err := backend.NewTensor(backend.NewMemory(b, b.info.Name, int64(bytes), s, free), dtype, shape)
	if err != nil {
		free()
	}
	return t, err
}

// aside returns a tensor of this backend over host memory: elements of dtype that
// lie in data by strides.
func (b *Backend) aside(data []byte, dtype backend.DType, shape backend.Shape, strides backend.Strides) (backend.Tensor, error) {
	mem := backend.NewMemory(b, b.info.Name, int64(len(data)), &cut.Store{Host: data}, nil)
	n := len(data) / dtype.Size()
	if dtype == backend.Q8 {
		n = max(n/4-1, 0) * 4 // a row as long as the memory, after its scale
	}
	t, err := backend.NewTensor(mem, dtype, backend.Shape{1, 1, 1, n})
	if err != nil {
		return t, err
	}
	return t.View(shape, strides, 0)
}

// write copies data to the bytes of a store from at on; both are multiples of 4.
// It waits for the copy, so that the library lets go of its own.
func (b *Backend) write(s *cut.Store, at uint64, data []byte) error {
	err := s.Each(at, at+uint64(len(data)), func(buf cut.Buffer, to, n uint64) error {
		err := b.dev.Write(buf, to, data[:n])
		data = data[n:]
		return translate(b.info.Name, err)
	})
	if err != nil {
		return err
	}
	return b.submit(nil)
}

// read copies bytes [at, at+len(dst)) of a store to dst; both are multiples of 4.
func (b *Backend) read(ctx context.Context, s *cut.Store, at uint64, dst []byte) (err error) {
	if len(dst) == 0 {
		return nil
	}
	most := min(cut.TransferBytes, uint64(len(dst)), b.cutLimits().Part())
	staging, err := b.pool.get(most, stagingUsage)
	if err != nil {
		return translate(b.info.Name, err)
	}
	defer func() {
		if err == nil {
			b.pool.put(staging, stagingUsage)
		} else {
			b.pool.drop(staging) // a copy into it may still run
		}
	}()
	return s.Each(at, at+uint64(len(dst)), func(buf cut.Buffer, from, n uint64) error {
		for n > 0 {
			if err := ctx.Err(); err != nil {
				return err
			}
			some := min(n, most)
			if err := b.submit([]port.Command{{Src: buf, SrcOffset: from, Dst: staging, Size: some}}); err != nil {
				return err
			}
			if err := b.dev.Read(staging, 0, dst[:some]); err != nil {
				return translate(b.info.Name, err)
			}
			from, n, dst = from+some, n-some, dst[some:]
		}
		return nil
	})
}

// submit runs commands and waits for them.
func (b *Backend) submit(commands []port.Command) error {
	t, err := b.dev.Submit(commands)
	if err == nil {
		err = b.dev.Wait(t)
	}
	return translate(b.info.Name, err)
}
