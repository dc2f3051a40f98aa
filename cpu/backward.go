package cpu

import (
	"context"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/pool"
)

// Backward implements backend.Differentiator: with P = 2^(S - LSE) from the scores S that
// Attention computes,
//
//	dP = V·dO    dS = P∘(dP - D)    D = rowsum(dO∘O) - dLSE
//	dV = P·dO    dK = dS·Q    dQ = Kᵀ·dS
//
// block by block (Dao et al. 2022, FlashAttention, algorithm 4). A task is a range of keys of
// one key head. It keeps the sums of dK and dV in its cache and takes each tile of query rows
// over its blocks of 128 keys, in order. The sum of dQ passes from each range of keys to the
// next one, tile by tile, and so do those of biases. Therefore the order of every sum depends
// on the shapes alone, and so do the bits of a result.
//
// Errors are those of Attention, and ErrMemory.
func (be *Backend) Backward(ctx context.Context, g *backend.Gradients) error {
	return be.do(ctx, "backward", func() error {
		var pinned backend.Pinned
		out, in := g.Operands()
		if err := pinned.Pin(nil, where, out[:], in[:]); err != nil {
			return err
		}
		defer pinned.Unpin()
		j := gradientPool.Get().(*gradients)
		defer j.release()
		if err := j.open(g, be); err != nil {
			return err
		}
		return j.run(ctx, be)
	})
}

// PlanBackward implements backend.Differentiator.
func (be *Backend) PlanBackward(ctx context.Context, g *backend.Gradients) (backend.Plan, error) {
	if err := be.gate.enter(ctx, "plan"); err != nil {
		return backend.Plan{}, err
	}
	defer be.gate.leave()
	j := gradients{wantsQ: !g.DQ.IsZero()}
	j.cut(&g.Call, be)
	p := backend.NewGradientsPlan(g)
	p.Backend = name
	p.Limits = []backend.Limit{{Name: "threads", Value: int64(be.threads())}}
	p.Path = "backward " + j.kernels.Tier + " kernels"
	p.Why = fmt.Sprintf("five products of tiles of %d query rows and 128 keys in %s kernels; keys that no row of a tile sees are skipped", j.rows, j.kernels.Tier)
	p.Cut = fmt.Sprintf("%d tasks (%d batches x %d kv heads x %d ranges of up to %d keys) over %d tiles of query rows, %d goroutines",
		j.tasks, j.d.Batch, j.d.KVHeads, j.parts, j.partKeys, j.tiles, j.threads)
	floats, rows := gradientJob{&j}.size()
	p.Chunks = j.tasks
	p.Scratch = int64(j.threads)*(int64(floats+alignSlack)*4+int64(rows)*16) + int64(j.sumFloats()+j.queryRows()+j.tasks)*4 +
		int64(newBiasSums(g).all())*8
	return p, nil
}

// gradients is one Backward call.
type gradients struct {
	attention // of the forward call; o and lse are its results
	dO, dLSE  view
	dQ, dK,
	dV view
	wantsQ bool
	add    bool
	biasGradients

	cacheKeys int // keys whose K, V, dK and dV fit the cache, a multiple of keyBlock
	partKeys  int // keys of a task, a multiple of keyBlock, at most cacheKeys
	parts     int // tasks of a key head
	slots     int // key heads whose dQ is summed at the same time
	tasks     int

	dots []float32      // D of each query row, [B, H, Sq]
	sums []float32      // dQ of the tiles of each slot, unscaled
	done []atomic.Int32 // of each task, the tiles whose dQ has its part of the sum
}

var gradientPool = sync.Pool{New: func() any { return new(gradients) }}

// release forgets the operands.
func (j *gradients) release() {
	*j = gradients{dots: j.dots, sums: j.sums, done: j.done,
		biasGradients: biasGradients{distances: j.distances[:0], byRow: j.byRow[:0], byKey: j.byKey[:0]}}
	gradientPool.Put(j)
}

