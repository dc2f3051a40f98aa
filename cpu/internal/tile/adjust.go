package tile

import (
	"slices"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/vec"
	"github.com/seed90331342/attn/cpu/internal/view"
)

// Adjust applies score mod, softcap, biases and masks to the score tile, which has the keys of here.
// With query rows as lanes it also computes the maxima again, from those of t's sums on.
func (sc *Scores) Adjust(s *Space, t *Tile, here Span) {
	l, mod := sc.Layout, sc.problem.ScoreMod
	Fill(s.Chain, 1)
	if mod != nil {
		if s.Chain != nil {
			l.form.modify(sc, s, t, here, mod.Derivative, s.Chain, 1)
		}
		l.form.modify(sc, s, t, here, mod.Go, s.S, sc.After)
	}
	if sc.Cap > 0 {
		scores, inv := s.S[:l.Floats(t, here.Hi-here.Lo)], 1/sc.Cap
		sc.Softcap(s, scores)
		for i, y := range scores[:min(len(s.Chain), len(scores))] {
			tanh := y * inv
			s.Chain[i] *= (1 - tanh) * (1 + tanh)
		}
	}
	l.form.adjust(sc, s, t, here)
}

// modifyRow applies f to the scores of row r of t and the keys of here that it sees.
func (sc *Scores) modifyRow(scores []float32, t *Tile, r int, here Span, f func([]float32, backend.Position)) {
	h, i := sc.Layout.Row(t.H, t.I, r)
	for j, m, end := max(here.Lo, t.Spans[r].Lo), 0, min(here.Hi, t.Spans[r].Hi); j < end; j += m {
		key := 0
		key, m = sc.adjacent(t.Batch, j, end-j)
		sc.problem.Modify(f, scores[j-here.Lo:][:m], t.Batch, h, i, key)
	}
}

func (rows) modify(sc *Scores, s *Space, t *Tile, here Span, f func([]float32, backend.Position), dst []float32, factor float32) {
	x, n := sc.Layout.Kernels, here.Hi-here.Lo
	Fill(s.terms[:x.Lanes], factor)
	for lane := 0; lane < t.N; lane += x.Lanes {
		Turn(x, s.Stage, BlockKeys, 1, s.S[lane:], x.Width, x.Width, n, s.One)
		for r := range min(x.Lanes, t.N-lane) {
			sc.modifyRow(s.Stage[r*BlockKeys:], t, lane+r, here, f)
		}
		Turn(x, dst[lane:], x.Width, x.Width, s.Stage, BlockKeys, 1, n, s.terms[:])
	}
}

func (rows) adjust(sc *Scores, s *Space, t *Tile, here Span) {
	x, n := sc.Layout.Kernels, here.Hi-here.Lo
	edge, masked := t.edge(here), !sc.mask.IsZero() || t.mixed
	if !edge && !masked && !sc.Added && sc.Cap == 0 && sc.problem.ScoreMod == nil {
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
		x.Edge(s.S, n, 0, from, to)
	}
	x.ColumnMax(s.S, n, s.MX)
}

// Softcap applies the softcap to scores, of which a -Inf of the score mod stays. The length is a multiple of Lanes.
func (sc *Scores) Softcap(s *Space, scores []float32) {
	for mod, n := sc.problem.ScoreMod != nil, 0; len(scores) > 0; scores = scores[n:] {
		if n = len(scores); mod {
			n = copy(s.terms[:], scores)
		}
		sc.Layout.Kernels.Softcap(scores[:n], sc.Cap)
		for c := 0; mod && c < n; c++ {
			if s.terms[c] == vec.NegInf {
				scores[c] = vec.NegInf
			}
		}
	}
}

// edge reports whether the visibility rule hides some of keys from some row.
func (t *Tile) edge(keys Span) bool { return keys.Lo < t.Every.Lo || keys.Hi > t.Every.Hi }

