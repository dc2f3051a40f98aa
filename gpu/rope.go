package gpu

import (
	"context"
	"fmt"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/shaders"
)

var _ backend.Rotator = (*Backend)(nil)

const (
	// rotateUnits is how many units, pairs or elements that do not turn, a workgroup
	// takes (rope.wgsl).
	rotateUnits = 256
	// rotateOps is about what one unit costs: six operations, divisions for where it
	// lies, four trips to memory.
	rotateOps = 50
)

// Rotate turns pairs of elements of each row by angles:
//
//	y, x [B, H, S, D]    cos, sin [B, H, S, R/2] F32
func (b *Backend) Rotate(ctx context.Context, y, x, cos, sin backend.Tensor, interleaved bool) error {
	out := []backend.Operand{{Name: "y", Tensor: y}}
	in := []backend.Operand{{Name: "cos", Tensor: cos}, {Name: "sin", Tensor: sin}, {Name: "x", Tensor: x}}
	if y == x {
		in = in[:2]
	}
	return b.call(ctx, "rotate", out, in, func(r *runner) error { return b.rotate(r, y, x, cos, sin, interleaved) })
}

func (b *Backend) rotate(r *runner, yt, xt, cosT, sinT backend.Tensor, interleaved bool) error {
	sh := yt.Shape()
	if err := checkDims(backend.Dims{Batch: sh[0], Heads: sh[1], KVHeads: 1, SeqQ: sh[2], SeqK: 1, Dim: sh[3], ValueDim: 1}); err != nil {
		return err
	}
	pairs := cosT.Shape()[backend.Dim]
	angles := backend.Shape{sh[0], sh[1], sh[2], pairs}
	if xt.Shape() != sh || cosT.Shape() != angles || sinT.Shape() != angles || pairs < 1 || 2*pairs > sh[3] {
		return fmt.Errorf("y %v, x %v, cos %v and sin %v do not fit: %w", sh, xt.Shape(), cosT.Shape(), sinT.Shape(), backend.ErrShape)
	}
	inPlace, units := yt == xt, pairs+sh[3]-2*pairs
	y, x := cut.Writes("y", yt, cut.RowAxes), cut.Reads("x", xt, cut.RowAxes, 1)
	if inPlace {
		units = pairs
		y, x = cut.Updates("y", yt, cut.RowAxes), cut.Reads("x", backend.Tensor{}, cut.RowAxes, 1)
	}
	cos, sin := cut.Reads("cos", cosT, cut.RowAxes, 1), cut.Reads("sin", sinT, cut.RowAxes, 1)
	v := variant{shaders.RoPE, map[string]uint32{"INPLACE": uint32(when(inPlace, 1))}}
	cutter := b.newCutter(cut.Sum, cut.Tile, x, cos, sin, y)
	all := cut.Space(sh[0], sh[1], sh[2], 1, 1)
	return cutter.Boxes(all, func(part cut.Box, _ int) error {
		n := part.Len(cut.Batch) * part.Len(cut.Head) * part.Len(cut.Row) * units
		groups := (n + rotateUnits - 1) / rotateUnits
		s := step{variant: v}
		yv, cv, sv := y.View(part, cutter.Align), cos.View(part, cutter.Align), sin.View(part, cutter.Align)
		xv := x.View(part, cutter.Align)
		s.windows = []cut.Window{xv.Window, cv.Window, sv.Window, yv.Window}
		if inPlace {
			xv = yv
		}
		s.params = &shaders.RoPEParams{
			Heads: part.Len(cut.Head), Rows: part.Len(cut.Row), Pairs: pairs, Units: units, All: n, Interleaved: when(interleaved, 1),
			InType: int(xt.DType()), OutType: int(yt.DType()), X: strides(xv), Cosine: strides(cv), Sine: strides(sv), O: strides(yv),
		}
		return r.dispatch(s, groups, rotateUnits*rotateOps)
	})
}
