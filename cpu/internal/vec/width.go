package vec

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

// Columns returns the number of columns of a tile, the vectors of its lanes, or 0 if ScoresOf
// and ValuesOf take all of them only. Where no row of a column sees some keys these can leave
// out the column.
func (x *Kernels) Columns() int {
	if x.tile.columns == nil {
		return 0
	}
	return x.Width / x.Lanes
}

// ValuesOf is Values of one run where not all keys have all columns: steps[0] keys have column
// 0 alone, the steps[1] keys after them columns 0 and 1, and so on until all columns take part;
// after those keys column 0 leaves, then column 1, and so on. The weights of what is left out
// must be 0.
//
//	steps [2·Columns - 1]
func (x *Kernels) ValuesOf(steps []int, o []float32, run []Run, ldv int, p []float32, d int, alpha []float32) {
	w := x.Width
	_, _, _, _ = o[d*w-1], p[run[0].n*w-1], alpha[w-1], steps[2*x.Columns()-2]
	const columnRows = 4 // elements that valuesOfColumns computes at once
	most := max(1, budget/(columnRows*x.Columns()*run[0].n))
	c := 0
	for c+columnRows <= d {
		some := min(most, (d-c)/columnRows)
		x.tile.valuesOfColumns(&o[c*w], run[0].words(), &steps[0], 4*ldv, &p[0], 4*c, some, &alpha[0])
		c += some * columnRows
	}
	if c < d {
		x.tile.tiles[len(x.tile.tiles)-1].values(&o[c*w], run[0].words(), 1, 4*ldv, &p[0], 4*c, d-c, &alpha[0])
	}
}
