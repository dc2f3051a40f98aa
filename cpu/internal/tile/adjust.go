package tile

import (
	"slices"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/view"
)

// Adjust applies softcap, biases and masks to the score tile, which has the keys of here.
func (sc *Scores) Adjust(s *Space, t *Tile, here Span) {
	if sc.Layout.KeyLanes {
		for row := range t.N {
			sc.adjustLanes(s, t, row, here)
		}
		return
	}
	if edge := t.edge(here); edge || sc.changes(t) {
		sc.adjust(s, t, s.S, here, edge)
	}
}

// changes reports whether scores of t need more than the visibility rule.
func (sc *Scores) changes(t *Tile) bool { return sc.Cap > 0 || sc.Masked || sc.Added || t.mixed }

// edge reports whether the visibility rule hides some of keys from some row.
func (t *Tile) edge(keys Span) bool { return keys.Lo < t.Every.Lo || keys.Hi > t.Every.Hi }

// adjustLanes is Adjust for a row of a tile with keys as lanes.
func (sc *Scores) adjustLanes(s *Space, t *Tile, row int, here Span) {
	x, n := sc.Layout.Kernels, here.Hi-here.Lo
	scores := s.S[row*BlockKeys:][:RoundUp(n, x.Lanes)]
	if sc.Cap > 0 {
		x.Softcap(scores, sc.Cap)
		if s.Capped != nil {
			copy(s.Capped[row*BlockKeys:], scores)
		}
	}
	h, i := sc.Layout.Row(t.H, t.I, row)
	if sc.Added {
		sc.AddedRow(&s.Ramp, s.bias[:n], t.Batch, h, i, here.Lo)
		clear(s.bias[n:len(scores)])
		x.Bias(scores, s.bias)
	}
	if sc.Masked {
		sc.MaskRow(scores[:n], t.Batch, h, i, here.Lo)
	}
	Fill(scores[:max(0, min(n, t.Spans[row].Lo-here.Lo))], NegInf)
	Fill(scores[max(0, min(n, t.Spans[row].Hi-here.Lo)):], NegInf)
}

// adjust is Adjust for query rows as lanes. It computes the maxima of the lanes again, from
// s.before on. With edge set, the visibility rule hides some of keys.
func (sc *Scores) adjust(s *Space, t *Tile, scores []float32, keys Span, edge bool) {
	x, n := sc.Layout.Kernels, keys.Hi-keys.Lo
	if sc.Cap > 0 {
		x.Softcap(scores[:n*x.Width], sc.Cap)
		copy(s.Capped, scores[:n*x.Width])
	}
	copy(s.MX, s.before)
	if sc.Added {
		sc.add(s, t, scores, keys.Lo, n)
		if !edge && !t.mixed && sc.mask.IsZero() {
			return
		}
		copy(s.MX, s.before)
	}
	if !sc.mask.IsZero() {
		sc.hideMask(s, t, scores, keys.Lo, n)
	}
	if t.mixed {
		sc.hideBlocks(t, scores, keys)
	}
	if edge {
		from, to := s.edge[0][:x.Width], s.edge[1][:x.Width]
		clear(from[t.N:])
		clear(to[t.N:])
		for r, span := range t.Spans[:t.N] {
			from[r] = int32(max(0, min(n, span.Lo-keys.Lo)))
			to[r] = int32(max(0, min(n, span.Hi-keys.Lo)))
		}
		x.Edge(scores, n, 0, from, to)
	}
	x.ColumnMax(scores, n, s.MX)
}

// add adds the biases to the scores of t for n keys from lo on, and computes the
// maxima. Biases that depend on the distance between row and key alone come from one
// short table: each key reads a span of it that begins one element earlier.
func (sc *Scores) add(s *Space, t *Tile, scores []float32, lo, n int) {
	x := sc.Layout.Kernels
	// Fours and squares may reach beyond the keys.
	Fill(scores[n*x.Width:RoundUp(n, x.Lanes)*x.Width], NegInf)
	if sc.addSlopes(s, t, scores, lo, n) {
		return
	}
	var table []float32 // by distance, from that between the tile's last row and key lo on
	if t.I+t.N <= sc.Layout.Dims.SeqQ && !sc.biasAlone() {
		table = s.table[:n-1+x.Width]
		sc.distances(&s.Ramp, table, t.Batch, t.H, lo-t.I-(x.Width-1))
		if sc.bias.IsZero() {
			slices.Reverse(table)
			x.Diagonal(scores, table, n, s.MX)
			return
		}
	}
	for lane := 0; lane < x.Width; lane += x.Lanes {
		rows := max(0, min(x.Lanes, t.N-lane))
		whole := sc.addSquares(s, t, scores, table, lane, lo, n)
		if whole == n {
			continue
		}
		sc.stageAdded(s, t, table[min(whole, len(table)):], lane, rows, lo+whole, n-whole)
		for j := whole; j < n; j += x.Lanes {
			x.BiasSquare(scores[j*x.Width+lane:], s.Stage[j-whole:], BlockKeys, backend.MaxBias, s.MX[lane:])
		}
	}
}

