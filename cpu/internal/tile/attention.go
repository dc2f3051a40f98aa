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
	// Where each of several tasks computes some of the sums of a tile, Saved holds the states of all sums of the call, and
	// Set reports which of them have seen keys. The last task of a tile folds its sums.
	Saved []float32
	Set   []bool
	Exact bool // RowLSE finishes every row: its LSE is written, merged with others, or includes a sink
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

// sums are the states of the rows of a tile between blocks: cur is the sum over the last SumKeys keys, all that over the keys
// of its shard before them. merged is the result of the shards before, with O in o and LSE in m, if a call has several.
type sums struct {
	cur, all, merged state
	at               int  // the index of cur among the sums of a row, or noSum
	hasAll           bool // all has seen keys
}

// noSum is the index before the first sum. It belongs to the first shard.
const noSum = -1

// state is the online softmax of some rows over some keys: with m the largest score, in units of log2 e,
//
//	l = Σ 2^(s - m)    o = Σ 2^(s - m)·v
//
// o is [Dv, Width], or with Layout.RowOutputs [rows, DimV].
type state struct{ o, m, l []float32 }

// stateIn returns a state in mem, which holds o, then m, then l.
func (l *Layout) stateIn(mem []float32) state {
	o, rows := l.OutputFloats, l.Kernels.Width
	return state{mem[:o], mem[o : o+rows], mem[o+rows : o+2*rows]}
}

// reset sets s to the sum over no keys.
func (s *state) reset() {
	clear(s.o)
	clear(s.l)
	Fill(s.m, vec.NoScore)
}

// Begin returns the tiles of c, in memory of w, and the keys that any of their rows sees.
func (a *Attention) Begin(w *pool.Scratch, s *Space, c *Chunk) (tiles []Tile, keys Span) {
	l := a.Products.Layout
	if a.Scores.Drops {
		a.Scores.Seed(&s.Draw)
	}
	tiles, keys = l.TilesOf(s, c), Span{l.Dims.SeqK, 0}
	for n := range tiles {
		t := &tiles[n]
		t.sums = sums{l.stateIn(w.Floats(l.StateFloats)), l.stateIn(w.Floats(l.StateFloats)), l.stateIn(w.Floats(l.StateFloats)), noSum, false}
		a.Scores.FindVisible(t)
		keys = keys.union(t.Keys)
		t.q = w.Floats(l.QueryFloats)
	}
	return tiles, keys.Clip(c.Keys.Lo, c.Keys.Hi)
}

// Block adds the block of keys and values from j0 on to the sums of tiles. The first block of which a tile sees a key also
// packs its query rows.
func (a *Attention) Block(s *Space, c *Chunk, tiles []Tile, j0 int) {
	l, b, fetched := a.Products.Layout, &s.block, false
	*b = block{span: Span{j0 + BlockKeys, j0}, tiles: len(tiles)}
	for n := range tiles {
		t := &tiles[n]
		if t.here = t.Keys.Clip(j0, j0+BlockKeys); !a.Scores.blocks.IsZero() {
			t.here = a.Scores.Trim(t, t.here)
		}
		b.span = b.span.union(t.here)
	}
	if b.span.Empty() {
		return
	}
	b.span.Lo = b.span.Lo / l.keyAlign * l.keyAlign
	for n := range tiles {
		t := &tiles[n]
		if t.here.Empty() {
			continue
		}
		if t.sums.at == noSum { // the first block of t
			l.form.pack(&a.Products, s, t)
		}
		a.beginSum(s, t, j0/SumKeys)
		b.fetchEnd = 0
		if !fetched { // one tile fetches the next block for all
			b.fetchEnd = min(t.Keys.Hi, c.Keys.Hi)
			fetched = b.fetchEnd > j0+BlockKeys
		}
		t.here.Lo = t.here.Lo / l.keyAlign * l.keyAlign
		every := t.Every.Clip(t.here.Lo, t.here.Hi)
		t.stairs = vec.Stairs{Up: every.Lo - t.here.Lo, Down: t.here.Hi - every.Hi}
		if every.Empty() || l.KeyLanes || l.RowOutputs && every.Lo > t.here.Lo || t.I+t.N > l.Dims.SeqQ || a.Products.V.Pages != nil {
			t.stairs = vec.Stairs{} // kernels cannot leave them out
		}
		exact := l.RowOutputs && t.stairs != vec.Stairs{} // no hidden value is read
		t.mayHide = a.Scores.hiding || t.mixed || b.replaced || l.Kernels.OnlyKeyLanes || every != t.here && !exact
		l.form.step(a, s, t, &tiles[(n+1)%len(tiles)])
	}
}

// FindVisible sets the keys that the rows of t see.
func (sc *Scores) FindVisible(t *Tile) {
	d := &sc.Layout.Dims
	lo, hi, end := sc.problem.Visible.Window(t.Batch, d.SeqK)
	keys, every := Span{end, 0}, Span{0, end}
	for r, i := 0, t.I; r < t.N; r, i = r+1, i+1 {
		if i == d.SeqQ { // the next head
			i = 0
		}
		seen := Span{max(0, lo+i), min(end, hi+i)}
		if seen.Empty() {
			seen = Span{}
		}
		t.Spans[r] = seen
		keys, every = keys.union(seen), every.Clip(seen.Lo, seen.Hi)
	}
	t.Keys, t.Every = keys, every
}

