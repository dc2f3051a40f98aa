package cpu

// stepQueryLanes takes tile t, with query rows as lanes, over the keys of here,
// which are in r; here.lo is a multiple of 4. The keys that the block mask leaves
// are packed without gaps.
func (a *attention) stepQueryLanes(b *workspace, p *taskRange, t *tile, r *keyRange, here span) {
	x, w, s := a.kernels, a.kernels.Width, b.s
	pieces, n, edges := a.pieces(b, p, t, here), 0, false
	b.before = t.cur.m
	copy(b.mx, t.cur.m)
	plain := a.cap == 0 && !a.masked && !a.added && !t.mixed
	diagonal := len(pieces) == 1 && a.cutSteps(b, t, here)
	for _, piece := range pieces {
		// Where only edges hide keys, those that all rows see need no adjustment.
		every := t.every.clip(piece.lo, piece.hi)
		every.lo = roundUp(every.lo, 4)
		if every.hi < piece.hi {
			every.hi &^= 3
		}
		if !plain || every.empty() {
			every = piece
		}
		for _, part := range [3]span{{piece.lo, every.lo}, every, {every.hi, piece.hi}} {
			if part.empty() {
				continue
			}
			if n > 0 {
				b.before = b.beta
				copy(b.before, b.mx)
			}
			b.s = s[n*w:]
			m := part.hi - part.lo
			edge := part.lo < t.every.lo || part.hi > t.every.hi
			if diagonal && edge {
				a.scoreColumns(b, p, t, r, part, here.lo)
			} else {
				runs, ldk := a.keys(r, b, p, part.lo, m)
				x.Scores(b.s, runs, ldk, t.q, a.d.Dim, b.mx)
			}
			if edge || !plain {
				a.adjust(b, p, t, part, edge)
			}
			n += m
			edges = edges || edge
		}
	}
	b.s = s
	fours := ceilDiv(n, 4)
	fill(s[n*w:fours*4*w], negInf)
	x.Weights(s, fours, t.cur.m, b.mx, t.cur.l, b.alpha)
	eachPiece := func(do func(piece span)) {
		n := 0
		for _, piece := range pieces {
			b.s = s[n*w:]
			do(piece)
			n += piece.hi - piece.lo
		}
		b.s = s
	}
	if a.problem.Dropout.P > 0 {
		eachPiece(func(piece span) { a.dropTile(b, p, t, piece.lo, piece.hi-piece.lo) })
	}
	clean := a.hiding || edges || t.mixed || r.replaced
	// Tiles that have fewer outputs than the block has values look at those instead. As in
	// stepKeyLanes, reading values once is cheaper than looking at them first.
	few := 2*(p.to-p.from)*w <= keyBlock
	if clean && few && !a.loadV && !r.checked && len(pieces) == 1 {
		o := t.cur.o
		copy(b.v, o)
		runs, ldv, _ := a.values(r, b, p, pieces, false)
		a.addValues(b, o, runs, ldv, diagonal)
		if !x.NonFinite(o, len(o), 1, len(o)) {
			return
		}
		copy(o, b.v)
	}
	runs, ldv, replaced := a.values(r, b, p, pieces, clean)
	a.addValues(b, t.cur.o, runs, ldv, diagonal)
	if replaced {
		eachPiece(func(piece span) { a.addVisibleNonFinite(p, t, piece, b.s) })
	}
}

// packTransposed writes elements [lo, lo+n) of the rows of t in src, transposed, to
// dst.
//
//	dst [n, Width]
func (e *engine) packTransposed(b *workspace, dst []float32, src *view, p *taskRange, t *tile, lo, n int) {
	x := e.kernels
	for lane := 0; lane < x.Width; lane += x.Lanes {
		rows := max(0, min(x.Lanes, t.n-lane))
		done := 0
		if from, ld, ok := e.square(src, p, t, lane); ok {
			// Whole squares are read in place; the rest is staged.
			for ; done+x.Lanes <= n; done += x.Lanes {
				x.Transpose(dst[done*x.Width+lane:], x.Width, from[lo+done:], ld, b.one)
			}
		}
		if done == n {
			continue
		}
		for r := range rows {
			h, i := e.row(t.h, t.i, lane+r)
			row := b.stage[r*keyBlock : r*keyBlock+n-done]
			src.pack(row, len(row), p.b, h, i, 1, lo+done, len(row))
		}
		for c := done; c < n; c += x.Lanes {
			x.Transpose(dst[c*x.Width+lane:], x.Width, b.stage[c-done:], keyBlock, b.one)
		}
	}
}

// writeTransposed writes the first n rows of the score tile b.s to elements
// [lo, lo+n) of the rows of t in dst, transposed.
func (e *engine) writeTransposed(b *workspace, dst *view, p *taskRange, t *tile, lo, n int) {
	x := e.kernels
	for lane := 0; lane < t.n; lane += x.Lanes {
		rows, done := min(x.Lanes, t.n-lane), 0
		if to, ld, ok := e.square(dst, p, t, lane); ok {
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
			h, i := e.row(t.h, t.i, lane+r)
			dst.store(b.stage[r*keyBlock:r*keyBlock+n-done], p.b, h, i, lo+done)
		}
	}
}
