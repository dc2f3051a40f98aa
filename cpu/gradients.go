package cpu

import (
	"cmp"
	"context"
	"sync"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/backward"
)

// Backward implements backend.Differentiator: package cpu/internal/backward states the formulas
// and the order of the sums. Errors are those of Attention, and ErrMemory.
func (be *Backend) Backward(ctx context.Context, g *backend.Gradients) error {
	out, in := g.Operands()
	return be.doPinned(ctx, "backward", out[:], in[:], func() error {
		c := gradientPool.Get().(*backward.Call)
		defer func() {
			c.Reset()
			gradientPool.Put(c)
		}()
		if err := cmp.Or(g.GoMod(true), c.Open(g, be.kernels, be.threads())); err != nil {
			return err
		}
		return c.Run(ctx, sharedPool)
	})
}

var gradientPool = sync.Pool{New: func() any { return new(backward.Call) }}

// PlanBackward implements backend.Differentiator.
func (be *Backend) PlanBackward(ctx context.Context, g *backend.Gradients) (backend.Plan, error) {
	return result(ctx, be, "plan", func() (backend.Plan, error) {
		p := be.newPlan(backend.NewGradientsPlan(g))
		x := backward.NewPlan(g, be.kernels, be.threads())
		x.Describe(&p)
		return p, g.GoMod(true)
	})
}
