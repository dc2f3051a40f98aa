package gpu

import (
	"maps"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/shaders"
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

// The lengths of the tables in a kernel's parameters.
const (
	klenBatches = len(shaders.AttentionParams{}.KLen)
	tableHeads  = len(shaders.AttentionParams{}.Slopes) // and of sinks
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
	return o.flags()&^shaders.HasSinks != 0
}

// flags returns the flags of the options, without HasKLen.
func (o *options) flags() int {
	p := o.p
	return when(!p.Mask.IsZero(), shaders.HasMask) | when(!p.Blocks.IsZero(), shaders.HasBlocks) |
		when(!p.Bias.IsZero() || !p.Relative.IsZero(), shaders.HasBias) | when(p.Slopes != nil, shaders.HasSlopes) |
		when(p.Softcap > 0, shaders.HasSoftcap) | when(p.Sinks != nil, shaders.HasSinks) | when(p.Dropout.P > 0, shaders.HasDropout)
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

// strides returns where kernels find the elements of a view.
func strides(v cut.View) shaders.Strides {
	return shaders.Strides{Base: v.Base, B: v.Strides[0], H: v.Strides[1], S: v.Strides[2], D: v.Strides[3]}
}

// params sets what the options of the call mean for a piece, whose pairs lie at views.
// The kernel takes sinks in a unit.
func (o *options) params(w *shaders.AttentionParams, x cut.Box, pairs pairViews, unit float64) {
	p, d := o.p, o.p.Dropout
	w.Scale, w.Softcap, w.Unit = p.Scale, p.Softcap, scoreUnit(p)
	w.Lo, w.Hi = cut.Bounds(p.Visible)
	w.Flags |= o.flags() | when(p.Visible.KLen != nil, shaders.HasKLen)
	w.BiasType, w.RelativeType = biasType(o.pairs.Bias.T), biasType(o.pairs.Relative.T)
	w.Offset = p.Visible.Offset
	w.BlockQ, w.BlockK = o.pairs.Blocks.Block[0], o.pairs.Blocks.Block[1]
	w.Threshold, w.Seed0, w.Seed1, w.Keep = int(d.Threshold()), int(uint32(d.Seed)), int(uint32(d.Seed>>32)), 1
	if d.P > 0 {
		w.Keep = d.Factor()
	}
	w.DropBatch, w.DropHead = d.First[backend.Batch]+x.Lo[cut.Batch], d.First[backend.Heads]+x.Lo[cut.Head]
	w.DropRow, w.DropKey = d.First[backend.Seq]+x.Lo[cut.Row], d.First[backend.Dim]+x.Lo[cut.Col]
	w.Mask, w.Bias, w.Blocked, w.Relative = strides(pairs.mask), strides(pairs.bias), strides(pairs.blocks), strides(pairs.relative)
	if p.Visible.KLen != nil {
		for b := range x.Len(cut.Batch) {
			w.KLen[b] = int32(p.Visible.KLen[x.Lo[cut.Batch]+b])
		}
	}
	for h := range x.Len(cut.Head) {
		if p.Slopes != nil && len(p.Slopes) <= o.heads {
			w.Slopes[h] = p.Slope(0, x.Lo[cut.Head]+h, o.heads)
		}
		if p.Sinks != nil {
			w.Sinks[h] = float32(unit * float64(p.Sink(x.Lo[cut.Head]+h)))
		}
	}
	if len(p.Slopes) > o.heads {
		w.SlopeB = x.Len(cut.Head)
		for b := range x.Len(cut.Batch) {
			for h := range x.Len(cut.Head) {
				w.Slopes[b*x.Len(cut.Head)+h] = p.Slope(x.Lo[cut.Batch]+b, x.Lo[cut.Head]+h, o.heads)
			}
		}
	}
}
