package nn

import (
	"fmt"

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

// checkGate returns an error for a gate out of range.
func (c MultiHeadConfig) checkGate() error {
	if c.Gate < GateNone || c.Gate > GateHeads {
		return fmt.Errorf("config: Gate is %d, it must be one of GateNone to GateHeads: %w", c.Gate, kernels.ErrOption)
	}
	if c.Gate == GateInQuery && c.ValueDim != c.HeadDim {
		return fmt.Errorf("config: ValueDim is %d, HeadDim %d: they must be equal with GateInQuery: %w", c.ValueDim, c.HeadDim, kernels.ErrOption)
	}
	return nil
}

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

// gateBackward turns do, the gradient of the gated output, into that of the output, in place,
// and returns the gradient of the gate's projection.
func (l *MultiHeadAttention) gateBackward(b *steps.Steps, p *Pass, do kernels.Tensor) (dGate kernels.Tensor) {
	if p.gate.IsZero() || b.Err != nil {
		return dGate
	}
	c, shape := l.config, do.Shape()
	terms := b.Alloc(shape)
	if b.Err == nil {
		do = splitHeads(do, c.Heads)
		b.Err = l.dev.GateBackward(b.Ctx, do, splitHeads(terms, c.Heads), do, p.attended, p.gate, kernels.Sigmoid)
	}
	if c.Gate != GateHeads {
		return terms
	}
	// The gate of a head has the sum of the terms of its elements.
	shape[kernels.Dim] = c.Heads
	dGate = b.Alloc(shape)
	b.Project(b.Rows(dGate, 1), b.Rows(terms, c.ValueDim), b.Ones(kernels.Shape{1, 1, c.ValueDim, 1}))
	return dGate
}
