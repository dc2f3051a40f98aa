package tile

// weighQueryLanes sets s.S to the weights of t, with query rows as lanes, for the keys of
// spans, without gaps between these, and updates its maxima and sums. With columns set they
// leave out keys as s.steps states. It reports whether the visibility rule hides some of them.
func (a *Attention) weighQueryLanes(s *Space, t *Tile, b *block, spans []Span, columns bool) (edges bool) {
	x, p, cur := a.Products.Layout.Kernels, &a.Products, &t.sums.cur
	n, changes := 0, a.Scores.changes(t)
	copy(s.MX, cur.m)
	for _, span := range spans {
		scores, edge := s.S[n*x.Width:], t.cuts(span)
		copy(s.before, s.MX)
		if columns {
			p.scoreColumns(s, t, b, span, scores)
		} else {
			runs, ldk := p.keys(s, b, t, span)
			x.Scores(scores, runs, ldk, t.q, p.Layout.Dims.Dim, s.MX)
		}
		if edge || changes {
			a.Scores.adjust(s, t, scores, span, edge)
		}
		n += span.Hi - span.Lo
		edges = edges || edge
	}
	fours := ceilDiv(n, 4)
	fill(s.S[n*x.Width:fours*4*x.Width], NegInf)
	x.Weights(s.S, fours, cur.m, s.MX, cur.l, s.Alpha)
	return edges
}

// weighKeyLanes sets s.S to the weights of t, with keys as lanes, for the keys of here, and
// updates its maxima and sums.
func (a *Attention) weighKeyLanes(s *Space, t *Tile, b *block, here Span) {
	x, cur := a.Products.Layout.Kernels, &t.sums.cur
	a.Products.keyLaneScores(s, b, t, here)
	a.Scores.Adjust(s, t, here)
	x.RowWeights(s.S, BlockKeys, roundUp(here.Hi-here.Lo, x.Lanes), t.N, cur.m, cur.l, s.Alpha)
}
