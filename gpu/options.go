package gpu

import (
	"fmt"
	"maps"
	"math"

	"github.com/seed90331342/attn/backend"
)

// options are what a call may ask beside scale, softcap and visibility, in the terms of
// the kernels. The mask's binding holds the mask or the blocks, the bias's binding the
// bias or the bias by distance, unless there are both of two: then the blocks and the
// bias by distance have bindings of their own. Slopes and sinks lie in the uniform.
type options struct {
	p     *backend.Problem
	heads int // of the call

	mask, blocks, bias, relative *operand
}

// tableHeads is how many slopes and sinks a kernel's tables hold.
const tableHeads = 64

// Bits of the flags of attention.wgsl, flash.wgsl, decode.wgsl and splitmerge.wgsl; those
// of softmax.wgsl are one place higher.
const (
	flagMask = 16 << iota
	flagSoftcap
	flagSlopes
	flagSinks
	flagBlocks
	flagDropout
	flagBias
)

// newOptions checks what p asks of scores of a shape.
func newOptions(p *backend.Problem, shape backend.Shape) (*options, error) {
	if p.Visible.KLen != nil && len(p.Visible.KLen) != shape[backend.Batch] {
		return nil, fmt.Errorf("klen has %d lengths for %d batches: %w", len(p.Visible.KLen), shape[backend.Batch], backend.ErrShape)
	}
	b, h, sq, sk := shape[0], shape[1], shape[2], shape[3]
	if n := len(p.Slopes); p.Slopes != nil && n != h && n != b*h {
		return nil, fmt.Errorf("%d slopes for %d heads in %d batches: %w", n, h, b, backend.ErrShape)
	}
	if p.Sinks != nil && len(p.Sinks) != h {
		return nil, fmt.Errorf("%d sinks for %d heads: %w", len(p.Sinks), h, backend.ErrShape)
	}
	o := &options{p: p, heads: h, mask: new(operand), blocks: new(operand), bias: new(operand), relative: new(operand)}
	pair := func(name string, t backend.Tensor, shape backend.Shape, boolean bool) (*operand, error) {
		switch {
		case boolean && t.DType() != backend.Bool:
			return nil, fmt.Errorf("%s is %v, it must be bool: %w", name, t.DType(), backend.ErrDType)
		case !boolean && !t.DType().Float():
			return nil, fmt.Errorf("%s is %v, it must be f32, f16 or bf16: %w", name, t.DType(), backend.ErrDType)
		}
		t, err := t.Broadcast(shape)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		return reads(name, t, pairAxes, 1), nil
	}
	var err error
	if !p.Mask.IsZero() {
		if o.mask, err = pair("mask", p.Mask, shape, true); err != nil {
			return nil, err
		}
	}
	if !p.Blocks.IsZero() {
		if p.BlockQ < 1 || p.BlockK < 1 {
			return nil, fmt.Errorf("blocks of %d rows and %d keys: at least 1 each: %w", p.BlockQ, p.BlockK, backend.ErrOption)
		}
		// A block longer than the call is one of all rows, or keys.
		q, k := min(p.BlockQ, sq), min(p.BlockK, sk)
		o.blocks, err = pair("blocks", p.Blocks, backend.Shape{b, h, (sq-1)/q + 1, (sk-1)/k + 1}, true)
		if err == nil {
			o.blocks.block = [2]int{q, k}
		}
	}
	if err != nil {
		return nil, err
	}
	if !p.Bias.IsZero() {
		if o.bias, err = pair("bias", p.Bias, shape, false); err != nil {
			return nil, err
		}
	}
	if !p.Relative.IsZero() {
		o.relative, err = pair("relative", p.Relative, backend.Shape{b, h, 1, sq + sk - 1}, false)
		if err == nil {
			o.relative.axes[backend.Seq], o.relative.diagonal = whole, sq
		}
	}
	return o, err
}

// both reports whether two of the operands that share bindings are there.
func (o *options) both() bool {
	return !o.p.Mask.IsZero() && !o.p.Blocks.IsZero() || !o.p.Bias.IsZero() && !o.p.Relative.IsZero()
}

// operands are those of the options.
func (o *options) operands() []*operand { return []*operand{o.mask, o.blocks, o.bias, o.relative} }

// pairViews are the views of what the options have for a piece.
type pairViews struct{ mask, blocks, bias, relative view }

func (o *options) views(x box, align uint64) pairViews {
	return pairViews{o.mask.view(x, align), o.blocks.view(x, align), o.bias.view(x, align), o.relative.view(x, align)}
}

