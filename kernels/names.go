package kernels

import (
	"context"
	"errors"
	"time"

	"github.com/seed90331342/attn/backend"
)

// A program names everything by this package. Types with a namesake in package backend have its
// fields and convert. Some are aliases, because calls, lists and errors pass them between programs and
// drivers in more than a thousand places, each of which would convert. An alias has its methods in
// package backend: go doc ./backend Tensor lists them, and go doc ./backend Tensor.Swap prints one. Outside
// of this module the package is github.com/seed90331342/attn/backend.

// Tensor is a view of memory as [batch, heads, seq, dim]: a [Shape], [Strides] and an offset, all in elements of one
// [DType]. Copies of a Tensor share the memory. The zero Tensor means none.
//
// Slice, Swap, Broadcast, Rows and View return other views of the same memory: [B,S,H,D] data, one head of many and a
// mask that all heads share are views, not copies. Float32s, Bits, Bools, Int32s and QuantisedRows return host memory
// as a slice. Shape, Strides, Offset, DType, Bytes, IsZero, IsContiguous and OnHost describe a view. Release frees the
// memory of all views. Command go doc ./backend Tensor.Swap prints the comment of one.
type Tensor = backend.Tensor

// Shape is the length of a tensor along each axis. All four are written: a tensor of
// Shape{S, D}, which is [S, D, 0, 0], has no elements. Elements counts them and Contiguous returns
// the strides in order of the axes: go doc ./backend Shape.Elements.
type Shape = backend.Shape

// Strides are the distances in elements between neighbours along each axis, 0 where one element is repeated.
type Strides = backend.Strides

// Dims are the lengths of an attention call. [Device.AttentionFloat32] has defaults for those that are zero.
type Dims struct {
	Batch    int // B
	Heads    int // H, query heads
	KVHeads  int // Hkv, key and value heads
	SeqQ     int // Sq
	SeqK     int // Sk
	Dim      int // D, of a query and a key
	ValueDim int // Dv, of a value and an output
}

// The axes of a [Shape] [B, H, S, D].
const (
	Batch = backend.Batch
	Heads = backend.Heads
	Seq   = backend.Seq
	Dim   = backend.Dim
)

// ScoreMod is a function of the program's own that replaces scores, like score_mod of PyTorch's
// FlexAttention (Dong et al. 2024): s = f(s, batch, head, row, key).
//
// Each result depends on its score, its [Position] and Values alone. Finite results are at most
// 2^120 in magnitude. The errors of f and of ∂f/∂s are at most 8u·(1 + |s| + |the result|), with u
// = 2^-24; the bound of package oracle requires it. Where f is -Inf for a score of 0 it hides the
// key, and must be -Inf for any score, NaN included: assign -Inf, do not add it. A panic in a function is ErrCallback.
type ScoreMod struct {
	// Go replaces the scores of one row by f. scores[n] belongs to the key at.Key+n, which
	// the visibility rule shows to the row. Several goroutines call it at the same time.
	Go func(scores []float32, at Position)
	// Derivative replaces scores, which are those before Go, by ∂f/∂s. Gradients need it.
	Derivative func(scores []float32, at Position)
	// WGSL and WGSLDerivative do the same on GPUs: they are bodies of functions of one score,
	// fn score_mod(score: f32, b: u32, h: u32, i: u32, j: u32) -> f32. See docs/score-mods.md.
	WGSL, WGSLDerivative string
	Values               []float32 // what f reads, such as slopes; constant during a call, without gradients
	First                [4]int    // added to the batch, head, row and key of a position, as that of Dropout; each 0 to 2^29
}

// Position is the place of scores that a [ScoreMod] replaces: Batch, Head, the Row of the query among the keys, the
// first Key, and the Values of the ScoreMod: go doc ./backend Position.
type Position = backend.Position

// DType is the element type of a [Tensor] in memory. Arithmetic is in float32 or wider for all
// types. String returns its name, Size the bytes of an element, and Bytes those of a shape; Quantise
// and Dequantise convert rows, Encode, Decode and Round single numbers; Float and Quantised report
// the kind, and UnitRoundoff the precision: go doc ./backend DType.Quantise.
type DType = backend.DType

