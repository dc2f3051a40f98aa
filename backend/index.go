package backend

import "context"

// Indexer is implemented by backends that choose keys by index scores.
type Indexer interface {
	// Index returns the keys that c, which package kernels has validated, chooses for each row, for the caller to Release:
	//
	//	keys [B, 1, Sq, TopK] I32, of any strides    in ascending order, -1 after the last one
	//
	// It uses O(Sq·TopK + Sk) memory in addition to the operands.
	Index(ctx context.Context, c *Index) (keys Tensor, err error)
}

// Index is one call of the lightning indexer of a sparse attention (DeepSeek-AI 2025, DeepSeek-V3.2). For query row t of
// each batch, the TopK keys s with the largest index scores among those that Visible shows to the row:
//
//	I[t,s] = Σ_h W[t,h]·max(0, Q[t,h]·K[s])
//
//	Q [B, Hi, Sq, Di]    K [B, 1, Sk, Di]    W [B, 1, Sq, Hi]    F32, F16 or BF16 each, any strides
//
// Sums are in float32. NaN counts as -Inf, and of equal scores the lower key is chosen. A row that sees TopK keys or fewer has all of them.
type Index struct {
	Q, K, W Tensor
	TopK    int // 1 to Sk
	Visible Visibility
}

// Operands returns the inputs under the names that errors use.
func (c *Index) Operands() [3]Operand { return [3]Operand{{"q", c.Q}, {"k", c.K}, {"w", c.W}} }
