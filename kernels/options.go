package kernels

import (
	"errors"
	"fmt"
	"math"

	"github.com/seed90331342/attn/backend"
)

// Dims are the lengths of an attention call over plain slices. Zero values
// mean: Batch 1, Heads 1, KVHeads as Heads, SeqK as SeqQ, ValueDim as Dim.
type Dims = backend.Dims

// Unbounded as a side of a [Window] means that the side has no limit.
const Unbounded = backend.Unbounded

// Align says where the diagonal of a causal mask or of a window starts when
// there are more keys than queries, or fewer. The names are PyTorch's
// (torch.nn.attention.bias: causal_upper_left, causal_lower_right). For Sq = 2,
// Sk = 4 and Causal (1 is seen):
//
//	UpperLeft    LowerRight
//	1 0 0 0      1 1 1 0
//	1 1 0 0      1 1 1 1
//
// and for Sq = 4, Sk = 2:
//
//	UpperLeft    LowerRight
//	1 0          0 0
//	1 1          0 0
//	1 1          1 0
//	1 1          1 1
//
// FlashAttention (from 2.1 on) aligns to the lower right, PyTorch's is_causal
// to the upper left.
type Align int

const (
	// UpperLeft puts query row 0 on key 0: row i stands at key i.
	UpperLeft Align = iota
	// LowerRight puts the last query row on the last key: row i stands at key
	// i + Sk - Sq. Sk is the length of the key tensor, whatever KLen says.
	LowerRight
)

// Window limits a row to keys near its own position: Left before it, Right
// after it, itself included. Both are at least 0; [Unbounded] means no limit.
type Window struct{ Left, Right int }

// Options say what is attended to and what comes out. The zero value is plain
// attention: scale 1/sqrt(D), every row sees every key, only the output.
//
// Scores are made in this order, as in [backend.Problem]: scale, softcap, biases,
// hiding. A key that is hidden by any of Causal, Window, KLen, the segments, Mask,
// BlockMask and a Bias or a RelativeBias of -Inf never touches the result, whatever it
// holds. A row that sees nothing gives zeros and an LSE of -Inf (the sink, where there
// is one). A NaN in what a row sees comes out of that row as NaN, and of no other.
type Options struct {
	// Scale multiplies Q·Kᵀ; nil is 1/sqrt(D). Write new(1.0) for unscaled.
	Scale *float64
	// Softcap c > 0 replaces scores s by c·tanh(s/c); 0 is off.
	Softcap float64
	// Causal hides the keys after a row's own position.
	Causal bool
	// Window, when not nil, hides the keys outside of it.
	Window *Window
	// Align gives a row its own position, for Causal and Window.
	Align Align
	// Offset moves every row's position by that many keys: for keys that
	// continue or follow others, as in a cache or a part of the keys.
	Offset int
	// Offsets moves the rows of each batch beside that, where sequences of different
	// lengths go on; nil means none.
	Offsets []int
	// KLen is how many keys exist in each batch, 0 to Sk; nil means all.
	KLen []int
	// Prefix is how many keys, counted from the first, neither Causal nor the right
	// side of a Window hides, batch by batch or one for all: a prefix language model
	// (Raffel et al. 2020). A window's left side stays. For Sq = Sk = 4, Causal:
	//
	//	Prefix 0    Prefix 3
	//	1 0 0 0     1 1 1 0
	//	1 1 0 0     1 1 1 0
	//	1 1 1 0     1 1 1 0
	//	1 1 1 1     1 1 1 1
	//
	// nil means none.
	Prefix []int
	// QSegments and KSegments hold an id for each row [Sq] and each key [Sk], batch by
	// batch or one list for all: a row sees keys of its own id only, as documents that
	// are packed into one sequence do. Keys of an id follow one another (for others
	// give a Mask); positions, and so Causal, Window and biases, are those in the
	// whole. KSegments nil means QSegments. What is outside is not computed. nil
	// means none. With a BlockMask the keys of a segment begin at multiples of
	// BlockSize.
	QSegments, KSegments [][]int32
	// Mask is a Bool tensor, true may be seen, whose every length is that of
	// [B, H, Sq, Sk] or 1. It is in the backend's memory. A Mask or a Bias that has
	// fewer keys, but more than 1, hides those that it lacks.
	Mask backend.Tensor
	// Bias is added to the scaled (and capped) scores: F32, F16 or BF16, shaped
	// and placed as Mask.
	Bias backend.Tensor
	// ALiBi holds slopes, [H] or batch by batch [B·H] (Press et al. 2022): slope times
	// the distance between a key and the row's own position (see Align and Offset) is
	// taken from the score. FlashAttention's alibi_slopes. nil means none.
	ALiBi []float32
	// RelativeBias holds a bias for each distance, F32, F16 or BF16, [1 or B, 1 or H, 1,
	// Sq+Sk-1], in the backend's memory: element j-i+Sq-1 is added to the score of row
	// i and key j. For Sq = Sk = S that is the [H, 2S-1] table of Shaw et al. 2018 and
	// of T5, whose middle element is for j = i.
	RelativeBias backend.Tensor
	// BlockMask is a mask of blocks, Bool, [1 or B, 1 or H, ⌈Sq/BlockSize⌉,
	// ⌈Sk/BlockSize⌉], in the backend's memory: true where rows of the block may see
	// its keys. Hidden blocks are not computed.
	BlockMask backend.Tensor
	BlockSize int
	// Sinks is a logit for each query head, [H], that takes part in the denominator of
	// the softmax and in LSE, and has no value (attention sinks, as in gpt-oss); -Inf
	// is none. nil means none.
	Sinks []float32
	// Dropout drops weights at random, see [backend.Dropout]; the rest are divided by
	// 1-P. LSE is that of all weights, Weights are those that are left.
	Dropout backend.Dropout
	// Pages, when not nil, says that k and v are pools of pages, [P, Hkv, Size, D] and
	// [P, Hkv, Size, Dv], and which of them the sequences have. Sk is Pages.Keys.
	Pages *backend.Pages
	// CuQ and CuK, when not nil, say that sequences of different lengths are packed one
	// after the other in q, k and v, which have one batch: sequence n has the rows from
	// CuQ[n] to CuQ[n+1] of q and the keys from CuK[n] to CuK[n+1]. Both begin with 0 and
	// end with the total. CuK nil means CuQ. See [Packed].
	CuQ, CuK []int
	// LSE asks for the log-sum-exp of each row's scores (natural log).
	LSE bool
	// Weights asks for the softmax weights. They are computed by the three
	// stages instead of the fused kernel and take B·H·Sq·Sk·4 bytes: O(S²).
	Weights bool
	// Resume goes on from what an earlier call of the same operands and options
	// left when its device was lost or its context was cancelled: the Partial of
	// a *backend.Interrupted that errors.As finds in its error. nil starts anew.
	// Weights cannot be resumed, nor what a prefix or segments make several calls of.
	Resume *backend.Partial
}

