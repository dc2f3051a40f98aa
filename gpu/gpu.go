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
// Calls of any length run, in submissions of a bounded time (Options.Budget). Between them a call
// checks its context and reports progress. A tensor that exceeds the adapter's largest buffer
// takes several buffers. A tensor for which the device has no room stays in host memory, and
// calls stream windows of it. No cut changes a bit of the results.
//
// A call returns when its last submission is made. The first call of each kernel, calls that
// stream, and traced calls wait for their results. At most 512 submissions of all calls, and at
// most ten budgets of expected work, are on the device; a call that exceeds that waits for the
// oldest submission.
//
// Every wait ends with the context of its call, but two things cannot be interrupted: a
// compilation, which continues for later calls, and a call of the WebGPU library. Mesa's software
// driver blocks in Submit while an earlier submission runs or compiles. There, calls with a
// deadline first wait for those submissions, and a call that is cancelled without a deadline may
// return one submission late.
//
// Attention runs on a register-tiled kernel with several variants, which compute the same bits
// at different speeds. On a GPU, the first call of a class of shapes measures them and stores the
// choice in a file for later programs; Options.Tune or ATTN_GPU_TUNE=off disables that. A plainer
// kernel, which rounds differently, runs where no tile of 32 to 128 keys fits the limits. Plan
// reports the kernel and the reason.
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
	"cmp"
	"context"
	"strconv"
	"time"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/adapter"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/gpu/internal/port/libraries"
	"github.com/seed90331342/attn/gpu/internal/queue"
)

// Provider names the WebGPU library that this binary was built with, and its
// version.
const Provider = libraries.Provider

// Options change how a device is opened. The zero value takes everything that
// the adapter offers.
type Options struct {
	// Shared, unless nil, is a device of the program, on which the backend computes. The
	// selector of Open is then empty, and Limits lower those of the device.
	Shared *Shared
	// Library is a webgpu.h library to open at run time next to the linked one, by its path: Dawn's
	// has 16-bit floats and matrix units. "" is that of the environment variable ATTN_WEBGPU, or
	// else one that the system's loader finds; "off" is none. Its adapters come first if it is
	// named, and if it is found and has a hardware GPU. Open returns an error for a named library
	// that cannot be used.
	Library string
	// Limits replace the adapter's where they are not zero: maxima lower them, minimal
	// alignments raise them. Tests use them to reach every branch that cuts work. Those of
	// buffers, bindings, workgroups and alignment have an effect.
	Limits gputypes.Limits
	// Budget is how long a cancelled call may keep the device busy; 0 means 200 ms.
	// Two submissions of a call are on the device at a time, each sized to half of it by the
	// measured speed of its kernel. One tile of one workgroup cannot be cut and may take
	// longer.
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
	// MemoryBytes bounds the device memory of tensors, the pool and streaming; 0 is no
	// bound, unless the environment variable ATTN_GPU_MEMORY sets one, such as 256MiB or
	// 4GiB. Tensors without room, in this bound or on the device, stay in host memory,
	// and calls stream from and to it.
	MemoryBytes int64

	// decodeRows, unless 0, replaces the constant decodeRows in tests, and exp2, unless
	// nil, meter.Exp2.
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

// Open opens an adapter by number or by a part of its name; "" selects the best:
// discrete before integrated before virtual before software. backend.ErrNoDevice when no
// adapter matches.
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
	m := o.Limits
	l.MaxBufferSize = cmp.Or(m.MaxBufferSize, l.MaxBufferSize)
	l.MaxStorageBufferBindingSize = cmp.Or(m.MaxStorageBufferBindingSize, l.MaxStorageBufferBindingSize)
	l.MaxStorageBuffersPerShaderStage = cmp.Or(m.MaxStorageBuffersPerShaderStage, l.MaxStorageBuffersPerShaderStage)
	l.MaxComputeWorkgroupStorageSize = cmp.Or(m.MaxComputeWorkgroupStorageSize, l.MaxComputeWorkgroupStorageSize)
	l.MaxComputeInvocationsPerWorkgroup = cmp.Or(m.MaxComputeInvocationsPerWorkgroup, l.MaxComputeInvocationsPerWorkgroup)
	l.MaxComputeWorkgroupsPerDimension = cmp.Or(m.MaxComputeWorkgroupsPerDimension, l.MaxComputeWorkgroupsPerDimension)
	l.MinStorageBufferOffsetAlignment = cmp.Or(m.MinStorageBufferOffsetAlignment, l.MinStorageBufferOffsetAlignment)
	l.MinUniformBufferOffsetAlignment = cmp.Or(m.MinUniformBufferOffsetAlignment, l.MinUniformBufferOffsetAlignment)
	return l
}
