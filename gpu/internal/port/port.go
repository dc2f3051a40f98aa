// Package port is the whole of WebGPU that attn uses, as one small interface:
// list adapters, open a device, make buffers and compute pipelines, submit
// dispatches and copies, wait, read back, release.
//
// Two libraries stand behind it, one in each binary:
//
//   - github.com/rajveermalviya/go-webgpu/wgpu, through cgo, on linux/amd64,
//     darwin and windows/amd64;
//   - github.com/gogpu/wgpu, pure Go, everywhere else, with CGO_ENABLED=0, and
//     with the build tag gogpu.
//
// They do not link together (the second needs Go's own linker, the static
// library of the first an external one), so the build chooses. What either
// library does in its own way ends here: callbacks that panic by default, maps
// that need polling, waits that give up, objects that must be released in order.
//
// Every failure is an error that wraps one of the sentinels of this package.
package port

import (
	"errors"
	"runtime"
	"time"

	"github.com/gogpu/gputypes"
)

// Sentinel errors of the port.
var (
	// ErrNoAdapter reports that there is no WebGPU adapter: no driver, no device.
	ErrNoAdapter = errors.New("no WebGPU adapter")
	// ErrLost reports a device that is gone, or that makes no progress any more.
	// Every later call on the device fails with it.
	ErrLost = errors.New("WebGPU device lost")
	// ErrShader reports WGSL that does not compile, or that asks for more than
	// the device has (workgroup size, workgroup memory).
	ErrShader = errors.New("shader not accepted")
	// ErrMemory reports a buffer that the device could not make.
	ErrMemory = errors.New("device out of memory")
	// ErrInvalid reports a call that WebGPU's rules do not allow.
	ErrInvalid = errors.New("WebGPU validation failed")
	// ErrClosed reports a device used after Close.
	ErrClosed = errors.New("WebGPU device closed")
)

// stallLimit is how long a submission may show no end before the device counts
// as lost. Submissions are cut to far less than a second; a driver's watchdog
// acts after 2 to 10 s, a software driver on a loaded machine needs patience.
const stallLimit = 2 * time.Minute

// Adapter is a device that can be opened.
type Adapter interface {
	// Info describes it.
	Info() gputypes.AdapterInfo
	// Limits are the adapter's own limits, the most that Open grants.
	Limits() gputypes.Limits
	// Open makes a device with exactly these limits; start from Limits and
	// lower (or, for alignments, raise) what should differ. ErrInvalid when the
	// adapter does not reach a limit, ErrLost when the device does not start.
	Open(limits gputypes.Limits) (Device, error)
	// Release gives the adapter back; devices opened from it stay.
	Release()
}

// Device is an open device. Its methods are safe for concurrent use.
type Device interface {
	// Limits are those that the device was opened with.
	Limits() gputypes.Limits
	// CreateBuffer makes a zeroed buffer of size bytes, a multiple of 4 and at
	// least 4. ErrMemory when there is no room, ErrInvalid over MaxBufferSize.
	CreateBuffer(size uint64, usage gputypes.BufferUsage) (Buffer, error)
	// CreatePipeline compiles a compute shader. ErrShader with the compiler's
	// words when it is not accepted.
	CreatePipeline(desc PipelineDesc) (Pipeline, error)
	// Write copies data into a buffer with usage CopyDst before the next
	// submission starts. offset and len(data) are multiples of 4.
	Write(b Buffer, offset uint64, data []byte) error
	// Submit starts commands, which run in order, and returns at once.
	Submit(commands []Command) (Ticket, error)
	// SubmitTimed is Submit with the device's clock read before and after the
	// commands, where it has one.
	SubmitTimed(commands []Command) (Ticket, error)
	// Took returns how long the commands of SubmitTimed took by the device's
	// clock. The submission has ended (Wait). ok is false where the device, or
	// the library, has no timestamps, and for all but the last few submissions.
	Took(t Ticket) (took time.Duration, ok bool, err error)
	// Wait returns when everything up to the submission has ended. ErrLost when
	// the device goes away or makes no progress.
	Wait(t Ticket) error
	// Read copies from a buffer with usage MapRead that no running submission
	// uses. offset is a multiple of 8, len(dst) of 4.
	Read(b Buffer, offset uint64, dst []byte) error
	// Lost returns nil while the device is there, as far as calls have seen, then
	// an error that wraps ErrLost.
	Lost() error
	// Live counts what was created and not yet released.
	Live() Live
	// Close waits for the queue and releases everything that is left.
	Close()
}

// Buffer is memory on a device.
type Buffer interface {
	// Size returns the bytes.
	Size() uint64
	// Release gives the memory back once running submissions are done with it.
	// A second Release, or one after the device's Close, does nothing.
	Release()
}

// Pipeline is a compiled compute shader with the layout of its bindings.
type Pipeline interface {
	// Release gives it back; as for Buffer.
	Release()
}

// BindingKind is how a shader uses a binding.
type BindingKind uint8

// The kinds of bindings.
const (
	Uniform   BindingKind = iota // var<uniform>
	ReadOnly                     // var<storage, read>
	ReadWrite                    // var<storage, read_write>
)

// PipelineDesc describes a compute pipeline.
type PipelineDesc struct {
	// Label names it in the library's messages.
	Label string
	// WGSL is the source.
	WGSL string
	// Entry is the compute entry point.
	Entry string
	// Bindings are group 0's, binding i at index i.
	Bindings []BindingKind
}

// Binding is a span of a buffer: Offset keeps the device's minimum alignment
// for the kind of binding, Size is a multiple of 4.
type Binding struct {
	Buffer       Buffer
	Offset, Size uint64
}

// Command is a dispatch when Pipeline is set, else a copy.
type Command struct {
	// Pipeline runs Groups workgroups over Bindings.
	Pipeline Pipeline
	Bindings []Binding
	Groups   [3]uint32
	// Src's first Size bytes from SrcOffset go to Dst at DstOffset; all are
	// multiples of 4. Src and Dst must differ.
	Src, Dst             Buffer
	SrcOffset, DstOffset uint64
	Size                 uint64
}

// Ticket stands for a submission.
type Ticket uint64

// Live counts objects that exist.
type Live struct {
	Buffers, Pipelines int
	// Groups are bind groups that are kept for the next dispatch with the same
	// pipeline and bindings.
	Groups int
	// Bytes is the sum of the buffers' sizes.
	Bytes uint64
}

// spinTime is how long a wait only yields between its looks at the queue: about
// what a short kernel takes. A sleep takes a millisecond where timers are coarse,
// however little it is asked for.
const spinTime = 200 * time.Microsecond

// pause passes some time between two looks at the queue in a wait that began at
// start: short kernels should not wait long, long ones should leave the processor
// alone, which a software driver needs itself.
func pause(start time.Time) {
	waited := time.Since(start)
	if waited < spinTime {
		runtime.Gosched()
		return
	}
	time.Sleep(min(waited/8, time.Millisecond))
}
