package port

import (
	"context"
	"time"

	"github.com/gogpu/gputypes"
)

// Object is an object of a library: a buffer, a pipeline, a bind group or a set of queries. Buffers
// can be compared.
type Object any

// Library is an open device of a WebGPU library. The packages below this one implement it, and the
// Device of this package calls it, with valid arguments. The device's lock is held around every
// call but CreatePipeline: errors of wgpu-native reach one state of the device, and gogpu must not
// release a buffer while a submission that binds it is being recorded.
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
	// Read copies bytes of a mappable, idle buffer to dst. See ReadMapped.
	Read(b Object, offset uint64, dst []byte) error
	// CreateGroup returns a bind group for a pipeline.
	CreateGroup(p Object, spans []Span) (Object, error)
	ReleaseBuffer(b Object)
	ReleasePipeline(p Object)
	ReleaseGroup(g Object)
	// Copy and Dispatch record commands, Submit starts them, and Discard drops those that were
	// not submitted.
	Copy(src, dst Object, c *Command) error
	Dispatch(p, g Object, offsets []uint32, groups [3]uint32) error
	Submit() (Ticket, error)
	Discard()
	// Poll runs the callbacks that are due and returns the last submission that has ended.
	Poll() (Ticket, error)
	// Pause passes the time between two polls of a wait that began at start and is expected to
	// end at due. See Pause.
	Pause(ctx context.Context, start, due time.Time)
	// Clock returns the device's clock, nil where there is none.
	Clock() *Clock
	// Close releases the device, unless the program owns it.
	Close()
}

// Traits are properties of a library.
type Traits struct {
	// DynamicStep divides the dynamic offsets that it accepts.
	DynamicStep uint64
	// CompilesTogether means that a device compiles several pipelines at a time.
	CompilesTogether bool
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
	Limits() gputypes.Limits
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
