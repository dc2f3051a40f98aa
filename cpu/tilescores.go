package cpu

import (
	"slices"

	"github.com/seed90331342/attn/backend"
)

// adjust applies softcap, biases and masks to the score tile b.s, and computes the
// maxima of the lanes again.
func (a *attention) adjust(b *workspace, p *taskRange, t *tile, keys span, edge bool) {
	x, lo, hi, n := a.kernels, keys.lo, keys.hi, keys.hi-keys.lo
	s := b.s[:n*x.Width]
	if a.cap > 0 {
		x.Softcap(s, a.cap)
		copy(b.capped, s)
	}
	copy(b.mx, b.before)
	if a.added {
		a.add(b, p, t, lo, n)
		if !edge && !t.mixed && a.mask.isZero() {
			return
		}
		copy(b.mx, b.before)
	}
	if !a.mask.isZero() {
		a.hideMask(b, p, t, lo, n)
	}
	if t.mixed {
		a.hideBlocks(b, p, t, lo, hi)
	}
	if edge {
		a.hideEdge(b, t, lo, n)
	}
	x.ColumnMax(s, n, b.mx)
}

// hideEdge hides the keys that the visibility rule hides.
func (a *attention) hideEdge(b *workspace, t *tile, lo, n int) {
	from, to := b.lo[:a.kernels.Width], b.hi[:a.kernels.Width]
	clear(from[t.n:])
	clear(to[t.n:])
	for r, s := range t.spans[:t.n] {
		from[r] = int32(max(0, min(n, s.lo-lo)))
		to[r] = int32(max(0, min(n, s.hi-lo)))
	}
	a.kernels.Edge(b.s, n, 0, from, to)
}

// add adds the biases to the scores of t for n keys from lo on, and computes the
// maxima. Biases that depend on the distance between row and key alone come from one
// short table: each key reads a stretch of it that begins one element earlier.
func (a *attention) add(b *workspace, p *taskRange, t *tile, lo, n int) {
	x := a.kernels
	// Fours and squares may reach beyond the keys.
	fill(b.s[n*x.Width:roundUp(n, x.Lanes)*x.Width], negInf)
	if a.addSlopes(b, p, t, lo, n) {
		return
	}
	var table []float32 // by distance, from that between the tile's last row and key lo on
	if t.i+t.n <= a.d.SeqQ && !a.biasAlone() {
		table = b.table[:n-1+x.Width]
		a.distances(x, &b.ramp, table, p.b, t.h, lo-t.i-(x.Width-1))
		if a.bias.isZero() {
			slices.Reverse(table)
			x.Diagonal(b.s, table, n, b.mx)
			return
		}
	}
	for lane := 0; lane < x.Width; lane += x.Lanes {
		rows := max(0, min(x.Lanes, t.n-lane))
		whole := a.addSquares(b, p, t, table, lane, lo, n)
		if whole == n {
			continue
		}
		a.stageAdded(b, p, t, table[min(whole, len(table)):], lane, rows, lo+whole, n-whole)
		for j := whole; j < n; j += x.Lanes {
			x.BiasSquare(b.s[j*x.Width+lane:], b.stage[j-whole:], keyBlock, backend.MaxBias, b.mx[lane:])
		}
	}
}

// addSlopes is add where slopes are the only biases. It returns false, and adds nothing,
// where the kernel would have to round distances or to bound products.
func (a *attention) addSlopes(b *workspace, p *taskRange, t *tile, lo, n int) bool {
	x := a.kernels
	if !a.bias.isZero() || !a.relative.isZero() {
		return false
	}
	d, factors := b.table[:x.Width], b.table[x.Width:2*x.Width]
	clear(b.table[:2*x.Width])
	for r := range t.n {
		const most = 1<<24 - keyBlock
		h, i := a.row(t.h, t.i, r)
		far, slope := lo-i-a.problem.Visible.Offset, a.problem.Slope(p.b, h, a.heads)
		if far < -most || far > most || !(max(slope, -slope) <= 0x1p100) {
			return false
		}
		d[r], factors[r] = float32(far), -slope
	}
	x.Slopes(b.s, d, factors, ceilDiv(n, 4), b.mx)
	return true
}

