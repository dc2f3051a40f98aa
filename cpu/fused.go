package cpu

import (
	"context"
	"math"
	"sync"
	"sync/atomic"

	"github.com/seed90331342/attn/backend"
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
