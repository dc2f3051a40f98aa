package nn

import (
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/internal/steps"
)

// GateKind is the gate of a layer's output. With a gate, the output o of the attention is
// multiplied before Wo:
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
	if b.Err == nil {
		b.Err = l.dev.GateBackward(b.Ctx, dO, terms, dO, p.attended, p.gate, kernels.Sigmoid)
	}
	if terms = joinHeads(terms); c.Gate != GateHeads {
		return terms
	}
	// The gate of a head has the sum of the terms of its elements.
	dGate = joinHeads(allocHeads(b, p.x, c.Heads, 1))
	b.Project(b.Rows(dGate, 1), b.Rows(terms, c.ValueDim), b.Ones(kernels.Shape{1, 1, c.ValueDim, 1}))
	return dGate
}
