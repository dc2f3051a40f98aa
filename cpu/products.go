package cpu

import (
	"context"
	"fmt"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// QK implements backend.Backend: s = q·kᵀ, tile by tile, on the vector kernels or
// by blas32.Gemm. Errors as for Attention.
func (be *Backend) QK(ctx context.Context, s, q, k backend.Tensor) error {
	if err := be.gate.enter(ctx, "qk"); err != nil {
		return err
	}
	defer be.gate.leave()
	if err := be.qk(ctx, s, q, k); err != nil {
		return fmt.Errorf("cpu: qk: %w", err)
	}
	return nil
}

func (be *Backend) qk(ctx context.Context, s, q, k backend.Tensor) error {
	var pinned backend.Pinned
	err := pinned.Pin(nil, where, []backend.Operand{{Name: "s", Tensor: s}},
		[]backend.Operand{{Name: "q", Tensor: q}, {Name: "k", Tensor: k}})
	if err != nil {
		return err
	}
	defer pinned.Unpin()
	if be.stageTakes(q.Shape()[backend.Dim]) {
		return be.vectorQK(ctx, s, q, k)
	}
	j := qkJob{d: q.Shape()[backend.Dim], share: q.Shape()[backend.Heads] / k.Shape()[backend.Heads],
		qInPlace: rowsInPlace(q), kInPlace: rowsInPlace(k), sInPlace: rowsInPlace(s)}
	if j.s, err = f32View("s", s); err != nil {
		return err
	}
	if j.q, err = floatView("q", q); err != nil {
		return err
	}
	if j.k, err = floatView("k", k); err != nil {
		return err
	}
	j.rowCut = cutRows(s.Shape(), 1, j.d, be.threads())
	return be.workers.run(ctx, &j, j.tasks, be.threads())
}

// qkJob is one QK call.
type qkJob struct {
	rowCut
	s, q, k                      view
	d, share                     int
	qInPlace, kInPlace, sInPlace bool
}

// size implements job.
func (j *qkJob) size() (floats, rows int) {
	return queryBlock*keyBlock + keyBlock*roundUp(j.d) + j.taskRows()*j.d, 0
}

// task implements job: a stretch of rows of one head against all keys.
func (j *qkJob) task(ctx context.Context, w *scratch, t int) error {
	b, h, from, to, _ := j.at(t)
	hk := h / j.share
	buf, kbuf := w.floats(queryBlock*keyBlock), w.floats(keyBlock*roundUp(j.d))
	q, ldq := []float32(nil), j.d
	if j.qInPlace {
		q, ldq = j.q.rowsAt(b, h, from)
	} else {
		q = w.floats(j.taskRows() * j.d)
		j.q.pack(q, j.d, b, h, from, to-from, 0, j.d)
	}
	seqK := j.s.shape[backend.Dim]
	for k0 := 0; k0 < seqK; k0 += keyBlock {
		if err := ctx.Err(); err != nil {
			return err
		}
		n := min(keyBlock, seqK-k0)
		k, ldk := keyRows(&j.k, j.kInPlace, kbuf, b, hk, span{k0, k0 + n})
		for i := from; i < to; i += queryBlock {
			m := min(queryBlock, to-i)
			if j.sInPlace {
				s, lds := j.s.rowsAt(b, h, i)
				mulNT(m, n, j.d, q[(i-from)*ldq:], ldq, k, ldk, s[k0:], lds)
				continue
			}
			mulNT(m, n, j.d, q[(i-from)*ldq:], ldq, k, ldk, buf, keyBlock)
			for r := range m {
				j.s.store(buf[r*keyBlock:r*keyBlock+n], b, h, i+r, k0)
			}
		}
	}
	return nil
}

// keyRows returns the rows of span of a key head as rows ldk apart: as they lie
// when inPlace and aligned, else packed into buf.
func keyRows(v *view, inPlace bool, buf []float32, b, hk int, keys span) (k []float32, ldk int) {
	if inPlace {
		if k, ldk = v.rowsAt(b, hk, keys.lo); aligned(k, ldk) {
			return k, ldk
		}
	}
	dim := v.shape[backend.Dim]
	ldk = roundUp(dim)
	v.pack(buf, ldk, b, hk, keys.lo, keys.hi-keys.lo, 0, dim)
	return buf, ldk
}

// stageTakes reports whether the vector kernels take a stage with heads of size
// dim.
func (be *Backend) stageTakes(dim int) bool { return be.kernels != nil && dim <= maxDim }

// vectorQK is QK on the vector kernels: the tiles of Attention, each transposed
// once more on its way out. The operands are pinned.
func (be *Backend) vectorQK(ctx context.Context, s, q, k backend.Tensor) (err error) {
	j := qkVector{inPlace: rowsInPlace(s)}
	if j.s, err = f32View("s", s); err != nil {
		return err
	}
	if j.q, err = floatView("q", q); err != nil {
		return err
	}
	if j.k, err = floatView("k", k); err != nil {
		return err
	}
	j.fusedCut = cutFused(be.kernels, &backend.Call{Q: q, K: k, V: k}, be.threads())
	j.scale = 1
	// A task is some tiles over one chunk of keys: nothing is summed over keys.
	j.parts, j.span = j.chunks, 1
	return be.workers.run(ctx, &j, j.d.Batch*j.d.KVHeads*j.each*j.parts, be.threads())
}

// qkVector is one QK call.
type qkVector struct {
	fused
	s       view
	inPlace bool // rows of s lie as the kernels can write them
}

// size implements job.
func (j *qkVector) size() (floats, rows int) {
	x := j.kernels
	floats = keyBlock*j.dimK + 2*x.Lanes
	if j.few {
		return floats + j.rows*(j.dimK+keyBlock), 0
	}
	return floats + j.subs*j.dimK*x.Width + keyBlock*x.Width + x.Width + x.Lanes*max(j.dimK, keyBlock), 0
}

// task implements job.
func (j *qkVector) task(ctx context.Context, w *scratch, t int) error {
	p, b, x := j.at(t), &w.workspace, j.kernels
	b.k, b.scale, b.one = w.floats(keyBlock*j.dimK), w.floats(x.Lanes), w.floats(x.Lanes)
	fill(b.scale, 1)
	fill(b.one, 1)
	if j.few {
		return j.fewScores(ctx, w, &p)
	}
	b.s, b.mx, b.stage = w.floats(keyBlock*x.Width), w.floats(x.Width), w.floats(x.Lanes*max(j.dimK, keyBlock))
	tiles := j.layTiles(w, &p)
	for n := range tiles {
		tiles[n].qt = w.floats(j.dimK * x.Width)
		j.packQ(b, p.b, &tiles[n])
	}
	for j0 := p.keys.lo; j0 < p.keys.hi; j0 += keyBlock {
		if err := ctx.Err(); err != nil {
			return err
		}
		r := keyRange{lo: j0, hi: min(j0+keyBlock, p.keys.hi)}
		j.loadKeys(&r, b, &p)
		for n := range tiles {
			fill(b.mx, 0)
			x.Scores(b.s, r.k, r.ldk, r.hi-r.lo, tiles[n].qt, j.d.Dim, b.mx)
			j.write(b, &p, &tiles[n], r.lo, r.hi-r.lo)
		}
	}
	return nil
}

// write stores a score tile of n keys from lo on.
func (j *qkVector) write(b *workspace, p *part, t *wideTile, lo, n int) {
	x := j.kernels
	for lane := 0; lane < t.n; lane += x.Lanes {
		rows, done := min(x.Lanes, t.n-lane), 0
		if h, i := j.row(t.h, t.i, lane); j.inPlace && rows == x.Lanes && i+rows <= j.d.SeqQ {
			to, ld := j.s.rowsAt(p.b, h, i)
			for ; done+x.Lanes <= n; done += x.Lanes {
				x.Transpose(to[lo+done:], ld, b.s[done*x.Width+lane:], x.Width, b.one)
			}
		}
		if done == n {
			continue
		}
		for c := done; c < n; c += x.Lanes {
			x.Transpose(b.stage[c-done:], keyBlock, b.s[c*x.Width+lane:], x.Width, b.one)
		}
		for r := range rows {
			h, i := j.row(t.h, t.i, lane+r)
			j.s.store(b.stage[r*keyBlock:r*keyBlock+n-done], p.b, h, i, lo+done)
		}
	}
}

// fewScores is task for few query rows, with keys as lanes.
func (j *qkVector) fewScores(ctx context.Context, w *scratch, p *part) error {
	e, b := &w.few, &w.workspace
	*e = fewLoad{rows: j.rows, q: w.floats(j.rows * j.dimK), s: w.floats(j.rows * keyBlock), keys: span{0, j.d.SeqK}}
	for r := range e.rows {
		j.loadQuery(e, p, r)
	}
	for j0 := p.keys.lo; j0 < p.keys.hi; j0 += keyBlock {
		if err := ctx.Err(); err != nil {
			return err
		}
		r := keyRange{lo: j0, hi: min(j0+keyBlock, p.keys.hi)}
		n := r.hi - r.lo
		j.fused.fewScores(b, e, p, &r, n)
		for row := range e.rows {
			h, i := j.row(p.hk*j.share, 0, row)
			j.s.store(e.s[row*keyBlock:row*keyBlock+n], p.b, h, i, r.lo)
		}
	}
	return nil
}

// PV implements backend.Backend: o = w·v, in float32, on the vector kernels or by
// blas32.Gemm, summed from zero over each 128 keys. A weight of exactly 0 hides NaN and Inf in its value. Errors as for
// Attention.
func (be *Backend) PV(ctx context.Context, o, w, v backend.Tensor) error {
	if err := be.gate.enter(ctx, "pv"); err != nil {
		return err
	}
	defer be.gate.leave()
	if be.stageTakes(v.Shape()[backend.Dim]) {
		if err := be.vectorPV(ctx, o, w, v); err != nil {
			return fmt.Errorf("cpu: pv: %w", err)
		}
		return nil
	}
	j := linearJob{zeroHides: true, share: w.Shape()[backend.Heads] / v.Shape()[backend.Heads]}
	if err := be.linear(ctx, &j, [4]string{"o", "w", "v", ""}, o, w, v, backend.Tensor{}); err != nil {
		return fmt.Errorf("cpu: pv: %w", err)
	}
	return nil
}

// Project implements backend.Projector: y = x·w + bias, in float32 whatever the
// operands' types are, on the vector kernels or by blas32.Gemm, summed from zero over
// each 128 elements. Errors as for Attention.
func (be *Backend) Project(ctx context.Context, y, x, w, bias backend.Tensor) error {
	if err := be.gate.enter(ctx, "project"); err != nil {
		return err
	}
	defer be.gate.leave()
	if be.kernels != nil {
		if err := be.vectorProject(ctx, y, x, w, bias); err != nil {
			return fmt.Errorf("cpu: project: %w", err)
		}
		return nil
	}
	j := linearJob{share: 1}
	if err := be.linear(ctx, &j, [4]string{"y", "x", "w", "bias"}, y, x, w, bias); err != nil {
		return fmt.Errorf("cpu: project: %w", err)
	}
	return nil
}

func (be *Backend) linear(ctx context.Context, j *linearJob, names [4]string, y, x, w, bias backend.Tensor) error {
	var pinned backend.Pinned
	err := pinned.Pin(nil, where, []backend.Operand{{Name: names[0], Tensor: y}},
		[]backend.Operand{{Name: names[1], Tensor: x}, {Name: names[2], Tensor: w}, {Name: names[3], Tensor: bias}})
	if err != nil {
		return err
	}
	defer pinned.Unpin()
	for n, o := range [...]struct {
		to *view
		t  backend.Tensor
	}{{&j.y, y}, {&j.x, x}, {&j.w, w}, {&j.bias, bias}} {
		if *o.to, err = floatView(names[n], o.t); err != nil {
			return err
		}
	}
	j.inner, j.cols, j.xInPlace = x.Shape()[backend.Dim], y.Shape()[backend.Dim], rowsInPlace(x)
	j.wide = min(j.cols, colBlock)
	j.rowCut = cutRows(y.Shape(), ceilDiv(j.cols, colBlock), j.wide, be.threads())
	return be.workers.run(ctx, j, j.tasks, be.threads())
}

// linearJob is one product with a right operand that is transposed block by
// block:
//
//	y [B, H, S, N] = x [B, H, S, M] · w [B, H/share, M, N] + bias [1, 1, 1, N]
//
// Sums over M go by blocks of keyBlock from 0 on, each from zero.
type linearJob struct {
	rowCut
	y, x, w, bias view
	share         int  // heads of x for each head of w
	zeroHides     bool // a zero in x hides NaN and Inf in w
	xInPlace      bool
	inner         int // M
	cols          int // N
	wide          int // columns of a full piece
}

// size implements job.
func (j *linearJob) size() (floats, rows int) {
	return j.wide*keyBlock + queryBlock*keyBlock + 4*j.wide + queryBlock*j.wide + j.taskRows()*j.wide, 0
}

// task implements job: a stretch of rows of one head, and at most colBlock
// columns.
func (j *linearJob) task(ctx context.Context, s *scratch, t int) error {
	b, h, from, to, piece := j.at(t)
	hw, c0 := h/j.share, piece*colBlock
	cols := min(colBlock, j.cols-c0)
	wt, xbuf := s.floats(j.wide*keyBlock), s.floats(queryBlock*keyBlock)
	tmp, acc := s.floats(4*j.wide), s.floats(queryBlock*j.wide)
	y := s.floats(j.taskRows() * j.wide)
	clear(y)
	for k0 := 0; k0 < j.inner; k0 += keyBlock {
		if err := ctx.Err(); err != nil {
			return err
		}
		n := min(keyBlock, j.inner-k0)
		_, depth := sumSpan(0, n)
		if n < keyBlock {
			clear(wt)
		}
		careful := !j.w.packT(wt, keyBlock, b, hw, k0, n, c0, cols, tmp) && j.zeroHides
		if careful {
			dropNonFinite(wt)
		}
		for i := from; i < to; i += queryBlock {
			m := min(queryBlock, to-i)
			x, ldx := j.left(xbuf, b, h, i, m, k0, n)
			if j.zeroHides && allZero(x, ldx, m, n) {
				continue
			}
			mulNT(m, cols, depth, x, ldx, wt, keyBlock, acc, cols)
			if careful {
				j.addNonFinite(acc, x, ldx, b, hw, m, k0, n, c0, cols)
			}
			add(y[(i-from)*cols:(i-from+m)*cols], acc)
		}
	}
	for i := from; i < to; i++ {
		row := y[(i-from)*cols : (i-from+1)*cols]
		if !j.bias.isZero() {
			j.bias.pack(tmp, cols, 0, 0, 0, 1, c0, cols)
			add(row, tmp)
		}
		j.y.store(row, b, h, i, c0)
	}
	return nil
}

// left returns rows [i, i+m) of x from element k0 on, as rows ldx apart with
// keyBlock elements: as they lie where a whole block is there, else packed and
// padded with zeros.
func (j *linearJob) left(buf []float32, b, h, i, m, k0, n int) (x []float32, ldx int) {
	if j.xInPlace && n == keyBlock {
		x, ldx = j.x.rowsAt(b, h, i)
		return x[k0:], ldx
	}
	j.x.pack(buf, keyBlock, b, h, i, m, k0, n)
	for r := range m {
		clear(buf[r*keyBlock+n : (r+1)*keyBlock])
	}
	return buf, keyBlock
}

// allZero reports whether the first n elements of each of m rows are zeros.
func allZero(x []float32, ld, m, n int) bool {
	for r := range m {
		for _, p := range x[r*ld : r*ld+n] {
			if p != 0 {
				return false
			}
		}
	}
	return true
}

// addNonFinite adds the terms of NaN and Inf in w, which wt has as zeros, where
// x is not zero.
func (j *linearJob) addNonFinite(acc, x []float32, ldx, b, hw, m, k0, n, c0, cols int) {
	for k := range n {
		for c := range cols {
			w := j.w.at(b, hw, k0+k, c0+c)
			if finite(w) {
				continue
			}
			for r := range m {
				if p := x[r*ldx+k]; p != 0 {
					acc[r*cols+c] += p * w
				}
			}
		}
	}
}

// vectorPV is PV on the vector kernels: o = w·v with the value tiles of Attention,
// each block of keyBlock keys summed from zero. A weight of exactly 0 hides NaN
// and Inf in its value.
func (be *Backend) vectorPV(ctx context.Context, o, w, v backend.Tensor) error {
	var pinned backend.Pinned
	err := pinned.Pin(nil, where, []backend.Operand{{Name: "o", Tensor: o}},
		[]backend.Operand{{Name: "w", Tensor: w}, {Name: "v", Tensor: v}})
	if err != nil {
		return err
	}
	defer pinned.Unpin()
	var j pvVector
	if j.o, err = floatView("o", o); err != nil {
		return err
	}
	if j.w, err = f32View("w", w); err != nil {
		return err
	}
	if j.v, err = floatView("v", v); err != nil {
		return err
	}
	return j.run(ctx, be, o, v)
}

// pvVector is one PV call, or a piece of a Project call.
type pvVector struct {
	fused
	w view

	project bool // nothing is hidden, and sums begin at the bias
	bias    view // [1, 1, 1, N], of which a head has columns from c0 + its number·Dv on
	c0      int
}

// run computes the call; o and v tell its shape.
func (j *pvVector) run(ctx context.Context, be *Backend, o, v backend.Tensor) error {
	j.fusedCut = cutFused(be.kernels, &backend.Call{Q: o, K: v, V: v}, be.threads())
	j.parts, j.span = 1, j.chunks // keys are not cut: their sums would have to be added
	// Rows of a weight lie so far apart that those of a block share few sets of the
	// caches: several tiles read a copy.
	j.loadV = j.loadV || j.project && !j.few
	return be.workers.run(ctx, j, j.d.Batch*j.d.KVHeads*j.each, be.threads())
}

// begin writes what the sums of n rows begin at, element c of a row going to
// o[c·apart], and rows being next apart.
func (j *pvVector) begin(o []float32, hk, n, apart, next int) {
	clear(o)
	if j.bias.isZero() {
		return
	}
	for c := range j.d.ValueDim {
		x := j.bias.at(0, 0, 0, j.c0+hk*j.d.ValueDim+c)
		for r := range n {
			o[c*apart+r*next] = x
		}
	}
}

// values returns r's values, and whether NaN and Inf were left out of them.
func (j *pvVector) values(r *keyRange, b *workspace) (v []float32, ld int, careful bool) {
	if j.project {
		return r.v, r.ldv, false
	}
	return j.cleaned(r, b)
}

// size implements job.
func (j *pvVector) size() (floats, rows int) {
	x := j.kernels
	floats = keyBlock*j.dimV + x.Lanes
	if j.few {
		return floats + j.rows*(j.dimV+keyBlock) + j.laneRows(), 0
	}
	return floats + j.subs*j.dimV*x.Width + keyBlock*x.Width + x.Width + x.Lanes*max(j.dimV, keyBlock), 0
}

// task implements job.
func (j *pvVector) task(ctx context.Context, w *scratch, t int) error {
	p, b, x := j.at(t), &w.workspace, j.kernels
	b.v, b.one = w.floats(keyBlock*j.dimV), w.floats(x.Lanes)
	fill(b.one, 1)
	if j.few {
		return j.fewValues(ctx, w, &p)
	}
	b.s, b.alpha, b.stage = w.floats(keyBlock*x.Width), w.floats(x.Width), w.floats(x.Lanes*max(j.dimV, keyBlock))
	fill(b.alpha, 1)
	tiles := j.layTiles(w, &p)
	for n := range tiles {
		tiles[n].cur.o = w.floats(j.dimV * x.Width)
		j.begin(tiles[n].cur.o, p.hk, x.Width, x.Width, 1)
	}
	for j0 := 0; j0 < j.d.SeqK; j0 += keyBlock {
		if err := ctx.Err(); err != nil {
			return err
		}
		r := keyRange{lo: j0, hi: min(j0+keyBlock, j.d.SeqK)}
		j.loadValues(&r, b, &p)
		v, ldv, careful := j.values(&r, b)
		for n := range tiles {
			t := &tiles[n]
			j.packT(b, b.s, &j.w, p.b, t, r.lo, r.hi-r.lo)
			x.Values(t.cur.o, v, ldv, b.s, r.hi-r.lo, j.d.ValueDim, b.alpha)
			if careful {
				j.addNonFinite(&p, &r, t.n, func(row int) (h, i int, o []float32, apart int) {
					h, i = j.row(t.h, t.i, row)
					return h, i, t.cur.o[row:], x.Width
				})
			}
		}
	}
	for n := range tiles {
		j.writeRows(b, &p, &tiles[n], tiles[n].cur.o, b.alpha)
	}
	return nil
}

// addNonFinite adds the terms of NaN and Inf among r's values, which cleaned took
// out, to rows whose weight is not 0. at returns row's place: its head and index,
// and its outputs, which lie apart elements from each other.
func (j *pvVector) addNonFinite(p *part, r *keyRange, rows int, at func(row int) (h, i int, o []float32, apart int)) {
	for key := r.lo; key < r.hi; key++ {
		for c := range j.d.ValueDim {
			y := j.v.at(p.b, p.hk, key, c)
			if finite(y) {
				continue
			}
			for row := range rows {
				h, i, o, apart := at(row)
				if weight := j.w.at(p.b, h, i, key); weight != 0 {
					o[c*apart] += weight * y
				}
			}
		}
	}
}

// fewValues is task for few rows, with elements as lanes.
func (j *pvVector) fewValues(ctx context.Context, w *scratch, p *part) error {
	b, x := &w.workspace, j.kernels
	o, s, alpha := w.floats(j.rows*j.dimV), w.floats(j.rows*keyBlock), w.floats(j.laneRows())
	j.begin(o, p.hk, j.rows, 1, j.dimV)
	fill(alpha, 1)
	for j0 := 0; j0 < j.d.SeqK; j0 += keyBlock {
		if err := ctx.Err(); err != nil {
			return err
		}
		r := keyRange{lo: j0, hi: min(j0+keyBlock, j.d.SeqK)}
		n := r.hi - r.lo
		for row := range j.rows {
			h, i := j.row(p.hk*j.share, 0, row)
			j.w.pack(s[row*keyBlock:], n, p.b, h, i, 1, r.lo, n)
		}
		j.loadValues(&r, b, p)
		v, ldv, careful := j.values(&r, b)
		x.Mix(vec.F32, o, j.dimV, b.run(v, ldv, n, j.dimV), ldv, s, keyBlock, alpha, j.rows, j.dimV)
		if careful {
			j.addNonFinite(p, &r, j.rows, func(row int) (h, i int, out []float32, apart int) {
				h, i = j.row(p.hk*j.share, 0, row)
				return h, i, o[row*j.dimV:], 1
			})
		}
	}
	for row := range j.rows {
		h, i := j.row(p.hk*j.share, 0, row)
		storeRow(x, &j.o, o[row*j.dimV:(row+1)*j.dimV], p.b, h, i)
	}
	return nil
}

// projectCols is how many columns of w the vector kernels take at a time. With 128 of
// them a block of w and six tiles of rows share half of a core's second cache, and
// each number that is transposed on its way in is used 128 times.
const projectCols = 128

// vectorProject is Project on the vector kernels: it is PV, y = x·w, with pieces of
// columns as heads, but that nothing is hidden and sums begin at the bias.
func (be *Backend) vectorProject(ctx context.Context, y, x, w, bias backend.Tensor) error {
	var pinned backend.Pinned
	err := pinned.Pin(nil, where, []backend.Operand{{Name: "y", Tensor: y}},
		[]backend.Operand{{Name: "x", Tensor: x}, {Name: "w", Tensor: w}, {Name: "bias", Tensor: bias}})
	if err != nil {
		return err
	}
	defer pinned.Unpin()
	for h := range y.Shape()[backend.Heads] {
		var part [3]backend.Tensor
		for i, t := range [3]backend.Tensor{y, x, w} {
			if part[i], err = t.Slice(backend.Heads, h, h+1); err != nil {
				return err
			}
		}
		if err := be.projectHead(ctx, part[0], part[1], part[2], bias); err != nil {
			return err
		}
	}
	return nil
}

// projectHead is vectorProject for one head.
func (be *Backend) projectHead(ctx context.Context, y, x, w, bias backend.Tensor) (err error) {
	if y, x, w, err = joinBatches(y, x, w); err != nil {
		return err
	}
	cols := y.Shape()[backend.Dim]
	whole := cols / projectCols * projectCols
	if whole > 0 {
		err = be.projectPieces(ctx, y, x, w, bias, 0, whole/projectCols, projectCols)
	}
	if err == nil && whole < cols {
		err = be.projectPieces(ctx, y, x, w, bias, whole, 1, cols-whole)
	}
	return err
}

// joinBatches returns the operands as one batch of many rows where w is the same for
// all batches and the rows of each follow those of the one before.
func joinBatches(y, x, w backend.Tensor) (_, _, _ backend.Tensor, err error) {
	n, s := y.Shape()[backend.Batch], y.Shape()[backend.Seq]
	follows := func(t backend.Tensor) bool {
		return t.Strides()[backend.Batch] == s*t.Strides()[backend.Seq]
	}
	if n == 1 || w.Strides()[backend.Batch] != 0 || !follows(y) || !follows(x) {
		return y, x, w, nil
	}
	rows := func(t backend.Tensor) backend.Tensor {
		if err == nil {
			t, err = t.View(backend.Shape{1, 1, n * s, t.Shape()[backend.Dim]}, t.Strides(), 0)
		}
		return t
	}
	y, x = rows(y), rows(x)
	if err == nil {
		w, err = w.Slice(backend.Batch, 0, 1)
	}
	return y, x, w, err
}

// projectPieces computes n pieces of so many columns, from column c0 on.
func (be *Backend) projectPieces(ctx context.Context, y, x, w, bias backend.Tensor, c0, n, cols int) error {
	pieces := func(t backend.Tensor) (backend.Tensor, error) {
		shape, st := t.Shape(), t.Strides()
		at := c0 * st[backend.Dim]
		st[backend.Heads] = cols * st[backend.Dim]
		return t.View(backend.Shape{shape[backend.Batch], n, shape[backend.Seq], cols}, st, at)
	}
	yp, err := pieces(y)
	if err != nil {
		return err
	}
	wp, err := pieces(w)
	if err != nil {
		return err
	}
	shape := x.Shape()
	shape[backend.Heads] = n
	xp, err := x.Broadcast(shape)
	if err != nil {
		return err
	}
	j := pvVector{project: true, c0: c0}
	if j.o, err = floatView("y", yp); err != nil {
		return err
	}
	if j.w, err = floatView("x", xp); err != nil {
		return err
	}
	if j.v, err = floatView("w", wp); err != nil {
		return err
	}
	if j.bias, err = floatView("bias", bias); err != nil {
		return err
	}
	return j.run(ctx, be, yp, wp)
}
