package kernels

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/internal/op"
	"github.com/seed90331342/attn/kernels/internal/region"
)

// Options are the options of an attention call. The zero value is plain attention: scale
// 1/sqrt(D), every row sees every key, and the output is the only result.
//
// For query row i, key j and one head:
//
//	s   = Scale · q_i·k_j
//	s   = ScoreMod(s)                                                when there is one
//	s   = Softcap · tanh(s / Softcap)                                when Softcap > 0
//	s   = s + Bias[i,j] + RelativeBias[j-i+Sq-1] - ALiBi·distance    the terms that are set
//	p_j = exp(s_j - m) / (Σ exp(s - m) + exp(Sink - m))              over the keys that i sees, m = max(s, Sink)
//	w_j = p_j · keep_ij / (1 - Dropout.P)
//	o_i = Σ w_j·v_j       lse_i = m + log(Σ exp(s - m) + exp(Sink - m))
//
// A key that Causal, Window, KLen, the segments, Mask, BlockMask, KeyIndices, a ScoreMod or a bias of -Inf hides does not change
// the result, even if it is NaN. A fully masked row yields zeros and an LSE of -Inf (with sinks, an LSE of the sink).
// A visible NaN makes the outputs NaN of the rows that see it, and no others.
//
// Tensors are in device memory. Functions that cannot use an option refuse it by name.
type Options struct {
	// Scale multiplies Q·Kᵀ; nil means 1/sqrt(D). Set new(1.0) for unscaled scores. It is
	// 0 or has a magnitude from 2^-60 to 2^60.
	Scale *float64
	// ScoreMod replaces each scaled score by a function of it and its position, as FlexAttention's
	// score_mod does; nil means none. Rows have the positions that Causal and ALiBi give them. A
	// device without the function's language returns ErrUnsupported.
	ScoreMod *ScoreMod
	// Softcap c > 0 replaces scores s by c·tanh(s/c), with c from 2^-60 to 2^60; 0 is off.
	Softcap float64

	// Causal hides the keys after a row's own position.
	Causal bool
	// Window, when not nil, hides the keys outside of it.
	Window *Window
	// Align sets the position of the rows, for Causal and Window.
	Align Align
	// Offset [B] or [1] is added to the positions of the rows of each batch: for keys that continue others, as in a
	// cache. Batches may differ: with KLen, sequences of unequal lengths are one call. nil means 0.
	Offset []int
	// KLen [B] is the number of keys of each batch, 0 to Sk; nil means Sk.
	KLen []int
	// Prefix [B] or [1] is the number of leading keys that neither Causal nor the right
	// side of a Window hides: a prefix language model (Raffel et al. 2020). The left
	// side of a Window still hides them. For Sq = Sk = 4 and Causal:
	//
	//	Prefix 0    Prefix 3
	//	1 0 0 0     1 1 1 0
	//	1 1 0 0     1 1 1 0
	//	1 1 1 0     1 1 1 0
	//	1 1 1 1     1 1 1 1
	Prefix []int
	// Spans [B or 1] are stretches [lo, hi) of positions, in ascending order. The rows of a span see all its keys, also
	// those that Causal or a Window hides, as the tokens of one image do in Gemma 3. With pages or a BlockMask, one that
	// is longer than the Window begins with a page or block. Spans exclude Prefix. For Sq = Sk = 4 and Causal:
	//
	//	Spans {{{1, 3}}}
	//	1 0 0 0
	//	1 1 1 0
	//	1 1 1 0
	//	1 1 1 1
	Spans [][][2]int
	// QSegments [B or 1][Sq] and KSegments [B or 1][Sk] are segment ids: a row sees only keys with its own id, such as
	// those of its document, and no others are computed. The keys of a segment must be adjacent (otherwise use Mask),
	// and with a BlockMask begin at multiples of BlockSize. Positions count from the first row and key of the batch.
	// KSegments nil means QSegments.
	QSegments, KSegments [][]int32

	// Mask is Bool [B or 1, H or 1, Sq or 1, Sk or 1]; true means that the row may see
	// the key. A Mask or a Bias with fewer keys than Sk, but more than 1, hides the rest.
	Mask Tensor
	// Bias is added to the scaled (and capped) scores: F32, F16 or BF16, shaped as Mask.
	Bias Tensor
	// ALiBi [H] or [B·H] are slopes (Press et al. 2022): slope times the distance between a key and the row's position
	// is subtracted from the score. It is FlashAttention's alibi_slopes.
	ALiBi []float32
	// RelativeBias is a bias by distance, F32, F16 or BF16 [1 or B, 1 or H, 1, Sq+Sk-1]:
	// element j-i+Sq-1 is added to the score of row i and key j. For Sq = Sk = S it is
	// the [H, 2S-1] table of Shaw et al. 2018 and of T5, with j = i in the middle.
	RelativeBias Tensor
	// BlockMask is a mask of blocks, Bool [1 or B, 1 or H, ⌈Sq/BlockSize⌉, ⌈Sk/BlockSize⌉]: true means that the rows
	// of the block may see its keys. Hidden blocks are not computed.
	BlockMask Tensor
	BlockSize int

	// KeyIndices, when not nil, list the keys that each row may see, as an indexer chose them. Others are not computed.
	KeyIndices *KeyIndices

	// Sinks [H] are logits that count in the denominator of the softmax and in LSE but
	// have no value (attention sinks, as in gpt-oss); -Inf means none.
	Sinks []float32
	// Dropout drops weights at random and divides the others by 1-P. LSE does not
	// change; Weights are those after dropout.
	Dropout Dropout
	// LowPrecision trades accuracy for speed, as FlashAttention does: numbers may be rounded before they are multiplied,
	// with float32 sums, in the unit that [Call.Plan] names. By the type of k and v:
	//
	//   - F16, BF16: each weight exp(s - m), with m the largest score so far or up to 8·log 2 below it, is rounded to
	//     their type before it multiplies v. Products are taken in that type if q has it too.
	//   - F8: weights are rounded to F16, and products with a q of F16 or BF16 are taken in F16.
	//   - Q8: q is rounded to 16 bits.
	//   - F32, like q: each number is split in two of F16, as PyTorch's float32_matmul_precision "high" does, on matrix
	//     units. The bound grows by 1.7 times at most, but for weights below 2^-19.
	//
	// LSE, Weights and the sum that divides o are those before the rounding. In gradients of F16 and BF16 operands P and
	// dS may be rounded to F16 too, in units of the largest of their sum.
	LowPrecision bool

	// Pages, when not nil, makes k and v pools of pages, [P, Hkv, Size, D] and
	// [P, Hkv, Size, Dv], and lists the pages of each batch, or sequence. Sk is Pages.Keys.
	Pages *Pages
	// CuQ and CuK [N+1] pack N sequences of different lengths one after the other (FlashAttention's
	// flash_attn_varlen_func, Dao 2023): q, k and v have one batch, sequence n has the rows CuQ[n] to CuQ[n+1] of q
	// and the keys CuK[n] to CuK[n+1] of k and v, and sees nothing else. Both begin with 0, never fall and end with Sq
	// and Sk. CuK nil means CuQ. With Pages, CuK must be nil: Pages.Table has N rows, and sequence n has KLen[n] keys,
	// or Pages.Keys. Swap(Heads, Seq) of [1, total, H, D] is the q of a call.
	//
	// The other options hold for each sequence as in a call of its own: positions count
	// from its first row and key; Offset, KLen, Prefix and ALiBi have N in place of B;
	// Dropout counts sequences as batches. The results have the bits of those calls.
	CuQ, CuK []int

	// LSE requests the log-sum-exp of each row's scores (natural logarithm).
	LSE bool
	// Weights requests the softmax weights, in B·H·Sq·Sk·4 bytes of memory. The stages QK
	// and Softmax compute them after the fused kernel has computed O and LSE.
	Weights bool
}

