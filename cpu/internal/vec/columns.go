package vec

// columnRows is the number of elements of the outputs that valuesOfColumns computes at once.
const columnRows = 4

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
