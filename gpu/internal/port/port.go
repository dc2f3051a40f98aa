// Package port is the part of WebGPU that attn uses, as one small interface: list adapters, open a device, create
// buffers and compute pipelines, submit dispatches and copies, wait, read back, release.
//
// Each library has a package below this one, which implements Library. Package loaded opens any webgpu.h library, such
// as Dawn's, when a native program runs. Each binary contains one of three others:
//
//   - native is github.com/rajveermalviya/go-webgpu/wgpu, through cgo, on linux/amd64,
//     darwin and windows/amd64;
//   - web is the browser's own, with GOOS=js;
//   - pure is github.com/gogpu/wgpu, pure Go, everywhere else, with CGO_ENABLED=0, and
//     with the build tag gogpu.
//
// The first and the last cannot be linked together: gogpu needs Go's own linker, and the static library of go-webgpu an
// external one. Package libraries chooses. This package has the rules that all share, and with the libraries' packages
// it hides their differences: callbacks that panic by default, maps that need polling, waits that give up, objects that
// must be released in order, a browser in which nothing may block.
//
// Every failure is an error that wraps one of the sentinels of this package.
package port

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gogpu/gputypes"
)

// Sentinel errors of the port.
var (
	// ErrNoAdapter reports that there is no WebGPU adapter: no driver, no device.
	ErrNoAdapter = errors.New("no WebGPU adapter")
	// ErrLost reports a device that was removed or makes no progress. Every later call on the device returns it.
	ErrLost = errors.New("WebGPU device lost")
	// ErrShader reports WGSL that does not compile, or that exceeds the device's workgroup size or workgroup memory.
	ErrShader = errors.New("shader not accepted")
	// ErrMemory reports a buffer for which the device has no memory.
	ErrMemory = errors.New("device out of memory")
	// ErrInvalid reports a call that violates WebGPU's rules.
	ErrInvalid = errors.New("WebGPU validation failed")
	// ErrClosed reports a device used after Close.
	ErrClosed = errors.New("WebGPU device closed")
	// ErrForeign reports a buffer of the program that is on another device.
	ErrForeign = errors.New("buffer is on another WebGPU device")
	// ErrReleased reports a buffer that the program has released.
	ErrReleased = errors.New("WebGPU buffer was released")
)

// stallLimit is the time after which a device with an unfinished submission counts as lost. Submissions take far less
// than a second, and the watchdogs of drivers act after 2 to 10 s, but a software driver on a busy machine takes
// longer. Only waits without a deadline last that long.
const stallLimit = 2 * time.Minute

// HangLimit is the time for which Close waits for a device that ends no submission.
const HangLimit = 20 * time.Second

// Device is an open device. Its methods are safe for concurrent use.
type Device interface {
	// Limits returns the limits of Open.
	Limits() gputypes.Limits
	// Features returns what kernels may use beyond WGSL's core. The device has all of its adapter's.
	Features() Features
	// CreateBuffer returns a zeroed buffer of size bytes, a positive multiple of 4. It
	// returns ErrMemory when there is no room and ErrInvalid above MaxBufferSize.
	CreateBuffer(size uint64, usage gputypes.BufferUsage) (Buffer, error)
	// Import returns a buffer that the program has made on this device, see Share. Its Release ends the use of the
	// buffer here and leaves it to the program. It returns ErrInvalid for a buffer without the usages of ImportUsage,
	// one that is mapped and one that is imported already, ErrForeign for one of another device and ErrReleased for one
	// that was released.
	Import(b any) (Buffer, error)
	// CreatePipeline compiles a compute shader. It returns ErrShader with the
	// compiler's message when the shader is rejected.
	CreatePipeline(desc PipelineDesc) (Pipeline, error)
	// Write copies data into a buffer with usage CopyDst before the next
	// submission starts. offset and len(data) are multiples of 4.
	Write(b Buffer, offset uint64, data []byte) error
	// Submit starts commands, which run in order, and returns at once. With timed it reads the
	// device's clock before and after them where there is one. There is none with gogpu.
	Submit(commands []Command, timed bool) (Ticket, error)
	// Took returns the time of an ended, timed submission by the device's clock.
	// ok is false with gogpu, on devices without timestamps, and for all but the last few
	// submissions.
	Took(t Ticket) (took time.Duration, ok bool, err error)
	// Wait waits for a submission and all earlier ones, which are expected to end at due, and reports whether they had
	// not ended yet. It returns the context's error, and ErrLost when the device is lost or makes no progress.
	Wait(ctx context.Context, t Ticket, due time.Time) (blocked bool, err error)
	// Hung reports whether submissions are running and none has ended for HangLimit.
	Hung() bool
	// Read copies from a buffer with usage MapRead that no running submission uses.
	// offset is a multiple of 8, and len(dst) of 4.
	Read(b Buffer, offset uint64, dst []byte) error
	// Lost returns an error that wraps ErrLost once a call has seen the loss of the device, else nil.
	Lost() error
	// Live counts the objects that were created and not released.
	Live() Live
	// Close waits for all submissions and releases all objects. Calls that run meanwhile
	// return ErrClosed. When the device hangs, Close releases nothing and returns ErrLost,
	// because the libraries wait for the submissions that use an object.
	Close() error
}

