// Package tile computes tiles of query rows against blocks of 128 keys and values:
//
//	S = scale·Q·Kᵀ, softcap, bias, -Inf where hidden
//	m' = max(m, max S)    P = 2^(S·log2 e - m')    a = 2^(m - m')
//	l = a·l + Σ P         O = a·O + P·V
//
// A tile has one of three forms, each of which has a file from scores to values:
//
//	rows    query rows as lanes            queries [DimK, Width]   scores [keys, Width]       outputs [DimV, Width]
//	pairs   likewise, products of bf16     queries [D/2, Width]    scores [keys, Width]       outputs [DimV, Width]
//	keys    keys as lanes                  queries [rows, DimK]    scores [rows, BlockKeys]   outputs [rows, DimV]
//
// A tile of 8 or 16 query rows may have them as lanes and the outputs of the last form
// (Layout.RowOutputs). The first fills the vector registers when there are many rows, the
// last when there are few. The gonum kernels always use the last.
//
// What is shared by the tiles of a call is read-only:
//
//	Layout      which kernels compute a tile, and how it lies in memory
//	Products    Q, K, V and O, and how they reach the kernels
//	Scores      scale, softcap, biases, masks and dropout
//	Attention   these together: the online softmax
//
// What changes belongs to one goroutine: a Space is the memory that the tiles of a task
// share, a Tile the rows of one of them with their sums. A task is computed as
//
//	space := a.Products.Open(scratch)
//	tiles, keys := a.Begin(scratch, space, &chunk)
//	a.Block(space, &chunk, tiles, j0)    for each block of keys
//	a.Write(space, &tiles[n])            after Fold, where several tasks have the keys
package tile

