package gpu

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"
	"unsafe"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/port"
)

// store is the memory behind a tensor: buffers of the device, one after the
// other, or host memory from and to which calls stream.
type store struct {
	parts []port.Buffer
	part  uint64 // bytes of each part but the last
	host  []byte // not nil: in host memory, and parts is empty
}

// storeOf returns the memory of a tensor of this backend; nil for the tensor of a
// plan, which has none.
func storeOf(t backend.Tensor) *store {
	if t.Memory() == nil {
		return nil
	}
	s, _ := t.Memory().Handle().(*store)
	return s
}

// each calls f for the span of each buffer that bytes [lo, hi) lie in: where it
// starts in the buffer, and how long it is.
func (s *store) each(lo, hi uint64, f func(buf port.Buffer, at, n uint64) error) error {
	for lo < hi {
		i := lo / s.part
		n := min(hi, (i+1)*s.part) - lo
		if err := f(s.parts[i], lo-i*s.part, n); err != nil {
			return err
		}
		lo += n
	}
	return nil
}

// partAlign is what the size of the parts of a tensor is a multiple of: a window
// that is aligned in the tensor is so in its part.
const partAlign = 4 << 10

// partBytes is how large a tensor may be before it takes several buffers, and how
// large they are then.
func (b *Backend) partBytes() uint64 {
	return max(b.limits.MaxBufferSize/partAlign*partAlign, partAlign)
}

// Of the device memory that Options allow, tensors take up to 5/8 and the pool
// up to 1/8, so that 1/4 or more is left for what calls stream.
const (
	tensorEighths = 5
	poolEighths   = 1
)

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
		if b.memory > 0 && now+bytes > b.memory/8*tensorEighths {
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
	s := &store{part: b.partBytes()}
	free := func() {
		for _, buf := range s.parts {
			b.pool.put(buf, storageUsage)
		}
		b.tensors.Add(-int64(bytes))
	}
	for at := uint64(0); at < bytes || at == 0; at += s.part {
		buf, err := b.pool.get(min(s.part, bytes-at), storageUsage)
		if err != nil {
			free()
			if errors.Is(err, port.ErrMemory) {
				return backend.Tensor{}, fmt.Errorf("%w: %w", err, errBeyond)
			}
			return backend.Tensor{}, translate(fmt.Sprintf("alloc: %v of %v, %d bytes", shape, dtype, bytes), err)
		}
		s.parts = append(s.parts, buf)
	}
	t, err := backend.NewTensor(backend.NewMemory(b, b.info.Name, int64(bytes), s, free), dtype, shape)
	if err != nil {
		free()
	}
	return t, err
}

// words returns t as it is moved and as kernels see it, which is t but for Q8: that is
// rows of words, the scale in the first and four integers in each of the others.
func words(t backend.Tensor) (backend.Tensor, error) {
	if t.DType() != backend.Q8 || t.Shape().Elements() == 0 {
		return t, nil
	}
	n := 1
	if m := t.Memory(); m != nil {
		n = int(m.Bytes() / 4)
	}
	all, err := backend.NewTensor(t.Memory(), backend.F32, backend.Shape{1, 1, 1, n})
	if err != nil {
		return t, err
	}
	shape, strides := t.Shape(), t.Strides()
	for i := range strides[:backend.Dim] {
		strides[i] /= 4
	}
	shape[backend.Dim] = shape[backend.Dim]/4 + 1
	return all.View(shape, strides, t.Offset()/4-1)
}

// aside returns a tensor of this backend over host memory: elements of dtype that
// lie in data by strides.
func (b *Backend) aside(data []byte, dtype backend.DType, shape backend.Shape, strides backend.Strides) (backend.Tensor, error) {
	mem := backend.NewMemory(b, b.info.Name, int64(len(data)), &store{host: data}, nil)
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
func (b *Backend) write(s *store, at uint64, data []byte) error {
	err := s.each(at, at+uint64(len(data)), func(buf port.Buffer, to, n uint64) error {
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
func (b *Backend) read(ctx context.Context, s *store, at uint64, dst []byte) (err error) {
	if len(dst) == 0 {
		return nil
	}
	most := min(transferBytes, uint64(len(dst)), b.partBytes())
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
	return s.each(at, at+uint64(len(dst)), func(buf port.Buffer, from, n uint64) error {
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

// hostBytes returns the bytes of a host tensor's memory from its first element, or
// from the scale of its first row.
func hostBytes(t backend.Tensor) ([]byte, error) {
	switch t.DType() {
	case backend.F32:
		s, err := t.Float32s()
		return bytesOf(s), err
	case backend.Bool:
		s, err := t.Bools()
		return bytesOf(s), err
	case backend.Q8:
		return t.Q8Rows()
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
