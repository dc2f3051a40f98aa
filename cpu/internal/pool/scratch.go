package pool

import (
	"fmt"
	"sync"
	"unsafe"

	"github.com/seed90331342/attn/backend"
)

// Scratch is the memory in which one goroutine computes the tasks of a call. Calls take it from a pool.
type Scratch struct {
	// Kept belongs to the package whose tasks set it: memory that is too large to be
	// allocated for each call. It stays with the scratch.
	Kept any

	arena []float32
	used  int
}

var scratches = sync.Pool{New: func() any { return new(Scratch) }}

// Grow makes n floats available, and all again. It returns ErrMemory.
func (w *Scratch) Grow(n int) (err error) {
	w.used = 0
	if Resize(&w.arena, n+AlignFloats, &err); err != nil {
		return fmt.Errorf("scratch of a thread: %w", err)
	}
	return nil
}

// AlignFloats is the most floats that the alignment of 48 slices takes.
const AlignFloats = 48 * 16

// keptFloats is the most floats that a pooled scratch holds: 4 MiB, several times
// the need of head sizes up to 256. A larger one is left to the garbage collector.
const keptFloats = 1 << 20

// Floats returns n floats with unspecified contents on a 64 byte boundary, which no other
// slice since Reset has. For n = 0 the slice is empty.
func (w *Scratch) Floats(n int) []float32 {
	off := int(uintptr(unsafe.Pointer(unsafe.SliceData(w.arena)))/4) % 16
	at := (w.used+off+15)&^15 - off
	w.used = at + n
	return w.arena[at : at+n : at+n]
}

// Reset makes all floats available again.
func (w *Scratch) Reset() { w.used = 0 }

// Resize gives s the length n, in other memory where its own is too short, unless err is set.
// It leaves s as it is, and sets err to ErrMemory, where there is not enough memory.
func Resize[T any](s *[]T, n int, err *error) {
	resized := *s
	if *err == nil && cap(resized) < n {
		resized, *err = backend.Make[T](n)
	}
	if *err == nil {
		*s = resized[:n]
	}
}
