package tile

// maxColumns is the largest number of columns of a tile, the vectors of its lanes.
const maxColumns = 4

// columnSteps is the number of keys of each step of vec.Kernels.ValuesOf.
type columnSteps [2*maxColumns - 1]int

// findColumns finds the keys that each column of t sees. A column is one vector of query rows;
// only AVX-512 tiles have columns, and without them this does nothing. It sets t.diagonal where
// some columns see fewer than t and they begin and end one after another.
func (l *Layout) findColumns(t *Tile) {
	before := Span{t.Keys.Lo, t.Keys.Lo}
	for c := range l.Kernels.Columns() {
		column := Span{l.Dims.SeqK, 0}
		for _, s := range t.Spans[:t.N][min(t.N, c*l.Kernels.Lanes):min(t.N, (c+1)*l.Kernels.Lanes)] {
			column = column.union(s)
		}
		if column.Empty() {
			column = before
		}
		if column.Lo < before.Lo || column.Hi < before.Hi {
			t.diagonal = false
			return
		}
		t.diagonal = t.diagonal || column != t.Keys
		t.columns[c], before = column, column
	}
}

// findSteps sets s.steps to the steps in which the columns of t take the keys of here, and
// reports whether some columns do not take all of them.
func (p *Products) findSteps(s *Space, t *Tile, here Span) bool {
	if !t.diagonal {
		return false
	}
	n, columns := p.Layout.Kernels.Columns(), t.columns
	for c := range n {
		span := &columns[c]
		span.Lo = max(here.Lo, min(here.Hi, span.Lo&^3))
		span.Hi = max(here.Lo, min(here.Hi, RoundUp(span.Hi, 4)))
	}
	last := columns[n-1].Lo // no column ends before all have begun
	s.steps[n-1] = max(columns[0].Hi, last) - last
	for c := 1; c < n; c++ {
		s.steps[c-1] = columns[c].Lo - columns[c-1].Lo
		s.steps[n-1+c] = max(columns[c].Hi, last) - max(columns[c-1].Hi, last)
	}
	return s.steps[n-1] < here.Hi-here.Lo
}

// scoreColumns is Scores for the keys of here, in the steps of s.steps. An edge hides what it
// leaves out.
func (p *Products) scoreColumns(s *Space, t *Tile, b *block, here Span, scores []float32) {
	x, lo := p.Layout.Kernels, here.Lo
	n := x.Columns()
	for step, keys := range s.steps[:2*n-1] {
		if keys > 0 {
			runs, ldk := p.keys(s, b, t, Span{lo, lo + keys})
			x.ScoresOf(max(0, step+1-n), min(step+1, n), scores[(lo-here.Lo)*x.Width:], runs, ldk, t.q, p.Layout.Dims.Dim, s.MX)
		}
		lo += keys
	}
}
