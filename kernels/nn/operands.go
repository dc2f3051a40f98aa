package nn

import (
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/internal/steps"
)

// Norm is the root-mean-square norm of queries and keys (QK-norm). The zero value is that
// of Qwen3: each head, with weights of D elements that all heads share, before RoPE.
type Norm struct {
	kernels.Norm
	// Projection means over the whole projection, Heads·D and KVHeads·D elements of a
	// token (OLMo 2 and 3), not over each head.
	Projection bool
	// Mean means a layer norm: the mean of each head is subtracted first, and each head has weights of its own
	// (Cohere). It excludes Projection, Weightless, AfterRoPE and KeysAsValues, and there are no gradients. The mean is
	// linear: [NewMultiHeadAttention] subtracts it from the columns of Wq and Wk, so that a call takes no longer.
	Mean bool
	// Weightless means that there are no weights (Llama 4).
	Weightless bool
	// AfterRoPE means after the rotation (Llama 4), not before.
	AfterRoPE bool
	// Values means that values are normed too, each head, without weights (Gemma 4).
	Values bool
}

// normed is a tensor [B, heads, S, D] that the norm takes.
type normed struct {
	at    int // in Pass.qkv
	w     kernels.Tensor
	n     kernels.Norm
	whole bool // over the rows of [B, 1, S, heads·D]
}

// norms lists what the layer norms.
func (l *MultiHeadAttention) norms() (list []normed) {
	if n := l.config.Norm; n != nil {
		list = []normed{{0, l.w.QNorm, n.Norm, n.Projection}, {1, l.w.KNorm, n.Norm, n.Projection}}
		if l.config.SharedKeys {
			return list[:1]
		}
		if n.Values {
			list = append(list, normed{at: 2, n: kernels.Norm{Epsilon: n.Epsilon}})
		}
	}
	return list
}

// rows returns t with the rows that the norm is over.
func (n normed) rows(t kernels.Tensor) kernels.Tensor {
	if n.whole {
		return joinHeads(t)
	}
	return t
}

// afterRoPE reports whether the norm comes after the rotation.
func (c MultiHeadConfig) afterRoPE() bool { return c.Norm != nil && c.Norm.AfterRoPE }

// operands computes queries, keys and values, and the projection of the gate.
func (l *MultiHeadAttention) operands(b *steps.Steps, p *Pass) {
	c, w, norms := l.config, l.w, l.norms()
	p.raw = p.qkv
	for _, n := range norms {
		if p.keep {
			p.raw[n.at] = splitHeads(b.Alloc(joinHeads(p.qkv[n.at]).Shape()), p.qkv[n.at].Shape()[kernels.Heads])
		}
	}
	b.Affine(joinHeads(p.raw[0]), p.x, w.Wq, w.Bq)
	if !c.SharedKeys {
		b.Affine(joinHeads(p.raw[1]), p.z, w.Wk, w.Bk)
	}
	if c.KeysAsValues {
		b.Copy(p.raw[2], p.raw[1])
	} else if !c.SharedKeys {
		b.Affine(joinHeads(p.raw[2]), p.z, w.Wv, w.Bv)
	}
	if c.Gate != GateNone {
		p.gate = allocHeads(b, p.x, c.Heads, w.Wg.Shape()[kernels.Dim]/c.Heads)
		b.Affine(joinHeads(p.gate), p.x, w.Wg, w.Bg)
	}
	if p.angles = c.RoPE.anglesOf(b, p.qkv[0], p.qkv[1], &p.opt); c.SharedKeys {
		p.angles[1] = kernels.Angles{}
	}
	if c.afterRoPE() {
		b.Rotate(p.raw[0], p.raw[1], p.angles, false)
	}
	for _, n := range norms {
		b.Normalise(n.rows(p.qkv[n.at]), n.rows(p.raw[n.at]), n.w, n.n)
	}
	if !c.afterRoPE() {
		b.Rotate(p.qkv[0], p.qkv[1], p.angles, false)
	}
	p.factors = c.Temperature.factors(b, &p.opt, p.qkv[0].Shape())
	if c.Temperature != nil {
		b.Gate(p.qkv[0], p.qkv[0], p.factors, kernels.Identity)
	}
}

// operandsBackward turns d, the gradients of queries, keys and values, into those of their
// projections, in place, and computes the gradients of the norm's weights.
func (l *MultiHeadAttention) operandsBackward(b *steps.Steps, p *Pass, d [3]kernels.Tensor, w *MultiHeadWeights) {
	if l.config.Temperature != nil {
		b.Gate(d[0], d[0], p.factors, kernels.Identity)
	}
	if !l.config.afterRoPE() {
		b.Rotate(d[0], d[1], p.angles, true)
	}
	for _, n := range l.norms() {
		dx, x := n.rows(d[n.at]), n.rows(p.raw[n.at])
		var terms, dw kernels.Tensor
		if !n.w.IsZero() {
			terms = b.Alloc(joinHeads(d[n.at]).Shape())
			dw = splitHeads(terms, dx.Shape()[kernels.Heads])
		}
		b.Do(func() error { return l.dev.NormaliseBackward(b.Ctx, dx, dw, dx, x, n.w, n.n) })
		if !n.w.IsZero() {
			b.Sum([]*kernels.Tensor{&w.QNorm, &w.KNorm}[n.at], b.Rows(terms, n.w.Shape()[kernels.Dim]))
		}
	}
	if l.config.afterRoPE() {
		b.Rotate(d[0], d[1], p.angles, true)
	}
}

// GateKind is the gate of a layer's output. With a gate, the output o of the attention is multiplied before Wo:
//
//	o = o ⊙ sigmoid(x·Wg + Bg)
type GateKind int

const (
	// GateNone is no gate.
	GateNone GateKind = iota
	// GateInQuery is a gate for each element, which files store in the query projection:
	// for each head D rows of the query, then D of the gate (Qwen3-Next). ValueDim is
	// HeadDim. [MultiHeadConfig.LoadSafetensors] splits the rows into Wq and Wg.
	GateInQuery
	// GateElements is a gate for each element: Wg is [Model, Heads·Dv].
	GateElements
	// GateHeads is a gate for each head: Wg is [Model, Heads].
	GateHeads
)

// applyGate multiplies the attention's output by the gate.
func (l *MultiHeadAttention) applyGate(b *steps.Steps, p *Pass) {
	if p.joined = p.attended; p.gate.IsZero() {
		return
	}
	if p.keep {
		p.joined = allocHeads(b, p.x, l.config.Heads, l.config.ValueDim)
	}
	b.Gate(p.joined, p.attended, p.gate, kernels.Sigmoid)
}

// gateBackward turns dO, the gradient of the gated output, into that of the output, in place,
// and returns the gradient of the gate's projection.
func (l *MultiHeadAttention) gateBackward(b *steps.Steps, p *Pass, dO kernels.Tensor) (dGate kernels.Tensor) {
	c := l.config
	if c.Gate == GateNone {
		return dGate
	}
	terms := allocHeads(b, p.x, c.Heads, c.ValueDim)
	b.Do(func() error { return l.dev.GateBackward(b.Ctx, dO, terms, dO, p.attended, p.gate, kernels.Sigmoid) })
	if terms = joinHeads(terms); c.Gate != GateHeads {
		return terms
	}
	// The gate of a head has the sum of the terms of its elements.
	dGate = joinHeads(allocHeads(b, p.x, c.Heads, 1))
	b.Project(b.Rows(dGate, 1), b.Rows(terms, c.ValueDim), b.Ones(kernels.Shape{1, 1, c.ValueDim, 1}))
	return dGate
}
