package cpu

import (
	"context"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

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
