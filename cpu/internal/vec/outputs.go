package vec

import "unsafe"

// RowValues is Values for outputs [Width, d rounded up to Lanes]. It leaves out every hidden value. stairs.Up is 0.
func (x *Kernels) RowValues(o []float32, runs []Run, ldv int, p []float32, d int, stairs Stairs, alpha []float32) {
	w, n := x.Width, rowsOf(runs)
	ldo := (d + x.Lanes - 1) / x.Lanes * x.Lanes
	_, _, _ = o[(w-1)*ldo+d-1], p[n*w-1], alpha[w-1]
	x.hidden(runs, stairs)
	runs[0].n -= stairs.Down
	most := max(1, budget/(2*w*n)) * 32 // a multiple of a strip
	for c := 0; c < d; c += most {
		x.tile.rowValues(&o[c], 4*ldo, runs[0].words(), len(runs), 4*ldv, &p[0], 4*c, min(most, d-c), stairs.Down, &alpha[0])
	}
	runs[0].n += stairs.Down
}

// FoldRows computes dst = x·a + y·b, with each operation rounded, for outputs of RowValues. y and b may be nil: 0 is added.
//
//	dst [rows, d], rows ldd apart    x, y [rows, d]    a, b [rows]
//
// d is a multiple of Lanes.
func (x *Kernels) FoldRows(dst []float32, ldd int, o, y []float32, rows, d int, a, b []float32) {
	_, _, _ = dst[(rows-1)*ldd+d-1], o[rows*d-1], a[rows-1]
	if y != nil {
		_, _ = y[rows*d-1], b[rows-1]
	}
	x.tile.foldRows(&dst[0], 4*ldd, &o[0], unsafe.SliceData(y), rows, d/x.Lanes, &a[0], unsafe.SliceData(b))
}
