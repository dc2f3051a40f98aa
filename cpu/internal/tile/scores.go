package tile

import (
	"math"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/vec"
	"github.com/seed90331342/attn/cpu/internal/view"
)

// Scores turns dot products into scores: scale, softcap, biases and masks. The methods in this
// file take rows, those in adjust.go tiles.
type Scores struct {
	Layout                       *Layout
	problem                      *backend.Problem
	mask, blocks, bias, relative view.View
	Listed                       [][]int32 // as backend.Call.Listed; what follows calls the n-th listed key, too, key n
	// Scale is the factor of dot products, After that of what the score mod makes of them, which is 1
	// without one, and Cap that of the softcap's tanh, or 0. They yield scores in units of log2 e.
	Scale, After, Cap float32

	Masked bool // there is a mask or a block mask
	Added  bool // there is a bias, a relative bias or slopes
	hiding bool // a mask, a bias or dropout may hide single keys
}

// Open opens the mask and bias tensors of p; sc must be zero. The methods that take rows read only
// the kernels and the numbers of query heads and rows of l.
func (sc *Scores) Open(l *Layout, p *backend.Problem) {
	sc.Layout, sc.problem, sc.Scale, sc.After = l, p, float32(float64(p.Scale)*math.Log2E), 1
	if c := float64(p.Softcap); c > 0 {
		sc.Scale, sc.Cap = float32(float64(p.Scale)/c), float32(c*math.Log2E)
	}
	if p.ScoreMod != nil {
		sc.After, sc.Scale = math.Log2E, p.Scale
		if sc.Cap > 0 {
			sc.After = 1 / p.Softcap
		}
	}
	sc.mask, sc.blocks, sc.bias, sc.relative = view.Of(&p.Mask), view.Of(&p.Blocks), view.Of(&p.Bias), view.Of(&p.Relative)
	sc.Masked = !sc.mask.IsZero() || !sc.blocks.IsZero()
	sc.hiding = !sc.mask.IsZero() || !sc.bias.IsZero() || !sc.relative.IsZero() || p.Dropout.P > 0 || p.ScoreMod != nil
	sc.Added = !sc.bias.IsZero() || !sc.relative.IsZero() || p.Slopes != nil
}

// Key returns the position of key j of batch b.
func (sc *Scores) Key(b, j int) int {
	if sc.Listed == nil {
		return j
	}
	return int(sc.Listed[b][j])
}

// adjacent returns the position of key j of batch b, and how many of n keys from there on have adjacent ones.
func (sc *Scores) adjacent(b, j, n int) (key, m int) {
	if sc.Listed == nil {
		return j, n
	}
	for list := sc.Listed[b][j:]; m < n && list[m] == list[0]+int32(m); {
		m++
	}
	return sc.Key(b, j), m
}

// AddedRow writes the sum of the biases of a row from key j on: the bias, and the terms
// that depend on the distance, bounded as in backend.Problem. It does not bound a bias
// that is the only term: the kernels do that when they add it.
//
// dst has at most BlockKeys elements and room for whole vectors. The elements up to there become unspecified.
func (sc *Scores) AddedRow(s *Space, dst []float32, b, h, i, j int) {
	if sc.Listed == nil {
		sc.addedKeys(s, dst, b, h, i, j)
		return
	}
	for at := 0; at < len(dst); {
		key, m := sc.adjacent(b, j+at, len(dst)-at)
		sc.addedKeys(s, s.some[:m], b, h, i, key)
		at += copy(dst[at:], s.some[:m])
	}
}

// addedKeys is AddedRow for adjacent positions.
func (sc *Scores) addedKeys(s *Space, dst []float32, b, h, i, j int) {
	if sc.bias.IsZero() {
		sc.distances(dst, b, h, j-i)
		return
	}
	k := sc.Layout.Kernels
	sc.bias.Load(k, dst, len(dst), b, h, i, 1, j, len(dst))
	if !sc.biasAlone() {
		sc.distances(s.terms[:len(dst)], b, h, j-i)
		k.Join(dst[:RoundUp(len(dst), k.Lanes)], s.terms[:])
	}
}

// biasAlone reports whether a bias is the only term to add.
func (sc *Scores) biasAlone() bool {
	return !sc.bias.IsZero() && sc.relative.IsZero() && sc.problem.Slopes == nil
}

