package backend

import "math"

// Unbounded as a side of a [Visibility] window means that the side has no limit.
const Unbounded = math.MaxInt32

// Visibility says which keys a query row may see. Row i of batch b sees key j
// when
//
//	-Left <= j - (i + Offset) <= Right   and   j < KLen[b]
//
// Causal attention, sliding windows, caches and right padding are values of it:
// causal is Right = 0 with Left [Unbounded], and Offset says on which key the
// diagonal starts (0: the upper left corner, Sk-Sq: the lower right one). To
// see everything takes both sides Unbounded; the zero value sees the diagonal
// alone.
type Visibility struct {
	// Offset is the key index that query row 0 stands at; it may be negative.
	Offset int
	// Left and Right are how many keys before and after its own position a
	// row sees; at least 0, Unbounded for no limit.
	Left, Right int
	// KLen holds, for each batch, how many of the keys exist, 0 to Sk; nil
	// means all of them.
	KLen []int
}

// Everything is the Visibility in which every row sees every key.
func Everything() Visibility { return Visibility{Left: Unbounded, Right: Unbounded} }

// Range returns the keys [lo, hi) that row i of batch b sees out of seqK; lo ==
// hi when it sees none.
func (v Visibility) Range(b, i, seqK int) (lo, hi int) {
	hi = seqK
	if v.KLen != nil {
		hi = min(hi, v.KLen[b])
	}
	if v.Left != Unbounded {
		lo = max(0, i+v.Offset-v.Left)
	}
	if v.Right != Unbounded {
		hi = min(hi, i+v.Offset+v.Right+1)
	}
	if lo >= hi {
		return 0, 0
	}
	return lo, hi
}

// Sees reports whether row i of batch b sees key j.
func (v Visibility) Sees(b, i, j, seqK int) bool {
	lo, hi := v.Range(b, i, seqK)
	return lo <= j && j < hi
}

// Pairs returns how many (query, key) pairs of one head are visible, summed
// over the batches.
func (v Visibility) Pairs(batch, seqQ, seqK int) int64 {
	if v.KLen == nil && v.Left == Unbounded && v.Right == Unbounded {
		return int64(batch) * int64(seqQ) * int64(seqK)
	}
	var n int64
	for b := range batch {
		for i := range seqQ {
			lo, hi := v.Range(b, i, seqK)
			n += int64(hi - lo)
		}
		if v.KLen == nil {
			return n * int64(batch)
		}
	}
	return n
}

// Problem is everything but the operands that decides what an attention call
// computes. For query row i, key j and one head:
//
//	s   = Scale · q_i·k_j
//	s   = Softcap · tanh(s / Softcap)    when Softcap > 0
//	s   = s + (Bias[i,j] + Relative[j-i+Sq-1] - Slope·|i + Visible.Offset - j|)    those that there are
//	p_j = exp(s_j - m) / (Σ exp(s - m) + exp(Sink - m))    over the keys that i sees, m = max(s, Sink)
//	w_j = p_j · keep_ij / (1 - Dropout.P)
//	o_i = Σ w_j·v_j       lse_i = m + log(Σ exp(s - m) + exp(Sink - m))
//
// A key is hidden from a row by the visibility rule, by a false in Mask or in
// Blocks, or by a Bias or a Relative of exactly -Inf; what a hidden key or value
// holds, NaN and Inf included, changes nothing. A row that sees no key, or whose
// scores are all -Inf, has weights 0, output 0 and LSE -Inf, or the sink where there
// is one. A NaN in what is visible comes out as NaN; a weight that dropout makes 0
// hides its value, but not a NaN among the scores, which makes all weights NaN.
type Problem struct {
	// Scale multiplies q·k. It is finite; 0 is allowed.
	Scale float32
	// Softcap bounds the scaled scores to (-Softcap, Softcap); 0 turns it off.
	Softcap float32
	Visible Visibility
	// Mask is a Bool tensor broadcast to [B, H, Sq, Sk]; true may be seen.
	// The zero Tensor means none.
	Mask Tensor
	// Bias is an F32, F16 or BF16 tensor broadcast to [B, H, Sq, Sk]. The zero
	// Tensor means none. Mask and Bias may both be there. A finite bias beyond
	// ±MaxBias counts as that, and so does a sum with the two that follow; it hides
	// nothing, as only -Inf does.
	Bias Tensor
	// Slopes are those of attention with linear biases (Press et al. 2022, ALiBi):
	// within ±MaxSlope, [H] or batch by batch [B·H]. nil means none.
	Slopes []float32
	// Relative is a bias by distance, an F32, F16 or BF16 tensor broadcast to
	// [B, H, 1, Sq+Sk-1]: its element j-i+Sq-1 is added to the score of row i and
	// key j. Finite ones are bounded to ±MaxRelative. The zero Tensor means none.
	Relative Tensor
	// Blocks is a mask of blocks, a Bool tensor broadcast to [B, H, ⌈Sq/BlockQ⌉,
	// ⌈Sk/BlockK⌉]: its element (i/BlockQ, j/BlockK), both rounded down, says
	// whether row i may see key j. Blocks that nobody sees are not computed. The
	// zero Tensor means none.
	Blocks         Tensor
	BlockQ, BlockK int
	// Sinks are scores without a value, [H], one for all rows of a head, that take part
	// in the denominator alone (Xiao et al. 2024, attention sinks; learnt as in
	// gpt-oss). -Inf is none; finite ones are bounded as Bias. nil means none.
	Sinks []float32
	// Dropout drops weights; its zero value drops none.
	Dropout Dropout
}

