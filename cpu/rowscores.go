package cpu

import (
	"math"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// scoring turns dot products into scores: scale, softcap, biases and masks.
type scoring struct {
	problem                         *backend.Problem
	mask, blockMask, bias, relative view
	heads, seqQ                     int
	masked                          bool // there is a mask or a block mask
	added                           bool // there is a bias, a relative bias or slopes
	hiding                          bool // a mask, a bias or dropout may hide single keys
}

// open opens the tensors of p, for a call with the given numbers of query heads and rows.
func (sc *scoring) open(p *backend.Problem, heads, seqQ int) error {
	*sc = scoring{problem: p, heads: heads, seqQ: seqQ}
	err := openViews([]operand{{"mask", p.Mask, &sc.mask}, {"blocks", p.Blocks, &sc.blockMask},
		{"bias", p.Bias, &sc.bias}, {"relative", p.Relative, &sc.relative}})
	sc.masked = !sc.mask.isZero() || !sc.blockMask.isZero()
	sc.hiding = !sc.mask.isZero() || !sc.bias.isZero() || !sc.relative.isZero() || p.Dropout.P > 0
	sc.added = !sc.bias.isZero() || !sc.relative.isZero() || p.Slopes != nil
	return err
}

// scaleAndCap returns the factor of dot products and, with a softcap, that of its tanh,
// else 0. They yield scores in units of log2 e:
//
//	s·scale    or    tanh(s·scale)·cap
func scaleAndCap(p *backend.Problem) (scale, cap float32) {
	if c := float64(p.Softcap); c > 0 {
		return float32(float64(p.Scale) / c), float32(c * math.Log2E)
	}
	return float32(float64(p.Scale) * math.Log2E), 0
}

var negInf = float32(math.Inf(-1))

// adjustRow turns dot products of query row i with the keys from j on into scores,
// in place:
//
//	s = scale·s    s = softcap·tanh(s/softcap)    s = s + bias    hidden: -Inf
//
// bias has room for whole vectors.
func (sc *scoring) adjustRow(k *vec.Kernels, r *ramp, s []float32, b, h, i, j int, bias []float32) {
	for n := range s {
		s[n] *= sc.problem.Scale
	}
	if c := sc.problem.Softcap; c > 0 {
		for n, x := range s {
			s[n] = c * vec.Tanh(x/c)
		}
	}
	if sc.added {
		bias = bias[:len(s)]
		sc.addedRow(k, r, bias, b, h, i, j)
		for n, x := range bias {
			if x == negInf {
				s[n] = negInf // not s+x: s may be NaN or +Inf
			} else {
				s[n] += backend.Bound(x, backend.MaxBias)
			}
		}
	}
	if sc.masked {
		sc.maskRow(k, s, b, h, i, j)
	}
}

// addedRow writes the sum of the biases of a row from key j on: the bias, and the terms
// that depend on the distance, bounded as in backend.Problem. It does not bound a bias
// that is the only term: the kernels do that when they add it.
//
// dst has at most keyBlock elements and room for whole vectors. The elements up to there
// become unspecified.
func (sc *scoring) addedRow(k *vec.Kernels, r *ramp, dst []float32, b, h, i, j int) {
	if sc.bias.isZero() {
		sc.distances(k, r, dst, b, h, j-i)
		return
	}
	sc.bias.load(k, dst, len(dst), b, h, i, 1, j, len(dst))
	if !sc.biasAlone() {
		sc.distances(k, r, r.terms[:len(dst)], b, h, j-i)
		k.Join(dst[:roundUp(len(dst), k.Lanes)], r.terms[:])
	}
}

// biasAlone reports whether a bias is the only term to add.
func (sc *scoring) biasAlone() bool {
	return !sc.bias.isZero() && sc.relative.isZero() && sc.problem.Slopes == nil
}

// distances writes the terms that depend on the distance between row and key, for
// distances from d on; 0 for distances that no pair has. dst has room for whole vectors, as
// in addedRow.
func (sc *scoring) distances(k *vec.Kernels, r *ramp, dst []float32, b, h, d int) {
	padded := dst[:roundUp(len(dst), k.Lanes)]
	slope := sc.problem.Slope(b, h, sc.heads)
	if sc.relative.isZero() {
		copy(dst, r.from(d-sc.problem.Visible.Offset, len(dst), sc.seqQ))
		k.ScaleMax(padded, slope, r.lanes[:])
		return
	}
	at := d + sc.seqQ - 1
	lo := min(len(dst), max(0, -at))
	hi := max(lo, min(len(dst), sc.relative.shape[backend.Dim]-at))
	clear(dst[:lo])
	clear(dst[hi:])
	sc.relative.load(k, dst[lo:hi], hi-lo, b, h, 0, 1, at+lo, hi-lo)
	k.Bound(padded, backend.MaxRelative)
	if slope != 0 {
		for n, far := range r.from(d-sc.problem.Visible.Offset, len(dst), sc.seqQ) {
			dst[n] += float32(slope * far)
		}
	}
}

// ramp holds -|d| for adjacent distances d, which the rows of a tile share.
type ramp struct {
	first, n int // values holds those of n distances from first on
	values   [keyBlock + 2*maxLanes]float32
	terms    [keyBlock]float32 // of a row
	lanes    [maxLanes]float32
}

// from returns -|d| for n distances from d on. The next rows of the head, of which there
// are fewer than rows, begin at smaller distances.
func (r *ramp) from(d, n, rows int) []float32 {
	if d < r.first || d+n > r.first+r.n {
		before := min(rows, maxLanes) - 1
		r.first, r.n = d-before, n+before
		for i := range r.n {
			r.values[i] = float32(min(r.first+i, -r.first-i))
		}
	}
	return r.values[d-r.first:][:n]
}

// maskRow writes -Inf to the elements of a row, from key j on, that the mask or the
// block mask hides.
func (sc *scoring) maskRow(k *vec.Kernels, s []float32, b, h, i, j int) {
	if !sc.mask.isZero() {
		step, whole := sc.mask.stride[backend.Dim], 0
		at := sc.mask.index(b, h, i) + j*step
		if step == 1 && len(s) >= k.Lanes {
			whole = len(s) / k.Lanes * k.Lanes
			k.HideRow(s[:whole], sc.mask.bools[at:])
		}
		for n := whole; n < len(s); n++ {
			if !sc.mask.bools[at+n*step] {
				s[n] = negInf
			}
		}
	}
	if sc.blockMask.isZero() {
		return
	}
	at, step := sc.blockMask.index(b, h, i/sc.problem.BlockQ), sc.blockMask.stride[backend.Dim]
	for n := 0; n < len(s); {
		block := (j + n) / sc.problem.BlockK
		end := min(len(s), (block+1)*sc.problem.BlockK-j)
		if !sc.blockMask.bools[at+block*step] {
			fill(s[n:end], negInf)
		}
		n = end
	}
}

// hides reports whether a mask or an infinite bias hides key j from row i.
func (sc *scoring) hides(b, h, i, j int) bool {
	switch {
	case !sc.mask.isZero() && !sc.mask.bools[sc.mask.index(b, h, i)+j*sc.mask.stride[backend.Dim]],
		!sc.blockMask.isZero() && !sc.blockMask.bools[sc.blockMask.index(b, h, i/sc.problem.BlockQ)+j/sc.problem.BlockK*sc.blockMask.stride[backend.Dim]],
		!sc.bias.isZero() && sc.bias.at(b, h, i, j) == negInf,
		!sc.relative.isZero() && sc.relative.at(b, h, 0, j-i+sc.seqQ-1) == negInf:
		return true
	}
	return false
}

// keeps reports whether dropout keeps the weight of key j.
func (sc *scoring) keeps(b, h, i, j int) bool {
	return sc.problem.Dropout.P == 0 || sc.problem.Dropout.Keeps(b, h, i, j)
}

// dropRow applies dropout to the weights s of row i, which belong to the keys from j
// on. s has room for a multiple of DropLanes, which it overwrites, and d is seeded.
func (sc *scoring) dropRow(x *vec.Kernels, d *vec.Draw, s []float32, b, h, i, j int) {
	first := &sc.problem.Dropout.First
	d.Row(x, uint32(first[backend.Batch]+b), uint32(first[backend.Heads]+h), uint32(first[backend.Seq]+i))
	x.DropRow(s[:roundUp(len(s), x.DropLanes())], d, uint32(first[backend.Dim]+j))
}

// seedDropout seeds d if the call has dropout.
func (sc *scoring) seedDropout(d *vec.Draw) {
	if p := &sc.problem.Dropout; p.P > 0 {
		d.Seed(p.Seed, p.Threshold(), p.Factor())
	}
}
