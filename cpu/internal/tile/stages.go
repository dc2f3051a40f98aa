package tile

import (
	"github.com/seed90331342/attn/cpu/internal/pool"
	"github.com/seed90331342/attn/cpu/internal/vec"
	"github.com/seed90331342/attn/cpu/internal/view"
)

// WriteScores writes S of t and the keys of c's block from j0 on to dst.
func (p *Products) WriteScores(s *Space, c *Chunk, tiles []Tile, j0 int, dst *view.View) {
	l := p.Layout
	x := l.Kernels
	b := block{span: Span{j0, min(j0+BlockKeys, c.Keys.Hi)}, end: c.Keys.Hi}
	n := b.span.Hi - b.span.Lo
	clear(s.bias)
	for i := range tiles {
		t := &tiles[i]
		if !l.KeyLanes {
			Fill(s.MX, 0)
			runs, ldk := p.keys(s, &b, t, b.span)
			x.Scores(s.S, runs, ldk, t.q, l.Dims.Dim, s.MX)
			l.writeTransposed(s, dst, t, b.span.Lo, n)
			continue
		}
		p.keyLaneScores(s, &b, t, b.span)
		for row := range t.N {
			h, i := l.Row(t.H, t.I, row)
			scores := s.S[row*BlockKeys : row*BlockKeys+RoundUp(n, x.Lanes)]
			x.Bias(scores, s.bias) // adding 0 turns -0 into 0, as in Kernels.Transpose
			dst.Store(x, scores[:n], t.Batch, h, i, b.span.Lo)
		}
	}
}

// AddValues adds the products of weights and values of the block from j0 on to the outputs of
// tiles. If zeroHides is set, weights of exactly 0 hide NaN and Inf.
//
//	weights [B, H, Sq, Sk]
func (p *Products) AddValues(s *Space, tiles []Tile, j0 int, weights *view.View, zeroHides bool) {
	l := p.Layout
	b := block{span: Span{j0, min(j0+BlockKeys, l.Dims.SeqK)}, end: l.Dims.SeqK}
	n := b.span.Hi - j0
	for i := range tiles {
		t := &tiles[i]
		runs, ldv, replaced := p.values(s, &b, t, s.one(b.span), zeroHides || l.Kernels.KeyLanes)
		if l.KeyLanes {
			l.RowsOf(t, 0, t.N, func(row, h, i, rows int) {
				weights.Load(l.Kernels, s.S[row*BlockKeys:], BlockKeys, t.Batch, h, i, rows, j0, n)
			})
		} else {
			l.packTransposed(s, weights, t, j0, n)
		}
		p.multiply(s, t, vec.F32, runs, ldv, false)
		if replaced {
			p.addNonFinite(t, b.span, s.S, func(_, _, _, _ int, weight float32) bool { return weight != 0 || !zeroHides })
		}
	}
}

// BeginSums sets the outputs of t to start(c) in column c, in memory of w.
func (p *Products) BeginSums(w *pool.Scratch, s *Space, t *Tile, start *view.View, c0 int) {
	l := p.Layout
	o, rows, rowStep, dimStep := w.Floats(l.OutputFloats()), l.Kernels.Width, 1, l.Kernels.Width
	if l.RowOutputs {
		rows, rowStep, dimStep = t.N, l.DimV, 1
	}
	clear(o)
	Fill(s.Alpha, 1)
	t.sums.cur.o = o
	if start.IsZero() {
		return
	}
	for c := range l.Dims.ValueDim {
		x := start.At(0, 0, 0, c0+t.KVHead*l.Dims.ValueDim+c)
		for r := range rows {
			o[r*rowStep+c*dimStep] = x + 0 // no zero is negative, and then none of the sums is
		}
	}
}

// WriteSums writes the outputs of t.
func (p *Products) WriteSums(s *Space, t *Tile) { p.writeOutputs(s, t, t.sums.cur.o, s.Alpha) }

// packTransposed writes elements [lo, lo+n) of the rows of t in src, transposed, to the score
// tile.
func (l *Layout) packTransposed(s *Space, src *view.View, t *Tile, lo, n int) {
	x := l.Kernels
	for lane := 0; lane < x.Width; lane += x.Lanes {
		rows := max(0, min(x.Lanes, t.N-lane))
		done := 0
		if from, ld, ok := l.square(src, t, lane); ok {
			// Whole squares are read in place; the rest is staged.
			for ; done+x.Lanes <= n; done += x.Lanes {
				x.Transpose(s.S[done*x.Width+lane:], x.Width, from[lo+done:], ld, s.One)
			}
		}
		if done == n {
			continue
		}
		for r := range rows {
			h, i := l.Row(t.H, t.I, lane+r)
			src.Load(x, s.Stage[r*BlockKeys:], BlockKeys, t.Batch, h, i, 1, lo+done, n-done)
		}
		for c := done; c < n; c += x.Lanes {
			x.Transpose(s.S[c*x.Width+lane:], x.Width, s.Stage[c-done:], BlockKeys, s.One)
		}
	}
}

// writeTransposed writes the first n rows of the score tile to elements
// [lo, lo+n) of the rows of t in dst, transposed.
func (l *Layout) writeTransposed(s *Space, dst *view.View, t *Tile, lo, n int) {
	x := l.Kernels
	for lane := 0; lane < t.N; lane += x.Lanes {
		rows, done := min(x.Lanes, t.N-lane), 0
		if to, ld, ok := l.square(dst, t, lane); ok {
			for ; done+x.Lanes <= n; done += x.Lanes {
				x.Transpose(to[lo+done:], ld, s.S[done*x.Width+lane:], x.Width, s.One)
			}
		}
		if done == n {
			continue
		}
		for c := done; c < n; c += x.Lanes {
			x.Transpose(s.Stage[c-done:], BlockKeys, s.S[c*x.Width+lane:], x.Width, s.One)
		}
		for r := range rows {
			h, i := l.Row(t.H, t.I, lane+r)
			dst.Store(x, s.Stage[r*BlockKeys:r*BlockKeys+n-done], t.Batch, h, i, lo+done)
		}
	}
}
