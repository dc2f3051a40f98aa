package heatmap

import (
	"context"
	"fmt"
	"math"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cmd/attn/internal/matrix"
	"github.com/seed90331342/attn/kernels"
)

// span is the range of indices lo <= i < hi.
type span struct{ lo, hi int }

func (s span) len() int { return max(s.hi-s.lo, 0) }

// within returns the intersection of s and t.
func (s span) within(t span) span { return span{max(s.lo, t.lo), min(s.hi, t.hi)} }

// A chunk is the part of the scores in memory: enough rows to fill the tiles of the
// products, and at most 64 MiB.
const (
	chunkRows   = 256
	chunkScores = 16 << 20
)

// someWeights computes the softmax weights of some rows and keys of one batch, a
// chunk of rows at a time, in memory O(rows + chunk). With the scores s and the
// wanted keys [c0, c1),
//
//	w_ij = softmax of s_i over [c0, c1), at j, times exp(lse'_i - lse_i)
//
// where lse'_i, from the softmax stage, is over these keys, and lse_i, from the
// fused call, over all keys.
type someWeights struct {
	dev        *kernels.Device
	q, k       backend.Tensor  // [1, H, Sq, D], [1, Hkv, Sk, D]
	opt        kernels.Options // of the batch: Window, Offset and KLen decide the visibility
	batch      int             // of masks
	rows, keys span
}

// newSomeWeights returns the weights of a call with the given options.
func newSomeWeights(dev *kernels.Device, q, k backend.Tensor, opt kernels.Options, batch int, rows, keys span) (*someWeights, error) {
	if opt.Dropout.P > 0 || !opt.BlockMask.IsZero() || opt.Pages != nil || opt.Prefix != nil || opt.QSegments != nil || opt.CuQ != nil {
		return nil, fmt.Errorf("weights of a range with dropout, a block mask, pages, a prefix, segments or packed sequences: %w", backend.ErrUnsupported)
	}
	seqQ, seqK := q.Shape()[backend.Seq], k.Shape()[backend.Seq]
	heads := q.Shape()[backend.Heads]
	if opt.Scale == nil {
		opt.Scale = new(1 / math.Sqrt(float64(q.Shape()[backend.Dim])))
	}
	window := kernels.Window{Left: kernels.Unbounded, Right: kernels.Unbounded}
	if opt.Window != nil {
		window = *opt.Window
	}
	if opt.Causal {
		window.Right = 0
	}
	opt.Causal, opt.Window = false, &window
	if opt.Align == kernels.LowerRight {
		opt.Align, opt.Offset = kernels.UpperLeft, opt.Offset+seqK-seqQ
	}
	if opt.Offsets != nil {
		opt.Offset, opt.Offsets = opt.Offset+opt.Offsets[batch], nil
	}
	if opt.KLen == nil {
		opt.KLen = []int{seqK}
	} else {
		opt.KLen = opt.KLen[batch : batch+1]
	}
	if len(opt.ALiBi) > heads { // of each batch
		opt.ALiBi = opt.ALiBi[batch*heads:]
	}
	w := &someWeights{dev: dev, opt: opt, batch: batch, rows: rows, keys: keys}
	var err error
	if w.q, err = q.Slice(backend.Batch, batch, batch+1); err == nil {
		w.k, err = k.Slice(backend.Batch, batch, batch+1)
	}
	return w, err
}

// part returns q, k and the options for some rows and keys of one head.
func (w *someWeights) part(head int, rows, keys span) (q, k backend.Tensor, opt kernels.Options, err error) {
	group := w.q.Shape()[backend.Heads] / w.k.Shape()[backend.Heads]
	kvHead := head / group
	if q, err = cut(w.q, [4]span{{0, 1}, {head, head + 1}, rows, {0, w.q.Shape()[backend.Dim]}}); err != nil {
		return q, k, opt, err
	}
	if k, err = cut(w.k, [4]span{{0, 1}, {kvHead, kvHead + 1}, keys, {0, w.k.Shape()[backend.Dim]}}); err != nil {
		return q, k, opt, err
	}
	opt = w.opt
	opt.Offset += rows.lo - keys.lo
	opt.KLen = []int{span{keys.lo, opt.KLen[0]}.within(keys).len()}
	if opt.ALiBi != nil {
		opt.ALiBi = opt.ALiBi[head : head+1]
	}
	if opt.Sinks != nil {
		opt.Sinks = opt.Sinks[head : head+1]
	}
	pairs := [4]span{{w.batch, w.batch + 1}, {head, head + 1}, rows, keys}
	// Element j-i+Sq-1 of the table is for row i and key j.
	lowest := keys.lo - rows.hi + w.q.Shape()[backend.Seq]
	distances := [4]span{pairs[0], pairs[1], {0, 1}, {lowest, lowest + rows.len() + keys.len() - 1}}
	for _, f := range []struct {
		t    *backend.Tensor
		part [4]span
	}{{&opt.Mask, pairs}, {&opt.Bias, pairs}, {&opt.RelativeBias, distances}} {
		if f.t.IsZero() {
			continue
		}
		for axis, l := range f.t.Shape() {
			if l == 1 { // broadcast
				f.part[axis] = span{0, 1}
			}
			f.part[axis].hi = min(f.part[axis].hi, l) // a mask with fewer keys hides the others
		}
		if *f.t, err = cut(*f.t, f.part); err != nil {
			return q, k, opt, err
		}
	}
	return q, k, opt, nil
}

// cut returns a part of t.
func cut(t backend.Tensor, part [4]span) (backend.Tensor, error) {
	for axis, s := range part {
		var err error
		if t, err = t.Slice(axis, s.lo, s.hi); err != nil {
			return t, err
		}
	}
	return t, nil
}

