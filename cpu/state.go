package cpu

import (
	"math"

	"github.com/seed90331342/attn/cpu/internal/vec"
)

// chunkKeys is how many keys are summed up in one go: at multiples of it, counted
// from key 0, a new sum begins, and the sums are folded in the order of their
// keys. So what one goroutine sums up and what several do, each some of the keys
// of the same row, are the same bits. 1,024 keys make folding 0.2% of the work
// and still give every core a part of a cache of some thousand keys.
const chunkKeys = 8 * keyBlock

// noScore is the largest score of a row that has seen none: finite, so that
// -Inf - noScore is not NaN.
const noScore = -math.MaxFloat32

// state is what rows have summed up over some keys: with m the largest score,
// in units of log2 e,
//
//	l = Σ 2^(s - m)    o = Σ 2^(s - m)·v
//
// With query rows as lanes o is [Dv, Width], else [rows, Dv rounded up to Lanes].
type state struct{ o, m, l []float32 }

// reset makes s the sum over no key.
func (s *state) reset() {
	clear(s.o)
	clear(s.l)
	for i := range s.m {
		s.m[i] = noScore
	}
}

// stateIn lays a state out over memory: o, then m, then l.
func stateIn(mem []float32, o, rows int) state {
	return state{mem[:o], mem[o : o+rows], mem[o+rows : o+2*rows]}
}

// copy copies t, which has the same size, to s.
func (s *state) copy(t *state) {
	copy(s.o, t.o)
	copy(s.m, t.m)
	copy(s.l, t.l)
}

// folder folds states of one call.
type folder struct {
	k    *vec.Kernels
	ld   int       // between rows; 0 where rows are lanes
	a, b []float32 // room for a factor for each row, rounded up to Lanes
}

// fold adds t, the sums over later keys, to s:
//
//	m = max(s.m, t.m)    a = 2^(s.m - m)    b = 2^(t.m - m)
//	s.o = a·s.o + b·t.o    s.l = a·s.l + b·t.l    s.m = m
//
// every operation rounded. A side that has seen nothing leaves the other's bits
// as they are.
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
	if f.ld == 0 {
		f.k.Fold(s.o, t.o, len(s.o)/f.k.Width, a, b)
		return
	}
	for r := range len(s.o) / f.ld {
		x, y := s.o[r*f.ld:(r+1)*f.ld], t.o[r*f.ld:(r+1)*f.ld]
		for c := range x {
			x[c] = float32(a[r]*x[c]) + float32(b[r]*y[c])
		}
	}
}

// rowLSE ends a row whose scores, in units of log2 e, have the maximum m and the sum
// l of the powers 2^(s - m), beside a sink, which is none where it is -Inf:
//
//	top = max(m, sink·log2 e)    sum = 2^(m - top)·l + 2^(sink·log2 e - top)
//
// It returns the natural log-sum-exp, and what the row's output is to be multiplied
// by: 2^(m - top)/sum, 1/l without a sink. A row that has seen nothing gives the sink
// and 0.
func rowLSE(m float32, l float64, sink float32) (lse, inv float32) {
	switch {
	case l == 0:
		return sink, 0
	case sink == negInf:
		return float32((float64(m) + math.Log2(l)) * math.Ln2), float32(1 / l)
	}
	score, other := float64(m), float64(sink)*math.Log2E
	top := max(score, other)
	mine := math.Exp2(score - top)
	sum := mine*l + math.Exp2(other-top)
	return float32((top + math.Log2(sum)) * math.Ln2), float32(mine / sum)
}

// progress is the state of rows on their way over the keys: cur sums up the
// chunk at hand, all is what the chunks before it came to.
type progress struct {
	cur, all state
	chunk    int  // that cur is of
	some     bool // cur has seen keys
	more     bool // all has
}

// enter readies p for keys of a chunk.
func (p *progress) enter(chunk int, f *folder) {
	if p.some && p.chunk != chunk {
		p.leave(f)
	}
	if !p.some {
		p.cur.reset()
		p.chunk, p.some = chunk, true
	}
}

// leave adds cur to all.
func (p *progress) leave(f *folder) {
	switch {
	case !p.some:
	case p.more:
		f.fold(&p.all, &p.cur)
	default:
		p.cur, p.all, p.more = p.all, p.cur, true
	}
	p.some = false
}

// sum ends p's way and returns what it came to.
func (p *progress) sum(f *folder) *state {
	switch {
	case p.more:
		p.leave(f)
		return &p.all
	case !p.some:
		p.cur.reset()
	}
	return &p.cur
}
