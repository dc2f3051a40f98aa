// Package gpu is the WebGPU backend. It computes
//
//	O = softmax(scale·Q·Kᵀ + bias) · V
//
// with the WGSL of package shaders, on any adapter that WebGPU reaches: Vulkan,
// Metal, DX12, and Vulkan in software on a machine without a GPU. Importing it
// registers the family "gpu":
//
//	import _ "github.com/seed90331342/attn/gpu"
//
//	be, err := backend.Open("gpu")        // the best adapter
//	be, err := backend.Open("gpu:1")      // by number, as backend.Devices lists
//	be, err := backend.Open("gpu:nvidia") // by a part of its name
//
// Calls of any length run. Bindings are windows of tensors, dispatches respect the limits
// on workgroups, keys come in pieces that continue from each other's state, and a
// submission takes a bounded time (Options.Budget). Between submissions a call checks its
// context and reports progress. No cut changes a bit of the results.
//
// A call returns when its last submission is made. Up to 512 submissions of all calls, and
// those that are expected to take ten budgets, are on the device at a time: a call that
// exceeds that waits for the oldest. These calls wait for their own results: those that
// stream or report progress or kernel times, and the first with each kernel, whose speed is
// not known. Memory that is released while submissions use it is used again in their order;
// the device holds at most 64 MiB of it in addition to the pool.
//
// Waits for the device, for its memory and for a compilation end with the context of their
// call. Two things cannot be interrupted: a compilation, which goes on for later calls, and a
// call of the WebGPU library. Submit of Mesa's software driver blocks while an earlier submission
// runs or compiles. There, calls with a deadline wait for those submissions before their own. Near
// the deadline a submission takes at most an eighth of the time left, but 1 ms or one tile may
// pass. A call that is cancelled without a deadline may return one submission late.
//
// Tensors larger than the adapter's largest buffer take several buffers. Tensors for
// which the device has no room stay in host memory: calls stream windows of them, with
// the same results in every bit.
//
// Fused attention runs on a register-tiled kernel with several variants, which compute
// the same bits at different speeds. On a GPU, the first call of a class of shapes
// measures them and stores the choice in a file for later programs; Options.Tune or
// ATTN_GPU_TUNE=off disable that. Where no tile of 32 to 128 keys fits the limits, a
// plainer kernel with tiles of 32 keys runs, which rounds differently. Plan reports the
// kernel and the reason.
//
// Keys and values may be q8 or in pages, with the bits of the same numbers in one float32
// tensor. Kernels look pages up in a table. Where a pool is in host memory or larger than
// a binding, or the device has no ninth storage buffer for the table, the pages of a step
// are collected before it.
//
// Values of more than 256 columns take one pass over the keys for each 256 of them; q8
// values have at most 256, because a row has one scale.
//
// Options.Shared takes a device that the program has opened, and [Backend.Wrap] makes tensors
// of the program's buffers, without a copy: see [Shared].
//
// WebGPU guarantees eight storage buffers a shader stage. Calls that combine a mask with a block
// mask, or a bias with a relative bias, need ten if they have more than 16 query rows a key
// head or compute gradients: where the device binds fewer they return backend.ErrUnsupported.
// Pages that begin in the middle of a word need one more than other keys: nine, or eleven.
package gpu

import (
	"context"
	"time"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/gpu/internal/port"
)

// Provider names the WebGPU library that this binary was built with, and its
// version.
const Provider = port.Provider

// Options change how a device is opened. The zero value takes everything that
// the adapter offers.
type Options struct {
	// Shared, unless nil, is a device of the program, on which the backend computes. The
	// selector of Open is then empty, and Limits lower those of the device.
	Shared *Shared
	// Limits replace the adapter's where they are not zero: maxima lower them, minimal
	// alignments raise them. Tests use them to reach every branch that cuts work. These
	// have an effect: MaxBufferSize, MaxStorageBufferBindingSize,
	// MaxStorageBuffersPerShaderStage, MaxComputeWorkgroupStorageSize,
	// MaxComputeInvocationsPerWorkgroup, MaxComputeWorkgroupsPerDimension,
	// MinStorageBufferOffsetAlignment and MinUniformBufferOffsetAlignment.
	Limits gputypes.Limits
	// Budget is how long a cancelled call may keep the device busy; 0 means 200 ms.
	// Two submissions of a call are on the device at a time, so each is sized to half of
	// it, by the speed of its kernel as measured while it runs. One tile of one workgroup
	// cannot be cut and may take longer. Calls that have returned may be queued before
	// them.
	Budget time.Duration
	// MaxWork also bounds the floating point operations of one submission; 0 is no
	// bound. Tests set it to cut work the same way on any machine.
	MaxWork float64
	// PoolBytes bounds the device memory that is kept for reuse after its
	// release; 0 means 64 MiB, a negative value keeps none.
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
