package kernels

import (
	"context"
	"fmt"

	"github.com/seed90331342/attn/backend"
)

// Plan says what [Attention] with the same arguments would do on be, without
// doing it: the path and why, the FLOPs of the visible pairs, the bytes that
// must move, scratch memory, and how the work is cut. q, k and v need no memory
// ([backend.Meta]). It returns the validation errors of Attention.
func Plan(be backend.Backend, q, k, v backend.Tensor, opt Options) (backend.Plan, error) {
	c, calls, weights, err := planned(q, k, v, &opt)
	if err != nil {
		return backend.Plan{}, fmt.Errorf("plan: %w", err)
	}
	if !opt.Weights {
		p, err := planCalls(be, c, calls)
		if err != nil {
			return p, fmt.Errorf("plan: %w", err)
		}
		return p, nil
	}
	d := c.Dims()
	p := backend.NewPlan(c)
	countParts(&p, calls)
	p.Backend = be.Info().Name
	p.Path = "three stages: QK, Softmax, PV"
	p.Why = fmt.Sprintf("the weights are wanted, so all of [%d, %d, %d, %d] is kept: O(S²) memory, and every pair is computed, visible or not",
		d.Batch, d.Heads, d.SeqQ, weights.Shape()[backend.Dim])
	if n := len(calls); n > 1 {
		p.Why = fmt.Sprintf("the weights are wanted, so all of [%d, %d, %d, %d] is kept: O(S²) memory; prefix and segments make %d parts of it, in which every pair is computed, and zeros are written to the rest",
			d.Batch, d.Heads, d.SeqQ, weights.Shape()[backend.Dim], n)
	}
	// Each stage reads or writes the whole of the weights: QK writes, Softmax
	// reads and writes, PV reads.
	p.Bytes += 4 * weights.Bytes()
	p.Chunks = 3 * len(calls)
	p.Cut = fmt.Sprintf("3 stages over %d MiB of weights", weights.Bytes()>>20)
	return p, nil
}

// planCalls plans calls that make up c: what they compute, move and are cut into adds
// up, and they run side by side in the scratch memory of the one that takes most.
func planCalls(be backend.Backend, c *backend.Call, calls []*backend.Call) (backend.Plan, error) {
	if len(calls) == 1 {
		return be.Plan(context.TODO(), calls[0])
	}
	all := backend.NewPlan(c)
	countParts(&all, calls)
	var most int64
	for _, c := range calls {
		p, err := be.Plan(context.TODO(), c)
		if err != nil {
			return p, err
		}
		if p.Pairs >= most { // what the largest one does says most
			most = p.Pairs
			all.Path, all.Why, all.Cut = p.Path, p.Why, p.Cut
		}
		all.Backend, all.Limits = p.Backend, p.Limits
		all.Scratch = max(all.Scratch, p.Scratch)
		all.Streamed += p.Streamed
		all.Chunks += p.Chunks
	}
	together := "one after the other"
	if _, ok := be.(backend.Batcher); ok {
		together = "side by side"
	}
	all.Why = fmt.Sprintf("%d calls over slices of the operands, %s; the counts are the sums of theirs; the largest: %s", len(calls), together, all.Why)
	all.Cut = fmt.Sprintf("%d calls; the largest: %s", len(calls), all.Cut)
	return all, nil
}

// countParts counts the pairs of calls.
func countParts(p *backend.Plan, calls []*backend.Call) {
	p.Pairs, p.FLOPs = 0, 0
	for _, c := range calls {
		n := backend.NewPlan(c)
		p.Pairs += n.Pairs
		p.FLOPs += n.FLOPs
	}
}

// planned returns the call that Attention would make, the calls that it is made up of,
// and its weights where they are wanted, with outputs that have no memory.
func planned(q, k, v backend.Tensor, opt *Options) (c *backend.Call, calls []*backend.Call, weights backend.Tensor, err error) {
	d, err := pagedDims(q, k, v, opt.Pages)
	if err != nil {
		return nil, nil, weights, err
	}
	var out Result
	meta := func(t *backend.Tensor, want bool, dtype backend.DType, last int) {
		if want && err == nil {
			*t, err = backend.Meta(dtype, backend.Shape{d.Batch, d.Heads, d.SeqQ, last})
		}
	}
	meta(&out.O, true, q.DType(), d.ValueDim)
	meta(&out.LSE, opt.LSE, backend.F32, 1)
	meta(&out.Weights, opt.Weights, backend.F32, d.SeqK)
	if err != nil {
		return nil, nil, weights, err
	}
	c = new(backend.Call)
	parts, err := call(c, out, q, k, v, opt)
	if err != nil {
		return nil, nil, weights, err
	}
	if calls = []*backend.Call{c}; parts != nil {
		calls, err = inParts(c, parts)
	}
	return c, calls, out.Weights, err
}
