package gpu

import (
	"maps"
	"math"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
)

// options are what a call may ask beside scale, softcap and visibility, in the terms of
// the kernels. The mask's binding holds the mask or the blocks, the bias's binding the
// bias or the bias by distance, unless there are both of two: then the blocks and the
// bias by distance have bindings of their own. Slopes and sinks lie in the uniform.
type options struct {
	p     *backend.Problem
	heads int // of the call

	pairs *cut.Pairs
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

// both reports whether two of the operands that share bindings are there.
func (o *options) both() bool {
	return !o.p.Mask.IsZero() && !o.p.Blocks.IsZero() || !o.p.Bias.IsZero() && !o.p.Relative.IsZero()
}

// pairViews are the views of what the options have for a piece.
type pairViews struct{ mask, blocks, bias, relative cut.View }

func (o *options) views(x cut.Box, align uint64) pairViews {
	return pairViews{o.pairs.Mask.View(x, align), o.pairs.Blocks.View(x, align), o.pairs.Bias.View(x, align), o.pairs.Relative.View(x, align)}
}

// windows returns those of the mask's and of the bias's binding, and those of the
// bindings that kernels have for both.
func (o *options) windows(v pairViews) (mask, bias cut.Window, more []cut.Window) {
	if o.both() {
		return v.mask.Window, v.bias.Window, []cut.Window{v.blocks.Window, v.relative.Window}
	}
	mask, bias = v.mask.Window, v.bias.Window
	if !o.p.Blocks.IsZero() {
		mask = v.blocks.Window
	}
	if !o.p.Relative.IsZero() {
		bias = v.relative.Window
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
func (o *options) limit(c *cut.Cutter) {
	if o.p.Visible.KLen != nil {
		c.AtMost(cut.Batch, klenBatches)
	}
	if o.p.Slopes != nil || o.p.Sinks != nil {
		c.AtMost(cut.Head, tableHeads)
	}
	if len(o.p.Slopes) > o.heads {
		c.AtMost(cut.Batch, max(tableHeads/o.heads, 1))
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
func (o *options) params(w *params, x cut.Box) {
	w.pad()
	p := o.p
	slopes := 0
	if len(p.Slopes) > o.heads {
		slopes = x.Len(cut.Head)
	}
	d := p.Dropout
	keep := float32(1)
	if d.P > 0 {
		keep = d.Factor()
	}
	w.u32(p.Visible.Offset, slopes, biasType(o.pairs.Relative.T), o.pairs.Blocks.Block[0], o.pairs.Blocks.Block[1],
		int(d.Threshold()), int(uint32(d.Seed)), int(uint32(d.Seed>>32)),
		d.First[backend.Batch]+x.Lo[cut.Batch], d.First[backend.Heads]+x.Lo[cut.Head], d.First[backend.Seq]+x.Lo[cut.Row], d.First[backend.Dim]+x.Lo[cut.Col])
	w.f32(keep)
	w.pad()
}

// tables appends klen, slopes and sinks, these in a unit, of a box.
func (o *options) tables(w *params, x cut.Box, unit float64) {
	w.klen(o.p.Visible, x)
	at := len(*w)
	*w = append(*w, make([]uint32, 2*tableHeads)...)
	slopes, sinks := (*w)[at:at+tableHeads], (*w)[at+tableHeads:]
	for h := range x.Len(cut.Head) {
		if o.p.Slopes != nil && len(o.p.Slopes) <= o.heads {
			slopes[h] = math.Float32bits(o.p.Slope(0, x.Lo[cut.Head]+h, o.heads))
		}
		if o.p.Sinks != nil {
			sinks[h] = math.Float32bits(float32(unit * float64(o.p.Sink(x.Lo[cut.Head]+h))))
		}
	}
	if len(o.p.Slopes) > o.heads {
		for b := range x.Len(cut.Batch) {
			for h := range x.Len(cut.Head) {
				slopes[b*x.Len(cut.Head)+h] = math.Float32bits(o.p.Slope(x.Lo[cut.Batch]+b, x.Lo[cut.Head]+h, o.heads))
			}
		}
	}
}
