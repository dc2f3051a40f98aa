package tile

// weighQueryLanes sets s.S to the weights of t, with query rows as lanes, for the keys of
// spans, without gaps between these, and updates its maxima and sums. With columns set they
// leave out keys as s.steps states. It reports whether the visibility rule hides some of them.
func (a *Attention) weighQueryLanes(s *Space, t *Tile, b *block, spans []Span, columns bool) (edges bool) {
	x, p, cur := a.Products.Layout.Kernels, &a.Products, &t.sums.cur
	n, plain := 0, !a.Scores.changes(t)
	copy(s.MX, cur.m)
	for _, span := range spans {
		for _, some := range t.split(span, plain) {
			if some.Empty() {
				continue
			}
			scores, edge := s.S[n*x.Width:], t.cuts(some)
			if edge || !plain {
				copy(s.before, s.MX)
			}
			if columns && edge {
				p.scoreColumns(s, t, b, some, spans[0].Lo, scores)
			} else {
				runs, ldk := p.keys(s, b, t, some)
				x.Scores(scores, runs, ldk, t.q, p.Layout.Dims.Dim, s.MX)
			}
			if edge || !plain {
				a.Scores.adjust(s, t, scores, some, edge)
			}
			n += some.Hi - some.Lo
			edges = edges || edge
		}
	}
	fours := ceilDiv(n, 4)
	fill(s.S[n*x.Width:fours*4*x.Width], NegInf)
	x.Weights(s.S, fours, cur.m, s.MX, cur.l, s.Alpha)
	return edges
}

// split divides span into the keys before, among and after those that all rows of t see. Where
// only edges hide keys, those between need no adjustment.
func (t *Tile) split(span Span, plain bool) [3]Span {
	every := t.Every.Clip(span.Lo, span.Hi)
	every.Lo = roundUp(every.Lo, 4)
	if every.Hi < span.Hi {
		every.Hi &^= 3
	}
	if !plain || every.Empty() {
		every = span
	}
	return [3]Span{{span.Lo, every.Lo}, every, {every.Hi, span.Hi}}
}

// weighKeyLanes sets s.S to the weights of t, with keys as lanes, for the keys of here, and
// updates its maxima and sums.
func (a *Attention) weighKeyLanes(s *Space, t *Tile, b *block, here Span) {
	x, cur := a.Products.Layout.Kernels, &t.sums.cur
	a.Products.keyLaneScores(s, b, t, here)
	a.Scores.Adjust(s, t, here)
	x.RowWeights(s.S, BlockKeys, roundUp(here.Hi-here.Lo, x.Lanes), t.N, cur.m, cur.l, s.Alpha)
}
