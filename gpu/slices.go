package gpu

import (
	"context"
	"fmt"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
)

// attention hands c to r, in slices where it takes some.
func (b *Backend) attention(r *runner, c *backend.Call) error {
	calls, err := cut.Slices(c)
	if err != nil {
		return err
	}
	if calls == nil {
		err = b.whole(r, c)
	}
	for _, part := range calls {
		r.several = true
		if err = b.whole(r, part); err == nil {
			err = r.handBack()
		}
		if err != nil {
			return err
		}
	}
	if err == nil && r.rehearse {
		r.flops = float64(backend.NewPlan(c).FLOPs)
	}
	return err
}

// Plan says how Attention would run c.
func (b *Backend) Plan(ctx context.Context, c *backend.Call) (backend.Plan, error) {
	if err := b.enter(ctx); err != nil {
		return backend.Plan{}, err
	}
	defer b.leave()
	p, err := b.plan(c)
	if err != nil {
		err = fmt.Errorf("plan: %w", err)
	}
	return p, err
}

func (b *Backend) plan(c *backend.Call) (backend.Plan, error) {
	p := backend.NewPlan(c)
	p.Backend = b.info.Name
	p.Limits = b.info.Limits
	calls, err := cut.Slices(c)
	if err != nil {
		return backend.Plan{}, err
	}
	if calls == nil {
		err = b.planWhole(c, &p)
	}
	for i, part := range calls {
		before := p
		p.Scratch, p.Streamed = 0, 0
		if err := b.planWhole(part, &p); err != nil {
			return backend.Plan{}, err
		}
		p.Scratch = max(p.Scratch, before.Scratch)
		p.Streamed += before.Streamed
		if i == len(calls)-1 {
			p.Why += fmt.Sprintf("; %d columns of v in %d slices, which compute the scores again", c.V.Shape()[backend.Dim], len(calls))
		}
	}
	if err != nil {
		return backend.Plan{}, err
	}
	return p, nil
}
