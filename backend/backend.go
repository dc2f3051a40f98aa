// Package backend is the contract between the front that programs call (package kernels) and the devices that compute
//
//	O = softmax(scale·Q·Kᵀ + bias) · V
//
// It defines tensors in device memory ([Tensor]), the canonical problem with its one visibility rule ([Problem],
// [Visibility], [Call]), the interface that a device implements ([Backend]), the plan of a call ([Plan]), the registry
// ([Register], [Open], [Devices]) and the errors. It computes nothing.
//
// Optional abilities are small interfaces, found by type assertion: [Projector], [Rotator],
// [Normaliser], [Gater], [LinearAttender], [Convolver], [Indexer], [Merger], [Scorer], [Copier] and [Warmer]
// compute; [Meter], [MatrixMeter] and [QueueMeter] measure. A [Trace] in a context observes calls.
//
// A program chooses its backends by importing them, and opens one with Open of package kernels.
//
// The methods of a Backend expect operands that package kernels has validated. They check
// ownership, release and overlap, which can change at any time ([Pinned.Pin]).
package backend

import (
	"context"
	"time"
)

// Backend computes attention on one device. Its methods are safe for concurrent use. Methods that take a context return
// its error soon after it is cancelled; the contents of the outputs are then unspecified.
//
// A device with a queue may return from a call when it is submitted. Calls that use its result follow it on the device,
// and Download and Wait wait for it. An error that occurs after a call has returned is returned, with the name of the
// call, by the first call that uses the result, or by Wait.
//
// Results depend on the inputs alone: the same call yields the same bits, whatever else runs, and the result of a row does
// not depend on other rows and batches.
//
// All operands must be in this backend's memory or in the host's (ErrDevice) and not released (ErrReleased),
// and outputs must not overlap anything else (ErrOverlap). A backend that does not compute in host memory streams
// operands from and to it, and its plans name them.
type Backend interface {
	// Info describes the device.
	Info() Info

	// Alloc returns a contiguous tensor with unspecified contents, for the caller to
	// Release. It returns ErrMemory when there is not enough memory.
	Alloc(ctx context.Context, dtype DType, shape Shape) (Tensor, error)

	// Upload returns the elements of host as a tensor in this backend's memory, for the caller to Release. The result
	// has host's shape and may have other strides, but an axis of stride zero keeps it. A backend that computes in host
	// memory returns an alias, and so may one whose device memory cannot hold the tensor: host must not change until
	// the result is released. It returns ErrDevice when host is not in host memory and ErrMemory when there is not
	// enough memory.
	Upload(ctx context.Context, host Tensor) (Tensor, error)

	// Download copies src, in this backend's memory, to host, in host memory. They must
	// have the same shape (ErrShape) and dtype (ErrDType); strides are arbitrary.
	Download(ctx context.Context, host, src Tensor) error

	// QK computes s = q·kᵀ, unscaled, for each batch and head:
	//
	//	s [B, H, Sq, Sk] F32    q [B, H, Sq, D]    k [B, Hkv, Sk, D]
	QK(ctx context.Context, s, q, k Tensor) error

	// Softmax replaces each row of s by its softmax, with scale, softcap, biases and hiding as in [Problem], and writes
	// the log-sum-exp of each row to lse unless it is the zero Tensor:
	//
	//	s [B, H, Sq, Sk] F32    lse [B, H, Sq, 1] F32
	Softmax(ctx context.Context, s, lse Tensor, p *Problem) error

	// PV computes o = w·v for each batch and head:
	//
	//	o [B, H, Sq, Dv]    w [B, H, Sq, Sk] F32    v [B, Hkv, Sk, Dv]
	//
	// A weight of exactly 0, which Softmax gives to hidden keys, hides its value: NaN
	// and Inf in v do not propagate through it.
	PV(ctx context.Context, o, w, v Tensor) error

	// Attention computes O, and LSE if it is set, of each call. It reads the keys once, uses O(Sq + Sk) memory in
	// addition to the operands, and does not keep the calls. ErrUnsupported names what it cannot compute; an
	// Interrupted holds what a streamed call had finished.
	//
	// Several calls, such as packed sequences, run together, each with the bits of a call alone. They may read the same
	// memory and may write to different elements of one memory, also interleaved ones. The caller ensures that no call
	// writes elements that another one reads or writes. After an error the contents of all outputs are unspecified, and
	// the error is no Interrupted. Resume is ignored.
	Attention(ctx context.Context, calls ...*Call) error

	// Plan returns how Attention would run calls, without running them. Only shapes, strides
	// and dtypes of the operands matter; they need no memory (see [Meta]).
	Plan(ctx context.Context, calls ...*Call) (Plan, error)

	// Wait waits for all calls. It returns the first error of a call that had returned, unless another call returned it.
	Wait(ctx context.Context) error

	// Close waits for running calls and frees the device. Tensors that still exist
	// become unusable; later calls return ErrClosed. A second Close does nothing.
	Close() error
}

