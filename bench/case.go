package bench

import (
	"context"
	"fmt"
	"strconv"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/kernels"
)

// Variants of a [Case] are the parts of attention that run. The stages store scores and
// weights of [B, H, Sq, Sk] and compute every pair, visible or not.
const (
	// Fused is the fused attention call, Stages the same call as three stages.
	Fused  = "fused"
	Stages = "stages"
	// QK, Softmax and PV are a single stage.
	QK      = "qk"
	Softmax = "softmax"
	PV      = "pv"
)

// Variants lists the variants.
var Variants = []string{Fused, Stages, QK, Softmax, PV}

// Case is a call that is timed, over inputs drawn by seed: a series at one length.
type Case struct {
	Series
	// SeqK is the number of keys and, unless SeqQ is set, of queries.
	SeqK int
}

// Dims returns the lengths of the call.
func (c Case) Dims() backend.Dims {
	d := backend.Dims{Batch: c.Batch, Heads: c.Heads, KVHeads: c.KVHeads, SeqQ: c.SeqQ, SeqK: c.SeqK, Dim: c.Dim, ValueDim: c.Dim}
	if d.SeqQ == 0 {
		d.SeqQ = d.SeqK
	}
	return d
}

// String returns the case's name in the form of a Go benchmark: f32/b1h8s1024d64, followed
// by what differs from plain self-attention.
func (c Case) String() string {
	d := c.Dims()
	name := fmt.Sprintf("%v/b%dh%ds%dd%d", c.DType, d.Batch, d.Heads, d.SeqK, d.Dim)
	if d.KVHeads != d.Heads {
		name += fmt.Sprintf("/kv%d", d.KVHeads)
	}
	if d.SeqQ != d.SeqK {
		name += fmt.Sprintf("/q%d", d.SeqQ)
	}
	if c.Causal {
		name += "/causal"
	}
	if w := c.Window; w != nil {
		name += fmt.Sprintf("/window%s,%s", side(w.Left), side(w.Right))
	}
	if c.Softcap > 0 {
		name += fmt.Sprintf("/softcap%v", c.Softcap)
	}
	if c.Mask {
		name += "/mask"
	}
	return name
}

// side writes one side of a window.
func side(n int) string {
	if n == kernels.Unbounded {
		return "inf"
	}
	return strconv.Itoa(n)
}

// options returns the call's options; bias is the mask.
func (c Case) options(bias backend.Tensor) kernels.Options {
	return kernels.Options{Causal: c.Causal, Window: c.Window, Align: kernels.LowerRight, Softcap: c.Softcap, Bias: bias, Weights: c.stored()}
}

// stored reports whether the variant stores scores or weights.
func (c Case) stored() bool { return c.Variant != Fused }

// seenKeys returns the number of keys that at least one row of a head sees. The first row
// looks back the furthest.
func (c Case) seenKeys() int {
	d := c.Dims()
	if c.Window == nil || c.Window.Left >= d.SeqK {
		return d.SeqK
	}
	return d.SeqK - max(0, d.SeqK-d.SeqQ-c.Window.Left)
}

// shapes are the shapes of a case's tensors: q that of Q and O, k that of K and V, w that of
// scores and weights.
type shapes struct{ q, k, mask, w backend.Shape }

func (c Case) shapes() shapes {
	d := c.Dims()
	return shapes{
		q:    backend.Shape{d.Batch, d.Heads, d.SeqQ, d.Dim},
		k:    backend.Shape{d.Batch, d.KVHeads, d.SeqK, d.Dim},
		mask: backend.Shape{1, 1, d.SeqQ, d.SeqK},
		w:    backend.Shape{d.Batch, d.Heads, d.SeqQ, d.SeqK},
	}
}

// weights returns the number of weights, which may exceed an int.
func (c Case) weights() float64 {
	d := c.Dims()
	return float64(d.Batch) * float64(d.Heads) * float64(d.SeqQ) * float64(d.SeqK)
}

// hostBytes returns the most host memory that drawing and checking the case takes: each
// tensor as float32 and in its own type. It is -1 when a shape is too large for an int.
func (c Case) hostBytes() int64 {
	s := c.shapes()
	all := []backend.Shape{s.q, s.q, s.k, s.k}
	if c.Mask {
		all = append(all, s.mask)
	}
	if c.stored() {
		all = append(all, s.w)
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

// count sets the figures of m that follow from the case and its plan, without a
// measurement: operations, bytes moved and memory.
func (c Case) count(m *report.Measurement, info backend.Info, plan backend.Plan) {
	s := c.shapes()
	size, all := int64(c.DType.Size()), int64(s.w.Elements())
	q, k := size*int64(s.q.Elements()), size*int64(s.k.Elements()) // also of O and V
	operands, scores, stage := 2*q+2*k, 4*all, 2*int64(c.Dim)
	var mask int64
	if c.Mask {
		mask = 4 * int64(s.mask.Elements())
	}
	m.Path, m.Plan, m.Pairs = plan.Path, &plan, plan.Pairs
	m.FLOPs, m.FLOPsFull = m.Pairs*2*stage, all*2*stage
	switch c.Variant {
	case QK, PV:
		m.FLOPs, m.FLOPsFull, m.Bytes = all*stage, all*stage, q+k+scores
	case Softmax:
		m.FLOPs, m.FLOPsFull, m.Bytes = 0, 0, 2*scores+mask
	case Stages: // the scores are written, read and written, and read
		m.Bytes = operands + mask + 4*scores
	default:
		hidden := 2 * k / int64(c.SeqK) * int64(c.SeqK-c.seenKeys())
		m.Bytes = operands + mask - hidden
	}
	m.Intensity = float64(m.FLOPs) / float64(m.Bytes)
	m.Memory = report.Memory{Operands: operands, Scratch: plan.Scratch, Square: mask}
	if c.stored() {
		m.Memory.Square += scores
	}
	if info.Type != backend.CPU {
		m.Memory.Device = m.Memory.Counted()
	}
}

// plan returns how dev would run the case, without allocating its tensors.
func (c Case) plan(ctx context.Context, dev *kernels.Device) (backend.Plan, error) {
	s := c.shapes()
	var err error
	meta := func(dtype backend.DType, shape backend.Shape) backend.Tensor {
		t, e := backend.Meta(dtype, shape)
		if err == nil {
			err = e
		}
		return t
	}
	q, k, v := meta(c.DType, s.q), meta(c.DType, s.k), meta(c.DType, s.k)
	var bias backend.Tensor
	if c.Mask {
		bias = meta(backend.F32, s.mask)
	}
	if err != nil {
		return backend.Plan{}, err
	}
	call, err := dev.Prepare(q, k, v, c.options(bias))
	if err != nil {
		return backend.Plan{}, err
	}
	return call.Plan(ctx)
}
