package main

import (
	"context"
	"fmt"
	"math"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
)

// span is the indices lo <= i < hi.
type span struct{ lo, hi int }

func (s span) len() int { return max(s.hi-s.lo, 0) }

// within returns what s and t have in common.
func (s span) within(t span) span { return span{max(s.lo, t.lo), min(s.hi, t.hi)} }

// Measures of a chunk, the scores that are in memory at once: as many rows as
// keep the products' tiles busy, and at most 64 MiB.
const (
	chunkRows   = 256
	chunkScores = 16 << 20
)

// someWeights computes the softmax weights of some rows and keys of a call, a
// chunk of rows at a time, in memory O(rows + chunk).
//
// With s the scores and [c0, c1) the keys that are wanted,
//
//	w_ij = softmax over [c0, c1) of s_i, at j, times exp(lse'_i - lse_i)
//
// where lse'_i is over these keys, from the stage, and lse_i over all keys, from
// the fused call.
type someWeights struct {
	be   backend.Backend
	q, k backend.Tensor  // [B, H, Sq, D], [B, Hkv, Sk, D]
	opt  kernels.Options // of the whole call

	batch      int
	rows, keys span
}

// options are those of a call of some rows and keys of one head.
func (w *someWeights) options(head int, rows, keys span) (kernels.Options, error) {
	opt := w.opt
	seqQ, seqK := w.q.Shape()[backend.Seq], w.k.Shape()[backend.Seq]
	if opt.Scale == nil {
		opt.Scale = new(1 / math.Sqrt(float64(w.q.Shape()[backend.Dim])))
	}
	if opt.Align == kernels.LowerRight {
		opt.Offset += seqK - seqQ
	}
	opt.Align, opt.Offset = kernels.UpperLeft, opt.Offset+rows.lo-keys.lo
	if opt.KLen != nil {
		opt.KLen = []int{span{0, opt.KLen[w.batch] - keys.lo}.within(span{0, keys.len()}).len()}
	}
	if opt.Dropout.P > 0 || !opt.BlockMask.IsZero() || opt.Pages != nil || opt.CuQ != nil || opt.CuK != nil || opt.Prefix != nil || opt.QSegments != nil {
		return opt, fmt.Errorf("weights of a range under dropout, a mask of blocks, pages, a prefix or segments are not computed: %w", backend.ErrUnsupported)
	}
	if opt.Offsets != nil {
		opt.Offset, opt.Offsets = opt.Offset+opt.Offsets[w.batch], nil
	}
	heads := w.q.Shape()[backend.Heads]
	if len(opt.ALiBi) > heads { // of each batch
		opt.ALiBi = opt.ALiBi[w.batch*heads:]
	}
	if opt.ALiBi != nil {
		opt.ALiBi = opt.ALiBi[head : head+1]
	}
	if opt.Sinks != nil {
		opt.Sinks = opt.Sinks[head : head+1]
	}
	part := [4]span{{w.batch, w.batch + 1}, {head, head + 1}, rows, keys}
	// Element j-i+Sq-1 of the table is for row i and key j.
	lowest := keys.lo - rows.hi + seqQ
	distances := [4]span{part[0], part[1], {0, 1}, {lowest, lowest + rows.len() + keys.len() - 1}}
	for _, f := range []struct {
		t    *backend.Tensor
		part [4]span
	}{{&opt.Mask, part}, {&opt.Bias, part}, {&opt.RelativeBias, distances}} {
		t := f.t
		if t.IsZero() {
			continue
		}
		for axis, l := range t.Shape() {
			if l == 1 { // broadcast
				continue
			}
			var err error
			// A mask of fewer keys hides the others.
			if *t, err = t.Slice(axis, f.part[axis].lo, min(f.part[axis].hi, l)); err != nil {
				return opt, err
			}
		}
	}
	return opt, nil
}

