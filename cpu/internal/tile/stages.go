package tile

import (
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/pool"
	"github.com/seed90331342/attn/cpu/internal/strided"
)

// The stages of attention are products alone, S = scale·Q·Kᵀ and O = P·V. Their tiles have keys as lanes, and share the
// kernels and the order of the sums with Attention, and so the bits.

// BeginScores loads the query rows of t, times scale, in memory of w.
func (p *Products) BeginScores(w *pool.Scratch, s *Space, t *Tile) {
	t.q = w.Floats(p.Layout.QueryFloats)
	keys{}.pack(p, s, t)
}

// WriteScores writes S of tiles and the keys of c's block from j0 on to dst.
func (p *Products) WriteScores(s *Space, c *Chunk, tiles []Tile, j0 int, dst *strided.Tensor) {
	l := p.Layout
	some := Span{j0, min(j0+BlockKeys, c.Keys.Hi)}
	s.block = block{span: some, fetchEnd: c.Keys.Hi}
	n := some.Hi - j0
	clear(s.bias)
	for i := range tiles {
		t := &tiles[i]
		keys{}.dots(p, s, t, some)
		for row := range t.N {
			h, i := l.Row(t.H, t.I, row)
			scores := s.S[row*BlockKeys:][:RoundUp(n, l.Kernels.Lanes)]
			l.Kernels.Bias(scores, s.bias) // adding 0 turns -0 into 0
			dst.Store(l.Kernels, scores[:n], t.Batch, h, i, j0)
		}
	}
}

// BeginSums sets the outputs of t to start(c) in column c, in memory of w.
func (p *Products) BeginSums(w *pool.Scratch, s *Space, t *Tile, start *strided.Tensor, c0 int) {
	l := p.Layout
	o := w.Floats(l.OutputFloats)
	t.sums.cur.o = o
	clear(o)
	Fill(s.Alpha, 1)
	if start.IsZero() {
		return
	}
	for c := range l.Dims.ValueDim {
		o[c] = start.At(0, 0, 0, c0+t.KVHead*l.Dims.ValueDim+c) + 0 // no zero is negative, and then none of the sums is
	}
	for r := 1; r < t.N; r++ {
		copy(o[r*l.DimV:], o[:l.DimV])
	}
}

// AddValues adds the products of weights and values of the block from j0 on to the outputs of
// tiles. If zeroHides is set, weights of exactly 0 hide NaN and Inf.
//
//	weights [B, H, Sq, Sk]
func (p *Products) AddValues(s *Space, tiles []Tile, j0 int, weights *strided.Tensor, zeroHides bool) {
	l := p.Layout
	some := Span{j0, min(j0+BlockKeys, l.Dims.SeqK)}
	s.block = block{span: some, fetchEnd: l.Dims.SeqK}
	for i := range tiles {
		t := &tiles[i]
		w, ldw := s.S, BlockKeys
		if h, i := l.Row(t.H, t.I, 0); i+t.N <= l.Dims.SeqQ && weights.DType == backend.F32 &&
			weights.Stride[backend.Dim] == 1 && weights.Stride[backend.Seq] >= l.Dims.SeqK {
			w, ldw = weights.F32[weights.Index(t.Batch, h, i)+j0:], weights.Stride[backend.Seq]
		} else {
			for r := range t.N {
				h, i := l.Row(t.H, t.I, r)
				weights.Load(l.Kernels, w[r*ldw:], ldw, t.Batch, h, i, 1, j0, some.Hi-j0)
			}
		}
		e, ld := p.values(s, t, some, zeroHides || l.Kernels.OnlyKeyLanes)
		l.Kernels.Mix(e, t.sums.cur.o, l.DimV, s.Runs, ld, w, ldw, s.Alpha, t.N, l.DimV)
		if s.block.replaced {
			p.addNonFinite(t, some, w, ldw, func(_, _, _, _ int, weight float32) bool { return weight != 0 || !zeroHides })
		}
	}
}

// WriteSums writes the outputs of t.
func (p *Products) WriteSums(s *Space, t *Tile) { p.writeOutputs(s, t, t.sums.cur.o, s.Alpha) }
