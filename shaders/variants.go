package shaders

// A Variant is one rendering of a kernel. Its fields become constants of the WGSL under their names in
// upper case: true is 1, false 0. Variants are comparable.
type Variant interface {
	// Name returns the name of the kernel, which is that of its file without .wgsl.
	Name() string
}

// Type is the type of stored elements.
type Type uint32

// Types of elements. A row of Q8 is its scale, an f32, and 8-bit integers; one of Q4 has for each
// 32 elements a scale, an f16, and 4-bit integers. One of F8 is bytes in e4m3fn.
const (
	F32  Type = 0
	F16  Type = 1
	BF16 Type = 2
	Q8   Type = 4
	Q4   Type = 5
	F8   Type = 6
)

// Expand is how far loops are unrolled.
type Expand uint32

// Levels of Expand.
const (
	// Registers unrolls loops with the attribute @unroll, which index private arrays. A
	// compiler that does not unroll such loops keeps the arrays in memory.
	Registers Expand = 1 + iota
	// Full also unrolls loops with the attribute @unroll(deep), whose counters are part of
	// indices into workgroup memory.
	Full
)

// Option is what a variant knows about an option of a call.
type Option uint32

// Values of Option.
const (
	Absent  Option = iota // the call does not have the option
	Present               // the call has it
	Flagged               // the parameters contain a flag
)

// Both is where a kernel reads the block mask next to a mask, or the relative bias next to a bias.
type Both uint32

// Values of Both.
const (
	Neither Both = iota // the call has at most one mask, in mask, and one bias, in bias
	Apart               // in the bindings blocks and relative
	Crossed             // the block mask in bias, of calls without a bias, or the relative bias in mask, of calls without a mask
)

// Result is what Gradient computes.
type Result uint32

// Results of Gradient.
const (
	DKV Result = iota // gradients of keys and values
	DQ
	DS // gradients of the scores
)

// Attention is the plain prefill kernel.
type Attention struct {
	In, KV Type // of q; of k and v
	Paged  bool // k and v are pools of pages
	Listed bool // keys are listed
	Both   Both // of a kind of pair operands
	Low    bool // weights are rounded to KV before they multiply v
	DVB    int  // blocks of 32 output columns
}

// Flash is the register-tiled prefill kernel. A workgroup has TX·TY threads.
type Flash struct {
	Expand Expand
	In, KV Type // of q; of k and v
	Paged  bool // k and v are pools of pages
	Listed bool // keys are listed
	Packed bool // batches are sequences that follow one another
	Out16  bool // elements of o have 16 bits
	Vec    bool // q, k and v (unless Q8, Q4 or F8) are contiguous along D, in aligned fours
	Full   bool // rows of q, k and v fill the stages of 4·QD and the turns; needs Vec
	Both   Both // of a kind of pair operands
	Low    bool // weights are rounded to KV before they multiply v
	Ahead  bool // v of a step is loaded while the step before is multiplied

	Masks   Option
	Blocked Option // block masks
	Biases  Option // Present is an f32 bias without a relative bias or slopes
	Sloped  Option
	Capped  Option // softcap
	Drops   Option // dropout

	TX, TY int // threads along keys or columns, and along rows
	RV     int // vec4 of rows of a thread
	KT     int // keys of a tile of a thread, even
	CV     int // vec4 of columns of a thread in a turn
	VP     int // turns over the columns
	QD     int // vec4 of depths staged at once; 0: only weights are staged, and JJ = KT
	JJ     int // keys of a thread staged at once
	ER     int // rows of a thread written at once
	Split  int // keys of a split
}

