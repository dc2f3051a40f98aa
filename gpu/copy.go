package gpu

import (
	"context"
	"fmt"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/shaders"
)

var _ backend.BatchCopier = (*Backend)(nil)

const (
	// convertUnits is how many units, elements or pairs of them, a workgroup of
	// convert.wgsl takes, and quantiseRows how many rows that become q8.
	convertUnits = 256
	quantiseRows = 4
	// convertOps is about what one element costs: divisions for where it lies, its
	// rounding, two trips to memory.
	convertOps = 40
)

// Copy writes dst = src, element by element, rounded to dst's type:
//
//	dst, src [B, H, S, D], each F32, F16, BF16 or Q8
//
// Between equal types it moves bits. A pair of tensors that are both Q8 keeps each
// row's scale and integers.
func (b *Backend) Copy(ctx context.Context, dst, src backend.Tensor) error {
	return b.CopyBatch(ctx, []backend.Tensor{dst}, []backend.Tensor{src})
}

// CopyBatch implements backend.BatchCopier: copies that follow one another in shared
// submissions.
func (b *Backend) CopyBatch(ctx context.Context, dst, src []backend.Tensor) error {
	if err := b.enter(ctx); err != nil {
		return err
	}
	defer b.leave()
	if len(dst) != len(src) {
		return fmt.Errorf("copy: %d tensors to %d, one to each: %w", len(src), len(dst), backend.ErrShape)
	}
	pins := make([]backend.Pinned, len(dst))
	defer func() {
		for i := range pins {
			pins[i].Unpin()
		}
	}()
	for i := range dst {
		out := []backend.Operand{{Name: "dst", Tensor: dst[i]}}
		in := []backend.Operand{{Name: "src", Tensor: src[i]}}
		if err := pins[i].Pin(b, b.info.Name, out, in); err != nil {
			return fmt.Errorf("copy: %w", err)
		}
	}
	return b.pinned(ctx, "copy", func(r *runner) error {
		for i := range dst {
			if err := b.convert(r, dst[i], src[i]); err != nil {
				return err
			}
			if err := r.handBack(); err != nil {
				return err
			}
		}
		return nil
	})
}

func (b *Backend) convert(r *runner, dst, src backend.Tensor) error {
	sh := dst.Shape()
	if src.Shape() != sh {
		return fmt.Errorf("src has shape %v, dst %v: %w", src.Shape(), sh, backend.ErrShape)
	}
	if err := checkDims(backend.Dims{Batch: sh[0], Heads: sh[1], KVHeads: 1, SeqQ: sh[2], SeqK: 1, Dim: sh[3], ValueDim: 1}); err != nil {
		return err
	}
	for _, t := range []backend.Operand{{Name: "dst", Tensor: dst}, {Name: "src", Tensor: src}} {
		if d := t.Tensor.DType(); !d.Float() && d != backend.Q8 {
			return fmt.Errorf("%s is %v, f32, f16, bf16 and q8 are copied: %w", t.Name, d, backend.ErrDType)
		}
	}
	from, err := cut.Words(src)
	if err != nil {
		return fmt.Errorf("src: %w", err)
	}
	to, err := cut.Words(dst)
	if err != nil {
		return fmt.Errorf("dst: %w", err)
	}
	in, out, dim := src.DType(), dst.DType(), sh[backend.Dim]
	if in == out && in == backend.Q8 {
		in, out, dim = backend.F32, backend.F32, to.Shape()[backend.Dim]
	}
	x, y := cut.Reads("src", from, cut.RowAxes, 1), cut.Writes("dst", to, cut.RowAxes)
	quantised := out == backend.Q8
	v := variant{shaders.Convert, map[string]uint32{"Q8": uint32(when(quantised, 1))}}
	cutter := b.newCutter(cut.Sum, cut.Tile, x, y)
	all := cut.Space(sh[0], sh[1], sh[2], 1, 1)
	return cutter.Boxes(all, func(part cut.Box, _ int) error {
		xv, yv := x.View(part, cutter.Align), y.View(part, cutter.Align)
		rows := part.Len(cut.Batch) * part.Len(cut.Head) * part.Len(cut.Row)
		pairs := !quantised && out.Size() == 2 && inPairs(yv, dim)
		units, n, each := dim, rows*dim, convertUnits
		switch {
		case quantised:
			units, n, each = dim/4, rows, quantiseRows
		case pairs:
			units, n = dim/2, rows*dim/2
		}
		p := &shaders.ConvertParams{
			Heads: part.Len(cut.Head), Rows: part.Len(cut.Row), Units: units, All: n, InType: int(in), OutType: int(out), Pairs: when(pairs, 1),
			Src: strides(xv), O: strides(yv),
		}
		s := step{variant: v, params: p, windows: []cut.Window{xv.Window, yv.Window}}
		groups := (n + each - 1) / each
		return r.dispatch(s, groups, convertOps*float64(rows*dim)/float64(groups))
	})
}

// inPairs reports whether the rows of a view of 16-bit elements, dim of them side by
// side, are whole words.
func inPairs(v cut.View, dim int) bool {
	odd := dim | v.Base | v.Strides[0] | v.Strides[1] | v.Strides[2]
	return odd&1 == 0 && v.Strides[backend.Dim] == 1
}
