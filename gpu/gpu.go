// Package gpu is the WebGPU backend. It computes
//
//	O = softmax(scale·Q·Kᵀ + bias) · V
//
// with the WGSL of package shaders, on any adapter that WebGPU reaches: Vulkan (also in software),
// Metal, DX12, and that of a browser with GOOS=js. Importing it registers the family "gpu":
//
//	import _ "github.com/seed90331342/attn/gpu"
//
//	be, err := backend.Open("gpu")        // the best adapter
//	be, err := backend.Open("gpu:1")      // by number, as backend.Devices lists
//	be, err := backend.Open("gpu:nvidia") // by a part of its name
//
// Calls of any length run, in submissions of a bounded time (Options.Budget). Between them a call checks its context
// and reports progress. A tensor that exceeds the adapter's largest buffer takes several buffers. A tensor for which
// the device has no room stays in host memory, and calls stream windows of it. No cut changes a bit of the results.
//
// A call returns when its last submission is made. The first call of each kernel, calls that stream, and traced calls
// wait for their results. At most 512 submissions of all calls, and at most ten budgets of expected work, are on the
// device; a call that exceeds that waits for the oldest submission.
//
// Every wait ends with the context of its call, but two things cannot be interrupted: a compilation, which continues
// for later calls, and a call of the WebGPU library. Mesa's software driver blocks in Submit while an earlier
// submission runs or compiles. There, calls with a deadline first wait for those submissions, and a call that is
// cancelled without a deadline may return one submission late.
//
// Attention runs on a register-tiled kernel with several variants, which compute the same bits at different speeds. On
// a GPU, the first call of a class of shapes measures them and stores the choice in a file for later programs;
// Options.Tune or ATTN_GPU_TUNE=off disables that. A plainer kernel, which rounds differently, runs where no tile of 32
// to 128 keys fits the limits. Plan reports the kernel and the reason.
//
// Keys and values may be q8, q4, f8 or in pages, with the bits of the same numbers in one float32 tensor.
// Values of more than 256 columns take one pass over the keys for each 256 of them; q8, q4
// and f8 values have at most 256, because their rows are whole.
//
// WebGPU guarantees eight storage buffers a shader stage. The few calls that need more, which
// docs/gpu.md lists, return backend.ErrUnsupported where the device binds fewer.
//
// Options.Shared takes a device that the program has opened, but not a page's: see [Shared].
package gpu

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/adapter"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/gpu/internal/port/libraries"
	"github.com/seed90331342/attn/gpu/internal/queue"
)

// Provider names the WebGPU library that this binary was built with, and its version.
const Provider = libraries.Provider

// Options change how a device is opened. The zero value takes everything that
// the adapter offers.
type Options struct {
	// Shared, unless nil, is a device of the program, on which the backend computes. The
	// selector of Open is then empty, and Limits lower those of the device.
	Shared *Shared
	// Library is a webgpu.h library to open at run time next to the linked one, by its path: Dawn's has 16-bit floats
	// and matrix units. "" is that of the environment variable ATTN_WEBGPU, or else one that the system's loader finds;
	// "off" is none. Its adapters come first if it is named, and if it is found and has a hardware GPU. Open returns an
	// error for a named library that cannot be used.
	Library string
	// Limits replace the adapter's where they are not zero: maxima lower them, minimal alignments raise them. Tests use
	// them to reach every branch that cuts work. Those of buffers, bindings, workgroups and alignment have an effect.
	Limits gputypes.Limits
	// Budget is how long a cancelled call may keep the device busy; 0 means 200 ms. Two submissions of a call are on
	// the device at a time, each sized to half of it by the measured speed of its kernel. One tile of one workgroup
	// cannot be cut and may take longer.
	Budget time.Duration
	// MaxWork also bounds the floating point operations of one submission; 0 is no
	// bound. Tests set it to cut work the same way on any machine.
	MaxWork float64
	// PoolBytes bounds the device memory that is kept for reuse after its
	// release; 0 means 64 MiB, of a discrete GPU 256 MiB, and a negative value keeps none.
	PoolBytes int64
	// Tune selects how a variant of the prefill kernel is chosen. The zero value
	// measures the variants on first use on a GPU, once on a machine.
	Tune Tuning
	// TuneBudget is the approximate time of measuring a class of shapes; 0 means 3 s.
	TuneBudget time.Duration
	// TuneFile stores what is measured; "" means attn/tuning.json in the user's cache
	// folder. Plan.Why mentions a file that could not be used.
	TuneFile string
	// MemoryBytes bounds the device memory of tensors, the pool and streaming; 0 is no bound, unless the environment
	// variable ATTN_GPU_MEMORY sets one, such as 256MiB or 4GiB. Tensors without room, in this bound or on the device,
	// stay in host memory, and calls stream from and to it.
	MemoryBytes int64

	// decodeRows, unless 0, replaces the constant decodeRows in tests, and exp2, unless nil, meter.Exp2.
	decodeRows int
	exp2       func(context.Context, port.Device) (ulp float64, err error)
}

