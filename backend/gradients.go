package backend

import "context"

// Gradients is the backward pass of one attention call: from DO and DLSE, the gradients of a loss with respect to O and
// LSE, it computes those with respect to the operands, by the formulas of kernels.Call.Backward. The sums of dK and dV
// run over the rows of all query heads that share a key head. Bounds that clamp biases count as the identity. Hidden
// pairs add exactly 0, whatever Q, K, V or DO contains; a row whose LSE is -Inf adds 0. A NaN or an Inf that a row sees
// makes the gradients NaN, Inf or unspecified that the row adds to, and no others.
//
// Every sum has a fixed order: the same call yields the same bits. A gradient is summed in
// float32 and rounded once to its dtype.
type Gradients struct {
	// Call is the forward call. O and LSE, which must be set, are its results or those over
	// a larger set of keys: then the gradients are those of the larger call, restricted to
	// the keys of this one, and DQ has this one's part of the sum. Pages, Lists, Resume, Q8, Q4 and F8
	// operands are not differentiable. With Listed, Add is set: the rows of other keys stay.
	Call
	// DO is [B, H, Sq, Dv], F32, F16 or BF16. DLSE is [B, H, Sq, 1] F32; the zero Tensor means 0.
	DO, DLSE Tensor

	// The gradients to compute; the zero Tensor where one is not requested. DQ, DK and DV
	// have the shapes of Q, K and V and their types or F32.
	DQ, DK, DV Tensor
	// DBias is F32 [B or 1, H or 1, Sq or 1, Sk or 1]: an axis of 1 is summed over. So are DRelative [B or 1, H or 1,
	// 1, Sq+Sk-1], DSlopes [B or 1, H, 1, 1] and DSinks [1, H, 1, 1].
	DBias, DRelative, DSlopes, DSinks Tensor
	// Add adds to the gradients, which are then all F32, instead of replacing them.
	Add bool
}

// Operands returns the outputs and inputs under the names that errors use. Those that are not set are the zero Tensor.
func (g *Gradients) Operands() (outputs [7]Operand, inputs [11]Operand) {
	outputs = [7]Operand{{"dq", g.DQ}, {"dk", g.DK}, {"dv", g.DV}, {"dbias", g.DBias},
		{"drelative", g.DRelative}, {"dslopes", g.DSlopes}, {"dsinks", g.DSinks}}
	results, operands := g.Call.Operands()
	const without = 7 // those before Lists
	copy(inputs[:], operands[:without])
	copy(inputs[without:], results[:])
	inputs[9], inputs[10] = Operand{"do", g.DO}, Operand{"dlse", g.DLSE}
	return outputs, inputs
}

// NewGradientsPlan returns a Plan with the fields that depend on g alone, as NewPlan does: five products, QKᵀ and dO·Vᵀ
// for the scores' gradients, and those of dQ, dK and dV, are 2·(3·D + 2·Dv) operations for each visible pair.
func NewGradientsPlan(g *Gradients) Plan {
	d := g.Dims()
	p := NewPlan(&g.Call)
	p.FLOPs = p.Pairs * 2 * int64(3*d.Dim+2*d.ValueDim)
	outputs, inputs := g.Operands()
	p.Bytes = bytesOf(outputs[:]) + bytesOf(inputs[:])
	return p
}

// Differentiator is implemented by backends that compute gradients of attention.
type Differentiator interface {
	// Backward computes the gradients that g requests, in O(Sq + Sk) memory in addition to
	// the operands. Errors are those of Attention.
	Backward(ctx context.Context, g *Gradients) error
	// PlanBackward returns how Backward would run g, without running it. Operands need no memory (see [Meta]).
	PlanBackward(ctx context.Context, g *Gradients) (Plan, error)
}