// Matrix is the kernel of prefill on matrix units, or with Split of the first half of decoding, whose workgroups have TY subgroups of Lanes threads.
type Matrix struct {
	In, KV Type // of q: F16, BF16 or F32; of k and v: the same, or F8 next to 16 bits
	Paged  bool // k and v are pools of pages
	Listed bool // keys are listed
	Packed bool // batches are sequences that follow one another
	Out16  bool // elements of o have 16 bits
	Vec    int  // 1: q, k and v are contiguous along D, in aligned fours; 2: in aligned eights, of 16 bits
	Full   bool // rows of q and k fill Depth, and rows of v Columns; needs Vec
	Both   Both // of a kind of pair operands
	Paired bool // the call has softcap, a mask, a bias, slopes or dropout
	Ahead  bool // keys and values are loaded while the tile before is multiplied

	M, N, K        int // of a product: MxK times KxN
	Lanes          int // of a subgroup
	TY             int // subgroups of a workgroup, with M rows each
	Keys           int // of a tile, a multiple of N, K and of four for each lane of a row
	Split          int // keys of a workgroup, a multiple of Keys, up to 256; 0: all
	Depth, Columns int // D, a multiple of K, and Dv, a multiple of N, both multiples of 4
}

// MatrixPeak multiplies MxK times KxN in registers, in subgroups of Lanes threads.
type MatrixPeak struct{ M, N, K, Lanes int }

// MatrixGradient is Gradient on matrix units, whose workgroups have TY subgroups of Lanes threads.
type MatrixGradient struct {
	Expand     Expand
	In, KV, DO Type   // of q; of k and v; of dO, all F16 or all BF16
	Vec        bool   // q, k, v and dO are contiguous along D, in aligned fours
	Full       bool   // rows of q and k fill Depth, and those of v and dO Columns; needs Vec
	Both       Both   // of a kind of pair operands
	Paired     bool   // the call has softcap, a mask, a bias, slopes or dropout
	Of         Result // DKV or DQ

	M, N, K        int // of a product: MxK times KxN
	Lanes          int // of a subgroup, a multiple of M
	TY             int // subgroups of a workgroup, which own M keys or rows each
	Others         int // rows or keys of a tile: M or more, up to 32, a multiple of N, K and 4·Lanes/M
	Depth, Columns int // D and Dv, multiples of N and K
}

// Decode is the first half of decoding. A workgroup has a thread for each key of a tile.
type Decode struct {
	Expand Expand
	In, KV Type // of q; of k and v
	Paged  bool // k and v are pools of pages
	Listed bool // keys are listed
	Wide   bool // k can be read 16 bytes at a time, and so can v of 16-bit elements
	Full   bool // the head size of q and k fills its stages
	Both   Both // of a kind of pair operands
	Low    bool // weights are rounded to KV before they multiply v
	Extra  bool // the call has slopes, a block mask, a relative bias or dropout

	Rows   int // query rows of a workgroup
	Split  int // keys of a workgroup
	BC     int // keys of a tile
	TX     int // classes of keys
	Stages int // of K in a tile: D / (4 · EL), rounded up
	Quads  int // vec4 columns of the output
	Sides  int // 2: half of the threads have the first rows of the output
	Ahead  int // keys whose values are loaded ahead of their use, a divisor of BC
}

// SplitMerge is the second half of decoding.
type SplitMerge struct {
	Split int // keys of a split
	TX    int // classes of keys, the parts of l
	Quads int // vec4 columns of the output
}

// Matmul is the batched matrix product. A workgroup has TX·TY threads.
type Matmul struct {
	Expand Expand
	A, W   Type // of a and w
	AVec   bool // a is contiguous along x, in aligned fours
	WVec   bool // w is contiguous along x or n, in aligned fours
	OVec   bool // elements of o have 32 bits and are contiguous along n, in aligned fours
	Full   bool // the sums fill the stages of 4·QD; needs AVec and WVec
	Along  bool // w is contiguous along x, else along n
	Skip   bool // an a of exactly 0 hides its w, as PV needs (0·NaN is NaN)

	TX, TY int
	Rows   int // rows of a thread
	CV     int // vec4 of columns of a thread
	QD     int // vec4 along x staged at once
}

