package cpu

import (
	"math"

	"github.com/seed90331342/attn/backend"
)

// biasGradients are the gradients of biases and sinks, and the sums over dS from which they
// follow when the keys of all tasks are done. DBias with rows and keys has no sums: tasks add
// to it in place, head after head.
//
// The order of each sum depends on the shapes alone. Each has the
// terms of one head. In the chain of tasks of that head, each adds a tile after the task before
// it: the keys of a row come in order, and so do the rows of a distance. While one task is at a
// tile, those after it in the chain are at earlier tiles and later keys, at other distances.
type biasGradients struct {
	dBias, dRelative, dSlopes, dSinks view

	distances []float64 // [B, H, Sq+Sk-1], as Relative
	byRow     []float64 // [B, H, Sq], for DBias without keys
	byKey     []float64 // [B, H, Sk], for DBias without rows
}

// biasSums are the lengths of the sums of biasGradients.
type biasSums struct{ distances, byRow, byKey int }

func (n biasSums) all() int { return n.distances + n.byRow + n.byKey }

// distances returns the number of distances between rows and keys.
func distances(d backend.Dims) int { return max(0, d.SeqQ+d.SeqK-1) }

// newBiasSums returns the sums that g needs.
func newBiasSums(g *backend.Gradients) (n biasSums) {
	d := g.Dims()
	heads := d.Batch * d.Heads
	if !g.DRelative.IsZero() || !g.DSlopes.IsZero() {
		n.distances = heads * distances(d)
	}
	if s := g.DBias.Shape(); !g.DBias.IsZero() {
		switch {
		case s[backend.Dim] == 1:
			n.byRow = heads * d.SeqQ
		case s[backend.Seq] == 1:
			n.byKey = heads * d.SeqK
		}
	}
	return n
}

// openBiases opens the gradients of biases that g requests and allocates their sums.
func (j *gradients) openBiases(g *backend.Gradients) error {
	a := &j.biasGradients
	if err := openViews([]operand{{"dbias", g.DBias, &a.dBias}, {"drelative", g.DRelative, &a.dRelative},
		{"dslopes", g.DSlopes, &a.dSlopes}, {"dsinks", g.DSinks, &a.dSinks}}); err != nil {
		return err
	}
	n := newBiasSums(g)
	for _, of := range []struct {
		sums *[]float64
		n    int
	}{{&a.distances, n.distances}, {&a.byRow, n.byRow}, {&a.byKey, n.byKey}} {
		var err error
		if *of.sums, err = resized(*of.sums, of.n); err != nil {
			return err
		}
		clear(*of.sums)
	}
	return nil
}

// direct reports whether tasks add to DBias in place, shared whether several heads add to the
// same element.
func (a *biasGradients) direct() bool {
	return !a.dBias.isZero() && a.dBias.shape[backend.Seq] > 1 && a.dBias.shape[backend.Dim] > 1
}

func (j *gradients) shared() bool {
	return j.direct() && (j.dBias.shape[backend.Batch] < j.d.Batch || j.dBias.shape[backend.Heads] < j.d.Heads)
}

// wantsScores reports whether a gradient of a bias needs dS.
func (a *biasGradients) wantsScores() bool {
	return a.direct() || len(a.distances)+len(a.byRow)+len(a.byKey) > 0
}

// biasRow returns the elements of keys in the row of DBias to which row i adds, and their
// stride.
func (a *biasGradients) biasRow(b, h, i int, keys span) ([]float32, int) {
	v := &a.dBias
	step := v.stride[backend.Dim]
	at := v.index(min(b, v.shape[backend.Batch]-1), min(h, v.shape[backend.Heads]-1), i) + keys.lo*step
	return v.f32[at : at+(keys.hi-keys.lo-1)*step+1], step
}

// clearBias sets the elements of DBias to zero to which the rows of t are the first that add,
// for the keys of p. Those of hidden keys stay zero.
func (j *gradients) clearBias(p *taskRange, t *tile) {
	if j.add || !j.direct() || p.keys.empty() {
		return
	}
	for r := range t.n {
		h, i := j.row(t.h, t.i, r)
		if p.b > 0 && j.dBias.shape[backend.Batch] == 1 || h > 0 && j.dBias.shape[backend.Heads] == 1 {
			continue
		}
		to, step := j.biasRow(p.b, h, i, p.keys)
		if step == 1 {
			clear(to)
			continue
		}
		for c := 0; c < len(to); c += step {
			to[c] = 0
		}
	}
}

