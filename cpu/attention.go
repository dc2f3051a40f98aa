package cpu

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"

	"gonum.org/v1/gonum/blas"
	"gonum.org/v1/gonum/blas/blas32"

	"github.com/seed90331342/attn/backend"
)

// Attention implements backend.Backend: for each query row i of a head, over
// the keys j that it sees,
//
//	s_j = scale·q_i·k_j ...    o_i = Σ exp(s_j - m)·v_j / Σ exp(s_j - m)    lse_i = m + log Σ exp(s_j - m)
//
// in one pass over blocks of 128 keys (online softmax: Milakov & Gimelshein
// 2018; blocked: Dao et al. 2022). With m the largest score so far, a block's
// scores S and values V give
//
//	m' = max(m, max S)    P = exp(S - m')    a = exp(m - m')
//	l  = a·l + Σ P        O = a·O + P·V
//
// where P·V is summed from zero in each block, so that the error does not grow
// with the number of keys. Row sums are kept in float64.
//
// Key blocks start at multiples of 128 whatever the call is, and rows of a tile
// do not influence each other, so a row's bits do not depend on how many rows,
// heads, batches and threads there are, and prefill equals decode. The vector
// kernels do the same with l in float32, and begin a new sum at every 1,024 keys.
// Errors: those
// of backend.Pinned.Pin, ErrClosed, and the context's.
func (be *Backend) Attention(ctx context.Context, c *backend.Call) error {
	if err := be.gate.enter(ctx, "attention"); err != nil {
		return err
	}
	defer be.gate.leave()
	if err := be.attention(ctx, c); err != nil {
		return fmt.Errorf("cpu: attention: %w", err)
	}
	return nil
}

func (be *Backend) attention(ctx context.Context, c *backend.Call) error {
	var pinned backend.Pinned
	if err := pinCall(&pinned, c); err != nil {
		return err
	}
	defer pinned.Unpin()
	if ok, _ := fusedTakes(be.kernels, c); ok {
		return be.attend(ctx, c)
	}
	a, err := openAttention(c, be.threads())
	if err != nil {
		return err
	}
	return be.workers.run(ctx, a, a.tasks, a.threads)
}

// pinCall pins the operands of c.
func pinCall(pinned *backend.Pinned, c *backend.Call) error {
	out, in := c.Operands()
	return pinned.Pin(nil, where, out[:], in[:])
}

// openAttention opens c for the gonum path, cut among threads goroutines.
func openAttention(c *backend.Call, threads int) (*attention, error) {
	a := &attention{cut: cutAttention(c, threads), kInPlace: c.Pages == nil && rowsInPlace(c.K)}
	var err error
	if a.scoring, err = scoringOf(&c.Problem, a.d.Heads, a.d.SeqQ); err != nil {
		return nil, err
	}
	for _, o := range [...]struct {
		to   *view
		name string
		t    backend.Tensor
	}{{&a.q, "q", c.Q}, {&a.o, "o", c.O}} {
		if *o.to, err = floatView(o.name, o.t); err != nil {
			return nil, err
		}
	}
	if a.k, err = cacheView("k", c.K, c.Pages); err != nil {
		return nil, err
	}
	if a.v, err = cacheView("v", c.V, c.Pages); err != nil {
		return nil, err
	}
	a.lse, err = f32View("lse", c.LSE)
	return a, err
}

// attention is one fused call on the gonum path.
type attention struct {
	cut
	scoring
	q, k, v, o, lse view
	kInPlace        bool
}

// block is a sub-block of a task: rows [i, i+n) of query head h.
type block struct {
	h, i, n  int
	first    int       // its first row among the rows of the task
	q        []float32 // its query rows, ldq apart
	ldq      int
	keys     span // what any of its rows sees
	spans    []span
	o, m     []float32
	sums     []float64
	keysHere span // keys, within the key block at hand
}

// tile is what the sub-blocks of a task share while one key block goes by.
type tile struct {
	b, hk, j0 int
	scores    []float32 // [rows, keyBlock]
	vt        []float32 // [Dv, keyBlock], V transposed, zero where nothing is seen
	careful   bool      // V holds NaN or Inf, which vt has as zeros
	acc       []float32 // [rows, Dv]
	tmp       []float32 // [keyBlock]
}