const (
	F32  = backend.F32  // IEEE 754 binary32
	F16  = backend.F16  // IEEE 754 binary16, stored as its bits
	BF16 = backend.BF16 // the upper half of a binary32, stored as its bits
	Bool = backend.Bool // one byte per element, 0 or 1, for masks; true means visible
	Q8   = backend.Q8   // keys and values as a signed byte per element, a float32 scale per row: see [DType.Quantise]
	Q4   = backend.Q4   // keys and values as 4 bits per element, a float16 scale per 32 elements, as ggml's q4_0
	F8   = backend.F8   // keys and values as e4m3fn, a byte per element without a scale: see [DType.Quantise]
	I32  = backend.I32  // 32-bit two's complement, for lists of keys: see [KeyIndices]
)

// HostF32 is [Host] for F32.
func HostF32(data []float32, shape Shape) (Tensor, error) { return Host(data, F32, shape) }

// HostBool is [Host] for a mask; true means visible.
func HostBool(data []bool, shape Shape) (Tensor, error) { return Host(data, Bool, shape) }

// Host returns data as a tensor in host memory, without copying it: float32 for F32, the bits of F16 or BF16 as uint16,
// bool for Bool, int32 for I32, and bytes for numbers of F8 and for rows of Q8 or Q4 in the format of [DType.Quantise].
// Every device takes it as an operand: the CPU computes in place, and a GPU streams it in each call, as plans show;
// [Device.Upload] copies it once. It returns ErrShape when data does not have exactly the elements of shape, and ErrDType
// when its type is that of another dtype.
func Host[T float32 | uint16 | bool | byte | int32](data []T, dtype DType, shape Shape) (Tensor, error) {
	return backend.Host(data, dtype, shape)
}

// AllocHost returns a contiguous tensor of zeros in host memory, on Linux in large pages where these
// fit: attention of a few rows reads it faster than a slice of make. It returns ErrShape for a shape
// that is negative or too large, and ErrMemory when there is not enough memory.
func AllocHost(dtype DType, shape Shape) (Tensor, error) { return backend.AllocHost(dtype, shape) }

// Make returns make([]T, n), or ErrMemory when the process cannot have so much memory, where make
// would end the program. A negative n is too many.
func Make[T any](n int) ([]T, error) { return backend.Make[T](n) }

// CheckMemory returns ErrMemory as [Make] does, for memory that is allocated in another way.
func CheckMemory(bytes int64) error { return backend.CheckMemory(bytes) }

// Meta returns a tensor that has a dtype and a shape but no memory, for [Call.Plan] and
// [Call.Warmup]. It returns ErrShape for a shape that is negative or too large.
func Meta(dtype DType, shape Shape) (Tensor, error) { return backend.Meta(dtype, shape) }

// Dropout drops softmax weights at random: w_ij = p_ij / (1 - P) if Keeps(b, h, i, j), and 0
// otherwise (Srivastava et al. 2014). The choice depends only on the seed and the position, so
// that every device and every division of a call drops the same weights.
type Dropout struct {
	// P is the probability that a weight is dropped, 0 <= P < 1.
	P    float32
	Seed uint64
	// First is added to the batch, query head, row and key of a weight, in a call that computes
	// a part of another call. Each fits 31 bits.
	First [4]int
}

// Keeps reports whether the weight of row i and key j of head h of batch b is kept.
func (d Dropout) Keeps(b, h, i, j int) bool { return backend.Dropout(d).Keeps(b, h, i, j) }

// Pages lists the pages of each batch in a pool of keys and a pool of values (Kwon et al. 2023,
// PagedAttention). Pages need not be adjacent, and batches may share them:
//
//	K [P, Hkv, Size, D]    V [P, Hkv, Size, Dv]
//
// Key j of batch b is row j%Size of page Table[b][j/Size]. The result has the bits of a call
// with the same keys and values in one tensor.
type Pages struct {
	// Table lists the pages of each batch, at least as many as its keys need: KLen[b]
	// keys, or Keys when KLen is nil. Further pages are ignored.
	Table [][]int32
	// Keys is Sk: at least the number of keys of the longest batch, and at most those of
	// the whole pool, or of the longest row of Table.
	Keys int
}

// Activation is the function of [Device.Gate].
type Activation = backend.Activation

