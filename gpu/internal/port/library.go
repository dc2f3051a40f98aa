package port

import (
	"context"

	"github.com/gogpu/gputypes"
)

// Object is an object of a library: a buffer, a pipeline, a bind group or a set of queries. Buffers can be compared.
type Object any

// Library is an open device of a WebGPU library. The packages below this one implement it, and the Device of this
// package calls it, with valid arguments. The device's lock is held around every call but CreatePipeline: errors of
// wgpu-native reach one state of the device, and gogpu must not release a buffer while a submission that binds it is
// being recorded. A Library is also a Mapper or a Waiter.
type Library interface {
	// Traits returns what Device has to know of the library.
	Traits() Traits
	// Lost returns a loss that the library has reported.
	Lost() error
	// CreateBuffer, Write and CreatePipeline are those of Device. dynamic is the binding whose
	// offset each dispatch sets, or -1.
	CreateBuffer(size uint64, usage gputypes.BufferUsage) (Object, error)
	Write(b Object, offset uint64, data []byte) error
	CreatePipeline(desc PipelineDesc, dynamic int) (Object, error)
	// CreateGroup returns a bind group for a pipeline.
	CreateGroup(p Object, spans []Span) (Object, error)
	ReleaseBuffer(b Object)
	ReleasePipeline(p Object)
	ReleaseGroup(g Object)
	// Submit starts steps, with timestamps unless stamps is nil.
	Submit(steps []Step, stamps *Stamps) (Ticket, error)
	// Poll runs the callbacks that are due and returns the last submission that has ended.
	Poll() (Ticket, error)
	// Close releases the device, unless the program owns it.
	Close()
}

// Mapper is a Library that is polled, also while it maps a buffer, which is idle.
type Mapper interface {
	// StartMap starts to map a buffer for reading, and Mapped reports whether that has ended.
	StartMap(b Object, offset, size uint64) error
	Mapped() (bool, error)
	// CopyMapped copies from the mapped buffer and unmaps it.
	CopyMapped(b Object, offset uint64, dst []byte) error
	// EndMap ends a map that may be pending.
	EndMap(b Object)
}

// Waiter is a Library with events: Pause waits for the next one, and Read is that of Device.
type Waiter interface {
	Pause(ctx context.Context)
	Read(b Object, offset uint64, dst []byte) error
}

// Traits are properties of a library.
type Traits struct {
	// DynamicStep divides the dynamic offsets that it accepts.
	DynamicStep uint64
	// CompilesTogether means that a device compiles several pipelines at a time.
	CompilesTogether bool
	// Timed means that the library is a Stamper. Tick is the time of a tick in nanoseconds, 0 where
	// it has to be measured.
	Timed bool
	Tick  float64
}

// Step is a Command with the library's objects.
type Step struct {
	// A dispatch has a pipeline, and Dynamic offsets: one or none.
	Pipeline, Group Object
	Groups          [3]uint32
	Dynamic         int
	Offset          [1]uint32
	// A copy has none.
	Src, Dst                   Object
	SrcOffset, DstOffset, Size uint64
}

// Span is a span of a buffer that a bind group binds.
type Span struct {
	Buffer       Object
	Offset, Size uint64
}

// Sharer is a Library that can use the buffers of a program on the program's device.
type Sharer interface {
	// Import returns a program's buffer, its size and its usages.
	Import(b any) (raw Object, size uint64, usage gputypes.BufferUsage, err error)
	// Reference keeps a program's buffer until Dereference.
	Reference(b Object)
	Dereference(b Object)
}

// LibraryAdapter is an adapter of a library.
type LibraryAdapter interface {
	Info() Info
	Limits() gputypes.Limits // the most that Open grants
	Open(l gputypes.Limits) (Library, error)
	Release()
}

// Info describes an adapter.
type Info struct {
	gputypes.AdapterInfo
	// Library names the library that reaches the adapter, with its version.
	Library  string
	Features Features
}
