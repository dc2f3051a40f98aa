package vec

// tileKernels are the kernels that depend on Width, less those of gradients.
type tileKernels struct {
	tiles      []registerTile // with rows in descending order; the last has 1
	weights    func(s *float32, fours int, m, mx, l, alpha *float32)
	edge       func(s *float32, rows, key int, lo, hi *int32)
	columnMax  func(s *float32, rows int, mx *float32)
	fold       func(o, x *float32, rows int, a, b *float32)
	biasSquare func(s, b *float32, ldb int, limit float32, mx *float32)
	joinSquare func(s, b *float32, ldb int, c *float32, ldc int, limit float32, mx *float32)
	diagonal   func(s, b *float32, rows int, mx *float32)
	slopes     func(s, d, factors *float32, fours int, mx *float32)
	hide       func(s *float32, mask *bool, ld, squares int)
	drop       func(s *float32, times int, d *uint64)
	// columns[n-1] computes Scores of n of the tile's columns, and valuesOfColumns takes
	// columnRows elements of the outputs. Both may be nil.
	columns         [][]registerTile
	valuesOfColumns func(o *float32, run *uintptr, steps *int, ldv int, p *float32, first, groups int, alpha *float32)
	// halfValues is Values with elements as lanes, or nil.
	halfValues func(o *float32, ldo int, runs *uintptr, n, ldv int, p *float32, first, d int, alpha *float32)
}

// registerTile is the kernels of Scores and Values for a number of rows: keys, or
// elements of the outputs.
type registerTile struct {
	rows   int
	scores func(s, k *float32, ldk int, run *uintptr, qt *float32, d, groups int, mx *float32)
	values func(o *float32, runs *uintptr, n, ldv int, p *float32, first, groups int, alpha *float32)
}

// eachTile calls do for each of t with the number of its tiles that n rows are divided into.
func eachTile(t []registerTile, n int, do func(t *registerTile, tiles int)) {
	for i := range t {
		tiles := n / t[i].rows
		// One large tile less may leave whole tiles of the next size.
		if tiles > 0 && i+2 < len(t) && n%t[i].rows%t[i+1].rows != 0 && (n%t[i].rows+t[i].rows)%t[i+1].rows == 0 {
			tiles--
		}
		if tiles > 0 {
			do(&t[i], tiles)
			n -= tiles * t[i].rows
		}
	}
}

// Narrow returns the table of x's tier with the smallest Width that is at least rows, or
// else x. It computes the same numbers, and lacks AddOuter and ScoreGradients.
func (x *Kernels) Narrow(rows int) *Kernels {
	for _, y := range x.narrow {
		if y.Width >= rows {
			return y
		}
	}
	return x
}

// RowOutputs reports whether Values has elements as lanes. A vector that the query rows of
// the tile do not fill is then used in full.
func (x *Kernels) RowOutputs() bool { return x.tile.halfValues != nil }

// valuesInRows is Values of n keys with RowOutputs.
func (x *Kernels) valuesInRows(o []float32, runs []Run, ldv int, p []float32, n, d int, alpha []float32) {
	ldo := (d + x.Lanes - 1) / x.Lanes * x.Lanes
	_ = o[(x.Width-1)*ldo+d-1]
	strip := 4 * x.Lanes // two vectors, each of twice as many elements
	most := max(1, budget/(2*x.Width*n)) * strip
	for c := 0; c < d; c += most {
		x.tile.halfValues(&o[c], 4*ldo, runs[0].words(), len(runs), 4*ldv, &p[0], 4*c, min(most, d-c), &alpha[0])
	}
}

// narrowed returns x with tiles of the given number of vectors of query rows.
func (x Kernels) narrowed(vectors int, kernels tileKernels) *Kernels {
	x.Width, x.tile = vectors*x.Lanes, kernels
	x.scoreGradients, x.outer = nil, [2][2]outerFunc{}
	return &x
}
