package kernels

import (
	"fmt"

	"github.com/seed90331342/attn/backend"
)

// Plan says what [Attention] with the same arguments would do on be, without
// doing it: the path and why, the FLOPs of the visible pairs, the bytes that
// must move, scratch memory, and how the work is cut. q, k and v need no memory
// ([backend.Meta]). It returns the validation errors of Attention.
func Plan(be backend.Backend, q, k, v backend.Tensor, opt Options) (backend.Plan, error) {
	c, weights, err := planned(q, k, v, &opt)
	if err != nil {
		return backend.Plan{}, fmt.Errorf("plan: %w", err)
	}
	if !opt.Weights {
		p, err := be.Plan(&c)
		if err != nil {
			return p, fmt.Errorf("plan: %w", err)
		}
		return p, nil
	}
	d := c.Dims()
	p := backend.NewPlan(&c)
	p.Backend = be.Info().Name
	p.Path = "three stages: QK, Softmax, PV"
	p.Why = fmt.Sprintf("the weights are wanted, so all of [%d, %d, %d, %d] is kept: O(S²) memory, and every pair is computed, visible or not",
		d.Batch, d.Heads, d.SeqQ, d.SeqK)
	// Each stage reads or writes the whole of the weights: QK writes, Softmax
	// reads and writes, PV reads.
	p.Bytes += 4 * weights.Bytes()
	p.Chunks = 3
	p.Cut = fmt.Sprintf("3 stages over %d MiB of weights", weights.Bytes()>>20)
	return p, nil
}

// planned returns the call that Attention would make, and its weights where they
// are wanted, with outputs that have no memory.
func planned(q, k, v backend.Tensor, opt *Options) (c backend.Call, weights backend.Tensor, err error) {
	d, err := pagedDims(q, k, v, opt.Pages)
	if err != nil {
		return c, weights, err
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
		return c, weights, err
	}
	c, err = call(out, q, k, v, opt)
	return c, out.Weights, err
}