// Projector is implemented by backends that compute linear layers, so that the layers
// around attention run on the device too.
type Projector interface {
	// Project computes y = x·w + bias for each batch and head:
	//
	//	y [B, H, S, N]    x [B, H, S, M]    w [B, H, M, N]    bias [1, 1, 1, N]
	//
	// All are F32, F16 or BF16, each independently. w is usually broadcast by strides of zero. bias may be the zero Tensor.
	// NaN in w or x propagates.
	Project(ctx context.Context, y, x, w, bias Tensor) error
}

// Rotator is implemented by backends that rotate pairs of elements, as rotary position
// embedding does (Su et al. 2021, RoFormer), in place or from one tensor to another.
type Rotator interface {
	// Rotate computes the formula of kernels.Device.Rotate. cos and sin are usually broadcast over the heads by strides of
	// zero. y may be x itself, the same view.
	//
	//	y, x [B, H, S, D]    cos, sin [B, H, S, R/2] F32    R even, 2 to D
	Rotate(ctx context.Context, y, x, cos, sin Tensor, how Rotation) error
}

// Rotation is how a [Rotator] rotates, as kernels.Rotation.
type Rotation struct{ Interleaved, Inverse bool }

// Normaliser is implemented by backends that compute root-mean-square norms of rows, by the formulas of
// kernels.Device.Normalise and NormaliseBackward.
type Normaliser interface {
	// Normalise computes the norm of each row. The square of no finite element overflows. y may be x itself, the same view.
	// w is usually broadcast by strides of zero, or the zero Tensor.
	//
	//	y, x, w [B, H, S, D], F32, F16 or BF16 each
	Normalise(ctx context.Context, y, x, w Tensor, n Norm) error
	// NormaliseBackward computes the gradients of Normalise: that of x, and unless dw is the zero
	// Tensor, what each row adds to that of w. dx may be dy itself, the same view.
	//
	//	dx, dy, x, w [B, H, S, D]    dw [B, H, S, D] F32
	NormaliseBackward(ctx context.Context, dx, dw, dy, x, w Tensor, n Norm) error
}

// Norm is how a [Normaliser] normalises, as kernels.Norm. Backends get an Epsilon from 2^-100 to 1.
type Norm struct {
	Epsilon float64
	PlusOne bool
}

// Gater is implemented by backends that multiply by functions of gates, by the formulas of kernels.Device.Gate and
// GateBackward.
type Gater interface {
	// Gate multiplies by gates. y may be x itself, the same view. x and gate may be broadcast by strides of zero.
	//
	//	y, x, gate [B, H, S, D], F32, F16 or BF16 each
	Gate(ctx context.Context, y, x, gate Tensor, f Activation) error
	// GateBackward computes the gradients of Gate, with a term in dgate for each element. dx may be dy itself, the same view.
	//
	//	dx, dy, x, gate [B, H, S, D]    dgate [B, H, S, D] F32
	GateBackward(ctx context.Context, dx, dgate, dy, x, gate Tensor, f Activation) error
}

// Activation is the function f of a [Gater]. At infinite gates f and its derivative are their limits.
type Activation int

const (
	Sigmoid  Activation = iota // σ(g) = 1/(1 + exp(-g))
	SiLU                       // g·σ(g), also called swish
	Softplus                   // log(1 + exp(g)), which neither overflows nor cancels
	Identity                   // g
)

