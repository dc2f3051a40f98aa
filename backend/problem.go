package backend

import "math"

// Unbounded as a side of a [Visibility] window means that the side has no limit.
const Unbounded = math.MaxInt32

// Visibility is the rule by which a query row sees keys. Row i of batch b sees key j when
//
//	-Left <= j - (i + Offset + Offsets[b]) <= Right   and   j < KLen[b]
//
// It expresses causal attention, sliding windows, caches and right padding: causal attention is Right = 0 with Left
// [Unbounded], and Offset is the key at which the diagonal starts (0: the upper left corner, Sk-Sq: the lower right
// one). With both sides Unbounded every row sees every key; the zero value sees only the diagonal.
type Visibility struct {
	// Offset is the position of query row 0 among the keys; it may be negative.
	Offset int
	// Offsets [B] are added to Offset, one for each batch, as where sequences of unequal lengths end; nil means zeros.
	Offsets []int
	// Left and Right are the numbers of keys that a row sees before and after its own
	// position; at least 0, Unbounded for no limit.
	Left, Right int
	// KLen [B] is the number of keys of each batch, 0 to Sk; nil means Sk.
	KLen []int
}

// Everything is the Visibility in which every row sees every key.
func Everything() Visibility { return Visibility{Left: Unbounded, Right: Unbounded} }

// OffsetOf returns the position of query row 0 of batch b among the keys.
func (v Visibility) OffsetOf(b int) int {
	if v.Offsets != nil {
		return v.Offset + v.Offsets[b]
	}
	return v.Offset
}

// Range returns the keys [lo, hi) of seqK keys that row i of batch b sees; lo == hi when it sees none.
func (v *Visibility) Range(b, i, seqK int) (lo, hi int) {
	lo, hi, end := v.Window(b, seqK)
	if lo, hi = max(0, lo+i), min(end, hi+i); lo >= hi {
		return 0, 0
	}
	return lo, hi
}

// Window returns the keys [lo, hi) that row 0 of batch b would see if there were keys before the first and after the last. A row
// i sees those of [lo+i, hi+i) that are in [0, end).
func (v *Visibility) Window(b, seqK int) (lo, hi, end int) {
	if end = seqK; v.KLen != nil {
		end = min(end, v.KLen[b])
	}
	if lo, hi = -Unbounded, end; v.Left != Unbounded {
		lo = v.OffsetOf(b) - v.Left
	}
	if v.Right != Unbounded {
		hi = v.OffsetOf(b) + v.Right + 1
	}
	return lo, hi, end
}

// Pairs returns the number of visible (query, key) pairs of one head, summed over the batches.
func (v Visibility) Pairs(batch, seqQ, seqK int) (n int64) {
	if v.KLen == nil && v.Offsets == nil && batch > 0 {
		return v.PairsOf(0, seqQ, seqK) * int64(batch)
	}
	for b := range batch {
		n += v.PairsOf(b, seqQ, seqK)
	}
	return n
}

// PairsOf returns the number of visible (query, key) pairs of one head of batch b.
func (v Visibility) PairsOf(b, seqQ, seqK int) int64 {
	lo, hi, end := v.Window(b, seqK)
	// before sums the keys before at + i over the rows i.
	before := func(at int) int64 { return below(int64(at)+int64(seqQ), int64(end)) - below(int64(at), int64(end)) }
	return before(hi) - before(lo)
}

// below returns the sum of x clamped to [0, limit] over all x < end.
func below(end, limit int64) int64 {
	inside := min(max(end, 0), limit)
	return inside*(inside-1)/2 + limit*max(end-limit, 0)
}

