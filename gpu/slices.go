package gpu

import (
	"context"
	"fmt"

	"github.com/seed90331342/attn/backend"
)

// sliced returns c as calls over slices of the columns of V and O, as many as it takes
// for each to fit into a workgroup's registers (see maxValueDim). Each computes the
// scores again, so that the bits of a row are those of the same columns alone; LSE comes
// with the first. A call with few enough columns is not sliced: nil.
func sliced(c *backend.Call) ([]*backend.Call, error) {
	dv := c.V.Shape()[backend.Dim]
	if dv <= maxValueDim {
		return nil, nil
	}
	if c.V.DType() == backend.Q8 {
		return nil, fmt.Errorf("v of q8 has head size %d, the fused kernel takes up to %d of one: store v as f16 or bf16: %w", dv, maxValueDim, backend.ErrUnsupported)
	}
	n := (dv + maxValueDim - 1) / maxValueDim
	width := alignUp((dv+n-1)/n, tile)
	var calls []*backend.Call
	for lo := 0; lo < dv; lo += width {
		part := *c
		part.Resume = nil
		if lo > 0 {
			part.LSE = backend.Tensor{}
		}
		for _, t := range []*backend.Tensor{&part.V, &part.O} {
			var err error
			if *t, err = t.Slice(backend.Dim, lo, min(lo+width, dv)); err != nil {
				return nil, err
			}
		}
		calls = append(calls, &part)
	}
	return calls, nil
}

// attention hands c to r, in slices where it takes some.
func (b *Backend) attention(r *runner, c *backend.Call) error {
	calls, err := sliced(c)
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
	calls, err := sliced(c)
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
