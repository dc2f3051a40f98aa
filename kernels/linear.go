package kernels

import (
	"cmp"
	"context"
	"fmt"
	"math"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/internal/op"
)

// LinearAttention is one call of linear attention, whose state of fixed size takes the place of a cache of keys and
// values (Katharopoulos et al. 2020; Yang et al. 2024, Gated Delta Networks). The names are those of the operator
// LinearAttention of ONNX. For each sequence and state head, with row vectors q, k and v of token t:
//
//	S = diag(exp g)·S          Decay
//	d = β·(v - Sᵀk)            Beta; without it d = v
//	S = S + kᵀd
//	o = scale·q·S              the output sees the new state
//
//	O             [B, Ho, T, V] F32, F16 or BF16    Ho = max(Hq, Hv)
//	Q             [B, Hq, T, K]                     Hq is a multiple or a divisor of Hv
//	K             [B, Hk, T, K]                     Hk divides Hv
//	V             [B, Hv, T, V]
//	Decay         [B, Hv, T, 1 or K]                g, the natural logarithm of the decay of a head or a channel
//	Beta          [B, Hv or 1, T, 1]                β
//	PastState     [N, Hv, K, V] F32                 S before the first token of each of N sequences
//	PresentState  [N, Hv, K, V] F32                 S after the last token
//
// Inputs are F32, F16 or BF16, each independently, and strides are arbitrary. Output head h reads query head
// ⌊h·Hq/Ho⌋ and state head ⌊h·Hv/Ho⌋, which reads key head ⌊h·Hk/Hv⌋. The arithmetic is in float32 at least. A g of -Inf
// clears the state, as does one below -128. Tokens depend on no later ones, but for rounding on matrix units of a GPU, and
// sequences on no other ones.
//
// With Beta each key should have length 1 and β lie in [0, 2]. Otherwise the state may grow without bound, and rounding
// errors with it. Nothing is normalised here, see [Device.Normalise].
type LinearAttention struct {
	O, Q, K, V Tensor
	// Decay and Beta select the update rule. The zero Tensor means none.
	Decay, Beta Tensor
	// PastState and PresentState may be the same view, and must not overlap otherwise. The zero Tensor means states of
	// zeros, and that the final states are not requested.
	PastState, PresentState Tensor
	// Scale multiplies the outputs. 0 means K^-0.5.
	Scale float32
	// CuQ [N+1], unless nil, packs N sequences one after the other, as in attention: B is 1, and sequence n has the
	// tokens CuQ[n] to CuQ[n+1]. Without it N is B.
	CuQ []int
	// ChunkSize is a hint: how many tokens to compute together. 0 leaves the choice to the device.
	ChunkSize int
}

// LinearAttention computes linear attention. [LinearAttention] has the formula, the shapes and the options. A call with
// one token for each sequence is a step of decoding, usually with PastState as PresentState. Longer calls compute chunks
// of tokens together: on the CPU as products of matrices, and on GPUs from 32 tokens a sequence on, for keys of up to 128
// elements.
//
// Errors: ErrShape and ErrDType name the operand, ErrOption an option, ErrUnsupported when the device has no linear
// attention, and the backend's.
func (d *Device) LinearAttention(ctx context.Context, c LinearAttention) (err error) {
	defer op.Annotate(&err, "linear attention")
	b, err := need[backend.LinearAttender](ctx, d, "linear attention")
	err = cmp.Or(err, checkLinear(&c))
	return d.compute(ctx, err, func() error { return b.LinearAttention(ctx, (*backend.LinearAttention)(&c)) }, c.O, c.PresentState)
}

// checkLinear checks c, and sets its defaults.
func checkLinear(c *LinearAttention) error {
	if err := cmp.Or(c.Q.Check("q", floats...), c.K.Check("k", floats...), c.V.Check("v", floats...)); err != nil {
		return err
	}
	q, k, v := c.Q.Shape(), c.K.Shape(), c.V.Shape()
	hq, hk, hv, tokens := q[Heads], k[Heads], v[Heads], q[Seq]
	if k != (Shape{q[Batch], hk, tokens, q[Dim]}) || v != (Shape{q[Batch], hv, tokens, v[Dim]}) {
		return fmt.Errorf("q has shape %v, k %v and v %v: they must be [B, Hq, T, K], [B, Hk, T, K] and [B, Hv, T, V]: %w", q, k, v, ErrShape)
	}
	if min(hq, hk, hv) < 1 || hv%hk != 0 || max(hq, hv)%min(hq, hv) != 0 {
		return fmt.Errorf("there are %d query heads, %d key heads and %d value heads: key heads must divide value heads, and query heads be a multiple or a divisor of value heads: %w", hq, hk, hv, ErrShape)
	}
	decays := Shape{q[Batch], hv, tokens, q[Dim]}
	if c.Decay.Shape()[Dim] == 1 {
		decays[Dim] = 1
	}
	var bad error // of beta
	if !c.Beta.IsZero() {
		c.Beta, bad = repeated("beta", c.Beta, Shape{q[Batch], hv, tokens, 1}, Heads, "[B, Hv or 1, T, 1] of v")
	}
	err := cmp.Or(c.O.CheckShape("o", Shape{q[Batch], max(hq, hv), tokens, v[Dim]}, "[B, max(Hq, Hv), T, V] of q and v", floats...),
		checkOptional("decay", c.Decay, decays, "[B, Hv, T, 1 or K] of k and v", floats...), bad, checkSequences(c.CuQ, q[Batch], tokens, "tokens"),
		checkStates(c.PastState, c.PresentState, Shape{backend.Sequences(c.CuQ, q[Batch]), hv, q[Dim], v[Dim]}, "[N, Hv, K, V] of sequences, k and v", F32))
	c.Scale = cmp.Or(c.Scale, float32(1/math.Sqrt(float64(q[Dim]))))
	switch {
	case err != nil:
		return err
	case !(math.Abs(float64(c.Scale)) <= op.MaxFactor): // or NaN
		return fmt.Errorf("scale is %v, its magnitude must be at most 2^60, or 0 for K^-0.5: %w", c.Scale, ErrOption)
	case c.ChunkSize < 0:
		return fmt.Errorf("chunkSize is %d, it must be at least 1, or 0 for the backend's: %w", c.ChunkSize, ErrOption)
	}
	return nil
}

