package gpu

import (
	"context"
	"fmt"
	"strings"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/queue"
)

// Attention computes each call in one pass over the keys, or one for each 256 columns of V.
// In addition to the operands it uses O(Sq) memory, none when the keys come in one piece. The
// dispatches of several calls share submissions, so that many short sequences cost a
// dispatch each instead of a round trip. Errors are those of backend.Backend;
// backend.ErrUnsupported names options that the device does not support together.
func (b *Backend) Attention(ctx context.Context, calls ...*backend.Call) error {
	total := func() (flops float64) {
		for _, c := range calls {
			flops += float64(backend.NewPlan(c).FLOPs)
		}
		return flops
	}
	return b.calls(ctx, "attention", len(calls), func(i int) operands { return operandsOf(calls[i]) }, func(r *queue.Runner, i int) error {
		r.Expect(total)
		return b.attention(r, calls[i], len(calls) == 1)
	})
}

// Warmup compiles the pipelines that Attention needs for c and, with weights, those of QK and
// Softmax, by a rehearsal of the calls. Stages may need others for keys that are not a
// multiple of 4, and for much longer rows or more of them.
// backend.ErrUnsupported when the device does not accept one.
func (b *Backend) Warmup(ctx context.Context, c *backend.Call, weights bool) error {
	return b.within(ctx, "warmup", func() error {
		return b.dev.Warmup(ctx, func(r *queue.Runner) error {
			if err := b.attention(r, c, true); err != nil || !weights {
				return err
			}
			d := c.Dims()
			w, err := backend.Meta(backend.F32, backend.Shape{d.Batch, d.Heads, d.SeqQ, d.SeqK})
			if err != nil {
				return err
			}
			if err := b.qk(r, w, c.Q, c.K); err != nil {
				return err
			}
			return b.runSoftmax(r, w, backend.Tensor{}, &c.Problem, false)
		})
	})
}

// Plan describes how Attention would run c.
func (b *Backend) Plan(ctx context.Context, c *backend.Call) (p backend.Plan, err error) {
	err = b.within(ctx, "plan", func() error {
		p, err = b.plan(c)
		return err
	})
	return p, err
}

func (b *Backend) plan(c *backend.Call) (backend.Plan, error) {
	if err := tooLong(operandsOf(c)); err != nil {
		return backend.Plan{}, err
	}
	p := backend.NewPlan(c)
	p.Backend, p.Limits = b.info.Name, b.info.Limits
	calls, err := slicesOf(c)
	if err != nil {
		return p, err
	}
	scratch, streamed := int64(0), int64(0)
	for _, c := range calls {
		x, err := b.path(c)
		if err != nil {
			return p, err
		}
		op := x.op()
		e, err := b.dev.Count(op)
		if err != nil {
			return p, err
		}
		x.describe(&p, e)
		p.Chunks += e.Dispatches
		if len(calls) == 1 {
			op.Call = c
		}
		moved, memory, err := b.dev.Streamed(op)
		if err != nil {
			return p, err
		}
		if op.Cutter.Room > 0 {
			p.Path = "streamed " + p.Path
			p.Why += fmt.Sprintf("; device memory has no room for %s, which stay in host memory: windows of them are uploaded while the device computes, within %d KiB of device memory",
				strings.Join(onHost(op.Cutter), ", "), op.Cutter.Room>>10)
		}
		scratch, streamed = max(scratch, int64(e.State)+int64(memory)), streamed+int64(moved)
	}
	p.Scratch, p.Streamed = scratch, streamed
	if len(calls) > 1 {
		p.Why += fmt.Sprintf("; %d columns of v in %d slices, which compute the scores again", c.V.Shape()[backend.Dim], len(calls))
	}
	return p, nil
}

// onHost names the operands in host memory.
func onHost(c *cut.Cutter) (names []string) {
	for _, o := range c.Operands {
		if o.OnHost {
			names = append(names, o.Name)
		}
	}
	return names
}

// slicesOf returns the calls that compute c: c alone, or slices of V's columns.
func slicesOf(c *backend.Call) ([]*backend.Call, error) {
	calls, err := cut.Slices(c)
	if calls == nil {
		calls = []*backend.Call{c}
	}
	return calls, err
}

// attention queues c. resumable calls may continue from c.Resume and be interrupted.
func (b *Backend) attention(r *queue.Runner, c *backend.Call, resumable bool) error {
	calls, err := slicesOf(c)
	if err != nil {
		return err
	}
	for i, part := range calls {
		if i > 0 {
			if err := r.Separate(); err != nil {
				return err
			}
		}
		x, err := b.path(part)
		if err != nil {
			return err
		}
		if x, err = b.tuned(r, x); err != nil {
			return err
		}
		op := x.op()
		if resumable && len(calls) == 1 {
			op.Call = c
		}
		if err := r.Run(op); err != nil {
			return err
		}
	}
	return nil
}

// path is a way to compute an attention call.
type path interface {
	op() *queue.Op
	// describe sets Path, Why and Cut of a plan.
	describe(p *backend.Plan, e queue.Extent)
}

// path returns the path for c: decode for few query rows, else prefill.
func (b *Backend) path(c *backend.Call) (path, error) {
	if b.decodes(c) {
		if x, err := b.newDecode(c); err == nil {
			return x, nil
		}
	}
	return b.newPrefill(c, b.choose) // its error covers what both paths lack
}

// tuned returns x, or the path with the fastest variant after measuring the variants, if
// this call is the first of its class.
func (b *Backend) tuned(r *queue.Runner, x path) (path, error) {
	a, ok := x.(*prefill)
	if !ok || !a.tiled || !b.tuner.Claim(a.shape()) {
		return x, nil
	}
	if err := r.Flush(); err != nil {
		return nil, err
	}
	if err := b.dev.Idle(r.Context()); err != nil { // trials use the device alone
		return nil, err
	}
	if err := b.tuner.FirstUse(r.Context(), tuneRunner{b}, a.shape()); err != nil {
		return nil, err
	}
	return b.newPrefill(a.c, b.choose)
}