// Problem is everything except the operands that determines what an attention call
// computes. For query row i, key j and one head:
//
//	s   = Scale · q_i·k_j
//	s   = ScoreMod(s, b, h, i + Visible.OffsetOf(b), j)    when there is one
//	s   = Softcap · tanh(s / Softcap)    when Softcap > 0; a -Inf of ScoreMod stays
//	s   = s + (Bias[i,j] + Relative[j-i+Sq-1] - Slope·|i + Visible.OffsetOf(b) - j|)    the terms that are set
//	p_j = exp(s_j - m) / (Σ exp(s - m) + exp(Sink - m))    over the keys that i sees, m = max(s, Sink)
//	w_j = p_j · keep_ij / (1 - Dropout.P)
//	o_i = Σ w_j·v_j       lse_i = m + log(Σ exp(s - m) + exp(Sink - m))
//
// A key is hidden from a row by the visibility rule, by a false in Mask or in Blocks, or by a Bias, a Relative or a
// ScoreMod of exactly -Inf. The contents of a hidden key or value, NaN and Inf included, change nothing. A fully
// masked row, and one whose scores are all -Inf, has weights 0, output 0 and LSE -Inf (with a sink, the sink). A
// visible NaN propagates to the output. A weight that dropout sets to 0 hides its value, but a NaN score makes all
// weights of the row NaN.
//
// Arithmetic is float32. Every backend is within the error bound of package oracle where, for all keys that a row sees,
//
//	|q_d|, |k_d| <= 2^60    max(1, |Scale|)·Σ_d |q_d·k_d| <= 2^120    Σ_j |v_j| <= 2^60
//
// with |Scale|/Softcap in place of |Scale| where it is larger, and also for Σ_j |v_j| <= 2^126 where no score exceeds 2^24. The bound grows with the
// scores: beyond 2^24 it says little more than that the output is finite. Larger numbers
// may overflow, on one backend and not on another, which makes the output of the rows that
// see them Inf, NaN or inexact, and no other.
type Problem struct {
	// Scale multiplies q·k. It is 0 or has a magnitude from 2^-60 to 2^60.
	Scale float32
	// Softcap bounds the scaled scores to (-Softcap, Softcap); 0 turns it off. It is from
	// 2^-60 to 2^60, and |Scale|/Softcap is at most 2^60.
	Softcap float32
	// ScoreMod replaces scaled scores; nil means none.
	ScoreMod *ScoreMod
	Visible  Visibility
	// Mask is a Bool tensor broadcast to [B, H, Sq, Sk]; true means visible. The zero Tensor means none.
	Mask Tensor
	// Bias is an F32, F16 or BF16 tensor broadcast to [B, H, Sq, Sk]. The zero Tensor means none. Finite biases, and
	// finite sums with Relative and Slopes, are clamped to ±MaxBias; only -Inf hides.
	Bias Tensor
	// Slopes [H] or [B·H] are the slopes of linear biases (Press et al. 2022, ALiBi), within ±2^94. nil means none.
	Slopes []float32
	// Relative is a bias by distance, an F32, F16 or BF16 tensor broadcast to [B, H, 1, Sq+Sk-1]: element j-i+Sq-1 is
	// added to the score of row i and key j. Finite elements are clamped to ±MaxRelative. The zero Tensor means none.
	Relative Tensor
	// Blocks is a mask of blocks, a Bool tensor broadcast to [B, H, ⌈Sq/BlockQ⌉, ⌈Sk/BlockK⌉]: row i may see key j if
	// element (⌊i/BlockQ⌋, ⌊j/BlockK⌋) is true. Hidden blocks are not computed. The zero Tensor means none.
	Blocks         Tensor
	BlockQ, BlockK int
	// Sinks [H] are scores without a value, one for all rows of a head, that count only in the denominator (Xiao et al.
	// 2024, attention sinks; learned in gpt-oss). -Inf means none; finite sinks are clamped as Bias. nil means none.
	Sinks []float32
	// Dropout drops weights; the zero value drops none.
	Dropout Dropout
	// LowPrecision lets a backend round p_j to [Call.WeightType], before or after dropout, before it multiplies v_j. p_j is
	// then relative to a score of the row that is at most the largest so far, with exp(s_j - m) at most 2^8. The sum that
	// divides, and lse, are those of the p_j before they are rounded. Next to Q8 keys a row of q may be rounded to
	// integers of 16 bits, in units of its largest magnitude over 127·2^8. Where q, k and v are F32, products may be
	// split, see package oracle. In gradients with v of F16 or BF16, p_j and dx_j may be rounded to F16 before they multiply do, k
	// and q, as package oracle says. The stages ignore it.
	LowPrecision bool
}

// Operands returns the problem's tensors under the names that errors use. Those that the
// problem lacks are the zero Tensor.
func (p *Problem) Operands() [4]Operand {
	return [4]Operand{{"mask", p.Mask}, {"bias", p.Bias}, {"relative", p.Relative}, {"blocks", p.Blocks}}
}

// Slope returns the slope of head h of batch b, 0 without Slopes. heads is H.
func (p *Problem) Slope(b, h, heads int) float32 {
	switch {
	case p.Slopes == nil:
		return 0
	case len(p.Slopes) > heads:
		return p.Slopes[b*heads+h]
	}
	return p.Slopes[h]
}

// Sink returns the sink of head h, clamped to ±MaxBias; -Inf without Sinks.
func (p *Problem) Sink(h int) float32 {
	if p.Sinks == nil {
		return float32(math.Inf(-1))
	}
	return Bound(p.Sinks[h], MaxBias)
}

