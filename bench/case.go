package bench

import (
	"context"
	"fmt"

	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/kernels"
)

// Case is a call that is timed, over inputs drawn by seed: a series at one length.
type Case struct {
	Series
	// SeqK is the number of keys and, unless SeqQ is set, of queries.
	SeqK int
}

// dims returns the lengths of the call.
func (c Case) dims() kernels.Dims {
	d := kernels.Dims{Batch: c.Batch, Heads: c.Heads, KVHeads: c.KVHeads, SeqQ: c.SeqQ, SeqK: c.SeqK, Dim: c.Dim, ValueDim: c.Dim}
	if d.SeqQ == 0 {
		d.SeqQ = d.SeqK
	}
	return d
}

// String returns the case's name in a report.
func (c Case) String() string { return c.row(kernels.Info{}).Name }

// row returns what is known of the case on a device before it is planned.
func (c Case) row(info kernels.Info) report.Measurement {
	d := c.dims()
	m := report.Measurement{
		Backend: info.Name, Series: c.Name, Variant: c.Variant, DType: c.DType.String(),
		Batch: d.Batch, Heads: d.Heads, KVHeads: d.KVHeads, SeqQ: d.SeqQ, SeqK: d.SeqK, Dim: d.Dim,
		Causal: c.Causal, Softcap: c.Softcap, LowPrecision: c.LowPrecision, Threads: info.Threads, Status: report.NotRun, Rounds: []report.Round{},
	}
	if c.Mask {
		m.Mask = kernels.F32.String()
	}
	if c.Cache != kernels.F32 {
		m.Cache = c.Cache.String()
	}
	if w := c.Window; w != nil {
		limited := func(n int) *int {
			if n == kernels.Unbounded {
				return nil
			}
			return &n
		}
		m.WindowLeft, m.WindowRight = limited(w.Left), limited(w.Right)
	}
	m.Derive()
	return m
}

// options returns the call's options; bias is the mask.
func (c Case) options(bias kernels.Tensor) kernels.Options {
	return kernels.Options{Causal: c.Causal, Window: c.Window, Align: kernels.LowerRight, Softcap: c.Softcap, LowPrecision: c.LowPrecision, Bias: bias,
		LSE: c.Variant == report.Backward}
}

// keys returns the type of K and V.
func (c Case) keys() kernels.DType {
	if c.Cache != kernels.F32 {
		return c.Cache
	}
	return c.DType
}

// stored reports whether the variant stores scores or weights.
func (c Case) stored() bool { return c.Variant != report.Fused && c.Variant != report.Backward }

// stages returns the stages that the variant, which stores scores, consists of.
func (c Case) stages() []string {
	if c.Variant == report.Stages {
		return parts
	}
	return []string{c.Variant}
}

// shapes are the shapes of a case's tensors: q that of Q and O, k that of K and V, w that of
// scores and weights.
type shapes struct{ q, k, mask, w kernels.Shape }

func (c Case) shapes() shapes {
	d := c.dims()
	return shapes{
		q:    kernels.Shape{d.Batch, d.Heads, d.SeqQ, d.Dim},
		k:    kernels.Shape{d.Batch, d.KVHeads, d.SeqK, d.Dim},
		mask: kernels.Shape{1, 1, d.SeqQ, d.SeqK},
		w:    kernels.Shape{d.Batch, d.Heads, d.SeqQ, d.SeqK},
	}
}

// weights returns the number of weights, which may exceed an int.
func (c Case) weights() float64 {
	d := c.dims()
	return float64(d.Batch) * float64(d.Heads) * float64(d.SeqQ) * float64(d.SeqK)
}

// hostBytes returns the most host memory that drawing and checking the case takes: each
// tensor as float32 and in its own type, the log-sum-exp like another output. It is -1 when a shape is too large for an int.
func (c Case) hostBytes() int64 {
	s := c.shapes()
	all := []kernels.Shape{s.q, s.q, s.k, s.k}
	if c.Mask {
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
func (c Case) plan(ctx context.Context, dev *kernels.Device) (kernels.Plan, error) {
	s := c.shapes()
	var err error
	meta := func(dtype kernels.DType, shape kernels.Shape) kernels.Tensor {
		t, e := kernels.Meta(dtype, shape)
		if err == nil {
			err = e
		}
		return t
	}
	q, k, v := meta(c.DType, s.q), meta(c.keys(), s.k), meta(c.keys(), s.k)
	var bias kernels.Tensor
	if c.Mask {
		bias = meta(kernels.F32, s.mask)
	}
	if err != nil {
		return kernels.Plan{}, err
	}
	call, err := dev.Prepare(q, k, v, c.options(bias))
	if err != nil {
		return kernels.Plan{}, err
	}
	return c.planOf(ctx, call)
}

// planOf returns how the case runs: the plan of its call, or that of all three stages.
func (c Case) planOf(ctx context.Context, call *kernels.Call) (kernels.Plan, error) {
	if c.Variant == report.Backward {
		return call.PlanBackward(ctx, call.Gradients().Operands())
	}
	p, err := call.Plan(ctx)
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