// MatrixProduct is the batched matrix product of f16 on matrix units. A workgroup has SY·SX subgroups of Lanes threads.
type MatrixProduct struct {
	AVec, WVec, OVec, Full, Along bool // as in Matmul; Full is for stages of Depth

	M, N, K int // of a product: MxK times KxN
	Lanes   int // of a subgroup
	SY, SX  int // subgroups along rows and along columns
	RM, CN  int // matrices of a subgroup along rows and along columns
	Depth   int // terms staged at once, a multiple of K
}

// Softmax is the softmax stage.
type Softmax struct {
	Both Both // of a kind of pair operands
	Held bool // a row has at most Row keys, in one chunk
	Row  int  // a multiple of 256
}

// Gradient computes gradients of attention. A workgroup has TX·TY threads.
type Gradient struct {
	Expand     Expand
	In, KV, DO Type // of q; of k and v; of dO
	Vec        bool // q, k, v and dO are contiguous along D, in aligned fours
	Full       bool // rows fill the stages and the columns of a workgroup; needs Vec
	Both       Both // of a kind of pair operands
	Paired     bool // the call has softcap, a mask, a bias, slopes or dropout
	Of         Result

	TX, TY int
	QD     int // vec4 of depths staged at once
}

// RoPE turns rows by rotary position embedding.
type RoPE struct {
	InPlace bool // x is in o, and not bound
}

// NormGate computes norms and gates of rows, or their gradients.
type NormGate struct {
	InPlace bool // x, or g of gradients, is in o, and not bound
}

// Linear is linear attention.
type Linear struct {
	Rows   int  // vec4 of rows of a column of a state that a thread has
	Chunks bool // of 16 tokens, else token after token
}

// MatrixLinear is linear attention in chunks of 16 tokens on matrix units.
type MatrixLinear struct {
	Rows int  // as in Linear
	Low  bool // queries or keys have more than 16 bits

	M, N, K int // of a product: MxK times KxN, divisors of 16
	Lanes   int // of a subgroup, a divisor of 128
}

// Convert copies between types.
type Convert struct {
	To Type // Q8, Q4 or F8 if only o is, else F32
}

// A Fixed kernel has one variant.
type Fixed string

// The kernels with one variant.
const (
	Merge        Fixed = "merge"
	Conv         Fixed = "conv"
	Index        Fixed = "index"
	Lists        Fixed = "lists"
	Delta        Fixed = "delta"
	Reduce       Fixed = "reduce"
	Peak         Fixed = "peak"
	Read         Fixed = "read"
	Exponentials Fixed = "exponentials"
)

// Custom is a kernel that is not one of this package, such as a probe of a test. It may use what the
// kernels of this package share.
type Custom struct{ Title, WGSL string }

// OwnExp2 is a variant that computes exponentials by the device's exp2.
type OwnExp2 struct{ Variant }

// Modded is a variant with a score mod.
type Modded struct {
	Variant
	Score, Derivative string // bodies of score_mod and, for gradients, score_derivative
	Values            Values
}

// Values is where the values of a score mod are.
type Values uint32

// Values of Values.
const (
	NoValues Values = iota
	InMask          // in the binding mask
	InBias          // in the binding bias
	InTable         // in the binding table
)

func (Attention) Name() string      { return "attention" }
func (Flash) Name() string          { return "flash" }
func (Matrix) Name() string         { return "matrix" }
func (MatrixGradient) Name() string { return "matrixgradient" }
func (MatrixPeak) Name() string     { return "matrixpeak" }
func (Decode) Name() string         { return "decode" }
func (SplitMerge) Name() string     { return "splitmerge" }
func (Matmul) Name() string         { return "matmul" }
func (MatrixProduct) Name() string  { return "matrixproduct" }
func (Softmax) Name() string        { return "softmax" }
func (Gradient) Name() string       { return "gradient" }
func (RoPE) Name() string           { return "rope" }
func (NormGate) Name() string       { return "normgate" }
func (Linear) Name() string         { return "linear" }
func (MatrixLinear) Name() string   { return "matrixlinear" }
func (Convert) Name() string        { return "convert" }
func (k Fixed) Name() string        { return string(k) }
func (k Custom) Name() string       { return k.Title }