func init() { backend.Register("gpu", Driver{}) }

// Driver opens WebGPU adapters as backends. The zero value is registered as
// "gpu"; register one with Options to change how backend.Open opens them.
type Driver struct {
	Options Options
}

// Devices lists the adapters: number, name, type, provider, driver, features and limits. The features
// also say where matrix units need another library. backend.ErrNoDevice when there are none.
func (d Driver) Devices() ([]backend.Info, error) {
	adapters, err := libraries.Adapters(d.Options.Library)
	if err != nil {
		return nil, queue.Translate("gpu", err)
	}
	known := make([]port.Info, len(adapters))
	for i, a := range adapters {
		known[i] = a.Info()
	}
	libraries.Unreached(known)
	infos := make([]backend.Info, len(adapters))
	for i, a := range adapters {
		infos[i] = adapter.Describe("gpu:"+strconv.Itoa(i), known[i], d.Options.lower(a.Limits()))
		a.Release()
	}
	return infos, nil
}

// Open opens an adapter by number or by a part of its name; "" selects the best: discrete before integrated before
// virtual before software. backend.ErrNoDevice when no adapter matches.
func (d Driver) Open(selector string) (backend.Backend, error) {
	b, err := Open(selector, d.Options)
	if err != nil {
		return nil, err // not a nil *Backend
	}
	return b, nil
}

// Open opens an adapter as [Driver.Open] does, with options.
func Open(selector string, opt Options) (*Backend, error) {
	if opt.MemoryBytes == 0 {
		var err error
		if opt.MemoryBytes, err = memoryFromEnv(); err != nil {
			return nil, err
		}
	}
	if opt.Shared != nil {
		return openShared(selector, opt)
	}
	adapters, err := libraries.Adapters(opt.Library)
	if err != nil {
		return nil, queue.Translate("gpu", err)
	}
	defer func() {
		for _, a := range adapters {
			a.Release()
		}
	}()
	i, err := adapter.Pick(selector, adapters)
	if err != nil {
		return nil, err
	}
	a := adapters[i]
	name, limits := "gpu:"+strconv.Itoa(i), opt.lower(a.Limits())
	dev, err := a.Open(limits)
	if err != nil {
		return nil, queue.Translate(name, err)
	}
	return newBackend(dev, adapter.Describe(name, a.Info(), limits), opt)
}

// lower returns l with the limits of o.
func (o Options) lower(l gputypes.Limits) gputypes.Limits {
	port.CopyFields(&l, &o.Limits)
	return l
}

