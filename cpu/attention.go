package cpu

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/budget"
	"github.com/seed90331342/attn/cpu/internal/pool"
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
// where P·V is summed from zero in each block, and every 1,024 keys begin a new
// sum, so that the error does not grow with the number of keys. Results of
// [ShardKeys] keys are merged as [Backend.Merge] does.
//
// Key blocks start at multiples of 128 for every call, and the rows of a tile do
// not influence each other. The bits of a row therefore do not depend on the
// number of rows, heads, batches and threads, and prefill equals decode.
// Errors: those of backend.Pinned.Pin, ErrClosed, and the context's.
//
// The tasks of several calls are one job, which the threads take from, those of the
// longest calls first. Each call is cut for as many threads as its share of the work is
// worth, so that one long sequence among many short ones keeps all of them busy, and
// short ones are not cut at all.
func (be *Backend) Attention(ctx context.Context, calls ...*backend.Call) error {
	return be.do(ctx, "attention", func() error {
		if len(calls) != 1 {
			var b batch
			defer b.close()
			if err := b.open(be, calls); err != nil {
				return err
			}
			return be.run(ctx, &b, b.tasks, be.threads())
		}
		var pinned backend.Pinned
		if err := pinCall(&pinned, calls[0]); err != nil {
			return err
		}
		defer pinned.Unpin()
		a, err := be.openAttention(calls[0], be.threads())
		if err != nil {
			return err
		}
		defer a.release()
		return be.run(ctx, a, a.tasks, a.threads)
	})
}

// Plan implements backend.Backend.
func (be *Backend) Plan(ctx context.Context, c *backend.Call) (backend.Plan, error) {
	if err := be.gate.enter(ctx, "plan"); err != nil {
		return backend.Plan{}, err
	}
	defer be.gate.leave()
	a := attention{engine: engine{partition: newPartition(be.kernels, c, be.threads())}}
	a.gatherSmall(c)
	p := backend.NewPlan(c)
	p.Backend = name
	p.Limits = []backend.Limit{{Name: "threads", Value: int64(be.threads())}}
	p.Path, p.Why, p.Cut = a.path(), a.why(c), a.String()
	p.Scratch, p.Chunks = a.scratchBytes(), a.tasks
	return p, nil
}

// pinCall pins the operands of c.
func pinCall(pinned *backend.Pinned, c *backend.Call) error {
	out, in := c.Operands()
	return pinned.Pin(nil, where, out[:], in[:])
}

// attention is one Attention call. The engine's scores are in units of log2 e:
//
//	S = scale·Q·Kᵀ, softcap, bias, -Inf where hidden    P = 2^(S·log2 e - m)    O = P·V/Σ P
//
// Calls are pooled, so they do not allocate.
type attention struct {
	engine
	scoring
	lse view
	cap float32 // softcap·log2 e, or 0

	states  []float32      // stateFloats for each tile and chunk, where keys are cut
	saved   []bool         // the states that are set
	pending []atomic.Int32 // unfinished parts of each task over all keys
}

var attentionPool = sync.Pool{New: func() any { return new(attention) }}

// openAttention opens c, divided among threads goroutines, until it is released.
func (be *Backend) openAttention(c *backend.Call, threads int) (*attention, error) {
	a := attentionPool.Get().(*attention)
	if err := a.open(c); err != nil {
		a.release()
		return nil, err
	}
	a.partition = newPartition(be.kernels, c, threads)
	a.gatherSmall(c)
	a.scale, a.cap = scaleAndCap(&c.Problem)
	if err := a.allocStates(); err != nil {
		a.release()
		return nil, err
	}
	return a, nil
}

// allocStates allocates the states of the chunks, where keys are cut.
func (a *attention) allocStates() (err error) {
	n := a.savedFloats()
	if n == 0 {
		return nil
	}
	if a.states, err = resized(a.states, n); err == nil {
		a.saved, err = resized(a.saved, n/a.stateFloats)
	}
	if err == nil {
		a.pending, err = resized(a.pending, a.tasks/a.parts)
	}
	if err != nil {
		return fmt.Errorf("states of %d tasks: %w", a.tasks, err)
	}
	clear(a.saved)
	for i := range a.pending {
		a.pending[i].Store(int32(a.parts))
	}
	return nil
}

