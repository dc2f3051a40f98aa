package cpu

import (
	"context"
	"fmt"
	"math"

	"github.com/seed90331342/attn/backend"
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
