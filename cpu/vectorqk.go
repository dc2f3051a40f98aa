package cpu

import (
	"context"

	"github.com/seed90331342/attn/backend"
)

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
