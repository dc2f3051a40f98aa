package nn

import (
	"fmt"

	"github.com/seed90331342/attn/kernels"
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
