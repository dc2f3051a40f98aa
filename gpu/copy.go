package gpu

import (
	"context"
	"fmt"

	"github.com/seed90331342/attn/backend"
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
	from, err := words(src)
	if err != nil {
		return fmt.Errorf("src: %w", err)
	}
	to, err := words(dst)
	if err != nil {
		return fmt.Errorf("dst: %w", err)
	}
	in, out, dim := src.DType(), dst.DType(), sh[backend.Dim]
	if in == out && in == backend.Q8 {
		in, out, dim = backend.F32, backend.F32, to.Shape()[backend.Dim]
	}
	x, y := reads("src", from, rowAxes, 1), writes("dst", to, rowAxes, 1)
	quantised := out == backend.Q8
	v := variant{shaders.Convert, map[string]uint32{"Q8": uint32(flagBits(quantised))}}
	cut := b.newCutter(axX, tile, x, y)
	all := box{hi: [nAxes]int{axB: sh[0], axH: sh[1], axM: sh[2], axN: 1, axX: 1}}
	return cut.boxes(all, func(part box, _ int) error {
		xv, yv := x.view(part, cut.align), y.view(part, cut.align)
		rows := part.len(axB) * part.len(axH) * part.len(axM)
		pairs := !quantised && out.Size() == 2 && inPairs(yv, dim)
		units, n, each := dim, rows*dim, convertUnits
		switch {
		case quantised:
			units, n, each = dim/4, rows, quantiseRows
		case pairs:
			units, n = dim/2, rows*dim/2
		}
		var p params
		p.u32(0, 0, part.len(axH), part.len(axM), units, n, int(in), int(out), flagBits(pairs))
		p.strides(xv.base, xv.strides)
		p.strides(yv.base, yv.strides)
		s := step{variant: v, params: p, windows: []window{xv.window, yv.window}}
		groups := (n + each - 1) / each
		return r.dispatch(s, groups, convertOps*float64(rows*dim)/float64(groups))
	})
}

// inPairs reports whether the rows of a view of 16-bit elements, dim of them side by
// side, are whole words.
func inPairs(v view, dim int) bool {
	odd := dim | v.base | v.strides[0] | v.strides[1] | v.strides[2]
	return odd&1 == 0 && v.strides[backend.Dim] == 1
}