// visible returns the keys that some of the rows see, but for a mask, among
// those that are wanted.
func (w *someWeights) visible(rows span) span {
	seqQ, seqK := w.q.Shape()[backend.Seq], w.k.Shape()[backend.Seq]
	vis := backend.Everything()
	vis.Offset = w.opt.Offset
	if w.opt.Align == kernels.LowerRight {
		vis.Offset += seqK - seqQ
	}
	if win := w.opt.Window; win != nil {
		vis.Left, vis.Right = win.Left, win.Right
	}
	if w.opt.Causal {
		vis.Right = 0
	}
	if w.opt.Offsets != nil {
		vis.Offset += w.opt.Offsets[w.batch]
	}
	vis.KLen = w.opt.KLen
	all := span{seqK, 0}
	for i := rows.lo; i < rows.hi; i++ {
		if lo, hi := vis.Range(w.batch, i, seqK); lo < hi {
			all = span{min(all.lo, lo), max(all.hi, hi)}
		}
	}
	for _, t := range []backend.Tensor{w.opt.Mask, w.opt.Bias} {
		if n := t.Shape()[backend.Dim]; !t.IsZero() && n > 1 { // there may be fewer than keys
			all.hi = min(all.hi, n)
		}
	}
	return all.within(w.keys)
}

// each hands the weights of a head to f, row by row and in order: those of a
// row's keys from first on; what is left out is 0.
func (w *someWeights) each(ctx context.Context, head int, f func(row, first int, weights []float32)) error {
	group := w.q.Shape()[backend.Heads] / w.k.Shape()[backend.Heads]
	q, err := cut(w.q, w.batch, head)
	if err != nil {
		return err
	}
	k, err := cut(w.k, w.batch, head/group)
	if err != nil {
		return err
	}
	lse, err := w.lse(ctx, head, q, k)
	if err != nil {
		return err
	}
	for rows := (span{w.rows.lo, w.rows.lo}); rows.lo < w.rows.hi; rows.lo = rows.hi {
		rows.hi = min(rows.lo+chunkRows, w.rows.hi)
		keys := w.visible(rows)
		for rows.len() > 1 && rows.len()*keys.len() > chunkScores {
			rows.hi = rows.lo + rows.len()/2
			keys = w.visible(rows)
		}
		if keys.len() == 0 {
			continue
		}
		var all []float32
		if lse != nil {
			all = lse[rows.lo-w.rows.lo:][:rows.len()]
		}
		weights, err := w.chunk(ctx, head, q, k, rows, keys, all)
		if err != nil {
			return err
		}
		for i := range rows.len() {
			f(rows.lo+i, keys.lo, weights[i*keys.len():][:keys.len()])
		}
	}
	return nil
}

// cut returns one head of one batch.
func cut(t backend.Tensor, batch, head int) (backend.Tensor, error) {
	t, err := t.Slice(backend.Batch, batch, batch+1)
	if err != nil {
		return t, err
	}
	return t.Slice(backend.Heads, head, head+1)
}

// lse returns the log-sum-exp of the rows over all keys; nil when all keys are
// wanted, as the weights then are the softmax of what they are computed from.
func (w *someWeights) lse(ctx context.Context, head int, q, k backend.Tensor) ([]float32, error) {
	every := span{0, k.Shape()[backend.Seq]}
	if w.keys == every {
		return nil, nil
	}
	opt, err := w.options(head, w.rows, every)
	if err != nil {
		return nil, err
	}
	if q, err = q.Slice(backend.Seq, w.rows.lo, w.rows.hi); err != nil {
		return nil, err
	}
	// Values are not wanted: the keys' first column stands for them.
	v, err := k.Slice(backend.Dim, 0, 1)
	if err != nil {
		return nil, err
	}
	opt.LSE = true
	r, err := kernels.Attention(ctx, w.be, q, k, v, opt)
	if err != nil {
		return nil, err
	}
	defer r.Release()
	return kernels.Float32s(ctx, w.be, r.LSE)
}