// Set returns the names of the options that are set, in the order of the fields. BlockSize is part of BlockMask.
func (o *Options) Set() []string { return o.appendSet(make([]string, 0, 26)) } // inlined, so that callers need not allocate

func (o *Options) appendSet(names []string) []string {
	for _, option := range [...]struct {
		name string
		set  bool
	}{
		{"Scale", o.Scale != nil}, {"ScoreMod", o.ScoreMod != nil}, {"Softcap", o.Softcap != 0},
		{"Causal", o.Causal}, {"Window", o.Window != nil}, {"Align", o.Align != UpperLeft}, {"Offset", o.Offset != nil}, {"KLen", o.KLen != nil},
		{"Prefix", o.Prefix != nil}, {"Spans", o.Spans != nil}, {"QSegments", o.QSegments != nil}, {"KSegments", o.KSegments != nil},
		{"Mask", !o.Mask.IsZero()}, {"Bias", !o.Bias.IsZero()}, {"ALiBi", o.ALiBi != nil}, {"RelativeBias", !o.RelativeBias.IsZero()},
		{"BlockMask", !o.BlockMask.IsZero()}, {"KeyIndices", o.KeyIndices != nil}, {"Sinks", o.Sinks != nil}, {"Dropout", o.Dropout.P > 0},
		{"LowPrecision", o.LowPrecision}, {"Pages", o.Pages != nil}, {"CuQ", o.CuQ != nil}, {"CuK", o.CuK != nil}, {"LSE", o.LSE}, {"Weights", o.Weights},
	} {
		if option.set {
			names = append(names, option.name)
		}
	}
	return names
}

