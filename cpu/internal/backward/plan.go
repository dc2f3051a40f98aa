package backward

import (
	"fmt"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/pool"
	"github.com/seed90331342/attn/cpu/internal/tile"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// Plan is how a call is divided into tasks.
type Plan struct {
	layout  tile.Layout
	wantsQ  bool
	threads int

	cacheKeys int // keys whose K, V, dK and dV fit the cache, a multiple of tile.BlockKeys
	chunkKeys int // keys of a task, a multiple of tile.BlockKeys, at most cacheKeys
	keyChunks int // tasks of a key head
	slots     int // key heads whose dQ is summed at the same time
	tasks     int

	queryRows                int // of all heads and batches
	sumFloats                int // in which dQ is summed
	biasDistances, biasLines int // lengths of the sums of biases
}

// cacheFloats is the share of a core's second-level cache that a task uses, as in package cpu.
const cacheFloats = 512 << 10 / 4

// NewPlan divides g among at most threads goroutines. Tiles have the full width: the sums over
// the query rows of a tile depend on their number.
func NewPlan(g *backend.Gradients, k *vec.Kernels, threads int) Plan {
	d := g.Dims()
	x := Plan{layout: tile.NewLayout(k, d.Heads/d.KVHeads*d.SeqQ <= k.Width/2, &g.Call), wantsQ: !g.DQ.IsZero()}
	x.biasDistances, x.biasLines = biasSums(g)
	x.queryRows = d.Batch * d.Heads * d.SeqQ
	groups, blocks := d.Batch*d.KVHeads, tile.CeilDiv(d.SeqK, tile.BlockKeys)
	// A task reads K and V and adds to dK and dV for each tile.
	some := max(1, min(8, cacheFloats/(2*tile.BlockKeys*(x.layout.DimK+x.layout.DimV))))
	x.cacheKeys = some * tile.BlockKeys
	if groups < threads {
		some = max(1, min(some, blocks*groups/(2*threads)))
	}
	x.chunkKeys, x.keyChunks = some*tile.BlockKeys, tile.CeilDiv(blocks, some)
	x.slots = max(1, min(groups, threads))
	x.tasks = tile.CeilDiv(groups, x.slots) * x.keyChunks * x.slots
	if x.threads = min(threads, x.tasks); x.wantsQ {
		x.sumFloats = x.slots * x.layout.Tiles * x.layout.QueryFloats()
	}
	return x
}

// Describe sets the fields of p that describe the plan.
func (x *Plan) Describe(p *backend.Plan) {
	l := &x.layout
	p.Path = "backward " + l.Kernels.Tier + " kernels"
	p.Why = fmt.Sprintf("five products of tiles of %d query rows and 128 keys in %s kernels; keys that no row of a tile sees are skipped", l.Rows, l.Kernels.Tier)
	p.Cut = fmt.Sprintf("%d tasks (%d batches x %d kv heads x %d chunks of up to %d keys) over %d tiles of query rows, %d goroutines",
		x.tasks, l.Dims.Batch, l.Dims.KVHeads, x.keyChunks, x.chunkKeys, l.Tiles, x.threads)
	p.Chunks = x.tasks
	p.Scratch = 4*(int64(x.threads)*int64(x.chunkFloats()+pool.AlignFloats)+int64(x.sumFloats+x.queryRows+x.tasks)) +
		8*int64(x.biasDistances+x.biasLines)
}

// chunkFloats returns the floats of scratch that a task needs.
func (x *Plan) chunkFloats() int {
	l, rows := &x.layout, x.layout.Kernels.Width
	dims := l.DimK + l.DimV
	return l.SpaceFloats() + (x.cacheKeys+l.Kernels.Lanes+2*rows+x.chunkKeys)*dims + 3*rows +
		4*max(l.ScoreFloats(), rows*tile.BlockKeys) + max(tile.BlockKeys, rows) + max(l.DimK, l.DimV)
}

// place returns which task n is: the chunk'th of the keys of a group, a key head in a batch. The
// tasks of a slot are a chain.
func (x *Plan) place(n int) (slot, group, chunk int) {
	slot, round := n%x.slots, n/x.slots
	return slot, round/x.keyChunks*x.slots + slot, round % x.keyChunks
}

// task returns the task with a place, or -1 for no group.
func (x *Plan) task(group, chunk int) int {
	if group < 0 {
		return -1
	}
	return (group/x.slots*x.keyChunks+chunk)*x.slots + group%x.slots
}

// lastWith returns the last tile of a key head with rows of tile at in any of its heads.
func (x *Plan) lastWith(at int) int {
	l := &x.layout
	if l.HeadTiles == 0 {
		return l.Tiles - 1
	}
	return (l.Share-1)*l.HeadTiles + at%l.HeadTiles
}
