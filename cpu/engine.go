package cpu

import (
	"context"
	"math"
	"sync"
	"sync/atomic"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// fused is one Attention call on the vector kernels:
//
//	S = scale·Q·Kᵀ, softcap, bias, what is hidden    P = 2^(S·log2 e - m)    O = P·V/Σ P
//
// Blocks of keyBlock keys go by as in attention; what differs is who does the
// arithmetic (package vec), that its sums are folded at multiples of chunkKeys,
// and that K and V are read where they lie. Fused calls are pooled, so that a
// call allocates nothing.
type fused struct {
	fusedCut
	scoring
	q, k, v, o, lse view
	scale           float32 // of q: scale·log2 e, or scale/softcap
	cap             float32 // softcap·log2 e, or 0

	states  []float32      // slot floats for each tile and chunk, where keys are cut
	summed  []bool         // which of them hold something
	pending []atomic.Int32 // parts not done yet, for each task over all keys
}

var fusedPool = sync.Pool{New: func() any { return new(fused) }}

// attend computes c on the vector kernels.
func (be *Backend) attend(ctx context.Context, c *backend.Call) error {
	f, err := be.openFused(c, be.threads())
	if err != nil {
		return err
	}
	defer f.release()
	return be.workers.run(ctx, f, f.tasks, f.threads)
}

// openFused opens c, cut among threads goroutines, until it is released.
func (be *Backend) openFused(c *backend.Call, threads int) (*fused, error) {
	f := fusedPool.Get().(*fused)
	if err := f.open(c); err != nil {
		f.release()
		return nil, err
	}
	f.fusedCut = cutFused(be.kernels, c, threads)
	f.scale = float32(float64(c.Scale) * math.Log2E)
	f.cap = 0
	if c.Softcap > 0 {
		f.scale = float32(float64(c.Scale) / float64(c.Softcap))
		f.cap = float32(float64(c.Softcap) * math.Log2E)
	}
	f.prepare()
	return f, nil
}

// open opens the operands of c.
func (f *fused) open(c *backend.Call) (err error) {
	if f.scoring, err = scoringOf(&c.Problem, c.Q.Shape()[backend.Heads], c.Q.Shape()[backend.Seq]); err != nil {
		return err
	}
	if f.q, err = floatView("q", c.Q); err != nil {
		return err
	}
	if f.k, err = cacheView("k", c.K, c.Pages); err != nil {
		return err
	}
	if f.v, err = cacheView("v", c.V, c.Pages); err != nil {
		return err
	}
	if f.o, err = floatView("o", c.O); err != nil {
		return err
	}
	f.lse, err = f32View("lse", c.LSE)
	return err
}

// prepare makes room for states.
func (f *fused) prepare() {
	n := f.slots()
	if n == 0 {
		return
	}
	if cap(f.states) < n {
		f.states = make([]float32, n)
	}
	f.states = f.states[:n]
	if n /= f.slot; cap(f.summed) < n {
		f.summed = make([]bool, n)
	}
	f.summed = f.summed[:n]
	clear(f.summed)
	if n = f.d.Batch * f.d.KVHeads * f.each; cap(f.pending) < n {
		f.pending = make([]atomic.Int32, n)
	}
	f.pending = f.pending[:n]
	for i := range f.pending {
		f.pending[i].Store(int32(f.parts))
	}
}

// release forgets the operands.
func (f *fused) release() {
	states, summed, pending := f.states, f.summed, f.pending
	*f = fused{states: states, summed: summed, pending: pending}
	fusedPool.Put(f)
}

// part is what a task is about.
type part struct {
	b, hk    int
	from, to int  // tiles of the group
	keys     span // keys of the task
	last     int  // index into pending
	tile     int  // index of the group's first tile among all
}

// at returns what task t is about.
func (f *fused) at(t int) part {
	p := part{last: t / f.parts}
	group := p.last / f.each
	p.b, p.hk, p.tile = group/f.d.KVHeads, group%f.d.KVHeads, group*f.tiles
	p.from = p.last % f.each * f.subs
	p.to = min(p.from+f.subs, f.tiles)
	first := t % f.parts * f.span
	p.keys = span{first * chunkKeys, min((first+f.span)*chunkKeys, f.d.SeqK)}
	return p
}

// task implements job.
func (f *fused) task(ctx context.Context, w *scratch, t int) error {
	p := f.at(t)
	if f.few {
		return f.fewRows(ctx, w, &p)
	}
	return f.wide(ctx, w, &p)
}

// row returns the head and the index of the r-th row from row (h, i) on, where
// rows of the next head follow those of a head.
func (f *fused) row(h, i, r int) (int, int) {
	i += r
	if i < f.d.SeqQ {
		return h, i
	}
	return h + i/f.d.SeqQ, i % f.d.SeqQ
}

// keep stores p's state of a chunk for whoever folds the parts.
func (f *fused) keep(tile int, p *progress) {
	at := tile*f.chunks + p.chunk
	s := stateIn(f.states[at*f.slot:(at+1)*f.slot], len(p.cur.o), len(p.cur.m))
	copy(s.o, p.cur.o)
	copy(s.m, p.cur.m)
	copy(s.l, p.cur.l)
	f.summed[at] = true
	p.some = false
}

// foldParts folds what was kept of a tile, chunk by chunk, into p.
func (f *fused) foldParts(tile int, p *progress, fold *folder) {
	for c := range f.chunks {
		at := tile*f.chunks + c
		if !f.summed[at] {
			continue
		}
		s := stateIn(f.states[at*f.slot:(at+1)*f.slot], len(p.cur.o), len(p.cur.m))
		if p.some {
			fold.fold(&p.cur, &s)
			continue
		}
		copy(p.cur.o, s.o)
		copy(p.cur.m, s.m)
		copy(p.cur.l, s.l)
		p.some = true
	}
}

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
