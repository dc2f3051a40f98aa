package tile

import (
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/strided"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// Layout is how the tiles of a call lie in memory and which kernels compute them. It follows from the arguments of
// NewLayout: the table of kernels, the choice of lanes, and the call, whose tensors may contain anything.
type Layout struct {
	Kernels    *vec.Kernels
	Dims       backend.Dims
	Share      int  // query heads of a group
	KeyLanes   bool // tiles have keys as lanes, else query rows
	RowOutputs bool // outputs lie row by row
	Rows       int  // query rows of a full tile
	HeadTiles  int  // tiles of a head; 0 where tiles span heads
	Tiles      int  // tiles of a group
	Sums       int  // of SumKeys keys
	AllSums    int  // of all tiles of the call
	DimK, DimV int  // head sizes rounded up to Lanes

	ReadK, ReadV bool // kernels read keys, values in place; others are converted
	Pairs        bool // both products multiply pairs of bf16
	Fixed        bool // queries are integers, as the keys are
	keyAlign     int  // keys of a step begin at a multiple of it
	form         form

	// QueryFloats to pairFloats are the floats of a tile: its packed query rows, its scores, its outputs, the state of one
	// of its sums, all that Begin takes, and its weights in pairs with the sums of PairValues.
	QueryFloats, ScoreFloats, OutputFloats, StateFloats, TileFloats, pairFloats int
}

// form is one of the layouts of tiles. Rows and keys compute the same sums in the same order.
type form interface {
	// pack loads the query rows of t, times scale.
	pack(p *Products, s *Space, t *Tile)
	// step computes scores and weights of t for its keys in the block of s, and adds the values. next is the tile after t.
	step(a *Attention, s *Space, t, next *Tile)
	// modify applies f to the scores of t and the keys of here, and writes the results times factor to dst.
	modify(sc *Scores, s *Space, t *Tile, here Span, f func([]float32, backend.Position), dst []float32, factor float32)
	// adjust is Scores.Adjust after score mod and softcap.
	adjust(sc *Scores, s *Space, t *Tile, here Span)
	// drop is Scores.Drop.
	drop(sc *Scores, s *Space, t *Tile, weights []float32, here Span)
}

// NewLayout returns the layout of c with the kernels of k. Tiles have keys as lanes if keyLanes
// is set, or if no other kernels compute c.
func NewLayout(k *vec.Kernels, keyLanes bool, c *backend.Call) Layout {
	d := c.Dims()
	l := Layout{Kernels: k, Dims: d, Share: d.Heads / d.KVHeads, KeyLanes: keyLanes || k.OnlyKeyLanes,
		DimK: RoundUp(d.Dim, k.Lanes), DimV: RoundUp(d.ValueDim, k.Lanes), Sums: CeilDiv(d.SeqK, SumKeys),
		ReadK: strided.RowsInPlace(&c.K, c), ReadV: strided.RowsInPlace(&c.V, c), keyAlign: 4, form: rows{}}
	if d.SeqQ < k.Width { // tiles span heads
		group := l.Share * d.SeqQ
		l.Rows, l.Tiles = min(k.Width, group), CeilDiv(group, k.Width)
	} else {
		l.Rows, l.HeadTiles = k.Width, CeilDiv(d.SeqQ, k.Width)
		l.Tiles = l.HeadTiles * l.Share
	}
	l.AllSums = d.Batch * d.KVHeads * l.Tiles * l.Sums
	l.RowOutputs = l.KeyLanes || k.RowOutputs
	if l.KeyLanes {
		l.form, l.ReadK, l.ReadV = keys{}, strided.KeysInPlace(k, &c.K, c), strided.KeysInPlace(k, &c.V, c)
		l.Fixed = l.ReadK && c.LowPrecision && c.K.DType() == backend.Q8 && d.Dim <= vec.MaxFixed && k.HasFixed()
		if c.Pages != nil {
			l.keyAlign = k.Lanes // groups of keys lie in one page
		}
	} else if l.Pairs = Pairs(k, c); l.Pairs {
		l.form, l.ReadK, l.ReadV, l.pairFloats = pairs{}, false, false, BlockKeys/2*k.Width+vec.PairSums
		l.RowOutputs = false
		l.keyAlign = vec.PairStep // the sums of PairValues
	}
	// The scores have some rows more: squares at the end of gathered keys reach beyond them.
	l.QueryFloats, l.ScoreFloats, l.OutputFloats = k.Width*l.DimK, (BlockKeys+k.Lanes)*k.Width, k.Width*l.DimV
	if l.KeyLanes { // there may be few rows
		l.OutputFloats = l.Rows * l.DimV
	}
	l.StateFloats = l.OutputFloats + 2*k.Width
	l.TileFloats = l.QueryFloats + 3*l.StateFloats
	return l
}

// Pairs reports whether the products of c, in low precision, are those of pairs of bf16. Their
// sums have another order. A few query rows are bound by memory, and other kernels read it faster.
func Pairs(k *vec.Kernels, c *backend.Call) bool {
	const few = 8
	d := c.Dims()
	return d.Heads/d.KVHeads*d.SeqQ > few && c.LowPrecision && c.Q.DType() == backend.BF16 && c.K.DType() == backend.BF16 && k.PairUnit() != ""
}

// Floats returns the floats of a score tile that hold the scores of t and n keys.
func (l *Layout) Floats(t *Tile, n int) int {
	if l.KeyLanes {
		return t.N * BlockKeys // those of a row after n are not used
	}
	return n * l.Kernels.Width
}

// Row returns the head and the index of the r-th row from row (h, i) on.
func (l *Layout) Row(h, i, r int) (int, int) {
	i += r
	if i < l.Dims.SeqQ {
		return h, i
	}
	return h + i/l.Dims.SeqQ, i % l.Dims.SeqQ
}

// TilesOf returns the tiles of c, without queries and sums.
func (l *Layout) TilesOf(s *Space, c *Chunk) []Tile {
	tiles := s.tiles[:c.End-c.First]
	for n := range tiles {
		at, h := c.First+n, c.KVHead*l.Share
		t := Tile{index: (c.Batch*l.Dims.KVHeads+c.KVHead)*l.Tiles + at, Batch: c.Batch, KVHead: c.KVHead, Spans: s.spans[n*l.Rows:]}
		if l.HeadTiles == 0 {
			t.H, t.I = l.Row(h, 0, at*l.Rows)
			t.N = min(l.Rows, l.Share*l.Dims.SeqQ-at*l.Rows)
		} else {
			t.H, t.I = h+at/l.HeadTiles, at%l.HeadTiles*l.Rows
			t.N = min(l.Rows, l.Dims.SeqQ-t.I)
		}
		tiles[n] = t
	}
	return tiles
}

// square returns the index in v, which has a row for each query row, and the distance of the rows of the vector of query
// rows of t from lane on, if they are Lanes rows of adjacent elements at a constant distance, as kernels transpose them:
// they are in one head, or one in each.
func (l *Layout) square(v *strided.Tensor, t *Tile, lane int) (at, ld int, ok bool) {
	if t.N-lane < l.Kernels.Lanes || v.Stride[backend.Dim] != 1 {
		return 0, 0, false
	}
	h, i := l.Row(t.H, t.I, lane)
	if at = v.Index(t.Batch, h, i); l.Dims.SeqQ == 1 {
		return at, v.Stride[backend.Heads], true
	}
	return at, v.Stride[backend.Seq], i+l.Kernels.Lanes <= l.Dims.SeqQ
}
