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