const (
	Sigmoid  = backend.Sigmoid  // σ(g) = 1/(1 + exp(-g)), the default
	SiLU     = backend.SiLU     // g·σ(g), also called swish
	Softplus = backend.Softplus // log(1 + exp(g)), which neither overflows nor cancels
	Identity = backend.Identity // g
)

// ScorePoint is a point between QKᵀ and softmax, for [Device.Scores].
type ScorePoint = backend.ScorePoint

const (
	Scaled = backend.Scaled // Scale·q·k
	Capped = backend.Capped // scaled and softcapped
	Biased = backend.Biased // with all biases, and -Inf for hidden keys: the input of the softmax, before Sinks and Dropout
)

// Visibility is the rule by which a query row sees keys. Row i of batch b sees key j when
//
//	-Left <= j - (i + Offset + Offsets[b]) <= Right   and   j < KLen[b]
type Visibility struct {
	// Offset is the position of query row 0 among the keys; it may be negative.
	Offset int
	// Offsets [B] are added to Offset, one for each batch; nil means zeros.
	Offsets []int
	// Left and Right are the numbers of keys that a row sees before and after its own
	// position; at least 0, Unbounded for no limit.
	Left, Right int
	// KLen [B] is the number of keys of each batch, 0 to Sk; nil means Sk.
	KLen []int
}

// OffsetOf returns the position of query row 0 of batch b among the keys.
func (v Visibility) OffsetOf(b int) int { return backend.Visibility(v).OffsetOf(b) }

// Range returns the keys [lo, hi) of seqK keys that row i of batch b sees; lo == hi when it sees none.
func (v Visibility) Range(b, i, seqK int) (lo, hi int) {
	return (*backend.Visibility)(&v).Range(b, i, seqK)
}

// Pairs returns the number of visible (query, key) pairs of one head, summed over the batches.
func (v Visibility) Pairs(batch, seqQ, seqK int) int64 {
	return backend.Visibility(v).Pairs(batch, seqQ, seqK)
}

// Plan is how a device runs a call. The code that runs the call computes it.
type Plan struct {
	Backend string `json:"backend"` // the Info.Name of the device
	Path    string `json:"path"`    // name of the code path: "fused gonum kernels", "fused WGSL"
	Why     string `json:"why"`     // reason for this path and these chunks, in words
	// Pairs is the number of (query, key) pairs of all batches and query heads that the
	// visibility rule shows, including those that a Mask or Bias hides.
	Pairs   int64 `json:"pairs"`
	FLOPs   int64 `json:"flops"`   // 2·(D+Dv) operations for each visible pair
	Bytes   int64 `json:"bytes"`   // the least to move: each element of every operand and output once
	Scratch int64 `json:"scratch"` // bytes of device memory in addition to the operands
	// Streamed is the number of bytes that the call moves between host and device memory
	// in both directions: 0 when all operands are in device memory.
	Streamed int64 `json:"streamed,omitempty"`
	// Matrices is how many products of matrix units stand for one product of the operands; 0
	// where other units multiply.
	Matrices int     `json:"matrices,omitempty"`
	Chunks   int     `json:"chunks"`           // pieces of the work: tasks of goroutines, or dispatches
	Cut      string  `json:"cut"`              // the pieces in words: "2 heads x 32 query blocks of 64, key blocks of 256"
	Limits   []Limit `json:"limits,omitempty"` // of the device, that shaped the cut
}

// Info describes a device.
type Info struct {
	Name     string     `json:"name"`              // for Open: "cpu", "gpu:0"
	Device   string     `json:"device"`            // name of the hardware
	Type     DeviceType `json:"type"`              // a software GPU driver has type CPU
	Provider string     `json:"provider"`          // library that is used to reach the device, with its version
	Driver   string     `json:"driver,omitempty"`  // name and version of the driver, if there is one
	Threads  int        `json:"threads,omitempty"` // that compute, for a CPU
	Limits   []Limit    `json:"limits,omitempty"`  // that affect how work is cut
	// Features are what kernels may use of a GPU: "f16", "subgroups of 4 to 32 lanes", and each
	// shape of its matrix units, such as "16x16x16 f16->f32".
	Features []string `json:"features,omitempty"`
}

// Limit is a named limit of a device or of a plan, a Name and a Value: go doc ./backend Limit.
type Limit = backend.Limit

