package gpu

import (
	"context"
	"fmt"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/queue"
	"github.com/seed90331342/attn/shaders"
)

const (
	// rotateUnits is the number of units, pairs or elements that do not turn, of a
	// workgroup of rope.wgsl.
	rotateUnits = 256
	// rotateOps is the approximate cost of a unit: six operations, divisions for its
	// place, four memory accesses.
	rotateOps = 50
	// convertUnits is the number of units, elements or pairs of them, of a workgroup of
	// convert.wgsl; quantiseRows is the number of rows when it converts to q8.
	convertUnits = 256
	quantiseRows = 4
	// convertOps is the approximate cost of an element: divisions for its place,
	// rounding, two memory accesses.
	convertOps = 40
	// mergeOps is the approximate cost of a merged element.
	mergeOps = 10
)

// Rotate turns pairs of elements of each row by angles:
//
//	y, x [B, H, S, D]    cos, sin [B, H, S, R/2] F32
func (b *Backend) Rotate(ctx context.Context, y, x, cos, sin backend.Tensor, how backend.Rotation) error {
	in := []backend.Operand{{Name: "cos", Tensor: cos}, {Name: "sin", Tensor: sin}, {Name: "x", Tensor: x}}
	if y == x {
		in = in[:2]
	}
	return b.call(ctx, "rotate", operands{out: []backend.Operand{{Name: "y", Tensor: y}}, in: in, inPlace: when(y == x, 1)}, func(r *queue.Runner) error {
		return r.Run(b.rotate(y, x, cos, sin, how))
	})
}

func (b *Backend) rotate(y, x, cos, sin backend.Tensor, how backend.Rotation) *queue.Op {
	sh, pairs, inPlace := y.Shape(), cos.Shape()[backend.Dim], y == x
	units := sh[backend.Dim] - pairs
	ops := []*cut.Operand{cut.Reads("x", x, cut.RowAxes, 1), cut.Reads("cos", cos, cut.RowAxes, 1), cut.Reads("sin", sin, cut.RowAxes, 1), cut.Writes("y", y, cut.RowAxes)}
	if inPlace { // elements that do not turn stay
		units = pairs
		ops[0], ops[3] = new(cut.Operand), cut.Updates("y", y, cut.RowAxes)
	}
	kernel := queue.NewKernel(shaders.RoPE, map[string]int{"INPLACE": when(inPlace, 1)})
	return b.rowOp(sh, ops, func(part cut.Box, v []cut.View) queue.Step {
		n := rows(part) * units
		if inPlace {
			v[0] = v[3]
		}
		return queue.Step{
			Kernel: kernel, Groups: ceil(n, rotateUnits), Each: rotateUnits * rotateOps,
			Params: &shaders.RoPEParams{
				Heads: part.Len(cut.Head), Rows: part.Len(cut.Row), Pairs: pairs, Units: units, All: n, Interleaved: when(how.Interleaved, 1), Inverse: when(how.Inverse, 1),
				InType: int(x.DType()), OutType: int(y.DType()), X: strides(v[0]), Cosine: strides(v[1]), Sine: strides(v[2]), O: strides(v[3]),
			},
		}
	})
}

// Copy implements backend.Copier. The copies share submissions. Between equal types it moves
// bits; rows of Q8 keep their scales and integers.
func (b *Backend) Copy(ctx context.Context, dst, src []backend.Tensor) error {
	of := func(i int) operands {
		return operands{out: []backend.Operand{{Name: "dst", Tensor: dst[i]}}, in: []backend.Operand{{Name: "src", Tensor: src[i]}}}
	}
	return b.calls(ctx, "copy", len(dst), of, func(r *queue.Runner, i int) error {
		op, err := b.convert(dst[i], src[i])
		if err != nil {
			return err
		}
		return r.Run(op)
	})
}

func (b *Backend) convert(dst, src backend.Tensor) (*queue.Op, error) {
	from, err := cut.Words(src)
	if err != nil {
		return nil, fmt.Errorf("src: %w", err)
	}
	to, err := cut.Words(dst)
	if err != nil {
		return nil, fmt.Errorf("dst: %w", err)
	}
	in, out, dim := src.DType(), dst.DType(), dst.Shape()[backend.Dim]
	if in == out && in == backend.Q8 {
		in, out, dim = backend.F32, backend.F32, to.Shape()[backend.Dim]
	}
	quantised := out == backend.Q8
	kernel := queue.NewKernel(shaders.Convert, map[string]int{"Q8": when(quantised, 1)})
	ops := []*cut.Operand{cut.Reads("src", from, cut.RowAxes, 1), cut.Writes("dst", to, cut.RowAxes)}
	return b.rowOp(dst.Shape(), ops, func(part cut.Box, v []cut.View) queue.Step {
		rows := rows(part)
		pairs := !quantised && out.Size() == 2 && inPairs(v[1], dim)
		units, n, each := dim, rows*dim, convertUnits
		switch {
		case quantised:
			units, n, each = dim/4, rows, quantiseRows
		case pairs:
			units, n = dim/2, rows*dim/2
		}
		groups := ceil(n, each)
		return queue.Step{
			Kernel: kernel, Groups: groups, Each: convertOps * float64(rows*dim) / float64(groups),
			Params: &shaders.ConvertParams{
				Heads: part.Len(cut.Head), Rows: part.Len(cut.Row), Units: units, All: n, InType: int(in), OutType: int(out), Pairs: when(pairs, 1),
				Src: strides(v[0]), O: strides(v[1]),
			},
		}
	}), nil
}

// inPairs reports whether rows of 16-bit elements, dim adjacent ones each, are whole
// words.
func inPairs(v cut.View, dim int) bool {
	odd := dim | v.Base | v.Strides[0] | v.Strides[1] | v.Strides[2]
	return odd&1 == 0 && v.Strides[backend.Dim] == 1
}

// Merge combines (po, plse) into (o, lse):
//
//	o, po [B, H, Sq, Dv] F32    lse, plse [B, H, Sq, 1] F32
func (b *Backend) Merge(ctx context.Context, o, lse, po, plse backend.Tensor) error {
	out := []backend.Operand{{Name: "o", Tensor: o}, {Name: "lse", Tensor: lse}}
	in := []backend.Operand{{Name: "the part's o", Tensor: po}, {Name: "the part's lse", Tensor: plse}}
	return b.call(ctx, "merge", operands{out: out, in: in, inPlace: 1}, func(r *queue.Runner) error {
		dim := o.Shape()[backend.Dim]
		ops := []*cut.Operand{
			cut.Reads(in[0].Name, po, cut.RowAxes, 1), cut.Reads(in[1].Name, plse, cut.RowAxes, 1),
			cut.Updates("o", o, cut.RowAxes), cut.Updates("lse", lse, cut.RowAxes),
		}
		return r.Run(b.rowOp(o.Shape(), ops, func(x cut.Box, v []cut.View) queue.Step {
			return queue.Step{
				Kernel: queue.Kernel{Shader: shaders.Merge}, Groups: rows(x), Each: mergeOps * float64(dim),
				Params: &shaders.MergeParams{
					Heads: x.Len(cut.Head), Rows: x.Len(cut.Row), VDim: dim,
					Po: strides(v[0]), Plse: strides(v[1]), O: strides(v[2]), LSE: strides(v[3]),
				},
			}
		}))
	})
}
