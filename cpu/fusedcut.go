package cpu

import (
	"fmt"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

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
