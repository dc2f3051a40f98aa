package cpu

import (
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// engine computes tiles of query rows against blocks of keys and values, for Attention,
// QK, PV and Project. It holds a partition and the operands, and moves tiles between
// memory and the kernels.
//
// A tile has one of two layouts:
//
//	query rows as lanes   queries [dimK, Width]   scores [keys, Width]      outputs [dimV, Width]
//	keys as lanes         queries [rows, dimK]    scores [rows, keyBlock]   outputs [rows, dimV]
//
// A tile of few query rows may have them as lanes and the outputs of the second layout
// (Kernels.RowOutputs). The first fills the vector registers when there are many rows, the
// second when there are few. The gonum kernels always use the second.
type engine struct {
	partition
	q, k, v, o view
	scale      float32 // of the queries
}

// span is the range of keys [lo, hi).
type span struct{ lo, hi int }

func (s span) empty() bool { return s.lo >= s.hi }

// union returns the smallest span that contains s and t, of which t may be empty.
func (s span) union(t span) span {
	if t.empty() {
		return s
	}
	return span{min(s.lo, t.lo), max(s.hi, t.hi)}
}

// clip returns the part of s that lies in [lo, hi).
func (s span) clip(lo, hi int) span { return span{max(s.lo, lo), min(s.hi, hi)} }

// tile is the state of n query rows between key blocks. The rows are those from row i of
// head h on; rows of the next head follow those of a head.
type tile struct {
	progress
	index    int // among all tiles of the call
	h, i, n  int
	spans    []span           // the keys that each row sees
	keys     span             // the keys that any row sees
	every    span             // the keys that every row sees
	here     span             // the keys of the current block that any row sees
	mixed    bool             // the block mask hides some of here from some of the rows
	columns  [maxColumns]span // on a diagonal, the keys that any row of each column sees
	diagonal bool             // columns see fewer keys, and begin and end one after another
	q        []float32        // the query rows, times scale
}

// workspace is the memory that the tiles of a task share.
type workspace struct {
	s               []float32 // a score tile
	mx, alpha, beta []float32 // a number for each row of a tile
	before          []float32 // maxima before the current keys
	stage           []float32 // some rows between memory and a tile
	bias            []float32 // of a row
	table           []float32 // bias of a tile by distance
	capped          []float32 // the scores before biases, for the softcap's derivative; may be nil
	k, v            []float32 // converted, or values with 0 for NaN and Inf
	scale, one      []float32 // factors of transpositions
	pieces          [keyBlock/8 + 1]span
	lo, hi          [maxLanes]int32
	seen            [16 * keyBlock]bool // rows of a mask, at most 16
	square          [16 * 16]float32    // weights after dropout
	draw            vec.Draw
	ramp            ramp
	runs            []vec.Run
	steps           columnSteps
}

// maxLanes is the largest Width of any kernels.
const maxLanes = 64

// keyRange is a range of keys and values of one head.
type keyRange struct {
	span
	end        int  // of the keys of which the kernels prefetch those of the next block
	hasK, hasV bool // the workspace has the converted keys, values
	checked    bool // whether all values are finite is known
	replaced   bool // they are not: the workspace has them with 0 for NaN and Inf
}

// taskRange is the range of tiles and keys of one task.
type taskRange struct {
	b, hk    int
	from, to int // tiles of the group
	keys     span
	group    int // index among the tasks over all keys
	tile     int // index of the group's first tile among all tiles
}

// at returns the range of task t.
func (x *partition) at(t int) taskRange {
	p := taskRange{group: t / x.parts}
	group := p.group / x.groupTasks
	p.b, p.hk, p.tile = group/x.d.KVHeads, group%x.d.KVHeads, group*x.tiles
	p.from = p.group % x.groupTasks * x.taskTiles
	p.to = min(p.from+x.taskTiles, x.tiles)
	first := t % x.parts * x.taskChunks
	p.keys = span{first * chunkKeys, min((first+x.taskChunks)*chunkKeys, x.d.SeqK)}
	return p
}

// row returns the head and the index of the r-th row from row (h, i) on.
func (x *partition) row(h, i, r int) (int, int) {
	i += r
	if i < x.d.SeqQ {
		return h, i
	}
	return h + i/x.d.SeqQ, i % x.d.SeqQ
}

// rowsOf calls do for the rows [first, first+n) of t, a stretch of one head at a
// time: rows r to r+n of them are rows i to i+n of head h.
func (x *partition) rowsOf(t *tile, first, n int, do func(r, h, i, n int)) {
	for r := 0; r < n; {
		h, i := x.row(t.h, t.i, first+r)
		m := min(n-r, x.d.SeqQ-i)
		do(r, h, i, m)
		r += m
	}
}

// cutTiles returns the tiles of p.
func (x *partition) cutTiles(w *scratch, p *taskRange) []tile {
	tiles := w.tiles[:p.to-p.from]
	for n := range tiles {
		t := x.tileAt(p, p.from+n)
		if len(w.spans) > 0 {
			t.spans = w.spans[n*x.rows:]
		}
		tiles[n] = t
	}
	return tiles
}

// tileAt returns tile at of the group of p.
func (x *partition) tileAt(p *taskRange, at int) tile {
	t := tile{index: p.tile + at, h: p.hk * x.share}
	if x.headTiles == 0 {
		t.h, t.i = x.row(t.h, 0, at*x.rows)
		t.n = min(x.rows, x.share*x.d.SeqQ-at*x.rows)
	} else {
		t.h, t.i = t.h+at/x.headTiles, at%x.headTiles*x.rows
		t.n = min(x.rows, x.d.SeqQ-t.i)
	}
	return t
}

// cutWorkspace cuts the workspace of a task from scratch.
func (e *engine) cutWorkspace(w *scratch) *workspace {
	b, x := &w.workspace, e.kernels
	b.k, b.v = w.floats(keyBlock*e.dimK), w.floats(keyBlock*e.dimV)
	b.scale, b.one = w.floats(x.Lanes), w.floats(x.Lanes)
	fill(b.scale, e.scale)
	fill(b.one, 1)
	b.s = w.floats(e.scoreFloats())
	b.mx, b.alpha, b.beta = w.floats(e.tileRows()), w.floats(e.tileRows()), w.floats(e.tileRows())
	b.stage = w.floats(x.Lanes * max(e.dimK, e.dimV, keyBlock))
	b.table = w.floats(keyBlock + x.Width)
	b.bias = b.table[:keyBlock]
	b.capped = nil
	return b
}

// packQueries loads the query rows of t, times scale.
func (e *engine) packQueries(w *scratch, p *taskRange, t *tile) {
	x, b := e.kernels, &w.workspace
	t.q = w.floats(e.queryFloats())
	if e.keyLanes {
		e.rowsOf(t, 0, t.n, func(r, h, i, n int) { loadRows(x, &e.q, t.q[r*e.dimK:], e.dimK, p.b, h, i, n) })
		for c, y := range t.q[:t.n*e.dimK] {
			t.q[c] = float32(y*e.scale) + 0 // no zero is negative, as after Kernels.Transpose
		}
		clear(t.q[t.n*e.dimK:])
		return
	}
	for lane := 0; lane < x.Width; lane += x.Lanes {
		rows, ld, ok := e.square(&e.q, p, t, lane)
		if !ok || e.d.Dim != e.dimK {
			rows, ld = b.stage, e.dimK
			n := max(0, min(x.Lanes, t.n-lane))
			e.rowsOf(t, lane, n, func(r, h, i, n int) {
				loadRows(x, &e.q, rows[r*ld:], ld, p.b, h, i, n)
			})
			clear(rows[n*ld : x.Lanes*ld])
		}
		for c := 0; c < e.dimK; c += x.Lanes {
			x.Transpose(t.q[c*x.Width+lane:], x.Width, rows[c:], ld, b.scale)
		}
	}
}

// square returns the rows of v, which has a row for each query row, of the vector of query
// rows of t from lane on, if kernels can transpose them in place: Lanes rows of float32 at
// a constant distance.
func (e *engine) square(v *view, p *taskRange, t *tile, lane int) (rows []float32, ld int, ok bool) {
	if t.n-lane < e.kernels.Lanes || v.dtype != backend.F32 || v.stride[backend.Dim] != 1 {
		return nil, 0, false
	}
	h, i := e.row(t.h, t.i, lane)
	if ld, ok = e.rowDistance(v, i); ok {
		rows = v.f32[v.index(p.b, h, i):]
	}
	return rows, ld, ok
}

// rowDistance returns the distance in v, which has a row for each query row, between Lanes
// of them from row i of a head on, if it is constant: they are in one head, or one in each.
func (e *engine) rowDistance(v *view, i int) (ld int, ok bool) {
	if e.d.SeqQ == 1 {
		return v.stride[backend.Heads], true
	}
	return v.stride[backend.Seq], i+e.kernels.Lanes <= e.d.SeqQ
}

// keys returns n keys of r from lo on as float32 rows, ld apart, in place or converted.
func (e *engine) keys(r *keyRange, b *workspace, p *taskRange, lo, n int) (runs []vec.Run, ld int) {
	if !e.loadK {
		return e.runsOf(b, &e.k, p, lo, n, r.end), e.k.rowStride()
	}
	if !r.hasK {
		r.hasK = true
		loadRows(e.kernels, &e.k, b.k, e.dimK, p.b, p.hk, r.lo, r.hi-r.lo)
	}
	return b.run(b.k[(lo-r.lo)*e.dimK:], e.dimK, n, e.dimK), e.dimK
}

// values is keys for the values of pieces of r. With clean set it replaces NaN and Inf by 0,
// because a weight of 0 must hide them and 0·NaN is NaN, and reports whether it replaced any.
func (e *engine) values(r *keyRange, b *workspace, p *taskRange, pieces []span, clean bool) (runs []vec.Run, ld int, replaced bool) {
	if e.loadV && !r.hasV {
		r.hasV = true
		loadRows(e.kernels, &e.v, b.v, e.dimV, p.b, p.hk, r.lo, r.hi-r.lo)
	}
	if clean && !r.checked {
		r.checked = true
		if e.anyNonFinite(r, b, p) {
			if !e.loadV {
				loadRows(e.kernels, &e.v, b.v, e.dimV, p.b, p.hk, r.lo, r.hi-r.lo)
			}
			zeroNonFinite(b.v[:(r.hi-r.lo)*e.dimV])
			r.replaced = true
		}
	}
	replaced, b.runs = clean && r.replaced, b.runs[:0]
	for _, s := range pieces {
		if e.loadV || replaced {
			rows := b.v[(s.lo-r.lo)*e.dimV:]
			b.runs = vec.AppendRun(b.runs, rows, e.dimV, s.hi-s.lo, e.dimV, rows)
			ld = e.dimV
			continue
		}
		e.appendRuns(b, &e.v, p, s.lo, s.hi-s.lo, r.end)
		ld = e.v.rowStride()
	}
	return b.runs, ld, replaced
}

// anyNonFinite reports whether any of the values of r is NaN or Inf.
func (e *engine) anyNonFinite(r *keyRange, b *workspace, p *taskRange) bool {
	dv := e.d.ValueDim
	if e.loadV {
		return e.kernels.NonFinite(b.v, e.dimV, r.hi-r.lo, dv)
	}
	for s := r.lo; s < r.hi; {
		n := e.v.adjacent(s, r.hi-s)
		if e.kernels.NonFinite(e.v.f32[e.v.rowIndex(p.b, p.hk, s):], e.v.rowStride(), n, dv) {
			return true
		}
		s += n
	}
	return false
}

// zeroNonFinite replaces NaN and Inf by zero.
func zeroNonFinite(s []float32) {
	for i, x := range s {
		if !finite(x) {
			s[i] = 0
		}
	}
}

// addNonFinite adds the products of weights and values for keys [lo, hi) and the
// values that are NaN or Inf, which values replaced. uses reports whether row i of
// head h takes in key j with the given weight.
//
// o has the outputs of t, s the weights from key lo on.
func (e *engine) addNonFinite(p *taskRange, t *tile, lo, hi int, o, s []float32, uses func(h, i, j, r int, weight float32) bool) {
	w := e.kernels.Width
	for j := lo; j < hi; j++ {
		for c := range e.d.ValueDim {
			y := e.v.at(p.b, p.hk, j, c)
			if finite(y) {
				continue
			}
			for r := range t.n {
				weight, out := (j-lo)*w+r, c*w+r
				if e.keyLanes {
					weight = r*keyBlock + j - lo
				}
				if e.rowOutputs {
					out = r*e.dimV + c
				}
				if h, i := e.row(t.h, t.i, r); uses(h, i, j, r, s[weight]) {
					o[out] += s[weight] * y
				}
			}
		}
	}
}

// writeOutputs writes the outputs o of t, each row times its factor in mul, which
// covers tileRows rows. With outputs row by row mul may be nil, for 1.
func (e *engine) writeOutputs(b *workspace, p *taskRange, t *tile, o, mul []float32) {
	x := e.kernels
	if e.rowOutputs {
		for r := range t.n {
			h, i := e.row(t.h, t.i, r)
			row := o[r*e.dimV : (r+1)*e.dimV]
			if mul != nil {
				for c := range row {
					row[c] = float32(row[c]*mul[r]) + 0 // as Kernels.Transpose
				}
			}
			storeRow(x, &e.o, row, p.b, h, i)
		}
		return
	}
	for lane := 0; lane < t.n; lane += x.Lanes {
		rows, ld, ok := e.square(&e.o, p, t, lane)
		if ok = ok && e.d.ValueDim == e.dimV; !ok {
			rows, ld = b.stage, e.dimV
		}
		for c := 0; c < e.dimV; c += x.Lanes {
			x.Transpose(rows[c:], ld, o[c*x.Width+lane:], x.Width, mul[lane:])
		}
		if ok {
			continue
		}
		for r := range min(x.Lanes, t.n-lane) {
			h, i := e.row(t.h, t.i, lane+r)
			storeRow(x, &e.o, b.stage[r*e.dimV:(r+1)*e.dimV], p.b, h, i)
		}
	}
}

// fill sets each element of s to x.
func fill(s []float32, x float32) {
	for i := range s {
		s[i] = x
	}
}