// Unbounded as a side of a [Window] means that the side has no limit.
const Unbounded = backend.Unbounded

// Window limits a row to the keys near its own position: Left before it, Right after it,
// and the position itself. Both are at least 0; [Unbounded] means no limit.
type Window struct{ Left, Right int }

// Align sets the diagonal of a causal mask or a window when there are more keys than queries, or fewer. The names are
// PyTorch's (torch.nn.attention.bias: causal_upper_left, causal_lower_right). For Causal (1 is visible):
//
//	Sq = 2, Sk = 4             Sq = 4, Sk = 2
//	UpperLeft   LowerRight     UpperLeft   LowerRight
//	1 0 0 0     1 1 1 0        1 0         0 0
//	1 1 0 0     1 1 1 1        1 1         0 0
//	                           1 1         1 0
//	                           1 1         1 1
//
// FlashAttention (since 2.1) aligns to the lower right, PyTorch's is_causal to the upper left.
type Align int

const (
	// UpperLeft gives row i the position of key i.
	UpperLeft Align = iota
	// LowerRight gives row i the position of key i + Sk - Sq, whatever KLen is.
	LowerRight
)

// problem checks o against the lengths d and returns the canonical problem with its regions.
// d.Dim 0 means that the head size is unknown; then Scale must be set.
func (o *Options) problem(d backend.Dims) (p region.Problem, err error) {
	p.Dims = d
	switch {
	case o.Scale != nil:
		p.Scale, err = factor("scale", *o.Scale)
	case d.Dim > 0:
		p.Scale = float32(1 / math.Sqrt(float64(d.Dim)))
	default:
		err = fmt.Errorf("scale is nil and cannot be derived from scores, set Scale (attention uses 1/sqrt(D)): %w", ErrOption)
	}
	if err == nil && o.Softcap != 0 {
		p.Softcap, err = factor("softcap", o.Softcap)
	}
	switch c := float64(p.Softcap); {
	case err != nil:
		return p, err
	case c < 0:
		return p, fmt.Errorf("softcap is %v, it must be positive, or 0 for none: %w", o.Softcap, ErrOption)
	case c > 0 && math.Abs(float64(p.Scale)) > op.MaxFactor*c:
		return p, fmt.Errorf("softcap is %v with a scale of %v, it must be at least |scale|/2^60: %w", o.Softcap, p.Scale, ErrOption)
	}
	p.Visible, err = o.visibility(d)
	if err = cmp.Or(o.checkLengths(d.Batch, d.Heads, "batches"), err); err == nil {
		err = o.tensors(&p)
	}
	if err != nil {
		return p, err
	}
	p.ScoreMod, p.Slopes, p.Sinks, p.Dropout, p.LowPrecision = (*backend.ScoreMod)(o.ScoreMod), o.ALiBi, o.Sinks, backend.Dropout(o.Dropout), o.LowPrecision
	switch m := p.ScoreMod; {
	case m == nil:
	case m.Go == nil && m.WGSL == "":
		return p, fmt.Errorf("score mod: Go is nil and WGSL empty, set the function that replaces scores: %w", ErrOption)
	case slices.Min(m.First[:]) < 0 || slices.Max(m.First[:]) > op.MaxLength/2: // with an Offset a position stays within int32
		return p, fmt.Errorf("score mod has First %v, each must be 0 to %d: %w", m.First, op.MaxLength/2, ErrOption)
	}
	for i, x := range p.Slopes {
		if !(x >= -op.MaxSlope && x <= op.MaxSlope) {
			return p, fmt.Errorf("alibi[%d] is %v, slopes must lie within ±2^94: %w", i, x, ErrOption)
		}
	}
	if p.Sinks != nil && len(p.Sinks) != d.Heads {
		return p, wrongLength("sinks", len(p.Sinks), "heads", d.Heads)
	}
	for i, x := range p.Sinks {
		if x != x || math.IsInf(float64(x), 1) {
			return p, fmt.Errorf("sinks[%d] is %v, it must be finite, or -Inf for none: %w", i, x, ErrOption)
		}
	}
	if x := p.Dropout; !(x.P >= 0 && x.P < 1) {
		return p, fmt.Errorf("dropout is %v, it must be at least 0 and less than 1: %w", x.P, ErrOption)
	} else if slices.Min(x.First[:]) < 0 || slices.Max(x.First[:]) > math.MaxInt32 {
		return p, fmt.Errorf("dropout has First %v, each must be 0 to %d: %w", x.First, math.MaxInt32, ErrOption)
	}
	if o.Prefix != nil || o.Spans != nil || o.QSegments != nil || o.KSegments != nil {
		p.Regions, err = o.regions(&p, d.SeqK)
	}
	return p, err
}

