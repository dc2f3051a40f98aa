package backend

import "context"

// LinearAttender is implemented by backends that compute linear attention.
type LinearAttender interface {
	// LinearAttention computes O, and PresentState unless it is the zero Tensor, of c, which package kernels has validated:
	// Scale is not 0, and Beta has the heads of V. It does not keep c.
	LinearAttention(ctx context.Context, c *LinearAttention) error
}

// LinearAttention is one call of linear attention, with the formula, the operands and the options of kernels.LinearAttention.
// Scale is not 0.
type LinearAttention struct {
	O, Q, K, V, Decay, Beta, PastState, PresentState Tensor

	Scale     float32
	CuQ       []int
	ChunkSize int
}

// Operands returns the outputs and inputs under the names that errors use. A state that is updated in place is an output only.
func (c *LinearAttention) Operands() (outputs [2]Operand, inputs [6]Operand) {
	past := c.PastState
	if past == c.PresentState {
		past = Tensor{}
	}
	return [2]Operand{{"o", c.O}, {"present state", c.PresentState}},
		[6]Operand{{"q", c.Q}, {"k", c.K}, {"v", c.V}, {"decay", c.Decay}, {"beta", c.Beta}, {"past state", past}}
}

// Sequences returns N, the number of sequences of a call with batches rows of tokens.
func Sequences(cuQ []int, batches int) int {
	if cuQ != nil {
		return len(cuQ) - 1
	}
	return batches
}

// Sequence returns where sequence n is: its batch, and the tokens from lo to hi. tokens is the length of a batch.
func Sequence(cuQ []int, n, tokens int) (batch, lo, hi int) {
	if cuQ != nil {
		return 0, cuQ[n], cuQ[n+1]
	}
	return n, 0, tokens
}

// Convolver is implemented by backends that compute causal convolutions of short width.
type Convolver interface {
	// CausalConv computes Y, and PresentState unless it is the zero Tensor, of c, which package kernels has validated. It
	// does not keep c.
	CausalConv(ctx context.Context, c *CausalConv) error
}

// CausalConv is one call of a causal convolution, with the formula, the operands and the options of kernels.CausalConv.
type CausalConv struct {
	Y, X, W, Bias, PastState, PresentState Tensor

	SiLU bool
	CuQ  []int
}

// Operands is that of LinearAttention.
func (c *CausalConv) Operands() (outputs [2]Operand, inputs [4]Operand) {
	past := c.PastState
	if past == c.PresentState {
		past = Tensor{}
	}
	return [2]Operand{{"y", c.Y}, {"present state", c.PresentState}},
		[4]Operand{{"x", c.X}, {"w", c.W}, {"bias", c.Bias}, {"past state", past}}
}