// task computes one task: its rows of O and LSE.
func (a *attention) task(ctx context.Context, w *scratch, t int) error {
	d := a.d
	group, part := t/a.each, t%a.each
	b, hk := group/d.KVHeads, group%d.KVHeads
	from := part * a.subs
	to := min(from+a.subs, a.share*a.blocks)
	rows := a.subs * a.rows

	tl := tile{b: b, hk: hk, scores: w.floats(a.rows * keyBlock)}
	kbuf := w.floats(keyBlock * roundUp(d.Dim))
	tl.vt = w.floats(d.ValueDim * keyBlock)
	packed := w.floats(4 * d.ValueDim)
	tl.acc = w.floats(a.rows * d.ValueDim)
	o := w.floats(rows * d.ValueDim)
	m := w.floats(rows)
	tl.tmp = w.floats(keyBlock)
	var qbuf []float32
	if a.packQ {
		qbuf = w.floats(rows * d.Dim)
	}
	clear(o)
	clear(w.sums)
	for r := range m {
		m[r] = negInf
	}

	var store [taskBlocks]block
	subs := store[:to-from]
	all := span{d.SeqK, 0}
	for n := range subs {
		s := &subs[n]
		at := from + n
		*s = block{h: hk*a.share + at/a.blocks, i: at % a.blocks * queryBlock, first: n * a.rows}
		s.n = min(queryBlock, d.SeqQ-s.i)
		s.o, s.m = o[s.first*d.ValueDim:], m[s.first:]
		s.spans, s.sums = w.spans[s.first:], w.sums[s.first:]
		s.keys = a.see(b, s)
		if s.keys.lo < s.keys.hi {
			all = span{min(all.lo, s.keys.lo), max(all.hi, s.keys.hi)}
		}
		if a.packQ {
			s.q, s.ldq = qbuf[s.first*d.Dim:], d.Dim
			a.q.pack(s.q, s.ldq, b, s.h, s.i, s.n, 0, d.Dim)
		} else {
			s.q, s.ldq = a.q.rowsAt(b, s.h, s.i)
		}
	}

	for j0 := all.lo / keyBlock * keyBlock; j0 < all.hi; j0 += keyBlock {
		if err := ctx.Err(); err != nil {
			return err
		}
		tl.j0 = j0
		here := span{j0 + keyBlock, j0} // what the task sees of this key block
		for n := range subs {
			s := &subs[n]
			s.keysHere = span{max(s.keys.lo, j0), min(s.keys.hi, j0+keyBlock)}
			if s.keysHere.lo < s.keysHere.hi {
				here = span{min(here.lo, s.keysHere.lo), max(here.hi, s.keysHere.hi)}
			}
		}
		if here.lo >= here.hi {
			continue
		}
		k, ldk := keyRows(&a.k, a.kInPlace, kbuf, b, hk, here)
		a.valueRows(&tl, packed, here)
		for n := range subs {
			if s := &subs[n]; s.keysHere.lo < s.keysHere.hi {
				a.step(&tl, s, k[(s.keysHere.lo-here.lo)*ldk:], ldk)
			}
		}
	}
	for n := range subs {
		a.finish(b, &subs[n])
	}
	return nil
}

// see fills in what each row of s sees and returns the keys that any of them
// does, an empty span when there are none.
func (a *attention) see(b int, s *block) span {
	all := span{a.d.SeqK, 0}
	for r := range s.n {
		lo, hi := a.p.Visible.Range(b, s.i+r, a.d.SeqK)
		s.spans[r] = span{lo, hi}
		if lo < hi {
			all = span{min(all.lo, lo), max(all.hi, hi)}
		}
	}
	return all
}

// valueRows transposes the values of span into tl.vt, with zeros for the other
// keys of the block and in place of NaN and Inf: 0·NaN is NaN, so a hidden one
// must not meet the product. tl.careful then asks step to add the visible ones.
func (a *attention) valueRows(tl *tile, packed []float32, keys span) {
	lo, n := keys.lo-tl.j0, keys.hi-keys.lo
	if n < keyBlock {
		clear(tl.vt)
	}
	finite := a.v.packT(tl.vt[lo:], keyBlock, tl.b, tl.hk, keys.lo, n, 0, a.d.ValueDim, packed)
	tl.careful = !finite
	if tl.careful {
		dropNonFinite(tl.vt)
	}
}

// dropNonFinite replaces NaN and Inf by zero.
func dropNonFinite(s []float32) {
	for i, x := range s {
		if !finite(x) {
			s[i] = 0
		}
	}
}