// add adds the biases to the scores of t for n keys from lo on, and computes the maxima. Query rows are lanes.
func (sc *Scores) add(s *Space, t *Tile, lo, n int) {
	l := sc.Layout
	x := l.Kernels
	Fill(s.S[n*x.Width:RoundUp(n, x.Lanes)*x.Width], vec.NegInf) // fours and squares may reach there
	if sc.addSlopes(s, t, lo, n) {
		return
	}
	var table []float32 // the terms of a tile of one head that depend on the distance alone
	if t.I+t.N <= l.Dims.SeqQ && !sc.biasAlone() && sc.Listed == nil {
		table = s.table[:n-1+x.Width]
		sc.distances(table, t.Batch, t.H, lo-t.I-(x.Width-1))
		if sc.bias.IsZero() { // each key reads a span of it that begins one element earlier
			slices.Reverse(table)
			x.Diagonal(s.S, table, n, s.MX)
			return
		}
	}
	// A term that is the only one, and has a row for each query row, is read in place.
	term, limit, alone := &sc.bias, float32(backend.MaxBias), sc.biasAlone()
	if sc.bias.IsZero() {
		term, limit, alone = &sc.relative, backend.MaxRelative, l.Dims.SeqQ == 1 && sc.problem.Slopes == nil
	}
	for lane := 0; lane < x.Width; lane += x.Lanes {
		whole := 0
		if alone && sc.Listed == nil {
			if from, ld, ok := l.square(term, t, lane); ok && n >= x.Lanes {
				whole = n / x.Lanes * x.Lanes
				x.BiasSquares(s.S[lane:], from[lo:], ld, whole/x.Lanes, limit, s.MX[lane:])
			}
		}
		if whole == n {
			continue
		}
		rows, padded := max(0, min(x.Lanes, t.N-lane)), RoundUp(n-whole, x.Lanes)
		for r, m := 0, 0; r < rows; r += m {
			h, i := l.Row(t.H, t.I, lane+r)
			row := s.Stage[r*BlockKeys:]
			if m = 1; table == nil && !sc.biasAlone() || sc.Listed != nil {
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

// fetchBias lets the product with keys, unless it prefetches the next ones, prefetch the rows of a bias that
// the next tile of the task reads. They are in as many pages: the kernel that adds them would wait.
func (sc *Scores) fetchBias(s *Space, t, next *Tile) {
	lo := t.here.Lo
	if next.index <= t.index {
		lo += BlockKeys
	}
	if v := &sc.bias; t.here.Lo+BlockKeys >= s.block.end && len(s.runs) == 1 && sc.biasAlone() && sc.Listed == nil && v.DType == backend.F32 && v.Stride[backend.Dim] == 1 {
		vec.Ahead(&s.runs[0], v.F32[min(v.Index(next.Batch, next.H, next.I)+lo, len(v.F32)):], v.Stride[backend.Seq], next.N, BlockKeys)
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

// hide hides those of n keys from lo on that the mask or the block mask hides. Query rows are lanes.
func (sc *Scores) hide(s *Space, t *Tile, lo, n int) {
	l := sc.Layout
	x := l.Kernels
	for lane := 0; lane < t.N; lane += x.Lanes {
		rows, whole := min(x.Lanes, t.N-lane), 0
		h, i := l.Row(t.H, t.I, lane)
		if ld, ok := l.rowDistance(&sc.mask, i); ok && !t.mixed && rows == x.Lanes && sc.mask.Stride[backend.Dim] == 1 && sc.Listed == nil {
			// Whole squares are read in place; the rest is staged.
			if whole = n / x.Lanes * x.Lanes; whole > 0 {
				x.Hide(s.S[lane:], sc.mask.Bools[sc.mask.Index(t.Batch, h, i)+lo:], ld, whole/x.Lanes)
			}
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

// MaskRow writes -Inf to the scores of row i, with the keys from j on, that the mask or the block mask hides. There
// are at most BlockKeys. The elements up to whole vectors, for which scores has room, become unspecified.
func (sc *Scores) MaskRow(s *Space, scores []float32, b, h, i, j int) {
	sc.seenRow(s.seen[:len(scores)], b, h, i, j)
	x := sc.Layout.Kernels
	x.HideRow(scores[:RoundUp(len(scores), x.Lanes)], s.seen[:])
}

// seenRow sets seen to whether the mask and the block mask show the keys from j on to row i.
func (sc *Scores) seenRow(seen []bool, b, h, i, j int) {
	for m := 0; len(seen) > 0; seen, j = seen[m:], j+m {
		key := 0
		key, m = sc.adjacent(b, j, len(seen))
		sc.seenKeys(seen[:m], b, h, i, key)
	}
}

// seenKeys is seenRow for adjacent positions.
func (sc *Scores) seenKeys(seen []bool, b, h, i, j int) {
	if sc.mask.IsZero() {
		for n := range seen {
			seen[n] = true
		}
	} else {
		step := sc.mask.Stride[backend.Dim]
		view.CopyElements(seen, 1, sc.mask.Bools[sc.mask.Index(b, h, i)+j*step:], step, len(seen))
	}
	if sc.blocks.IsZero() {
		return
	}
	for n := 0; n < len(seen); {
		block := (j + n) / sc.problem.BlockK
		end := min(len(seen), (block+1)*sc.problem.BlockK-j)
		if !sc.sees(b, h, i/sc.problem.BlockQ, block) {
			clear(seen[n:end])
		}
		n = end
	}
}

// Trim narrows keys to those that the block mask leaves to any row of t; the span is empty when there is none.
func (sc *Scores) Trim(t *Tile, keys Span) Span {
	t.mixed = false
	if sc.blocks.IsZero() || keys.Empty() {
		return keys
	}
	if sc.Listed != nil {
		t.mixed = true
		return keys
	}
	left, gap, size := Span{keys.Hi, keys.Lo}, false, sc.problem.BlockK
	for block := keys.Lo / size; block*size < keys.Hi; block++ {
		some, all := sc.blockSeen(t, block)
		if !some {
			gap = !left.Empty()
			continue
		}
		t.mixed = t.mixed || !all || gap
		left = Span{min(left.Lo, max(keys.Lo, block*size)), min(keys.Hi, (block+1)*size)}
	}
	t.mixed = t.mixed || left.Lo%maxFirst > 0
	return left
}

// blockSeen reports whether some of the rows of t see a block of keys of the block mask, and whether all of them do.
func (sc *Scores) blockSeen(t *Tile, block int) (some, all bool) {
	all = true
	for r := 0; r < t.N; {
		h, i := sc.Layout.Row(t.H, t.I, r)
		rows := i / sc.problem.BlockQ
		sees := sc.sees(t.Batch, h, rows, block)
		some, all = some || sees, all && sees
		r += min(sc.Layout.Dims.SeqQ-i, (rows+1)*sc.problem.BlockQ-i)
	}
	return some, all
}

// sees reports whether the block mask shows a block of keys to a block of rows.
func (sc *Scores) sees(b, h, rows, keys int) bool {
	return sc.blocks.Bools[sc.blocks.Index(b, h, rows)+keys*sc.blocks.Stride[backend.Dim]]
}