import (
	"github.com/seed90331342/attn/cpu/internal/pool"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// BlockKeys is the number of keys in one step. Blocks start at multiples of it, whatever the
// queries, the batch and the number of threads are.
const BlockKeys = 128

// SumKeys is the number of keys in one sum. A new sum begins at each multiple of it, counted from key 0, and the sums
// are folded in the order of their keys. The result therefore has the same bits whether one goroutine takes all keys
// of a row or several take some of them. With 1,024 keys folding is 0.2% of the work, and a cache of some thousand
// keys still has a sum for every core.
const SumKeys = 8 * BlockKeys

// ShardKeys is the number of keys whose results are merged by their log-sum-exp.
const ShardKeys = 32 * SumKeys

// shardSums is the number of sums in a shard.
const shardSums = ShardKeys / SumKeys

const (
	// MaxRows bounds the query rows of a task: a block of K and V is converted at most once for as many.
	MaxRows = 512
	// MaxTiles bounds the tiles of a task.
	MaxTiles = 32
	// CacheFloats is the share of a core's second-level cache that a task uses: 512 KiB, half of that of the smallest
	// processors with AVX-512.
	CacheFloats = 512 << 10 / 4
	// maxWidth is the largest Width of any kernels.
	maxWidth = 64
)

// Span is the keys or rows [Lo, Hi).
type Span struct{ Lo, Hi int }

// Empty reports whether s has no elements.
func (s Span) Empty() bool { return s.Lo >= s.Hi }

// union returns the smallest span that contains s and t, of which t may be empty.
func (s Span) union(t Span) Span {
	if t.Empty() {
		return s
	}
	return Span{min(s.Lo, t.Lo), max(s.Hi, t.Hi)}
}

// Clip returns what s and [lo, hi) share.
func (s Span) Clip(lo, hi int) Span { return Span{max(s.Lo, lo), min(s.Hi, hi)} }

// Chunk is the tiles and keys that one task computes. A key and value head and the query
// heads that share it are a group; its query rows, head after head, are divided into tiles.
type Chunk struct {
	Batch, KVHead int
	First, End    int // tiles of the group
	Keys          Span
}

// Tile is N query rows with their sums over the keys so far. The rows are those from row I of
// head H on; rows of the next head follow those of a head.
type Tile struct {
	index         int // among all tiles of the call
	Batch, KVHead int
	H, I, N       int
	Spans         []Span     // the keys that each row sees
	Keys          Span       // the keys that any row sees
	Every         Span       // the keys that every row sees
	here          Span       // the keys of the current block that any row sees, from a multiple of Layout.keyAlign on
	mixed         bool       // the block mask hides some of here from some of the rows
	stairs        vec.Stairs // the keys of here that a causal mask or a window hides from some rows, if kernels may leave them out
	mayHide       bool       // a row may not see all keys of here: NaN and Inf of their values must not reach its outputs as 0·NaN
	q             []float32  // the query rows, times scale
	sums          sums
}

// block is the keys and values that the tiles of a task take in one step.
type block struct {
	span       Span
	tiles      int  // that take them
	fetchEnd   int  // end of the keys that the kernels may prefetch for the next block
	hasK, hasV bool // the space has the converted keys, values
	checked    bool // whether all values are finite is known
	replaced   bool // they are not: the space has them with 0 for NaN and Inf
}

// Space is the memory that the tiles of a task share. It stays with the scratch of its
// goroutine; Products.Open takes its slices from there.
type Space struct {
	S           []float32 // a score tile
	MX          []float32 // the largest score of each row, the current block included; the state has it without
	Alpha, beta []float32 // factors of each row's outputs: 2^(old MX - MX) in a step, 1/sum at the end; two where sums merge
	Stage       []float32 // some rows between memory and a tile
	bias        []float32 // of a row
	table       []float32 // bias of a tile by distance
	Chain       []float32 // the derivatives of score mod and softcap; may be nil
	k, v        []float32 // converted, or values with 0 for NaN and Inf, or outputs
	pairs       []float32 // weights of bf16, and the sums of their block
	Scale, One  []float32 // factors of transpositions
	edge        [2][maxWidth]int32
	terms       [BlockKeys]float32 // of the biases of a row
	some        [BlockKeys + maxWidth]float32
	seen        [16 * BlockKeys]bool // rows of a mask, at most 16
	Draw        vec.Draw
	Runs        []vec.Run // the rows that a kernel reads
	block       block

	tiles [MaxTiles]Tile
	spans [MaxRows]Span // that the rows of the tiles see
}

// SpaceOf returns the space that stays with w. Its slices are those of an earlier call.
func SpaceOf(w *pool.Scratch) *Space {
	s, ok := w.Kept.(*Space)
	if !ok {
		s = new(Space)
		w.Kept = s
	}
	return s
}

// SpaceFloats returns the floats that Products.Open takes.
func (l *Layout) SpaceFloats() int {
	return (BlockKeys+l.Kernels.Lanes)*l.DimK + BlockKeys*l.DimV + 2*l.Kernels.Lanes + l.ScoreFloats + 3*l.Kernels.Width +
		l.Kernels.Lanes*max(l.DimK, l.DimV, BlockKeys) + BlockKeys + l.Kernels.Width + l.pairFloats
}

// Open returns the space of a task.
func (p *Products) Open(w *pool.Scratch) *Space {
	s, l := SpaceOf(w), p.Layout
	x := l.Kernels
	s.k, s.v = w.Floats((BlockKeys+x.Lanes)*l.DimK), w.Floats(BlockKeys*l.DimV)
	s.Scale, s.One = w.Floats(x.Lanes), w.Floats(x.Lanes)
	Fill(s.Scale, p.Scale)
	Fill(s.One, 1)
	s.S = w.Floats(l.ScoreFloats)
	s.MX, s.Alpha, s.beta = w.Floats(x.Width), w.Floats(x.Width), w.Floats(x.Width)
	s.Stage = w.Floats(x.Lanes * max(l.DimK, l.DimV, BlockKeys))
	s.table = w.Floats(BlockKeys + x.Width)
	s.bias = s.table[:BlockKeys]
	s.pairs = w.Floats(l.pairFloats)
	s.Chain = nil
	return s
}

// CeilDiv returns a/b, rounded up.
func CeilDiv(a, b int) int { return (a + b - 1) / b }

// RoundUp returns the smallest multiple of step that is at least n.
func RoundUp(n, step int) int { return CeilDiv(n, step) * step }

// Fill sets each element of s to x.
func Fill[T any](s []T, x T) {
	for i := range s {
		s[i] = x
	}
}
