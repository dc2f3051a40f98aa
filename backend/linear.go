package backend

import "context"

// LinearAttender is implemented by backends that compute linear attention.
type LinearAttender interface {
	// LinearAttention computes O, and PresentState unless it is the zero Tensor, of c, which package kernels has validated:
	// Scale is not 0, and Beta has the heads of V. It does not keep c.
	LinearAttention(ctx context.Context, c *LinearAttention) error
}

// LinearAttention is one call of linear attention, whose state of fixed size takes the place of a cache of keys and
// values (Katharopoulos et al. 2020; Yang et al. 2024, Gated Delta Networks). The names are those of the operator
// LinearAttention of ONNX. For each sequence and state head, with row vectors q, k and v of token t:
//
//	S = diag(exp g)·S          Decay
//	d = β·(v - Sᵀk)            Beta; without it d = v
//	S = S + kᵀd
//	o = scale·q·S              the output sees the new state
//
//	O             [B, Ho, T, V] F32, F16 or BF16    Ho = max(Hq, Hv)
//	Q             [B, Hq, T, K]                     Hq is a multiple or a divisor of Hv
//	K             [B, Hk, T, K]                     Hk divides Hv
//	V             [B, Hv, T, V]
//	Decay         [B, Hv, T, 1 or K]                g, the natural logarithm of the decay of a head or a channel
//	Beta          [B, Hv or 1, T, 1]                β
//	PastState     [N, Hv, K, V] F32                 S before the first token of each of N sequences
//	PresentState  [N, Hv, K, V] F32                 S after the last token
//
// Inputs are F32, F16 or BF16, each independently, and strides are arbitrary. Output head h reads query head
// ⌊h·Hq/Ho⌋ and state head ⌊h·Hv/Ho⌋, which reads key head ⌊h·Hk/Hv⌋. The arithmetic is in float32 at least. A g of -Inf
// clears the state, as does one below -128. Tokens depend on no later ones, sequences on no other ones.
//
// With Beta each key should have length 1 and β lie in [0, 2]. Otherwise the state may grow without bound, and rounding
// errors with it. Nothing is normalised here, see Normaliser.
type LinearAttention struct {
	O, Q, K, V Tensor
	// Decay and Beta select the update rule. The zero Tensor means none.
	Decay, Beta Tensor
	// PastState and PresentState may be the same view, and must not overlap otherwise. The zero Tensor means states of
	// zeros, and that the final states are not requested.
	PastState, PresentState Tensor
	// Scale multiplies the outputs. In calls of package kernels 0 means K^-0.5.
	Scale float32
	// CuQ [N+1], unless nil, packs N sequences one after the other, as in attention: B is 1, and sequence n has the
	// tokens CuQ[n] to CuQ[n+1]. Without it N is B.
	CuQ []int
	// ChunkSize is a hint: how many tokens to compute together. 0 leaves the choice to the backend.
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

// CausalConv is one call of a causal convolution of each channel along the tokens, as before the linear attention of
// Qwen3-Next. The names are those of the operator CausalConvWithState of ONNX, whose axes B, Ch, L are here B, S, Ch:
//
//	y_s = f(bias + Σ_i w_i·x_(s-W+1+i))    f is the identity or SiLU, x·σ(x)
//
//	Y, X          [B, 1, S, Ch]
//	W             [1, 1, W, Ch]      W from 1 to 64; the strides of a view place the weights [Ch, 1, W] of Conv1d
//	Bias          [1, 1, 1, Ch]      the zero Tensor means none
//	PastState     [N, 1, W-1, Ch]    the rows of x before the first token of each of N sequences
//	PresentState  [N, 1, W-1, Ch]    the last W-1 rows of past state and x together
//
// All are F32, F16 or BF16, each independently, and strides are arbitrary. The arithmetic is in float32.
type CausalConv struct {
	Y, X, W, Bias Tensor
	// PastState and PresentState may be the same view, and must not overlap otherwise. The zero Tensor means states of
	// zeros, and that the final states are not requested.
	PastState, PresentState Tensor
	// SiLU applies SiLU, which ONNX calls activation silu or swish.
	SiLU bool
	// CuQ packs sequences as in LinearAttention.
	CuQ []int
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
