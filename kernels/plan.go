package kernels

import (
	"context"
	"fmt"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/internal/op"
)

// Plan returns how the device would run the call: the code path and the reason for it, the
// FLOPs of the visible pairs, the bytes that must move, scratch memory, and how the work is
// cut. It runs nothing.
func (c *Call) Plan(ctx context.Context) (sum Plan, err error) {
	defer op.Annotate(&err, "plan")
	err = c.rehearse(ctx, func(be backend.Backend, out Result) (err error) {
		var p backend.Plan
		if len(c.calls) == 1 {
			p, err = be.Plan(ctx, c.calls[0])
		} else {
			p, err = c.planTogether(ctx, be, out)
		}
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

// planTogether returns the plan of a call that several backend calls compute, or none.
func (c *Call) planTogether(ctx context.Context, be backend.Backend, out Result) (backend.Plan, error) {
	sum := backend.NewPlan(c.all(out)) // Bytes are those of the whole operands
	sum.Pairs, sum.FLOPs = 0, 0
	parts := c.opt.KeyIndices != nil || c.opt.Pages != nil && c.packed
	if parts {
		sum.Bytes = 0 // the parts have those of their lists, or pages
	}
	if len(c.calls) == 0 {
		sum.Backend, sum.Path, sum.Why = be.Info().Name, "none", "there are no scores: the output is empty or zeros"
		return sum, nil
	}
	var largest int64
	for _, call := range c.calls {
		p, err := be.Plan(ctx, call)
		if err != nil {
			return p, err
		}
		if p.Pairs >= largest {
			largest = p.Pairs
			sum.Path, sum.Why, sum.Cut = p.Path, p.Why, p.Cut
		}
		sum.Backend, sum.Limits = p.Backend, p.Limits
		if parts {
			sum.Bytes += p.Bytes
		}
		addPlan(&sum, p)
	}
	sum.Why = fmt.Sprintf("%d calls over slices of the operands, run together; the counts are their sums; the largest: %s", len(c.calls), sum.Why)
	sum.Cut = fmt.Sprintf("%d calls; the largest: %s", len(c.calls), sum.Cut)
	return sum, nil
}

// addPlan adds the counts of p to sum, except for Bytes.
func addPlan(sum *backend.Plan, p backend.Plan) {
	sum.Pairs, sum.FLOPs = sum.Pairs+p.Pairs, sum.FLOPs+p.FLOPs
	sum.Scratch = max(sum.Scratch, p.Scratch) // calls share it
	sum.Streamed, sum.Chunks = sum.Streamed+p.Streamed, sum.Chunks+p.Chunks
}

// Warmup compiles what the call needs and runs nothing, so that the first call takes no
// longer than the next. Head sizes, dtypes, strides and options decide what is compiled;
// calls of other lengths usually need the same code. On a device that compiles nothing it does
// nothing. It returns ErrUnsupported, ErrDeviceLost and context errors.
func (c *Call) Warmup(ctx context.Context) (err error) {
	defer op.Annotate(&err, "warmup")
	return c.rehearse(ctx, func(be backend.Backend, _ Result) error {
		w, ok := be.(backend.Warmer)
		if !ok {
			return ctx.Err()
		}
		for _, call := range c.calls {
			if err := w.Warmup(ctx, call, c.opt.Weights); err != nil {
				return err
			}
		}
		return nil
	})
}
