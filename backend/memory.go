package backend

import (
	"fmt"
	"math"
	"sync/atomic"
	"unsafe"

	"github.com/seed90331342/attn/backend/internal/limits"
)

// Memory is a span of memory that one device owns and that tensors are views of. Backends
// create it with [NewMemory]; programs only see tensors.
//
// It counts the calls that use it. A Release during a call in another goroutine frees the memory when the call ends.
type Memory struct {
	owner  any    // identity of the device; nil is host memory
	where  string // name of the owner in errors
	handle any    // for the owner: a device buffer, or the host slice
	data   []byte // of the host slice
	bytes  int64
	free   func()

	// state is 2 for each call that uses the memory, and 1 once it is released.
	state atomic.Int64
}

// NewMemory wraps bytes bytes of device memory. owner is the identity that [Pinned.Pin]
// compares, where its name in errors, and handle the owner's reference to the memory. free,
// which may be nil, is called once, after the release and the last call that uses the memory.
func NewMemory(owner any, where string, bytes int64, handle any, free func()) *Memory {
	return &Memory{owner: owner, where: where, handle: handle, bytes: bytes, free: free}
}

// hostMemory wraps a slice without copying it.
func hostMemory[T float32 | uint16 | bool | byte | int32](data []T) *Memory {
	bytes := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(data))), len(data)*int(unsafe.Sizeof(*new(T))))
	return &Memory{where: "host memory", handle: data, data: bytes, bytes: int64(len(bytes))}
}

// HostBytes returns the bytes of memory of the host, nil where a device owns m.
func (m *Memory) HostBytes() []byte {
	if m.owner != nil {
		return nil
	}
	return m.data
}

// Handle returns the owner's handle.
func (m *Memory) Handle() any { return m.handle }

// Bytes returns the size.
func (m *Memory) Bytes() int64 { return m.bytes }

func (m *Memory) released() bool { return m.state.Load()&1 != 0 }

func (m *Memory) release() {
	if m.state.Or(1) == 0 && m.free != nil {
		m.free()
	}
}

// Operand is a tensor with its name in errors.
type Operand struct {
	Name   string
	Tensor Tensor
}

// maxOperands is the largest number of operands of a call.
const maxOperands = 18

// Pinned holds the operands of a running call, see [Pinned.Pin]. The zero value holds none.
type Pinned struct {
	mem [maxOperands]*Memory
	n   int
}

// Pin checks the operands at the start of a call and keeps their memory from being freed until Unpin. Every operand
// must have memory of owner (nil: the host alone) or of the host, and that is not released, and no output may overlap
// an input, another output or itself. Zero Tensors are skipped.
//
// Overlap is judged by the spans from the first to the last element, so that interleaved views of one memory overlap.
// An operand that is updated in place is listed as an output only.
//
// Errors: ErrDevice, ErrReleased and ErrOverlap, with the operand's name. Pin takes at most
// 18 operands and does not allocate when it succeeds.
func (p *Pinned) Pin(owner any, where string, outputs, inputs []Operand) error {
	if err := Distinct(outputs, inputs); err != nil {
		return err
	}
	for _, list := range [2][]Operand{outputs, inputs} {
		for i := range list {
			if list[i].Tensor.IsZero() {
				continue
			}
			if err := p.add(owner, where, &list[i]); err != nil {
				p.Unpin()
				return err
			}
		}
	}
	return nil
}

// Distinct returns ErrOverlap when an output overlaps an input, another output or itself, as [Pinned.Pin] does. A
// caller that cuts a call into several needs it: the output of one may overlap the input of another.
func Distinct(outputs, inputs []Operand) error {
	for i := range outputs {
		out := &outputs[i]
		if out.Tensor.IsZero() {
			continue
		}
		if out.Tensor.selfOverlaps() {
			return fmt.Errorf("%s of shape %v has strides %v, by which two of its elements share memory: %w",
				out.Name, out.Tensor.Shape(), out.Tensor.Strides(), ErrOverlap)
		}
		for j := range outputs[:i] {
			if out.Tensor.overlaps(&outputs[j].Tensor) {
				return fmt.Errorf("%s and %s share memory, outputs must not: %w", out.Name, outputs[j].Name, ErrOverlap)
			}
		}
		for j := range inputs {
			if out.Tensor.overlaps(&inputs[j].Tensor) {
				return fmt.Errorf("%s is written while %s is read from the same memory: %w", out.Name, inputs[j].Name, ErrOverlap)
			}
		}
	}
	return nil
}

// add keeps the memory of o from being freed.
func (p *Pinned) add(owner any, where string, o *Operand) error {
	m := o.Tensor.mem
	if m == nil {
		return fmt.Errorf("%s has a shape but no memory, make it with Device.Alloc or Device.Upload: %w", o.Name, ErrDevice)
	}
	if m.owner != nil && m.owner != owner {
		return fmt.Errorf("%s is in %s, the call runs on %s, copy it with Device.Download there and Device.Upload here: %w", o.Name, m.where, where, ErrDevice)
	}
	if p.n == len(p.mem) {
		return fmt.Errorf("%s is operand %d of one call, at most %d are taken: %w", o.Name, p.n+1, len(p.mem), ErrUnsupported)
	}
	for pinned := false; !pinned; {
		was := m.state.Load()
		if was&1 != 0 {
			return fmt.Errorf("%s: %w", o.Name, ErrReleased)
		}
		pinned = m.state.CompareAndSwap(was, was+2)
	}
	p.mem[p.n] = m
	p.n++
	return nil
}

// Unpin releases the operands that Pin holds. It may be called more than once.
func (p *Pinned) Unpin() {
	for i := range p.n {
		if m := p.mem[i]; m.state.Add(-2) == 1 && m.free != nil {
			m.free()
		}
		p.mem[i] = nil
	}
	p.n = 0
}

// Go ends a program whose allocation fails, and Linux kills one that exceeds the memory of its control
// group. Allocations whose size follows from a caller's input therefore go through Make or CheckMemory.

// CheckMemory returns ErrMemory when the process cannot have that many bytes more. The error names the
// bytes, those available and the limit. A negative number is too many.
func CheckMemory(bytes int64) error { return limits.Request(bytes, func() *byte { return nil }) }

// Make returns make([]T, n), or ErrMemory as CheckMemory does. A negative n is too many.
func Make[T any](n int) (made []T, err error) {
	bytes := int64(-1)
	if size := int64(max(unsafe.Sizeof(*new(T)), 1)); n >= 0 && int64(n) <= math.MaxInt64/size {
		bytes = int64(n) * size
	}
	err = limits.Request(bytes, func() *byte {
		made = make([]T, n)
		return (*byte)(unsafe.Pointer(unsafe.SliceData(made)))
	})
	return made, err
}

// FailMemory makes the nth request of Make or CheckMemory from now on fail, for tests; 0 counts requests
// only. stop ends this and returns the number of requests.
func FailMemory(nth int) (stop func() int) { return limits.Fail(nth) }

// HostMemory returns how many bytes the process can have more, and the lowest limit, whatever is in use.
func HostMemory() (free, limit int64) {
	_, free = limits.Tightest(true)
	return free, limits.Lowest()
}