// problem is a canonical problem with what is left to do for it.
type problem struct {
	backend.Problem
	// keys is how many of the keys take part, those that Mask and Bias have: the
	// problem is one over the first keys of them.
	keys int
	// parts, unless nil, are the calls that make it up.
	parts []part
}

// partsOf returns the parts of p, whose keys d counts.
func (p *problem) partsOf(d Dims) []part {
	if p.parts != nil {
		return p.parts
	}
	return []part{whole(d)}
}

// problem checks o against the lengths d and returns the canonical problem. d.Dim
// 0 means that the head size is unknown, so that Scale must be given.
func (o *Options) problem(d Dims) (p problem, err error) {
	switch {
	case o.Scale != nil:
		p.Scale = float32(*o.Scale)
		if !finite(*o.Scale) || !finite(float64(p.Scale)) {
			return p, fmt.Errorf("scale is %v, it must be a finite float32: %w", *o.Scale, backend.ErrOption)
		}
	case d.Dim > 0:
		p.Scale = float32(1 / math.Sqrt(float64(d.Dim)))
	default:
		return p, fmt.Errorf("scale is not given and does not follow from scores, set Scale (attention has 1/sqrt(D)): %w", backend.ErrOption)
	}
	p.Softcap = float32(o.Softcap)
	if o.Softcap < 0 || !finite(o.Softcap) || !finite(float64(p.Softcap)) || (o.Softcap > 0 && p.Softcap < minNormal) {
		return p, fmt.Errorf("softcap is %v, it must be 0 (off) or a positive normal float32: %w", o.Softcap, backend.ErrOption)
	}
	vis, err := o.visibility(d)
	if err != nil {
		return p, err
	}
	p.Visible = vis
	distances := backend.Shape{d.Batch, d.Heads, 1, d.SeqQ + d.SeqK - 1}
	if p.Relative, err = broadcast("relative bias", o.RelativeBias, distances, false); err != nil {
		return p, err
	}
	if err := o.blocks(&p.Problem, d); err != nil {
		return p, err
	}
	all := d.SeqK
	if err := o.pairs(&p, &d); err != nil {
		return p, err
	}
	p.Slopes, p.Sinks, p.Dropout = o.ALiBi, o.Sinks, o.Dropout
	if n := len(p.Slopes); p.Slopes != nil && n != d.Heads && n != d.Batch*d.Heads {
		return p, fmt.Errorf("alibi has %d slopes, there are %d heads in %d batches: give %d or %d: %w", n, d.Heads, d.Batch, d.Heads, d.Batch*d.Heads, backend.ErrShape)
	}
	for i, x := range p.Slopes {
		if !(x >= -backend.MaxSlope && x <= backend.MaxSlope) {
			return p, fmt.Errorf("alibi[%d] is %v, slopes must lie within ±2^94: %w", i, x, backend.ErrOption)
		}
	}
	if p.Sinks != nil && len(p.Sinks) != d.Heads {
		return p, fmt.Errorf("sinks has %d logits, there are %d heads: one each: %w", len(p.Sinks), d.Heads, backend.ErrShape)
	}
	for i, x := range p.Sinks {
		if x != x || math.IsInf(float64(x), 1) {
			return p, fmt.Errorf("sinks[%d] is %v, it must be finite, or -Inf for none: %w", i, x, backend.ErrOption)
		}
	}
	if err := p.Dropout.Check(); err != nil {
		return p, err
	}
	p.parts, err = o.partition(&p.Problem, d, all)
	return p, err
}

