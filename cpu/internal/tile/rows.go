package tile

import (
	"slices"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/strided"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// rows is the form with query rows as lanes.
type rows struct{}

func (rows) pack(p *Products, s *Space, t *Tile) {
	l, x := p.Layout, p.Layout.Kernels
	for lane := 0; lane < x.Width; lane += x.Lanes {
		rows, ld := s.Stage, l.DimK
		if at, apart, ok := l.square(&p.Q, t, lane); ok && p.Q.DType == backend.F32 && l.Dims.Dim == l.DimK {
			rows, ld = p.Q.F32[at:], apart
		} else {
			n := max(0, min(x.Lanes, t.N-lane))
			p.loadQueries(rows, t, lane, n)
			clear(rows[n*ld : x.Lanes*ld])
		}
		x.Transpose(t.q[lane:], x.Width, x.Width, rows, ld, 1, l.DimK, s.Scale)
	}
}

func (rows) step(a *Attention, s *Space, t, next *Tile) {
	p, l, x := &a.Products, a.Products.Layout, a.Products.Layout.Kernels
	b, cur, lo, hi, ldk := &s.block, &t.sums.cur, t.here.Lo, t.here.Hi, l.DimK
	n := hi - lo
	copy(s.MX, cur.m)
	if l.ReadK {
		ldk = p.K.Stride[backend.Seq]
		p.K.Runs(&s.Runs, t.Batch, t.KVHead, lo, hi, lo+BlockKeys, b.fetchEnd)
	} else {
		p.load(&p.K, s.k, ldk, &b.hasK, b, t)
		s.Rows(s.k[(lo-b.span.Lo)*ldk:], ldk, n, ldk)
	}
	if a.Scores.biasAlone {
		a.Scores.fetchBias(s, t, next)
	} else if next.sums.at == noSum {
		s.fetchRows(&p.Q, t, next, 0, l.Dims.Dim)
	}
	x.Scores(s.S, s.Runs, ldk, t.q, l.Dims.Dim, t.stairs, s.MX)
	a.Scores.Adjust(s, t, t.here)
	fours := CeilDiv(n, 4)
	Fill(s.S[n*x.Width:fours*4*x.Width], vec.NegInf)
	x.Weights(s.S, fours, cur.m, s.MX, cur.l, s.Alpha)
	checkAfter := 2*b.tiles*x.Width <= b.span.Hi-b.span.Lo // else the values are fewer than the outputs of all tiles
	a.addValues(s, t, cur.o, checkAfter, func(_ backend.DType, ldv int) {
		if hi == t.Keys.Hi {
			s.fetchRows(&p.O, t, t, 0, l.Dims.ValueDim)
		}
		if l.RowOutputs {
			x.RowValues(cur.o, s.Runs, ldv, s.S, l.Dims.ValueDim, t.stairs, s.Alpha)
		} else {
			x.Values(cur.o, s.Runs, ldv, s.S, l.Dims.ValueDim, t.stairs, s.Alpha)
		}
	})
}

// fetchRows makes a product of t prefetch n elements from at on of the rows of v that are those of a tile, unless it prefetches
// keys or values.
func (s *Space) fetchRows(v *strided.Tensor, t, of *Tile, at, n int) {
	if t.here.Lo+BlockKeys >= s.block.fetchEnd && len(s.Runs) == 1 && v.DType == backend.F32 && v.Stride[backend.Dim] == 1 {
		vec.Ahead(&s.Runs[0], v.F32[min(v.Index(of.Batch, of.H, of.I)+at, len(v.F32)):], v.Stride[backend.Seq], of.N, n)
	}
}

// fetchBias makes the product with keys prefetch the rows of the bias that the next tile of the task reads, unless it
// prefetches keys. Each row is in a memory page of its own, for which the kernel that adds them would wait.
func (sc *Scores) fetchBias(s *Space, t, next *Tile) {
	lo := t.here.Lo
	if next.index <= t.index {
		lo += BlockKeys
	}
	if sc.Listed == nil {
		s.fetchRows(&sc.bias, t, next, lo, BlockKeys)
	}
}

func (rows) modify(sc *Scores, s *Space, t *Tile, here Span, f func([]float32, backend.Position), dst []float32, factor float32) {
	x, n := sc.Layout.Kernels, here.Hi-here.Lo
	Fill(s.terms[:x.Lanes], factor)
	for lane := 0; lane < t.N; lane += x.Lanes {
		x.Transpose(s.Stage, BlockKeys, 1, s.S[lane:], x.Width, x.Width, n, s.One)
		for r := range min(x.Lanes, t.N-lane) {
			sc.modifyRow(s.Stage[r*BlockKeys:], t, lane+r, here, f)
		}
		x.Transpose(dst[lane:], x.Width, x.Width, s.Stage, BlockKeys, 1, n, s.terms[:])
	}
}

func (rows) adjust(sc *Scores, s *Space, t *Tile, here Span) {
	x, n := sc.Layout.Kernels, here.Hi-here.Lo
	edge, masked := t.Every.Clip(here.Lo, here.Hi) != here, !sc.mask.IsZero() || t.mixed
	if sc.plain && !edge && !t.mixed {
		return
	}
	copy(s.MX, t.sums.cur.m)
	if sc.Added {
		sc.add(s, t, here.Lo, n)
		if !edge && !masked {
			return
		}
		copy(s.MX, t.sums.cur.m)
	}
	if masked {
		sc.hide(s, t, here.Lo, n)
	}
	if edge {
		from, to := s.edge[0][:x.Width], s.edge[1][:x.Width]
		clear(from[t.N:])
		clear(to[t.N:])
		for r, span := range t.Spans[:t.N] {
			from[r] = int32(max(0, min(n, span.Lo-here.Lo)))
			to[r] = int32(max(0, min(n, span.Hi-here.Lo)))
		}
		first := 0
		if t.Every.Lo <= here.Lo { // all rows see the keys up to there
			first = max(0, min(t.Every.Hi, here.Hi)-here.Lo)
		}
		x.Edge(s.S[first*x.Width:], n-first, first, from, to)
	}
	x.ColumnMax(s.S, n, s.MX)
}

// add adds the biases to the scores of t for n keys from lo on, and computes the maxima.
func (sc *Scores) add(s *Space, t *Tile, lo, n int) {
	l, x := sc.Layout, sc.Layout.Kernels
	Fill(s.S[n*x.Width:RoundUp(n, x.Lanes)*x.Width], vec.NegInf) // fours and squares may reach there
	if sc.addSlopes(s, t, lo, n) {
		return
	}
	var table []float32 // the terms of a tile of one head that depend on the distance alone
	if t.I+t.N <= l.Dims.SeqQ && !sc.biasAlone && sc.Listed == nil {
		table = s.table[:n-1+x.Width]
		sc.distances(table, t.Batch, t.H, lo-t.I-(x.Width-1))
		if sc.bias.IsZero() { // each key reads a span of it that begins one element earlier
			slices.Reverse(table)
			x.Diagonal(s.S, table, n, s.MX)
			return
		}
	}
	// A term that is the only one, and has a row for each query row, is read in place.
	term, limit, alone := &sc.bias, float32(backend.MaxBias), sc.biasAlone
	if sc.bias.IsZero() {
		term, limit, alone = &sc.relative, backend.MaxRelative, l.Dims.SeqQ == 1 && sc.problem.Slopes == nil
	}
	for lane := 0; lane < x.Width; lane += x.Lanes {
		whole := 0
		if alone && sc.Listed == nil {
			if at, ld, ok := l.square(term, t, lane); ok && term.DType == backend.F32 && n >= x.Lanes {
				whole = n / x.Lanes * x.Lanes
				x.BiasSquares(s.S[lane:], term.F32[at+lo:], ld, whole/x.Lanes, limit, s.MX[lane:])
			}
		}
		if whole == n {
			continue
		}
		rows, padded := max(0, min(x.Lanes, t.N-lane)), RoundUp(n-whole, x.Lanes)
		for r, m := 0, 0; r < rows; r += m {
			h, i := l.Row(t.H, t.I, lane+r)
			row := s.Stage[r*BlockKeys:]
			if m = 1; table == nil && !sc.biasAlone || sc.Listed != nil {
				sc.AddedRow(s, row[:n-whole], t.Batch, h, i, lo+whole)
			} else {
				m = min(rows-r, l.Dims.SeqQ-i)
				sc.bias.Load(x, row, BlockKeys, t.Batch, h, i, m, lo+whole, n-whole)
			}
			for q := range m {
				row := row[q*BlockKeys:][:padded]
				if table != nil {
					x.Join(row, table[x.Width-1-lane-r-q+whole:])
				}
				clear(row[n-whole:])
			}
		}
		x.BiasSquares(s.S[whole*x.Width+lane:], s.Stage, BlockKeys, padded/x.Lanes, backend.MaxBias, s.MX[lane:])
	}
}

// addSlopes is add where slopes are the only biases. It returns false, and adds nothing,
// where the kernel would have to round distances or to bound products.
func (sc *Scores) addSlopes(s *Space, t *Tile, lo, n int) bool {
	x := sc.Layout.Kernels
	if !sc.bias.IsZero() || !sc.relative.IsZero() || sc.Listed != nil {
		return false
	}
	d, factors := s.table[:x.Width], s.table[x.Width:2*x.Width]
	clear(s.table[:2*x.Width])
	for r := range t.N {
		const most = 1<<24 - BlockKeys
		h, i := sc.Layout.Row(t.H, t.I, r)
		far, slope := lo-i-sc.problem.Visible.OffsetOf(t.Batch), sc.problem.Slope(t.Batch, h, sc.Layout.Dims.Heads)
		if far < -most || far > most || !(max(slope, -slope) <= 0x1p100) {
			return false
		}
		d[r], factors[r] = float32(far), -slope
	}
	x.Slopes(s.S, d, factors, CeilDiv(n, 4), s.MX)
	return true
}

// hide hides those of n keys from lo on that the mask or the block mask hides.
func (sc *Scores) hide(s *Space, t *Tile, lo, n int) {
	l, x := sc.Layout, sc.Layout.Kernels
	for lane := 0; lane < t.N; lane += x.Lanes {
		rows, whole := min(x.Lanes, t.N-lane), 0
		if at, ld, ok := l.square(&sc.mask, t, lane); ok && !t.mixed && n >= x.Lanes && sc.Listed == nil {
			whole = n / x.Lanes * x.Lanes // these are read in place; the rest is staged
			x.Hide(s.S[lane:], sc.mask.Bools[at+lo:], ld, whole/x.Lanes)
		}
		if whole == n {
			continue
		}
		for r, before := 0, [2]int{-1}; r < rows; r++ {
			h, i := l.Row(t.H, t.I, lane+r)
			seen := s.seen[r*BlockKeys:][:n-whole]
			if sc.mask.IsZero() && before == [2]int{h, i / sc.problem.BlockQ} {
				copy(seen, s.seen[(r-1)*BlockKeys:]) // rows of one block see the same
				continue
			}
			sc.seenRow(seen, t.Batch, h, i, lo+whole)
			if t.mixed {
				before = [2]int{h, i / sc.problem.BlockQ}
			}
		}
		x.Hide(s.S[whole*x.Width+lane:], s.seen[:], BlockKeys, CeilDiv(n-whole, x.Lanes))
	}
}

func (rows) drop(sc *Scores, s *Space, t *Tile, weights []float32, here Span) {
	l, n, first := sc.Layout, here.Hi-here.Lo, &sc.problem.Dropout.First
	x, batch, row, column := l.Kernels, uint32(first[backend.Batch]+t.Batch), uint32(first[backend.Seq]+t.I), uint32(first[backend.Dim]+here.Lo)
	switch {
	case l.Dims.SeqQ == 1 && sc.Listed == nil:
		for lane := 0; lane < t.N; lane += x.Lanes {
			s.Draw.Rows(x, batch, uint32(first[backend.Heads]+t.H+lane), row, x.Lanes)
			x.Drop(weights[lane:], n, &s.Draw, column)
		}
	case row%4 == 0 && t.I+t.N <= l.Dims.SeqQ && sc.Listed == nil:
		s.Draw.Tile(x, batch, uint32(first[backend.Heads]+t.H), row)
		x.Drop(weights, n, &s.Draw, column)
	default: // the kernel for tiles takes rows of one head, from a multiple of 4 on
		for r := range t.N {
			h, i := l.Row(t.H, t.I, r)
			strided.CopyElements(s.Stage, 1, weights[r:], x.Width, n)
			sc.DropRow(&s.Draw, s.Stage[:n], t.Batch, h, i, here.Lo)
			strided.CopyElements(weights[r:], x.Width, s.Stage, 1, n)
		}
	}
}
