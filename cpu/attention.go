package cpu

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/pool"
	"github.com/seed90331342/attn/cpu/internal/strided"
	"github.com/seed90331342/attn/cpu/internal/tile"
)

// Attention implements backend.Backend: for each query row i of a head, over the keys j that it sees,
//
//	s_j = scale·q_i·k_j ...    o_i = Σ exp(s_j - m)·v_j / Σ exp(s_j - m)    lse_i = m + log Σ exp(s_j - m)
//
// in one pass over blocks of 128 keys (online softmax: Milakov & Gimelshein 2018; blocked: Dao et al. 2022; package
// cpu/internal/tile states the steps). The values are summed from zero in each block, and every 1,024 keys begin a
// new sum, so that the error does not grow with the number of keys. Results of [ShardKeys] keys are merged.
//
// Key blocks start at multiples of 128 for every call, and the rows of a tile do not influence each other. The bits
// of a row therefore do not depend on the number of rows, heads, batches and threads, and prefill equals decode.
// Errors: those of backend.Pinned.Pin, ErrClosed, and the context's.
//
// The threads take the tasks of several calls from one list, those of the longest calls first. Each call is divided
// for as many threads as its share of the work is worth: a long one keeps all busy, short ones are not divided.
func (be *Backend) Attention(ctx context.Context, calls ...*backend.Call) error {
	return be.do(ctx, "attention", func() error {
		if len(calls) != 1 {
			var j jointCalls
			defer j.close()
			if err := j.open(be, calls); err != nil {
				return err
			}
			return sharedPool.Run(ctx, &j, j.floats, j.tasks, be.threads())
		}
		var pinned backend.Pinned
		defer pinned.Unpin()
		if err := pinCall(&pinned, calls[0]); err != nil {
			return err
		}
		a, err := be.openAttention(calls[0], be.threads())
		if err != nil {
			return err
		}
		defer a.release()
		return sharedPool.Run(ctx, a, a.partition.floats, a.partition.tasks, a.partition.threads)
	})
}

// pinCall pins the operands of c, to be unpinned after an error too.
func pinCall(pinned *backend.Pinned, c *backend.Call) error {
	out, in := c.Operands()
	err := pinned.Pin(nil, where, out[:], in[:])
	if err == nil && c.ScoreMod != nil {
		err = c.GoMod(false)
	}
	return err
}

// attention is one Attention call. Calls are pooled, so they do not allocate.
type attention struct {
	partition partition
	tiles     tile.Attention
	problem   *backend.Problem
	// Where several chunks divide the keys of the same tiles, pending counts the unfinished ones, and
	// saved and set are memory of tile.Attention.
	pending []atomic.Int32
	saved   []float32
	set     []bool
	order   []int // of batches that differ in their work, the longest last
}

var attentionPool = sync.Pool{New: func() any { return new(attention) }}

// openAttention opens c, divided among threads goroutines, until it is released.
func (be *Backend) openAttention(c *backend.Call, threads int) (a *attention, err error) {
	if !c.Lists.IsZero() {
		if c, err = listed(c); err != nil {
			return nil, err
		}
	}
	a = attentionPool.Get().(*attention)
	a.partition, a.problem = newPartition(be.kernels, c, threads), &c.Problem
	a.partition.gatherSmall(c, threads)
	a.tiles.Open(&a.partition.layout, c)
	if v := &c.Visible; (v.KLen != nil || v.Offsets != nil) && a.partition.taskGroups == 0 {
		a.sort(c)
	}
	if a.partition.tileChunks > 1 {
		if err = a.shareSums(); err != nil {
			a.release()
			return nil, err
		}
	}
	return a, nil
}

// shareSums allocates the sums of tiles whose keys several chunks divide.
func (a *attention) shareSums() (err error) {
	x := &a.partition
	pool.Resize(&a.saved, x.layout.AllSums*x.layout.StateFloats, &err)
	pool.Resize(&a.set, x.layout.AllSums, &err)
	if pool.Resize(&a.pending, x.tasks/x.tileChunks, &err); err != nil {
		return fmt.Errorf("sums of %d tasks: %w", x.tasks, err)
	}
	a.tiles.Saved, a.tiles.Set = a.saved, a.set
	clear(a.set)
	for i := range a.pending {
		a.pending[i].Store(int32(x.tileChunks))
	}
	return nil
}

// listed returns a call with Lists, which are pinned, as one with Listed.
func listed(c *backend.Call) (*backend.Call, error) {
	lists, shape := strided.Of(&c.Lists), c.Lists.Shape()
	ids, err := backend.Make[int32](shape.Elements())
	if err != nil {
		return nil, fmt.Errorf("key indices %v: %w", shape, err)
	}
	n := shape[backend.Dim]
	for b := range shape[backend.Batch] {
		strided.CopyElements(ids[b*n:], 1, lists.Ints[lists.Index(b, 0, 0):], lists.Stride[backend.Dim], n)
	}
	return c.ListKeys(ids)
}

// release forgets the operands.
func (a *attention) release() {
	*a = attention{pending: a.pending, saved: a.saved, set: a.set, order: a.order[:0]}
	attentionPool.Put(a)
}

// sort sets the order of the batches of c, which differ in their work. Tasks are taken from the last one on, and short ones fill the gaps.
func (a *attention) sort(c *backend.Call) {
	d, v := &a.partition.layout.Dims, &c.Visible
	for b := range d.Batch {
		a.order = append(a.order, b)
	}
	slices.SortStableFunc(a.order, func(x, y int) int {
		return cmp.Compare(v.PairsOf(x, d.SeqQ, d.SeqK), v.PairsOf(y, d.SeqQ, d.SeqK))
	})
}

