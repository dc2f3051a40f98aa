package gpu

import (
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/queue"
	"github.com/seed90331342/attn/shaders"
)

// Kinds of reduce.wgsl.
const (
	reducePairs = iota
	reduceKeys
	reduceRows
	reduceDiagonals
	reduceTotals
	reduceZeros
)

const (
	// reduceThreads is the size of a workgroup of reduce.wgsl.
	reduceThreads = 64
	// reduceOps is the approximate cost of a term of a reduction.
	reduceOps = 10
	// The most rows and keys of which a thread of reduce.wgsl sums one or every 64th.
	mostReduceRows = 8 << 10
	mostReduceKeys = 1 << 20
)

// scores appends the operations that add the gradients of scores to t by a kind of
// reduction, one head at a time, in ascending order.
func (x *gradients) scores(kind int, name string, t backend.Tensor, sloped bool) error {
	x.clear(name, t)
	to, scratch := t, one(t) && kind == reduceRows
	if scratch {
		to = x.sums
		x.zeros(name, to)
	}
	in, err := x.inputs(1)
	if err != nil {
		return err
	}
	out := cut.Updates(name, to, cut.PairAxes)
	for i, n := range to.Shape() {
		if n == 1 {
			out.Axes[i] = cut.Whole
		}
	}
	if kind == reduceDiagonals {
		out.Axes[backend.Seq], out.Axes[backend.Dim], out.Diagonal = cut.Whole, cut.Col, x.d.SeqQ
	}
	const columns = 64 // decides the tiles alone
	tile := tilingOf(columns)
	kernel := x.kernel(in, shaders.DS, columns)
	c := x.b.dev.NewCutter(cut.Sum, 1, append(in.list, out)...)
	in.limit(c)
	c.AlignGranules()
	c.AtMost(cut.Batch, 1)
	c.AtMost(cut.Head, 1)
	c.AtMost(cut.Row, mostReduceRows)
	c.AtMost(cut.Col, mostReduceKeys)
	pitch := func(box cut.Box) int { return 4 * ceil(box.Len(cut.Col), 4) }
	c.StateAbove = -1
	c.State = func(box cut.Box) uint64 { return uint64(box.Len(cut.Row)) * uint64(4*pitch(box)) }
	if !scratch {
		x.names = append(x.names, name)
	}
	x.ops = append(x.ops, &queue.Op{
		Cutter: c, Space: cut.Space(x.d.Batch, x.d.Heads, x.d.SeqQ, x.d.SeqK, 1), Chained: true,
		Sweep: func(box cut.Box, chunk int) queue.Sweep {
			return queue.Sweep{Box: box, Chunk: chunk, Passes: 1, Last: true, State: c.State(box)}
		},
		Step: func(p queue.Chunk) queue.Step {
			rows, keys := p.Len(cut.Row), p.Len(cut.Col)
			if p.Pass < p.Of.Passes {
				s, w := x.step(in, c, kernel, p)
				w.Blocks, w.Parts, w.Splits, w.BatchHeads = ceil(rows, tile.owned()), ceil(keys, tile.others()), pitch(p.Box)/4, 1
				s.Groups = w.Blocks * w.Parts
				s.Each = 2 * float64((x.d.Dim+x.d.ValueDim)*tile.owned()*tile.others())
				return s
			}
			view := out.View(p.Box, c.Align)
			w := &shaders.ReduceParams{
				Kind: kind, Rows: rows, Keys: keys, Pitch: pitch(p.Box), Sloped: when(sloped, 1), Chained: when(!x.g.Add, 1),
				Away: p.Lo[cut.Row] + x.p.Visible.Offset - p.Lo[cut.Col], O: strides(view),
			}
			s := queue.Step{Kernel: shaders.Reduce, Params: w, Windows: []cut.Window{p.State, view.Window}}
			switch kind {
			case reducePairs:
				w.All, s.Each = rows*keys, reduceOps*reduceThreads
			case reduceKeys:
				w.All, s.Each = keys, reduceOps*reduceThreads*float64(rows)
			case reduceDiagonals:
				w.All, s.Each = rows+keys-1, reduceOps*reduceThreads*float64(min(rows, keys))
			case reduceRows:
				w.All, s.Each = rows, reduceOps*float64(keys)
			}
			s.Groups = ceil(w.All, reduceThreads)
			if kind == reduceRows {
				s.Groups = rows
			}
			return s
		},
	})
	if scratch {
		x.totals(name, t)
	}
	return nil
}

// clear appends the operation that sets t to zeros, unless gradients are added to it.
func (x *gradients) clear(name string, t backend.Tensor) {
	if !x.g.Add {
		x.zeros(name, t)
	}
}

func (x *gradients) zeros(name string, t backend.Tensor) {
	dim := t.Shape()[backend.Dim]
	ops := []*cut.Operand{new(cut.Operand), cut.Writes(name, t, cut.RowAxes)}
	x.ops = append(x.ops, x.b.rowOp(t.Shape(), ops, func(box cut.Box, v []cut.View) queue.Step {
		w := &shaders.ReduceParams{
			Kind: reduceZeros, All: rows(box) * dim, Batches: box.Len(cut.Batch), Heads: box.Len(cut.Head), Rows: box.Len(cut.Row), Keys: dim,
			O: strides(v[1]),
		}
		return queue.Step{Kernel: shaders.Reduce, Params: w, Groups: ceil(w.All, reduceThreads), Each: reduceOps * reduceThreads}
	}))
}

// totals appends the operation that adds the sums of rows to t [B or 1, H or 1, 1, 1].
func (x *gradients) totals(name string, t backend.Tensor) {
	whole := [4]int{cut.Whole, cut.Whole, cut.Whole, cut.Whole}
	from, to := cut.Reads("scratch", x.sums, whole, 1), cut.Updates(name, t, whole)
	c := x.b.dev.NewCutter(cut.Sum, 1, from, to)
	s := t.Shape()
	all := cut.Space(1, 1, 1, 1, 1)
	x.names = append(x.names, name)
	x.ops = append(x.ops, &queue.Op{
		Cutter: c, Space: all,
		Step: func(p queue.Chunk) queue.Step {
			v, o := from.View(p.Box, c.Align), to.View(p.Box, c.Align)
			w := &shaders.ReduceParams{
				Kind: reduceTotals, All: s[0] * s[1], Batches: x.d.Batch / s[0], Heads: x.d.Heads / s[1], Rows: x.d.SeqQ,
				Base: v.Base, SBatch: v.Strides[backend.Batch], SHead: v.Strides[backend.Heads], OHeads: s[1], O: strides(o),
			}
			return queue.Step{
				Kernel: shaders.Reduce, Params: w, Windows: []cut.Window{v.Window, o.Window},
				Groups: w.All, Each: reduceOps * float64(w.Batches*w.Heads*w.Rows),
			}
		},
	})
}
