package bench

import (
	"context"
	"fmt"

	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/kernels"
)

// call is the attention call of a case, over inputs drawn by seed.
type call struct{ report.Case }

// row returns what is known of a case of a series on a device before it is planned.
func (c call) row(series string, info kernels.Info) report.Measurement {
	m := report.Measurement{Backend: info.Name, Series: series, Case: c.Case, Threads: info.Threads, Status: report.NotRun, Rounds: []report.Round{}}
	m.Derive()
	return m
}

// options returns the call's options; bias is the mask.
func (c call) options(bias kernels.Tensor) kernels.Options {
	opt := kernels.Options{Causal: c.Causal, Align: kernels.LowerRight, Softcap: c.Softcap, LowPrecision: c.LowPrecision, Bias: bias, LSE: c.Variant == report.Backward}
	if v := c.Visible(); c.WindowLeft != nil || c.WindowRight != nil {
		opt.Window = &kernels.Window{Left: v.Left, Right: v.Right}
	}
	return opt
}

// stored reports whether the variant stores scores or weights.
func (c call) stored() bool { return c.Variant != report.Fused && c.Variant != report.Backward }

// stages returns the stages that the variant, which stores scores, consists of.
func (c call) stages() []string {
	if c.Variant == report.Stages {
		return parts
	}
	return []string{c.Variant}
}

// shapes are the shapes of a case's tensors: q that of Q and O, k that of K and V, w that of scores and weights.
type shapes struct{ q, k, mask, w kernels.Shape }

func (c call) shapes() shapes {
	return shapes{
		q:    kernels.Shape{c.Batch, c.Heads, c.SeqQ, c.Dim},
		k:    kernels.Shape{c.Batch, c.KVHeads, c.SeqK, c.Dim},
		mask: kernels.Shape{1, 1, c.SeqQ, c.SeqK},
		w:    kernels.Shape{c.Batch, c.Heads, c.SeqQ, c.SeqK},
	}
}

// weights returns the number of weights, which may exceed an int.
func (c call) weights() float64 {
	return float64(c.Batch) * float64(c.Heads) * float64(c.SeqQ) * float64(c.SeqK)
}

// hostBytes returns the most host memory that drawing and checking the case takes: each
// tensor as float32 and in its own type, the log-sum-exp like another output. It is -1 when a shape is too large for an int.
func (c call) hostBytes() int64 {
	s := c.shapes()
	all := []kernels.Shape{s.q, s.q, s.k, s.k}
	if c.Mask != "" {
		all = append(all, s.mask)
	}
	if c.stored() {
		all = append(all, s.w)
	}
	if c.Variant == report.Backward {
		all = append(all, s.q, s.q, s.k, s.k, s.q)
	}
	var sum int64
	for _, s := range all {
		n := s.Elements()
		if n < 0 || n > 1<<56 {
			return -1
		}
		sum += int64(n) * 8
	}
	return sum
}

// plan returns how dev would run the case, without allocating its tensors.
func (c call) plan(ctx context.Context, dev *kernels.Device) (kernels.Plan, error) {
	s := c.shapes()
	var err error
	meta := func(dtype kernels.DType, shape kernels.Shape) kernels.Tensor {
		t, e := kernels.Meta(dtype, shape)
		if err == nil {
			err = e
		}
		return t
	}
	dtype, cached := c.Types()
	q, k, v := meta(dtype, s.q), meta(cached, s.k), meta(cached, s.k)
	var bias kernels.Tensor
	if c.Mask != "" {
		bias = meta(kernels.F32, s.mask)
	}
	if err != nil {
		return kernels.Plan{}, err
	}
	of, err := dev.Prepare(q, k, v, c.options(bias))
	if err != nil {
		return kernels.Plan{}, err
	}
	return c.planOf(ctx, of)
}

// planOf returns how the case runs: the plan of its call, or that of all three stages.
func (c call) planOf(ctx context.Context, of *kernels.Call) (kernels.Plan, error) {
	if c.Variant == report.Backward {
		return of.PlanBackward(ctx, of.Gradients().Operands())
	}
	p, err := of.Plan(ctx)
	if err != nil || !c.stored() {
		return p, err
	}
	shape := c.shapes().w
	bytes := 4 * int64(shape.Elements())
	return kernels.Plan{
		Backend: p.Backend, Pairs: p.Pairs, FLOPs: p.FLOPs, Chunks: len(parts),
		Path:  "three stages: QK, Softmax, PV",
		Why:   fmt.Sprintf("they keep all scores %v: O(S²) memory, and hidden pairs are computed too", shape),
		Bytes: p.Bytes + 4*bytes, // QK writes them, Softmax reads and writes them, PV reads them
		Cut:   fmt.Sprintf("3 stages over %d MiB of weights", bytes>>20),
	}, nil
}
