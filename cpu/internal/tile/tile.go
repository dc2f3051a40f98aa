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
// A tile of few query rows may have them as lanes and the outputs of the last form
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

import "github.com/seed90331342/attn/cpu/internal/vec"

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
	Spans         []Span    // the keys that each row sees
	Keys          Span      // the keys that any row sees
	Every         Span      // the keys that every row sees
	here          Span      // the keys of the current block that any row sees
	mixed         bool      // the block mask hides some of here from some of the rows
	q             []float32 // the query rows, times scale
	sums          sums
}

// block is the keys and values that the tiles of a task take in one step.
type block struct {
	span       Span
	tiles      int  // that take them
	end        int  // of the keys of which the kernels prefetch those of the next block
	hasK, hasV bool // the space has the converted keys, values
	checked    bool // whether all values are finite is known
	replaced   bool // they are not: the space has them with 0 for NaN and Inf
}

// edge reports whether the visibility rule hides some of keys from some row.
func (t *Tile) edge(keys Span) bool { return keys.Lo < t.Every.Lo || keys.Hi > t.Every.Hi }

// CeilDiv returns a/b, rounded up.
func CeilDiv(a, b int) int { return (a + b - 1) / b }

// RoundUp returns the smallest multiple of step that is at least n.
func RoundUp(n, step int) int { return CeilDiv(n, step) * step }

// Turn transposes squares of Lanes rows of src and dst for n keys or elements, and multiplies them by
// mul as Kernels.Transpose does. Squares lie Lanes·down elements apart in dst, and Lanes·along in src.
func Turn(x *vec.Kernels, dst []float32, ldd, down int, src []float32, lds, along, n int, mul []float32) {
	for at := 0; at < n; at += x.Lanes {
		x.Transpose(dst[at*down:], ldd, src[at*along:], lds, mul)
	}
}

// Fill sets each element of s to x.
func Fill[T any](s []T, x T) {
	for i := range s {
		s[i] = x
	}
}
