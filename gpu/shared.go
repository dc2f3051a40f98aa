package gpu

import (
	"context"
	"fmt"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/adapter"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/port/libraries"
	"github.com/seed90331342/attn/gpu/internal/queue"
)

// Shared is a device that a program has opened with the WebGPU library of this build (see
// [Provider]): an adapter and the device that it returned. [SharedAdapter] and [SharedDevice]
// are the library's own types. A program with objects of the other library does not compile.
// [Backend.Wrap] makes tensors of the program's buffers, without a copy.
//
//	be, err := gpu.Open("", gpu.Options{Shared: &gpu.Shared{Adapter: adapter, Device: device}})
//	x, err := be.Wrap(buffer, backend.F32, backend.Shape{1, 8, 128, 64})
//	dev := kernels.NewDevice(be)
//
// # Ownership
//
// The program owns the adapter, the device, its queue and the buffers that it made. The
// backend never releases or destroys them, nor does it open another device when that one is
// lost. Close waits for the device and releases what the backend has made on it; the program
// then releases the device. A program that releases the device first gets ErrDeviceLost from
// gogpu/wgpu, and Close still works; go-webgpu keeps the device until Close.
//
// # Order
//
// A WebGPU device has one queue. A call sees the results of everything that the program submitted
// before the call, and what the program submits after the call has returned sees the results of
// the call; neither side needs to wait. During a call the program must not submit work that writes
// its operands or uses its outputs.
//
// # Goroutines
//
// Other goroutines may use the device and its queue during calls. The error scopes of go-webgpu
// belong to the device: an error of one goroutine may be returned to another. Its polls also run
// the program's callbacks, in the goroutine of a call; callbacks must not call the backend.
//
// # Errors
//
// Errors of the backend's own calls are returned by its methods and do not reach the
// program's handlers. A loss is reported to the program's handler as usual; methods return
// ErrDeviceLost, at the latest when they submit or wait. A call that a loss interrupted
// cannot be resumed on that device, and its wrapped buffers are lost. go-webgpu ends the
// process when a device that was opened with a nil descriptor is lost.
//
// # Limits and features
//
// The backend keeps the limits with which the device was opened, and errors name the limit
// that a call exceeds. With WebGPU's default limits these are calls that need more than 8
// storage buffers, see the package's comment. Kernels have times ([backend.Trace]) where the
// device was opened with timestamp queries, but not with gogpu.
type Shared struct {
	Adapter *SharedAdapter
	Device  *SharedDevice
}

// What a program shares are objects of the WebGPU library of its build: the Adapter, Device and
// Buffer of github.com/rajveermalviya/go-webgpu/wgpu, or of github.com/gogpu/wgpu without cgo and
// with the tag gogpu. With GOOS=js they are js.Value, and Open returns an error: a page's own objects
// cannot be shared yet.
type (
	SharedAdapter = libraries.Adapter
	SharedDevice  = libraries.Device
	SharedBuffer  = libraries.Buffer // see [Backend.Wrap]
)

// openShared opens a backend on the device of opt.Shared.
func openShared(selector string, opt Options) (*Backend, error) {
	const name = "gpu:shared"
	if selector != "" {
		return nil, fmt.Errorf("gpu:%s: Options.Shared is the device to open, the selector must be empty: %w", selector, backend.ErrOption)
	}
	if opt.Shared.Adapter == nil || opt.Shared.Device == nil {
		return nil, fmt.Errorf("Options.Shared has no Adapter or no Device, set both: %w", backend.ErrOption)
	}
	dev, info, err := libraries.Share(opt.Shared.Adapter, opt.Shared.Device, func(l gputypes.Limits) gputypes.Limits {
		l.MaxComputeInvocationsPerWorkgroup = min(l.MaxComputeInvocationsPerWorkgroup, l.MaxComputeWorkgroupSizeX)
		return opt.lower(l)
	})
	if err != nil {
		return nil, fmt.Errorf("Options.Shared: %w", queue.Translate(name, err))
	}
	return newBackend(dev, adapter.Describe(name, info, dev.Limits()), opt)
}

// Wrap returns a buffer of the program, on the device of Options.Shared, as a contiguous
// tensor at its start. A part of a buffer is a view of a tensor of all of it. Bool, Q8,
// Q4, F8 and I32 are stored as [backend.Bool], [backend.Q8], [backend.Q4], [backend.F8] and [backend.I32] describe.
//
// The buffer needs the usages Storage, CopySrc and CopyDst and a size that is a multiple of
// 16 bytes, because kernels read 16 bytes at a time. It must not be mapped, and is wrapped
// once at a time. It counts neither to Options.MemoryBytes nor to PeakMemory.
//
// Release of the tensor ends its use here; the buffer and its contents stay with the
// program. A program that releases the buffer first gets ErrReleased from later calls with
// gogpu/wgpu; go-webgpu keeps the buffer until the tensor is released. Running submissions
// keep it in both. With go-webgpu the program must not destroy or map a wrapped buffer: its
// library does not report that and panics when such a buffer is submitted.
//
// Errors: ErrOption for a nil buffer, ErrDevice for one of another device, ErrReleased,
// ErrUnsupported for one that lacks a usage, is mapped, is wrapped already or has another
// size, ErrDType, and ErrShape for a shape that exceeds the buffer.
func (b *Backend) Wrap(buffer *SharedBuffer, dtype backend.DType, shape backend.Shape) (backend.Tensor, error) {
	return resultWithin(context.Background(), b, "wrap", func() (t backend.Tensor, err error) {
		if buffer == nil {
			return t, fmt.Errorf("the buffer is nil: %w", backend.ErrOption)
		}
		buf, err := b.dev.Port.Import(buffer)
		if err != nil {
			return t, queue.Translate(b.info.Name, err)
		}
		size := buf.Size()
		if size%cut.GranuleBytes != 0 || size == 0 {
			buf.Release()
			return t, fmt.Errorf("the buffer has %d bytes, kernels read %d at a time: create it with %d: %w",
				size, cut.GranuleBytes, cut.AlignUp(max(int(size), 1), cut.GranuleBytes), backend.ErrUnsupported)
		}
		s := &cut.Store{Parts: []cut.Buffer{buf}, Part: size}
		free := func() {
			b.dev.Forget(s)
			buf.Release()
		}
		if t, err = b.tensorOn(s, int64(size), free, dtype, shape); err != nil {
			return t, err
		}
		if err = t.CheckDType("the buffer", backend.F32, backend.F16, backend.BF16, backend.Bool, backend.Q8, backend.Q4, backend.F8, backend.I32); err != nil {
			t.Release()
			return backend.Tensor{}, err
		}
		return t, nil
	})
}
