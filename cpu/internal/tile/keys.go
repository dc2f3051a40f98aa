package tile

import (
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/strided"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// keys is the form with keys as lanes.
type keys struct{}

func (keys) pack(p *Products, _ *Space, t *Tile) {
	l := p.Layout
	p.loadQueries(t.q, t, 0, t.N)
	ScaleRows(t.q, t.q[:t.N*l.DimK], p.Scale)
	clear(t.q[t.N*l.DimK : l.dotRows(t.N)*l.DimK])
	for r := 0; l.Fixed && r < t.N; r++ {
		l.Kernels.Fix(t.q[r*l.DimK:][:l.DimK])
	}
}

// dotRows returns the number of query rows that Dots computes for n of a tile: it takes 8,
// 4 or 1 at a time, and reads and transposes the keys for each of these again.
func (l *Layout) dotRows(n int) int {
	if n%8 < 2 || l.Kernels.OnlyKeyLanes {
		return n
	}
	return RoundUp(n, 4)
}

func (keys) step(a *Attention, s *Space, t, _ *Tile) {
	l, cur := a.Products.Layout, &t.sums.cur
	keys{}.dots(&a.Products, s, t, t.here)
	a.Scores.Adjust(s, t, t.here)
	l.Kernels.RowWeights(s.S, BlockKeys, RoundUp(t.here.Hi-t.here.Lo, l.Kernels.Lanes), t.N, cur.m, cur.l, s.Alpha)
	a.addValues(s, t, cur.o[:t.N*l.DimV], !l.Kernels.OnlyKeyLanes, func(e backend.DType, ld int) { // the gonum kernels may skip weights of 0
		l.Kernels.Mix(e, cur.o, l.DimV, s.Runs, ld, s.S, BlockKeys, s.Alpha, t.N, l.DimV)
	})
}

// dots computes the scores of t and the keys of here. Those of the keys up to the next multiple of Lanes become
// unspecified.
func (keys) dots(p *Products, s *Space, t *Tile, here Span) {
	l, b, k, e := p.Layout, &s.block, s.k, p.K.DType
	x, n, rows, done := l.Kernels, here.Hi-here.Lo, l.dotRows(t.N), 0
	if l.Fixed {
		e = vec.Fixed
	}
	if l.ReadK {
		if done = n / x.Lanes * x.Lanes; done > 0 {
			runs := p.K.Runs(&s.Runs, t.Batch, t.KVHead, here.Lo, here.Lo+done, here.Lo+BlockKeys, b.fetchEnd)
			x.Dots(e, s.S, BlockKeys, runs, p.K.Stride[backend.Seq], t.q, l.DimK, rows, l.DimK)
		}
		if done == n {
			return
		}
		if l.Fixed {
			rest, ld := as[byte](k), backend.Q8.Row(l.DimK)
			strided.CopyRows(&p.K, rest, p.K.Bytes, ld, t.Batch, t.KVHead, here.Lo+done, n-done)
			s.Runs = vec.AppendRun(s.Runs[:0], rest, ld, x.Lanes, ld, rest)
			x.Dots(e, s.S[done:], BlockKeys, s.Runs, ld, t.q, l.DimK, rows, l.DimK)
			return
		}
		p.K.LoadRows(x, k, l.DimK, t.Batch, t.KVHead, here.Lo+done, n-done)
	} else {
		p.load(&p.K, s.k, l.DimK, &b.hasK, b, t)
		k = k[(here.Lo-b.span.Lo)*l.DimK:]
	}
	rest := RoundUp(n-done, x.Lanes)
	x.Dots(vec.F32, s.S[done:], BlockKeys, s.Rows(k, l.DimK, rest, l.DimK), l.DimK, t.q, l.DimK, rows, l.DimK)
}

func (keys) modify(sc *Scores, s *Space, t *Tile, here Span, f func([]float32, backend.Position), dst []float32, factor float32) {
	dst = dst[:t.N*BlockKeys]
	copy(dst, s.S)
	for r := range t.N {
		sc.modifyRow(dst[r*BlockKeys:], t, r, here, f)
	}
	sc.Layout.Kernels.ScaleMax(dst, factor, s.terms[:])
}

func (keys) adjust(sc *Scores, s *Space, t *Tile, here Span) {
	x, n := sc.Layout.Kernels, here.Hi-here.Lo
	for r, seen := range t.Spans[:t.N] {
		scores := s.S[r*BlockKeys:][:RoundUp(n, x.Lanes)]
		h, i := sc.Layout.Row(t.H, t.I, r)
		if sc.Added {
			sc.AddedRow(s, s.bias[:n], t.Batch, h, i, here.Lo)
			clear(s.bias[n:len(scores)])
			x.Bias(scores, s.bias)
		}
		if !sc.mask.IsZero() || t.mixed {
			sc.MaskRow(s, scores[:n], t.Batch, h, i, here.Lo)
		}
		Fill(scores[:max(0, min(n, seen.Lo-here.Lo))], vec.NegInf)
		Fill(scores[max(0, min(n, seen.Hi-here.Lo)):], vec.NegInf)
	}
}

func (keys) drop(sc *Scores, s *Space, t *Tile, weights []float32, here Span) {
	for r := range t.N {
		h, i := sc.Layout.Row(t.H, t.I, r)
		sc.DropRow(&s.Draw, weights[r*BlockKeys:][:here.Hi-here.Lo], t.Batch, h, i, here.Lo)
	}
}