// addSlopes is add where slopes are the only biases. It returns false, and adds nothing,
// where the kernel would have to round distances or to bound products.
func (sc *Scores) addSlopes(s *Space, t *Tile, scores []float32, lo, n int) bool {
	x := sc.Layout.Kernels
	if !sc.bias.IsZero() || !sc.relative.IsZero() {
		return false
	}
	d, factors := s.table[:x.Width], s.table[x.Width:2*x.Width]
	clear(s.table[:2*x.Width])
	for r := range t.N {
		const most = 1<<24 - BlockKeys
		h, i := sc.Layout.Row(t.H, t.I, r)
		far, slope := lo-i-sc.problem.Visible.Offset, sc.problem.Slope(t.Batch, h, sc.Layout.Dims.Heads)
		if far < -most || far > most || !(max(slope, -slope) <= 0x1p100) {
			return false
		}
		d[r], factors[r] = float32(far), -slope
	}
	x.Slopes(scores, d, factors, CeilDiv(n, 4), s.MX)
	return true
}

// addSquares adds the biases of the rows of t from lane on that kernels read in place, for
// keys from lo on, and returns the number of these keys. table is as in stageAdded.
func (sc *Scores) addSquares(s *Space, t *Tile, scores, table []float32, lane, lo, n int) int {
	l := sc.Layout
	x := l.Kernels
	whole, alone, absent := n/x.Lanes*x.Lanes, sc.biasAlone(), sc.bias.IsZero()
	bias, ld, biases := l.square(&sc.bias, t, lane)
	var relative []float32
	var ldr int
	relatives := false
	if l.Dims.SeqQ == 1 && sc.problem.Slopes == nil { // a relative bias has a row for each query row
		relative, ldr, relatives = l.square(&sc.relative, t, lane)
	}
	for j := 0; j < whole; j += x.Lanes {
		to, mx := scores[j*x.Width+lane:], s.MX[lane:]
		switch {
		case biases && alone:
			x.BiasSquare(to, bias[lo+j:], ld, backend.MaxBias, mx)
		case biases && table != nil:
			x.JoinSquare(to, bias[lo+j:], ld, table, x.Width-1-lane+j, -1, -NegInf, mx)
		case biases && relatives:
			x.JoinSquare(to, bias[lo+j:], ld, relative, lo+j, ldr, backend.MaxRelative, mx)
		case relatives && absent:
			x.BiasSquare(to, relative[lo+j:], ldr, backend.MaxRelative, mx)
		default:
			return 0
		}
	}
	return whole
}

// stageAdded writes the biases of some rows of t, from lane on, for n keys from lo on,
// to s.Stage: rows BlockKeys apart, with 0 up to the next multiple of Lanes. table, if
// not nil, holds the terms that depend on the distance.
func (sc *Scores) stageAdded(s *Space, t *Tile, table []float32, lane, rows, lo, n int) {
	x := sc.Layout.Kernels
	sc.Layout.RowsOf(t, lane, rows, func(r, h, i, m int) {
		together := table != nil || sc.biasAlone()
		if together {
			sc.bias.Load(x, s.Stage[r*BlockKeys:], BlockKeys, t.Batch, h, i, m, lo, n)
		}
		for q := r; q < r+m; q++ {
			row := s.Stage[q*BlockKeys:][:RoundUp(n, x.Lanes)]
			switch {
			case !together:
				sc.AddedRow(&s.Ramp, row[:n], t.Batch, h, i+q-r, lo)
			case table != nil:
				x.Join(row, table[x.Width-1-lane-q:][:len(row)])
			}
			clear(row[n:])
		}
	})
}

