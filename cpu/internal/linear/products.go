package linear

import (
	"github.com/seed90331342/attn/cpu/internal/tile"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// tableOf returns the table of the tier of x whose tiles cover n lanes with the fewest empty ones, and how many of them do.
func tableOf(x *vec.Kernels, n int) (table *vec.Kernels, tiles int) {
	for y := x; ; y = x.Narrow(y.Width / 2) {
		if lanes := tile.RoundUp(n, y.Width); table == nil || lanes < tiles*table.Width && y.Lanes == x.Lanes {
			table, tiles = y, lanes/y.Width
		}
		if x.Narrow(y.Width/2).Width >= y.Width {
			return table, tiles
		}
	}
}

// mix computes o = alpha·o + p·v.
//
//	o [rows, cols]    p [rows, n]    v [n, cols]    alpha [rows]
func (r *room) mix(o []float32, ldo int, v []float32, ldv, n int, p []float32, ldp int, alpha []float32, rows, cols int) {
	r.kernels.Mix(vec.F32, o, ldo, r.space.Rows(v, ldv, n, cols), ldv, p, ldp, alpha, rows, cols)
}

// scores computes o = rows·x with a strip x.
//
//	o [n, Width]    rows [n, d]    x [d, Width]
func (r *room) scores(y *vec.Kernels, o, rows []float32, ld, n int, x []float32, d int) {
	if y.OnlyKeyLanes { // which lacks Scores
		clear(o[:n*y.Width])
		r.mix(o, y.Width, x, y.Width, d, rows, ld, r.zero, n, y.Width)
		return
	}
	y.Scores(o, r.space.Rows(rows, ld, n, d), ld, x, d, vec.Stairs{}, r.mx)
}

// addOuter computes o = alpha·o + rowsᵀ·x with strips o and x.
//
//	o [K, Width]    rows [n, K]    x [n, Width]    alpha [Width], of one number
func (r *room) addOuter(o, x, rows []float32, n int) {
	y := r.columns
	if !y.OnlyKeyLanes {
		y.Values(o, r.space.Rows(rows, r.lk, n, r.dk), r.lk, x, r.dk, vec.Stairs{}, r.alpha)
		return
	}
	r.turn(rows, n)
	tile.Fill(r.alpha, r.alpha[0])
	for j := 0; j < n; j += r.tokens.Width {
		alpha := r.one
		if j == 0 {
			alpha = r.alpha
		}
		r.mix(o, y.Width, x[j*y.Width:], y.Width, min(r.tokens.Width, n-j), r.kt[j*r.lk:], r.tokens.Width, alpha, r.dk, y.Width)
	}
}

// turn sets kt to the transpose of n rows, in strips of tokens [lk, Width].
func (r *room) turn(rows []float32, n int) {
	x, w := r.kernels, r.tokens.Width
	for i := 0; i < n; i += w {
		strip := r.kt[i*r.lk:]
		for lane := 0; lane < min(w, n-i); lane += x.Lanes {
			x.Transpose(strip[lane:], w, w, rows[(i+lane)*r.lk:], r.lk, 1, r.lk, r.one)
		}
	}
}
