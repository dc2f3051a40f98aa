package gpu

import (
	"context"
	"fmt"

	"github.com/seed90331342/attn/backend"
)

var _ backend.Batcher = (*Backend)(nil)

// AttentionBatch computes calls as one: their dispatches follow one another in shared
// submissions, so that many short sequences cost a dispatch each and not a trip to
// the device. Errors as for Attention.
func (b *Backend) AttentionBatch(ctx context.Context, calls []*backend.Call) error {
	if err := b.enter(ctx); err != nil {
		return err
	}
	defer b.leave()
	pins := make([]backend.Pinned, len(calls))
	defer func() {
		for n := range pins {
			pins[n].Unpin()
		}
	}()
	flops := 0.0
	for n, c := range calls {
		if err := b.pin(&pins[n], c); err != nil {
			return fmt.Errorf("attention: %w", err)
		}
		flops += float64(backend.NewPlan(c).FLOPs)
	}
	return b.pinned(ctx, "attention", func(r *runner) error {
		r.several = true
		for _, c := range calls {
			if err := b.attention(r, c); err != nil {
				return err
			}
			if err := r.handBack(); err != nil {
				return err
			}
		}
		if r.rehearse {
			r.flops = flops
		}
		return nil
	})
}

// handBack ends a call of several that brought windows of host memory: the next one may
// write to other rows of the same tensor, so what this one wrote goes back first.
func (r *runner) handBack() error {
	if r.shelf == nil || r.rehearse {
		return nil
	}
	if err := r.flush(); err != nil {
		return err
	}
	return r.takeAllBack(r.brought)
}
