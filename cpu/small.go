package cpu

import (
	"math"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/pool"
	"github.com/seed90331342/attn/cpu/internal/tile"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// smallSpace is the memory of a task of small problems: groups of few query rows and few keys, for which the tiles,
// sums and tasks of package tile cost more than the arithmetic. Its methods call the same kernels on the same numbers
// in the same order, without tiles and sums, and for several groups in one task.
type smallSpace struct {
	a      *attention
	q      []float32 // [rows, DimK], times scale; the padding is 0
	k, v   []float32 // rows that the kernels cannot read in place; the padding of keys is 0
	s      []float32 // [rows, ld]
	ld     int
	o      []float32 // [rows, DimV]
	m, l   []float32 // of a row: the maximum and the sum
	alpha  []float32 // factors of sums over no keys
	lanes  []float32
	memory *tile.Space
}

// open takes the memory of a task from scratch.
func (x *smallSpace) open(a *attention, w *pool.Scratch) {
	w.Reset()
	l := &a.partition.layout
	ld := tile.RoundUp(l.Dims.SeqK, l.Kernels.Lanes)
	*x = smallSpace{a: a, q: w.Floats(l.Rows * l.DimK), k: w.Floats(ld * l.DimK), v: w.Floats(l.Dims.SeqK * l.DimV),
		s: w.Floats(l.Rows * ld), ld: ld, o: w.Floats(l.Rows * l.DimV), m: w.Floats(l.Rows), l: w.Floats(l.Rows),
		alpha: w.Floats(l.Rows), lanes: w.Floats(l.Kernels.Lanes), memory: tile.SpaceOf(w)}
	clear(x.q)
	if l.Dims.Dim < l.DimK {
		clear(x.k)
	}
}

// smallTask computes the groups of task n.
func (a *attention) smallTask(turn *pool.Turn, w *pool.Scratch, n int) error {
	var x smallSpace
	x.open(a, w)
	d := &a.partition.layout.Dims
	for g := n * a.partition.taskGroups; g < min((n+1)*a.partition.taskGroups, d.Batch*d.KVHeads); g++ {
		b, hk := g/d.KVHeads, g%d.KVHeads
		if x.group(b, hk) {
			continue
		}
		w.Reset()
		if err := a.tilesTask(turn, w, g); err != nil {
			return err
		}
		x.open(a, w)
	}
	return nil
}

// copyValue writes the outputs of a group of one key: its value, because the key's weight
// is 2^0. All rows see the key. It returns false if it cannot rule out that a score is not finite.
func (x *smallSpace) copyValue(b, hk int) bool {
	p, l := &x.a.tiles.Products, &x.a.partition.layout
	k := p.K.F32[p.K.RowIndex(b, hk, 0):][:l.Dims.Dim]
	v := p.V.F32[p.V.RowIndex(b, hk, 0):][:l.Dims.ValueDim]
	for r := range l.Rows {
		h, i := l.Row(hk*l.Share, 0, r)
		bound := float32(0)
		for c, y := range p.Q.F32[p.Q.Index(b, h, i):][:l.Dims.Dim] {
			bound += max(y*p.Scale*k[c], -(y * p.Scale * k[c])) // NaN if either is
		}
		if !(bound < math.MaxFloat32/2) {
			return false
		}
		o := p.O.F32[p.O.Index(b, h, i):][:l.Dims.ValueDim]
		for c, y := range v {
			o[c] = y + 0 // no zero is negative
		}
	}
	return true
}

// group computes a group. It returns false, and writes nothing, for a group that needs
// tiles: one without visible keys, or with keys that some row does not see
// and whose values are not finite, or lie in pages.
func (x *smallSpace) group(b, hk int) bool {
	p, l := &x.a.tiles.Products, &x.a.partition.layout
	kernels, h0, visible := l.Kernels, hk*l.Share, &x.a.problem.Visible
	n, least, first := 0, l.Dims.SeqK, 0 // the largest and the smallest end of a row's keys
	for r := range l.Rows {
		_, i := l.Row(h0, 0, r)
		lo, hi := visible.Range(b, i, l.Dims.SeqK)
		n, least, first = max(n, hi), min(least, hi), max(first, lo)
		if visible.Left == backend.Unbounded && visible.Right == backend.Unbounded {
			break // all rows see the same
		}
	}
	every := least == n && first == 0 // all rows see the first n keys
	if n == 0 || !every && (p.V.Pages != nil || kernels.NonFinite(p.V.F32[p.V.Index(b, hk, 0):], p.V.Stride[backend.Seq], n, l.Dims.ValueDim)) {
		return false
	}
	if every && l.Dims.SeqK == 1 && x.a.tiles.LSE.IsZero() && x.a.problem.Sinks == nil && x.copyValue(b, hk) {
		return true
	}
	for r := range l.Rows {
		h, i := l.Row(h0, 0, r)
		copy(x.q[r*l.DimK:], p.Q.F32[p.Q.Index(b, h, i):][:l.Dims.Dim])
	}
	kernels.ScaleMax(x.q, p.Scale, x.lanes)
	x.scores(b, hk, n)
	lanes := tile.RoundUp(n, kernels.Lanes)
	for r := range l.Rows {
		s, lo, hi := x.s[r*x.ld:r*x.ld+lanes], 0, n
		if !every {
			_, i := l.Row(h0, 0, r)
			lo, hi = x.a.problem.Visible.Range(b, i, l.Dims.SeqK)
		}
		tile.Fill(s[:lo], vec.NegInf)
		tile.Fill(s[hi:], vec.NegInf)
		x.m[r], x.l[r] = vec.NoScore, 0
	}
	kernels.RowWeights(x.s, x.ld, lanes, l.Rows, x.m, x.l, x.alpha)
	runs, ldv := []vec.Run(nil), p.V.Stride[backend.Seq]
	if l.Dims.ValueDim == l.DimV {
		runs = p.V.Runs(&x.memory.Runs, b, hk, 0, n, n, n)
	} else {
		p.V.LoadRows(kernels, x.v, l.DimV, b, hk, 0, n)
		runs, ldv = x.memory.Rows(x.v, l.DimV, n, l.DimV), l.DimV
	}
	clear(x.o)
	kernels.Mix(vec.F32, x.o, l.DimV, runs, ldv, x.s, x.ld, x.alpha, l.Rows, l.DimV)
	x.write(b, h0)
	return true
}

// scores computes the scores of a group and its first n keys. Those of the keys up to whole vectors are unspecified.
func (x *smallSpace) scores(b, hk, n int) {
	p, l := &x.a.tiles.Products, &x.a.partition.layout
	kernels, done := l.Kernels, 0
	if l.Dims.Dim == l.DimK {
		if done = n / kernels.Lanes * kernels.Lanes; done > 0 {
			runs := p.K.Runs(&x.memory.Runs, b, hk, 0, done, n, n)
			kernels.Dots(vec.F32, x.s, x.ld, runs, p.K.Stride[backend.Seq], x.q, l.DimK, l.Rows, l.DimK)
		}
	}
	if done < n {
		rest := tile.RoundUp(n, kernels.Lanes) - done
		for r := range n - done {
			copy(x.k[r*l.DimK:], p.K.F32[p.K.RowIndex(b, hk, done+r):][:l.Dims.Dim])
		}
		kernels.Dots(vec.F32, x.s[done:], x.ld, x.memory.Rows(x.k, l.DimK, rest, l.DimK), l.DimK, x.q, l.DimK, l.Rows, l.DimK)
	}
}

// write writes the rows of a group, from head h0 on.
func (x *smallSpace) write(b, h0 int) {
	a, l := &x.a.tiles, &x.a.partition.layout
	for r := range l.Rows {
		h, i := l.Row(h0, 0, r)
		inv := 1 / x.l[r]
		if a.Exact || x.l[r] == 0 {
			var lse float32
			lse, inv = vec.RowLSE(x.m[r], float64(x.l[r]), x.a.problem.Sink(h))
			if !a.LSE.IsZero() {
				a.LSE.F32[a.LSE.Index(b, h, i)] = lse
			}
		}
		tile.ScaleRows(a.Products.O.F32[a.Products.O.Index(b, h, i):], x.o[r*l.DimV:][:l.Dims.ValueDim], inv)
	}
}