// DeviceType is the kind of a device.
type DeviceType = backend.DeviceType

// The kinds of devices that WebGPU distinguishes. A software GPU driver has type CPU.
const (
	CPU        = backend.CPU
	Integrated = backend.Integrated
	Discrete   = backend.Discrete
	Virtual    = backend.Virtual
	Other      = backend.Other
)

// Listing is the devices of one family, such as "cpu" or "gpu".
type Listing struct {
	Family string
	Infos  []Info
	Err    error // the reason if there are none
}

// Devices lists the devices of all imported families, in alphabetical order.
func Devices() (all []Listing) {
	for _, l := range backend.Devices() {
		own := Listing{Family: l.Family, Err: l.Err}
		for _, info := range l.Infos {
			own.Infos = append(own.Infos, Info(info))
		}
		all = append(all, own)
	}
	return all
}

// Auto returns the name that "auto" opens and the reason: a hardware GPU, else "cpu".
func Auto() (name, why string) { return backend.Auto() }

// Trace is a set of functions that calls with its context run at certain events, as in net/http/httptrace. Any of them
// may be nil. They must be safe for concurrent use and return soon, because the call waits for them.
type Trace struct {
	// Progress receives the operations that a call has done and its total, in the units of Plan.FLOPs, after each piece
	// that the call waits for. A call of one piece reports once, at its end.
	Progress func(done, total float64)
	// Kernel receives the time that the device computed each piece, by its own clock.
	// Devices without timestamps never call it.
	Kernel func(took time.Duration)
	// Compile receives the compile time of a kernel that a call had to compile.
	Compile func(kernel string, took time.Duration)
	// Move receives the size and time of a transfer of operands between host and device.
	Move func(bytes int64, took time.Duration)
}

// WithTrace returns a context whose calls run the functions of t.
func WithTrace(ctx context.Context, t *Trace) context.Context {
	return backend.WithTrace(ctx, (*backend.Trace)(t))
}

// Interrupted is the error of a call that ended early. A prepared call can be resumed; calls of
// caches and layers run again from the start. Find it with [errors.As]. Err is the reason, which
// Unwrap returns too, and Partial what was finished: go doc ./backend Interrupted.Unwrap.
type Interrupted = backend.Interrupted

// Partial is the finished part of a call that ended early, for [Call.Resume]: its signature Call, O, LSE,
// the Done rows, and the Work on others: go doc ./backend Partial.
type Partial = backend.Partial

// Sentinel errors. Every error of this package, of those below it and of the backends wraps one of them,
// a context error, or the error of a writer or a function of the program, for [errors.Is]. The text of the
// error names the argument, the shapes and the violated rule.
var (
	ErrShape       = backend.ErrShape              // shapes that do not match each other or the operation
	ErrDType       = backend.ErrDType              // an element type that the operation does not accept
	ErrOption      = backend.ErrOption             // an option out of range: a NaN scale, a negative window, a KLen over Sk
	ErrDevice      = backend.ErrDevice             // a tensor whose memory belongs to another device or to none
	ErrReleased    = backend.ErrReleased           // a tensor used after its memory was released
	ErrOverlap     = backend.ErrOverlap            // an output that shares memory with an input, another output or itself
	ErrUnsupported = backend.ErrUnsupported        // a valid request that the device does not support
	ErrNoBackend   = backend.ErrNoBackend          // the name of a backend that is not imported
	ErrNoDevice    = backend.ErrNoDevice           // a backend without a usable device: no driver, no adapter
	ErrDeviceLost  = backend.ErrDeviceLost         // a device that was lost with all its memory: open it again
	ErrMemory      = backend.ErrMemory             // too little memory, or a ulimit, control group or GOMEMLIMIT that is too low
	ErrCapacity    = errors.New("cache is full")   // a cache that is full
	ErrVerify      = errors.New("result is wrong") // a result beyond its error bound: a defect of device, driver or memory
	ErrInternal    = backend.ErrInternal           // a defect of this module, with the stack; other calls are not affected
	ErrCallback    = backend.ErrCallback           // a function of the program, such as a ScoreMod, that panicked or called runtime.Goexit
	ErrFile        = backend.ErrFile               // a file that is damaged or has other contents than expected
	ErrClosed      = backend.ErrClosed             // a device used after Close
)