// pairs fills in p's mask and bias, and makes p a problem over the first of its keys
// that both have, which d then counts.
func (o *Options) pairs(p *problem, d *Dims) (err error) {
	scores := backend.Shape{d.Batch, d.Heads, d.SeqQ, d.SeqK}
	if p.Mask, err = broadcastSome("mask", o.Mask, scores, true); err != nil {
		return err
	}
	if p.Bias, err = broadcastSome("bias", o.Bias, scores, false); err != nil {
		return err
	}
	for _, t := range [...]backend.Tensor{p.Mask, p.Bias} {
		if !t.IsZero() {
			d.SeqK = min(d.SeqK, t.Shape()[backend.Dim])
		}
	}
	p.keys = d.SeqK
	if p.keys == scores[backend.Dim] {
		return nil
	}
	var s slicer
	p.Mask, p.Bias = s.cut(p.Mask, backend.Dim, 0, p.keys), s.cut(p.Bias, backend.Dim, 0, p.keys)
	p.Relative = s.cut(p.Relative, backend.Dim, 0, d.SeqQ+p.keys-1)
	if !p.Blocks.IsZero() {
		p.Blocks = s.cut(p.Blocks, backend.Dim, 0, ceilDiv(p.keys, p.BlockK))
	}
	p.Visible = whole(*d).visible(p.Visible)
	return s.err
}

// broadcastSome is broadcast for a tensor that may have fewer keys than shape.
func broadcastSome(name string, t backend.Tensor, shape backend.Shape, mask bool) (backend.Tensor, error) {
	some := shape
	if n := t.Shape()[backend.Dim]; n > 1 && n < some[backend.Dim] {
		some[backend.Dim] = n
	}
	b, err := broadcast(name, t, some, mask)
	if errors.Is(err, backend.ErrShape) {
		return b, fmt.Errorf("%s: shape %v does not broadcast to %v (each length must be equal or 1, of the keys there may be fewer): %w", name, t.Shape(), shape, backend.ErrShape)
	}
	return b, err
}

// broadcast repeats a mask (Bool) or a bias to shape.
func broadcast(name string, t backend.Tensor, shape backend.Shape, mask bool) (backend.Tensor, error) {
	switch {
	case t.IsZero():
		return t, nil
	case mask && t.DType() != backend.Bool:
		return t, fmt.Errorf("%s is %v, it must be bool (give a float mask as Bias): %w", name, t.DType(), backend.ErrDType)
	case !mask && !t.DType().Float():
		return t, fmt.Errorf("%s is %v, it must be f32, f16 or bf16 (give a bool mask as Mask): %w", name, t.DType(), backend.ErrDType)
	}
	t, err := t.Broadcast(shape)
	if err != nil {
		return t, fmt.Errorf("%s: %w", name, err)
	}
	return t, nil
}

// blocks fills in p's mask of blocks.
func (o *Options) blocks(p *backend.Problem, d Dims) (err error) {
	if o.BlockMask.IsZero() {
		return nil
	}
	n := o.BlockSize
	if n < 1 {
		return fmt.Errorf("block size is %d, with a block mask it must be at least 1: %w", n, backend.ErrOption)
	}
	p.BlockQ, p.BlockK = n, n
	p.Blocks, err = broadcast("block mask", o.BlockMask, backend.Shape{d.Batch, d.Heads, ceilDiv(d.SeqQ, n), ceilDiv(d.SeqK, n)}, true)
	if err != nil {
		return fmt.Errorf("%w (a block of %d rows and keys each)", err, n)
	}
	return nil
}