// Copier is implemented by backends that copy between tensors in their memory, as a cache of keys and values needs.
type Copier interface {
	// Copy writes dst[i] = src[i] for each i in order, rounded to the dtype of dst[i]: a copy sees the results of the
	// earlier ones. After an error any of them may be complete.
	//
	//	dst[i], src[i] [B, H, S, D] of the same shape
	//
	// All are F32, F16, BF16, Q8, Q4 or F8, each independently. src[i] may be
	// broadcast by strides of zero and must not overlap dst[i].
	Copy(ctx context.Context, dst, src []Tensor) error
}

// Merger is implemented by backends that combine partial results in place.
type Merger interface {
	// Merge turns (o, lse), the result over one set of keys, into the result over the
	// union with a disjoint set, whose result is (po, plse), by the formula of kernels.Device.Merge:
	//
	//	o, po [B, H, Sq, Dv] F32    lse, plse [B, H, Sq, 1] F32
	//
	// A side whose lse is -Inf or +Inf leaves the other side unchanged, and o and lse if both
	// are (Milakov & Gimelshein 2018; the merge of split keys in Dao 2023, Flash-Decoding).
	Merge(ctx context.Context, o, lse, po, plse Tensor) error
}

// ScorePoint is a point between QKᵀ and softmax, in the order of [Problem].
type ScorePoint int

const (
	Scaled ScorePoint = iota // Scale·q·k
	Capped                   // scaled and softcapped
	Biased                   // with all biases, and -Inf for hidden keys: the input of the softmax, before Sinks and Dropout
)

// Scorer is implemented by backends that return scores.
type Scorer interface {
	// Scores turns the dot products of QK into the scores at a point, in place:
	//
	//	s [B, H, Sq, Sk] F32
	//
	// Before Biased no key is hidden. At Biased hidden keys have -Inf, whatever s held there; a visible NaN remains.
	Scores(ctx context.Context, s Tensor, p *Problem, at ScorePoint) error
}

// Until returns p with only the options that apply up to a point.
func (p Problem) Until(at ScorePoint) Problem {
	if at < Biased {
		p = Problem{Scale: p.Scale, Softcap: p.Softcap, Visible: Everything()} // kernels.Device.Scores refuses a ScoreMod at Capped
	}
	if at < Capped {
		p.Softcap = 0
	}
	return p
}

// Warmer is implemented by backends that compile code when a call first needs it, which takes longer than most calls.
type Warmer interface {
	// Warmup compiles what Attention needs for calls and, with weights, what QK and Softmax need for their weights, and
	// runs nothing. Operands need no memory (see [Meta]). Calls of other sequence lengths usually need the same code.
	// The errors are those of the calls.
	Warmup(ctx context.Context, weights bool, calls ...*Call) error
	// WarmupBackward compiles what Backward of a [Differentiator] needs for g, in the same way.
	WarmupBackward(ctx context.Context, g *Gradients) error
}

// Meter is implemented by backends that can measure what limits their calls.
type Meter interface {
	// PeakFLOPS measures float32 operations per second in independent fused multiply-adds (2 operations each) on
	// registers, with all threads that the backend uses. It takes some tens of milliseconds.
	PeakFLOPS(ctx context.Context) (float64, error)
	// ReadBandwidth measures the bytes per second that the device reads of at most 8 operands, from the first to the
	// last element of each, repeatedly for some tens of milliseconds and with all threads that the backend uses.
	// Operands that fit a cache are read from the cache, as in a call that is repeated. It is 0 when there are too few
	// bytes to measure. Errors are those of a call that reads the operands.
	ReadBandwidth(ctx context.Context, operands ...Tensor) (float64, error)
}

// MatrixMeter is implemented by backends with plans of matrix units ([Plan.Matrices]).
type MatrixMeter interface {
	// MatrixFLOPS measures operations per second in independent products of 16-bit matrices with float32 sums, as
	// PeakFLOPS does. It returns ErrUnsupported without matrix units.
	MatrixFLOPS(ctx context.Context) (float64, error)
}

// QueueMeter is implemented by backends whose device has a queue and memory of its own.
type QueueMeter interface {
	// LaunchTime measures the time from the submission of a kernel of one workgroup that does almost nothing until its
	// completion is known, which limits small calls: the median of some tens of measurements.
	LaunchTime(ctx context.Context) (time.Duration, error)
	// PeakMemory returns the largest number of bytes of device memory that tensors and
	// calls held at once since the previous call of PeakMemory.
	PeakMemory() int64
}
