package cpu

import (
	"context"
	"fmt"
	"math"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// Softmax implements backend.Backend: it replaces each row of s by
//
//	exp(x_j - m)/l    x = scores of the row (see scoring.score)    m = max x    l = Σ exp(x_j - m)
//
// and writes m + log l to lse unless that is the zero Tensor. Hidden keys give
// exactly 0 and what s held there is not looked at; a row without a score above
// -Inf becomes zeros with LSE -Inf, or its sink. On the gonum path l is kept in float64.
// Errors as for Attention.
func (be *Backend) Softmax(ctx context.Context, s, lse backend.Tensor, p *backend.Problem) error {
	if err := be.gate.enter(ctx, "softmax"); err != nil {
		return err
	}
	defer be.gate.leave()
	if err := be.softmax(ctx, s, lse, p); err != nil {
		return fmt.Errorf("cpu: softmax: %w", err)
	}
	return nil
}

func (be *Backend) softmax(ctx context.Context, s, lse backend.Tensor, p *backend.Problem) error {
	var pinned backend.Pinned
	in := p.Operands()
	err := pinned.Pin(nil, where, []backend.Operand{{Name: "s", Tensor: s}, {Name: "lse", Tensor: lse}}, in[:])
	if err != nil {
		return err
	}
	defer pinned.Unpin()
	var j softmaxJob
	if j.scoring, err = scoringOf(p, s.Shape()[backend.Heads], s.Shape()[backend.Seq]); err != nil {
		return err
	}
	if j.s, err = f32View("s", s); err != nil {
		return err
	}
	if j.lse, err = f32View("lse", lse); err != nil {
		return err
	}
	j.rowCut = cutRows(s.Shape(), 1, keyBlock, be.threads())
	if be.kernels != nil {
		return be.workers.run(ctx, newVectorSoftmax(&j, be.kernels), j.tasks, be.threads())
	}
	return be.workers.run(ctx, &j, j.tasks, be.threads())
}

// softmaxJob is one Softmax call.
type softmaxJob struct {
	rowCut
	scoring
	s, lse view
}

// size implements job.
func (j *softmaxJob) size() (floats, rows int) { return 2 * keyBlock, 0 }

// task implements job: a stretch of rows of one head.
func (j *softmaxJob) task(ctx context.Context, w *scratch, t int) error {
	b, h, from, to, _ := j.at(t)
	row, tmp := w.floats(keyBlock), w.floats(keyBlock)
	for i := from; i < to; i++ {
		if err := ctx.Err(); err != nil {
			return err
		}
		lse := j.row(row, tmp, b, h, i)
		if !j.lse.isZero() {
			j.lse.f32[j.lse.index(b, h, i)] = lse
		}
	}
	return nil
}

// row does row i of head (b, h) block by block in buf and returns its LSE.
func (j *softmaxJob) row(buf, tmp []float32, b, h, i int) float32 {
	seqK := j.s.shape[backend.Dim]
	lo, hi := j.p.Visible.Range(b, i, seqK)
	m := negInf
	// blocks calls f with each key block that the row sees: the block's first
	// key, and the part that is seen.
	blocks := func(f func(j0, lo, hi int)) {
		for j0 := lo / keyBlock * keyBlock; j0 < hi; j0 += keyBlock {
			f(j0, max(lo-j0, 0), min(hi-j0, keyBlock))
		}
	}
	blocks(func(j0, lo, hi int) {
		j.s.pack(buf[lo:], keyBlock, b, h, i, 1, j0+lo, hi-lo)
		m = max(m, j.score(buf, lo, hi, b, h, i, j0, tmp))
		j.s.store(buf[lo:hi], b, h, i, j0+lo)
	})
	if m == negInf {
		lo, hi = 0, 0
	}
	var sum float64
	blocks(func(j0, lo, hi int) {
		fillEnds(buf, lo, hi)
		j.s.pack(buf[lo:], keyBlock, b, h, i, 1, j0+lo, hi-lo)
		sum += expRow(buf[lo&^3:roundUp(hi)], m)
		j.s.store(buf[lo:hi], b, h, i, j0+lo)
	})
	top, sum, alpha := j.withSink(h, m, sum)
	blocks(func(j0, lo, hi int) {
		j.s.pack(buf[lo:], keyBlock, b, h, i, 1, j0+lo, hi-lo)
		divide(buf[lo:hi], float32(sum/float64(alpha)))
		if sum != sum { // NaN, but not for what is hidden
			for n := lo; n < hi; n++ {
				if j.hides(b, h, i, j0+n) {
					buf[n] = 0
				}
			}
		}
		j.drop(buf[lo:hi], b, h, i, j0+lo)
		j.s.store(buf[lo:hi], b, h, i, j0+lo)
	})
	j.zero(b, h, i, 0, lo)
	j.zero(b, h, i, hi, seqK)
	if top == negInf {
		return top
	}
	return float32(float64(top) + math.Log(sum))
}

// zero writes zeros to elements [lo, hi) of a row of s.
func (j *softmaxJob) zero(b, h, i, lo, hi int) {
	step := j.s.stride[backend.Dim]
	at := j.s.index(b, h, i) + lo*step
	for range hi - lo {
		j.s.f32[at] = 0
		at += step
	}
}

// vectorSoftmax is a softmaxJob on the vector kernels, with keys as lanes. It goes
// over what a row sees three times: scores and their maximum, powers and their
// sum, the division. The sum is kept lane by lane, from the first key that the
// row sees on, so that a row's bits depend on nothing but the row.
type vectorSoftmax struct {
	*softmaxJob
	k          *vec.Kernels
	scale, cap float32 // as in fused
	inPlace    bool
}

func newVectorSoftmax(j *softmaxJob, k *vec.Kernels) *vectorSoftmax {
	v := &vectorSoftmax{softmaxJob: j, k: k, scale: float32(float64(j.p.Scale) * math.Log2E), inPlace: j.s.stride[backend.Dim] == 1}
	if c := float64(j.p.Softcap); c > 0 {
		v.scale, v.cap = float32(float64(j.p.Scale)/c), float32(c*math.Log2E)
	}
	return v
}

// pieceKeys is the most keys that one kernel call takes: some microseconds.
const pieceKeys = 4096

// size implements job.
func (j *vectorSoftmax) size() (floats, rows int) { return 2*keyBlock + 2*j.k.Lanes, 0 }

// task implements job: a stretch of rows of one head.
func (j *vectorSoftmax) task(ctx context.Context, w *scratch, t int) error {
	b, h, from, to, _ := j.at(t)
	j.seedDropout(&w.workspace.draw)
	buf := softmaxRoom{w.floats(keyBlock), w.floats(keyBlock), w.floats(j.k.Lanes), w.floats(j.k.Lanes), &w.workspace.draw}
	for i := from; i < to; i++ {
		if err := ctx.Err(); err != nil {
			return err
		}
		lse := j.row(&buf, b, h, i)
		if !j.lse.isZero() {
			j.lse.f32[j.lse.index(b, h, i)] = lse
		}
	}
	return nil
}

// softmaxRoom is what a row is worked on in.
type softmaxRoom struct {
	row, bias, lanes, sums []float32
	draw                   *vec.Draw
}

// row does row i of head (b, h) and returns its LSE.
func (j *vectorSoftmax) row(w *softmaxRoom, b, h, i int) float32 {
	seqK := j.s.shape[backend.Dim]
	lo, hi := j.p.Visible.Range(b, i, seqK)
	m := negInf
	j.pieces(w, b, h, i, lo, hi, func(x []float32, key, n int) {
		if y := j.score(w, x, b, h, i, key, n); y > m {
			m = y
		}
	})
	if m == negInf { // all hidden, or NaN
		m = 0
	}
	clear(w.sums)
	j.pieces(w, b, h, i, lo, hi, func(x []float32, _, n int) {
		fill(x[n:], negInf)
		j.k.Exp2Sum(x, m, w.sums)
	})
	sum := 0.0
	for _, y := range w.sums {
		sum += float64(y)
	}
	lse, inv := rowLSE(m, sum, j.p.Sink(h))
	j.pieces(w, b, h, i, lo, hi, func(x []float32, key, n int) {
		j.k.ScaleMax(x, inv, w.lanes)
		if sum != sum { // NaN, but not for what is hidden
			for c := range n {
				if j.hides(b, h, i, key+c) {
					x[c] = 0
				}
			}
		}
		if j.p.Dropout.P > 0 {
			j.dropRow(j.k, w.draw, x, b, h, i, key)
		}
	})
	j.zero(b, h, i, 0, lo)
	j.zero(b, h, i, hi, seqK)
	return lse
}

// score turns n dot products, with the keys from key on, into scores in units of
// log2 e, and what x holds beyond n into -Inf. It returns the largest.
func (j *vectorSoftmax) score(w *softmaxRoom, x []float32, b, h, i, key, n int) float32 {
	m := j.k.ScaleMax(x, j.scale, w.lanes)
	plain := true
	if j.cap > 0 {
		plain = false
		j.k.Softcap(x, j.cap)
	}
	if j.masked || j.added {
		plain = false
		for c := 0; c < n; c += keyBlock {
			some := min(keyBlock, n-c)
			lanes := ceilDiv(some, j.k.Lanes) * j.k.Lanes
			j.biasRow(j.k, w.bias, b, h, i, key+c, some)
			clear(w.bias[some:lanes])
			j.k.Bias(x[c:c+lanes], w.bias)
		}
	}
	if plain && n == len(x) {
		return m
	}
	fill(x[n:], negInf)
	return j.k.ScaleMax(x, 1, w.lanes)
}

// pieces calls f with elements [lo, hi) of a row, some at a time, in memory whose
// length is a multiple of Lanes: n elements from key on, and unspecified ones
// behind. What f writes to the n goes back to the row.
func (j *vectorSoftmax) pieces(w *softmaxRoom, b, h, i, lo, hi int, f func(x []float32, key, n int)) {
	at := j.s.index(b, h, i)
	for key := lo; key < hi; {
		n := min(hi-key, pieceKeys)
		if n >= j.k.Lanes && j.inPlace {
			n = n / j.k.Lanes * j.k.Lanes
			f(j.s.f32[at+key:at+key+n], key, n)
			key += n
			continue
		}
		n = min(n, keyBlock)
		x := w.row[:ceilDiv(n, j.k.Lanes)*j.k.Lanes]
		j.s.pack(x, n, b, h, i, 1, key, n)
		f(x, key, n)
		j.s.store(x[:n], b, h, i, key)
		key += n
	}
}

var _ backend.Scorer = (*Backend)(nil)

// Scores implements backend.Scorer: the first half of Softmax, in float32, the same on
// every tier. Errors as for Attention.
func (be *Backend) Scores(ctx context.Context, s backend.Tensor, p *backend.Problem, at backend.ScorePoint) error {
	if err := be.gate.enter(ctx, "scores"); err != nil {
		return err
	}
	defer be.gate.leave()
	if err := be.score(ctx, s, p.Until(at)); err != nil {
		return fmt.Errorf("cpu: scores: %w", err)
	}
	return nil
}

func (be *Backend) score(ctx context.Context, s backend.Tensor, p backend.Problem) error {
	var pinned backend.Pinned
	in := p.Operands()
	err := pinned.Pin(nil, where, []backend.Operand{{Name: "s", Tensor: s}}, in[:])
	if err != nil {
		return err
	}
	defer pinned.Unpin()
	var j scoreJob
	if j.scoring, err = scoringOf(&p, s.Shape()[backend.Heads], s.Shape()[backend.Seq]); err != nil {
		return err
	}
	if j.s, err = f32View("s", s); err != nil {
		return err
	}
	j.rowCut = cutRows(s.Shape(), 1, keyBlock, be.threads())
	return be.workers.run(ctx, &j, j.tasks, be.threads())
}

// scoreJob is one Scores call.
type scoreJob struct {
	rowCut
	scoring
	s view
}

// size implements job.
func (j *scoreJob) size() (floats, rows int) { return 2 * keyBlock, 0 }

// task implements job: a stretch of rows of one head, block by block.
func (j *scoreJob) task(ctx context.Context, w *scratch, t int) error {
	b, h, from, to, _ := j.at(t)
	row, tmp := w.floats(keyBlock), w.floats(keyBlock)
	keys := j.s.shape[backend.Dim]
	for i := from; i < to; i++ {
		if err := ctx.Err(); err != nil {
			return err
		}
		lo, hi := j.p.Visible.Range(b, i, keys)
		for j0 := 0; j0 < keys; j0 += keyBlock {
			x := row[:min(keyBlock, keys-j0)]
			fill(x, negInf)
			if first, end := max(lo-j0, 0), min(hi-j0, len(x)); first < end {
				x := x[first:end]
				j.s.pack(x, len(x), b, h, i, 1, j0+first, len(x))
				j.adjust(x, b, h, i, j0+first, tmp)
			}
			j.s.store(x, b, h, i, j0)
		}
	}
	return nil
}