func ceilDiv(a, b int) int { return (a + b - 1) / b }

// minNormal is the smallest normal float32: a smaller softcap would divide
// scores to infinity.
const minNormal = 0x1p-126

// maxOffset keeps positions within int32 on every device.
const maxOffset = 1 << 30

func (o *Options) visibility(d Dims) (backend.Visibility, error) {
	vis := backend.Everything()
	if o.Offset < -maxOffset || o.Offset > maxOffset {
		return vis, fmt.Errorf("offset is %d, it must lie within ±%d: %w", o.Offset, maxOffset, backend.ErrOption)
	}
	if w := o.Window; w != nil {
		if w.Left < 0 || w.Right < 0 {
			return vis, fmt.Errorf("window is %d,%d, both sides must be at least 0 (Unbounded for no limit): %w", w.Left, w.Right, backend.ErrOption)
		}
		vis.Left, vis.Right = w.Left, w.Right
	}
	if o.Causal {
		vis.Right = 0
	}
	switch o.Align {
	case UpperLeft:
		vis.Offset = o.Offset
	case LowerRight:
		vis.Offset = o.Offset + d.SeqK - d.SeqQ
	default:
		return vis, fmt.Errorf("align is %d, it must be UpperLeft or LowerRight: %w", o.Align, backend.ErrOption)
	}
	further, err := o.checkOffsets(d)
	if err != nil {
		return vis, err
	}
	// A window wider than the distance of any row to any key is no window:
	// say so, which lets backends skip the test.
	reach := d.SeqQ + d.SeqK + max(vis.Offset, -vis.Offset) + further
	if vis.Left >= reach {
		vis.Left = backend.Unbounded
	}
	if vis.Right >= reach {
		vis.Right = backend.Unbounded
	}
	if o.KLen != nil {
		if len(o.KLen) != d.Batch {
			return vis, fmt.Errorf("klen has %d lengths, there are %d batches: one each: %w", len(o.KLen), d.Batch, backend.ErrShape)
		}
		for b, n := range o.KLen {
			if n < 0 || n > d.SeqK {
				return vis, fmt.Errorf("klen[%d] is %d, there are %d keys: it must be 0 to %d: %w", b, n, d.SeqK, d.SeqK, backend.ErrOption)
			}
		}
		vis.KLen = o.KLen
	}
	o.foldOffsets(&vis, d)
	return vis, nil
}

func finite(x float64) bool { return !math.IsNaN(x) && !math.IsInf(x, 0) }

// checkOffsets checks them and returns how far the furthest moves its rows.
func (o *Options) checkOffsets(d Dims) (further int, err error) {
	if o.Offsets != nil && len(o.Offsets) != d.Batch {
		return 0, fmt.Errorf("offsets has %d, there are %d batches: one each: %w", len(o.Offsets), d.Batch, backend.ErrShape)
	}
	for b, n := range o.Offsets {
		if n < -maxOffset || n > maxOffset {
			return 0, fmt.Errorf("offsets[%d] is %d, it must lie within ±%d: %w", b, n, maxOffset, backend.ErrOption)
		}
		further = max(further, n, -n)
	}
	return further, nil
}

// foldOffsets puts what Offsets say into the one rule, where that can say it.
func (o *Options) foldOffsets(vis *backend.Visibility, d Dims) {
	switch {
	case o.Offsets == nil || o.offsetsApart(d):
	case o.Prefix == nil && o.lastKeyOnly(d):
		if !o.Causal {
			return
		}
		n := make([]int, d.Batch)
		for b := range n {
			n[b] = max(0, min(vis.Offset+o.Offsets[b]+1, d.SeqK))
			if vis.KLen != nil {
				n[b] = min(n[b], vis.KLen[b])
			}
		}
		vis.Right, vis.KLen = backend.Unbounded, n
	default:
		vis.Offset += o.Offsets[0]
	}
}

// lastKeyOnly reports whether the position of a batch's rows only says which key is
// their last one, the same for all of them.
func (o *Options) lastKeyOnly(d Dims) bool {
	return (d.SeqQ == 1 || !o.Causal) && o.Window == nil && o.ALiBi == nil
}

// offsetsApart reports whether the batches need a call each, or those next to each
// other that have the same offset.
func (o *Options) offsetsApart(d Dims) bool {
	if o.Offsets == nil || o.Prefix == nil && o.lastKeyOnly(d) {
		return false
	}
	for _, n := range o.Offsets {
		if n != o.Offsets[0] {
			return true
		}
	}
	return false
}
