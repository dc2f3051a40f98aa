// Package backend is the contract between the front that programs call (package
// kernels) and the devices that compute:
//
//	O = softmax(scale·Q·Kᵀ + bias) · V
//
// It holds what both sides must agree on and nothing that computes: tensors in
// a device's memory ([Tensor]), the canonical problem with its one visibility
// rule ([Problem], [Visibility], [Call]), the interface that a device implements
// ([Backend]) with small optional ones beside it ([Projector], [Rotator], [Merger],
// [Batcher], [Scorer], [Copier], [BatchCopier], [Warmer], [PeakMeter], [BandwidthMeter],
// [LaunchMeter], [CeilingMeter], [MemoryMeter]), the plan of a call ([Plan]), what calls tell while they run ([Trace]), the registry
// ([Register], [Open], [Devices]) and the errors.
//
// A program picks its backends by importing them and opens one by name:
//
//	import (
//		"github.com/seed90331342/attn/backend"
//		_ "github.com/seed90331342/attn/cpu"
//		_ "github.com/seed90331342/attn/gpu"
//	)
//
//	be, err := backend.Open("auto")
//
// and then calls package kernels, which validates. A Backend's own methods
// expect operands that kernels has checked; they check ownership, release and
// overlap themselves ([Pinned.Pin]), as these can change at any time.
package backend

import (
	"context"
	"time"
)

// Backend computes attention on one device. Its methods are safe for concurrent
// use. Every method that takes a context returns the context's error soon after
// it is cancelled, with unspecified contents in the outputs. Results depend on
// the inputs alone: the same call gives the same bits, whatever else runs, and
// a row's result does not depend on the other rows and batches around it.
//
// All operands must be in this backend's memory (ErrDevice), not released
// (ErrReleased), and outputs must not overlap anything else (ErrOverlap).
type Backend interface {
	// Info describes the device.
	Info() Info

	// Alloc returns a contiguous tensor with unspecified contents, for the
	// caller to Release. ErrMemory when there is no room.
	Alloc(ctx context.Context, dtype DType, shape Shape) (Tensor, error)

	// Upload returns host's elements as a tensor in this backend's memory, for
	// the caller to Release. The result has host's shape and may have other
	// strides; an axis of stride zero stays one. A backend that computes in
	// host memory returns an alias, not a copy, and so may one whose device
	// memory the tensor does not fit: leave host as it is until the result is
	// released. ErrDevice when the argument is not in host memory, ErrMemory
	// when there is no room.
	Upload(ctx context.Context, host Tensor) (Tensor, error)

	// Download copies src, in this backend's memory, to host, in host memory:
	// same shape (ErrShape) and dtype (ErrDType), any strides.
	Download(ctx context.Context, host, src Tensor) error

	// QK computes s = q·kᵀ, unscaled, for each batch and head:
	//
	//	s [B, H, Sq, Sk] F32    q [B, H, Sq, D]    k [B, Hkv, Sk, D]
	QK(ctx context.Context, s, q, k Tensor) error

	// Softmax replaces each row of s by softmax of the row, with scale, softcap,
	// bias and what is hidden as in [Problem], and writes the rows'
	// log-sum-exp to lse unless that is the zero Tensor:
	//
	//	s [B, H, Sq, Sk] F32    lse [B, H, Sq, 1] F32
	Softmax(ctx context.Context, s, lse Tensor, p *Problem) error

	// PV computes o = w·v for each batch and head:
	//
	//	o [B, H, Sq, Dv]    w [B, H, Sq, Sk] F32    v [B, Hkv, Sk, Dv]
	//
	// A weight of exactly 0 hides its value: NaN and Inf in v do not come
	// through it. (Softmax gives 0 to what is hidden.)
	PV(ctx context.Context, o, w, v Tensor) error

	// Attention computes c.O, and c.LSE when wanted, and returns when they are
	// there. It goes over the keys once, with memory O(Sq + Sk) beside the
	// operands, and does not keep c. ErrUnsupported names what it cannot do;
	// an Interrupted holds what a call that streams had finished.
	Attention(ctx context.Context, c *Call) error

	// Plan says how Attention would run c, without running it: the operands'
	// shapes, strides and types count, they need no memory (see [Meta]).
	Plan(ctx context.Context, c *Call) (Plan, error)

	// Close waits for running calls, then frees the device. Tensors still held
	// become unusable; later calls return ErrClosed. A second Close does nothing.
	Close() error
}