// open opens the operands of g and allocates the memory that its tasks share.
func (j *gradients) open(g *backend.Gradients, be *Backend) (err error) {
	if err = j.attention.open(&g.Call); err != nil {
		return err
	}
	if err = openViews([]operand{{"do", g.DO, &j.dO}, {"dlse", g.DLSE, &j.dLSE},
		{"dq", g.DQ, &j.dQ}, {"dk", g.DK, &j.dK}, {"dv", g.DV, &j.dV}}); err != nil {
		return err
	}
	j.wantsQ, j.add = !j.dQ.isZero(), g.Add
	j.cut(&g.Call, be)
	j.scale, j.cap = scaleAndCap(&g.Problem)
	if j.dots, err = resized(j.dots, j.queryRows()); err == nil {
		j.sums, err = resized(j.sums, j.sumFloats())
	}
	if err == nil {
		j.done, err = resized(j.done, j.tasks)
	}
	if err == nil {
		err = j.openBiases(g)
	}
	if err != nil {
		return fmt.Errorf("sums of %d query rows: %w", j.queryRows(), err)
	}
	for i := range j.done {
		j.done[i].Store(0)
	}
	return nil
}

// cut divides c into tasks.
func (j *gradients) cut(c *backend.Call, be *Backend) {
	threads := be.threads()
	j.partition = newGradientPartition(be.kernels, c, threads)
	groups, blocks := j.d.Batch*j.d.KVHeads, ceilDiv(j.d.SeqK, keyBlock)
	// A task reads K and V and adds to dK and dV for each tile.
	some := max(1, min(8, cacheFloats/(2*keyBlock*(j.dimK+j.dimV))))
	j.cacheKeys = some * keyBlock
	if groups < threads {
		some = max(1, min(some, blocks*groups/(2*threads)))
	}
	j.partKeys, j.parts = some*keyBlock, ceilDiv(blocks, some)
	j.slots = max(1, min(groups, threads))
	j.tasks = ceilDiv(groups, j.slots) * j.parts * j.slots
	j.threads = min(threads, j.tasks)
}

// queryRows returns the number of query rows of all heads and batches.
func (j *gradients) queryRows() int { return j.d.Batch * j.d.Heads * j.d.SeqQ }

// sumFloats returns the floats in which dQ is summed.
func (j *gradients) sumFloats() int {
	if !j.wantsQ {
		return 0
	}
	return j.slots * j.tiles * j.queryFloats()
}

// run computes the gradients.
func (j *gradients) run(ctx context.Context, be *Backend) error {
	dots := dotJob{gradients: j, rowPartition: newRowPartition(j.o.shape, j.threads)}
	if err := be.run(ctx, &dots, dots.rowPartition.tasks, j.threads); err != nil {
		return err
	}
	if j.wantsQ || !j.dK.isZero() || !j.dV.isZero() || j.wantsScores() {
		if err := be.run(ctx, gradientJob{j}, j.tasks, j.threads); err != nil {
			return err
		}
	}
	j.writeBiases()
	return nil
}

// dotJob computes D of each query row.
type dotJob struct {
	*gradients
	rowPartition
}

func (j *dotJob) size() (floats, rows int) { return 2 * j.dimV, 0 }

func (j *dotJob) task(turn *pool.Turn, w *scratch, n int) error {
	b, h, from, to := j.rowPartition.at(n)
	o, dO := w.floats(j.dimV), w.floats(j.dimV)
	for i := from; i < to; i++ {
		if i%rowStep == rowStep-1 {
			if err := turn.Pause(); err != nil {
				return err
			}
		}
		loadRows(j.kernels, &j.o, o, j.dimV, b, h, i, 1)
		loadRows(j.kernels, &j.dO, dO, j.dimV, b, h, i, 1)
		sum := 0.0
		for c, x := range o {
			sum += float64(x) * float64(dO[c])
		}
		if lse := j.lse.at(b, h, i, 0); lse != lse {
			sum = math.NaN() // the row sees a NaN
		}
		if !j.dLSE.isZero() {
			sum -= float64(j.dLSE.at(b, h, i, 0))
		}
		j.dots[(b*j.d.Heads+h)*j.d.SeqQ+i] = float32(sum)
	}
	return nil
}

// gradientJob computes dQ, dK and dV.
type gradientJob struct{ *gradients }

func (j gradientJob) size() (floats, rows int) {
	return j.workspaceFloats() + j.gradientFloats() + j.partKeys*(j.dimK+j.dimV), j.rows
}

