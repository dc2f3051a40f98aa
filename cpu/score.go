package cpu

import (
	"context"
	"fmt"

	"github.com/seed90331342/attn/backend"
)

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