// Shared is a device that a program has opened with the WebGPU library of this build (see [Provider]): an adapter and
// the device that it returned. [SharedAdapter] and [SharedDevice] are the library's own types. A program with objects
// of the other library does not compile. [Backend.Wrap] makes tensors of the program's buffers, without a copy.
//
//	be, err := gpu.Open("", gpu.Options{Shared: &gpu.Shared{Adapter: adapter, Device: device}})
//	x, err := be.Wrap(buffer, backend.F32, backend.Shape{1, 8, 128, 64})
//	dev := kernels.NewDevice(be)
//
// # Ownership
//
// The program owns the adapter, the device, its queue and the buffers that it made. The backend never releases or
// destroys them, nor does it open another device when that one is lost. Close waits for the device and releases what
// the backend has made on it; the program then releases the device. A program that releases the device first gets
// ErrDeviceLost from gogpu/wgpu, and Close still works; go-webgpu keeps the device until Close.
//
// # Order
//
// A WebGPU device has one queue. A call sees the results of everything that the program submitted before the call, and
// what the program submits after the call has returned sees the results of the call; neither side needs to wait. During
// a call the program must not submit work that writes its operands or uses its outputs.
//
// # Goroutines
//
// Other goroutines may use the device and its queue during calls. The error scopes of go-webgpu
// belong to the device: an error of one goroutine may be returned to another. Its polls also run
// the program's callbacks, in the goroutine of a call; callbacks must not call the backend.
//
// # Errors
//
// Errors of the backend's own calls are returned by its methods and do not reach the program's handlers. A loss is
// reported to the program's handler as usual; methods return ErrDeviceLost, at the latest when they submit or wait. A
// call that a loss interrupted cannot be resumed on that device, and its wrapped buffers are lost. go-webgpu ends the
// process when a device that was opened with a nil descriptor is lost.
//
// # Limits and features
//
// The backend keeps the limits with which the device was opened, and errors name the limit that a call exceeds. With
// WebGPU's default limits these are calls that need more than 8 storage buffers, see the package's comment. Kernels
// have times ([backend.Trace]) where the device was opened with timestamp queries, but not with gogpu.
type Shared struct {
	Adapter *SharedAdapter
	Device  *SharedDevice
}

// What a program shares are objects of the WebGPU library of its build: the Adapter, Device and Buffer of
// github.com/rajveermalviya/go-webgpu/wgpu, or of github.com/gogpu/wgpu without cgo and with the tag gogpu. With
// GOOS=js they are js.Value, and Open returns an error: a page's own objects cannot be shared yet.
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
	lib, most, info, err := libraries.Share(opt.Shared.Adapter, opt.Shared.Device)
	limits := most
	limits.MaxComputeInvocationsPerWorkgroup = min(most.MaxComputeInvocationsPerWorkgroup, most.MaxComputeWorkgroupSizeX)
	limits = opt.lower(limits)
	var dev port.Device
	if err == nil {
		dev, err = port.Share(lib, limits, most)
	}
	if err != nil {
		return nil, fmt.Errorf("Options.Shared: %w", queue.Translate(name, err))
	}
	return newBackend(dev, adapter.Describe(name, info, limits), opt)
}

// Wrap returns a buffer of the program, on the device of Options.Shared, as a contiguous
// tensor at its start. A part of a buffer is a view of a tensor of all of it. Bool, Q8,
// Q4, F8 and I32 are stored as [backend.Bool], [backend.Q8], [backend.Q4], [backend.F8] and [backend.I32] describe.
//
// The buffer needs the usages Storage, CopySrc and CopyDst and a size that is a multiple of
// 16 bytes, because kernels read 16 bytes at a time. It must not be mapped, and is wrapped
// once at a time. It counts neither to Options.MemoryBytes nor to PeakMemory.
//
// Release of the tensor ends its use here; the buffer and its contents stay with the program. A program that releases
// the buffer first gets ErrReleased from later calls with gogpu/wgpu; go-webgpu keeps the buffer until the tensor is
// released. Running submissions keep it in both. With go-webgpu the program must not destroy or map a wrapped buffer:
// its library does not report that and panics when such a buffer is submitted.
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
