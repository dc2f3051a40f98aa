package tile

import "github.com/seed90331342/attn/backend"

// Drop applies dropout to weights of t for the keys of here. The draw of s is seeded.
func (sc *Scores) Drop(s *Space, t *Tile, weights []float32, here Span) {
	l, n, first := sc.Layout, here.Hi-here.Lo, &sc.problem.Dropout.First
	x, batch, row, column := l.Kernels, uint32(first[backend.Batch]+t.Batch), uint32(first[backend.Seq]+t.I), uint32(first[backend.Dim]+here.Lo)
	switch {
	case l.KeyLanes:
		for row := range t.N {
			h, i := l.Row(t.H, t.I, row)
			sc.DropRow(&s.Draw, weights[row*BlockKeys:][:RoundUp(n, x.Lanes)], t.Batch, h, i, here.Lo)
		}
	case l.Dims.SeqQ == 1:
		for lane := 0; lane < t.N; lane += x.Lanes {
			s.Draw.Rows(x, batch, uint32(first[backend.Heads]+t.H+lane), row, x.Lanes)
			x.DropHeads(weights[lane:], n, &s.Draw, column)
		}
	default:
		s.Draw.Tile(x, batch, uint32(first[backend.Heads]+t.H), row)
		x.Drop(weights, n, &s.Draw, column)
	}
}

// dropsByRow reports whether query rows of c cannot be lanes because of dropout: the kernel for
// tiles of width rows takes those of one head, from a multiple of 4 on.
func dropsByRow(c *backend.Call, width int) bool {
	d := c.Dims()
	return c.Dropout.P > 0 && d.SeqQ > 1 && (c.Dropout.First[backend.Seq]%4 != 0 || d.SeqQ < width && d.Heads > d.KVHeads)
}