// addSquares adds the biases of the rows of t from lane on that kernels read in place, for
// keys from lo on, and returns the number of these keys. table is as in stageAdded.
func (a *attention) addSquares(b *workspace, p *taskRange, t *tile, table []float32, lane, lo, n int) int {
	x := a.kernels
	whole, alone, absent := n/x.Lanes*x.Lanes, a.biasAlone(), a.bias.isZero()
	bias, ld, biases := a.square(&a.bias, p, t, lane)
	var relative []float32
	var ldr int
	relatives := false
	if a.d.SeqQ == 1 && a.problem.Slopes == nil { // a relative bias has a row for each query row
		relative, ldr, relatives = a.square(&a.relative, p, t, lane)
	}
	for j := 0; j < whole; j += x.Lanes {
		s, mx := b.s[j*x.Width+lane:], b.mx[lane:]
		switch {
		case biases && alone:
			x.BiasSquare(s, bias[lo+j:], ld, backend.MaxBias, mx)
		case biases && table != nil:
			x.JoinSquare(s, bias[lo+j:], ld, table, x.Width-1-lane+j, -1, -negInf, mx)
		case biases && relatives:
			x.JoinSquare(s, bias[lo+j:], ld, relative, lo+j, ldr, backend.MaxRelative, mx)
		case relatives && absent:
			x.BiasSquare(s, relative[lo+j:], ldr, backend.MaxRelative, mx)
		default:
			return 0
		}
	}
	return whole
}

// stageAdded writes the biases of some rows of t, from lane on, for n keys from lo on,
// to b.stage: rows keyBlock apart, with 0 up to the next multiple of Lanes. table, if
// not nil, holds the terms that depend on the distance.
func (a *attention) stageAdded(b *workspace, p *taskRange, t *tile, table []float32, lane, rows, lo, n int) {
	x := a.kernels
	a.rowsOf(t, lane, rows, func(r, h, i, m int) {
		together := table != nil || a.biasAlone()
		if together {
			a.bias.load(x, b.stage[r*keyBlock:], keyBlock, p.b, h, i, m, lo, n)
		}
		for q := r; q < r+m; q++ {
			row := b.stage[q*keyBlock:][:roundUp(n, x.Lanes)]
			switch {
			case !together:
				a.addedRow(x, &b.ramp, row[:n], p.b, h, i+q-r, lo)
			case table != nil:
				x.Join(row, table[x.Width-1-lane-q:][:len(row)])
			}
			clear(row[n:])
		}
	})
}

// hideMask hides those of n keys from lo on that the mask hides.
func (a *attention) hideMask(b *workspace, p *taskRange, t *tile, lo, n int) {
	x, step := a.kernels, a.mask.stride[backend.Dim]
	for lane := 0; lane < t.n; lane += x.Lanes {
		rows, whole := min(x.Lanes, t.n-lane), 0
		h, i := a.row(t.h, t.i, lane)
		if ld, ok := a.rowDistance(&a.mask, i); ok && step == 1 && rows == x.Lanes {
			// Whole squares are read in place; the rest is staged.
			if whole = n / x.Lanes * x.Lanes; whole > 0 {
				x.Hide(b.s[lane:], a.mask.bools[a.mask.index(p.b, h, i)+lo:], ld, whole/x.Lanes)
			}
		}
		if whole == n {
			continue
		}
		a.rowsOf(t, lane, rows, func(r, h, i, m int) {
			for q := range m {
				from := a.mask.bools[a.mask.index(p.b, h, i+q)+(lo+whole)*step:]
				copyElements(b.seen[(r+q)*keyBlock:], 1, from, step, n-whole)
			}
		})
		x.Hide(b.s[whole*x.Width+lane:], b.seen[:], keyBlock, ceilDiv(n-whole, x.Lanes))
	}
}

// hideBlocks hides the keys of [lo, hi) that the block mask hides.
func (a *attention) hideBlocks(b *workspace, p *taskRange, t *tile, lo, hi int) {
	w := a.kernels.Width
	a.blockRows(t.h, t.i, t.n, func(r, h, i, m int) {
		at, step := a.blockMask.index(p.b, h, i), a.blockMask.stride[backend.Dim]
		for key := lo; key < hi; {
			block := key / a.problem.BlockK
			end := min(hi, (block+1)*a.problem.BlockK)
			if !a.blockMask.bools[at+block*step] {
				for ; key < end; key++ {
					fill(b.s[(key-lo)*w+r:(key-lo)*w+r+m], negInf)
				}
			}
			key = end
		}
	})
}

// blockRows calls do for stretches of the n rows from row (h, i) on that lie in one
// block of rows: rows r to r+m belong to block i of head h.
func (a *attention) blockRows(h, i, n int, do func(r, h, i, m int)) {
	for r := 0; r < n; {
		head, row := a.row(h, i, r)
		block := row / a.problem.BlockQ
		m := min(n-r, a.d.SeqQ-row, (block+1)*a.problem.BlockQ-row)
		do(r, head, block, m)
		r += m
	}
}