// step takes sub-block s over the key block at hand; k holds the keys of
// s.keysHere.
func (a *attention) step(tl *tile, s *block, k []float32, ldk int) {
	d := a.d
	c0 := s.keysHere.lo - tl.j0
	mulNT(s.n, s.keysHere.hi-s.keysHere.lo, d.Dim, s.q, s.ldq, k, ldk, tl.scores[c0:], keyBlock)
	from, to := sumSpan(c0, s.keysHere.hi-tl.j0)
	for r := range s.n {
		row := tl.scores[r*keyBlock : (r+1)*keyBlock]
		lo, hi := max(s.spans[r].lo-tl.j0, 0), min(s.spans[r].hi-tl.j0, keyBlock)
		if lo >= hi {
			clear(row[from:to])
			continue
		}
		m := a.score(row, lo, hi, tl.b, s.h, s.i+r, tl.j0, tl.tmp)
		lo, hi = lo&^3, roundUp(hi)
		clear(row[from:lo])
		clear(row[hi:to])
		if old := s.m[r]; m > old {
			s.m[r] = m
			rescale(s.o[r*d.ValueDim:(r+1)*d.ValueDim], &s.sums[r], exp32(old-m))
		}
		if s.m[r] == negInf {
			clear(row[lo:hi])
			continue
		}
		s.sums[r] += expRow(row[lo:hi], s.m[r])
		a.drop(row[lo:hi], tl.b, s.h, s.i+r, tl.j0+lo)
	}
	mulNT(s.n, d.ValueDim, to-from, tl.scores[from:], keyBlock, tl.vt[from:], keyBlock, tl.acc, d.ValueDim)
	if tl.careful {
		a.addNonFinite(tl, s)
	}
	for r := range s.n {
		if s.spans[r].lo < tl.j0+keyBlock && s.spans[r].hi > tl.j0 {
			add(s.o[r*d.ValueDim:(r+1)*d.ValueDim], tl.acc[r*d.ValueDim:])
		}
	}
}

// rescale multiplies what a row has so far by alpha.
func rescale(o []float32, sum *float64, alpha float32) {
	*sum *= float64(alpha)
	for i := range o {
		o[i] *= alpha
	}
}

// add adds x to o, whose length counts.
func add(o, x []float32) {
	x = x[:len(o)]
	for i, y := range x {
		o[i] += y
	}
}

// addNonFinite adds the terms that valueRows took out, for the keys that a row
// sees: p·NaN and p·Inf, NaN where p is 0.
func (a *attention) addNonFinite(tl *tile, s *block) {
	dv := a.d.ValueDim
	for j := s.keysHere.lo; j < s.keysHere.hi; j++ {
		for c := range dv {
			x := a.v.at(tl.b, tl.hk, j, c)
			if finite(x) {
				continue
			}
			for r := range s.n {
				if j >= s.spans[r].lo && j < s.spans[r].hi && !a.hides(tl.b, s.h, s.i+r, j) && a.keeps(tl.b, s.h, s.i+r, j) {
					tl.acc[r*dv+c] += tl.scores[r*keyBlock+j-tl.j0] * x
				}
			}
		}
	}
}

// finish divides the rows of s by their sums and writes O and LSE. A row that
// has seen no score above -Inf is zeros with LSE -Inf, or its sink.
func (a *attention) finish(b int, s *block) {
	dv := a.d.ValueDim
	for r := range s.n {
		o := s.o[r*dv : (r+1)*dv]
		lse := negInf
		m, sum, alpha := a.withSink(s.h, s.m[r], s.sums[r])
		switch {
		case s.m[r] == negInf:
			clear(o)
		case alpha != 1:
			divide(o, float32(sum/float64(alpha)))
		default:
			divide(o, float32(sum))
		}
		if m != negInf {
			lse = float32(float64(m) + math.Log(sum))
		}
		a.o.store(o, b, s.h, s.i+r, 0)
		if !a.lse.isZero() {
			a.lse.f32[a.lse.index(b, s.h, s.i+r)] = lse
		}
	}
}

// divide divides o by x.
func divide(o []float32, x float32) {
	for i := range o {
		o[i] /= x
	}
}

var _ backend.Batcher = (*Backend)(nil)

// AttentionBatch implements backend.Batcher: the tasks of all calls are one job, which
// the threads take from, those of the longest calls first. Each call is cut for as
// many threads as its share of the work is worth, so that one long sequence among
// many short ones keeps all of them busy, and short ones are not cut at all.
// Errors as for Attention.
func (be *Backend) AttentionBatch(ctx context.Context, calls []*backend.Call) error {
	if err := be.gate.enter(ctx, "attention"); err != nil {
		return err
	}
	defer be.gate.leave()
	var b batch
	defer b.close()
	err := b.open(be, calls)
	if err == nil {
		err = be.workers.run(ctx, &b, b.tasks, be.threads())
	}
	if err != nil {
		return fmt.Errorf("cpu: attention: %w", err)
	}
	return nil
}

// batch is calls that are computed together.
type batch struct {
	pinned       []backend.Pinned
	fused        []*fused
	jobs         []job
	first        []int // task of each job
	spans        []int // rows of scratch of each job
	tasks        int
	floats, rows int
}

