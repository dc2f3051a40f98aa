package tile

import (
	"math"

	"github.com/seed90331342/attn/cpu/internal/vec"
)

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

// MergeLSE returns the factors of the outputs of two results in their merge, and its LSE:
//
//	m = max(x, y)    sum = exp(x - m) + exp(y - m)
//	ox = exp(x - m)/sum    oy = exp(y - m)/sum    lse = m + log(sum)
func MergeLSE(x, y float32) (ox, oy, lse float32) {
	switch vec.NegInf {
	case y:
		return 1, 0, x
	case x:
		return 0, 1, y
	}
	m := float64(max(x, y)) // NaN when either is
	a, b := math.Exp(float64(x)-m), math.Exp(float64(y)-m)
	return float32(a / (a + b)), float32(b / (a + b)), float32(m + math.Log(a+b))
}

// RowLSE finishes a row whose scores, in units of log2 e, have the maximum m and the
// sum l of the powers 2^(s - m), with a sink, or without one if that is -Inf:
//
//	top = max(m, sink·log2 e)    sum = 2^(m - top)·l + 2^(sink·log2 e - top)
//
// It returns the natural log-sum-exp, and the factor of the row's output:
// 2^(m - top)/sum, or 1/l without a sink. For a row that has seen no key these are the
// sink and 0.
func RowLSE(m float32, l float64, sink float32) (lse, inv float32) {
	switch {
	case l == 0:
		return sink, 0
	case sink == vec.NegInf:
		return float32((float64(m) + math.Log2(l)) * math.Ln2), float32(1 / l)
	}
	score, other := float64(m), float64(sink)*math.Log2E
	top := max(score, other)
	mine := math.Exp2(score - top)
	sum := mine*l + math.Exp2(other-top)
	return float32((top + math.Log2(sum)) * math.Ln2), float32(mine / sum)
}
