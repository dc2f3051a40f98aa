package cpu

import "github.com/seed90331342/attn/cpu/internal/vec"

// maxColumns is the largest number of columns of a tile, the vectors of its lanes.
const maxColumns = 4

// columnSteps is the number of keys of each step of vec.Kernels.ValuesOf.
type columnSteps [2*maxColumns - 1]int

// findColumns sets the keys that any row of each column of t sees. It sets t.diagonal where
// some columns see fewer than t and they begin and end one after another.
func (a *attention) findColumns(t *tile) {
	before := span{t.keys.lo, t.keys.lo}
	for c := range a.kernels.Columns() {
		column := span{a.d.SeqK, 0}
		for _, s := range t.spans[:t.n][min(t.n, c*a.kernels.Lanes):min(t.n, (c+1)*a.kernels.Lanes)] {
			column = column.union(s)
		}
		if column.empty() {
			column = before
		}
		if column.lo < before.lo || column.hi < before.hi {
			t.diagonal = false
			return
		}
		t.diagonal = t.diagonal || column != t.keys
		t.columns[c], before = column, column
	}
}

// cutSteps sets b.steps to the steps in which the columns of t take the keys of here, and
// reports whether some columns do not take all of them.
func (a *attention) cutSteps(b *workspace, t *tile, here span) bool {
	if !t.diagonal {
		return false
	}
	n, columns := a.kernels.Columns(), t.columns
	for c := range n {
		s := &columns[c]
		s.lo = max(here.lo, min(here.hi, s.lo&^3))
		s.hi = max(here.lo, min(here.hi, roundUp(s.hi, 4)))
	}
	last := columns[n-1].lo // no column ends before all have begun
	b.steps[n-1] = max(columns[0].hi, last) - last
	for c := 1; c < n; c++ {
		b.steps[c-1] = columns[c].lo - columns[c-1].lo
		b.steps[n-1+c] = max(columns[c].hi, last) - max(columns[c-1].hi, last)
	}
	return b.steps[n-1] < here.hi-here.lo
}

// scoreColumns is Scores for the keys of part, in the steps of b.steps, which begin at key lo.
// An edge hides what it leaves out.
func (a *attention) scoreColumns(b *workspace, p *taskRange, t *tile, r *keyRange, part span, lo int) {
	x := a.kernels
	n := x.Columns()
	for step, keys := range b.steps[:2*n-1] {
		some := span{lo, lo + keys}.clip(part.lo, part.hi)
		lo += keys
		if !some.empty() {
			runs, ldk := a.keys(r, b, p, some.lo, some.hi-some.lo)
			x.ScoresOf(max(0, step+1-n), min(step+1, n), b.s[(some.lo-part.lo)*x.Width:], runs, ldk, t.q, a.d.Dim, b.mx)
		}
	}
}

// addValues adds values times the weights in b.s to the outputs o. On a diagonal the columns of
// a tile leave out keys that none of their rows sees. This does not change an output: the
// weights of these keys are 0 and values at an edge are finite, so each product is a zero, and
// the sum of it and the sum before differs from the latter only if both are zeros, and then
// only in its sign. That sign ends where outputs are written, which adds 0.
func (a *attention) addValues(b *workspace, o []float32, runs []vec.Run, ldv int, diagonal bool) {
	if diagonal && len(runs) == 1 {
		a.kernels.ValuesOf(b.steps[:], o, runs, ldv, b.s, a.d.ValueDim, b.alpha)
		return
	}
	a.kernels.Values(o, runs, ldv, b.s, a.d.ValueDim, b.alpha)
}