// Features are the optional features of a device that kernels can use. The zero value has none.
type Features struct {
	// F16 allows "enable f16;" and 16-bit storage.
	F16 bool
	// SubgroupMin and SubgroupMax bound the lanes of a subgroup. They are 0 where "enable subgroups;" is not allowed.
	SubgroupMin, SubgroupMax uint32
	// Matrices are the shapes of the adapter's subgroup matrices, of which kernels use no others.
	// It is empty where "enable chromium_experimental_subgroup_matrix;" is not allowed.
	Matrices []Matrix
	// Unreached means that Vulkan offers matrix units of the adapter, and no library at hand does.
	Unreached bool
}

// Matrix is a shape of subgroup matrices: an M×K matrix times a K×N matrix of the component type is added to an M×N
// matrix of the result type. WGSL writes the columns first: subgroup_matrix_left<Component, K, M>,
// subgroup_matrix_right<Component, N, K> and subgroup_matrix_result<Result, N, M>.
type Matrix struct {
	M, N, K           uint32
	Component, Result Component
}

// String returns the shape, such as 16x8x16 f16->f32.
func (m Matrix) String() string {
	return fmt.Sprintf("%dx%dx%d %s->%s", m.M, m.N, m.K, m.Component, m.Result)
}

// Component is the type of a matrix's elements, by its name in WGSL: f32, f16, u32, i32, u8 or i8.
type Component string

// The component types of kernels.
const (
	F32 Component = "f32"
	F16 Component = "f16"
)

// Buffer is memory on a device.
type Buffer interface {
	// Size returns the bytes.
	Size() uint64
	// Release frees the memory when the submissions that use it have ended. It does
	// nothing after an earlier Release or the device's Close.
	Release()
}

// ImportUsage are the usages that Import needs: kernels bind buffers, and calls copy from
// and to them where kernels cannot bind them.
const ImportUsage = gputypes.BufferUsageStorage | gputypes.BufferUsageCopySrc | gputypes.BufferUsageCopyDst

// Pipeline is a compiled compute shader with the layout of its bindings.
type Pipeline interface {
	// Release releases the pipeline, as for Buffer.
	Release()
}

// The kinds of bindings that kernels have.
const (
	Uniform   = gputypes.BufferBindingTypeUniform         // var<uniform>
	ReadOnly  = gputypes.BufferBindingTypeReadOnlyStorage // var<storage, read>
	ReadWrite = gputypes.BufferBindingTypeStorage         // var<storage, read_write>
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
	Bindings []gputypes.BufferBindingType
}

// Binding is a span of a buffer. Offset has the device's alignment for the kind of
// binding, and Size is a multiple of 4.
type Binding struct {
	Buffer       Buffer
	Offset, Size uint64
}

// Command is a dispatch if Pipeline is set, else a copy.
type Command struct {
	// Pipeline runs Groups workgroups over Bindings.
	Pipeline Pipeline
	Bindings []Binding
	Groups   [3]uint32
	// A copy copies Size bytes of Src from SrcOffset to Dst at DstOffset, all multiples of 4. Src and Dst must differ.
	Src, Dst             Buffer
	SrcOffset, DstOffset uint64
	Size                 uint64
}

// Ticket identifies a submission. Later submissions have higher tickets.
type Ticket uint64

// Live counts objects.
type Live struct {
	Buffers, Pipelines int
	// Groups are the bind groups that are kept for later dispatches with the same pipeline and bindings.
	Groups int
	// Bytes is the sum of the buffers' sizes.
	Bytes uint64
}
