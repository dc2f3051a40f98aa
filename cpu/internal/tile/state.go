package tile

import (
	"math"

	"github.com/seed90331342/attn/cpu/internal/vec"
)

// NoScore is the largest score of a row that has seen no key. It is finite, because
// -Inf - (-Inf) is NaN.
const NoScore = -math.MaxFloat32

// state is the online softmax of some rows over some keys: with m the largest
// score, in units of log2 e,
//
//	l = Σ 2^(s - m)    o = Σ 2^(s - m)·v
//
// o is [Dv, Width], or with Layout.RowOutputs [rows, DimV].
type state struct{ o, m, l []float32 }

// stateIn returns a state in mem, which holds o, then m, then l.
func (l *Layout) stateIn(mem []float32) state {
	o, rows := l.OutputFloats(), l.TileRows()
	return state{mem[:o], mem[o : o+rows], mem[o+rows : o+2*rows]}
}

// reset sets s to the sum over no keys.
func (s *state) reset() {
	clear(s.o)
	clear(s.l)
	Fill(s.m, NoScore)
}

// folder folds states of one call.
type folder struct {
	k    *vec.Kernels
	ld   int       // between rows; 0 if o is [Dv, Width]
	a, b []float32 // memory for a factor of each row, rounded up to Lanes
}

// fold adds t, the sums over later keys, to s:
//
//	m = max(s.m, t.m)    a = 2^(s.m - m)    b = 2^(t.m - m)
//	s.o = a·s.o + b·t.o    s.l = a·s.l + b·t.l    s.m = m
//
// with each operation rounded. When one side has seen no key, the result has the
// bits of the other side.
func (f *folder) fold(s, t *state) {
	a, b := f.a[:len(s.m)], f.b[:len(s.m)]
	for i, x := range s.m {
		m := max(x, t.m[i])
		a[i], b[i] = x-m, t.m[i]-m
		s.m[i] = m
	}
	f.k.Exp2(a, 0)
	f.k.Exp2(b, 0)
	for i := range s.l {
		s.l[i] = float32(a[i]*s.l[i]) + float32(b[i]*t.l[i])
	}
	f.add(s.o, t.o, a, b)
}

// add computes o = a·o + b·t for each row.
func (f *folder) add(o, t, a, b []float32) {
	if f.ld == 0 {
		f.k.Fold(o, t, len(o)/f.k.Width, a, b)
		return
	}
	for r := range len(o) / f.ld {
		x, y := o[r*f.ld:(r+1)*f.ld], t[r*f.ld:(r+1)*f.ld]
		for c := range x {
			x[c] = float32(a[r]*x[c]) + float32(b[r]*y[c])
		}
	}
}

// multiply computes o = a·o for each row.
func (f *folder) multiply(o, a []float32) {
	for i := range o {
		if f.ld == 0 {
			o[i] *= a[i%f.k.Width]
		} else {
			o[i] *= a[i/f.ld]
		}
	}
}

// MergeLSE returns the factors of the outputs of two results in their merge, and its LSE:
//
//	m = max(x, y)    sum = exp(x - m) + exp(y - m)
//	ox = exp(x - m)/sum    oy = exp(y - m)/sum    lse = m + log(sum)
func MergeLSE(x, y float32) (ox, oy, lse float32) {
	switch NegInf {
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
	case sink == NegInf:
		return float32((float64(m) + math.Log2(l)) * math.Ln2), float32(1 / l)
	}
	score, other := float64(m), float64(sink)*math.Log2E
	top := max(score, other)
	mine := math.Exp2(score - top)
	sum := mine*l + math.Exp2(other-top)
	return float32((top + math.Log2(sum)) * math.Ln2), float32(mine / sum)
}

// sums are the states of the rows of a tile between blocks: cur is the sum over the last
// SumKeys keys, all that over the keys of its shard before them. merged is the result of the
// shards before, with O in o and LSE in m.
type sums struct {
	cur, all  state
	merged    state
	at        int  // the index of cur among the sums of a row
	hasCur    bool // cur has seen keys
	hasAll    bool // all has seen keys
	hasMerged bool // merged is set
}

// leave adds cur to all.
func (s *sums) leave(f *folder) {
	switch {
	case !s.hasCur:
	case s.hasAll:
		f.fold(&s.all, &s.cur)
	default:
		s.cur, s.all, s.hasAll = s.all, s.cur, true
	}
	s.hasCur = false
}

// total returns the sum over all keys of the shard.
func (s *sums) total(f *folder) *state {
	switch {
	case s.hasAll:
		s.leave(f)
		return &s.all
	case !s.hasCur:
		s.cur.reset()
	}
	return &s.cur
}
