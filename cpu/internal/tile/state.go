package tile

import "github.com/seed90331342/attn/cpu/internal/vec"

// state is the online softmax of some rows over some keys: with m the largest score, in units of log2 e,
//
//	l = Σ 2^(s - m)    o = Σ 2^(s - m)·v
//
// o is [Dv, Width], or with Layout.RowOutputs [rows, DimV].
type state struct{ o, m, l []float32 }

// stateIn returns a state in mem, which holds o, then m, then l.
func (l *Layout) stateIn(mem []float32) state {
	o, rows := l.OutputFloats(), l.Kernels.Width
	return state{mem[:o], mem[o : o+rows], mem[o+rows : o+2*rows]}
}

// reset sets s to the sum over no keys.
func (s *state) reset() {
	clear(s.o)
	clear(s.l)
	Fill(s.m, vec.NoScore)
}

// fold adds y, the sums over later keys, to x:
//
//	m = max(x.m, y.m)    a = 2^(x.m - m)    b = 2^(y.m - m)
//	x.o = a·x.o + b·y.o    x.l = a·x.l + b·y.l    x.m = m
//
// with each operation rounded. When one side has seen no key, the result has the bits of the other side.
func (l *Layout) fold(s *Space, x, y *state) {
	a, b := s.Alpha, s.beta
	for i, m := range x.m {
		x.m[i] = max(m, y.m[i])
		a[i], b[i] = m-x.m[i], y.m[i]-x.m[i]
	}
	l.Kernels.Exp2(a, 0)
	l.Kernels.Exp2(b, 0)
	for i := range x.l {
		x.l[i] = float32(a[i]*x.l[i]) + float32(b[i]*y.l[i])
	}
	l.add(x.o, y.o, a, b)
}

// add computes x = a·x + b·y for each row of outputs.
func (l *Layout) add(x, y, a, b []float32) {
	if !l.RowOutputs {
		l.Kernels.Fold(x, y, len(x)/l.Kernels.Width, a, b)
		return
	}
	for r := range len(x) / l.DimV {
		for i := r * l.DimV; i < (r+1)*l.DimV; i++ {
			x[i] = float32(a[r]*x[i]) + float32(b[r]*y[i])
		}
	}
}

// multiply computes x = a·x for each row of outputs.
func (l *Layout) multiply(x, a []float32) {
	for i := range x {
		if l.RowOutputs {
			x[i] *= a[i/l.DimV]
		} else {
			x[i] *= a[i%l.Kernels.Width]
		}
	}
}

// sums are the states of the rows of a tile between blocks: cur is the sum over the last
// SumKeys keys, all that over the keys of its shard before them. merged is the result of the
// shards before, with O in o and LSE in m, if a call has several.
type sums struct {
	cur, all, merged state
	at               int  // the index of cur among the sums of a row; -1 before the first
	hasAll           bool // all has seen keys
}

// close adds cur to all.
func (l *Layout) close(s *Space, u *sums) {
	switch {
	case u.at < 0:
	case u.hasAll:
		l.fold(s, &u.all, &u.cur)
	default:
		u.cur, u.all, u.hasAll = u.all, u.cur, true
	}
}

// SavedSums returns the number of sums in Attention.Saved, and the floats of them all.
func (l *Layout) SavedSums() (n, floats int) {
	n = l.Dims.Batch * l.Dims.KVHeads * l.Tiles * l.Sums
	return n, n * l.stateFloats()
}

// saved returns the state of the sum at of t.
func (a *Attention) saved(t *Tile, at int) (st state, set *bool) {
	l := a.Products.Layout
	n := t.index*l.Sums + at
	return l.stateIn(a.Saved[n*l.stateFloats():]), &a.Set[n]
}

// Fold folds the saved sums of t into it, one after another.
func (a *Attention) Fold(s *Space, t *Tile) {
	t.sums.at = -1
	for at := range a.Products.Layout.Sums {
		if st, set := a.saved(t, at); *set {
			a.leave(s, t, at)
			t.sums.cur, t.sums.at = st, at
		}
	}
}