// resized returns s with length n, with other memory where it is too short. With ErrMemory
// it returns s.
func resized[T any](s []T, n int) ([]T, error) {
	if cap(s) < n {
		longer, err := budget.Make[T](n)
		if err != nil {
			return s, err
		}
		return longer, nil
	}
	return s[:n], nil
}

// open opens the operands of c.
func (a *attention) open(c *backend.Call) (err error) {
	if err = a.scoring.open(&c.Problem, c.Q.Shape()[backend.Heads], c.Q.Shape()[backend.Seq]); err != nil {
		return err
	}
	err = openViews([]operand{{"q", c.Q, &a.q}, {"k", c.K, &a.k}, {"v", c.V, &a.v},
		{"o", c.O, &a.o}, {"lse", c.LSE, &a.lse}})
	if c.Pages != nil {
		a.k.pages, a.v.pages = c.Pages.Table, c.Pages.Table
	}
	return err
}

// release forgets the operands.
func (a *attention) release() {
	*a = attention{states: a.states, saved: a.saved, pending: a.pending}
	attentionPool.Put(a)
}

func (a *attention) size() (floats, rows int) {
	floats = a.workspaceFloats() + a.taskTiles*(a.queryFloats()+a.tileStates()*a.stateFloats)
	return floats, a.taskTiles * a.rows
}

// scratchBytes returns the memory that the call needs in addition to its operands.
func (a *attention) scratchBytes() int64 {
	floats, rows := a.size()
	const span = 16
	return int64(a.threads)*(int64(floats+alignSlack)*4+int64(rows)*span) + int64(a.savedFloats())*4
}

func (a *attention) task(turn *pool.Turn, w *scratch, n int) error {
	if a.taskGroups > 0 {
		return a.smallTask(turn, w, n)
	}
	return a.tilesTask(turn, w, n)
}

// tilesTask computes the tiles of task n.
func (a *attention) tilesTask(turn *pool.Turn, w *scratch, n int) error {
	p := a.at(n)
	b := a.cutWorkspace(w)
	a.seedDropout(&b.draw)
	tiles := a.cutTiles(w, &p)
	keys := span{a.d.SeqK, 0}
	for n := range tiles {
		t := &tiles[n]
		t.cur = stateIn(w.floats(a.stateFloats), a.outputFloats(), a.tileRows())
		if a.chunks > 1 {
			t.all = stateIn(w.floats(a.stateFloats), a.outputFloats(), a.tileRows())
		}
		if a.chunks > shardChunks {
			t.merged = stateIn(w.floats(a.stateFloats), a.outputFloats(), a.tileRows())
		}
		a.findVisible(&p, t)
		keys = keys.union(t.keys)
		if !t.keys.empty() {
			a.packQueries(w, &p, t)
		}
	}
	fold := folder{k: a.kernels, a: b.alpha, b: b.beta}
	if a.rowOutputs {
		fold.ld = a.dimV
	}
	for j0 := max(keys.lo, p.keys.lo) / keyBlock * keyBlock; j0 < min(keys.hi, p.keys.hi); j0 += keyBlock {
		if err := turn.Pause(); err != nil {
			return err
		}
		a.block(b, &p, tiles, j0, &fold)
	}
	for n := range tiles {
		t := &tiles[n]
		if a.parts == 1 {
			a.write(b, &p, t, &fold)
		} else if t.hasCur {
			a.saveState(t)
		}
	}
	if a.parts == 1 || a.pending[p.group].Add(-1) > 0 {
		return nil
	}
	for n := range tiles { // this is the last part
		t := &tiles[n]
		a.foldParts(t, &fold)
		a.write(b, &p, t, &fold)
	}
	return nil
}