// Task implements pool.Job.
func (a *attention) Task(turn *pool.Turn, w *pool.Scratch, n int) error {
	if a.partition.taskGroups > 0 {
		return a.smallTask(turn, w, n)
	}
	return a.tilesTask(turn, w, n)
}

// tilesTask computes the tiles of chunk n.
func (a *attention) tilesTask(turn *pool.Turn, w *pool.Scratch, n int) error {
	c, shared := a.partition.chunk(n), a.partition.tileChunks > 1
	if len(a.order) > 0 {
		c.Batch = a.order[c.Batch]
	}
	s := a.tiles.Products.Open(w)
	tiles, keys := a.tiles.Begin(w, s, &c)
	for j0 := keys.Lo / tile.BlockKeys * tile.BlockKeys; j0 < keys.Hi; j0 += tile.BlockKeys {
		if err := turn.Pause(); err != nil {
			return err
		}
		a.tiles.Block(s, &c, tiles, j0)
	}
	if shared && a.pending[n/a.partition.tileChunks].Add(-1) > 0 {
		return nil
	}
	for i := range tiles {
		if shared { // this is the last chunk over these tiles
			a.tiles.Fold(s, &tiles[i])
		}
		a.tiles.Write(s, &tiles[i])
	}
	return nil
}

// jointCalls are calls that are computed together.
type jointCalls struct {
	be     *Backend
	pinned []backend.Pinned
	calls  []jointCall
	tasks  int
	floats int // of scratch, the most of any open call
}

// jointCall is one of them.
type jointCall struct {
	c     *backend.Call
	work  int64
	first int        // task
	open  *attention // nil if the call is one task, which opens it
}

// taskWork is the most work of a call that is one task of jointCalls, in FLOPs: about 20 microseconds. Such calls open in
// their task, because workers would wait for the caller.
const taskWork = 1 << 21

// open opens calls. After an error, too, the caller must close j.
func (j *jointCalls) open(be *Backend, calls []*backend.Call) error {
	total := int64(0)
	j.be, j.calls, j.pinned = be, make([]jointCall, len(calls)), make([]backend.Pinned, len(calls))
	for n, c := range calls {
		if err := pinCall(&j.pinned[n], c); err != nil {
			return err
		}
		j.calls[n] = jointCall{c: c, work: backend.NewPlan(c).FLOPs}
		total += j.calls[n].work
	}
	// Tasks are taken from the last one on.
	slices.SortStableFunc(j.calls, func(x, y jointCall) int { return cmp.Compare(x.work, y.work) })
	for n := range j.calls {
		x, threads := &j.calls[n], be.threads()
		x.first = j.tasks
		if float64(x.work)*float64(tasksPerThread*threads) <= float64(total) {
			threads = 0 // too little to divide
			if x.work <= taskWork {
				j.tasks++
				continue
			}
		} else {
			threads = min(threads, int(float64(x.work)/float64(total)*float64(threads))+1)
		}
		var err error
		if x.open, err = be.openAttention(x.c, threads); err != nil {
			return err
		}
		j.tasks += x.open.partition.tasks
		j.floats = max(j.floats, x.open.partition.floats)
	}
	return nil
}

// close releases the calls and their operands.
func (j *jointCalls) close() {
	for _, x := range j.calls {
		if x.open != nil {
			x.open.release()
		}
	}
	for n := range j.pinned {
		j.pinned[n].Unpin()
	}
}

// Task implements pool.Job.
func (j *jointCalls) Task(turn *pool.Turn, w *pool.Scratch, t int) error {
	next, _ := slices.BinarySearchFunc(j.calls, t+1, func(x jointCall, t int) int { return cmp.Compare(x.first, t) })
	x := &j.calls[next-1]
	if x.open != nil {
		return x.open.Task(turn, w, t-x.first)
	}
	a, err := j.be.openAttention(x.c, 0)
	if err != nil {
		return err
	}
	defer a.release()
	for n := 0; n < a.partition.tasks && err == nil; n++ {
		if err = w.Grow(a.partition.floats); err == nil {
			err = a.Task(turn, w, n)
		}
	}
	return err
}

// ShardKeys is the number of keys in a shard. A call over more keys computes (O, LSE) of each shard, which begins at
// a multiple of ShardKeys, and merges them in order as [Backend.Merge] does: ((0 + 1) + 2) + 3. The first shard has the
// sinks. A sequence whose keys are divided between machines therefore has the bits of one call if
//
//   - each part is one shard, except that the first may have several: (0 + 1) + (2 + 3) has other bits;
//   - the parts merge in the order of their keys, in float32, and a 16-bit output is rounded after that;
//   - all machines compute with the same [Options.Tier].
//
// A call with lists of keys cannot be divided in this way: its shards count the listed keys.
const ShardKeys = tile.ShardKeys

// Plan implements backend.Backend.
func (be *Backend) Plan(ctx context.Context, calls ...*backend.Call) (backend.Plan, error) {
	return result(ctx, be, "plan", func() (backend.Plan, error) {
		return backend.PlanEach(calls, func(c *backend.Call) (backend.Plan, error) {
			p := be.newPlan(backend.NewPlan(c))
			if !c.Lists.IsZero() {
				var err error
				if c, err = c.FillLists(); err != nil {
					return p, err
				}
			}
			x := newPartition(be.kernels, c, be.threads())
			x.gatherSmall(c, be.threads())
			p.Path, p.Why = x.explain(c)
			p.Cut, p.Scratch, p.Chunks = x.String(), x.scratchBytes(), x.tasks
			return p, c.GoMod(false)
		})
	})
}

// newPlan returns p with the fields that do not depend on the call.
func (be *Backend) newPlan(p backend.Plan) backend.Plan {
	p.Backend = name
	p.Limits = []backend.Limit{{Name: "threads", Value: int64(be.threads())}}
	return p
}