// task computes a range of keys of one key head. The tasks of a slot are a chain: each adds
// to the sums of a tile after the task before it. Where heads share a DBias, each adds to a
// row of it after the head before it. Tasks begin in an order in which a task waits only for
// one that runs or has ended.
func (j gradientJob) task(turn *pool.Turn, w *scratch, n int) error {
	n = j.tasks - 1 - n // tasks are handed out in descending order
	slot, round := n%j.slots, n/j.slots
	group, part := round/j.parts*j.slots+slot, round%j.parts
	if group >= j.d.Batch*j.d.KVHeads {
		return nil
	}
	p := taskRange{b: group / j.d.KVHeads, hk: group % j.d.KVHeads}
	p.keys = span{part * j.partKeys, min((part+1)*j.partKeys, j.d.SeqK)}
	b := j.cutWorkspace(w)
	s := j.cutGradients(w, b)
	dK, dV := w.floats(j.partKeys*j.dimK), w.floats(j.partKeys*j.dimV)
	clear(dK)
	clear(dV)
	before, chained := n-j.slots, j.wantsQ || j.wantsScores()
	for at := range j.tiles {
		t := j.tileAt(&p, at)
		t.spans = w.spans
		j.findVisible(&p, &t)
		j.clearBias(&p, &t)
		if t.keys.clip(p.keys.lo, p.keys.hi).empty() && (!j.wantsQ || part > 0 && part+1 < j.parts) {
			continue
		}
		if chained {
			if err := j.wait(turn, before, at); err != nil {
				return err
			}
		}
		if j.shared() {
			if err := j.wait(turn, j.sameKeys(group-1, part), j.lastWith(at)); err != nil {
				return err
			}
		}
		var dQ []float32
		if j.wantsQ {
			dQ = j.sums[(slot*j.tiles+at)*j.queryFloats():][:j.queryFloats()]
			if part == 0 {
				clear(dQ)
			}
		}
		if err := j.visitTile(turn, s, b, &p, &t, func(here span) { j.addBlock(s, b, &p, &t, here, dQ, dK, dV) }); err != nil {
			return err
		}
		if j.wantsQ && part+1 == j.parts {
			j.writeQueries(s, b, &p, &t, dQ)
		}
		if chained {
			j.done[n].Store(int32(at + 1))
		}
	}
	if chained {
		if err := j.wait(turn, before, j.tiles-1); err != nil {
			return err
		}
		j.done[n].Store(int32(j.tiles))
	}
	for r := range p.keys.hi - p.keys.lo {
		j.storeGradient(s, &j.dK, dK[r*j.dimK:(r+1)*j.dimK], j.problem.Scale, p.b, p.hk, p.keys.lo+r)
		j.storeGradient(s, &j.dV, dV[r*j.dimV:(r+1)*j.dimV], 1, p.b, p.hk, p.keys.lo+r)
	}
	return nil
}

// sameKeys returns the task of a key head, counted over all batches, for a range of keys.
func (j *gradients) sameKeys(group, part int) int {
	if group < 0 {
		return -1
	}
	return (group/j.slots*j.parts+part)*j.slots + group%j.slots
}

// lastWith returns the last tile of a key head with rows of tile at in any of its heads.
func (j *gradients) lastWith(at int) int {
	if j.headTiles == 0 {
		return j.tiles - 1
	}
	return (j.share-1)*j.headTiles + at%j.headTiles
}

// spinsBeforeSleep is how often a task looks for the end of a tile, of some 10 microseconds
// per block of keys, before it sleeps.
const spinsBeforeSleep = 1000

// wait waits until task n has added to tile at. There is nothing to wait for before task 0.
func (j *gradients) wait(turn *pool.Turn, n, at int) error {
	if n < 0 {
		return nil
	}
	for spins := 0; int(j.done[n].Load()) <= at; spins++ {
		if err := turn.Pause(); err != nil {
			return err
		}
		if spins >= spinsBeforeSleep {
			time.Sleep(20 * time.Microsecond)
		}
		if err := turn.Yield(); err != nil {
			return err
		}
	}
	return nil
}

// storeGradient writes scale·row, or adds it, to row i of v unless v is not requested. It
// overwrites row.
func (j *gradients) storeGradient(s *gradientSpace, v *view, row []float32, scale float32, b, h, i int) {
	if v.isZero() {
		return
	}
	if scale != 1 {
		for c := range row {
			row[c] *= scale
		}
	}
	if j.add {
		old := s.old[:len(row)]
		loadRows(j.kernels, v, old, len(row), b, h, i, 1)
		for c, x := range old {
			row[c] += x
		}
	}
	storeRow(j.kernels, v, row, b, h, i)
}
