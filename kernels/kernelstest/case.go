package kernelstest

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
)

// Layout is the memory layout of an operand. Gaps between rows are filled with NaN before the call and must not change.
type Layout int

const (
	// Contiguous is [B, H, S, D] row by row.
	Contiguous Layout = iota
	// BSHD is [B, S, H, D] row by row, seen as [B, H, S, D].
	BSHD
	// Padded has three elements of padding after each row and starts at element 5, so
	// that 16-bit elements share 4-byte words with the padding.
	Padded
	// Transposed is [B, H, D, S]: neighbours along D are far apart.
	Transposed
	// Swapped is [S, H, B, D], with odd strides along axes of length 1, which place no element.
	Swapped
)

func (l Layout) String() string {
	return [...]string{"contiguous", "bshd", "padded", "transposed", "swapped"}[l]
}

// place returns the strides and offset of shape in layout l, and the number of elements that the memory needs.
func (l Layout) place(s backend.Shape) (st backend.Strides, offset, size int) {
	switch l {
	case BSHD:
		st = backend.Strides{s[1] * s[2] * s[3], s[3], s[1] * s[3], 1}
	case Padded:
		row := s[3] + 3
		st = backend.Strides{s[1]*s[2]*row + 1, s[2] * row, row, 1}
		offset = 5
	case Transposed:
		st = backend.Strides{s[1] * s[2] * s[3], s[2] * s[3], 1, s[2]}
	case Swapped:
		st = backend.Strides{s[3], s[0] * s[3], s[0] * s[1] * s[3], 1}
		for axis, n := range s {
			if n == 1 {
				st[axis] = 7
			}
		}
	default:
		st = s.Contiguous()
	}
	size = offset + 1
	for i, n := range s {
		size += (n - 1) * st[i]
	}
	if l == Padded {
		size += 3
	}
	return st, offset, size
}

// Case is an attention problem whose tensors are drawn from Seed, or recorded.
type Case struct {
	Name string
	kernels.Dims
	DType backend.DType
	// Keys is the dtype of k and v; nil means DType.
	Keys *backend.DType
	// PageSize puts k and v into pools of pages of that many rows; 0 does not.
	PageSize int
	Layout   Layout
	Options  kernels.Options // without Mask and Bias, which are drawn
	// MaskShape and BiasShape are the shapes of a random mask and bias; the zero Shape
	// means none. They may have fewer keys than Sk.
	MaskShape, BiasShape backend.Shape
	BiasDType            backend.DType
	// BiasHides makes one element in eight of the biases -Inf.
	BiasHides bool
	// RelativeShape is the shape of a random bias by distance, of BiasDType.
	RelativeShape backend.Shape
	// BlockSize, unless 0, adds a random mask of blocks of BlockShape.
	BlockSize  int
	BlockShape backend.Shape
	// HideRows makes the mask hide every third row entirely.
	HideRows bool
	// Gain multiplies q, for large logits; 0 is 1.
	Gain float64
	// PoisonK and PoisonV write values to rows of k and v, which must not change the
	// result of query rows that do not see them.
	PoisonK, PoisonV map[int]float32
	// Edit, unless nil, returns what element i of q, k, v or do becomes, before it is rounded.
	Edit func(operand string, i int, x float32) float32
	Seed uint64
	// recorded, unless nil, has q, k and v.
	recorded *recorded
}

// operand is a tensor in host memory: its elements row by row, rounded to dtype.
type operand struct {
	shape backend.Shape
	dtype backend.DType
	data  []float32
}

// edit replaces the elements of an operand as Edit says.
func (c *Case) edit(name string, o operand) {
	for i, x := range o.data {
		if c.Edit != nil {
			o.data[i] = o.dtype.Round(c.Edit(name, i, x))
		}
	}
}

// drawn returns an operand of normal random numbers.
func drawn(rng *rand.Rand, shape backend.Shape, dtype backend.DType) operand {
	o := operand{shape, dtype, make([]float32, shape.Elements())}
	for i := range o.data {
		o.data[i] = dtype.Round(float32(rng.NormFloat64()))
	}
	return o
}

// filled returns an operand whose elements are x.
func filled(x float32, shape backend.Shape, dtype backend.DType) operand {
	return operand{shape, dtype, slices.Repeat([]float32{x}, shape.Elements())}
}

// built is a Case with its tensors.
type built struct {
	Case
	q, k, v operand
	mask    []bool // of MaskShape
	bias    operand
	// relative is of RelativeShape, blocks of BlockShape.
	relative operand
	blocks   []bool
}