// windows returns those of the mask's and of the bias's binding, and those of the
// bindings that kernels have for both.
func (o *options) windows(v pairViews) (mask, bias window, more []window) {
	if o.both() {
		return v.mask.window, v.bias.window, []window{v.blocks.window, v.relative.window}
	}
	mask, bias = v.mask.window, v.bias.window
	if !o.p.Blocks.IsZero() {
		mask = v.blocks.window
	}
	if !o.p.Relative.IsZero() {
		bias = v.relative.window
	}
	return mask, bias, nil
}

// kernel returns v with the bindings that the options take.
func (o *options) kernel(v variant) variant {
	if !o.both() {
		return v
	}
	v.kernel.Bindings += "rr"
	v.consts = maps.Clone(v.consts)
	v.consts["BOTH"] = 1
	return v
}

// paired reports whether there is something for which a kernel looks at each pair.
func (o *options) paired() bool {
	return o.flags()&^flagSinks != 0
}

// flags are those of the options.
func (o *options) flags() int {
	p := o.p
	n := 0
	for _, f := range []struct {
		is  bool
		bit int
	}{
		{!p.Mask.IsZero(), flagMask}, {p.Softcap > 0, flagSoftcap}, {p.Slopes != nil, flagSlopes},
		{p.Sinks != nil, flagSinks}, {!p.Blocks.IsZero(), flagBlocks}, {p.Dropout.P > 0, flagDropout},
		{!p.Bias.IsZero() || !p.Relative.IsZero(), flagBias},
	} {
		if f.is {
			n |= f.bit
		}
	}
	return n
}

// limit bounds the boxes of a cut to what the tables hold.
func (o *options) limit(c *cutter) {
	most := func(axis, n int) {
		if c.most[axis] == 0 || c.most[axis] > n {
			c.most[axis] = n
		}
	}
	if o.p.Visible.KLen != nil {
		most(axB, klenBatches)
	}
	if o.p.Slopes != nil || o.p.Sinks != nil {
		most(axH, tableHeads)
	}
	if len(o.p.Slopes) > o.heads {
		most(axB, max(tableHeads/o.heads, 1))
	}
}

// rounds bounds the rounds of loops that the options add to a thread that computes so
// many weights of a tile in groups, each with a counter of its own.
func (o *options) rounds(groups int) int {
	n := 0
	if !o.p.Blocks.IsZero() {
		n += 65
	}
	if o.p.Dropout.P > 0 {
		n += 21 * groups // up to two counters of ten rounds
	}
	return n
}

// params appends the kernels' Options for a piece.
func (o *options) params(w *params, x box) {
	w.pad()
	p := o.p
	slopes := 0
	if len(p.Slopes) > o.heads {
		slopes = x.len(axH)
	}
	d := p.Dropout
	keep := float32(1)
	if d.P > 0 {
		keep = d.Factor()
	}
	w.u32(p.Visible.Offset, slopes, biasType(o.relative.t), o.blocks.block[0], o.blocks.block[1],
		int(d.Threshold()), int(uint32(d.Seed)), int(uint32(d.Seed>>32)),
		d.First[backend.Batch]+x.lo[axB], d.First[backend.Heads]+x.lo[axH], d.First[backend.Seq]+x.lo[axM], d.First[backend.Dim]+x.lo[axN])
	w.f32(keep)
	w.pad()
}

// tables appends klen, slopes and sinks, these in a unit, of a box.
func (o *options) tables(w *params, x box, unit float64) {
	w.klen(o.p.Visible, x)
	at := len(*w)
	*w = append(*w, make([]uint32, 2*tableHeads)...)
	slopes, sinks := (*w)[at:at+tableHeads], (*w)[at+tableHeads:]
	for h := range x.len(axH) {
		if o.p.Slopes != nil && len(o.p.Slopes) <= o.heads {
			slopes[h] = math.Float32bits(o.p.Slope(0, x.lo[axH]+h, o.heads))
		}
		if o.p.Sinks != nil {
			sinks[h] = math.Float32bits(float32(unit * float64(o.p.Sink(x.lo[axH]+h))))
		}
	}
	if len(o.p.Slopes) > o.heads {
		for b := range x.len(axB) {
			for h := range x.len(axH) {
				slopes[b*x.len(axH)+h] = math.Float32bits(o.p.Slope(x.lo[axB]+b, x.lo[axH]+h, o.heads))
			}
		}
	}
}
