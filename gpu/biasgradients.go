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

// scores appends the operations that add the gradients of scores to t, unless t is zero. kind is the reduction, which takes
// one head at a time, in ascending order.
func (x *gradients) scores(kind int, name string, t backend.Tensor, sloped bool) {
	if t.IsZero() {
		return
	}
	to, scratch := t, one(t) && kind == reduceRows
	if scratch {
		to = x.sums
	}
	if scratch || !x.g.Add {
		x.zeros(name, to)
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
	s := x.newPass(shaders.DS, tilingOf(shaders.DS, columns), columns, cut.Sum, 1, 1, out)
	tile, c := s.tile, s.cutter
	c.AtMost(cut.Batch, 1)
	c.AtMost(cut.Head, 1)
	c.AtMost(cut.Row, mostReduceRows)
	c.AtMost(cut.Col, mostReduceKeys)
	pitch := func(box cut.Box) int { return 4 * ceil(box.Len(cut.Col), 4) }
	c.State = func(box cut.Box) uint64 { return uint64(box.Len(cut.Row)) * uint64(4*pitch(box)) }
	s.add(true, 1, func(box cut.Box) cut.Box { return box }, func(p queue.Chunk, w *shaders.AttentionParams, step *queue.Step) {
		w.Blocks, w.Parts, w.Splits, w.BatchHeads = ceil(p.Len(cut.Row), tile.owned()), ceil(p.Len(cut.Col), tile.others()), pitch(p.Box)/4, 1
		step.Groups, step.OpsPerGroup = w.Blocks*w.Parts, 2*float64((x.d.Dim+x.d.ValueDim)*tile.owned()*tile.others())
	}, func(p queue.Chunk) queue.Step {
		rows, keys, view := p.Len(cut.Row), p.Len(cut.Col), out.View(p.Box, c.Align)
		w := &shaders.ReduceParams{
			Kind: kind, Rows: rows, Keys: keys, Pitch: pitch(p.Box), Sloped: when(sloped, 1), Chained: when(!x.g.Add, 1),
			Away: p.Lo[cut.Row] + x.p.Visible.OffsetOf(p.Lo[cut.Batch]) - p.Lo[cut.Col], O: strides(view),
		}
		w.All = [...]int{reducePairs: rows * keys, reduceKeys: keys, reduceRows: rows, reduceDiagonals: rows + keys - 1}[kind]
		terms := [...]int{reducePairs: 1, reduceKeys: rows, reduceRows: keys, reduceDiagonals: min(rows, keys)}[kind]
		step := reduce(w, terms)
		step.Windows = []cut.Window{p.State, view.Window}
		return step
	})
	if scratch {
		x.totals(name, t)
	}
}

// zeros appends the operation that sets t to zeros.
func (x *gradients) zeros(name string, t backend.Tensor) {
	dim := t.Shape()[backend.Dim]
	ops := []*cut.Operand{new(cut.Operand), cut.Writes(name, t, cut.RowAxes)}
	x.ops = append(x.ops, x.b.rowOp(t.Shape(), ops, func(box cut.Box, v []cut.View) queue.Step {
		return reduce(&shaders.ReduceParams{
			Kind: reduceZeros, All: rows(box) * dim, Batches: box.Len(cut.Batch), Heads: box.Len(cut.Head), Rows: box.Len(cut.Row), Keys: dim,
			O: strides(v[1]),
		}, 1)
	}))
}

// totals appends the operations that set t [B or 1, H or 1, 1, 1] to the sums of rows, or add them to it.
func (x *gradients) totals(name string, t backend.Tensor) {
	if !x.g.Add {
		x.zeros(name, t)
	}
	whole := [4]int{cut.Whole, cut.Whole, cut.Whole, cut.Whole}
	ops := []*cut.Operand{cut.Reads("scratch", x.sums, whole, 1), cut.Updates(name, t, whole)}
	s := t.Shape()
	x.ops = append(x.ops, x.b.rowOp(backend.Shape{1, 1, 1, 1}, ops, func(_ cut.Box, v []cut.View) queue.Step {
		w := &shaders.ReduceParams{
			Kind: reduceTotals, All: s[0] * s[1], Batches: x.d.Batch / s[0], Heads: x.d.Heads / s[1], Rows: x.d.SeqQ,
			Base: v[0].Base, SBatch: v[0].Strides[backend.Batch], SHead: v[0].Strides[backend.Heads], OHeads: s[1], O: strides(v[1]),
		}
		return reduce(w, w.Batches*w.Heads*w.Rows)
	}))
}

// reduce returns a step of reduce.wgsl, without windows, that adds so many terms for each
// element. A thread adds those of an element, or a workgroup those of a row.
func reduce(w *shaders.ReduceParams, terms int) queue.Step {
	groups, threads := ceil(w.All, reduceThreads), reduceThreads
	if w.Kind == reduceRows || w.Kind == reduceTotals {
		groups, threads = w.All, 1
	}
	return queue.Step{Kernel: shaders.Reduce, Params: w, Groups: groups, OpsPerGroup: reduceOps * float64(threads) * float64(terms)}
}
