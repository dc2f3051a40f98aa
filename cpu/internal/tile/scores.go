package tile

import (
	"math"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/strided"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// Scores turns dot products into scores: scale, softcap, biases and masks. What it does to tiles of one
// form is in the file of that form.
type Scores struct {
	Layout                       *Layout
	problem                      *backend.Problem
	mask, blocks, bias, relative strided.Tensor
	Listed                       [][]int32 // as backend.Call.Listed; what follows calls the n-th listed key, too, key n
	// Scale is the factor of dot products, After that of what the score mod makes of them, which is 1
	// without one, and Cap that of the softcap's tanh, or 0. They yield scores in units of log2 e.
	Scale, After, Cap float32

	plain     bool // scores are scaled dot products, or hidden by the visibility rule or the block mask
	Masked    bool // there is a mask or a block mask
	Added     bool // there is a bias, a relative bias or slopes
	biasAlone bool // the bias is the only one of these
	Drops     bool // there is dropout
	hiding    bool // a mask, a bias or dropout may hide single keys
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
	sc.mask, sc.blocks, sc.bias, sc.relative = strided.Of(&p.Mask), strided.Of(&p.Blocks), strided.Of(&p.Bias), strided.Of(&p.Relative)
	sc.Masked = !sc.mask.IsZero() || !sc.blocks.IsZero()
	sc.biasAlone = !sc.bias.IsZero() && sc.relative.IsZero() && p.Slopes == nil
	sc.Drops = p.Dropout.P > 0
	sc.hiding = !sc.mask.IsZero() || !sc.bias.IsZero() || !sc.relative.IsZero() || sc.Drops || p.ScoreMod != nil
	sc.Added = !sc.bias.IsZero() || !sc.relative.IsZero() || p.Slopes != nil
	sc.plain = !sc.Added && sc.mask.IsZero() && sc.Cap == 0 && p.ScoreMod == nil
}

// Trim narrows keys to those that the block mask leaves to any row of t; the span is empty when there is none.
func (sc *Scores) Trim(t *Tile, keys Span) Span {
	t.mixed = sc.Listed != nil && !sc.blocks.IsZero()
	if t.mixed || sc.blocks.IsZero() || keys.Empty() {
		return keys
	}
	left, gap, size := Span{keys.Hi, keys.Lo}, false, sc.problem.BlockK
	for block := keys.Lo / size; block*size < keys.Hi; block++ {
		some, all := sc.blockSeen(t, block)
		if !some {
			gap = !left.Empty()
			continue
		}
		t.mixed = t.mixed || !all || gap
		left = Span{min(left.Lo, max(keys.Lo, block*size)), min(keys.Hi, (block+1)*size)}
	}
	t.mixed = t.mixed || left.Lo%vec.PairStep > 0 // a step may begin earlier
	return left
}

// blockSeen reports whether some of the rows of t see a block of keys of the block mask, and whether all of them do.
func (sc *Scores) blockSeen(t *Tile, block int) (some, all bool) {
	all = true
	for r := 0; r < t.N; {
		h, i := sc.Layout.Row(t.H, t.I, r)
		rows := i / sc.problem.BlockQ
		sees := sc.sees(t.Batch, h, rows, block)
		some, all = some || sees, all && sees
		r += min(sc.Layout.Dims.SeqQ-i, (rows+1)*sc.problem.BlockQ-i)
	}
	return some, all
}

// Adjust applies score mod, softcap, biases and masks to the score tile, which has the keys of here.
// With query rows as lanes it also computes the maxima again, from those of t's sums on.
func (sc *Scores) Adjust(s *Space, t *Tile, here Span) {
	l, mod := sc.Layout, sc.problem.ScoreMod
	Fill(s.Chain, 1)
	if mod != nil {
		if s.Chain != nil {
			l.form.modify(sc, s, t, here, mod.Derivative, s.Chain, 1)
		}
		l.form.modify(sc, s, t, here, mod.Go, s.S, sc.After)
	}
	if sc.Cap > 0 {
		scores, inv := s.S[:l.Floats(t, here.Hi-here.Lo)], 1/sc.Cap
		sc.Softcap(s, scores)
		for i, y := range scores[:min(len(s.Chain), len(scores))] {
			tanh := y * inv
			s.Chain[i] *= (1 - tanh) * (1 + tanh)
		}
	}
	l.form.adjust(sc, s, t, here)
}

// modifyRow applies f to the scores of row r of t and the keys of here that it sees.
func (sc *Scores) modifyRow(scores []float32, t *Tile, r int, here Span, f func([]float32, backend.Position)) {
	h, i := sc.Layout.Row(t.H, t.I, r)
	for j, m, end := max(here.Lo, t.Spans[r].Lo), 0, min(here.Hi, t.Spans[r].Hi); j < end; j += m {
		key := 0
		key, m = sc.adjacent(t.Batch, j, end-j)
		sc.problem.Modify(f, scores[j-here.Lo:][:m], t.Batch, h, i, key)
	}
}

// Softcap applies the softcap to scores, of which a -Inf of the score mod stays. The length is a multiple of Lanes.
func (sc *Scores) Softcap(s *Space, scores []float32) {
	for mod, n := sc.problem.ScoreMod != nil, 0; len(scores) > 0; scores = scores[n:] {
		if n = len(scores); mod {
			n = copy(s.terms[:], scores)
		}
		sc.Layout.Kernels.Softcap(scores[:n], sc.Cap)
		for c := 0; mod && c < n; c++ {
			if s.terms[c] == vec.NegInf {
				scores[c] = vec.NegInf
			}
		}
	}
}

// AddedRow writes the sum of the biases of a row from key j on: the bias, and the terms that depend on the distance,
// bounded as in backend.Problem. It does not bound a bias that is the only term: the kernels do that when they add it.
//
// dst has at most BlockKeys elements and room for whole vectors. The elements up to there become unspecified.
func (sc *Scores) AddedRow(s *Space, dst []float32, b, h, i, j int) {
	k := sc.Layout.Kernels
	for at, m := 0, 0; at < len(dst); at += m {
		key, row := 0, dst
		if key, m = sc.adjacent(b, j+at, len(dst)-at); sc.Listed != nil { // dst may have no room for the whole vectors of some
			row = s.some[:m]
		}
		if sc.bias.IsZero() {
			sc.distances(row, b, h, key-i)
		} else if sc.bias.Load(k, row, m, b, h, i, 1, key, m); !sc.biasAlone {
			sc.distances(s.terms[:m], b, h, key-i)
			k.Join(row[:RoundUp(m, k.Lanes)], s.terms[:])
		}
		if sc.Listed != nil {
			copy(dst[at:], row)
		}
	}
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

// MaskRow writes -Inf to the scores of row i, with the keys from j on, that the mask or the block mask hides. There
// are at most BlockKeys. The elements up to whole vectors, for which scores has room, become unspecified.
func (sc *Scores) MaskRow(s *Space, scores []float32, b, h, i, j int) {
	sc.seenRow(s.seen[:len(scores)], b, h, i, j)
	x := sc.Layout.Kernels
	x.HideRow(scores[:RoundUp(len(scores), x.Lanes)], s.seen[:])
}

// Hides reports whether a mask, the score mod or an infinite bias hides key j from row i.
func (sc *Scores) Hides(b, h, i, j int) bool {
	var seen [1]bool
	sc.seenRow(seen[:], b, h, i, j)
	j = sc.Key(b, j)
	var zero [1]float32 // as a score
	if m := sc.problem.ScoreMod; m != nil && seen[0] {
		sc.problem.Modify(m.Go, zero[:], b, h, i, j)
	}
	return !seen[0] || zero[0] == vec.NegInf || !sc.bias.IsZero() && sc.bias.At(b, h, i, j) == vec.NegInf ||
		!sc.relative.IsZero() && sc.relative.At(b, h, 0, j-i+sc.Layout.Dims.SeqQ-1) == vec.NegInf
}

// seenRow sets seen to whether the mask and the block mask show the keys from j on to row i.
func (sc *Scores) seenRow(seen []bool, b, h, i, j int) {
	for m := 0; len(seen) > 0; seen, j = seen[m:], j+m {
		key := 0
		key, m = sc.adjacent(b, j, len(seen))
		sc.seenKeys(seen[:m], b, h, i, key)
	}
}

// seenKeys is seenRow for adjacent positions.
func (sc *Scores) seenKeys(seen []bool, b, h, i, j int) {
	if sc.mask.IsZero() {
		Fill(seen, true)
	} else {
		step := sc.mask.Stride[backend.Dim]
		strided.CopyElements(seen, 1, sc.mask.Bools[sc.mask.Index(b, h, i)+j*step:], step, len(seen))
	}
	if sc.blocks.IsZero() {
		return
	}
	for n := 0; n < len(seen); {
		block := (j + n) / sc.problem.BlockK
		end := min(len(seen), (block+1)*sc.problem.BlockK-j)
		if !sc.sees(b, h, i/sc.problem.BlockQ, block) {
			clear(seen[n:end])
		}
		n = end
	}
}

// sees reports whether the block mask shows a block of keys to a block of rows.
func (sc *Scores) sees(b, h, rows, keys int) bool {
	return sc.blocks.Bools[sc.blocks.Index(b, h, rows)+keys*sc.blocks.Stride[backend.Dim]]
}

// Seed seeds d for the dropout of the call.
func (sc *Scores) Seed(d *vec.Draw) { d.Seed(sc.problem.Dropout) }

// Drop applies the dropout of the call to weights of t for the keys of here. The draw of s is seeded.
func (sc *Scores) Drop(s *Space, t *Tile, weights []float32, here Span) {
	sc.Layout.form.drop(sc, s, t, weights, here)
}

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

// Key returns the position of key j of batch b.
func (sc *Scores) Key(b, j int) int {
	if sc.Listed == nil {
		return j
	}
	return int(sc.Listed[b][j])
}