// factor returns an option that multiplies or divides scores as float32: 0, or a number
// whose magnitude backend.Problem accepts.
func factor(name string, x float64) (float32, error) {
	if size := math.Abs(x); x != 0 && !(size >= op.MinFactor && size <= op.MaxFactor) {
		return 0, fmt.Errorf("%s is %v, it must be 0 or have a magnitude from 2^-60 to 2^60: %w", name, x, ErrOption)
	}
	return float32(x), nil
}

// checkLengths checks the lengths of the options with a value for each of n batches, or packed sequences.
func (o *Options) checkLengths(n, heads int, of string) error {
	switch {
	case o.KLen != nil && len(o.KLen) != n:
		return wrongLength("klen", len(o.KLen), of, n)
	case o.Offset != nil && len(o.Offset) != 1 && len(o.Offset) != n:
		return wrongLength("offset", len(o.Offset), of, 1, n)
	case o.Prefix != nil && len(o.Prefix) != 1 && len(o.Prefix) != n:
		return wrongLength("prefix", len(o.Prefix), of, 1, n)
	case o.Spans != nil && len(o.Spans) != 1 && len(o.Spans) != n:
		return wrongLength("spans", len(o.Spans), of, 1, n)
	case o.ALiBi != nil && len(o.ALiBi) != heads && len(o.ALiBi) != n*heads:
		return wrongLength("alibi", len(o.ALiBi), "heads, or of heads in all "+of, heads, n*heads)
	}
	return nil
}

// wrongLength is the error of a list of n elements that has none of the lengths want.
func wrongLength(name string, n int, of string, want ...int) error {
	lengths := strings.ReplaceAll(strings.Trim(fmt.Sprint(slices.Compact(want)), "[]"), " ", " or ")
	return fmt.Errorf("%s has %d elements, it must have %s, the number of %s: %w", name, n, lengths, of, ErrShape)
}

