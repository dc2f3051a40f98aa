package cpu

import (
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// stepKeyLanes takes tile t, with keys as lanes, over the keys of here, which are
// in r. It computes the same sums in the same order as stepQueryLanes.
func (a *attention) stepKeyLanes(b *workspace, p *taskRange, t *tile, r *keyRange, here span) {
	x, n := a.kernels, here.hi-here.lo
	lanes := roundUp(n, x.Lanes)
	a.scoreKeyLanes(b, p, t, r, here)
	// Mix may skip weights of 0, so a table with only this layout always replaces
	// non-finite values.
	clean := a.hiding || a.masked || x.KeyLanes
	for row := range t.n {
		s := b.s[row*keyBlock : row*keyBlock+lanes]
		seen := a.adjustLanes(b, p, t, row, here, s)
		clean = clean || seen.lo > 0 || seen.hi < n
	}
	x.RowWeights(b.s, keyBlock, lanes, t.n, t.cur.m, t.cur.l, b.alpha)
	if a.problem.Dropout.P > 0 {
		for row := range t.n {
			h, i := a.row(t.h, t.i, row)
			a.dropRow(x, &b.draw, b.s[row*keyBlock:row*keyBlock+lanes], p.b, h, i, here.lo)
		}
	}
	if a.readV && (!clean || !x.KeyLanes && !r.checked) {
		// Values that are not finite leave outputs that are not, whatever their weights.
		// Reading them once is cheaper than looking at them first.
		o := t.cur.o[:t.n*a.dimV]
		if clean {
			copy(b.v, o)
		}
		runs := a.runsOf(b, &a.v, p, here.lo, n, r.end)
		x.Mix(a.v.element(), o, a.dimV, runs, a.v.stride[backend.Seq], b.s, keyBlock, b.alpha, t.n, a.dimV)
		if !clean || !x.NonFinite(o, a.dimV, t.n, a.dimV) {
			return
		}
		copy(o, b.v)
	}
	runs, ldv, replaced := a.values(r, b, p, []span{here}, clean)
	x.Mix(vec.F32, t.cur.o, a.dimV, runs, ldv, b.s, keyBlock, b.alpha, t.n, a.dimV)
	if replaced {
		a.addVisibleNonFinite(p, t, here, b.s)
	}
}

// adjustLanes applies softcap, biases and masks to s, a row of scores of t with the keys
// of here. It returns the elements of s that the visibility rule shows; the others are -Inf.
func (a *attention) adjustLanes(b *workspace, p *taskRange, t *tile, row int, here span, s []float32) (seen span) {
	x, n := a.kernels, here.hi-here.lo
	if a.cap > 0 {
		x.Softcap(s, a.cap)
		if b.capped != nil {
			copy(b.capped[row*keyBlock:], s)
		}
	}
	h, i := a.row(t.h, t.i, row)
	if a.added {
		a.addedRow(x, &b.ramp, b.bias[:n], p.b, h, i, here.lo)
		clear(b.bias[n:len(s)])
		x.Bias(s, b.bias)
	}
	if a.masked {
		a.maskRow(x, s[:n], p.b, h, i, here.lo)
	}
	seen = span{max(0, min(n, t.spans[row].lo-here.lo)), max(0, min(n, t.spans[row].hi-here.lo))}
	fill(s[:seen.lo], negInf)
	fill(s[seen.hi:], negInf)
	return seen
}

// scoreKeyLanes computes the scores of t and the keys of here, and of zeros up to
// the next multiple of Lanes.
func (e *engine) scoreKeyLanes(b *workspace, p *taskRange, t *tile, r *keyRange, here span) {
	x, n, rows, done := e.kernels, here.hi-here.lo, e.dotRows(t.n), 0
	switch {
	case e.readK:
		if done = n / x.Lanes * x.Lanes; done > 0 {
			runs := e.runsOf(b, &e.k, p, here.lo, done, r.end)
			x.Dots(e.k.element(), b.s, keyBlock, runs, e.k.stride[backend.Seq], t.q, e.dimK, rows, e.dimK)
		}
	case e.tiles > 1: // they share the converted keys
		if done = n / x.Lanes * x.Lanes; done > 0 {
			runs, ldk := e.keys(r, b, p, here.lo, done)
			x.Dots(vec.F32, b.s, keyBlock, runs, ldk, t.q, e.dimK, rows, e.dimK)
		}
	}
	// Convert a few keys at a time, which stay in the first-level cache.
	step := 2 * x.Lanes
	if x.KeyLanes {
		step = keyBlock // a BLAS call costs more than cache misses
	}
	for c := done; c < n; c += step {
		some := min(step, n-c)
		padded := roundUp(some, x.Lanes)
		k := b.k
		if e.tiles > 1 {
			k = b.stage // b.k has the keys of all tiles
		}
		loadRows(x, &e.k, k, e.dimK, p.b, p.hk, here.lo+c, some)
		clear(k[some*e.dimK : padded*e.dimK])
		x.Dots(vec.F32, b.s[c:], keyBlock, b.run(k, e.dimK, padded, e.dimK), e.dimK, t.q, e.dimK, rows, e.dimK)
	}
}

// runsOf returns rows [lo, lo+n) of keys or values as the kernels read them. The
// kernels prefetch those of the next block, as far as end.
func (e *engine) runsOf(b *workspace, v *view, p *taskRange, lo, n, end int) []vec.Run {
	b.runs = b.runs[:0]
	e.appendRuns(b, v, p, lo, n, end)
	return b.runs
}

// appendRuns appends the runs that runsOf returns to b.runs.
func (e *engine) appendRuns(b *workspace, v *view, p *taskRange, lo, n, end int) {
	if v.pages == nil {
		later := lo
		if lo+keyBlock < end {
			later += keyBlock
		}
		b.runs = v.appendRun(b.runs, v.index(p.b, p.hk, lo), v.index(p.b, p.hk, later), n)
		return
	}
	// Each run prefetches a share of the four quarters of the next block, whose rows are as
	// many as to lie in one page each.
	size, ld, stride := v.shape[backend.Seq], v.stride[backend.Seq], v.stride[backend.Batch]
	piece, quarter, bytes := commonDivisor(size, keyBlock), n/4, v.dtype.Size()
	pages, head, last := v.pages[p.b], p.hk*v.stride[backend.Heads], (end-1)/size
	from := pagedRow{lo / size, lo % size}
	var ahead [4]pagedRow
	for s := range ahead {
		r := lo + keyBlock + s*quarter
		ahead[s] = pagedRow{r / size, r % size}
	}
	for m := piece - from.row%piece; n > 0; m = piece {
		m = min(m, n)
		at := int(pages[from.page])*stride + head + from.row*ld
		next := [4]int{at, at, at, at}
		for s := range ahead {
			if a := &ahead[s]; a.page <= last {
				next[s] = int(pages[a.page])*stride + head + a.row*ld
				a.add(m/4, size)
			}
		}
		b.runs = v.appendRun(b.runs, at, next[0], m)
		b.runs[len(b.runs)-1].Spread(bytes*(next[1]-next[0]), bytes*(next[2]-next[0]), bytes*(next[3]-next[0]))
		from.add(m, size)
		n -= m
	}
	vec.Chain(b.runs)
}

// pagedRow is a row of a page.
type pagedRow struct{ page, row int }

// add moves r by n rows, at most the size of a page.
func (r *pagedRow) add(n, size int) {
	if r.row += n; r.row >= size {
		r.page, r.row = r.page+1, r.row-size
	}
}

// run returns n rows of float32 as one run.
func (b *workspace) run(rows []float32, ld, n, d int) []vec.Run {
	b.runs = vec.AppendRun(b.runs[:0], rows, ld, n, d, rows)
	return b.runs
}

func commonDivisor(a, b int) int {
	for b > 0 {
		a, b = b, a%b
	}
	return a
}
