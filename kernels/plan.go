package kernels

import (
	"context"
	"fmt"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/internal/op"
)

// Plan returns how the device would run the call: the code path and the reason for it, the FLOPs of the visible pairs,
// the bytes that must move, scratch memory, and how the work is cut. It runs nothing.
func (c *Call) Plan(ctx context.Context) (sum Plan, err error) {
	defer op.Annotate(&err, "plan")
	err = c.rehearse(ctx, func(be backend.Backend, out Result) (err error) {
		p, err := c.plan(ctx, be, out)
		sum = Plan(p)
		if w := out.Weights; err == nil && c.opt.Weights && len(c.calls) > 0 {
			sum.Path += ", QK and Softmax for weights"
			sum.Why += fmt.Sprintf("; weights are requested, which keeps all scores %v: O(S²) memory, and two stages compute the scores again", w.Shape())
			sum.Bytes += 3 * w.Bytes() // QK writes them, Softmax reads and writes them
			sum.Chunks += 2 * len(c.calls)
			sum.Cut += fmt.Sprintf("; 2 stages over %d MiB of weights", w.Bytes()>>20)
		}
		return err
	})
	return sum, err
}

// rehearse calls f with the backend and with results without memory, which are those of the backend calls.
func (c *Call) rehearse(ctx context.Context, f func(be backend.Backend, out Result) error) error {
	out, err := c.outputs(Meta)
	if err != nil {
		return err
	}
	be, err := c.dev.on(ctx)
	if err != nil {
		return err
	}
	defer c.bindOutputs(Result{})
	c.bindOutputs(out)
	return f(be, out)
}

// plan returns the plan of the backend calls.
func (c *Call) plan(ctx context.Context, be backend.Backend, out Result) (p backend.Plan, err error) {
	whole := backend.NewPlan(c.all(out))
	if len(c.calls) == 0 {
		whole.Pairs, whole.FLOPs = 0, 0
		whole.Backend, whole.Path, whole.Why = be.Info().Name, "none", "there are no scores: the output is empty or zeros"
		return whole, nil
	}
	p, err = be.Plan(ctx, c.calls...)
	if len(c.calls) > 1 && c.opt.KeyIndices == nil && (c.opt.Pages == nil || !c.packed) { // else the parts have the bytes of their lists, or pages
		p.Bytes = whole.Bytes
	}
	return p, err
}

// Warmup compiles what the call needs and runs nothing, so that the first call takes no longer than the next. Head
// sizes, dtypes, strides and options decide what is compiled; calls of other lengths usually need the same code. On a
// device that compiles nothing it does nothing. It returns ErrUnsupported, ErrDeviceLost and context errors.
func (c *Call) Warmup(ctx context.Context) (err error) {
	defer op.Annotate(&err, "warmup")
	return c.rehearse(ctx, func(be backend.Backend, _ Result) error {
		w, ok := be.(backend.Warmer)
		if !ok {
			return ctx.Err()
		}
		return w.Warmup(ctx, c.opt.Weights, c.calls...)
	})
}
