package tile

import "github.com/seed90331342/attn/backend"

// Drop applies dropout to weights of t for the keys of here. The draw of s is seeded.
func (sc *Scores) Drop(s *Space, t *Tile, weights []float32, here Span) {
	l, d, n := sc.Layout, &sc.problem.Dropout, here.Hi-here.Lo
	x := l.Kernels
	first := func(axis, n int) uint32 { return uint32(d.First[axis] + n) }
	switch {
	case l.KeyLanes:
		for row := range t.N {
			h, i := l.Row(t.H, t.I, row)
			sc.DropRow(&s.Draw, weights[row*BlockKeys:][:RoundUp(n, x.Lanes)], t.Batch, h, i, here.Lo)
		}
	case t.I+t.N <= l.Dims.SeqQ && first(backend.Seq, t.I)%4 == 0:
		s.Draw.Tile(x, first(backend.Batch, t.Batch), first(backend.Heads, t.H), first(backend.Seq, t.I))
		x.Drop(weights, n, &s.Draw, first(backend.Dim, here.Lo))
	case l.Dims.SeqQ == 1:
		for lane := 0; lane < t.N; lane += x.Lanes {
			s.Draw.Rows(x, first(backend.Batch, t.Batch), first(backend.Heads, t.H+lane), first(backend.Seq, 0), x.Lanes)
			x.DropHeads(weights[lane:], n, &s.Draw, first(backend.Dim, here.Lo))
		}
	default:
		sc.dropRows(s, t, weights, here)
	}
}

// dropRows is Drop one row at a time, for tiles whose rows begin elsewhere than at a multiple
// of 4.
func (sc *Scores) dropRows(s *Space, t *Tile, weights []float32, here Span) {
	x, n := sc.Layout.Kernels, here.Hi-here.Lo
	for lane := 0; lane < t.N; lane += x.Lanes {
		for j := 0; j < n; j += x.Lanes {
			x.Transpose(s.Stage[j:], BlockKeys, weights[j*x.Width+lane:], x.Width, s.One)
		}
		for r := range min(x.Lanes, t.N-lane) {
			h, i := sc.Layout.Row(t.H, t.I, lane+r)
			sc.DropRow(&s.Draw, s.Stage[r*BlockKeys:][:n], t.Batch, h, i, here.Lo)
		}
		for j := 0; j < n; j += x.Lanes {
			if n-j >= x.Lanes {
				x.Transpose(weights[j*x.Width+lane:], x.Width, s.Stage[j:], BlockKeys, s.One)
				continue
			}
			x.Transpose(s.square[:], x.Lanes, s.Stage[j:], BlockKeys, s.One)
			for c := range n - j { // elements after the keys do not change
				copy(weights[(j+c)*x.Width+lane:], s.square[c*x.Lanes:(c+1)*x.Lanes])
			}
		}
	}
}
