package backward

import (
	"math"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/strided"
	"github.com/seed90331342/attn/cpu/internal/tile"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// The gradients of biases follow from sums over dS when the keys of all tasks are done. DBias
// with rows and keys has no sums: tasks add to it in place, head after head.
//
// The order of each sum depends on the shapes alone. Each has the terms of one head. In the chain of tasks of that
// head, each adds a tile after the task before it: the keys of a row come in order, and so do the rows of a distance.
// While one task is at a tile, those after it in the chain are at earlier tiles and later keys, at other distances.

// clearBias sets DBias to zero.
func (c *Call) clearBias() {
	v := &c.dBias
	zeros := make([]float32, v.Shape[backend.Dim])
	for b := range v.Shape[backend.Batch] {
		for h := range v.Shape[backend.Heads] {
			for i := range v.Shape[backend.Seq] {
				v.Store(c.plan.layout.Kernels, zeros, b, h, i, 0)
			}
		}
	}
}

// addBiases adds the gradients of the biased scores of t and the keys of here, in x.ds.
func (x *chunk) addBiases(t *tile.Tile, here tile.Span) {
	n, ds, c, l := here.Hi-here.Lo, x.ds, x.call, x.layout
	plan, v := &c.plan, &c.dBias
	if k := l.Kernels; !l.KeyLanes {
		for lane := 0; lane < t.N; lane += k.Lanes {
			k.Transpose(x.turned[lane*tile.BlockKeys:], tile.BlockKeys, 1, x.ds[lane:], k.Width, k.Width, n, x.space.One)
		}
		ds = x.turned
	}
	for r := range t.N {
		h, i := l.Row(t.H, t.I, r)
		row, head := ds[r*tile.BlockKeys:][:n], t.Batch*l.Dims.Heads+h
		switch {
		case plan.inPlace:
			to, step := v.F32[v.Index(min(t.Batch, v.Shape[backend.Batch]-1), min(h, v.Shape[backend.Heads]-1), i):], v.Stride[backend.Dim]
			for at, y := range row {
				to[c.forward.Scores.Key(t.Batch, here.Lo+at)*step] += y
			}
		case plan.lines == 0:
		case v.Shape[backend.Dim] > 1:
			for at, y := range row {
				c.lines[head*plan.lines+c.forward.Scores.Key(t.Batch, here.Lo+at)] += float64(y)
			}
		default:
			sum := 0.0
			for _, y := range row {
				sum += float64(y)
			}
			c.lines[head*plan.lines+i] += sum
		}
		if plan.distances > 0 {
			for at, y := range row {
				c.distances[head*plan.distances+c.forward.Scores.Key(t.Batch, here.Lo+at)-i+l.Dims.SeqQ-1] += float64(y)
			}
		}
	}
}

// writeBiases writes the gradients that follow from the sums.
func (c *Call) writeBiases() {
	plan, n := &c.plan, c.plan.distances
	c.writeSums(&c.dRelative, func(head, at int) float64 { return c.distances[head*n+at] })
	c.writeSums(&c.dSlopes, func(head, _ int) (slope float64) {
		for at, x := range c.distances[head*n:][:n] {
			slope -= math.Abs(float64(c.problem.Visible.OffsetOf(head/plan.layout.Dims.Heads)-(at-(plan.layout.Dims.SeqQ-1)))) * x
		}
		return slope
	})
	c.writeSums(&c.dSinks, c.sinkGradient)
	if !plan.inPlace {
		step := c.dBias.Shape[backend.Seq] * c.dBias.Shape[backend.Dim] // 1, or that of lines
		c.writeSums(&c.dBias, func(head, at int) (sum float64) {
			for ; at < plan.lines; at += step {
				sum += c.lines[head*plan.lines+at]
			}
			return sum
		})
	}
}

// writeSums writes the elements of the heads of v, which has no rows or no keys, or adds to them,
// unless v is not requested: the terms of all heads and batches that share an element, in their
// order. term returns one of head h of batch b, whose number is b·H + h.
func (c *Call) writeSums(v *strided.Tensor, term func(head, at int) float64) {
	if v.IsZero() {
		return
	}
	d, shape, axis := &c.plan.layout.Dims, &v.Shape, backend.Dim
	if shape[axis] == 1 {
		axis = backend.Seq
	}
	for b := range shape[backend.Batch] {
		for h := range shape[backend.Heads] {
			for n := range shape[axis] {
				sum := 0.0
				for ob := b; ob < d.Batch; ob += shape[backend.Batch] {
					for oh := h; oh < d.Heads; oh += shape[backend.Heads] {
						sum += term(ob*d.Heads+oh, n)
					}
				}
				at := v.Index(b, h, 0) + n*v.Stride[axis]
				if c.add {
					sum += float64(v.F32[at])
				}
				v.F32[at] = float32(sum)
			}
		}
	}
}

// sinkGradient returns what a head of a batch adds to the gradient of its sink.
func (c *Call) sinkGradient(head, _ int) (sum float64) {
	d := &c.plan.layout.Dims
	sink := c.problem.Sink(head % d.Heads)
	if sink == vec.NegInf {
		return 0
	}
	for i, dot := range c.dots[head*d.SeqQ:][:d.SeqQ] {
		if lse := c.forward.LSE.At(head/d.Heads, head%d.Heads, i, 0); !math.IsInf(float64(lse), 0) {
			sum -= math.Exp(min(0, float64(sink)-float64(lse))) * float64(dot)
		}
	}
	return sum
}
