package kernels

import (
	"cmp"
	"context"
	"fmt"
	"math"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/internal/op"
)

// LinearAttention computes linear attention, gated or not, with the delta rule or not, whose state of fixed size takes
// the place of a cache. [LinearAttention] has the formula, the shapes and the options. A call with one token for each
// sequence is a step of decoding, usually with PastState as PresentState. Longer calls compute chunks of tokens
// together: on the CPU as products of matrices, and on GPUs from 32 tokens a sequence on, for keys of up to 128 elements.
//
// Errors: ErrShape and ErrDType name the operand, ErrOption an option, ErrUnsupported when the device has no linear
// attention, and the backend's.
func (d *Device) LinearAttention(ctx context.Context, c LinearAttention) (err error) {
	defer op.Annotate(&err, "linear attention")
	b, err := need[backend.LinearAttender](ctx, d, "linear attention")
	if err != nil {
		return err
	}
	if err := checkLinear(&c); err != nil {
		return err
	}
	return d.compute(ctx, func() error { return b.LinearAttention(ctx, &c) }, c.O, c.PresentState)
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
	if err := c.O.CheckShape("o", Shape{q[Batch], max(hq, hv), tokens, v[Dim]}, "[B, max(Hq, Hv), T, V] of q and v", floats...); err != nil {
		return err
	}
	decays := Shape{q[Batch], hv, tokens, q[Dim]}
	if c.Decay.Shape()[Dim] == 1 {
		decays[Dim] = 1
	}
	err := checkOptional("decay", c.Decay, decays, "[B, Hv, T, 1 or K] of k and v", floats...)
	if err == nil && !c.Beta.IsZero() {
		c.Beta, err = repeated("beta", c.Beta, Shape{q[Batch], hv, tokens, 1}, Heads, "[B, Hv or 1, T, 1] of v")
	}
	if err != nil {
		return err
	}
	if err := checkSequences(c.CuQ, q[Batch], tokens, "tokens"); err != nil {
		return err
	}
	if err := checkStates(c.PastState, c.PresentState, Shape{backend.Sequences(c.CuQ, q[Batch]), hv, q[Dim], v[Dim]}, "[N, Hv, K, V] of sequences, k and v", F32); err != nil {
		return err
	}
	if c.Scale == 0 {
		c.Scale = float32(1 / math.Sqrt(float64(q[Dim])))
	}
	if !(math.Abs(float64(c.Scale)) <= op.MaxFactor) { // or NaN
		return fmt.Errorf("scale is %v, its magnitude must be at most 2^60, or 0 for K^-0.5: %w", c.Scale, ErrOption)
	}
	if c.ChunkSize < 0 {
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

// CausalConv computes a causal convolution of short width along the tokens, with SiLU after it or not, and keeps its
// last rows as a state. [CausalConv] has the formula, the shapes and the options.
//
// Errors: ErrShape and ErrDType name the operand, ErrOption an option, ErrUnsupported when the device has no
// convolutions, and the backend's.
func (d *Device) CausalConv(ctx context.Context, c CausalConv) (err error) {
	defer op.Annotate(&err, "causal convolution")
	b, err := need[backend.Convolver](ctx, d, "convolutions")
	if err != nil {
		return err
	}
	if err := cmp.Or(c.X.Check("x", floats...), c.W.Check("w", floats...)); err != nil {
		return err
	}
	x, width := c.X.Shape(), c.W.Shape()[Seq]
	if x[Heads] != 1 || width < 1 || width > op.MaxConv {
		return fmt.Errorf("x has shape %v and w %v: they must be [B, 1, S, Ch] and [1, 1, W, Ch] with W from 1 to %d: %w", x, c.W.Shape(), op.MaxConv, ErrShape)
	}
	if err := cmp.Or(c.Y.CheckShape("y", x, "shape of x", floats...), c.W.CheckShape("w", Shape{1, 1, width, x[Dim]}, "[1, 1, W, Ch] of x", floats...),
		checkOptional("bias", c.Bias, Shape{1, 1, 1, x[Dim]}, "[1, 1, 1, Ch] of x", floats...), checkSequences(c.CuQ, x[Batch], x[Seq], "tokens")); err != nil {
		return err
	}
	if err := checkStates(c.PastState, c.PresentState, Shape{backend.Sequences(c.CuQ, x[Batch]), 1, width - 1, x[Dim]}, "[N, 1, W-1, Ch] of sequences, w and x", floats...); err != nil {
		return err
	}
	return d.compute(ctx, func() error { return b.CausalConv(ctx, &c) }, c.Y, c.PresentState)
}
