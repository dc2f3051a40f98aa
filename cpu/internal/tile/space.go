package tile

import (
	"github.com/seed90331342/attn/cpu/internal/pool"
	"github.com/seed90331342/attn/cpu/internal/vec"
	"github.com/seed90331342/attn/cpu/internal/view"
)

// maxWidth is the largest Width of any kernels.
const maxWidth = 64

// Space is the memory that the tiles of a task share. It stays with the scratch of its
// goroutine; Products.Open takes its slices from there.
type Space struct {
	S          []float32 // a score tile
	MX, Alpha  []float32 // a number for each row of a tile
	beta       []float32 // likewise
	Stage      []float32 // some rows between memory and a tile
	bias       []float32 // of a row
	table      []float32 // bias of a tile by distance
	Chain      []float32 // the derivatives of score mod and softcap; may be nil
	k, v       []float32 // converted, or values with 0 for NaN and Inf, or outputs
	pairs      []float32 // weights of bf16, and the sums of their block
	Scale, One []float32 // factors of transpositions
	edge       [2][maxWidth]int32
	terms      [BlockKeys]float32 // of the biases of a row
	some       [BlockKeys + maxWidth]float32
	seen       [16 * BlockKeys]bool // rows of a mask, at most 16
	Draw       vec.Draw
	runs       []vec.Run
	block      block

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
	return (BlockKeys+l.Kernels.Lanes)*l.DimK + BlockKeys*l.DimV + 2*l.Kernels.Lanes + l.ScoreFloats() + 3*l.Kernels.Width +
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
	s.S = w.Floats(l.ScoreFloats())
	s.MX, s.Alpha, s.beta = w.Floats(x.Width), w.Floats(x.Width), w.Floats(x.Width)
	s.Stage = w.Floats(x.Lanes * max(l.DimK, l.DimV, BlockKeys))
	s.table = w.Floats(BlockKeys + x.Width)
	s.bias = s.table[:BlockKeys]
	s.pairs = w.Floats(l.pairFloats)
	s.Chain = nil
	return s
}

// Runs returns the rows of some of head h of v, which the kernels read in place. They prefetch those of the next block,
// as far as end.
func (s *Space) Runs(v *view.View, b, h int, some Span, end int) []vec.Run {
	s.runs = v.AppendRuns(s.runs[:0], b, h, some.Lo, some.Hi, some.Lo+BlockKeys, end)
	return s.runs
}

// Rows returns n rows of float32 as one run.
func (s *Space) Rows(rows []float32, ld, n, d int) []vec.Run {
	s.runs = vec.AppendRun(s.runs[:0], rows, ld, n, d, rows)
	return s.runs
}