// MaxBias is the largest magnitude of a bias, 2^127. Kernels add log2(e) times the bias to
// scores in base 2, which is then still finite.
const MaxBias = 0x1p127

// MaxRelative is the largest magnitude of a Relative, so that its sum with a bias is finite.
const MaxRelative = 0x1p126

// Bound clamps a finite x to ±limit and returns other x unchanged.
func Bound(x, limit float32) float32 {
	if math.IsInf(float64(x), 0) {
		return x
	}
	return max(-limit, min(x, limit)) // NaN stays
}

// Call is one fused attention call in canonical form. Package kernels makes it from a
// program's options and validates it:
//
//	Q   [B, H, Sq, D]
//	K   [B, Hkv, Sk, D]    Hkv divides H; query head h reads head h/(H/Hkv)
//	V   [B, Hkv, Sk, Dv]
//	O   [B, H, Sq, Dv]     of Q's type or F32
//	LSE [B, H, Sq, 1]      F32, natural logarithm; the zero Tensor when not requested
//
// Q is F32, F16 or BF16, K and V one of these, Q8, Q4 or F8; every length is at least 1;
// strides are arbitrary, K and V may repeat over batches by a stride of zero.
type Call struct {
	Q, K, V, O, LSE Tensor
	Problem
	// Pages, unless nil, makes K and V pools of pages.
	Pages *Pages
	// Listed, unless nil, lists the keys of each batch that count, ascending: Listed[b][n] in place of key n, for all rows
	// and heads. Masks, biases, positions and dropout are those of the listed keys. The sides of Visible are Unbounded,
	// KLen[b] is the length of Listed[b], and Sk that of the longest list, or 1.
	Listed [][]int32
	// Lists, unless it is the zero Tensor, lists keys of calls of one row, Sq = 1: those of batch b in any order, I32
	// [B, 1, 1, TopK]. The row sees of these what Visible shows, see [Call.ListKeys]. Only the device knows them, so that
	// Sk is taken for TopK. There are no masks, blocks, biases but Slopes, dropout, score mods and Listed.
	Lists Tensor
	// Resume, unless nil, is what an earlier call of the same operands and options finished (see [Interrupted]). A
	// backend that cannot continue from it computes the call from the start.
	Resume *Partial
}

// WeightType returns the type to which weights may be rounded before they multiply values: with
// LowPrecision that of V if it is F16 or BF16, and F16 if it is F8, else F32.
func (c *Call) WeightType() DType {
	switch t := c.V.DType(); {
	case c.LowPrecision && (t == F16 || t == BF16):
		return t
	case c.LowPrecision && t == F8:
		return F16
	}
	return F32
}

// Split reports whether products of float32 may be split: with LowPrecision, where q, k and v are F32.
func (c *Call) Split() bool {
	return c.LowPrecision && c.Q.DType() == F32 && c.K.DType() == F32 && c.V.DType() == F32
}

// Operands returns the call's outputs and inputs under the names that errors use. Those
// that the call lacks are the zero Tensor.
func (c *Call) Operands() (outputs [2]Operand, inputs [8]Operand) {
	return [2]Operand{{"o", c.O}, {"lse", c.LSE}},
		[8]Operand{{"q", c.Q}, {"k", c.K}, {"v", c.V}, {"mask", c.Mask}, {"bias", c.Bias}, {"relative", c.Relative}, {"blocks", c.Blocks}, {"key indices", c.Lists}}
}

// Dims are the lengths of an attention call.
type Dims struct {
	Batch    int // B
	Heads    int // H, query heads
	KVHeads  int // Hkv, key and value heads; divides Heads
	SeqQ     int // Sq
	SeqK     int // Sk
	Dim      int // D, of a query and a key
	ValueDim int // Dv, of a value and an output
}

// Dims returns the lengths of the call.
func (c *Call) Dims() Dims {
	q, k, v := c.Q.Shape(), c.K.Shape(), c.V.Shape()
	d := Dims{q[Batch], q[Heads], k[Heads], q[Seq], k[Seq], q[Dim], v[Dim]}
	if c.Pages != nil {
		d.SeqK = c.Pages.Keys
	}
	if !c.Lists.IsZero() {
		d.SeqK = max(1, c.Lists.Shape()[Dim])
	}
	if c.Listed != nil {
		d.SeqK = 1
		for _, list := range c.Listed {
			d.SeqK = max(d.SeqK, len(list))
		}
	}
	return d
}

// Positions returns the number of keys that masks and biases have: Sk, listed or not.
func (c *Call) Positions() int {
	all := Call{Q: c.Q, K: c.K, V: c.V, Pages: c.Pages}
	return all.Dims().SeqK
}