// chunk returns the weights [rows, keys] of one head; lse is that of the rows
// over all keys, nil when keys holds all that they see.
func (w *someWeights) chunk(ctx context.Context, head int, q, k backend.Tensor, rows, keys span, lse []float32) ([]float32, error) {
	opt, err := w.options(head, rows, keys)
	if err != nil {
		return nil, err
	}
	if q, err = q.Slice(backend.Seq, rows.lo, rows.hi); err != nil {
		return nil, err
	}
	if k, err = k.Slice(backend.Seq, keys.lo, keys.hi); err != nil {
		return nil, err
	}
	s, err := kernels.QK(ctx, w.be, q, k)
	if err != nil {
		return nil, err
	}
	defer s.Release()
	here, err := w.be.Alloc(ctx, backend.F32, backend.Shape{1, 1, rows.len(), 1})
	if err != nil {
		return nil, err
	}
	defer here.Release()
	if err := kernels.Softmax(ctx, w.be, s, here, opt); err != nil {
		return nil, err
	}
	weights, err := kernels.Float32s(ctx, w.be, s)
	if err != nil || lse == nil {
		return weights, err
	}
	part, err := kernels.Float32s(ctx, w.be, here)
	if err != nil {
		return nil, err
	}
	for i, p := range part {
		if math.IsInf(float64(p), -1) {
			continue // sees none of these keys: zeros already, and lse may be -Inf too
		}
		f := float32(math.Exp(float64(p) - float64(lse[i])))
		for j := range weights[i*keys.len():][:keys.len()] {
			weights[i*keys.len()+j] *= f
		}
	}
	return weights, nil
}

// pooled are weights joined into at most so many cells along each axis: the
// largest of a cell's weights, or their mean.
type pooled struct {
	rows, keys     span
	perRow, perKey int // weights that a cell joins along each axis, fewer in the last one
	mean           bool
	cells          matrix
	sums           []float64 // of a mean
}

// newPooled returns cells for the weights of rows and keys, size a side at most.
func newPooled(rows, keys span, size int, mean bool) *pooled {
	p := &pooled{rows: rows, keys: keys, mean: mean}
	p.perRow, p.perKey = (rows.len()+size-1)/size, (keys.len()+size-1)/size
	p.cells.rows, p.cells.cols = (rows.len()+p.perRow-1)/p.perRow, (keys.len()+p.perKey-1)/p.perKey
	p.cells.data = make([]float32, p.cells.rows*p.cells.cols)
	if mean {
		p.sums = make([]float64, len(p.cells.data))
	}
	return p
}

// add joins in the weights of a row's keys from first on.
func (p *pooled) add(row, first int, weights []float32) {
	at := (row - p.rows.lo) / p.perRow * p.cells.cols
	for j := 0; j < len(weights); {
		cell := (first - p.keys.lo + j) / p.perKey
		end := min(len(weights), (cell+1)*p.perKey+p.keys.lo-first)
		if p.mean {
			sum := 0.0
			for _, w := range weights[j:end] {
				sum += float64(w)
			}
			p.sums[at+cell] += sum
		} else {
			most := p.cells.data[at+cell]
			for _, w := range weights[j:end] {
				most = max(most, w) // NaN stays
			}
			p.cells.data[at+cell] = most
		}
		j = end
	}
}

// matrix returns the cells, when all weights are in.
func (p *pooled) matrix() matrix {
	for at, sum := range p.sums {
		i, j := at/p.cells.cols, at%p.cells.cols
		high := span{i * p.perRow, (i + 1) * p.perRow}.within(span{0, p.rows.len()})
		wide := span{j * p.perKey, (j + 1) * p.perKey}.within(span{0, p.keys.len()})
		p.cells.data[at] = float32(sum / float64(high.len()*wide.len()))
	}
	return p.cells
}
