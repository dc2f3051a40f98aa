package vec

import "unsafe"

// Stairs are keys that only some rows of a tile see. They are in one run with the other keys.
//
//	row 0    x x x x x . .
//	row 1    . x x x x x .    Up 2 and Down 2
//	row 2    . . x x x x x
type Stairs struct {
	Up   int // the first keys: the n-th of them, from 0 and counted from the last, is hidden from the last n+1 rows
	Down int // the last keys: the n-th of them, from 0, is hidden from the first n+1 rows
}

// hidden returns how many of the first and of the last keys are hidden from a whole vector of rows, and so from one vector
// more after each Lanes of them; 0 without kernels for the other vectors alone.
func (x *Kernels) hidden(runs []Run, stairs Stairs) (up, down int) {
	if stairs == (Stairs{}) {
		return 0, 0
	}
	if len(runs) > 1 || stairs.Up < 0 || stairs.Down < 0 || stairs.Down >= x.Width || stairs.Up+stairs.Down > runs[0].n {
		panic("vec: more stairs than rows or keys of one run")
	}
	if x.tile.someScores == nil {
		return 0, 0
	}
	return max(0, stairs.Up-(x.Lanes-1)), max(0, stairs.Down-(x.Lanes-1))
}

// Scores computes a score tile and the running maximum of each lane:
//
//	S[key][lane] = Σ_d K[key][d]·Qᵀ[d][lane]    mx[lane] = max(mx[lane], max_key S)
//
//	s [n, Width]    k [n, d] of F32, rows ldk apart    qt [d, Width]    mx [Width]
//
// The n keys are those of all runs, of any length. A NaN among the scores of a lane leaves mx
// unspecified in that lane. With stairs, mx and the scores of hidden keys are unspecified.
func (x *Kernels) Scores(s []float32, runs []Run, ldk int, qt []float32, d int, stairs Stairs, mx []float32) {
	w, all, vectors := x.Width, x.tile.scores, x.Width/x.Lanes
	_, _, _ = qt[d*w-1], mx[w-1], s[rowsOf(runs)*w-1]
	up, down := x.hidden(runs, stairs)
	k := 0 // of the first run; where there are several, up and down are 0
	for seen := 1; up > 0; seen++ {
		if n := up - (vectors-1-seen)*x.Lanes; n > 0 {
			x.scores(x.tile.someScores, seen, s, k, n, &runs[0], ldk, qt, d, mx)
			s, k, up = s[n*w:], k+n, up-n
		}
	}
	for i := 0; i < len(runs); i++ {
		first, n := &runs[i], runs[i].n-k-down
		if all[0].rows == 2*pairedRun && paired(runs[i:]) {
			n, i = 2*n, i+1
		}
		x.scores(all, 0, s, k, n, first, ldk, qt, d, mx)
		s = s[n*w:]
	}
	for seen := vectors - 1; down > 0; seen-- {
		n, at := min(down, x.Lanes), (vectors-seen)*x.Lanes
		x.scores(x.tile.someScores, seen, s[at:], runs[0].n-down, n, &runs[0], ldk, qt[at:], d, mx[at:])
		s, down = s[n*w:], down-n
	}
}

// scores computes the scores of n keys of run, from key k on, with those of tiles that have so many vectors.
func (x *Kernels) scores(tiles []registerTile[scoresFunc], vectors int, s []float32, k, n int, run *Run, ldk int, qt []float32, d int, mx []float32) {
	for i, r := 0, 0; r < n; i++ {
		t := &tiles[i]
		if t.vectors != vectors {
			continue
		}
		for groups := tileCount(tiles, i, n-r); groups > 0; {
			some := min(groups, max(1, budget/(t.rows*(x.Width/x.Lanes)*d)))
			t.kernel(&s[r*x.Width], (*float32)(unsafe.Add(unsafe.Pointer(run.rows), 4*(k+r)*ldk)), 4*ldk, run.words(), &qt[0], d, some, &mx[0])
			r, groups = r+some*t.rows, groups-some
		}
	}
}

// Values adds a block of values to the outputs:
//
//	Oᵀ[d][lane] = alpha[lane]·Oᵀ[d][lane] + Σ_key V[key][d]·P[key][lane]
//
//	o [d, Width]    v [n, d] of F32, rows ldv apart    p [n, Width]    alpha [Width]
//
// The n values are those of all runs. Weights of hidden keys are 0; with stairs, Values leaves out most of their values.
func (x *Kernels) Values(o []float32, runs []Run, ldv int, p []float32, d int, stairs Stairs, alpha []float32) {
	w, n := x.Width, rowsOf(runs)
	_, _, _ = o[d*w-1], p[n*w-1], alpha[w-1]
	up, down := x.hidden(runs, stairs)
	first := &runs[0]
	rows := first.rows
	first.rows, first.n = (*byte)(unsafe.Add(unsafe.Pointer(rows), 4*up*ldv)), first.n-up-down
	c, all := 0, x.tile.values
	for i := range all {
		t := &all[i]
		for tiles := tileCount(all, i, d-c); tiles > 0; {
			some := min(tiles, max(1, budget/(t.rows*(w/x.Lanes)*n)))
			t.kernel(&o[c*w], first.words(), len(runs), 4*ldv, &p[0], 4*c, some, up, down, &alpha[0])
			c, tiles = c+some*t.rows, tiles-some
		}
	}
	first.rows, first.n = rows, first.n+up+down
}

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
