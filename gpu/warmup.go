package gpu

import (
	"context"

	"github.com/seed90331342/attn/backend"
)

// Warmup compiles the pipelines that Attention needs for c, or with staged those of
// QK, Softmax and PV, by a rehearsal of the calls. Stages may need others for keys that
// are a multiple of 4 than for those that are not, and for much longer rows or more of
// them. backend.ErrUnsupported when the device does not accept one.
func (b *Backend) Warmup(ctx context.Context, c *backend.Call, staged bool) (err error) {
	if err := b.enter(ctx); err != nil {
		return err
	}
	defer b.leave()
	r := b.newRunner(ctx)
	defer func() { r.finish(err) }()
	r.rehearse = true
	if staged {
		err = b.stages(r, c)
	} else {
		err = b.attention(r, c)
	}
	for _, p := range r.pipes {
		if err == nil {
			err = ctx.Err()
		}
		if err == nil {
			_, err = b.pipeline(ctx, p)
		}
	}
	return err
}

// stages rehearses the three stages of c.
func (b *Backend) stages(r *runner, c *backend.Call) error {
	d := c.Dims()
	w, err := backend.Meta(backend.F32, backend.Shape{d.Batch, d.Heads, d.SeqQ, d.SeqK})
	if err != nil {
		return err
	}
	if err := b.scores(r, w, c.Q, c.K); err != nil {
		return err
	}
	if err := b.softmax(r, w, c.LSE, &c.Problem); err != nil {
		return err
	}
	return b.weighted(r, c.O, w, c.V)
}
