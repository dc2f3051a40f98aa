package tile

import (
	"unsafe"

	"github.com/seed90331342/attn/cpu/internal/vec"
	"github.com/seed90331342/attn/cpu/internal/view"
)

// With Layout.Pairs both products of a tile are matrix products of bf16, with query rows as
// lanes. What multiplies queries or weights has other rows than in memory:
//
//	S = K·Q     keys [keys, D]      queries [D/2, Width] of pairs
//	O = Vᵀ·P    values [Dv, keys]   weights [keys/2, Width] of pairs
//
// D is rounded up to vec.PairStep. A sum over values begins at a multiple of as many keys.

// pairDim returns the elements of a row of keys or queries.
func (l *Layout) pairDim() int { return RoundUp(l.Dims.Dim, vec.PairStep) }

// as returns the memory of floats with another type.
func as[T any](floats []float32) []T {
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(floats))), len(floats)*4/int(unsafe.Sizeof(*new(T))))
}

// packPairs loads the query rows of t, without the scale.
func (p *Products) packPairs(s *Space, t *Tile) {
	l, d, rows := p.Layout, p.Layout.pairDim(), as[uint16](s.k)
	clear(rows[:l.Kernels.Width*d])
	for r := range t.N {
		h, i := l.Row(t.H, t.I, r)
		view.CopyRows(&p.Q, rows[r*d:], p.Q.Bits, d, t.Batch, h, i, 1)
	}
	for lane := 0; lane < l.Kernels.Width; lane += l.Kernels.Lanes {
		l.Kernels.Turn(as[uint32](t.q)[lane:], l.Kernels.Width, rows[lane*d:], d, d/2)
	}
}

// pairScores computes the scores of t and its keys in b, and their maxima.
func (p *Products) pairScores(s *Space, b *block, t *Tile) {
	l, d, n := p.Layout, p.Layout.pairDim(), t.here.Hi-t.here.Lo
	x, keys := l.Kernels, as[uint16](s.k)
	if !b.hasK {
		b.hasK = true
		view.CopyRows(&p.K, keys, p.K.Bits, d, t.Batch, t.KVHead, b.span.Lo, b.span.Hi-b.span.Lo)
	}
	x.PairScores(s.S, keys[(t.here.Lo-b.span.Lo)*d:], d, n, as[uint32](t.q), d, p.Scale, s.MX)
}

// pairWeights turns the scores in s.S into pairs of rounded weights, and returns them, up to a
// multiple of vec.PairStep keys. It leaves the weights of float32 in s.S where the next steps may need them.
func (a *Attention) pairWeights(s *Space, t *Tile, clean bool) []uint32 {
	x, cur, n := a.Products.Layout.Kernels, &t.sums.cur, t.here.Hi-t.here.Lo
	fours, weights := CeilDiv(n, 4), as[uint32](s.pairs)[:RoundUp(n, vec.PairStep)/2*x.Width]
	if drops := a.Scores.Drops(); drops || clean {
		x.Weights(s.S, fours, cur.m, s.MX, cur.l, s.Alpha)
		if drops {
			a.Scores.Drop(s, t, s.S, t.here)
		}
		x.RoundPairs(weights, s.S, 4*fours, x.Width)
	} else {
		x.PairWeights(weights, s.S, fours, cur.m, s.MX, cur.l, s.Alpha)
	}
	clear(weights[2*fours*x.Width:])
	return weights
}

// addPairValues adds the products of weights and the values of t's keys in b to the outputs of t.
// With clean set NaN and Inf count as 0; if there are any, b.replaced is set.
func (p *Products) addPairValues(s *Space, b *block, t *Tile, clean bool, weights []uint32) {
	l, n, all := p.Layout, RoundUp(t.here.Hi-t.here.Lo, vec.PairStep), b.span.Hi-b.span.Lo
	x, rows := l.Kernels, as[uint16](s.v)[:BlockKeys*l.DimV]
	values := as[uint16](s.v)[len(rows):]
	load := !b.hasV
	if load {
		b.hasV = true
		view.CopyRows(&p.V, rows, p.V.Bits, l.DimV, t.Batch, t.KVHead, b.span.Lo, all)
		clear(rows[all*l.DimV : RoundUp(all, vec.PairStep)*l.DimV])
	}
	if clean && !b.checked {
		b.checked = true
		for i, y := range rows[:all*l.DimV] {
			if y&0x7f80 == 0x7f80 {
				rows[i], b.replaced, load = 0, true, true
			}
		}
	}
	for j := 0; load && j < all; j += vec.PairStep {
		x.TurnPairs(values[j:], BlockKeys, rows[j*l.DimV:], l.DimV, l.DimV)
	}
	x.PairValues(t.sums.cur.o, values[t.here.Lo-b.span.Lo:], BlockKeys, weights, l.DimV, n, s.Alpha, s.pairs[BlockKeys/2*x.Width:])
}
