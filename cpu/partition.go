package cpu

import (
	"fmt"
	"math"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// keyBlock is the number of keys in one step of the engine. Key blocks start at
// multiples of it, whatever the queries, the batch and the number of threads
// are.
const keyBlock = 128

// partition is how a call on query rows, keys and values is divided into tasks.
// Shapes, strides and types alone determine it; Plan prints it and the engine
// executes it.
//
// A key and value head and the query heads that share it are a group. A group's
// query rows, head after head, are cut into tiles. A task is some tiles of one
// group over some chunks of the keys: usually over all of them, but where there
// are fewer tiles than work for the threads, the keys are cut as well, at
// multiples of chunkKeys. Each block of keys and values that needs a conversion
// is converted once for all tiles of a task.
type partition struct {
	kernels *vec.Kernels
	d       backend.Dims
	threads int
	share   int // query heads of a group

	keyLanes   bool // tiles have keys as lanes, else query rows
	rowOutputs bool // outputs lie row by row
	rows       int  // query rows of a full tile
	headTiles  int  // tiles of a head; 0 where tiles span heads
	tiles      int  // tiles of a group
	taskTiles  int  // tiles of a task
	groupTasks int  // tasks of a group over all keys
	taskGroups int  // groups of a task, where they are small problems; else 0
	chunks     int  // chunks of all keys
	taskChunks int  // chunks of a task
	parts      int  // tasks over the same tiles
	tasks      int

	dimK, dimV   int  // head sizes rounded up to Lanes
	stateFloats  int  // of the state of a tile
	loadK, loadV bool // keys, values are converted or packed
	readK, readV bool // with keys as lanes, kernels read keys, values in place
}

const (
	// cacheFloats is the share of a core's second-level cache that a task uses:
	// 512 KiB, half of that of the smallest processors with AVX-512.
	cacheFloats = 512 << 10 / 4
	// maxRows bounds the query rows of a task: a block of K and V is converted at most
	// once for as many.
	maxRows = 512
	// maxTiles bounds the tiles of a task.
	maxTiles = 32
	// tasksPerThread is the number of tasks to make for each goroutine, so that one
	// slow core does not delay the call.
	tasksPerThread = 4
	// decodeTasks is the same for few query rows: such a call is bound by memory,
	// and the cores' shares of the bandwidth are uneven.
	decodeTasks = 16
	// maxSavedFloats bounds the memory for the states of a call with many query rows
	// whose keys are cut: 4 MiB. Where more would be needed, keys are not cut.
	maxSavedFloats = 1 << 20
)

// newPartition divides c among at most threads goroutines. A call that is a small
// part of a batch has threads 0 and gets as few tasks as possible.
func newPartition(k *vec.Kernels, c *backend.Call, threads int) partition {
	d, x := c.Dims(), queryWidth(k, c)
	rows := d.Heads / d.KVHeads * d.SeqQ
	decode := rows <= k.Width/2
	if lanes := roundUp(rows, x.Width); d.SeqK > keyBlock { // else see smallTask
		full := lanes / 2
		if !tilesInPlace(&c.K, c.Pages) || !tilesInPlace(&c.V, c.Pages) {
			full = max(12, lanes*3/4) // keys as lanes need no copies
		}
		decode = decode && rows <= full
	}
	if decode {
		x = k
		few := k.Narrow(1)
		padded := func(n int) bool { return roundUp(n, k.Lanes) > roundUp(n, few.Lanes) }
		if rows <= few.Width && (d.SeqK <= few.Lanes || padded(d.Dim) || padded(d.ValueDim)) {
			x = few // with vectors that fit
		}
	}
	return cutTasks(x, decode, c, threads)
}

// newGradientPartition is newPartition for a backward pass, where tiles have the full
// width: its sums over the query rows of a tile depend on their number.
func newGradientPartition(k *vec.Kernels, c *backend.Call, threads int) partition {
	d := c.Dims()
	return cutTasks(k, d.Heads/d.KVHeads*d.SeqQ <= k.Width/2, c, threads)
}

// queryWidth returns the table of k's tier with which c takes the least time. Wider tiles
// read less for each multiply-add; narrower ones have fewer empty lanes and compute fewer
// pairs that the visibility rule hides.
func queryWidth(k *vec.Kernels, c *backend.Call) *vec.Kernels {
	d, v := c.Dims(), &c.Visible
	best, least := k, math.Inf(1)
	for w := 0; w < k.Width; {
		x := k.Narrow(w + 1)
		w = x.Width
		over := w // the keys that a tile computes only because some of its rows see them
		if x.Columns() > 0 {
			over = x.Lanes * 3 / 2 // a vector's rows; some columns run slower than all
		}
		share := d.Heads / d.KVHeads
		rows := share * roundUp(d.SeqQ, w)
		if d.SeqQ < w { // tiles span heads
			rows = roundUp(share*d.SeqQ, w)
		}
		keys := d.SeqK
		switch {
		case v.Left != backend.Unbounded && v.Right != backend.Unbounded:
			keys = min(keys, v.Left+v.Right+over)
		case v.Left != v.Right: // about half of them, if the rows are as many
			keys -= max(0, min(d.SeqQ, keys)-over) / 2
		}
		time := float64(rows) * float64(keys)
		// Measured with windows: the shorter a tile's products, the more its other steps count.
		switch {
		case x.RowOutputs(): // the softmax fills half of each vector
			time *= 1.8
		case w == x.Lanes:
			time *= 1.2
		case w == 2*x.Lanes:
			time *= 1.06
		}
		if time <= least {
			best, least = x, time
		}
	}
	return best
}

// cutTasks divides c into tasks with tiles of the width of k, or, when decoding, with keys
// as lanes.
func cutTasks(k *vec.Kernels, decode bool, c *backend.Call, threads int) partition {
	d := c.Dims()
	x := partition{kernels: k, d: d, share: d.Heads / d.KVHeads, keyLanes: k.KeyLanes,
		dimK: roundUp(d.Dim, k.Lanes), dimV: roundUp(d.ValueDim, k.Lanes),
		chunks: ceilDiv(d.SeqK, chunkKeys), parts: 1,
		loadK: !tilesInPlace(&c.K, c.Pages), loadV: !tilesInPlace(&c.V, c.Pages)}
	groups, group := d.Batch*d.KVHeads, x.share*d.SeqQ
	want := max(1, tasksPerThread*threads)
	if decode {
		x.keyLanes = true
		want = max(1, decodeTasks*threads)
	}
	if d.SeqQ < k.Width { // tiles span heads
		x.rows, x.tiles = min(k.Width, group), ceilDiv(group, k.Width)
	} else {
		x.rows, x.headTiles = k.Width, ceilDiv(d.SeqQ, k.Width)
		x.tiles = x.headTiles * x.share
	}
	x.rowOutputs = x.keyLanes || k.RowOutputs()
	if x.keyLanes {
		x.loadK, x.loadV = x.loadK || d.Dim != x.dimK, x.loadV || d.ValueDim != x.dimV
		x.readK, x.readV = readsInPlace(k, &c.K, c.Pages), readsInPlace(k, &c.V, c.Pages)
		x.stateFloats = x.rows*x.dimV + 2*x.laneRows()
	} else {
		x.stateFloats = (x.dimV + 2) * k.Width
	}
	most := min(maxTiles, maxRows/k.Width, max(1, (cacheFloats-keyBlock*(x.dimK+x.dimV))/(k.Width*(x.dimK+x.dimV))))
	if x.keyLanes {
		most = min(most, x.tiles)
	}
	x.taskTiles = max(1, min(groups*x.tiles/want, most))
	x.groupTasks = ceilDiv(x.tiles, x.taskTiles)
	// With few rows a state is a small part of the keys that it sums up.
	if tasks := groups * x.groupTasks; tasks < want && (decode || groups*x.tiles*x.chunks*x.stateFloats <= maxSavedFloats) {
		x.parts = min(x.chunks, ceilDiv(want, tasks))
	}
	x.cutKeys(ceilDiv(x.chunks, x.parts))
	x.threads = max(1, min(threads, x.tasks))
	return x
}

// cutKeys sets the number of chunks of keys in a task.
func (x *partition) cutKeys(chunks int) {
	x.taskChunks = chunks
	x.parts = ceilDiv(x.chunks, chunks)
	x.tasks = x.d.Batch * x.d.KVHeads * x.groupTasks * x.parts
}

// tilesInPlace reports whether kernels with query rows as lanes read the rows of t in place.
// Pages of fewer keys, or of odd numbers of them, would take kernels for few keys: they are
// copied.
func tilesInPlace(t *backend.Tensor, pages *backend.Pages) bool {
	return rowsInPlace(t) && (pages == nil || t.Shape()[backend.Seq]%16 == 0)
}

// readsInPlace reports whether kernels with keys as lanes read the rows of t in
// place: whole vectors of adjacent elements in rows of a multiple of 16 bytes, and whole
// groups of keys in each page.
func readsInPlace(k *vec.Kernels, t *backend.Tensor, pages *backend.Pages) bool {
	shape, f32 := t.Shape(), t.DType() == backend.F32
	d := shape[backend.Dim]
	return d%k.Lanes == 0 && d*t.DType().Size()%16 == 0 && t.Strides()[backend.Dim] == 1 && (f32 || !k.KeyLanes) &&
		(!f32 || rowsInPlace(t)) && (pages == nil || shape[backend.Seq]%k.Lanes == 0)
}

// laneRows returns the rows of a tile rounded up to whole vectors.
func (x *partition) laneRows() int { return roundUp(x.rows, x.kernels.Lanes) }

// dotRows returns the number of query rows that Dots computes for n of a tile: it takes 8,
// 4 or 1 at a time, and reads and transposes the keys for each of these again.
func (x *partition) dotRows(n int) int {
	rest := n % 8
	switch {
	case rest < 2 || x.kernels.KeyLanes:
		return n
	case rest <= 4:
		return n - rest + 4
	}
	return n - rest + 8
}

// queryFloats returns the floats of a tile's packed query rows.
func (x *partition) queryFloats() int {
	if x.keyLanes {
		return x.dotRows(x.rows) * x.dimK
	}
	return x.dimK * x.kernels.Width
}

// scoreFloats returns the floats of a score tile: with query rows as lanes, some
// rows more, as squares at the end of gathered keys reach beyond them.
func (x *partition) scoreFloats() int {
	if x.keyLanes {
		return x.dotRows(x.rows) * keyBlock
	}
	return (keyBlock + x.kernels.Lanes) * x.kernels.Width
}

// tileRows returns the lanes of rows in the vectors of a tile's maxima and sums.
func (x *partition) tileRows() int {
	if x.keyLanes {
		return x.laneRows()
	}
	return x.kernels.Width
}

// outputFloats returns the floats of a tile's outputs.
func (x *partition) outputFloats() int { return x.stateFloats - 2*x.tileRows() }

// workspaceFloats returns the floats of the workspace that cutWorkspace cuts from scratch.
func (x *partition) workspaceFloats() int {
	return keyBlock*(x.dimK+x.dimV) + 2*x.kernels.Lanes + x.scoreFloats() + 3*x.tileRows() +
		x.kernels.Lanes*max(x.dimK, x.dimV, keyBlock) + keyBlock + x.kernels.Width
}

// tileStates returns the number of states of a tile: one for the current chunk, one for
// the chunks before it, one for the shards before.
func (x *partition) tileStates() int {
	if x.chunks > shardChunks {
		return 3
	}
	return min(2, x.chunks)
}

// savedFloats returns the floats for the states of a call whose keys are cut.
func (x *partition) savedFloats() int {
	if x.parts == 1 {
		return 0
	}
	return x.d.Batch * x.d.KVHeads * x.tiles * x.chunks * x.stateFloats
}

// String describes the partition for a plan.
func (x *partition) String() string {
	what := fmt.Sprintf("up to %d tiles of %d query rows", x.taskTiles, x.rows)
	if x.tiles == 1 && x.keyLanes {
		what = fmt.Sprintf("%d query rows, keys as lanes", x.rows)
	}
	if x.taskGroups > 0 {
		return fmt.Sprintf("%d tasks of up to %d groups of %d query rows (%d batches x %d kv heads), all %d keys at once, %d goroutines",
			x.tasks, x.taskGroups, x.rows, x.d.Batch, x.d.KVHeads, x.d.SeqK, x.threads)
	}
	return fmt.Sprintf("%d tasks of %s (%d batches x %d kv heads x %d tiles x %d ranges of keys), key blocks of %d, chunks of %d, %d goroutines",
		x.tasks, what, x.d.Batch, x.d.KVHeads, x.tiles, x.parts, keyBlock, chunkKeys, x.threads)
}

// path names the code for a plan.
func (x *partition) path() string { return "fused " + x.kernels.Tier + " kernels" }

// why describes the partition's choices for a plan.
func (x *partition) why(c *backend.Call) string {
	s := fmt.Sprintf("blocked online softmax in %s kernels, %d query rows a register tile; keys that no row of a tile sees are skipped", x.kernels.Tier, x.kernels.Width)
	switch {
	case x.kernels.KeyLanes:
		s = fmt.Sprintf("blocked online softmax over blas32.Gemm tiles of %d query rows, one goroutine a tile; keys that no row of a tile sees are skipped", x.rows)
	case x.keyLanes:
		s = fmt.Sprintf("blocked online softmax in %s kernels; few query rows, so keys are lanes", x.kernels.Tier)
	}
	if !c.Blocks.IsZero() {
		s += "; blocks that the mask hides from all of them are not computed"
	}
	if x.readK && x.readV {
		s += "; keys and values are read in place"
	} else if x.loadK || x.loadV {
		s += "; keys or values are not float32 rows of whole vectors and are converted block by block"
	}
	if x.parts > 1 {
		s += "; the keys are cut as well, so that every thread has work"
	}
	return s
}

func ceilDiv(a, b int) int { return (a + b - 1) / b }

// roundUp returns the smallest multiple of step that is at least n.
func roundUp(n, step int) int { return ceilDiv(n, step) * step }

// rowPartition divides the rows of a tensor [B, H, S, N] into tasks of up to
// maxRows rows of one head. The operations that treat rows independently use it.
type rowPartition struct {
	heads, seq int
	taskRows   int
	headTasks  int
	tasks      int
}

// rowStep is the multiple of which rowPartition's tasks have rows.
const rowStep = 64

// newRowPartition divides a tensor of the given shape among threads goroutines.
func newRowPartition(shape backend.Shape, threads int) rowPartition {
	x := rowPartition{heads: shape[backend.Heads], seq: shape[backend.Seq]}
	steps, heads := ceilDiv(x.seq, rowStep), shape[backend.Batch]*x.heads
	x.taskRows = rowStep * max(1, min(heads*steps/max(1, tasksPerThread*threads), maxRows/rowStep))
	x.headTasks = ceilDiv(x.seq, x.taskRows)
	x.tasks = heads * x.headTasks
	return x
}

// at returns the rows [from, to) of a head that task t covers.
func (x *rowPartition) at(t int) (b, h, from, to int) {
	from = t % x.headTasks * x.taskRows
	t /= x.headTasks
	return t / x.heads, t % x.heads, from, min(x.seq, from+x.taskRows)
}