func (c Case) build() *built {
	rng := rand.New(rand.NewPCG(c.Seed, 0x61747463))
	gain := c.Gain
	if gain == 0 {
		gain = 1
	}
	// store rounds elements to dtype.
	store := func(s backend.Shape, dtype backend.DType, element func(i int) float32) operand {
		o := operand{s, dtype, make([]float32, s.Elements())}
		for i := range o.data {
			o.data[i] = dtype.Round(element(i))
		}
		if dtype.Quantised() {
			o.quantise()
		}
		return o
	}
	draw := func(s backend.Shape, dtype backend.DType, gain float64) operand {
		return store(s, dtype, func(int) float32 { return float32(rng.NormFloat64() * gain) })
	}
	b := &built{Case: c}
	sq, sk, sv := backend.Shape{c.Batch, c.Heads, c.SeqQ, c.Dim}, backend.Shape{c.Batch, c.KVHeads, c.SeqK, c.Dim}, backend.Shape{c.Batch, c.KVHeads, c.SeqK, c.ValueDim}
	if r := c.recorded; r != nil {
		b.q = store(sq, c.DType, func(i int) float32 { return r.q[i] })
		b.k = store(sk, c.keyType(), func(i int) float32 { return r.k[i] })
		b.v = store(sv, c.keyType(), func(i int) float32 { return r.v[i] })
	} else {
		b.q, b.k, b.v = draw(sq, c.DType, gain), draw(sk, c.keyType(), 1), draw(sv, c.keyType(), 1)
	}
	c.edit("q", b.q)
	c.edit("k", b.k)
	c.edit("v", b.v)
	poison(b.k, c.PoisonK)
	poison(b.v, c.PoisonV)
	if c.keyType().Quantised() {
		b.k.spoil()
		b.v.spoil()
	}
	if c.MaskShape != (backend.Shape{}) {
		b.mask = make([]bool, c.MaskShape.Elements())
		for i := range b.mask {
			row := i / c.MaskShape[3]
			b.mask[i] = rng.IntN(4) > 0 && !(c.HideRows && row%3 == 1)
		}
	}
	biases := func(s backend.Shape) (o operand) {
		if s == (backend.Shape{}) {
			return o
		}
		o = draw(s, c.BiasDType, 2)
		for i := range o.data {
			if c.BiasHides && rng.IntN(8) == 0 {
				o.data[i] = float32(math.Inf(-1))
			}
		}
		return o
	}
	b.bias = biases(c.BiasShape)
	b.relative = biases(c.RelativeShape)
	if c.BlockSize > 0 {
		b.blocks = make([]bool, c.BlockShape.Elements())
		for i := range b.blocks {
			b.blocks[i] = rng.IntN(3) > 0
		}
	}
	return b
}

// keyType returns the dtype of keys and values.
func (c Case) keyType() backend.DType {
	if c.Keys != nil {
		return *c.Keys
	}
	return c.DType
}

// poison overwrites every third element of the given rows, in every head.
func poison(o operand, rows map[int]float32) {
	for row, x := range rows {
		for i := range o.data {
			d := o.shape[3]
			if i/d%o.shape[2] == row && i%d%3 == 0 {
				o.data[i] = x
			}
		}
	}
}

func (c Case) String() string {
	o := c.Options
	s := fmt.Sprintf("%s %v b%dh%d/%dq%dk%dd%d/%d %v seed %d", c.Name, c.DType, c.Batch, c.Heads, c.KVHeads, c.SeqQ, c.SeqK, c.Dim, c.ValueDim, c.Layout, c.Seed)
	add := func(given bool, format string, args ...any) {
		if given {
			s += fmt.Sprintf(" "+format, args...)
		}
	}
	none := backend.Shape{}
	add(c.Keys != nil, "keys %v", c.keyType())
	add(c.PageSize > 0, "pages of %d", c.PageSize)
	if o.Scale != nil {
		add(true, "scale %g", *o.Scale)
	}
	add(o.ScoreMod != nil, "score mod")
	add(o.Softcap > 0, "softcap %g", o.Softcap)
	add(o.Causal, "causal")
	if o.Window != nil {
		add(true, "window %d,%d", o.Window.Left, o.Window.Right)
	}
	add(o.Causal || o.Window != nil, "align %d offset %v", o.Align, o.Offset)
	add(o.KLen != nil, "klen %v", o.KLen)
	add(o.Prefix != nil, "prefix %v", o.Prefix)
	add(o.Spans != nil, "spans %v", o.Spans)
	add(o.QSegments != nil, "segments %v of %v", o.QSegments, o.KSegments)
	add(c.MaskShape != none, "mask %v", c.MaskShape)
	add(c.BiasShape != none, "bias %v %v", c.BiasDType, c.BiasShape)
	add(c.RelativeShape != none, "relative %v %v", c.BiasDType, c.RelativeShape)
	add(c.BlockSize > 0, "blocks of %d %v", c.BlockSize, c.BlockShape)
	if x := o.KeyIndices; x != nil {
		add(true, "%d lists of up to %d keys for %d rows", len(x.Indices)/max(1, x.TopK), x.TopK, x.Rows)
	}
	add(o.ALiBi != nil, "alibi %v", o.ALiBi)
	add(o.Sinks != nil, "sinks %v", o.Sinks)
	add(o.CuQ != nil, "packed %v of %v", o.CuQ, o.CuK)
	add(o.LowPrecision, "low precision")
	add(o.Dropout.P > 0, "dropout %v seed %d first %v", o.Dropout.P, o.Dropout.Seed, o.Dropout.First)
	return s
}

// broadcastIndex returns the index of [b,h,i,j] in row-major data of shape s, whose axes of length 1 are broadcast.
func broadcastIndex(s backend.Shape, at ...int) int {
	n := 0
	for axis, l := range s {
		x := at[axis]
		if l == 1 {
			x = 0
		}
		n = n*l + x
	}
	return n
}