// trim narrows keys to those that the block mask leaves to any row of t; the span is
// empty when there is none. mixed reports that the mask hides some of these keys from
// some of the rows.
func (a *attention) trim(batch int, t *tile, keys span) (left span, mixed bool) {
	left = span{keys.hi, keys.lo}
	if a.blockMask.isZero() || keys.lo >= keys.hi {
		return keys, false
	}
	gap := false
	for block := keys.lo / a.problem.BlockK; block*a.problem.BlockK < keys.hi; block++ {
		some, all := a.blockSeen(batch, t.h, t.i, t.n, block)
		if !some {
			gap = left.lo < left.hi
			continue
		}
		mixed = mixed || !all || gap
		left = span{min(left.lo, max(keys.lo, block*a.problem.BlockK)), min(keys.hi, (block+1)*a.problem.BlockK)}
	}
	return left, mixed || left.lo&3 != 0
}

// blockSeen reports whether some of the n rows from row (h, i) on see a block of keys,
// and whether all of them do.
func (a *attention) blockSeen(batch, h, i, n, block int) (some, all bool) {
	all = true
	a.blockRows(h, i, n, func(_, h, i, _ int) {
		sees := a.blockMask.bools[a.blockMask.index(batch, h, i)+block*a.blockMask.stride[backend.Dim]]
		some, all = some || sees, all && sees
	})
	return some, all
}

// pieces returns the stretches of keys, at multiples of 4, that the block mask leaves
// to some row of t. Where that saves little it returns keys undivided.
func (a *attention) pieces(b *workspace, p *taskRange, t *tile, keys span) []span {
	b.pieces[0] = keys
	if !t.mixed {
		return b.pieces[:1]
	}
	n, left := 0, 0
	for block := keys.lo / a.problem.BlockK; block*a.problem.BlockK < keys.hi; block++ {
		if some, _ := a.blockSeen(p.b, t.h, t.i, t.n, block); !some {
			continue
		}
		piece := span{max(keys.lo, block*a.problem.BlockK&^3), min(keys.hi, roundUp((block+1)*a.problem.BlockK, 4))}
		if n > 0 && piece.lo <= b.pieces[n-1].hi {
			left += piece.hi - b.pieces[n-1].hi
			b.pieces[n-1].hi = piece.hi
			continue
		}
		left += piece.hi - piece.lo
		b.pieces[n] = piece
		n++
	}
	if 8*left > 7*(keys.hi-keys.lo) {
		b.pieces[0], n = keys, 1
	}
	return b.pieces[:n]
}

// dropTile applies dropout to the weights of t for n keys from lo on.
func (a *attention) dropTile(b *workspace, p *taskRange, t *tile, lo, n int) {
	d, x := &a.problem.Dropout, a.kernels
	first := func(axis, n int) uint32 { return uint32(d.First[axis] + n) }
	if t.i+t.n <= a.d.SeqQ && first(backend.Seq, t.i)%4 == 0 {
		b.draw.Tile(x, first(backend.Batch, p.b), first(backend.Heads, t.h), first(backend.Seq, t.i))
		x.Drop(b.s, n, &b.draw, first(backend.Dim, lo))
		return
	}
	if a.d.SeqQ == 1 {
		for lane := 0; lane < t.n; lane += x.Lanes {
			b.draw.Heads(x, first(backend.Batch, p.b), first(backend.Heads, t.h+lane), first(backend.Seq, 0))
			x.DropHeads(b.s[lane:], n, &b.draw, first(backend.Dim, lo))
		}
		return
	}
	// Other rows that do not begin at a multiple of 4 are processed one at a time.
	for lane := 0; lane < t.n; lane += x.Lanes {
		for j := 0; j < n; j += x.Lanes {
			x.Transpose(b.stage[j:], keyBlock, b.s[j*x.Width+lane:], x.Width, b.one)
		}
		a.rowsOf(t, lane, min(x.Lanes, t.n-lane), func(r, h, i, m int) {
			for q := range m {
				row := b.stage[(r+q)*keyBlock:]
				a.dropRow(x, &b.draw, row[:n], p.b, h, i+q, lo)
			}
		})
		for j := 0; j < n; j += x.Lanes {
			if n-j >= x.Lanes {
				x.Transpose(b.s[j*x.Width+lane:], x.Width, b.stage[j:], keyBlock, b.one)
				continue
			}
			x.Transpose(b.square[:], x.Lanes, b.stage[j:], keyBlock, b.one)
			for c := range n - j { // elements after the keys do not change
				copy(b.s[(j+c)*x.Width+lane:], b.square[c*x.Lanes:(c+1)*x.Lanes])
			}
		}
	}
}
