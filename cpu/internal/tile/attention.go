package tile

import (
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/pool"
	"github.com/seed90331342/attn/cpu/internal/strided"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// Attention is a call whose tiles take the online softmax between the two products.
type Attention struct {
	Products Products
	Scores   Scores
	LSE      strided.Tensor
	// Where several tasks go over the keys of a tile, Saved has the sums of all tiles, and Set the
	// sums that have seen keys. The last of the tasks folds them.
	Saved []float32
	Set   []bool
	Exact bool // rows end in RowLSE: their LSE is written, merged with others, or counts a sink
}

// Open opens the operands of c, whose tiles have layout l.
func (a *Attention) Open(l *Layout, c *backend.Call) {
	a.Scores.Open(l, &c.Problem)
	a.Products = Products{Layout: l, Q: strided.Of(&c.Q), K: strided.Of(&c.K), V: strided.Of(&c.V), O: strided.Of(&c.O), Scale: a.Scores.Scale}
	a.LSE = strided.Of(&c.LSE)
	a.Exact = !a.LSE.IsZero() || l.Sums > shardSums || c.Sinks != nil
	if c.Pages != nil {
		a.Products.K.Pages, a.Products.V.Pages = c.Pages.Table, c.Pages.Table
	}
	a.Products.K.Listed, a.Products.V.Listed, a.Scores.Listed = c.Listed, c.Listed, c.Listed
}

// TileFloats returns the floats that Begin takes for each tile: its queries, and the states of its sums.
func (l *Layout) TileFloats() int { return l.QueryFloats() + 3*l.stateFloats() }

// Begin returns the tiles of c, in memory of w, and the keys that any of their rows sees.
func (a *Attention) Begin(w *pool.Scratch, s *Space, c *Chunk) (tiles []Tile, keys Span) {
	l := a.Products.Layout
	a.Scores.Seed(&s.Draw)
	tiles, keys = l.TilesOf(s, c), Span{l.Dims.SeqK, 0}
	for n := range tiles {
		t := &tiles[n]
		t.sums = sums{l.stateIn(w.Floats(l.stateFloats())), l.stateIn(w.Floats(l.stateFloats())), l.stateIn(w.Floats(l.stateFloats())), -1, false}
		t.sums.all.reset()
		if l.Sums > shardSums { // what no row sees has the result of no keys
			t.sums.merged.reset()
			a.complete(t, &t.sums.merged, s.Alpha, true)
		}
		a.Scores.FindVisible(t)
		keys = keys.union(t.Keys)
		if !t.Keys.Empty() {
			a.Products.Pack(w, s, t)
		}
	}
	return tiles, keys.Clip(c.Keys.Lo, c.Keys.Hi)
}

// FindVisible sets the keys that the rows of t see.
func (sc *Scores) FindVisible(t *Tile) {
	visible, seqK := &sc.problem.Visible, sc.Layout.Dims.SeqK
	t.Keys, t.Every = Span{seqK, 0}, Span{0, seqK}
	for r := range t.N {
		_, i := sc.Layout.Row(t.H, t.I, r)
		lo, hi := visible.Range(t.Batch, i, seqK)
		t.Spans[r] = Span{lo, hi}
		t.Every = t.Every.Clip(lo, hi)
		t.Keys = t.Keys.union(t.Spans[r])
	}
}

// Block takes tiles over the block of keys from j0 on.
func (a *Attention) Block(s *Space, c *Chunk, tiles []Tile, j0 int) {
	l, b, fetched := a.Products.Layout, &s.block, false
	*b = block{span: Span{j0 + BlockKeys, j0}, tiles: len(tiles)}
	for n := range tiles {
		t := &tiles[n]
		t.here = a.Scores.Trim(t, t.Keys.Clip(j0, j0+BlockKeys))
		b.span = b.span.union(t.here)
	}
	if b.span.Empty() {
		return
	}
	b.span.Lo = b.span.Lo / l.first * l.first
	for n := range tiles {
		t := &tiles[n]
		if t.here.Empty() {
			continue
		}
		a.enter(s, t, j0/SumKeys)
		b.end = 0
		if !fetched { // one tile fetches the next block for all
			b.end = min(t.Keys.Hi, c.Keys.Hi)
			fetched = b.end > j0+BlockKeys
		}
		t.here.Lo = t.here.Lo / l.first * l.first
		l.form.step(a, s, t, &tiles[(n+1)%len(tiles)])
	}
}

// mayHide reports whether a weight of 0 may have to hide a value of t's keys that is not finite.
func (a *Attention) mayHide(s *Space, t *Tile) bool {
	return a.Scores.hiding || t.mixed || s.block.replaced || a.Products.Layout.Kernels.KeyLanes || t.edge(t.here)
}

// addValues adds the products of the weights in s.S, after dropout, and the values of t's keys in the block to o, the
// outputs of t. Values that are not finite leave outputs that are not finite, whatever their weights. Where such values
// may be hidden, and with look set, the outputs are looked at: reading values once is cheaper than looking at them first.
func (a *Attention) addValues(s *Space, t *Tile, o []float32, look bool) {
	p, x, clean := &a.Products, a.Products.Layout.Kernels, a.mayHide(s, t)
	a.Scores.Drop(s, t, s.S, t.here)
	if look = look && clean && !s.block.checked && p.Layout.ReadV; look {
		copy(s.v, o)
	}
	e, ld := p.values(s, t, t.here, clean && !look)
	p.Layout.form.multiply(p, s, t, e, ld)
	if look && x.NonFinite(o, len(o), 1, len(o)) {
		copy(o, s.v)
		e, ld = p.values(s, t, t.here, true)
		p.Layout.form.multiply(p, s, t, e, ld)
	}
	a.addReplaced(s, t)
}

// addReplaced adds to the outputs of t what its rows see of the values that are replaced in the block.
func (a *Attention) addReplaced(s *Space, t *Tile) {
	if s.block.replaced {
		a.Products.addNonFinite(t, t.here, s.S, BlockKeys, func(h, i, j, r int, _ float32) bool {
			return j >= t.Spans[r].Lo && j < t.Spans[r].Hi && !a.Scores.Hides(t.Batch, h, i, j) &&
				(!a.Scores.Drops() || a.Scores.problem.Dropout.Keeps(t.Batch, h, i, a.Scores.Key(t.Batch, j)))
		})
	}
}

// enter prepares t for keys of sum at.
func (a *Attention) enter(s *Space, t *Tile, at int) {
	if t.sums.at == at {
		return
	}
	if a.Saved == nil {
		a.leave(s, t, at)
	} else { // another task folds the sums
		var set *bool
		t.sums.cur, set = a.saved(t, at)
		*set = true
	}
	t.sums.cur.reset()
	t.sums.at = at
}

// leave adds the current sum of t to those before it. The next one is at.
func (a *Attention) leave(s *Space, t *Tile, at int) {
	a.Products.Layout.close(s, &t.sums)
	if t.sums.at >= 0 && t.sums.at/shardSums != at/shardSums {
		a.mergeShard(s, t)
	}
}

// complete turns the maxima of t's sums st into LSE, if these are needed, and sets the
// factors of its outputs. With sinks these count.
func (a *Attention) complete(t *Tile, st *state, factors []float32, sinks bool) {
	clear(factors)
	for r := range t.N {
		factors[r] = 1 / st.l[r]
		if a.Exact || st.l[r] == 0 {
			sink := vec.NegInf
			if sinks {
				h, _ := a.Products.Layout.Row(t.H, t.I, r)
				sink = a.Scores.problem.Sink(h)
			}
			st.m[r], factors[r] = RowLSE(st.m[r], float64(st.l[r]), sink)
		}
	}
}

// mergeShard completes the rows of t over its shard and merges them with the shards before.
func (a *Attention) mergeShard(s *Space, t *Tile) {
	l, st, merged := a.Products.Layout, &t.sums.all, &t.sums.merged
	first := t.sums.at < shardSums
	a.complete(t, st, s.Alpha, first)
	l.multiply(st.o, s.Alpha)
	if first {
		*merged, *st = *st, *merged
	} else {
		for r := range t.N {
			s.Alpha[r], s.beta[r], merged.m[r] = MergeLSE(merged.m[r], st.m[r])
		}
		l.add(merged.o, st.o, s.Alpha, s.beta)
	}
	st.reset()
	t.sums.hasAll = false
}

// Write divides the outputs of t's rows by their sums and writes O and LSE.
func (a *Attention) Write(s *Space, t *Tile) {
	st, l := &t.sums.all, a.Products.Layout
	l.close(s, &t.sums)
	if l.Sums > shardSums {
		a.mergeShard(s, t)
		st = &t.sums.merged
		Fill(s.Alpha, 1)
	} else {
		a.complete(t, st, s.Alpha, true)
	}
	if !a.LSE.IsZero() {
		for r := range t.N {
			h, i := l.Row(t.H, t.I, r)
			a.LSE.F32[a.LSE.Index(t.Batch, h, i)] = st.m[r]
		}
	}
	a.Products.writeOutputs(s, t, st.o, s.Alpha)
}