// distances writes the terms that depend on the distance between row and key, for distances from d on; 0 for
// distances that no pair has. dst has room for whole vectors, as in AddedRow.
func (sc *Scores) distances(dst []float32, b, h, d int) {
	slope, far := sc.problem.Slope(b, h, sc.Layout.Dims.Heads), d-sc.problem.Visible.OffsetOf(b)
	k, at := sc.Layout.Kernels, d+sc.Layout.Dims.SeqQ-1
	lo := min(len(dst), max(0, -at))
	hi := max(lo, min(len(dst), sc.relative.Shape[backend.Dim]-at)) // lo without relative
	clear(dst[:lo])
	clear(dst[hi:])
	if lo < hi {
		sc.relative.Load(k, dst[lo:hi], hi-lo, b, h, 0, 1, at+lo, hi-lo)
		k.Bound(dst[:RoundUp(len(dst), k.Lanes)], backend.MaxRelative)
	}
	if slope != 0 {
		for n := range dst {
			dst[n] += float32(slope * float32(min(far+n, -far-n)))
		}
	}
}

// Hides reports whether a mask or an infinite bias hides key j from row i.
func (sc *Scores) Hides(b, h, i, j int) bool {
	var seen [1]bool
	sc.seenRow(seen[:], b, h, i, j)
	j = sc.Key(b, j)
	return !seen[0] || sc.problem.ModHides(b, h, i, j) || !sc.bias.IsZero() && sc.bias.At(b, h, i, j) == vec.NegInf ||
		!sc.relative.IsZero() && sc.relative.At(b, h, 0, j-i+sc.Layout.Dims.SeqQ-1) == vec.NegInf
}

// Drops reports whether the call has dropout.
func (sc *Scores) Drops() bool { return sc.problem.Dropout.P > 0 }

// DropRow applies dropout to the weights s of row i, which belong to the keys from j
// on. s has room for a multiple of DropLanes, which it overwrites, and d is seeded.
func (sc *Scores) DropRow(d *vec.Draw, s []float32, b, h, i, j int) {
	x, first := sc.Layout.Kernels, &sc.problem.Dropout.First
	d.Rows(x, uint32(first[backend.Batch]+b), uint32(first[backend.Heads]+h), uint32(first[backend.Seq]+i), 1)
	if sc.Listed == nil {
		x.Drop(s[:RoundUp(len(s), x.DropLanes())], len(s), d, uint32(first[backend.Dim]+j))
		return
	}
	var some [maxWidth]float32
	for at := 0; at < len(s); {
		key, m := sc.adjacent(b, j+at, min(len(s)-at, x.DropLanes()))
		copy(some[:m], s[at:])
		x.Drop(some[:x.DropLanes()], m, d, uint32(first[backend.Dim]+key))
		at += copy(s[at:], some[:m])
	}
}

// Seed seeds d if the call has dropout.
func (sc *Scores) Seed(d *vec.Draw) {
	if sc.Drops() {
		d.Seed(sc.problem.Dropout)
	}
}

// Drop applies dropout, if the call has it, to weights of t for the keys of here. The draw of s is seeded.
func (sc *Scores) Drop(s *Space, t *Tile, weights []float32, here Span) {
	if sc.Drops() {
		sc.Layout.form.drop(sc, s, t, weights, here)
	}
}

func (rows) drop(sc *Scores, s *Space, t *Tile, weights []float32, here Span) {
	l, n, first := sc.Layout, here.Hi-here.Lo, &sc.problem.Dropout.First
	x, batch, row, column := l.Kernels, uint32(first[backend.Batch]+t.Batch), uint32(first[backend.Seq]+t.I), uint32(first[backend.Dim]+here.Lo)
	switch {
	case l.Dims.SeqQ == 1 && sc.Listed == nil:
		for lane := 0; lane < t.N; lane += x.Lanes {
			s.Draw.Rows(x, batch, uint32(first[backend.Heads]+t.H+lane), row, x.Lanes)
			x.Drop(weights[lane:], n, &s.Draw, column)
		}
	case row%4 == 0 && t.I+t.N <= l.Dims.SeqQ && sc.Listed == nil:
		s.Draw.Tile(x, batch, uint32(first[backend.Heads]+t.H), row)
		x.Drop(weights, n, &s.Draw, column)
	default: // the kernel for tiles takes rows of one head, from a multiple of 4 on
		for r := range t.N {
			h, i := l.Row(t.H, t.I, r)
			view.CopyElements(s.Stage, 1, weights[r:], x.Width, n)
			sc.DropRow(&s.Draw, s.Stage[:n], t.Batch, h, i, here.Lo)
			view.CopyElements(weights[r:], x.Width, s.Stage, 1, n)
		}
	}
}
