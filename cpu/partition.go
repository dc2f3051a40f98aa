package cpu

import (
	"fmt"
	"math"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/pool"
	"github.com/seed90331342/attn/cpu/internal/strided"
	"github.com/seed90331342/attn/cpu/internal/tile"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// partition is how a call on query rows, keys and values is divided into tasks. Shapes, strides, types, options
// and threads determine it, not what tensors contain: Plan prints it and the tasks execute it.
//
// A group is the query heads that read one key head; a sum is over tile.SumKeys keys. A task computes a chunk: some
// tiles of one group over usually all keys. Where tiles are too few for the threads, several chunks of whole sums
// divide the keys of the same tiles. A chunk converts a block of keys and values at most once for all its tiles.
type partition struct {
	layout  tile.Layout
	threads int

	chunkTiles  int // tiles of a chunk
	groupChunks int // chunks of a group over all keys
	chunkSums   int // sums of the keys of a chunk
	tileChunks  int // chunks over the same tiles, which divide their keys
	taskGroups  int // groups of a task, where they are small problems; else 0
	tasks       int
	floats      int // of scratch that a goroutine needs for a call of Attention
}

const (
	// tasksPerThread is the number of tasks to make for each goroutine, so that one slow core does not delay the call.
	tasksPerThread = 4
	// decodeTasks is the same for few query rows: such a call is bound by memory,
	// and the cores' shares of the bandwidth are uneven.
	decodeTasks = 16
	// maxSavedFloats bounds the memory for the sums of a call with many query rows
	// whose keys several chunks share: 4 MiB. Where more would be needed, none do.
	maxSavedFloats = 1 << 20
)

// newPartition divides c among at most threads goroutines, in tiles with keys as lanes for few rows.
// A small one of several joint calls has threads 0 and gets as few tasks as possible.
func newPartition(k *vec.Kernels, c *backend.Call, threads int) partition {
	d, x := c.Dims(), fastestKernels(k, c, max(1, threads))
	rows := d.Heads / d.KVHeads * d.SeqQ
	pairs := tile.Pairs(k, c)
	fewRows := rows <= k.Width/2 && !pairs
	if lanes := tile.RoundUp(rows, x.Width); d.SeqK > tile.BlockKeys { // with fewer keys gatherSmall may do without tiles
		most := lanes / 2
		if !strided.RowsInPlace(&c.K, c) || !strided.RowsInPlace(&c.V, c) {
			most = max(12, lanes*3/4) // keys as lanes need no copies
		}
		fewRows = fewRows && rows <= most
	}
	if fewRows {
		x = k
		narrow := k.Narrow(1)
		padded := func(n int) bool { return tile.RoundUp(n, k.Lanes) > tile.RoundUp(n, narrow.Lanes) }
		if rows <= narrow.Width && (d.SeqK <= narrow.Lanes || padded(d.Dim) || padded(d.ValueDim)) {
			x = narrow // with vectors that fit
		}
	}
	even := d.Batch
	if c.Visible.KLen != nil || c.Visible.Offsets != nil {
		even = evenBatches(c)
	}
	return divide(tile.NewLayout(x, fewRows, c), fewRows, even, threads)
}

// fastestKernels returns the table of k's tier whose tiles of query rows take the least time. Wider tiles read less for each
// multiply-add; narrower ones have fewer empty lanes, compute fewer pairs that the visibility rule hides, and are enough for
// more threads.
func fastestKernels(k *vec.Kernels, c *backend.Call, threads int) *vec.Kernels {
	d, v := c.Dims(), &c.Visible
	best, least, pairs := k, math.Inf(1), tile.Pairs(k, c)
	for w := 0; w < k.Width; {
		x := k.Narrow(w + 1)
		w = x.Width
		if pairs && x.PairUnit() == "" {
			continue
		}
		share := d.Heads / d.KVHeads
		rows := share * tile.RoundUp(d.SeqQ, w)
		if d.SeqQ < w { // tiles span heads
			rows = tile.RoundUp(share*d.SeqQ, w)
		}
		keys := d.SeqK
		times, step := x.Speed()
		if pairs {
			step = w
		}
		switch {
		case v.Left != backend.Unbounded && v.Right != backend.Unbounded:
			keys = min(keys, v.Left+v.Right+step) // a tile computes so many only because some of its rows see them
		case v.Left != v.Right: // one side is bounded, as by a causal mask: about half of them, if the rows are as many
			keys -= max(0, min(d.SeqQ, keys)-step) / 2
		}
		sums := tile.CeilDiv(d.SeqK, tile.SumKeys) // tasks of a tile, at most
		perThread := float64(tile.CeilDiv(d.Batch*d.KVHeads*rows/w*sums, threads)) / float64(sums)
		if time := perThread * float64(w*keys) * times; time <= least {
			best, least = x, time
		}
	}
	return best
}

// evenBatches returns how many batches like the longest of c would be as much work as c.
func evenBatches(c *backend.Call) int {
	d, v, most := c.Dims(), c.Visible, int64(1)
	for b := range d.Batch {
		most = max(most, v.PairsOf(b, d.SeqQ, d.SeqK))
	}
	return int(max(1, v.Pairs(d.Batch, d.SeqQ, d.SeqK)/most))
}

// divide divides a call with layout l into tasks. even is how many batches like its longest would be as much work.
func divide(l tile.Layout, fewRows bool, even, threads int) partition {
	x := partition{layout: l, tileChunks: 1}
	groups, want := even*l.Dims.KVHeads, max(1, tasksPerThread*threads)
	if fewRows {
		want = max(1, decodeTasks*threads)
	}
	width, dims := l.Kernels.Width, l.DimK+l.DimV
	most := min(tile.MaxTiles, tile.MaxRows/width, max(1, (tile.CacheFloats-tile.BlockKeys*dims)/(width*dims)))
	if l.KeyLanes {
		most = min(most, l.Tiles)
	}
	x.chunkTiles = max(1, min(groups*l.Tiles/want, most))
	x.floats = l.SpaceFloats() + x.chunkTiles*l.TileFloats
	x.groupChunks = tile.CeilDiv(l.Tiles, x.chunkTiles)
	// With few rows the sums are a small part of their keys.
	saved := l.AllSums * l.StateFloats
	if tasks := groups * x.groupChunks; tasks < want && (fewRows || saved <= maxSavedFloats) {
		x.tileChunks = min(l.Sums, tile.CeilDiv(want, tasks))
	}
	x.shareKeys(tile.CeilDiv(l.Sums, x.tileChunks))
	x.threads = max(1, min(threads, x.tasks))
	return x
}

// shareKeys sets the number of sums of a chunk.
func (x *partition) shareKeys(sums int) {
	l := &x.layout
	x.chunkSums, x.tileChunks = sums, tile.CeilDiv(l.Sums, sums)
	x.tasks = l.Dims.Batch * l.Dims.KVHeads * x.groupChunks * x.tileChunks
}

// chunk returns what task t computes.
func (x *partition) chunk(t int) tile.Chunk {
	l, tiles := &x.layout, t/x.tileChunks
	group, first := tiles/x.groupChunks, t%x.tileChunks*x.chunkSums
	c := tile.Chunk{Batch: group / l.Dims.KVHeads, KVHead: group % l.Dims.KVHeads}
	c.First = tiles % x.groupChunks * x.chunkTiles
	c.End = min(c.First+x.chunkTiles, l.Tiles)
	c.Keys = tile.Span{Lo: first * tile.SumKeys, Hi: min((first+x.chunkSums)*tile.SumKeys, l.Dims.SeqK)}
	return c
}

// scratchBytes returns the memory that a call of Attention needs in addition to its operands.
func (x *partition) scratchBytes() int64 {
	n := int64(x.threads) * int64(x.floats+pool.AlignFloats)
	if x.tileChunks > 1 {
		n += int64(x.layout.AllSums * x.layout.StateFloats)
	}
	return 4 * n
}

const (
	// smallTaskWork is the work of a task of small problems, in multiply-adds: 10 to 50 microseconds.
	smallTaskWork = 1 << 16
	// smallGroupWork is what a small problem costs in addition to its multiply-adds, and smallRowWork what a row costs.
	smallGroupWork, smallRowWork = 64, 64
)

// gatherSmall makes tasks of several groups for at most threads goroutines if the groups of c are small problems.
func (x *partition) gatherSmall(c *backend.Call, threads int) {
	p, l := &c.Problem, &x.layout
	d := &l.Dims
	plain := p.Mask.IsZero() && p.Blocks.IsZero() && p.Bias.IsZero() && p.Relative.IsZero() &&
		p.Slopes == nil && p.Softcap == 0 && p.Dropout.P == 0 && p.ScoreMod == nil
	if c.Pages != nil && c.K.Shape()[backend.Seq]%l.Kernels.Lanes != 0 { // groups of keys lie in one page
		return
	}
	if !plain || c.Listed != nil || !l.KeyLanes || l.Kernels.OnlyKeyLanes || l.Tiles > 1 || d.SeqK > tile.BlockKeys {
		return
	}
	for _, t := range [4]*backend.Tensor{&c.Q, &c.K, &c.V, &c.O} {
		if !strided.InPlace(t) {
			return
		}
	}
	groups := d.Batch * d.KVHeads
	most := smallTaskWork / (smallGroupWork + l.Rows*(smallRowWork+d.SeqK*(d.Dim+d.ValueDim)))
	x.taskGroups = max(1, min(most, groups/max(1, decodeTasks*threads)))
	x.tasks = tile.CeilDiv(groups, x.taskGroups)
	x.threads = max(1, min(x.threads, x.tasks))
}

// String describes the partition for a plan.
func (x *partition) String() string {
	l := &x.layout
	what := fmt.Sprintf("up to %d tiles of %d query rows", x.chunkTiles, l.Rows)
	if l.Tiles == 1 && l.KeyLanes {
		what = fmt.Sprintf("%d query rows, keys as lanes", l.Rows)
	}
	if x.taskGroups > 0 {
		return fmt.Sprintf("%d tasks of up to %d groups of %d query rows (%d batches x %d kv heads), all %d keys at once, %d goroutines",
			x.tasks, x.taskGroups, l.Rows, l.Dims.Batch, l.Dims.KVHeads, l.Dims.SeqK, x.threads)
	}
	return fmt.Sprintf("%d tasks of %s (%d batches x %d kv heads x %d tiles x %d spans of keys), key blocks of %d, sums of %d, %d goroutines",
		x.tasks, what, l.Dims.Batch, l.Dims.KVHeads, l.Tiles, x.tileChunks, tile.BlockKeys, tile.SumKeys, x.threads)
}

// explain names the code and describes the partition's choices for a plan.
func (x *partition) explain(c *backend.Call) (path, why string) {
	l := &x.layout
	path = "fused " + l.Kernels.Tier + " kernels"
	if l.Pairs {
		path += ", products of bf16 pairs in " + l.Kernels.PairUnit()
	} else if l.Fixed {
		path += ", products of int8 keys and 16-bit queries in " + map[int]string{8: "AVX2", 16: "AVX512-VNNI"}[l.Kernels.Lanes]
	}
	s := fmt.Sprintf("blocked online softmax in %s kernels, %d query rows a register tile; keys that no row of a tile sees are skipped",
		l.Kernels.Tier, l.Kernels.Width)
	switch {
	case l.Kernels.OnlyKeyLanes:
		s = fmt.Sprintf("blocked online softmax over blas32.Gemm tiles of %d query rows, one goroutine a tile; keys that no row of a tile sees are skipped", l.Rows)
	case l.KeyLanes:
		s = fmt.Sprintf("blocked online softmax in %s kernels; few query rows, so keys are lanes", l.Kernels.Tier)
	}
	if !c.Blocks.IsZero() {
		s += "; blocks that the mask hides from all of them are not computed"
	}
	if c.Listed != nil {
		s += "; listed keys and their values are gathered block by block"
	} else if l.ReadK && l.ReadV {
		s += "; keys and values are read in place"
	} else if !l.ReadK || !l.ReadV {
		s += "; keys or values are not float32 rows of whole vectors and are converted block by block"
	}
	if x.tileChunks > 1 {
		s += "; the keys are divided as well, so that every thread has work"
	}
	return path, s
}