// Projector is implemented by backends that compute linear layers, so that what
// leads to attention and away from it stays on the device.
type Projector interface {
	// Project computes y = x·w + bias for each batch and head:
	//
	//	y [B, H, S, N]    x [B, H, S, M]    w [B, H, M, N]    bias [1, 1, 1, N] or none
	//
	// All F32, F16 or BF16 each on its own; w is usually broadcast by strides
	// of zero. The zero Tensor as bias means none. NaN in w or x comes out.
	Project(ctx context.Context, y, x, w, bias Tensor) error
}

// Merger is implemented by backends that combine partial results in place.
type Merger interface {
	// Merge turns (o, lse), the result over one set of keys, into the result
	// over its union with a disjoint set whose result is (po, plse):
	//
	//	m = max(lse, plse)    a = exp(lse-m)    b = exp(plse-m)
	//	o = (a·o + b·po)/(a+b)    lse = m + log(a+b)
	//
	//	o, po [B, H, Sq, Dv] F32    lse, plse [B, H, Sq, 1] F32
	//
	// A side whose lse is -Inf leaves the other as it is (Milakov & Gimelshein
	// 2018; the merge of split keys in Dao 2023, Flash-Decoding).
	Merge(ctx context.Context, o, lse, po, plse Tensor) error
}

// PeakMeter is implemented by backends that can measure their own ceiling.
type PeakMeter interface {
	// PeakFLOPS measures how many float32 operations a second the device does
	// in independent fused multiply-adds (2 each) held in registers, with all
	// the threads that the backend uses. It takes some tens of milliseconds.
	PeakFLOPS(ctx context.Context) (float64, error)
}

// BandwidthMeter is implemented by backends that can measure how fast they read:
// the ceiling of calls that compute little for each byte, as decoding does.
type BandwidthMeter interface {
	// ReadBandwidth measures how many bytes a second the device reads of the
	// operands, from the first element of each to its last, with all the
	// threads that the backend uses, over and over for some tens of
	// milliseconds. So operands that fit a cache are read from there and larger
	// ones from memory, as by a call that is repeated. It is 0 when they are too
	// few bytes to tell. It takes at most 8 operands; errors are those of a call
	// that reads them.
	ReadBandwidth(ctx context.Context, operands ...Tensor) (float64, error)
}

// LaunchMeter is implemented by backends that hand work to a device with a queue:
// the ceiling of calls that compute and read little.
type LaunchMeter interface {
	// LaunchTime measures how long it takes to hand the device a kernel of one
	// workgroup that does next to nothing and to learn of its end: the median of
	// some tens of times.
	LaunchTime(ctx context.Context) (time.Duration, error)
}

// MemoryMeter is implemented by backends whose device has memory of its own.
type MemoryMeter interface {
	// PeakMemory returns the most bytes of device memory that tensors and calls held
	// at once since it was called last.
	PeakMemory() int64
}

// Ceiling is a rate that a device reaches at most.
type Ceiling struct {
	// Name says what moves: "copy", "upload".
	Name string `json:"name"`
	// BytesPerSecond is the best of a few measurements.
	BytesPerSecond float64 `json:"bytes_per_second"`
}

// CeilingMeter is implemented by backends with ceilings beside those of
// [PeakMeter] and [BandwidthMeter], which explain a figure but bind no call alone.
type CeilingMeter interface {
	// Ceilings measures each of them once, always the same ones in the same
	// order. It takes some hundreds of milliseconds.
	Ceilings(ctx context.Context) ([]Ceiling, error)
}

// Warmer is implemented by backends that compile code when a call first needs it,
// which takes longer than most calls.
type Warmer interface {
	// Warmup compiles what Attention needs for c, or with staged what QK, Softmax
	// and PV need for the same operands, and runs none of it. Operands need no
	// memory (see [Meta]). Other sequence lengths usually need the same code. The
	// errors are those of the calls.
	Warmup(ctx context.Context, c *Call, staged bool) error
}