// visibility returns Causal, Window, Align, Offset and KLen as the one rule of backend.Visibility.
func (o *Options) visibility(d backend.Dims) (backend.Visibility, error) {
	vis := backend.Everything()
	furthest, most := 0, op.MaxLength
	if len(o.Offset) > 1 { // kernels add them to other offsets
		most /= 4
	}
	for b, n := range o.Offset {
		if n < -most || n > most {
			return vis, fmt.Errorf("offset[%d] is %d, it must lie within ±%d: %w", b, n, most, ErrOption)
		}
		furthest = max(furthest, n, -n)
	}
	if w := o.Window; w != nil {
		if w.Left < 0 || w.Right < 0 {
			return vis, fmt.Errorf("window is %d,%d, both sides must be at least 0 (Unbounded for no limit): %w", w.Left, w.Right, ErrOption)
		}
		vis.Left, vis.Right = w.Left, w.Right
	}
	if o.Causal {
		vis.Right = 0
	}
	switch o.Align {
	case UpperLeft:
	case LowerRight:
		vis.Offset = d.SeqK - d.SeqQ
	default:
		return vis, fmt.Errorf("align is %d, it must be UpperLeft or LowerRight: %w", o.Align, ErrOption)
	}
	// A window wider than the distance of any row to any key hides nothing. Unbounded lets backends skip the test.
	reach := d.SeqQ + d.SeqK + max(vis.Offset, -vis.Offset) + furthest
	for _, side := range [2]*int{&vis.Left, &vis.Right} {
		if *side >= reach {
			*side = Unbounded
		}
	}
	for b, n := range o.KLen {
		if n < 0 || n > d.SeqK {
			return vis, fmt.Errorf("klen[%d] is %d, there are %d keys: it must be 0 to %d: %w", b, n, d.SeqK, d.SeqK, ErrOption)
		}
	}
	vis.KLen = o.KLen
	if slices.ContainsFunc(o.Offset, func(n int) bool { return n != o.Offset[0] }) {
		vis.Offsets = o.Offset
	} else if len(o.Offset) > 0 {
		vis.Offset += o.Offset[0]
	}
	return vis, nil
}

// tensors fills in the tensors of p and drops the keys that a short Mask or Bias lacks.
func (o *Options) tensors(p *region.Problem) (err error) {
	d := p.Dims
	scores := Shape{d.Batch, d.Heads, d.SeqQ, d.SeqK}
	if !o.RelativeBias.IsZero() {
		if p.Relative, err = broadcast("relative bias", o.RelativeBias, Shape{d.Batch, d.Heads, 1, max(d.SeqQ+d.SeqK-1, 0)}, false, false); err != nil {
			return err
		}
	}
	if !o.BlockMask.IsZero() {
		n := o.BlockSize
		if n < 1 {
			return fmt.Errorf("block size is %d, with a block mask it must be at least 1: %w", n, ErrOption)
		}
		n = min(n, max(d.SeqQ, d.SeqK, 1)) // larger ones are the same
		p.BlockQ, p.BlockK = n, n
		p.Blocks, err = broadcast("block mask", o.BlockMask, Shape{d.Batch, d.Heads, region.CeilDiv(d.SeqQ, n), region.CeilDiv(d.SeqK, n)}, true, false)
		if err != nil {
			return fmt.Errorf("%w (a block has %d rows and keys)", err, n)
		}
	}
	if o.Mask.IsZero() && o.Bias.IsZero() {
		return nil
	}
	if p.Mask, err = broadcast("mask", o.Mask, scores, true, true); err != nil {
		return err
	}
	if p.Bias, err = broadcast("bias", o.Bias, scores, false, true); err != nil {
		return err
	}
	keys := d.SeqK
	for _, t := range [...]Tensor{p.Mask, p.Bias} {
		if !t.IsZero() {
			keys = min(keys, t.Shape()[Dim])
		}
	}
	if keys == d.SeqK {
		return nil
	}
	p.Dims.SeqK = keys
	p.Problem = (&region.Problem{Problem: p.Problem, Dims: d}).Cut(region.WholeRegion(p.Dims))
	return nil
}

// broadcast repeats a mask (Bool) or a bias to shape. With short, it may have fewer keys.
func broadcast(name string, t Tensor, shape Shape, mask, short bool) (Tensor, error) {
	switch {
	case t.IsZero():
		return t, nil
	case mask && t.DType() != Bool:
		return t, fmt.Errorf("%s is %v, it must be bool (give a float mask as Bias): %w", name, t.DType(), ErrDType)
	case !mask && !t.DType().Float():
		return t, fmt.Errorf("%s is %v, it must be f32, f16 or bf16 (give a bool mask as Mask): %w", name, t.DType(), ErrDType)
	}
	if n := t.Shape()[Dim]; short && n > 1 {
		shape[Dim] = min(shape[Dim], n)
	}
	return expanded(name, t, shape)
}

// expanded is Tensor.Broadcast with the operand's name in errors.
func expanded(name string, t Tensor, shape Shape) (Tensor, error) {
	t, err := t.Broadcast(shape)
	if err != nil {
		err = fmt.Errorf("%s: %w", name, err)
	}
	return t, err
}