// Operands returns the problem's tensors under the names that errors use. Those that the
// problem lacks are the zero Tensor.
func (p *Problem) Operands() [4]Operand {
	return [4]Operand{{"mask", p.Mask}, {"bias", p.Bias}, {"relative", p.Relative}, {"blocks", p.Blocks}}
}

// Slope returns the slope of head h of batch b out of heads, 0 when there are none.
func (p *Problem) Slope(b, h, heads int) float32 {
	switch {
	case p.Slopes == nil:
		return 0
	case len(p.Slopes) > heads:
		return p.Slopes[b*heads+h]
	}
	return p.Slopes[h]
}

// Sink returns the sink of head h, -Inf when there is none, bounded by MaxBias.
func (p *Problem) Sink(h int) float32 {
	if p.Sinks == nil {
		return float32(math.Inf(-1))
	}
	return Bound(p.Sinks[h], MaxBias)
}

// MaxBias is the largest bias that is told from larger ones, 2^127: half of the
// largest float32, so that log2(e) times it, which kernels add to scores of the same
// unit, is still finite.
const MaxBias = 0x1p127

// MaxRelative bounds a finite Relative, so that what is added together is finite too.
const MaxRelative = 0x1p126

// MaxSlope is the largest slope, so that its product with any distance is below 2^125.
const MaxSlope = 0x1p94

// Bound returns a bias as it is added: a finite x within ±limit.
func Bound(x, limit float32) float32 {
	if math.IsInf(float64(x), 0) {
		return x
	}
	return max(-limit, min(x, limit)) // NaN stays
}

// Call is one fused attention call in canonical form. Package kernels makes it
// from a program's options and has validated it:
//
//	Q   [B, H, Sq, D]
//	K   [B, Hkv, Sk, D]    Hkv divides H; query head h reads head h/(H/Hkv)
//	V   [B, Hkv, Sk, Dv]
//	O   [B, H, Sq, Dv]     of Q's type or F32
//	LSE [B, H, Sq, 1]      F32, natural log; the zero Tensor when not wanted
//
// Q is F32, F16 or BF16, K and V one of these or Q8; every length is at least 1;
// strides are arbitrary, K and V may repeat over batches by a stride of zero.
type Call struct {
	Q, K, V, O, LSE Tensor
	Problem
	// Pages, unless nil, says that K and V are pools of pages.
	Pages *Pages
	// Resume, unless nil, is what an earlier call of the same operands and
	// options left (see [Interrupted]). A backend that cannot go on from it
	// computes the call from the start.
	Resume *Partial
}

// Operands returns the call's outputs and inputs under the names that errors use. Those
// that the call lacks are the zero Tensor.
func (c *Call) Operands() (outputs [2]Operand, inputs [7]Operand) {
	outputs = [2]Operand{{"o", c.O}, {"lse", c.LSE}}
	inputs = [7]Operand{{"q", c.Q}, {"k", c.K}, {"v", c.V}}
	p := c.Problem.Operands()
	copy(inputs[3:], p[:])
	return outputs, inputs
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

// Dims reads the lengths off the operands' shapes.
func (c *Call) Dims() Dims {
	q, k, v := c.Q.Shape(), c.K.Shape(), c.V.Shape()
	d := Dims{q[Batch], q[Heads], k[Heads], q[Seq], k[Seq], q[Dim], v[Dim]}
	if c.Pages != nil {
		d.SeqK = c.Pages.Keys
	}
	return d
}
