package cpu

import (
	"context"
	"fmt"

	"github.com/seed90331342/attn/backend"
)

// cut is how a fused call is divided. cutAttention makes it from shapes,
// strides and types alone; Plan prints it and Attention executes it.
//
// A key and value head and the query heads that share it are a group. A group's
// query rows, head after head, are cut into sub-blocks of at most queryBlock
// rows of one head; a task is several sub-blocks in a row of one group. It walks
// over the key blocks once: each is transposed (V), and packed or converted
// where needed, in the goroutine's own scratch, and then serves all sub-blocks
// of the task. So the memory beside the operands does not grow with any length,
// at the price of transposing V once a task: 8,192 elements a key block against
// 64·128·(D+Dv) multiplications for each of its sub-blocks.
type cut struct {
	d       backend.Dims
	threads int  // goroutines
	share   int  // query heads of a group
	rows    int  // query rows of a full sub-block
	blocks  int  // sub-blocks of a head
	subs    int  // sub-blocks of a full task
	each    int  // tasks of a group
	tasks   int  // in all
	packQ   bool // query rows are copied to scratch first
}

const (
	// taskElements bounds the output elements of a task, which stay in scratch
	// while the keys go by: 256 KiB of float32, a share of a core's L2 cache.
	taskElements = 1 << 16
	// taskBlocks bounds the sub-blocks of a task: at 8 the transposition of V
	// is about 1% of the time.
	taskBlocks = 8
	// tasksPerThread is how many tasks each goroutine should find, where there
	// are that many sub-blocks, so that one slow core does not hold up the rest.
	tasksPerThread = 4
)

// cutAttention divides c among at most threads goroutines, as cutFused does.
func cutAttention(c *backend.Call, threads int) cut {
	d := c.Dims()
	k := cut{d: d, share: d.Heads / d.KVHeads, packQ: !rowsInPlace(c.Q)}
	k.rows = min(queryBlock, d.SeqQ)
	k.blocks = ceilDiv(d.SeqQ, queryBlock)
	groups := d.Batch * d.KVHeads
	k.subs = subBlocks(groups*k.share*k.blocks, threads, k.rows*max(d.Dim, d.ValueDim))
	k.each = ceilDiv(k.share*k.blocks, k.subs)
	k.tasks = groups * k.each
	k.threads = max(1, min(threads, k.tasks))
	return k
}

// subBlocks returns how many of all sub-blocks a task takes, when each needs so
// many elements of scratch.
func subBlocks(all, threads, elements int) int {
	most := min(taskBlocks, taskElements/elements)
	return max(1, min(all/max(1, tasksPerThread*threads), most))
}

func ceilDiv(a, b int) int { return (a + b - 1) / b }

// size returns the scratch of one goroutine: the pieces that attention.task
// cuts from it, in the same order.
func (k *cut) size() (floats, rows int) {
	rows = k.subs * k.rows
	floats = k.rows*keyBlock + // scores
		keyBlock*roundUp(k.d.Dim) + // a packed key block
		k.d.ValueDim*keyBlock + // a transposed value block
		4*k.d.ValueDim + // rows on their way there
		k.rows*k.d.ValueDim + // the product of one tile
		rows*k.d.ValueDim + // output so far
		rows + // largest score so far
		keyBlock // a row of the bias
	if k.packQ {
		floats += rows * k.d.Dim
	}
	return floats, rows
}

// scratchBytes returns the memory that all goroutines take beside the operands.
func (k *cut) scratchBytes() int64 {
	floats, rows := k.size()
	const span, sum = 16, 8
	return int64(k.threads) * (int64(floats+alignSlack)*4 + int64(rows)*(span+sum))
}

// String says the cut in words.
func (k *cut) String() string {
	return fmt.Sprintf("%d tasks of up to %d query blocks of %d rows (%d batches x %d kv heads x %d query heads each x %d blocks), key blocks of %d, %d goroutines",
		k.tasks, k.subs, k.rows, k.d.Batch, k.d.KVHeads, k.share, k.blocks, keyBlock, k.threads)
}

// Plan implements backend.Backend.
func (be *Backend) Plan(ctx context.Context, c *backend.Call) (backend.Plan, error) {
	if be.gate.err != nil {
		return backend.Plan{}, be.gate.err
	}
	if ctx.Err() != nil {
		return backend.Plan{}, context.Cause(ctx)
	}
	p := backend.NewPlan(c)
	p.Backend = name
	p.Limits = []backend.Limit{{Name: "threads", Value: int64(be.threads())}}
	ok, why := fusedTakes(be.kernels, c)
	if ok {
		x := cutFused(be.kernels, c, be.threads())
		p.Path, p.Why, p.Cut = x.path(), x.why(), x.String()
		p.Scratch, p.Chunks = x.scratchBytes(), x.tasks
		return p, nil
	}
	k := cutAttention(c, be.threads())
	p.Path = "fused gonum blocks"
	p.Why = "blocked online softmax over blas32.Gemm tiles, one goroutine a tile; key blocks that no row of a tile sees are skipped"
	if k.packQ {
		p.Why += "; query rows are packed because they are not contiguous float32"
	}
	if why != "" {
		p.Why += "; " + why
	}
	p.Scratch = k.scratchBytes()
	p.Chunks = k.tasks
	p.Cut = k.String()
	return p, nil
}
