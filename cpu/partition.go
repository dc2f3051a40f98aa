package cpu

import (
	"context"
	"fmt"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/vec"
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

// fusedCut is how a fused call is divided over the vector kernels. Shapes,
// strides and types alone decide it; Plan prints it and Attention executes it.
//
// The query rows of a key and value head, those of all query heads that share it,
// are a group. Its rows go by in tiles of Width rows, or, where they are few, all
// at once with keys as lanes. A task is some tiles of one group over some chunks
// of the keys: most often over all of them, but where there are fewer tiles than
// work for the threads the keys are cut as well, at multiples of chunkKeys.
type fusedCut struct {
	kernels *vec.Kernels
	d       backend.Dims
	threads int
	share   int  // query heads of a group
	few     bool // keys are lanes
	rows    int  // query rows of a full tile
	blocks  int  // tiles of a stretch of rows: of a head, or of the whole group
	tiles   int  // tiles of a group
	subs    int  // tiles of a task
	each    int  // tasks of a group over all keys
	chunks  int  // of all keys
	span    int  // chunks of a task
	parts   int  // tasks over the same tiles
	tasks   int

	dimK, dimV int  // head sizes rounded up to Lanes
	slot       int  // floats of the state of a tile
	scores     bool // bias, mask or softcap come between the products
	blocked    bool // a mask of blocks may leave gaps
	biased     bool // what is added or hidden does
	loadK      bool // keys are converted or packed
	loadV      bool
	asLieK     bool // with keys as lanes: read as they lie, converted in registers
	asLieV     bool
}

const (
	// maxDim is the largest head size that the kernels take: that of keys in the
	// absorbed form of multi-head latent attention, whose block and that of 512
	// wide values come to 544 KiB, within the second cache of processors that have
	// 1 MiB of it.
	maxDim = 576
	// cacheFloats is the share of a core's second cache that a task works in:
	// 512 KiB, half of what processors with AVX-512 have at least.
	cacheFloats = 512 << 10 / 4
	// maxTiles bounds the tiles of a task: with 8 a block of K and V is
	// converted, where that is needed, once for 512 rows.
	maxTiles = 8
	// fewTasks is how many tasks each goroutine should find where keys are
	// lanes: such a call ends when memory has been read, and the cores' shares
	// of that are uneven.
	fewTasks = 16
	// slotFloats bounds the memory for states of a call whose keys are cut, where
	// query rows are lanes: 4 MiB. Where more would be needed they are not cut.
	slotFloats = 1 << 20
)

// fusedTakes reports whether the vector kernels take a call, and if not why.
func fusedTakes(k *vec.Kernels, c *backend.Call) (ok bool, why string) {
	d := c.Dims()
	switch {
	case k == nil:
		return false, ""
	case d.Dim > maxDim || d.ValueDim > maxDim:
		return false, fmt.Sprintf("the vector kernels take head sizes up to %d, these are %d and %d", maxDim, d.Dim, d.ValueDim)
	}
	return true, ""
}

// cutFused divides c among at most threads goroutines; 0 is for a call that is a small
// part of a batch, and has as few tasks as can be.
func cutFused(k *vec.Kernels, c *backend.Call, threads int) fusedCut {
	d := c.Dims()
	x := fusedCut{kernels: k, d: d, share: d.Heads / d.KVHeads,
		dimK: ceilDiv(d.Dim, k.Lanes) * k.Lanes, dimV: ceilDiv(d.ValueDim, k.Lanes) * k.Lanes,
		chunks: ceilDiv(d.SeqK, chunkKeys), parts: 1,
		biased: !c.Mask.IsZero() || !c.Blocks.IsZero() || !c.Bias.IsZero() || !c.Relative.IsZero() || c.Slopes != nil, loadK: c.Pages != nil || !rowsInPlace(c.K), loadV: c.Pages != nil || !rowsInPlace(c.V)}
	x.blocked = !c.Blocks.IsZero()
	x.scores = x.biased || c.Softcap > 0
	groups, group := d.Batch*d.KVHeads, x.share*d.SeqQ
	most, want := 1, max(1, tasksPerThread*threads)
	switch {
	case group <= k.Width/2:
		x.few = true
		x.rows, x.blocks, x.tiles = group, 1, 1
		x.loadK, x.loadV = x.loadK || d.Dim != x.dimK, x.loadV || d.ValueDim != x.dimV
		x.asLieK, x.asLieV = kernelsRead(k, c.K, c.Pages), kernelsRead(k, c.V, c.Pages)
		want = max(1, fewTasks*threads)
		x.slot = x.rows*x.dimV + 2*x.laneRows()
	case d.SeqQ < k.Width:
		x.rows, x.blocks = min(k.Width, group), ceilDiv(group, k.Width)
		x.tiles = x.blocks
	default:
		x.rows, x.blocks = k.Width, ceilDiv(d.SeqQ, k.Width)
		x.tiles = x.blocks * x.share
	}
	if !x.few {
		x.slot = (x.dimV + 2) * k.Width
		block := keyBlock * (x.dimK + x.dimV)
		most = min(maxTiles, max(1, (cacheFloats-block)/(k.Width*(x.dimK+x.dimV))))
	}
	x.subs = max(1, min(groups*x.tiles/want, most))
	x.each = ceilDiv(x.tiles, x.subs)
	// With few rows a state is a small part of the keys that it sums up.
	if tasks := groups * x.each; tasks < want && (x.few || groups*x.tiles*x.chunks*x.slot <= slotFloats) {
		x.parts = min(x.chunks, ceilDiv(want, tasks))
	}
	x.span = ceilDiv(x.chunks, x.parts)
	x.parts = ceilDiv(x.chunks, x.span)
	x.tasks = groups * x.each * x.parts
	x.threads = max(1, min(threads, x.tasks))
	return x
}

// kernelsRead reports whether kernels with keys as lanes read the rows of t as they lie:
// whole vectors of neighbours, of whole groups of keys in each page.
func kernelsRead(k *vec.Kernels, t backend.Tensor, pages *backend.Pages) bool {
	shape := t.Shape()
	return shape[backend.Dim]%k.Lanes == 0 && t.Strides()[backend.Dim] == 1 &&
		(t.DType() != backend.F32 || rowsInPlace(t)) && (pages == nil || shape[backend.Seq]%k.Lanes == 0)
}

// laneRows is the rows of a tile rounded up to whole vectors.
func (x *fusedCut) laneRows() int { return ceilDiv(x.rows, x.kernels.Lanes) * x.kernels.Lanes }

// size returns the scratch of one goroutine: the pieces that wide or few cuts
// from it.
func (x *fusedCut) size() (floats, rows int) {
	states := 1 // of a tile
	if x.chunks > 1 {
		states = 2
	}
	floats = keyBlock*(x.dimK+x.dimV) + // packed keys and values
		2*x.kernels.Lanes // factors of transpositions
	if x.few {
		lanes := x.laneRows()
		return floats + x.rows*(x.dimK+2*keyBlock) + 2*lanes + states*x.slot, x.rows
	}
	w := x.kernels.Width
	floats += x.subs*(x.dimK*w+states*x.slot) + x.scoreRows()*w + 3*w +
		x.kernels.Lanes*max(x.dimK, x.dimV, keyBlock)
	if x.blocked {
		floats += keyBlock * x.dimV
	}
	if x.biased {
		floats += keyBlock + w
	}
	return floats, x.subs * w
}

// scoreRows is the keys of a score tile: those of a block, and where that is put
// together from pieces what the last one's squares may reach beyond it.
func (x *fusedCut) scoreRows() int {
	if x.blocked {
		return keyBlock + x.kernels.Lanes
	}
	return keyBlock
}

// slots returns the floats for the states of a call whose keys are cut.
func (x *fusedCut) slots() int {
	if x.parts == 1 {
		return 0
	}
	return x.d.Batch * x.d.KVHeads * x.tiles * x.chunks * x.slot
}

// scratchBytes returns the memory that the call takes beside the operands.
func (x *fusedCut) scratchBytes() int64 {
	floats, rows := x.size()
	const span = 16
	return int64(x.threads)*(int64(floats+alignSlack)*4+int64(rows)*span) + int64(x.slots())*4
}

// String says the cut in words.
func (x *fusedCut) String() string {
	what := fmt.Sprintf("up to %d tiles of %d query rows", x.subs, x.rows)
	if x.few {
		what = fmt.Sprintf("%d query rows, keys as lanes", x.rows)
	}
	return fmt.Sprintf("%d tasks of %s (%d batches x %d kv heads x %d tiles x %d ranges of keys), key blocks of %d, chunks of %d, %d goroutines",
		x.tasks, what, x.d.Batch, x.d.KVHeads, x.tiles, x.parts, keyBlock, chunkKeys, x.threads)
}

// path names the code for a plan.
func (x *fusedCut) path() string { return "fused " + x.kernels.Tier + " kernels" }

// why says in words what the cut does, for a plan.
func (x *fusedCut) why() string {
	s := fmt.Sprintf("blocked online softmax in %s kernels, %d query rows a register tile; what no row of a tile sees is skipped", x.kernels.Tier, x.kernels.Width)
	if x.few {
		s = fmt.Sprintf("blocked online softmax in %s kernels; few query rows, so keys are lanes", x.kernels.Tier)
	}
	if x.blocked {
		s += "; blocks that the mask hides from all of them are not computed"
	}
	if x.few && x.asLieK && x.asLieV {
		s += "; keys and values are read where they lie"
	} else if x.loadK || x.loadV {
		s += "; keys or values are not rows of float32 of whole vectors and are converted block by block"
	}
	if x.parts > 1 {
		s += "; the keys are cut as well, so that every thread has work"
	}
	return s
}

// rowCut divides the rows of a tensor [B, H, S, N] into tasks: at most
// taskBlocks sub-blocks of queryBlock rows of one head, times pieces of columns.
// The stages and Project use it; a row's arithmetic does not depend on it.
type rowCut struct {
	heads, seq int
	subs       int // sub-blocks of a full task
	each       int // tasks of a head and a piece of columns
	pieces     int // pieces of columns
	tasks      int // in all
}

// cutRows divides a tensor of the given shape, whose columns come in pieces,
// among threads goroutines. Each row of a task takes width floats of scratch.
func cutRows(shape backend.Shape, pieces, width, threads int) rowCut {
	c := rowCut{heads: shape[backend.Heads], seq: shape[backend.Seq], pieces: pieces}
	blocks := ceilDiv(c.seq, queryBlock)
	heads := shape[backend.Batch] * c.heads * pieces
	c.subs = subBlocks(heads*blocks, threads, queryBlock*width)
	c.each = ceilDiv(blocks, c.subs)
	c.tasks = heads * c.each
	return c
}

// taskRows returns the rows of a full task.
func (c *rowCut) taskRows() int { return min(c.seq, c.subs*queryBlock) }

// at returns what task t covers: rows [from, to) of a head, and a piece of
// columns.
func (c *rowCut) at(t int) (b, h, from, to, piece int) {
	part := t % c.each
	t /= c.each
	piece = t % c.pieces
	t /= c.pieces
	from = part * c.subs * queryBlock
	return t / c.heads, t % c.heads, from, min(c.seq, from+c.subs*queryBlock), piece
}