// open opens calls; close gives back what it took, also after an error.
func (b *batch) open(be *Backend, calls []*backend.Call) error {
	type load struct {
		c    *backend.Call
		work int64
	}
	loads := make([]load, len(calls))
	total := int64(0)
	b.pinned = make([]backend.Pinned, len(calls))
	for n, c := range calls {
		if err := pinCall(&b.pinned[n], c); err != nil {
			return err
		}
		loads[n] = load{c, backend.NewPlan(c).FLOPs}
		total += loads[n].work
	}
	// Tasks are taken from the last one on.
	slices.SortStableFunc(loads, func(x, y load) int { return cmp.Compare(x.work, y.work) })
	b.jobs, b.first = make([]job, 0, len(calls)), make([]int, 0, len(calls))
	for _, l := range loads {
		threads := shareOf(l.work, total, be.threads())
		if ok, _ := fusedTakes(be.kernels, l.c); ok {
			f, err := be.openFused(l.c, threads)
			if err != nil {
				return err
			}
			b.fused = append(b.fused, f)
			b.add(f, f.tasks)
			continue
		}
		a, err := openAttention(l.c, threads)
		if err != nil {
			return err
		}
		b.add(a, a.tasks)
	}
	return nil
}

// shareOf returns for how many of threads a call of so much work among others is cut:
// 0 where it is no more than one task of the whole.
func shareOf(work, total int64, threads int) int {
	if float64(work)*float64(tasksPerThread*threads) <= float64(total) {
		return 0
	}
	return min(threads, int(float64(work)/float64(total)*float64(threads))+1)
}

func (b *batch) add(j job, tasks int) {
	b.jobs, b.first = append(b.jobs, j), append(b.first, b.tasks)
	b.tasks += tasks
	floats, rows := j.size()
	b.floats, b.rows, b.spans = max(b.floats, floats), max(b.rows, rows), append(b.spans, rows)
}

func (b *batch) close() {
	for _, f := range b.fused {
		f.release()
	}
	for n := range b.pinned {
		b.pinned[n].Unpin()
	}
}

// size implements job.
func (b *batch) size() (floats, rows int) { return b.floats, b.rows }

// task implements job.
func (b *batch) task(ctx context.Context, w *scratch, t int) error {
	n, found := slices.BinarySearch(b.first, t)
	if !found {
		n--
	}
	w.spans, w.sums = w.spans[:b.spans[n]], w.sums[:b.spans[n]] // which its tasks may go by
	return b.jobs[n].task(ctx, w, t-b.first[n])
}

// The tile: queryBlock rows against keyBlock keys, and products into at most
// colBlock columns. gonum's Gemm starts goroutines of its own, and cuts its sums
// in another way, from four blocks of 64 x 64 results on; one row of blocks and
// at most three columns of them stay below, so that one tile is one goroutine.
//
// keyBlock also fixes the arithmetic: key blocks start at multiples of it,
// whatever the queries, the batch and the number of threads are, and every sum
// over keys is a sum over whole blocks, padded with zeros.
//
// Of that sum, stretches of sumBlock zeros at either end are left out. gonum's
// dot product adds the elements of each 16 to the same 8 partial sums, which a
// zero product does not change (they start at +0, so they are never -0), and so
// its bits stay those of the whole block; tests hold it to that.
const (
	queryBlock = 64
	keyBlock   = 128
	colBlock   = 192
	sumBlock   = 16
)

// sumSpan returns the part of a key block that a sum over its elements [lo, hi)
// must take in: the stretches of sumBlock that they lie in.
func sumSpan(lo, hi int) (int, int) {
	return lo / sumBlock * sumBlock, ceilDiv(hi, sumBlock) * sumBlock
}

// mulNT computes c = a·bᵀ in one goroutine. A row of c depends on the same row
// of a and on b alone, bit by bit, however many rows there are.
//
//	a [m, k] rows lda apart    b [n, k] rows ldb apart    c [m, n] rows ldc apart
//
// m is at most queryBlock; n is any, and cut into pieces of colBlock. b's rows
// must be aligned, see [aligned].
func mulNT(m, n, k int, a []float32, lda int, b []float32, ldb int, c []float32, ldc int) {
	for j := 0; j < n; j += colBlock {
		w := min(colBlock, n-j)
		blas32.Gemm(blas.NoTrans, blas.Trans, 1,
			blas32.General{Rows: m, Cols: k, Stride: lda, Data: a},
			blas32.General{Rows: w, Cols: k, Stride: ldb, Data: b[j*ldb:]},
			0, blas32.General{Rows: m, Cols: w, Stride: ldc, Data: c[j:]})
	}
}
