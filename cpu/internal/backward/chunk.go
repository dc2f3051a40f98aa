package backward

import (
	"math"
	"time"

	"github.com/seed90331342/attn/cpu/internal/pool"
	"github.com/seed90331342/attn/cpu/internal/strided"
	"github.com/seed90331342/attn/cpu/internal/tile"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// chunkJob computes dQ, dK and dV.
type chunkJob struct{ call *Call }

// Task implements pool.Job: it computes a chunk. The tasks of a slot are a chain: each adds to the sums of a tile
// after the task before it. Where heads share a DBias, each adds to a row of it after the head before it. Tasks begin
// in an order in which a task waits only for one that runs or has ended.
func (j chunkJob) Task(turn *pool.Turn, w *pool.Scratch, n int) error {
	c, plan := j.call, &j.call.plan
	l := &plan.layout
	n = plan.tasks - 1 - n // tasks are handed out in descending order
	slot, round := n%plan.slots, n/plan.slots
	group, at := round/plan.keyChunks*plan.slots+slot, round%plan.keyChunks
	if group >= l.Dims.Batch*l.Dims.KVHeads {
		return nil
	}
	var x chunk
	x.open(c, w, group, at)
	before, last := n-plan.slots, at+1 == plan.keyChunks
	if !plan.wantsQ && !plan.wantsScores() {
		before = -1
	}
	neighbor := n - 1 // the task of the same keys in the group before; negative for the first group
	if slot == 0 {
		neighbor = n - 1 - (plan.keyChunks-1)*plan.slots
	}
	for i := range l.Tiles {
		x.of.First, x.of.End = i, i+1
		t := &l.TilesOf(x.space, &x.of)[0]
		c.forward.Scores.FindVisible(t)
		seen := !t.Keys.Clip(x.of.Keys.Lo, x.of.Keys.Hi).Empty()
		if !seen && (!plan.wantsQ || at > 0 && !last) {
			continue
		}
		err := c.wait(turn, before, i)
		if err == nil && plan.shared {
			all := l.Tiles - 1 // the last tile with rows of tile i in any head
			if l.HeadTiles > 0 {
				all += i%l.HeadTiles - (l.HeadTiles - 1)
			}
			err = c.wait(turn, neighbor, all)
		}
		if err != nil {
			return err
		}
		if plan.wantsQ {
			x.dQ = c.sums[(slot*l.Tiles+i)*l.QueryFloats:][:l.QueryFloats]
			if at == 0 {
				clear(x.dQ)
			}
		}
		if seen {
			if err := x.addTile(turn, t); err != nil {
				return err
			}
		}
		if plan.wantsQ && last {
			l.EachRow(x.space, t, 0, x.dQ, l.DimK, x.ones, func(row []float32, h, i int) {
				c.storeGradient(&c.dQ, row, x.old, c.problem.Scale, t.Batch, h, i)
			})
		}
		c.done[n].Store(int32(i + 1))
	}
	if err := c.wait(turn, before, l.Tiles-1); err != nil {
		return err
	}
	c.done[n].Store(int32(l.Tiles))
	for r, keys := 0, x.of.Keys; r < keys.Hi-keys.Lo; r++ {
		c.storeGradient(&c.dK, x.dK[r*l.DimK:(r+1)*l.DimK], x.old, c.problem.Scale, x.of.Batch, x.of.KVHead, keys.Lo+r)
		c.storeGradient(&c.dV, x.dV[r*l.DimV:(r+1)*l.DimV], x.old, 1, x.of.Batch, x.of.KVHead, keys.Lo+r)
	}
	return nil
}

// wait waits until task n has added to tile at. It does not wait for a negative n.
func (c *Call) wait(turn *pool.Turn, n, at int) (err error) {
	for spins := 0; err == nil && n >= 0 && int(c.done[n].Load()) <= at; spins++ {
		if spins >= 1000 { // a block of keys takes some 10 microseconds
			time.Sleep(20 * time.Microsecond)
		}
		if err = turn.Pause(); err == nil {
			err = turn.Yield()
		}
	}
	return err
}

// chunk is what a task computes, and the memory to compute it in. Elements of Q, K, V and dO that are not finite are
// 0 there: a hidden one must not reach a sum, and D is NaN in rows that see one.
type chunk struct {
	call   *Call
	layout *tile.Layout
	of     tile.Chunk
	space  *tile.Space

	k, v   []float32 // the keys and values, and Lanes rows of zeros
	loaded bool      // they are
	dK, dV []float32 // of the keys; dK is yet to be multiplied by Scale
	dQ     []float32 // of the tile, likewise

	q, dO   []float32 // the tile's rows [rows, DimK], [rows, DimV]
	qt, dOt []float32 // transposed, q times scale; with keys as lanes [rows, DimK], dO
	m, dots []float32 // LSE in units of log2 e, and D, of each row
	sum     []float32 // of weights, not used

	w      []float32 // weights after dropout, dO's factors in dV
	ds     []float32 // gradients of the biased scores, then of the dot products over Scale
	turned []float32 // transposed weights or gradients
	ones   []float32
	old    []float32 // a row of a gradient to add to
}

// open takes the memory for a chunk of a group's keys from scratch.
func (x *chunk) open(c *Call, w *pool.Scratch, group, at int) {
	plan, l := &c.plan, &c.plan.layout
	s, rows, keys := c.forward.Products.Open(w), l.Kernels.Width, plan.chunkKeys+l.Kernels.Lanes
	*x = chunk{call: c, layout: l, space: s, k: w.Floats(keys * l.DimK), v: w.Floats(keys * l.DimV),
		dK: w.Floats(plan.chunkKeys * l.DimK), dV: w.Floats(plan.chunkKeys * l.DimV),
		q: w.Floats(rows * l.DimK), dO: w.Floats(rows * l.DimV), qt: w.Floats(rows * l.DimK), dOt: w.Floats(rows * l.DimV),
		m: w.Floats(rows), dots: w.Floats(rows), sum: w.Floats(rows), w: s.S,
		ds: w.Floats(l.ScoreFloats), turned: w.Floats(rows * tile.BlockKeys), ones: w.Floats(max(tile.BlockKeys, rows)), old: w.Floats(max(l.DimK, l.DimV))}
	x.of = tile.Chunk{Batch: group / l.Dims.KVHeads, KVHead: group % l.Dims.KVHeads}
	x.of.Keys = tile.Span{Lo: at * plan.chunkKeys, Hi: min((at+1)*plan.chunkKeys, l.Dims.SeqK)}
	if c.forward.Scores.Listed != nil { // the other lists may be longer
		x.of.Keys.Hi = min(x.of.Keys.Hi, len(c.forward.Scores.Listed[x.of.Batch]))
	}
	if c.forward.Scores.Drops {
		x.w = w.Floats(l.ScoreFloats)
		c.forward.Scores.Seed(&s.Draw)
	}
	if c.forward.Scores.Cap > 0 || c.problem.ScoreMod != nil {
		s.Chain = w.Floats(l.ScoreFloats)
	}
	tile.Fill(x.ones, 1)
	clear(x.sum)
	clear(x.dK)
	clear(x.dV)
}

// addTile adds what the rows of t contribute to the sums.
func (x *chunk) addTile(turn *pool.Turn, t *tile.Tile) error {
	if !x.loaded {
		x.loaded = true
		l, p, n := x.layout, &x.call.forward.Products, x.of.Keys.Hi-x.of.Keys.Lo
		p.K.LoadRows(l.Kernels, x.k, l.DimK, x.of.Batch, x.of.KVHead, x.of.Keys.Lo, n)
		p.V.LoadRows(l.Kernels, x.v, l.DimV, x.of.Batch, x.of.KVHead, x.of.Keys.Lo, n)
		x.clean(x.k, n, l.DimK)
		x.clean(x.v, n, l.DimV)
	}
	x.loadTile(t)
	for j0 := x.of.Keys.Lo; j0 < x.of.Keys.Hi; j0 += tile.BlockKeys {
		if err := turn.Pause(); err != nil {
			return err
		}
		here := x.call.forward.Scores.Trim(t, t.Keys.Clip(j0, min(j0+tile.BlockKeys, x.of.Keys.Hi)))
		if !here.Empty() {
			x.scoreGradients(t, here)
			x.addBlock(t, here)
		}
	}
	return nil
}

// clean replaces NaN and Inf in n adjacent rows of dim elements, and all elements after them, by zero.
func (x *chunk) clean(rows []float32, n, dim int) {
	if x.layout.Kernels.NonFinite(rows, dim, n, dim) {
		tile.ZeroNonFinite(rows[:n*dim])
	}
	clear(rows[n*dim:])
}

// loadTile loads the query rows of t, whose spans are set, and their dO, LSE and D. A row
// whose LSE is infinite sees no key.
func (x *chunk) loadTile(t *tile.Tile) {
	c, l, s := x.call, x.layout, x.space
	k := l.Kernels
	clear(x.m)
	clear(x.dots)
	for r := range t.N {
		h, i := l.Row(t.H, t.I, r)
		c.forward.Products.Q.LoadRows(k, x.q[r*l.DimK:], l.DimK, t.Batch, h, i, 1)
		c.dO.LoadRows(k, x.dO[r*l.DimV:], l.DimV, t.Batch, h, i, 1)
		x.dots[r] = c.dots[(t.Batch*l.Dims.Heads+h)*l.Dims.SeqQ+i]
		switch lse := c.forward.LSE.At(t.Batch, h, i, 0); {
		case math.IsInf(float64(lse), 0):
			t.Spans[r], t.Every = tile.Span{}, tile.Span{}
		case lse == lse: // with NaN the weights of hidden keys would be NaN
			x.m[r] = float32(float64(lse) * math.Log2E)
		}
	}
	x.clean(x.q, t.N, l.DimK)
	x.clean(x.dO, t.N, l.DimV)
	if l.KeyLanes {
		copy(x.dOt, x.dO)
		tile.ScaleRows(x.qt, x.q[:t.N*l.DimK], c.forward.Products.Scale)
		return
	}
	for lane := 0; lane < k.Width; lane += k.Lanes {
		k.Transpose(x.qt[lane:], k.Width, k.Width, x.q[lane*l.DimK:], l.DimK, 1, l.DimK, s.Scale)
		k.Transpose(x.dOt[lane:], k.Width, k.Width, x.dO[lane*l.DimV:], l.DimV, 1, l.DimV, s.One)
	}
}

// scoreGradients computes the weights of t and the keys of here, before dropout in space.S and after it in x.w, and
// the gradients of their biased scores in x.ds. Where the weight is 0 the gradient is 0.
func (x *chunk) scoreGradients(t *tile.Tile, here tile.Span) {
	l, s, scores := x.layout, x.space, &x.call.forward.Scores
	n, first, factor := here.Hi-here.Lo, here.Lo-x.of.Keys.Lo, x.call.problem.Dropout.Factor()
	k, v := x.k[first*l.DimK:], x.v[first*l.DimV:]
	if l.KeyLanes {
		lanes := tile.RoundUp(n, l.Kernels.Lanes)
		l.Kernels.Dots(vec.F32, s.S, tile.BlockKeys, s.Rows(k, l.DimK, lanes, l.DimK), l.DimK, x.qt, l.DimK, t.N, l.DimK)
		l.Kernels.Dots(vec.F32, x.ds, tile.BlockKeys, s.Rows(v, l.DimV, lanes, l.DimV), l.DimV, x.dOt, l.DimV, t.N, l.DimV)
		scores.Adjust(s, t, here)
		for row, m := range x.m[:t.N] {
			scores := s.S[row*tile.BlockKeys:][:lanes]
			for c, y := range scores { // see limitScores
				if y > m {
					scores[c] = m
				}
			}
			l.Kernels.Exp2(scores, m)
		}
		x.drop(t, here, t.N*tile.BlockKeys)
		for row := range t.N {
			at := row * tile.BlockKeys
			w, ds := x.w[at:at+lanes], x.ds[at:at+lanes]
			for c, p := range s.S[at : at+lanes] { // as vec.Kernels.ScoreGradients
				switch dp := ds[c]; {
				case p == 0:
					ds[c] = 0
				case w[c] == 0:
					ds[c] = p * (0 - x.dots[row])
				default:
					ds[c] = p * (float32(dp*factor) - x.dots[row])
				}
			}
		}
		return
	}
	width, fours := l.Kernels.Width, tile.CeilDiv(n, 4)
	copy(s.MX, x.m)
	l.Kernels.Scores(s.S, s.Rows(k, l.DimK, n, l.DimK), l.DimK, x.qt, l.Dims.Dim, vec.Stairs{}, s.MX)
	scores.Adjust(s, t, here)
	x.limitScores(t, n)
	tile.Fill(s.S[n*width:fours*4*width], vec.NegInf)
	copy(s.MX, x.m)
	l.Kernels.Weights(s.S, fours, x.m, s.MX, x.sum, s.Alpha)
	x.drop(t, here, n*width)
	l.Kernels.Scores(x.ds, s.Rows(v, l.DimV, n, l.DimV), l.DimV, x.dOt, l.Dims.ValueDim, vec.Stairs{}, s.MX)
	l.Kernels.ScoreGradients(x.ds, s.S, x.w, n, x.dots, factor)
}

// limitScores bounds the scores of t and n keys, with query rows as lanes, by the LSE of their row: a weight is at most
// 1, however much a large score or its LSE is off. MX has the maxima of the scores, and is NaN or too large where
// Adjust has hidden some.
func (x *chunk) limitScores(t *tile.Tile, n int) {
	s, width := x.space, x.layout.Kernels.Width
	for lane, m := range x.m[:t.N] {
		if s.MX[lane] <= m {
			continue
		}
		for at := lane; at < n*width; at += width {
			s.S[at] = min(s.S[at], m)
		}
	}
}

// drop sets x.w to the weights after dropout, n floats.
func (x *chunk) drop(t *tile.Tile, here tile.Span, n int) {
	if x.call.forward.Scores.Drops {
		copy(x.w, x.space.S[:n])
		x.call.forward.Scores.Drop(x.space, t, x.w, here)
	}
}

// addBlock adds what t and the keys of here, whose gradients scoreGradients has computed,
// contribute to the sums of biases, of dQ, and of dK and dV.
func (x *chunk) addBlock(t *tile.Tile, here tile.Span) {
	c, l, s := x.call, x.layout, x.space
	n, first := here.Hi-here.Lo, here.Lo-x.of.Keys.Lo
	if !c.dV.IsZero() {
		x.addOuter(t, n, x.dV[first*l.DimV:], x.dO, l.DimV, x.w)
	}
	if c.plan.wantsScores() {
		x.addBiases(t, here)
	}
	for i, y := range s.Chain[:min(len(s.Chain), l.Floats(t, n))] {
		if x.ds[i] != 0 { // y of a hidden key may be NaN
			x.ds[i] *= y
		}
	}
	k := x.k[first*l.DimK:]
	switch {
	case !c.plan.wantsQ:
	case l.KeyLanes:
		l.Kernels.Mix(vec.F32, x.dQ, l.DimK, s.Rows(k, l.DimK, n, l.DimK), l.DimK, x.ds, tile.BlockKeys, x.ones, t.N, l.DimK)
	default:
		l.Kernels.Values(x.dQ, s.Rows(k, l.DimK, n, l.DimK), l.DimK, x.ds, l.Dims.Dim, vec.Stairs{}, x.ones)
	}
	if !c.dK.IsZero() {
		x.addOuter(t, n, x.dK[first*l.DimK:], x.q, l.DimK, x.ds)
	}
}

// addOuter adds, for each of n keys, the sum of the rows of t, times their factors:
//
//	sums [n, dim]    rows [t.N, dim]
func (x *chunk) addOuter(t *tile.Tile, n int, sums, rows []float32, dim int, factors []float32) {
	k := x.layout.Kernels
	if !x.layout.KeyLanes {
		k.AddOuter(sums, dim, rows, dim, t.N, factors, n, dim)
		return
	}
	for r := range t.N {
		strided.CopyElements(x.turned[r:], t.N, factors[r*tile.BlockKeys:], 1, n)
	}
	k.Mix(vec.F32, sums, dim, x.space.Rows(rows, dim, t.N, dim), dim, x.turned, t.N, x.ones, n, dim)
}