// beginSum makes the sum with index at the current one of t, unless it is.
func (a *Attention) beginSum(s *Space, t *Tile, at int) {
	if t.sums.at == at {
		return
	}
	if a.Saved == nil {
		if last := t.sums.at/shardSums != at/shardSums; last || t.sums.at != noSum {
			a.endSum(s, t, last)
		}
	} else { // another task folds the sums
		var set *bool
		t.sums.cur, set = a.savedState(t, at)
		*set = true
	}
	t.sums.cur.reset()
	t.sums.at = at
}

// endSum adds the current sum of t, if there is one, to those before it. With last set no other sum of its shard follows.
func (a *Attention) endSum(s *Space, t *Tile, last bool) {
	switch u := &t.sums; {
	case u.at == noSum: // no key was seen
		u.all.reset()
	case u.hasAll:
		a.Products.Layout.combine(s, &u.all, &u.cur)
	default:
		u.cur, u.all, u.hasAll = u.all, u.cur, true
	}
	if last {
		a.mergeShard(s, t)
	}
}

// mergeShard completes the rows of t over its shard and merges them with the shards before.
func (a *Attention) mergeShard(s *Space, t *Tile) {
	l, st, merged := a.Products.Layout, &t.sums.all, &t.sums.merged
	first := t.sums.at < shardSums
	a.complete(s, t, first)
	l.multiply(st.o, s.Alpha)
	if first {
		*merged, *st = *st, *merged
	} else {
		for r := range t.N {
			s.Alpha[r], s.beta[r], merged.m[r] = vec.MergeLSE(merged.m[r], st.m[r])
		}
		l.add(merged.o, st.o, s.Alpha, s.beta)
	}
	t.sums.hasAll = false
}

// savedState returns the state of the sum at of t.
func (a *Attention) savedState(t *Tile, at int) (st state, set *bool) {
	l := a.Products.Layout
	n := t.index*l.Sums + at
	return l.stateIn(a.Saved[n*l.StateFloats:]), &a.Set[n]
}

// Fold folds the saved sums of t into it, one after another. The last one stays the current one, which Write folds.
func (a *Attention) Fold(s *Space, t *Tile) {
	t.sums.at = noSum
	for at := range a.Products.Layout.Sums {
		if st, set := a.savedState(t, at); *set {
			a.endSum(s, t, t.sums.at/shardSums != at/shardSums)
			t.sums.cur, t.sums.at = st, at
		}
	}
}

// Write divides the outputs of t's rows by their sums and writes O and LSE.
func (a *Attention) Write(s *Space, t *Tile) {
	st, l := &t.sums.all, a.Products.Layout
	shards := l.Sums > shardSums
	if a.endSum(s, t, shards); shards {
		st = &t.sums.merged
		Fill(s.Alpha, 1)
	} else {
		a.complete(s, t, true)
	}
	if !a.LSE.IsZero() {
		for r := range t.N {
			h, i := l.Row(t.H, t.I, r)
			a.LSE.F32[a.LSE.Index(t.Batch, h, i)] = st.m[r]
		}
	}
	a.Products.writeOutputs(s, t, st.o, s.Alpha)
}

// complete turns the maxima of t over its shard into LSE, if these are needed, and sets s.Alpha to the factors of its
// outputs. With sinks these count.
func (a *Attention) complete(s *Space, t *Tile, sinks bool) {
	st := &t.sums.all
	clear(s.Alpha)
	for r := range t.N {
		s.Alpha[r] = 1 / st.l[r]
		if a.Exact || st.l[r] == 0 {
			sink := vec.NegInf
			if sinks {
				h, _ := a.Products.Layout.Row(t.H, t.I, r)
				sink = a.Scores.problem.Sink(h)
			}
			st.m[r], s.Alpha[r] = vec.RowLSE(st.m[r], float64(st.l[r]), sink)
		}
	}
}

// combine adds y, the sums over later keys, to x:
//
//	m = max(x.m, y.m)    a = 2^(x.m - m)    b = 2^(y.m - m)
//	x.o = a·x.o + b·y.o    x.l = a·x.l + b·y.l    x.m = m
//
// with each operation rounded. When one side has seen no key, the result has the bits of the other side.
func (l *Layout) combine(s *Space, x, y *state) {
	a, b := s.Alpha, s.beta
	for i, m := range x.m {
		x.m[i] = max(m, y.m[i])
		a[i], b[i] = m-x.m[i], y.m[i]-x.m[i]
	}
	l.Kernels.Exp2(a, 0)
	l.Kernels.Exp2(b, 0)
	for i := range x.l {
		x.l[i] = float32(a[i]*x.l[i]) + float32(b[i]*y.l[i])
	}
	l.add(x.o, y.o, a, b)
}

// add computes x = a·x + b·y for each row of outputs.
func (l *Layout) add(x, y, a, b []float32) {
	switch {
	case !l.RowOutputs:
		l.Kernels.Fold(x, y, len(x)/l.Kernels.Width, a, b)
		return
	case !l.KeyLanes:
		l.Kernels.FoldRows(x, l.DimV, x, y, l.Kernels.Width, l.DimV, a, b)
		return
	}
	for r := range len(x) / l.DimV {
		for i := r * l.DimV; i < (r+1)*l.DimV; i++ {
			x[i] = float32(a[r]*x[i]) + float32(b[r]*y[i])
		}
	}
}

// multiply computes x = a·x for each row of outputs.
func (l *Layout) multiply(x, a []float32) {
	for i := range x {
		if l.RowOutputs {
			x[i] *= a[i/l.DimV]
		} else {
			x[i] *= a[i%l.Kernels.Width]
		}
	}
}
