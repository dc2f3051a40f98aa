package cpu

import (
	"context"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// wideTile is up to Width query rows that go by as the lanes of a register tile.
type wideTile struct {
	progress
	index int    // among all tiles of the call
	h, i  int    // its first row
	n     int    // its rows
	spans []span // what each of them sees
	keys  span   // what any of them sees
	every span   // what every one of them sees
	here  span   // what any of them sees of the key block at hand
	mixed bool   // the mask of blocks hides some of here from some of them
	qt    []float32
}

// workspace is what the tiles of a task share.
type workspace struct {
	s, mx, alpha, beta []float32
	before             []float32 // maxima before the keys at hand
	stage              []float32 // some rows on their way in or out
	pieces             [keyBlock/8 + 1]span
	gathered           []float32 // the values of pieces
	table              []float32 // what is added to a tile by distance
	k, v               []float32 // packed or converted
	scale, one         []float32 // factors of transpositions
	lo, hi             [maxLanes]int32
	lanes              [maxLanes]float32   // of a sum or a maximum over a row
	seen               [16 * keyBlock]bool // some rows of a mask, of at most 16 lanes
	draw               vec.Draw
	square             [16 * 16]float32 // of weights on their way back
	runs               []vec.Run        // of the keys or values at hand
}

// maxLanes is the largest Width of any kernels.
const maxLanes = 64

// keyRange is the keys and values at hand.
type keyRange struct {
	lo, hi int // multiple of 4, and exactly
	k, v   []float32
	ldk    int
	ldv    int
	clean  []float32 // v without NaN and Inf, where it has some and somebody hides keys
	looked bool      // whether clean was looked for
}

// wide computes a task with query rows as lanes.
func (f *fused) wide(ctx context.Context, w *scratch, p *part) error {
	x, width := f.kernels, f.kernels.Width
	b := &w.workspace
	b.k, b.v = w.floats(keyBlock*f.dimK), w.floats(keyBlock*f.dimV)
	b.scale, b.one = w.floats(x.Lanes), w.floats(x.Lanes)
	for i := range b.one {
		b.scale[i], b.one[i] = f.scale, 1
	}
	b.s = w.floats(f.scoreRows() * width)
	b.mx, b.alpha, b.beta = w.floats(width), w.floats(width), w.floats(width)
	b.stage = w.floats(x.Lanes * max(f.dimK, f.dimV, keyBlock))
	if f.blocked {
		b.gathered = w.floats(keyBlock * f.dimV)
	}
	if f.added {
		b.table = w.floats(keyBlock + width)
	}
	f.seedDropout(&b.draw)
	tiles := f.layTiles(w, p)
	keys := span{f.d.SeqK, 0}
	for n := range tiles {
		t := &tiles[n]
		t.cur = stateIn(w.floats(f.slot), f.dimV*width, width)
		if f.chunks > 1 {
			t.all = stateIn(w.floats(f.slot), f.dimV*width, width)
		}
		f.see(p, t)
		keys = span{min(keys.lo, t.keys.lo), max(keys.hi, t.keys.hi)}
		if t.keys.lo < t.keys.hi {
			t.qt = w.floats(f.dimK * width)
			f.packQ(b, p.b, t)
		}
	}
	fold := folder{k: x, a: b.alpha, b: b.beta}
	for j0 := max(keys.lo, p.keys.lo) / keyBlock * keyBlock; j0 < min(keys.hi, p.keys.hi); j0 += keyBlock {
		if err := ctx.Err(); err != nil {
			return err
		}
		f.wideBlock(b, p, tiles, j0, &fold)
	}
	for n := range tiles {
		f.wideDone(b, p, &tiles[n], &fold)
	}
	if f.parts == 1 || f.pending[p.last].Add(-1) > 0 {
		return nil
	}
	for n := range tiles { // the last of the parts
		t := &tiles[n]
		t.some = false
		f.foldParts(t.index, &t.progress, &fold)
		f.writeWide(b, p, t, t.sum(&fold))
	}
	return nil
}

// layTiles lays the rows of a task out over tiles.
func (f *fused) layTiles(w *scratch, p *part) []wideTile {
	width := f.kernels.Width
	tiles := w.tiles[:p.to-p.from]
	for n := range tiles {
		at := p.from + n
		t := wideTile{index: p.tile + at, h: p.hk * f.share}
		if len(w.spans) > 0 {
			t.spans = w.spans[n*width:]
		}
		if f.d.SeqQ < width {
			t.h, t.i = f.row(t.h, 0, at*width)
			t.n = min(width, f.share*f.d.SeqQ-at*width)
		} else {
			t.h, t.i = t.h+at/f.blocks, at%f.blocks*width
			t.n = min(width, f.d.SeqQ-t.i)
		}
		tiles[n] = t
	}
	return tiles
}

// wideBlock takes all tiles over the key block from j0 on.
func (f *fused) wideBlock(b *workspace, p *part, tiles []wideTile, j0 int, fold *folder) {
	r := keyRange{lo: j0 + keyBlock, hi: j0}
	for n := range tiles {
		t := &tiles[n]
		t.here, t.mixed = f.trim(p.b, t.h, t.i, t.n, span{max(t.keys.lo, j0), min(t.keys.hi, j0+keyBlock)})
		if t.here.lo < t.here.hi {
			r.lo, r.hi = min(r.lo, t.here.lo), max(r.hi, t.here.hi)
		}
	}
	if r.lo >= r.hi {
		return
	}
	r.lo &^= 3
	f.loadKeys(&r, b, p)
	f.loadValues(&r, b, p)
	for n := range tiles {
		t := &tiles[n]
		if t.here.lo >= t.here.hi {
			continue
		}
		if f.parts > 1 && t.some && t.chunk != j0/chunkKeys {
			f.keep(t.index, &t.progress)
		}
		t.enter(j0/chunkKeys, fold)
		f.step(b, p, t, &r, t.here.lo&^3, t.here.hi)
	}
}

// loadKeys fills in r's keys, as they lie or converted.
func (f *fused) loadKeys(r *keyRange, b *workspace, p *part) {
	if f.loadK {
		r.k, r.ldk = b.k, f.dimK
		loadRows(f.kernels, &f.k, b.k, f.dimK, p.b, p.hk, r.lo, r.hi-r.lo)
		return
	}
	r.k, r.ldk = f.k.rowsAt(p.b, p.hk, r.lo)
}

// loadValues fills in r's values, as they lie or converted.
func (f *fused) loadValues(r *keyRange, b *workspace, p *part) {
	if f.loadV {
		r.v, r.ldv = b.v, f.dimV
		loadRows(f.kernels, &f.v, b.v, f.dimV, p.b, p.hk, r.lo, r.hi-r.lo)
		return
	}
	r.v, r.ldv = f.v.rowsAt(p.b, p.hk, r.lo)
}

// cleaned looks for NaN and Inf among r's values, which a weight of 0 must not
// meet: 0·NaN is NaN. It returns the values to multiply with, and whether
// something was left out of them that has to be added for who sees it.
func (f *fused) cleaned(r *keyRange, b *workspace) (v []float32, ld int, careful bool) {
	if !r.looked {
		r.looked = true
		n, dv := r.hi-r.lo, f.d.ValueDim
		if f.kernels.NonFinite(r.v, r.ldv, n, dv) {
			if !f.loadV {
				for j := range n {
					copy(b.v[j*f.dimV:j*f.dimV+dv], r.v[j*r.ldv:])
					clear(b.v[j*f.dimV+dv : (j+1)*f.dimV])
				}
			}
			dropNonFinite(b.v[:n*f.dimV])
			r.clean = b.v
		}
	}
	if r.clean == nil {
		return r.v, r.ldv, false
	}
	return r.clean, f.dimV, true
}

// see fills in what the rows of t see.
func (f *fused) see(p *part, t *wideTile) {
	t.keys, t.every = span{f.d.SeqK, 0}, span{0, f.d.SeqK}
	for r := range t.n {
		_, i := f.row(t.h, t.i, r)
		lo, hi := f.p.Visible.Range(p.b, i, f.d.SeqK)
		t.spans[r] = span{lo, hi}
		t.every = span{max(t.every.lo, lo), min(t.every.hi, hi)}
		if lo < hi {
			t.keys = span{min(t.keys.lo, lo), max(t.keys.hi, hi)}
		}
	}
}

// packQ transposes the query rows of t, times scale.
func (f *fused) packQ(b *workspace, batch int, t *wideTile) {
	x := f.kernels
	for lane := 0; lane < x.Width; lane += x.Lanes {
		n := max(0, min(x.Lanes, t.n-lane))
		f.rowsOf(t, lane, n, func(r, h, i, n int) {
			loadRows(x, &f.q, b.stage[r*f.dimK:], f.dimK, batch, h, i, n)
		})
		clear(b.stage[n*f.dimK : x.Lanes*f.dimK])
		for c := 0; c < f.dimK; c += x.Lanes {
			x.Transpose(t.qt[c*x.Width+lane:], x.Width, b.stage[c:], f.dimK, b.scale)
		}
	}
}

// rowsOf calls do for the rows [lane, lane+n) of t, a stretch of one head at a
// time: rows r and on of them are rows i and on of head h.
func (f *fused) rowsOf(t *wideTile, lane, n int, do func(r, h, i, n int)) {
	for r := 0; r < n; {
		h, i := f.row(t.h, t.i, lane+r)
		m := min(n-r, f.d.SeqQ-i)
		do(r, h, i, m)
		r += m
	}
}

// step takes tile t over keys [lo, hi) of r; lo is a multiple of 4. What the mask of
// blocks leaves of them goes by without gaps.
func (f *fused) step(b *workspace, p *part, t *wideTile, r *keyRange, lo, hi int) {
	x, w, s := f.kernels, f.kernels.Width, b.s
	pieces, n, edges := f.pieces(b, p, t, span{lo, hi}), 0, false
	b.before = t.cur.m
	copy(b.mx, t.cur.m)
	for _, piece := range pieces {
		if n > 0 {
			b.before = b.beta
			copy(b.before, b.mx)
		}
		b.s = s[n*w:]
		x.Scores(b.s, r.k[(piece.lo-r.lo)*r.ldk:], r.ldk, piece.hi-piece.lo, t.qt, f.d.Dim, b.mx)
		edge := piece.lo < t.every.lo || piece.hi > t.every.hi
		if f.scores || edge || t.mixed {
			f.adjust(b, p, t, piece.lo, piece.hi, edge)
		}
		n += piece.hi - piece.lo
		edges = edges || edge
	}
	fours := ceilDiv(n, 4)
	fill(s[n*w:fours*4*w], negInf)
	x.Weights(s, fours, t.cur.m, b.mx, t.cur.l, b.alpha)
	at := func(do func(piece span)) {
		n := 0
		for _, piece := range pieces {
			b.s = s[n*w:]
			do(piece)
			n += piece.hi - piece.lo
		}
		b.s = s
	}
	if f.p.Dropout.P > 0 {
		at(func(piece span) { f.dropTile(b, p, t, piece.lo, piece.hi-piece.lo) })
	}
	v, ldv, careful := r.v, r.ldv, false
	if f.hiding || edges || t.mixed || r.clean != nil {
		v, ldv, careful = f.cleaned(r, b)
	}
	v = v[(lo-r.lo)*ldv:]
	if len(pieces) > 1 {
		v, ldv = f.gather(b, pieces, v, ldv, lo)
	}
	x.Values(t.cur.o, v, ldv, s, n, f.d.ValueDim, b.alpha)
	if careful {
		at(func(piece span) { f.addHidden(b, p, t, piece.lo, piece.hi) })
	}
	b.s = s
}

// packT writes elements [lo, lo+n) of the rows of t in src, transposed, to dst.
func (f *fused) packT(b *workspace, dst []float32, src *view, batch int, t *wideTile, lo, n int) {
	x := f.kernels
	inPlace := src.dtype == backend.F32 && src.stride[backend.Dim] == 1
	for lane := 0; lane < x.Width; lane += x.Lanes {
		rows := max(0, min(x.Lanes, t.n-lane))
		staged := 0
		if h, i := f.row(t.h, t.i, lane); inPlace && rows == x.Lanes && i+rows <= f.d.SeqQ {
			// Whole squares are read where they lie; the rest is staged.
			from, ld := src.f32[src.index(batch, h, i)+lo:], src.stride[backend.Seq]
			staged = n / x.Lanes * x.Lanes
			for c := 0; c < staged; c += x.Lanes {
				x.Transpose(dst[c*x.Width+lane:], x.Width, from[c:], ld, b.one)
			}
		}
		if staged == n {
			continue
		}
		for r := range rows {
			h, i := f.row(t.h, t.i, lane+r)
			row := b.stage[r*keyBlock : r*keyBlock+n-staged]
			src.pack(row, len(row), batch, h, i, 1, lo+staged, len(row))
		}
		for c := staged; c < n; c += x.Lanes {
			x.Transpose(dst[c*x.Width+lane:], x.Width, b.stage[c-staged:], keyBlock, b.one)
		}
	}
}

// addHidden adds the terms of NaN and Inf among the values, which cleaned took
// out, for the rows that see their keys.
func (f *fused) addHidden(b *workspace, p *part, t *wideTile, lo, hi int) {
	w := f.kernels.Width
	for j := lo; j < hi; j++ {
		for c := range f.d.ValueDim {
			y := f.v.at(p.b, p.hk, j, c)
			if finite(y) {
				continue
			}
			for r := range t.n {
				h, i := f.row(t.h, t.i, r)
				if j >= t.spans[r].lo && j < t.spans[r].hi && !f.hides(p.b, h, i, j) && f.keeps(p.b, h, i, j) {
					t.cur.o[c*w+r] += b.s[(j-lo)*w+r] * y
				}
			}
		}
	}
}

// wideDone ends what t has to do over the task's keys: it writes the rows, or
// keeps their state where the keys are cut.
func (f *fused) wideDone(b *workspace, p *part, t *wideTile, fold *folder) {
	if f.parts > 1 {
		if t.some {
			f.keep(t.index, &t.progress)
		}
		return
	}
	f.writeWide(b, p, t, t.sum(fold))
}

// writeWide writes the rows of t, s being all that they saw.
func (f *fused) writeWide(b *workspace, p *part, t *wideTile, s *state) {
	x := f.kernels
	for r := range x.Width {
		if b.alpha[r] = 0; r >= t.n {
			continue
		}
		h, i := f.row(t.h, t.i, r)
		lse, inv := rowLSE(s.m[r], float64(s.l[r]), f.p.Sink(h))
		b.alpha[r] = inv
		if !f.lse.isZero() {
			f.lse.f32[f.lse.index(p.b, h, i)] = lse
		}
	}
	f.writeRows(b, p, t, s.o, b.alpha)
}

// writeRows writes the outputs o [dimV, Width] of t, times mul [Width].
func (f *fused) writeRows(b *workspace, p *part, t *wideTile, o, mul []float32) {
	x := f.kernels
	for lane := 0; lane < t.n; lane += x.Lanes {
		for c := 0; c < f.dimV; c += x.Lanes {
			x.Transpose(b.stage[c:], f.dimV, o[c*x.Width+lane:], x.Width, mul[lane:])
		}
		for r := range min(x.Lanes, t.n-lane) {
			h, i := f.row(t.h, t.i, lane+r)
			storeRow(x, &f.o, b.stage[r*f.dimV:(r+1)*f.dimV], p.b, h, i)
		}
	}
}