// findVisible sets the keys that the rows of t see.
func (a *attention) findVisible(p *taskRange, t *tile) {
	visible := &a.problem.Visible
	alike := visible.Left == backend.Unbounded && visible.Right == backend.Unbounded
	t.keys, t.every = span{a.d.SeqK, 0}, span{0, a.d.SeqK}
	for r := range t.n {
		if alike && r > 0 {
			t.spans[r] = t.keys
			continue
		}
		_, i := a.row(t.h, t.i, r)
		lo, hi := visible.Range(p.b, i, a.d.SeqK)
		t.spans[r] = span{lo, hi}
		t.every = t.every.clip(lo, hi)
		t.keys = t.keys.union(t.spans[r])
	}
	t.diagonal = false
	if !alike && !a.keyLanes {
		a.findColumns(t)
	}
}

// block takes all tiles over the key block from j0 on.
func (a *attention) block(b *workspace, p *taskRange, tiles []tile, j0 int, fold *folder) {
	r, fetched := keyRange{span: span{j0 + keyBlock, j0}}, false
	for n := range tiles {
		t := &tiles[n]
		t.here, t.mixed = a.trim(p.b, t, t.keys.clip(j0, j0+keyBlock))
		r.span = r.union(t.here)
	}
	if r.empty() {
		return
	}
	first := 4 // keys of a step begin at a multiple of first
	if a.keyLanes && a.k.pages != nil {
		first = a.kernels.Lanes // groups of keys lie in one page
	}
	r.lo = r.lo / first * first
	for n := range tiles {
		t := &tiles[n]
		if t.here.empty() {
			continue
		}
		if a.parts > 1 && t.hasCur && t.chunk != j0/chunkKeys {
			a.saveState(t)
		}
		a.enter(t, j0/chunkKeys, fold)
		here := span{t.here.lo / first * first, t.here.hi}
		r.end = 0
		if !fetched { // one tile fetches the next block for all
			r.end = min(t.keys.hi, p.keys.hi)
			fetched = r.end > j0+keyBlock
		}
		if a.keyLanes {
			a.stepKeyLanes(b, p, t, &r, here)
		} else {
			a.stepQueryLanes(b, p, t, &r, here)
		}
	}
}

// savedState returns the place of the state of a tile and a chunk.
func (a *attention) savedState(t *tile, chunk int) (at int, s state) {
	at = t.index*a.chunks + chunk
	return at, stateIn(a.states[at*a.stateFloats:(at+1)*a.stateFloats], a.outputFloats(), a.tileRows())
}

// saveState stores the state of t's chunk for the task that folds the parts.
func (a *attention) saveState(t *tile) {
	at, s := a.savedState(t, t.chunk)
	s.copy(&t.cur)
	a.saved[at] = true
	t.hasCur = false
}

// foldParts folds the saved states of t into it, chunk by chunk.
func (a *attention) foldParts(t *tile, fold *folder) {
	t.hasCur = false
	for c := range a.chunks {
		if at, s := a.savedState(t, c); a.saved[at] {
			a.enter(t, c, fold)
			t.cur.copy(&s)
		}
	}
}

// enter prepares t for keys of a chunk.
func (a *attention) enter(t *tile, chunk int, fold *folder) {
	if (t.hasCur || t.hasAll) && t.chunk/shardChunks != chunk/shardChunks {
		a.mergeShard(t, fold)
	}
	t.enter(chunk, fold)
}

// complete turns the maxima of t's sums s into LSE, if these are needed, and sets the
// factors of its outputs. With sinks these count.
func (a *attention) complete(t *tile, s *state, factors []float32, sinks bool) {
	clear(factors)
	if a.lse.isZero() && a.chunks <= shardChunks && a.problem.Sinks == nil {
		for r, l := range s.l[:t.n] {
			if l != 0 {
				factors[r] = 1 / l
			}
		}
		return
	}
	for r := range t.n {
		sink := negInf
		if sinks {
			h, _ := a.row(t.h, t.i, r)
			sink = a.problem.Sink(h)
		}
		s.m[r], factors[r] = rowLSE(s.m[r], float64(s.l[r]), sink)
	}
}

