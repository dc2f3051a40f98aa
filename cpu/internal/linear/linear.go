// Package linear computes causal convolutions (conv.go), and linear attention, one state head of one sequence a task:
//
//	S = diag(exp g)·S    d = β·(v - Sᵀk)    S = S + kᵀd    o = scale·q·S
//
// A step computes one token by these formulas (step.go). A chunk computes up to [Job.Chunk] tokens as products of matrices
// (chunk.go), with the kernels of tiles of attention (products.go).
package linear

import (
	"cmp"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/pool"
	"github.com/seed90331342/attn/cpu/internal/strided"
	"github.com/seed90331342/attn/cpu/internal/tile"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// maxChunk is the most tokens of a chunk. More take more operations for each token, which costs more than larger products
// save, and with decays of channels their exponentials share a reference.
const maxChunk = 16

// minDecay is the least g. Its exponential is 0 in float32.
const minDecay = -128

// Job is a call. It implements pool.Job. Its fields are those of backend.LinearAttention.
type Job struct {
	kernels                                            *vec.Kernels
	o, q, k, v, decays, betas, pastState, presentState strided.Tensor
	scale                                              float32
	cuQ                                                []int

	chunk    int          // tokens
	states   int          // of a sequence: Hv
	all      int          // of the call
	heads    int          // states of a task
	group    int          // outputs of a state
	dk, dv   int          // K and V
	lk, lv   int          // likewise in whole vectors
	lc       int          // chunk in whole tiles of tokens
	strips   int          // tiles that dv columns are
	columns  *vec.Kernels // those whose lanes are columns
	tokens   *vec.Kernels // those whose lanes are tokens
	channels bool         // decays are those of channels
	inPlace  bool         // states are computed where PresentState is
	updated  bool         // PastState is PresentState
}

// maxHeads is the most state heads of a task, and taskShare the least tasks of each thread with several heads each.
const (
	maxHeads  = 32
	taskShare = 4
)

// Set makes j the call c, whose operands are pinned, for so many threads, and returns the number of tasks and the floats of scratch of each.
func (j *Job) Set(x *vec.Kernels, c *backend.LinearAttention, threads int) (tasks, floats int) {
	*j = Job{kernels: x, scale: c.Scale, cuQ: c.CuQ, o: strided.Of(&c.O), q: strided.Of(&c.Q), k: strided.Of(&c.K), v: strided.Of(&c.V),
		decays: strided.Of(&c.Decay), betas: strided.Of(&c.Beta), pastState: strided.Of(&c.PastState), presentState: strided.Of(&c.PresentState)}
	j.states, j.dk, j.dv = j.v.Shape[backend.Heads], j.k.Shape[backend.Dim], j.v.Shape[backend.Dim]
	j.group = j.o.Shape[backend.Heads] / j.states
	j.lk, j.lv = tile.RoundUp(j.dk, x.Lanes), tile.RoundUp(j.dv, x.Lanes)
	j.channels = j.decays.Shape[backend.Dim] > 1
	j.chunk = min(cmp.Or(c.ChunkSize, maxChunk), maxChunk)
	j.columns, j.strips = tableOf(x, j.dv)
	j.tokens, j.lc = tableOf(x, j.chunk)
	j.lc *= j.tokens.Width
	j.inPlace = !j.presentState.IsZero() && strided.InPlace(&c.PresentState) && j.lv == j.dv
	j.updated = c.PastState == c.PresentState
	var r room
	r.divide(j, func(n int) []float32 { floats += n; return nil })
	sequences := backend.Sequences(c.CuQ, j.v.Shape[backend.Batch])
	j.all, j.heads = sequences*j.states, 1
	if j.v.Shape[backend.Batch]*j.v.Shape[backend.Seq] == sequences { // one token each
		j.heads = max(1, min(maxHeads, j.all/(taskShare*threads)))
	}
	return tile.CeilDiv(j.all, j.heads), floats
}

// room is the memory and the place of a task.
type room struct {
	*Job
	space *tile.Space
	b, h  int // batch and state head

	s, own      []float32 // the state [K, V], rows ls apart; memory for it
	ls, ahead   int       // from the state to the one of the next task, or 0
	x           []float32 // strips [K + lc, Width] of states and d
	inStrips    bool      // the state is in x
	qs, keys, p []float32 // [lc, lk], p for keys with decays of channels
	g           []float32 // [lc, lk] or [lc], decays
	d           []float32 // [lc, lv], values or d
	kt          []float32 // strips [lk, Width] of keys as columns
	left        []float32 // [lc, ll], left factors of x
	ll          int       // K + lc
	mask        []float32 // [lc, lc], exp(G_i - G_j) for j <= i
	inverse     []float32 // [lc, maxChunk]
	tmp         []float32 // [lc, Width]
	beta        []float32 // [lc]
	from, to    []float32 // exponentials for channels or tokens
	one, zero   []float32 // factors of rows
	alpha       []float32 // likewise
	lanes, mx   []float32
	few, rows   []float32 // [1 + group, lk] and [1 + group, lv] of a step
	dots        []float32 // [group]
}

// divide takes the slices of r from floats.
func (r *room) divide(j *Job, floats func(n int) []float32) {
	width := max(j.columns.Width, j.tokens.Width)
	rows := max(j.lc, j.lk, j.lv, 1+j.group, width)
	r.ll = j.dk + j.lc
	r.own, r.x = floats(j.dk*j.lv), floats(j.strips*r.ll*j.columns.Width)
	r.qs, r.keys, r.p, r.g = floats(j.lc*j.lk), floats(j.lc*j.lk), floats(j.lc*j.lk), floats(j.lc*j.lk)
	r.d, r.kt, r.left = floats(j.lc*j.lv), floats(j.lk*j.lc), floats(j.lc*r.ll)
	r.mask, r.inverse, r.tmp, r.beta = floats(j.lc*j.lc), floats(j.lc*maxChunk), floats(j.lc*width), floats(j.lc)
	r.from, r.to, r.lanes, r.mx = floats(max(j.lk, j.lc)), floats(max(j.lk, j.lc)), floats(j.kernels.Lanes), floats(width)
	r.one, r.zero, r.alpha = floats(rows), floats(max(rows, maxChunk*j.lk)), floats(rows)
	r.few, r.rows, r.dots = floats((1+j.group)*j.lk), floats((1+j.group)*j.lv), floats(j.group)
}

// Task implements pool.Job.
func (j *Job) Task(turn *pool.Turn, w *pool.Scratch, t int) error {
	r := room{Job: j, space: tile.SpaceOf(w)}
	r.divide(j, w.Floats)
	tile.Fill(r.one, 1)
	clear(r.zero)
	for t, end := t*j.heads, min((t+1)*j.heads, j.all); t < end; t++ {
		n, lo, hi := t/j.states, 0, 0
		r.b, lo, hi = backend.Sequence(j.cuQ, n, j.v.Shape[backend.Seq])
		r.h, r.ahead = t%j.states, 0
		if next := t + 1; next < end {
			j.prefetch(next)
			if j.inPlace {
				r.ahead = j.presentState.Index(next/j.states, next%j.states, 0) - j.presentState.Index(n, r.h, 0)
			}
		}
		r.open(n)
		for lo < hi {
			if err := turn.Pause(); err != nil {
				return err
			}
			lo += r.advance(lo, min(hi-lo, j.chunk))
		}
		r.toRows()
		for i := 0; i < j.dk && !j.presentState.IsZero() && !j.inPlace; i++ {
			j.presentState.Store(j.kernels, r.s[i*r.ls:][:j.dv], n, r.h, i, 0)
		}
	}
	return nil
}

// prefetch prefetches the operands of the first token of state head t, except for its state.
func (j *Job) prefetch(t int) {
	b, lo, hi := backend.Sequence(j.cuQ, t/j.states, j.v.Shape[backend.Seq])
	h := t % j.states
	if lo == hi {
		return
	}
	j.k.Prefetch(b, h*j.k.Shape[backend.Heads]/j.states, lo)
	j.v.Prefetch(b, h, lo)
	for g := range j.group {
		j.q.Prefetch(b, (h*j.group+g)*j.q.Shape[backend.Heads]/j.o.Shape[backend.Heads], lo)
		j.o.Prefetch(b, h*j.group+g, lo)
	}
	if j.channels {
		j.decays.Prefetch(b, h, lo)
	}
}

// open sets r.s to the state before the first token of sequence n.
func (r *room) open(n int) {
	r.s, r.ls = r.own, r.lv
	if r.inPlace {
		r.s, r.ls = r.presentState.F32[r.presentState.Index(n, r.h, 0):], r.presentState.Stride[backend.Seq]
	}
	for i := 0; i < r.dk && !(r.inPlace && r.updated); i++ {
		row := r.s[i*r.ls:][:r.lv]
		if r.pastState.IsZero() {
			clear(row)
		} else {
			r.pastState.LoadRows(r.kernels, row, r.lv, n, r.h, i, 1)
		}
	}
}

// advance computes up to n tokens from t on, and returns how many. It computes tokens with NaN or Inf one at a time: in
// a chunk products with 0 would spread them to the tokens before.
func (r *room) advance(t, n int) int {
	x := r.kernels
	r.k.LoadRows(x, r.keys, r.lk, r.b, r.h*r.k.Shape[backend.Heads]/r.states, t, n)
	r.v.LoadRows(x, r.d, r.lv, r.b, r.h, t, n)
	together := n > 1 && !x.NonFinite(r.keys, r.lk, n, r.dk) && !x.NonFinite(r.d, r.lv, n, r.dv)
	if !r.betas.IsZero() {
		r.betas.LoadRows(x, r.beta, 1, r.b, r.h, t, n)
		together = together && !x.NonFinite(r.beta, 1, n, 1)
	}
	if !r.decays.IsZero() {
		width := 1
		if r.channels {
			width = r.lk
		}
		r.decays.LoadRows(x, r.g, width, r.b, r.h, t, n)
		if least, _ := r.extremes(r.g[:tile.RoundUp(n*width, x.Lanes)]); least < minDecay {
			for i, g := range r.g[:n*width] {
				r.g[i] = max(g, minDecay)
			}
		}
		together = together && !x.NonFinite(r.g, width, n, r.decays.Shape[backend.Dim])
	}
	ref := 0
	if r.channels && together {
		ref, n = r.reference(n)
	}
	if n > 1 && together {
		r.chunkOf(t, n, ref)
		return n
	}
	r.toRows()
	for i := range n {
		r.step(t, i)
	}
	return n
}

// query loads n query rows of output head g of the state from token t on, times scale.
func (r *room) query(dst []float32, g, t, n int) {
	h := (r.h*r.group + g) * r.q.Shape[backend.Heads] / r.o.Shape[backend.Heads]
	r.q.LoadRows(r.kernels, dst, r.lk, r.b, h, t, n)
	r.times(dst[:n*r.lk], r.scale)
}

// multiply sets whole vectors to x·y, at most maxChunk rows of K.
func (r *room) multiply(to, x, y []float32) { r.kernels.ProductSum(to, x, y, r.zero) }

// times multiplies whole vectors by c.
func (r *room) times(s []float32, c float32) { r.kernels.ScaleMax(s, c, r.lanes) }

// scaleRows multiplies n rows of d elements, whole vectors ld apart, by factors [n].
func (r *room) scaleRows(rows []float32, ld, n, d int, factors []float32) {
	r.kernels.RankOne(rows, ld, r.zero, r.zero, factors, n, d, 0)
}

// extremes returns the least and the largest element of whole vectors that is not NaN.
func (r *room) extremes(s []float32) (least, most float32) {
	least = -r.kernels.ScaleMax(s, -1, r.lanes)
	return least, r.kernels.ScaleMax(s, -1, r.lanes)
}
