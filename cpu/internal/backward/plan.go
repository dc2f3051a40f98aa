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

	chunkKeys int // keys of a task, whose K, V, dK and dV fit the cache, a multiple of tile.BlockKeys
	keyChunks int // tasks of a key head
	slots     int // key heads whose dQ is summed at the same time
	sumFloats int // in which it is summed
	tasks     int

	// The sums over dS of a query head from which gradients of biases follow: by distance between row and key, as
	// Relative, and by row for a DBias without keys or by key for one without rows.
	distances, lines int
	inPlace          bool // tasks add to DBias, which has rows and keys
	shared           bool // several heads add to the same element of it
}

// NewPlan divides g among at most threads goroutines. Tiles have the full width: the sums over
// the query rows of a tile depend on their number.
func NewPlan(g *backend.Gradients, k *vec.Kernels, threads int) Plan {
	d := g.Dims()
	x := Plan{layout: tile.NewLayout(k, d.Heads/d.KVHeads*d.SeqQ <= k.Width/2, &g.Call), wantsQ: !g.DQ.IsZero()}
	if !g.DRelative.IsZero() || !g.DSlopes.IsZero() {
		x.distances = max(0, d.SeqQ+g.Positions()-1)
	}
	switch s := g.DBias.Shape(); {
	case g.DBias.IsZero():
	case s[backend.Dim] == 1:
		x.lines = d.SeqQ
	case s[backend.Seq] == 1:
		x.lines = g.Positions()
	default:
		x.inPlace, x.shared = true, s[backend.Batch] < d.Batch || s[backend.Heads] < d.Heads
	}
	groups, blocks := d.Batch*d.KVHeads, tile.CeilDiv(d.SeqK, tile.BlockKeys)
	// A task reads K and V and adds to dK and dV for each tile.
	some := max(1, min(8, tile.CacheFloats/(2*tile.BlockKeys*(x.layout.DimK+x.layout.DimV))))
	if groups < threads {
		some = max(1, min(some, blocks*groups/(2*threads)))
	}
	x.chunkKeys, x.keyChunks = some*tile.BlockKeys, tile.CeilDiv(blocks, some)
	x.slots = max(1, min(groups, threads))
	if x.wantsQ {
		x.sumFloats = x.slots * x.layout.Tiles * x.layout.QueryFloats
	}
	x.tasks = tile.CeilDiv(groups, x.slots) * x.keyChunks * x.slots
	x.threads = min(threads, x.tasks)
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
	p.Scratch = 4*(int64(x.threads)*int64(x.chunkFloats()+pool.AlignFloats)+int64(x.sumFloats+x.heads()*l.Dims.SeqQ+x.tasks)) +
		8*int64(x.heads()*(x.distances+x.lines))
}

// heads returns the number of query heads of all batches.
func (x *Plan) heads() int { return x.layout.Dims.Batch * x.layout.Dims.Heads }

// wantsScores reports whether the gradient of a bias needs dS.
func (x *Plan) wantsScores() bool { return x.inPlace || x.distances+x.lines > 0 }

// chunkFloats returns the floats of scratch that a task needs.
func (x *Plan) chunkFloats() int {
	l, rows := &x.layout, x.layout.Kernels.Width
	dims := l.DimK + l.DimV
	return l.SpaceFloats() + (2*x.chunkKeys+l.Kernels.Lanes+2*rows)*dims + 3*rows +
		4*max(l.ScoreFloats, rows*tile.BlockKeys) + max(tile.BlockKeys, rows) + max(l.DimK, l.DimV)
}
