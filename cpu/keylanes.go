package cpu

import (
	"context"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// fewLoad is a workspace for few rows.
type fewLoad struct {
	progress
	q, s, bias  []float32 // [rows, dimK], [rows, keyBlock], [rows, keyBlock]
	alpha, beta []float32
	spans       []span
	keys        span // what any of them sees
	rows        int
}

// fewRows computes a task with keys as lanes: all rows of a group at once, each
// key and value read once for all of them. It does the sums of wide in the same
// order, so that decoding a row gives the bits of a prefill.
func (f *fused) fewRows(ctx context.Context, w *scratch, p *part) error {
	x := f.kernels
	e := &w.few
	b := &w.workspace
	b.k, b.v = w.floats(keyBlock*f.dimK), w.floats(keyBlock*f.dimV)
	*e = fewLoad{rows: f.rows, q: w.floats(f.rows * f.dimK), s: w.floats(f.rows * keyBlock), bias: w.floats(f.rows * keyBlock),
		alpha: w.floats(f.laneRows()), beta: w.floats(f.laneRows()), spans: w.spans}
	e.cur = stateIn(w.floats(f.slot), f.rows*f.dimV, f.laneRows())
	if f.chunks > 1 {
		e.all = stateIn(w.floats(f.slot), f.rows*f.dimV, f.laneRows())
	}
	h0 := p.hk * f.share
	keys := f.seeFew(e, p)
	e.keys = keys
	first := 4 // keys that a block begins at a multiple of
	if f.k.pages != nil {
		first = x.Lanes // groups lie in one page
	}
	fold := folder{x, f.dimV, e.alpha, e.beta}
	f.seedDropout(&b.draw)
	for j0 := max(keys.lo, p.keys.lo) / keyBlock * keyBlock; j0 < min(keys.hi, p.keys.hi); j0 += keyBlock {
		if err := ctx.Err(); err != nil {
			return err
		}
		here, _ := f.trim(p.b, h0, 0, e.rows, span{max(keys.lo, j0), min(keys.hi, j0+keyBlock)})
		if here.lo >= here.hi {
			continue
		}
		if f.parts > 1 && e.some && e.chunk != j0/chunkKeys {
			f.keep(p.tile, &e.progress)
		}
		e.enter(j0/chunkKeys, &fold)
		f.fewBlock(b, e, p, keyRange{lo: here.lo / first * first, hi: here.hi})
	}
	if f.parts > 1 {
		if e.some {
			f.keep(p.tile, &e.progress)
		}
		if f.pending[p.last].Add(-1) > 0 {
			return nil
		}
		f.foldParts(p.tile, &e.progress, &fold)
	}
	s := e.sum(&fold)
	for r := range e.rows {
		h, i := f.row(h0, 0, r)
		lse, inv := rowLSE(s.m[r], float64(s.l[r]), f.p.Sink(h))
		o := s.o[r*f.dimV : (r+1)*f.dimV]
		for c := range o {
			o[c] = o[c]*inv + 0
		}
		storeRow(x, &f.o, o, p.b, h, i)
		if !f.lse.isZero() {
			f.lse.f32[f.lse.index(p.b, h, i)] = lse
		}
	}
	return nil
}

// seeFew loads the query rows, times scale, fills in what each sees, and returns
// what any of them does.
func (f *fused) seeFew(e *fewLoad, p *part) span {
	keys := span{f.d.SeqK, 0}
	for r := range e.rows {
		_, i := f.row(p.hk*f.share, 0, r)
		lo, hi := f.p.Visible.Range(p.b, i, f.d.SeqK)
		e.spans[r] = span{lo, hi}
		if lo < hi {
			keys = span{min(keys.lo, lo), max(keys.hi, hi)}
		}
		f.loadQuery(e, p, r)
	}
	return keys
}

// loadQuery loads row r of the queries, times scale.
func (f *fused) loadQuery(e *fewLoad, p *part, r int) {
	h, i := f.row(p.hk*f.share, 0, r)
	q := e.q[r*f.dimK : (r+1)*f.dimK]
	loadRows(f.kernels, &f.q, q, f.dimK, p.b, h, i, 1)
	for c := range q {
		q[c] = q[c]*f.scale + 0 // no zero is negative, as in Kernels.Transpose
	}
}

// fewBlock takes all rows over the keys of r, which lie in one key block.
func (f *fused) fewBlock(b *workspace, e *fewLoad, p *part, r keyRange) {
	x, n := f.kernels, r.hi-r.lo
	lanes := ceilDiv(n, x.Lanes) * x.Lanes
	f.fewScores(b, e, p, &r, n)
	hidden := f.hiding || f.masked
	for row := range e.rows {
		lo, hi := max(0, min(n, e.spans[row].lo-r.lo)), max(0, min(n, e.spans[row].hi-r.lo))
		hidden = hidden || lo > 0 || hi < n
		s := e.s[row*keyBlock : row*keyBlock+lanes]
		if f.cap > 0 {
			x.Softcap(s, f.cap)
		}
		if f.biased {
			bias := e.bias[row*keyBlock : row*keyBlock+lanes]
			h, i := f.row(p.hk*f.share, 0, row)
			f.biasRow(x, bias, p.b, h, i, r.lo, n)
			clear(bias[n:])
			x.Bias(s, bias)
		}
		fill(s[:lo], negInf)
		fill(s[hi:], negInf)
		m := max(e.cur.m[row], x.ScaleMax(s, 1, b.lanes[:]))
		e.alpha[row] = e.cur.m[row] - m
		e.cur.m[row] = m
		x.Exp2(s, m)
	}
	x.Exp2(e.alpha, 0)
	for row := range e.rows {
		e.cur.l[row] = float32(e.alpha[row]*e.cur.l[row]) + sumByFours(e.s[row*keyBlock:row*keyBlock+lanes])
		if f.p.Dropout.P > 0 {
			h, i := f.row(p.hk*f.share, 0, row)
			f.dropRow(x, &b.draw, e.s[row*keyBlock:row*keyBlock+lanes], p.b, h, i, r.lo)
		}
	}
	if f.asLieV && !hidden {
		runs := f.inRuns(b, &f.v, p, r.lo, n, vec.MixAhead(e.rows), e.keys.hi)
		x.Mix(f.v.element(), e.cur.o, f.dimV, runs, f.v.stride[backend.Seq], e.s, keyBlock, e.alpha, e.rows, f.dimV)
		return
	}
	f.loadValues(&r, b, p)
	v, ldv, careful := r.v, r.ldv, false
	if hidden {
		v, ldv, careful = f.cleaned(&r, b)
	}
	x.Mix(vec.F32, e.cur.o, f.dimV, b.run(v, ldv, n, f.dimV), ldv, e.s, keyBlock, e.alpha, e.rows, f.dimV)
	if careful {
		f.addFew(e, p, &r)
	}
}

// fewScores computes the scores of r's n keys, and of zeros up to the next multiple
// of Lanes.
func (f *fused) fewScores(b *workspace, e *fewLoad, p *part, r *keyRange, n int) {
	x, whole := f.kernels, 0
	if f.asLieK {
		if whole = n / x.Lanes * x.Lanes; whole > 0 {
			runs := f.inRuns(b, &f.k, p, r.lo, whole, vec.DotsAhead, e.keys.hi)
			x.Dots(f.k.element(), e.s, keyBlock, runs, f.k.stride[backend.Seq], e.q, f.dimK, e.rows, f.dimK)
		}
	}
	// Some keys at a time, so that what is converted is still in the first cache.
	for c := whole; c < n; c += 2 * x.Lanes {
		some := min(2*x.Lanes, n-c)
		padded := ceilDiv(some, x.Lanes) * x.Lanes
		loadRows(x, &f.k, b.k, f.dimK, p.b, p.hk, r.lo+c, some)
		clear(b.k[some*f.dimK : padded*f.dimK])
		x.Dots(vec.F32, e.s[c:], keyBlock, b.run(b.k, f.dimK, padded, f.dimK), f.dimK, e.q, f.dimK, e.rows, f.dimK)
	}
}

// inRuns returns rows [lo, lo+n) of keys or values as the kernels read them, asking for
// those that come ahead rows later, as far as end.
func (f *fused) inRuns(b *workspace, v *view, p *part, lo, n, ahead, end int) []vec.Run {
	b.runs = b.runs[:0]
	if v.pages == nil {
		later := lo
		if lo+ahead < end {
			later += ahead
		}
		b.runs = append(b.runs, v.run(v.index(p.b, p.hk, lo), v.index(p.b, p.hk, later), n))
		return b.runs
	}
	// Runs are so short that what comes later is in one page too. The processor does not
	// guess the next page: memory is asked earlier than where rows follow one another.
	size, ld := v.shape[backend.Seq], v.stride[backend.Seq]
	ahead = v.pagesAhead()
	piece := commonDivisor(size, ahead)
	table, head := v.pages[p.b], p.hk*v.stride[backend.Heads]
	page, row := lo/size, lo%size
	nextPage, nextRow := (lo+ahead)/size, (lo+ahead)%size
	for m := piece - row%piece; n > 0; m = piece {
		m = min(m, n)
		at := int(table[page])*v.stride[backend.Batch] + head + row*ld
		later := at
		if lo+ahead < end {
			later = int(table[nextPage])*v.stride[backend.Batch] + head + nextRow*ld
		}
		b.runs = append(b.runs, v.run(at, later, m))
		lo, n = lo+m, n-m
		if row += m; row == size {
			page, row = page+1, 0
		}
		if nextRow += m; nextRow == size {
			nextPage, nextRow = nextPage+1, 0
		}
	}
	return b.runs
}

// pagesAhead is how many rows of pages ahead memory is asked for what comes: the power
// of two that is next to 16 KiB, 16 to 128 (measured on f32 rows of 64 and 128).
func (v *view) pagesAhead() int {
	n := 128
	for n > 16 && n*v.shape[backend.Dim]*v.dtype.Size() > 16<<10 {
		n /= 2
	}
	return n
}

// run returns n rows of float32 as one run.
func (b *workspace) run(rows []float32, ld, n, d int) []vec.Run {
	b.runs = append(b.runs[:0], vec.RunOf(rows, ld, n, d, rows))
	return b.runs
}

func commonDivisor(a, b int) int {
	for b > 0 {
		a, b = b, a%b
	}
	return a
}

// addFew is addHidden for few rows.
func (f *fused) addFew(e *fewLoad, p *part, r *keyRange) {
	for j := r.lo; j < r.hi; j++ {
		for c := range f.d.ValueDim {
			y := f.v.at(p.b, p.hk, j, c)
			if finite(y) {
				continue
			}
			for row := range e.rows {
				h, i := f.row(p.hk*f.share, 0, row)
				if j >= e.spans[row].lo && j < e.spans[row].hi && !f.hides(p.b, h, i, j) && f.keeps(p.b, h, i, j) {
					e.cur.o[row*f.dimV+c] += e.s[row*keyBlock+j-r.lo] * y
				}
			}
		}
	}
}

func fill(s []float32, x float32) {
	for i := range s {
		s[i] = x
	}
}

// sumByFours adds the elements of s in the order of vec.Kernels.Weights; the
// length is a multiple of 4.
func sumByFours(s []float32) float32 {
	var sum float32
	for ; len(s) >= 4; s = s[4:] {
		sum += (s[0] + s[1]) + (s[2] + s[3])
	}
	return sum
}