// addBiases adds the gradients of the biased scores of t and the keys of here, in s.ds.
func (j *gradients) addBiases(s *gradientSpace, b *workspace, p *taskRange, t *tile, here span) {
	n, ds := here.hi-here.lo, s.ds
	if !j.keyLanes {
		x := j.kernels
		for lane := 0; lane < t.n; lane += x.Lanes {
			for c := 0; c < n; c += x.Lanes {
				x.Transpose(s.turned[lane*keyBlock+c:], keyBlock, s.ds[c*x.Width+lane:], x.Width, b.one)
			}
		}
		ds = s.turned
	}
	direct := j.direct()
	for r := range t.n {
		h, i := j.row(t.h, t.i, r)
		row, head := ds[r*keyBlock:][:n], p.b*j.d.Heads+h
		if direct {
			to, step := j.biasRow(p.b, h, i, here)
			for c, y := range row {
				to[c*step] += y
			}
		}
		if len(j.byRow) > 0 {
			sum := 0.0
			for _, y := range row {
				sum += float64(y)
			}
			j.byRow[head*j.d.SeqQ+i] += sum
		}
		if len(j.byKey) > 0 {
			addTo(j.byKey[head*j.d.SeqK+here.lo:], row)
		}
		if len(j.distances) > 0 {
			addTo(j.distances[head*distances(j.d)+here.lo-i+j.d.SeqQ-1:], row)
		}
	}
}

// addTo adds row to sums.
func addTo(sums []float64, row []float32) {
	sums = sums[:len(row)]
	for c, y := range row {
		sums[c] += float64(y)
	}
}

// writeBiases writes the gradients that follow from the sums, of all heads and batches that
// share an element, in their order.
func (j *gradients) writeBiases() {
	n := distances(j.d)
	each := func(v *view, length int, term func(b, h, c int) float64) {
		if v.isZero() {
			return
		}
		batches, heads := v.shape[backend.Batch], v.shape[backend.Heads]
		for b := range batches {
			for h := range heads {
				for c := range length {
					sum := 0.0
					for ob := b; ob < j.d.Batch; ob += batches {
						for oh := h; oh < j.d.Heads; oh += heads {
							sum += term(ob, oh, c)
						}
					}
					i := 0
					if v.shape[backend.Dim] == 1 {
						i, c = c, 0
					}
					j.storeSum(v, b, h, i, c, sum)
				}
			}
		}
	}
	head := func(b, h, length int) int { return (b*j.d.Heads + h) * length }
	each(&j.dRelative, n, func(b, h, c int) float64 { return j.distances[head(b, h, n)+c] })
	each(&j.dSlopes, 1, func(b, h, _ int) (slope float64) {
		for c, x := range j.distances[head(b, h, n):][:n] {
			slope -= math.Abs(float64(j.problem.Visible.Offset-(c-(j.d.SeqQ-1)))) * x
		}
		return slope
	})
	each(&j.dSinks, 1, j.sinkGradient)
	switch {
	case j.dBias.isZero() || j.direct():
	case j.dBias.shape[backend.Dim] > 1:
		each(&j.dBias, j.d.SeqK, func(b, h, c int) float64 { return j.byKey[head(b, h, j.d.SeqK)+c] })
	case j.dBias.shape[backend.Seq] > 1:
		each(&j.dBias, j.d.SeqQ, func(b, h, c int) float64 { return j.byRow[head(b, h, j.d.SeqQ)+c] })
	default:
		each(&j.dBias, 1, func(b, h, _ int) (sum float64) {
			for _, x := range j.byRow[head(b, h, j.d.SeqQ):][:j.d.SeqQ] {
				sum += x
			}
			return sum
		})
	}
}

// sinkGradient returns what batch b adds to the gradient of the sink of head h.
func (j *gradients) sinkGradient(b, h, _ int) (sum float64) {
	sink := j.problem.Sink(h)
	if sink == negInf {
		return 0
	}
	dots := j.dots[(b*j.d.Heads+h)*j.d.SeqQ:]
	for i := range j.d.SeqQ {
		if lse := j.lse.at(b, h, i, 0); lse != negInf {
			sum -= math.Exp(float64(sink)-float64(lse)) * float64(dots[i])
		}
	}
	return sum
}

// storeSum writes x to an element of v, or adds it.
func (j *gradients) storeSum(v *view, b, h, i, c int, x float64) {
	at := v.index(b, h, i) + c*v.stride[backend.Dim]
	if j.add {
		x += float64(v.f32[at])
	}
	v.f32[at] = float32(x)
}
