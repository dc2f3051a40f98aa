package tile

import (
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/strided"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// Products are the operands of S = scale·Q·Kᵀ and O = P·V. Those that a call lacks are zero.
type Products struct {
	Layout     *Layout
	Q, K, V, O strided.Tensor
	Scale      float32 // of the queries
}

// loadQueries loads n query rows of t, from one on, to rows.
func (p *Products) loadQueries(rows []float32, t *Tile, from, n int) {
	for r, m := 0, 0; r < n; r += m {
		h, i := p.Layout.Row(t.H, t.I, from+r)
		m = min(n-r, p.Layout.Dims.SeqQ-i) // those of one head
		p.Q.LoadRows(p.Layout.Kernels, rows[r*p.Layout.DimK:], p.Layout.DimK, t.Batch, h, i, m)
	}
}

// ScaleRows writes scale·src to dst. As after Kernels.Transpose, no zero is negative.
func ScaleRows(dst, src []float32, scale float32) {
	dst = dst[:len(src)]
	for c, y := range src {
		dst[c] = float32(y*scale) + 0
	}
}

// addValues adds the products of the weights in s.S, after dropout, and the values of t's keys in the block to o, the
// outputs of t. multiply takes the values in s.Runs, rows of type e that are ld apart.
//
// A value that is not finite spoils the outputs even with a weight of 0. Where a weight may have to hide one, such values
// are replaced by 0: before the product or, with checkAfter set, only if the product has an output that is not finite.
// Most blocks have none, and checkAfter then reads their values once.
func (a *Attention) addValues(s *Space, t *Tile, o []float32, checkAfter bool, multiply func(e backend.DType, ld int)) {
	p, x := &a.Products, a.Products.Layout.Kernels
	if a.Scores.Drops {
		a.Scores.Drop(s, t, s.S, t.here)
	}
	if checkAfter = checkAfter && t.mayHide && !s.block.checked && p.Layout.ReadV; checkAfter {
		copy(s.v, o)
	}
	multiply(p.values(s, t, t.here, t.mayHide && !checkAfter))
	if checkAfter && x.NonFinite(o, len(o), 1, len(o)) {
		copy(o, s.v)
		multiply(p.values(s, t, t.here, true))
	}
	if s.block.replaced {
		a.addReplaced(s, t)
	}
}

// addReplaced adds the products of the values that are replaced in the block to the outputs of the rows of t that see them.
func (a *Attention) addReplaced(s *Space, t *Tile) {
	a.Products.addNonFinite(t, t.here, s.S, BlockKeys, func(h, i, j, r int, _ float32) bool {
		return j >= t.Spans[r].Lo && j < t.Spans[r].Hi && !a.Scores.Hides(t.Batch, h, i, j) &&
			(!a.Scores.Drops || a.Scores.problem.Dropout.Keeps(t.Batch, h, i, a.Scores.Key(t.Batch, j)))
	})
}

// values sets s.Runs to the values of here, which are in the block of s, as rows of type e that are ld
// apart, in place or converted. With mayHide set NaN and Inf are replaced by 0, because a weight
// of 0 must hide them and 0·NaN is NaN. If there are any, b.replaced is set.
func (p *Products) values(s *Space, t *Tile, here Span, mayHide bool) (e backend.DType, ld int) {
	l, b := p.Layout, &s.block
	if mayHide && !b.checked {
		b.checked = true
		n, rows, ld := b.span.Hi-b.span.Lo, s.v, l.DimV
		if l.ReadV && p.V.DType == backend.F32 && p.V.Pages == nil {
			rows, ld = p.V.F32[p.V.Index(t.Batch, t.KVHead, b.span.Lo):], p.V.Stride[backend.Seq]
		} else {
			p.load(&p.V, s.v, l.DimV, &b.hasV, b, t)
		}
		if b.replaced = l.Kernels.NonFinite(rows, ld, n, l.Dims.ValueDim); b.replaced {
			p.load(&p.V, s.v, l.DimV, &b.hasV, b, t)
			ZeroNonFinite(s.v[:n*l.DimV])
		}
	}
	if l.ReadV && !b.replaced {
		p.V.Runs(&s.Runs, t.Batch, t.KVHead, here.Lo, here.Hi, here.Lo+BlockKeys, b.fetchEnd)
		return p.V.DType, p.V.Stride[backend.Seq]
	}
	p.load(&p.V, s.v, l.DimV, &b.hasV, b, t)
	s.Rows(s.v[(here.Lo-b.span.Lo)*l.DimV:], l.DimV, here.Hi-here.Lo, l.DimV)
	return vec.F32, l.DimV
}

// Rows returns n rows of float32 as one run.
func (s *Space) Rows(rows []float32, ld, n, d int) []vec.Run {
	s.Runs = vec.AppendRun(s.Runs[:0], rows, ld, n, d, rows)
	return s.Runs
}

// load converts the keys or the values of b to rows, once.
func (p *Products) load(v *strided.Tensor, rows []float32, ld int, has *bool, b *block, t *Tile) {
	if !*has {
		*has = true
		v.LoadRows(p.Layout.Kernels, rows, ld, t.Batch, t.KVHead, b.span.Lo, b.span.Hi-b.span.Lo)
	}
}

// ZeroNonFinite replaces NaN and Inf by zero.
func ZeroNonFinite(s []float32) {
	for i, x := range s {
		if x-x != 0 {
			s[i] = 0
		}
	}
}

// addNonFinite adds the products of weights and values for the keys of here and the values that are NaN or Inf, which
// values has replaced. uses reports whether row i of head h takes in key j with the given weight.
// weights are those of t from the first key of here on. With keys as lanes those of a row are ldw apart from the row before.
func (p *Products) addNonFinite(t *Tile, here Span, weights []float32, ldw int, uses func(h, i, j, r int, weight float32) bool) {
	l, w := p.Layout, p.Layout.Kernels.Width
	for j := here.Lo; j < here.Hi; j++ {
		for c := range l.Dims.ValueDim {
			y := p.V.At(t.Batch, t.KVHead, j, c)
			if y-y == 0 {
				continue // finite
			}
			for r := range t.N {
				weight, out := (j-here.Lo)*w+r, c*w+r
				if l.KeyLanes {
					weight = r*ldw + j - here.Lo
				}
				if l.RowOutputs {
					out = r*l.DimV + c
				}
				if h, i := l.Row(t.H, t.I, r); uses(h, i, j, r, weights[weight]) {
					t.sums.cur.o[out] += weights[weight] * y
				}
			}
		}
	}
}

// writeOutputs writes the outputs o of t, each row times its factor in mul, which covers Width rows.
func (p *Products) writeOutputs(s *Space, t *Tile, o, mul []float32) {
	l, x, done := p.Layout, p.Layout.Kernels, 0
	for at, ld, ok := l.square(&p.O, t, 0); ok && !l.KeyLanes && l.Dims.ValueDim == l.DimV; at, ld, ok = l.square(&p.O, t, done) {
		rows, rounded := s.Stage, p.O.DType != backend.F32
		if !rounded {
			rows = p.O.F32[at:]
		} else if ld != l.DimV || p.O.Bits == nil {
			break
		}
		if l.RowOutputs {
			x.FoldRows(rows, ld, o[done*l.DimV:], nil, x.Lanes, l.DimV, mul[done:], nil)
		} else {
			x.Transpose(rows, ld, 1, o[done:], x.Width, x.Width, l.DimV, mul[done:])
		}
		if rounded { // rows next to each other at once
			x.Store(p.O.DType, p.O.Bits[at:], rows[:x.Lanes*ld])
		}
		done += x.Lanes
	}
	l.EachRow(s, t, done, o, l.DimV, mul, func(row []float32, h, i int) {
		p.O.Store(l.Kernels, row[:l.Dims.ValueDim], t.Batch, h, i, 0)
	})
}

// EachRow calls do with the rows of t from one on that is a multiple of Lanes. They are those of
// o, outputs of dim elements, each times its factor in mul.
func (l *Layout) EachRow(s *Space, t *Tile, from int, o []float32, dim int, mul []float32, do func(row []float32, h, i int)) {
	x := l.Kernels
	for r := from; r < t.N; r++ {
		row := s.Stage[r%x.Lanes*dim:][:dim]
		switch {
		case l.RowOutputs:
			ScaleRows(row, o[r*dim:(r+1)*dim], mul[r])
		case r%x.Lanes == 0:
			x.Transpose(s.Stage, dim, 1, o[r:], x.Width, x.Width, dim, mul[r:])
		}
		h, i := l.Row(t.H, t.I, r)
		do(row, h, i)
	}
}
