package gpu

import (
	"context"

	"github.com/seed90331342/attn/backend"
)

var _ backend.Scorer = (*Backend)(nil)

// Scores implements backend.Scorer by the first part of the softmax kernel. Errors as
// for Softmax.
func (b *Backend) Scores(ctx context.Context, s backend.Tensor, p *backend.Problem, at backend.ScorePoint) error {
	q := p.Until(at)
	out := []backend.Operand{{Name: "s", Tensor: s}}
	in := q.Operands()
	return b.call(ctx, "scores", out, in[:], func(r *runner) error { return b.rows(r, s, backend.Tensor{}, &q, true) })
}
