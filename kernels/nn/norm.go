package nn

import (
	"fmt"

	"github.com/seed90331342/attn/kernels"
)

// Norm is the root-mean-square norm of queries and keys (QK-norm). The zero value is that
// of Qwen3: each head, with weights of D elements that all heads share, before RoPE.
type Norm struct {
	kernels.Norm
	// Projection means over the whole projection, Heads·D and KVHeads·D elements of a
	// token (OLMo 2 and 3), not over each head.
	Projection bool
	// Weightless means that there are no weights (Llama 4).
	Weightless bool
	// AfterRoPE means after the rotation (Llama 4), not before.
	AfterRoPE bool
	// Values means that values are normed too, each head, without weights (Gemma 4).
	Values bool
}

// checkNorm returns an error for a norm out of range.
func (c MultiHeadConfig) checkNorm() error {
	if n := c.Norm; n != nil && (!(n.Epsilon >= 0) || !finite(n.Epsilon)) {
		return fmt.Errorf("config: norm: Epsilon is %v, it must be at least 0 (0 means 1e-6): %w", n.Epsilon, kernels.ErrOption)
	}
	if n := c.Norm; n != nil && n.Weightless && n.PlusOne {
		return fmt.Errorf("config: norm: PlusOne is set, but a Weightless norm has no weights to add one to: leave one of them out: %w", kernels.ErrOption)
	}
	return nil
}
