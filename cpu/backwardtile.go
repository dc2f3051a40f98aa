package cpu

import (
	"math"

	"github.com/seed90331342/attn/cpu/internal/pool"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// gradientSpace is the memory in which a goroutine computes the gradients of the scores of a
// tile. Elements of Q, K, V and dO that are not finite are 0 in it: a hidden one must not
// reach a sum, and D is NaN in rows that see one.
type gradientSpace struct {
	k, v   []float32 // the keys and values of the task, and Lanes rows of zeros
	loaded bool      // they are

	q, dO   []float32 // the tile's rows [rows, dimK], [rows, dimV]
	qt, dOt []float32 // transposed, q times scale; with keys as lanes [rows, dimK], dO
	m, dots []float32 // LSE in units of log2 e, and D, of each row
	sum     []float32 // of weights, not used

	w      []float32 // weights after dropout, dO's factors in dV
	ds     []float32 // gradients of the biased scores, then of the dot products over Scale
	capped []float32 // scores before biases
	turned []float32 // transposed weights or gradients
	ones   []float32
	old    []float32 // a row of a gradient to add to
}

// gradientFloats returns the floats that cutGradients cuts from scratch.
func (j *gradients) gradientFloats() int {
	rows := max(j.kernels.Width, j.tileRows())
	return (j.cacheKeys+j.kernels.Lanes)*(j.dimK+j.dimV) + 2*rows*(j.dimK+j.dimV) + 3*rows +
		4*max(j.scoreFloats(), rows*keyBlock) + max(keyBlock, rows) + max(j.dimK, j.dimV)
}

// cutGradients cuts the memory of a task from scratch.
func (j *gradients) cutGradients(w *scratch, b *workspace) *gradientSpace {
	s, rows := &w.gradients, max(j.kernels.Width, j.tileRows())
	*s = gradientSpace{k: w.floats((j.cacheKeys + j.kernels.Lanes) * j.dimK), v: w.floats((j.cacheKeys + j.kernels.Lanes) * j.dimV),
		q: w.floats(rows * j.dimK), dO: w.floats(rows * j.dimV), qt: w.floats(rows * j.dimK), dOt: w.floats(rows * j.dimV),
		m: w.floats(rows), dots: w.floats(rows), sum: w.floats(rows),
		ds: w.floats(j.scoreFloats()), ones: w.floats(max(keyBlock, rows)), old: w.floats(max(j.dimK, j.dimV))}
	if s.w = b.s; j.problem.Dropout.P > 0 {
		s.w = w.floats(j.scoreFloats())
		j.seedDropout(&b.draw)
	}
	if j.cap > 0 {
		s.capped = w.floats(j.scoreFloats())
		b.capped = s.capped
	}
	if j.keyLanes || j.wantsScores() {
		s.turned = w.floats(rows * keyBlock)
	}
	fill(s.ones, 1)
	clear(s.sum)
	return s
}

// loadKeys loads the keys and values of p, once.
func (j *gradients) loadKeys(s *gradientSpace, p *taskRange) {
	if s.loaded {
		return
	}
	s.loaded = true
	n := p.keys.hi - p.keys.lo
	loadRows(j.kernels, &j.k, s.k, j.dimK, p.b, p.hk, p.keys.lo, n)
	loadRows(j.kernels, &j.v, s.v, j.dimV, p.b, p.hk, p.keys.lo, n)
	j.clean(s.k[:n*j.dimK], j.dimK)
	j.clean(s.v[:n*j.dimV], j.dimV)
	clear(s.k[n*j.dimK:])
	clear(s.v[n*j.dimV:])
}

// clean replaces NaN and Inf in adjacent rows of dim elements by zero.
func (j *gradients) clean(rows []float32, dim int) {
	if j.kernels.NonFinite(rows, dim, len(rows)/dim, dim) {
		zeroNonFinite(rows)
	}
}

// visitTile calls do for the blocks of p's keys that t, whose spans are set, sees, with their
// weights and the gradients of their scores in s.
func (j *gradients) visitTile(turn *pool.Turn, s *gradientSpace, b *workspace, p *taskRange, t *tile, do func(here span)) error {
	if t.keys.clip(p.keys.lo, p.keys.hi).empty() {
		return nil
	}
	j.loadKeys(s, p)
	j.loadTile(s, b, p, t)
	for j0 := p.keys.lo; j0 < p.keys.hi; j0 += keyBlock {
		if err := turn.Pause(); err != nil {
			return err
		}
		var here span
		if here, t.mixed = j.trim(p.b, t, t.keys.clip(j0, min(j0+keyBlock, p.keys.hi))); !here.empty() {
			j.block(s, b, p, t, here)
			do(here)
		}
	}
	return nil
}

// loadTile loads the query rows of t, whose spans are set, and their dO, LSE and D. A row
// whose LSE is -Inf sees no key.
func (j *gradients) loadTile(s *gradientSpace, b *workspace, p *taskRange, t *tile) {
	x := j.kernels
	clear(s.m)
	clear(s.dots)
	j.rowsOf(t, 0, t.n, func(r, h, i, n int) {
		loadRows(x, &j.q, s.q[r*j.dimK:], j.dimK, p.b, h, i, n)
		loadRows(x, &j.dO, s.dO[r*j.dimV:], j.dimV, p.b, h, i, n)
		copy(s.dots[r:r+n], j.dots[(p.b*j.d.Heads+h)*j.d.SeqQ+i:])
		for m := range n {
			switch lse := j.lse.at(p.b, h, i+m, 0); {
			case lse == negInf:
				t.spans[r+m], t.every = span{}, span{}
			case lse == lse: // with NaN the weights of hidden keys would be NaN
				s.m[r+m] = float32(float64(lse) * math.Log2E)
			}
		}
	})
	clear(s.q[t.n*j.dimK:])
	clear(s.dO[t.n*j.dimV:])
	j.clean(s.q[:t.n*j.dimK], j.dimK)
	j.clean(s.dO[:t.n*j.dimV], j.dimV)
	if j.keyLanes {
		copy(s.dOt, s.dO)
		for c, y := range s.q[:t.n*j.dimK] {
			s.qt[c] = float32(y*j.scale) + 0 // no zero is negative, as after Kernels.Transpose
		}
		return
	}
	for lane := 0; lane < x.Width; lane += x.Lanes {
		for c := 0; c < j.dimK; c += x.Lanes {
			x.Transpose(s.qt[c*x.Width+lane:], x.Width, s.q[lane*j.dimK+c:], j.dimK, b.scale)
		}
		for c := 0; c < j.dimV; c += x.Lanes {
			x.Transpose(s.dOt[c*x.Width+lane:], x.Width, s.dO[lane*j.dimV+c:], j.dimV, b.one)
		}
	}
}

// block computes the weights of t and the keys of here, before dropout in b.s and after it
// in s.w, and the gradients of their biased scores in s.ds. Where the weight is 0 the
// gradient is 0.
func (j *gradients) block(s *gradientSpace, b *workspace, p *taskRange, t *tile, here span) {
	x, n := j.kernels, here.hi-here.lo
	lanes, first := roundUp(n, x.Lanes), here.lo-p.keys.lo
	k, v := s.k[first*j.dimK:], s.v[first*j.dimV:]
	dropped := j.problem.Dropout.P > 0
	factor := float32(1)
	if dropped {
		factor = j.problem.Dropout.Factor()
	}
	if j.keyLanes {
		x.Dots(vec.F32, b.s, keyBlock, b.run(k, j.dimK, lanes, j.dimK), j.dimK, s.qt, j.dimK, t.n, j.dimK)
		x.Dots(vec.F32, s.ds, keyBlock, b.run(v, j.dimV, lanes, j.dimV), j.dimV, s.dOt, j.dimV, t.n, j.dimV)
		for row := range t.n {
			at := row * keyBlock
			weights := b.s[at : at+lanes]
			j.adjustLanes(b, p, t, row, here, weights)
			x.Exp2(weights, s.m[row])
			if dropped {
				h, i := j.row(t.h, t.i, row)
				copy(s.w[at:], weights)
				j.dropRow(x, &b.draw, s.w[at:at+lanes], p.b, h, i, here.lo)
			}
			D := s.dots[row]
			w, ds := s.w[at:at+lanes], s.ds[at:at+lanes]
			for c, weight := range weights {
				ds[c] = scoreGradient(weight, w[c], ds[c], factor, D)
			}
		}
		return
	}
	w := x.Width
	b.before = s.m
	x.Scores(b.s, b.run(k, j.dimK, n, j.dimK), j.dimK, s.qt, j.d.Dim, b.mx)
	edge := here.lo < t.every.lo || here.hi > t.every.hi
	if j.cap > 0 || j.masked || j.added || edge || t.mixed {
		j.adjust(b, p, t, here, edge)
	}
	fours := ceilDiv(n, 4)
	fill(b.s[n*w:fours*4*w], negInf)
	copy(b.mx, s.m)
	x.Weights(b.s, fours, s.m, b.mx, s.sum, b.alpha)
	if dropped {
		weights := b.s
		copy(s.w, weights[:n*w])
		b.s = s.w
		j.dropTile(b, p, t, here.lo, n)
		b.s = weights
	}
	x.Scores(s.ds, b.run(v, j.dimV, n, j.dimV), j.dimV, s.dOt, j.d.ValueDim, b.mx)
	x.ScoreGradients(s.ds, b.s, s.w, n, s.dots, factor)
}

// scoreGradient is vec.Kernels.ScoreGradients for one score.
func scoreGradient(p, w, dp, factor, dot float32) float32 {
	if p == 0 {
		return 0
	}
	if w == 0 {
		dp = 0
	}
	return p * (float32(dp*factor) - dot)
}

// addBlock adds what t and the keys of here, which block has computed, contribute to the
// sums of biases, of dQ, and of dK and dV, which begin with the first key of p. dQ and dK are yet
// to be multiplied by Scale.
func (j *gradients) addBlock(s *gradientSpace, b *workspace, p *taskRange, t *tile, here span, dQ, dK, dV []float32) {
	x, n, first := j.kernels, here.hi-here.lo, here.lo-p.keys.lo
	if !j.dV.isZero() {
		j.addOuter(s, b, t, n, dV[first*j.dimV:], s.dO, j.dimV, s.w)
	}
	if j.wantsScores() {
		j.addBiases(s, b, p, t, here)
	}
	if j.cap > 0 {
		j.uncap(s, t, n)
	}
	k := s.k[first*j.dimK:]
	switch {
	case !j.wantsQ:
	case j.keyLanes:
		x.Mix(vec.F32, dQ, j.dimK, b.run(k, j.dimK, n, j.dimK), j.dimK, s.ds, keyBlock, s.ones, t.n, j.dimK)
	default:
		x.Values(dQ, b.run(k, j.dimK, n, j.dimK), j.dimK, s.ds, j.d.Dim, s.ones)
	}
	if !j.dK.isZero() {
		j.addOuter(s, b, t, n, dK[first*j.dimK:], s.q, j.dimK, s.ds)
	}
}

// addOuter adds, for each of n keys, the sum of the rows of t, times their factors in x:
//
//	sums [n, dim]    rows [t.n, dim]
func (j *gradients) addOuter(s *gradientSpace, b *workspace, t *tile, n int, sums, rows []float32, dim int, x []float32) {
	if !j.keyLanes {
		j.kernels.AddOuter(sums, dim, rows, dim, t.n, x, n, dim)
		return
	}
	for r := range t.n {
		for c, y := range x[r*keyBlock : r*keyBlock+n] {
			s.turned[c*t.n+r] = y
		}
	}
	j.kernels.Mix(vec.F32, sums, dim, b.run(rows, dim, t.n, dim), dim, s.turned, t.n, s.ones, n, dim)
}

// uncap multiplies gradients of capped scores by the derivative of the softcap, 1 - tanh².
func (j *gradients) uncap(s *gradientSpace, t *tile, n int) {
	rows, cols, ld := n, j.kernels.Width, j.kernels.Width
	if j.keyLanes {
		rows, cols, ld = t.n, n, keyBlock
	}
	inv := 1 / j.cap
	for r := range rows {
		ds := s.ds[r*ld : r*ld+cols]
		for c, y := range s.capped[r*ld : r*ld+cols] {
			if ds[c] != 0 { // y of a hidden key may be NaN
				tanh := y * inv
				ds[c] *= (1 - tanh) * (1 + tanh)
			}
		}
	}
}

// writeQueries writes the rows of dQ of tile t, of which sum is the sum.
func (j *gradients) writeQueries(s *gradientSpace, b *workspace, p *taskRange, t *tile, sum []float32) {
	x := j.kernels
	step := x.Lanes
	if j.keyLanes {
		step = t.n
	}
	for lane := 0; lane < t.n; lane += step {
		rows := sum
		if !j.keyLanes {
			rows = b.stage
			for c := 0; c < j.dimK; c += x.Lanes {
				x.Transpose(rows[c:], j.dimK, sum[c*x.Width+lane:], x.Width, b.one)
			}
		}
		for r := range min(step, t.n-lane) {
			h, i := j.row(t.h, t.i, lane+r)
			j.storeGradient(s, &j.dQ, rows[r*j.dimK:(r+1)*j.dimK], j.problem.Scale, p.b, h, i)
		}
	}
}