// visible returns the range of the wanted keys that some of the rows see, without
// regard to boolean masks.
func (w *someWeights) visible(rows span) span {
	seqK := w.k.Shape()[backend.Seq]
	vis := backend.Visibility{Left: w.opt.Window.Left, Right: w.opt.Window.Right, Offset: w.opt.Offset, KLen: w.opt.KLen}
	all := span{seqK, 0}
	for i := rows.lo; i < rows.hi; i++ {
		if lo, hi := vis.Range(0, i, seqK); lo < hi {
			all = span{min(all.lo, lo), max(all.hi, hi)}
		}
	}
	for _, t := range []backend.Tensor{w.opt.Mask, w.opt.Bias} {
		if n := t.Shape()[backend.Dim]; !t.IsZero() && n > 1 { // may have fewer keys
			all.hi = min(all.hi, n)
		}
	}
	return all.within(w.keys)
}

// each calls f with the weights of a head, row by row: those of a row's keys
// starting at first. All other weights are 0.
func (w *someWeights) each(ctx context.Context, head int, f func(row, first int, weights []float32)) error {
	lse, err := w.lse(ctx, head)
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
		weights, err := w.chunk(ctx, head, rows, keys, lse)
		if err != nil {
			return err
		}
		for i := range rows.len() {
			f(rows.lo+i, keys.lo, weights[i*keys.len():][:keys.len()])
		}
	}
	return nil
}

// lse returns the log-sum-exp of the wanted rows over all keys. It returns nil when
// all keys are wanted, as the softmax stage then returns the final weights.
func (w *someWeights) lse(ctx context.Context, head int) ([]float32, error) {
	every := span{0, w.k.Shape()[backend.Seq]}
	if w.keys == every {
		return nil, nil
	}
	q, k, opt, err := w.part(head, w.rows, every)
	if err != nil {
		return nil, err
	}
	v, err := k.Slice(backend.Dim, 0, 1) // any values, as the output is not used
	if err != nil {
		return nil, err
	}
	opt.LSE = true
	r, err := w.dev.Attention(ctx, q, k, v, opt)
	if err != nil {
		return nil, err
	}
	defer r.Release()
	return w.dev.Float32s(ctx, r.LSE)
}

// chunk returns the weights [rows, keys] of one head. lse is that of all wanted rows.
func (w *someWeights) chunk(ctx context.Context, head int, rows, keys span, lse []float32) ([]float32, error) {
	q, k, opt, err := w.part(head, rows, keys)
	if err != nil {
		return nil, err
	}
	s, err := w.dev.QK(ctx, q, k)
	if err != nil {
		return nil, err
	}
	defer s.Release()
	partLSE, err := w.dev.Alloc(ctx, backend.F32, backend.Shape{1, 1, rows.len(), 1})
	if err != nil {
		return nil, err
	}
	defer partLSE.Release()
	if err := w.dev.Softmax(ctx, s, partLSE, opt); err != nil {
		return nil, err
	}
	weights, err := w.dev.Float32s(ctx, s)
	if err != nil || lse == nil {
		return weights, err
	}
	parts, err := w.dev.Float32s(ctx, partLSE)
	if err != nil {
		return nil, err
	}
	for i, part := range parts {
		if math.IsInf(float64(part), -1) {
			continue // the weights are 0, and the log-sum-exp over all keys may be -Inf too
		}
		f := float32(math.Exp(float64(part) - float64(lse[rows.lo-w.rows.lo+i])))
		for j := range weights[i*keys.len():][:keys.len()] {
			weights[i*keys.len()+j] *= f
		}
	}
	return weights, nil
}

// pooled joins weights into a limited number of cells along each axis: the largest
// or the mean of their weights.
type pooled struct {
	rows, keys     span
	perRow, perKey int // weights of a cell along each axis, fewer in the last one
	mean           bool
	cells          matrix.Matrix
	sums           []float64 // of a mean
}

// newPooled returns cells for the weights of rows and keys, at most size along each axis.
func newPooled(rows, keys span, size int, mean bool) *pooled {
	p := &pooled{rows: rows, keys: keys, mean: mean}
	p.perRow, p.perKey = (rows.len()+size-1)/size, (keys.len()+size-1)/size
	p.cells.Rows, p.cells.Cols = (rows.len()+p.perRow-1)/p.perRow, (keys.len()+p.perKey-1)/p.perKey
	p.cells.Data = make([]float32, p.cells.Rows*p.cells.Cols)
	if mean {
		p.sums = make([]float64, len(p.cells.Data))
	}
	return p
}

// add adds the weights of a row's keys, starting at first.
func (p *pooled) add(row, first int, weights []float32) {
	at := (row - p.rows.lo) / p.perRow * p.cells.Cols
	for j := 0; j < len(weights); {
		cell := (first - p.keys.lo + j) / p.perKey
		end := min(len(weights), (cell+1)*p.perKey+p.keys.lo-first)
		if p.mean {
			for _, w := range weights[j:end] {
				p.sums[at+cell] += float64(w)
			}
		} else {
			for _, w := range weights[j:end] {
				p.cells.Data[at+cell] = max(p.cells.Data[at+cell], w) // keeps NaN
			}
		}
		j = end
	}
}

// matrix returns the cells. Call it after all weights were added.
func (p *pooled) matrix() matrix.Matrix {
	for at, sum := range p.sums {
		i, j := at/p.cells.Cols, at%p.cells.Cols
		high := span{i * p.perRow, (i + 1) * p.perRow}.within(span{0, p.rows.len()})
		wide := span{j * p.perKey, (j + 1) * p.perKey}.within(span{0, p.keys.len()})
		p.cells.Data[at] = float32(sum / float64(high.len()*wide.len()))
	}
	return p.cells
}