// checkSequences checks the list of packed sequences, unless it is nil.
func checkSequences(cuQ []int, batches, total int, of string) error {
	switch {
	case cuQ == nil:
		return nil
	case batches != 1:
		return fmt.Errorf("there are %d batches, packed sequences (cuQ) have 1: %w", batches, ErrShape)
	case len(cuQ) < 2:
		return fmt.Errorf("cuQ has %d entries: it has 0 and then the end of each sequence: %w", len(cuQ), ErrShape)
	}
	return checkCumulative("cuQ", cuQ, total, of)
}

// checkStates checks the states before and after a call, each of which may be absent.
func checkStates(past, present Tensor, shape Shape, rule string, dtypes ...DType) error {
	return cmp.Or(checkOptional("past state", past, shape, rule, dtypes...), checkOptional("present state", present, shape, rule, dtypes...))
}

// CausalConv is one call of a causal convolution of each channel along the tokens, as before the linear attention of
// Qwen3-Next. The names are those of the operator CausalConvWithState of ONNX, whose axes B, Ch, L are here B, S, Ch:
//
//	y_s = f(bias + Σ_i w_i·x_(s-W+1+i))    f is the identity or SiLU, x·σ(x)
//
//	Y, X          [B, 1, S, Ch]
//	W             [1, 1, W, Ch]      W from 1 to 64; the strides of a view place the weights [Ch, 1, W] of Conv1d
//	Bias          [1, 1, 1, Ch]      the zero Tensor means none
//	PastState     [N, 1, W-1, Ch]    the rows of x before the first token of each of N sequences
//	PresentState  [N, 1, W-1, Ch]    the last W-1 rows of past state and x together
//
// All are F32, F16 or BF16, each independently, and strides are arbitrary. The arithmetic is in float32.
type CausalConv struct {
	Y, X, W, Bias Tensor
	// PastState and PresentState may be the same view, and must not overlap otherwise. The zero Tensor means states of
	// zeros, and that the final states are not requested.
	PastState, PresentState Tensor
	// SiLU applies SiLU, which ONNX calls activation silu or swish.
	SiLU bool
	// CuQ packs sequences as in LinearAttention.
	CuQ []int
}

// CausalConv computes a causal convolution. [CausalConv] has the formula, the shapes and the options.
//
// Errors: ErrShape and ErrDType name the operand, ErrOption an option, ErrUnsupported when the device has no
// convolutions, and the backend's.
func (d *Device) CausalConv(ctx context.Context, c CausalConv) (err error) {
	defer op.Annotate(&err, "causal convolution")
	b, err := need[backend.Convolver](ctx, d, "convolutions")
	if err := cmp.Or(err, c.X.Check("x", floats...), c.W.Check("w", floats...)); err != nil {
		return err
	}
	x, width := c.X.Shape(), c.W.Shape()[Seq]
	if x[Heads] != 1 || width < 1 || width > op.MaxConv {
		return fmt.Errorf("x has shape %v and w %v: they must be [B, 1, S, Ch] and [1, 1, W, Ch] with W from 1 to %d: %w", x, c.W.Shape(), op.MaxConv, ErrShape)
	}
	err = cmp.Or(c.Y.CheckShape("y", x, "shape of x", floats...), c.W.CheckShape("w", Shape{1, 1, width, x[Dim]}, "[1, 1, W, Ch] of x", floats...),
		checkOptional("bias", c.Bias, Shape{1, 1, 1, x[Dim]}, "[1, 1, 1, Ch] of x", floats...), checkSequences(c.CuQ, x[Batch], x[Seq], "tokens"),
		checkStates(c.PastState, c.PresentState, Shape{backend.Sequences(c.CuQ, x[Batch]), 1, width - 1, x[Dim]}, "[N, 1, W-1, Ch] of sequences, w and x", floats...))
	return d.compute(ctx, err, func() error { return b.CausalConv(ctx, (*backend.CausalConv)(&c)) }, c.Y, c.PresentState)
}
