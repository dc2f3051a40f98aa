package gpu

import (
	"context"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/queue"
	"github.com/seed90331342/attn/shaders"
)

// Axes of [B, 1, S, Ch] in convolutions, and of those whose rows a workgroup needs together. Channels are cut as heads are.
var convAxes, convWhole = [4]int{cut.Batch, cut.Whole, cut.Row, cut.Head}, [4]int{cut.Batch, cut.Whole, cut.Whole, cut.Head}

// convUnits is the number of elements of a workgroup of conv.wgsl, and convOps the approximate
// cost of a product, with two memory accesses.
const convUnits, convOps = 64, 30

// CausalConv implements backend.Convolver: the tokens that need the state, the others, and then the state after them.
func (b *Backend) CausalConv(ctx context.Context, c *backend.CausalConv) error {
	out, in := c.Operands()
	return b.sequences(ctx, "causal convolution", out, in[:], c.PastState, c.CuQ, func(n int) (ops []*queue.Op, err error) {
		c := *c
		if err := sequence(c.CuQ, n, []*backend.Tensor{&c.Y, &c.X}, &c.PastState, &c.PresentState); err != nil {
			return nil, err
		}
		tokens, before := c.X.Shape()[backend.Seq], c.W.Shape()[backend.Seq]-1
		tail := min(tokens, before)
		y, x, state := c, c, c
		for _, part := range []struct {
			t      *backend.Tensor
			lo, hi int
		}{{&y.Y, 0, tail}, {&y.X, 0, tail}, {&x.Y, tail, tokens}, {&state.X, tokens - tail, tokens}} {
			if *part.t, err = part.t.Slice(backend.Seq, part.lo, part.hi); err != nil {
				return nil, err
			}
		}
		if tail > 0 {
			ops = append(ops, b.conv(&y, before, 0, 0, tail))
		}
		if tokens > before { // x is [B, W, S-W+1, Ch]: element (i, s) is that of token s+i
			shape, strides := x.X.Shape(), x.X.Strides()
			shape[backend.Heads], strides[backend.Heads], shape[backend.Seq] = before+1, strides[backend.Seq], tokens-before
			if x.X, err = x.X.View(shape, strides, 0); err != nil {
				return nil, err
			}
			ops = append(ops, b.conv(&x, 0, 0, 0, tokens-before))
		}
		if before > 0 && !c.PresentState.IsZero() {
			state.Y, state.W, state.Bias = c.PresentState, backend.Tensor{}, backend.Tensor{}
			once := before // rows of a dispatch
			if c.PastState == c.PresentState {
				once = tail // in place it reads the rows after them
			}
			for lo := 0; lo < before && once > 0; lo += once {
				ops = append(ops, b.conv(&state, before, tail, lo, min(lo+once, before)))
			}
		}
		return ops, nil
	})
}

// conv returns the operation that computes Y of c, or rows lo to hi of a state if there is no W, from so many rows of PastState
// and those of X.
func (b *Backend) conv(c *backend.CausalConv, before, tail, lo, hi int) *queue.Op {
	sh, width := c.Y.Shape(), c.W.Shape()[backend.Seq]
	past, y := inOut("past state", some(c.PastState), "y", c.Y)
	x, w, bias := cut.Reads("x", some(c.X), convAxes, 1), cut.Reads("w", c.W, convWhole, 1), cut.Reads("bias", c.Bias, convWhole, 1)
	past.Axes, y.Axes, w.Axes[0], bias.Axes[0] = convWhole, convAxes, cut.Whole, cut.Whole
	if before > 0 {
		x.Axes = convWhole
	}
	space := backend.Shape{sh[backend.Batch], sh[backend.Dim], hi - lo, 1}
	if width == 0 {
		y.Name, y.Axes = "present state", convWhole
	}
	return b.rowOp(space, []*cut.Operand{x, w, bias, past, y}, func(box cut.Box, v []cut.View) queue.Step {
		p := &shaders.ConvParams{
			Rows: box.Len(cut.Row), Row0: when(before > 0, lo+box.Lo[cut.Row]), Channels: box.Len(cut.Head), All: rows(box), Width: width, Before: before, Tail: tail,
			Starts: when(!c.PastState.IsZero(), 1) + when(c.PastState == c.Y, 1), Shifted: when(!c.Bias.IsZero(), 1), Silu: when(c.SiLU, 1),
			XType: int(c.X.DType()), WType: int(c.W.DType()), ConstantType: int(c.Bias.DType()), PastType: int(c.PastState.DType()), OutType: int(c.Y.DType()),
			X: strides(v[0]), W: strides(v[1]), Constant: strides(v[2]), Past: strides(v[3]), O: strides(v[4]),
		}
		return queue.Step{Kernel: shaders.Conv, Params: p, Groups: ceil(p.All, convUnits), Each: float64(convUnits * convOps * (width + 1))}
	})
}
