package backend

import (
	"fmt"
	"sync"
	"unsafe"
)

// Memory is a span of memory that one device owns and that tensors are views
// of. Backends make it with [NewMemory]; a program meets it through tensors.
//
// It counts the calls that use it, so that a Release in the middle of a call
// in another goroutine lets that call end before the memory goes.
type Memory struct {
	owner  any    // the device's identity; nil is host memory
	where  string // the owner's name in errors
	handle any    // the owner's own: a device buffer, or the host slice
	base   uintptr
	bytes  int64
	free   func()

	mu       sync.Mutex
	users    int
	released bool
}

// NewMemory wraps bytes bytes of device memory. owner is the identity that
// [Pin] compares, where its name in error texts, handle what the owner needs to
// reach the memory, and free (may be nil) is called once, after the release
// and after the last call that uses the memory.
func NewMemory(owner any, where string, bytes int64, handle any, free func()) *Memory {
	return &Memory{owner: owner, where: where, handle: handle, bytes: bytes, free: free}
}

// hostMemory wraps a slice without a copy.
func hostMemory[T float32 | uint16 | bool | byte](data []T) *Memory {
	m := &Memory{where: "host memory", handle: data, bytes: int64(len(data)) * int64(unsafe.Sizeof(*new(T)))}
	if len(data) > 0 {
		m.base = uintptr(unsafe.Pointer(unsafe.SliceData(data)))
	}
	return m
}

// Handle returns what the owner stored.
func (m *Memory) Handle() any { return m.handle }

// Bytes returns the size.
func (m *Memory) Bytes() int64 { return m.bytes }

func (m *Memory) pin() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.released {
		return ErrReleased
	}
	m.users++
	return nil
}

func (m *Memory) unpin() {
	m.mu.Lock()
	m.users--
	last := m.released && m.users == 0
	m.mu.Unlock()
	if last && m.free != nil {
		m.free()
	}
}

func (m *Memory) release() {
	m.mu.Lock()
	first := !m.released
	m.released = true
	idle := m.users == 0
	m.mu.Unlock()
	if first && idle && m.free != nil {
		m.free()
	}
}

// Operand is a tensor with the name that errors call it by.
type Operand struct {
	Name   string
	Tensor Tensor
}

// maxOperands is how many operands a call has at most.
const maxOperands = 12

// Pinned holds the operands of a running call; see [Pin]. Its zero value holds
// nothing.
type Pinned struct {
	mem [maxOperands]*Memory
	n   int
}

// Pin is how a backend starts a call: it checks that every operand has memory
// that owner owns (nil: the host) and that is not released, that no output
// overlaps an input, another output or itself, and keeps all of it from being
// freed until Unpin. Operands that are the zero Tensor are passed over.
//
// Overlap is judged by the spans from first to last element, so two views that
// interleave in the same memory count as overlapping. An operand that is both
// read and written in place stands among the outputs only.
//
// Errors: ErrDevice, ErrReleased, ErrOverlap, each with the operand's name.
// It takes at most 12 operands in all and does not allocate when it succeeds.
func (p *Pinned) Pin(owner any, where string, outputs, inputs []Operand) error {
	if err := Distinct(outputs, inputs); err != nil {
		return err
	}
	for _, list := range [2][]Operand{outputs, inputs} {
		for _, o := range list {
			if o.Tensor.IsZero() {
				continue
			}
			if err := p.add(owner, where, o); err != nil {
				p.Unpin()
				return err
			}
		}
	}
	return nil
}

// Distinct returns ErrOverlap when an output overlaps an input, another output or
// itself, as [Pinned.Pin] judges it. A caller that hands a call over in parts checks
// the whole by it: a part's output may meet what another part reads.
func Distinct(outputs, inputs []Operand) error {
	for i, out := range outputs {
		if out.Tensor.IsZero() {
			continue
		}
		if out.Tensor.selfOverlaps() {
			return fmt.Errorf("%s of shape %v has strides %v, so that two of its elements share memory: %w",
				out.Name, out.Tensor.Shape(), out.Tensor.Strides(), ErrOverlap)
		}
		for _, other := range outputs[:i] {
			if out.Tensor.overlaps(other.Tensor) {
				return fmt.Errorf("%s and %s share memory, outputs must not: %w", out.Name, other.Name, ErrOverlap)
			}
		}
		for _, in := range inputs {
			if out.Tensor.overlaps(in.Tensor) {
				return fmt.Errorf("%s is written while %s is read from the same memory: %w", out.Name, in.Name, ErrOverlap)
			}
		}
	}
	return nil
}

func (p *Pinned) add(owner any, where string, o Operand) error {
	m := o.Tensor.mem
	if m == nil {
		return fmt.Errorf("%s has a shape but no memory, allocate or upload it first: %w", o.Name, ErrDevice)
	}
	if m.owner != owner {
		return fmt.Errorf("%s lives in %s, the call runs on %s, upload it there first: %w", o.Name, m.where, where, ErrDevice)
	}
	if p.n == len(p.mem) {
		return fmt.Errorf("%s is operand %d of one call, at most %d are taken: %w", o.Name, p.n+1, len(p.mem), ErrUnsupported)
	}
	if err := m.pin(); err != nil {
		return fmt.Errorf("%s: %w", o.Name, err)
	}
	p.mem[p.n] = m
	p.n++
	return nil
}

// Unpin ends what Pin began. It may be called more than once.
func (p *Pinned) Unpin() {
	for i := range p.n {
		p.mem[i].unpin()
		p.mem[i] = nil
	}
	p.n = 0
}
