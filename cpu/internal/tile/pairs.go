package tile

import (
	"unsafe"

	"github.com/seed90331342/attn/cpu/internal/strided"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// pairs is the form in which both products of a tile are matrix products of bf16, with query rows as
// lanes. What multiplies queries or weights has other rows than in memory:
//
//	S = K·Q     keys [keys, D]      queries [D/2, Width] of pairs
//	O = Vᵀ·P    values [Dv, keys]   weights [keys/2, Width] of pairs
//
// D is rounded up to vec.PairStep. A sum over values begins at a multiple of as many keys.
type pairs struct{ rows }

// pairDim returns the elements of a row of keys or queries.
func (l *Layout) pairDim() int { return RoundUp(l.Dims.Dim, vec.PairStep) }

// as returns the memory of floats with another type.
func as[T any](floats []float32) []T {
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(floats))), len(floats)*4/int(unsafe.Sizeof(*new(T))))
}

// pack leaves the scale to the product.
func (pairs) pack(p *Products, s *Space, t *Tile) {
	l, d, rows := p.Layout, p.Layout.pairDim(), as[uint16](s.Stage)
	for lane, x := 0, l.Kernels; lane < x.Width; lane += x.Lanes {
		some := max(0, min(x.Lanes, t.N-lane))
		for r, n := 0, 0; r < some; r += n {
			h, i := l.Row(t.H, t.I, lane+r)
			n = min(some-r, l.Dims.SeqQ-i) // those of one head
			strided.CopyRows(&p.Q, rows[r*d:], p.Q.Bits, d, t.Batch, h, i, n)
		}
		clear(rows[some*d : x.Lanes*d])
		x.Turn(as[uint32](t.q)[lane:], x.Width, rows, d, d/2)
	}
}

func (pairs) step(a *Attention, s *Space, t, _ *Tile) {
	p, b, cur := &a.Products, &s.block, &t.sums.cur
	l, n, all := p.Layout, t.here.Hi-t.here.Lo, b.span.Hi-b.span.Lo
	x, d, at := l.Kernels, l.pairDim(), t.here.Lo-b.span.Lo
	copy(s.MX, cur.m)
	keys := as[uint16](s.k)
	if !b.hasK {
		b.hasK = true
		strided.CopyRows(&p.K, keys, p.K.Bits, d, t.Batch, t.KVHead, b.span.Lo, all)
	}
	x.PairScores(s.S, keys[at*d:], d, n, as[uint32](t.q), d, p.Scale, s.MX)
	a.Scores.Adjust(s, t, t.here)

	rows, load := as[uint16](s.v)[:BlockKeys*l.DimV], !b.hasV
	values := as[uint16](s.v)[len(rows):]
	if load {
		b.hasV = true
		strided.CopyRows(&p.V, rows, p.V.Bits, l.DimV, t.Batch, t.KVHead, b.span.Lo, all)
		clear(rows[all*l.DimV : RoundUp(all, vec.PairStep)*l.DimV])
	}
	if t.mayHide && !b.checked {
		b.checked = true
		if b.replaced = anyNonFinite(x, rows[:all*l.DimV]); b.replaced {
			load = true
			for i, y := range rows[:all*l.DimV] {
				if y&0x7f80 == 0x7f80 {
					rows[i] = 0
				}
			}
		}
	}

	// Rounded weights, up to a multiple of vec.PairStep keys. Those of float32 stay in s.S where they are needed.
	whole, fours := RoundUp(n, vec.PairStep), CeilDiv(n, 4)
	weights := as[uint32](s.pairs)[:whole/2*x.Width]
	Fill(s.S[n*x.Width:fours*4*x.Width], vec.NegInf)
	if a.Scores.Drops || b.replaced {
		x.Weights(s.S, fours, cur.m, s.MX, cur.l, s.Alpha)
		if a.Scores.Drops {
			a.Scores.Drop(s, t, s.S, t.here)
		}
		x.RoundPairs(weights, s.S, 4*fours, x.Width)
	} else {
		x.PairWeights(weights, s.S, fours, cur.m, s.MX, cur.l, s.Alpha)
	}
	clear(weights[2*fours*x.Width:])
	for j := 0; load && j < all; j += vec.PairStep {
		x.TurnPairs(values[j:], BlockKeys, rows[j*l.DimV:], l.DimV, l.DimV)
	}
	x.PairValues(cur.o, values[at:], BlockKeys, weights, l.DimV, whole, s.Alpha, s.pairs[BlockKeys/2*x.Width:])
	if b.replaced {
		a.addReplaced(s, t)
	}
}

// anyNonFinite reports whether any of the bf16 is NaN or Inf. A float32 whose upper half it is, is NaN or Inf, too: the words
// that begin at the first number have those at odd indices there, the words that begin at the second one the others.
func anyNonFinite(x *vec.Kernels, numbers []uint16) bool {
	odd := unsafe.Slice((*float32)(unsafe.Pointer(&numbers[0])), len(numbers)/2)
	even := unsafe.Slice((*float32)(unsafe.Pointer(&numbers[1])), len(numbers)/2-1)
	return numbers[0]&0x7f80 == 0x7f80 || x.NonFinite(odd, len(odd), 1, len(odd)) || x.NonFinite(even, len(even), 1, len(even))
}