// hideMask hides those of n keys from lo on that the mask hides.
func (sc *Scores) hideMask(s *Space, t *Tile, scores []float32, lo, n int) {
	l := sc.Layout
	x, step := l.Kernels, sc.mask.Stride[backend.Dim]
	for lane := 0; lane < t.N; lane += x.Lanes {
		rows, whole := min(x.Lanes, t.N-lane), 0
		h, i := l.Row(t.H, t.I, lane)
		if ld, ok := l.rowDistance(&sc.mask, i); ok && step == 1 && rows == x.Lanes {
			// Whole squares are read in place; the rest is staged.
			if whole = n / x.Lanes * x.Lanes; whole > 0 {
				x.Hide(scores[lane:], sc.mask.Bools[sc.mask.Index(t.Batch, h, i)+lo:], ld, whole/x.Lanes)
			}
		}
		if whole == n {
			continue
		}
		l.RowsOf(t, lane, rows, func(r, h, i, m int) {
			for q := range m {
				from := sc.mask.Bools[sc.mask.Index(t.Batch, h, i+q)+(lo+whole)*step:]
				view.CopyElements(s.seen[(r+q)*BlockKeys:], 1, from, step, n-whole)
			}
		})
		x.Hide(scores[whole*x.Width+lane:], s.seen[:], BlockKeys, CeilDiv(n-whole, x.Lanes))
	}
}

// hideBlocks hides those of keys that the block mask hides.
func (sc *Scores) hideBlocks(t *Tile, scores []float32, keys Span) {
	w := sc.Layout.Kernels.Width
	sc.blockRows(t, func(r, h, i, m int) {
		for key := keys.Lo; key < keys.Hi; {
			block := key / sc.problem.BlockK
			end := min(keys.Hi, (block+1)*sc.problem.BlockK)
			if !sc.sees(t.Batch, h, i, block) {
				for ; key < end; key++ {
					Fill(scores[(key-keys.Lo)*w+r:(key-keys.Lo)*w+r+m], NegInf)
				}
			}
			key = end
		}
	})
}

// blockRows calls do for the rows of t that lie in one block of rows of the block mask at a
// time: rows r to r+m belong to block i of head h.
func (sc *Scores) blockRows(t *Tile, do func(r, h, i, m int)) {
	for r := 0; r < t.N; {
		head, row := sc.Layout.Row(t.H, t.I, r)
		block := row / sc.problem.BlockQ
		m := min(t.N-r, sc.Layout.Dims.SeqQ-row, (block+1)*sc.problem.BlockQ-row)
		do(r, head, block, m)
		r += m
	}
}

// Trim narrows keys to those that the block mask leaves to any row of t; the span is
// empty when there is none.
func (sc *Scores) Trim(t *Tile, keys Span) Span {
	t.mixed = false
	if sc.seen.IsZero() || keys.Empty() {
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
	t.mixed = t.mixed || left.Lo&3 != 0
	return left
}

// blockSeen reports whether some of the rows of t see a block of keys of the block mask, and
// whether all of them do.
func (sc *Scores) blockSeen(t *Tile, block int) (some, all bool) {
	all = true
	sc.blockRows(t, func(_, h, i, _ int) {
		sees := sc.sees(t.Batch, h, i, block)
		some, all = some || sees, all && sees
	})
	return some, all
}

// unhidden returns the spans of keys, at multiples of 4, that the block mask leaves
// to some row of t. Where that saves little it returns keys undivided.
func (sc *Scores) unhidden(s *Space, t *Tile, keys Span) []Span {
	if !t.mixed {
		return s.one(keys)
	}
	n, left, size := 0, 0, sc.problem.BlockK
	for block := keys.Lo / size; block*size < keys.Hi; block++ {
		if some, _ := sc.blockSeen(t, block); !some {
			continue
		}
		span := Span{max(keys.Lo, block*size&^3), min(keys.Hi, RoundUp((block+1)*size, 4))}
		if n > 0 && span.Lo <= s.unhidden[n-1].Hi {
			left += span.Hi - s.unhidden[n-1].Hi
			s.unhidden[n-1].Hi = span.Hi
			continue
		}
		left += span.Hi - span.Lo
		s.unhidden[n] = span
		n++
	}
	if 8*left > 7*(keys.Hi-keys.Lo) {
		return s.one(keys)
	}
	return s.unhidden[:n]
}
