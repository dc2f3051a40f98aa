package backward

import (
	"math"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/tile"
	"github.com/seed90331342/attn/cpu/internal/vec"
	"github.com/seed90331342/attn/cpu/internal/view"
)

// biases are the gradients of biases and sinks, and the sums over dS from which they
// follow when the keys of all tasks are done. DBias with rows and keys has no sums: tasks add
// to it in place, head after head.
//
// The order of each sum depends on the shapes alone. Each has the
// terms of one head. In the chain of tasks of that head, each adds a tile after the task before
// it: the keys of a row come in order, and so do the rows of a distance. While one task is at a
// tile, those after it in the chain are at earlier tiles and later keys, at other distances.
type biases struct {
	dBias, dRelative, dSlopes, dSinks view.View

	distances []float64 // [B, H, Sq+Sk-1], as Relative
	lines     []float64 // [B, H, Sq] for DBias without keys, or [B, H, Sk] for DBias without rows
}

// distances returns the number of distances between rows and keys.
func distances(d *backend.Dims) int { return max(0, d.SeqQ+d.SeqK-1) }

// biasSums returns the lengths of the sums that g needs.
func biasSums(g *backend.Gradients) (biasDistances, biasLines int) {
	d := g.Dims()
	if !g.DRelative.IsZero() || !g.DSlopes.IsZero() {
		biasDistances = d.Batch * d.Heads * distances(&d)
	}
	if s := g.DBias.Shape(); !g.DBias.IsZero() {
		switch {
		case s[backend.Dim] == 1:
			biasLines = d.Batch * d.Heads * d.SeqQ
		case s[backend.Seq] == 1:
			biasLines = d.Batch * d.Heads * d.SeqK
		}
	}
	return biasDistances, biasLines
}

// direct reports whether tasks add to DBias in place.
func (a *biases) direct() bool {
	return !a.dBias.IsZero() && a.dBias.Shape[backend.Seq] > 1 && a.dBias.Shape[backend.Dim] > 1
}

// shared reports whether several heads add to the same element of DBias in place.
func (a *biases) shared(l *tile.Layout) bool {
	return a.direct() && (a.dBias.Shape[backend.Batch] < l.Dims.Batch || a.dBias.Shape[backend.Heads] < l.Dims.Heads)
}

// wanted reports whether a gradient of a bias needs dS.
func (a *biases) wanted() bool {
	return a.direct() || len(a.distances)+len(a.lines) > 0
}

// clear sets DBias to zero, to which tasks add in place.
func (a *biases) clear(k *vec.Kernels) {
	v := &a.dBias
	zeros := make([]float32, v.Shape[backend.Dim])
	for b := range v.Shape[backend.Batch] {
		for h := range v.Shape[backend.Heads] {
			for i := range v.Shape[backend.Seq] {
				v.Store(k, zeros, b, h, i, 0)
			}
		}
	}
}

// addBlock adds the gradients of the biased scores of t and the keys of here, in x.ds.
func (a *biases) addBlock(x *chunk, t *tile.Tile, here tile.Span) {
	n, ds, l, d := here.Hi-here.Lo, x.ds, x.layout, &x.layout.Dims
	if k := l.Kernels; !l.KeyLanes {
		for lane := 0; lane < t.N; lane += k.Lanes {
			for c := 0; c < n; c += k.Lanes {
				k.Transpose(x.turned[lane*tile.BlockKeys+c:], tile.BlockKeys, x.ds[c*k.Width+lane:], k.Width, x.space.One)
			}
		}
		ds = x.turned
	}
	direct := a.direct()
	for r := range t.N {
		h, i := l.Row(t.H, t.I, r)
		row, head := ds[r*tile.BlockKeys:][:n], t.Batch*d.Heads+h
		if direct {
			v := &a.dBias
			to, step := v.F32[v.Index(min(t.Batch, v.Shape[backend.Batch]-1), min(h, v.Shape[backend.Heads]-1), i):], v.Stride[backend.Dim]
			for c, y := range row {
				to[(here.Lo+c)*step] += y
			}
		}
		switch {
		case len(a.lines) == 0:
		case a.dBias.Shape[backend.Dim] > 1:
			addTo(a.lines[head*d.SeqK+here.Lo:], row)
		default:
			sum := 0.0
			for _, y := range row {
				sum += float64(y)
			}
			a.lines[head*d.SeqQ+i] += sum
		}
		if len(a.distances) > 0 {
			addTo(a.distances[head*distances(d)+here.Lo-i+d.SeqQ-1:], row)
		}
	}
}

// addTo adds row to sums.
func addTo(sums []float64, row []float32) {
	sums = sums[:len(row)]
	for c, y := range row {
		sums[c] += float64(y)
	}
}

// writeBiases writes the gradients that follow from the sums.
func (c *Call) writeBiases() {
	a, d := &c.biases, &c.plan.layout.Dims
	n := distances(d)
	c.writeSums(&a.dRelative, n, func(head, at int) float64 { return a.distances[head*n+at] })
	c.writeSums(&a.dSlopes, 1, func(head, _ int) (slope float64) {
		for at, x := range a.distances[head*n:][:n] {
			slope -= math.Abs(float64(c.problem.Visible.Offset-(at-(d.SeqQ-1)))) * x
		}
		return slope
	})
	c.writeSums(&a.dSinks, 1, c.sinkGradient)
	if len(a.lines) == 0 {
		return
	}
	n = max(a.dBias.Shape[backend.Seq], a.dBias.Shape[backend.Dim])
	lines := len(a.lines) / (d.Batch * d.Heads * n) // of an element: all where it has neither rows nor keys
	c.writeSums(&a.dBias, n, func(head, at int) (sum float64) {
		for _, x := range a.lines[(head*n+at)*lines:][:lines] {
			sum += x
		}
		return sum
	})
}

// writeSums writes the first length elements of the heads of v, or adds to them, unless v is not
// requested: the terms of all heads and batches that share an element, in their order. term
// returns one of head h of batch b, whose number is b·H + h.
func (c *Call) writeSums(v *view.View, length int, term func(head, at int) float64) {
	if v.IsZero() {
		return
	}
	d := &c.plan.layout.Dims
	batches, heads := v.Shape[backend.Batch], v.Shape[backend.Heads]
	axis := backend.Dim
	if v.Shape[backend.Dim] == 1 {
		axis = backend.Seq
	}
	for b := range batches {
		for h := range heads {
			for n := range length {
				sum := 0.0
				for ob := b; ob < d.Batch; ob += batches {
					for oh := h; oh < d.Heads; oh += heads {
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
		if lse := c.forward.LSE.At(head/d.Heads, head%d.Heads, i, 0); lse != vec.NegInf {
			sum -= math.Exp(float64(sink)-float64(lse)) * float64(dot)
		}
	}
	return sum
}