// mergeShard completes the rows of t over the shard of its chunk and merges them with the
// shards before.
func (a *attention) mergeShard(t *tile, fold *folder) {
	s, x, y := t.sum(fold), fold.a, fold.b
	first := t.chunk < shardChunks
	a.complete(t, s, x, first)
	fold.multiply(s.o, x)
	t.hasCur, t.hasAll = false, false
	if first {
		t.merged.copy(s)
		t.hasMerged = true
		return
	}
	if !t.hasMerged { // no row sees the first shard: its result is that of no keys
		t.merged.reset()
		a.complete(t, &t.merged, x, true)
		t.hasMerged = true
	}
	for r := range t.n {
		x[r], y[r], t.merged.m[r] = mergeLSE(t.merged.m[r], s.m[r])
	}
	fold.add(t.merged.o, s.o, x, y)
}

// write divides the outputs of t's rows by their sums and writes O and LSE.
func (a *attention) write(b *workspace, p *taskRange, t *tile, fold *folder) {
	s := &t.merged
	if a.chunks > shardChunks {
		a.mergeShard(t, fold)
		fill(b.alpha, 1)
	} else {
		s = t.sum(fold)
		a.complete(t, s, b.alpha, true)
	}
	if !a.lse.isZero() {
		for r := range t.n {
			h, i := a.row(t.h, t.i, r)
			a.lse.f32[a.lse.index(p.b, h, i)] = s.m[r]
		}
	}
	a.writeOutputs(b, p, t, s.o, b.alpha)
}

// addVisibleNonFinite adds the products of weights and non-finite values for the keys of
// here that the rows of t see.
func (a *attention) addVisibleNonFinite(p *taskRange, t *tile, here span, s []float32) {
	a.addNonFinite(p, t, here.lo, here.hi, t.cur.o, s, func(h, i, j, r int, _ float32) bool {
		return j >= t.spans[r].lo && j < t.spans[r].hi && !a.hides(p.b, h, i, j) && a.keeps(p.b, h, i, j)
	})
}

// batch is calls that are computed together.
type batch struct {
	pinned       []backend.Pinned
	calls        []*attention
	first        []int // first task of each call
	scratchRows  []int // that each call needs
	tasks        int
	floats, rows int
}

// open opens calls. After an error, too, the caller must close b.
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
	b.calls, b.first, b.scratchRows = make([]*attention, 0, len(calls)), make([]int, 0, len(calls)), make([]int, 0, len(calls))
	for _, l := range loads {
		a, err := be.openAttention(l.c, shareOf(l.work, total, be.threads()))
		if err != nil {
			return err
		}
		floats, rows := a.size()
		b.calls, b.first, b.scratchRows = append(b.calls, a), append(b.first, b.tasks), append(b.scratchRows, rows)
		b.tasks += a.tasks
		b.floats, b.rows = max(b.floats, floats), max(b.rows, rows)
	}
	return nil
}

// shareOf returns the number of threads for which to cut a call with work of total: 0 for
// a call that is at most one task of the whole.
func shareOf(work, total int64, threads int) int {
	if float64(work)*float64(tasksPerThread*threads) <= float64(total) {
		return 0
	}
	return min(threads, int(float64(work)/float64(total)*float64(threads))+1)
}

// close releases the calls and their operands.
func (b *batch) close() {
	for _, a := range b.calls {
		a.release()
	}
	for n := range b.pinned {
		b.pinned[n].Unpin()
	}
}

func (b *batch) size() (floats, rows int) { return b.floats, b.rows }

func (b *batch) task(turn *pool.Turn, w *scratch, t int) error {
	n, found := slices.BinarySearch(b.first, t)
	if !found {
		n--
	}
	w.spans = w.spans[:b.scratchRows[n]]
	return b.calls[n].task(turn, w, t-b.first[n])
}
