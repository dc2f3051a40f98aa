package nn

import (
	"context"
	"fmt"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/internal/op"
	"github.com/seed90331342/attn/kernels/internal/steps"
)

// Pass is one forward pass of a layer with what [MultiHeadAttention.Backward] needs of it.
// It keeps x and the memory alive, which must not change until Backward.
type Pass struct {
	// Result is what [MultiHeadAttention.Apply] returns, with the LSE.
	kernels.Result
	call  *kernels.Call
	steps steps.Steps // own the tensors below, but those of the caller
	x, z  kernels.Tensor
	// raw and qkv are the attention's operands before and after norms, attended is its output
	// and joined the input of Wo, [B, H, S, Dv]. Without keep they share memory.
	raw, qkv         [3]kernels.Tensor
	angles           [2]kernels.Angles // of q and k
	factors          kernels.Tensor    // of q, [B, H, S, 1]
	gate             kernels.Tensor    // the projection of the gate, [B, H, S, Dv or 1]
	attended, joined kernels.Tensor
	opt              MultiHeadOptions
	keep             bool // for Backward
}

// Release frees the results and the memory of p.
func (p *Pass) Release() {
	if p != nil {
		p.Result.Release()
		p.steps.Release()
	}
}

// LayerGradients are the gradients of a layer's input and weights, all F32 in device memory.
type LayerGradients struct {
	// X is that of x, [B, 1, S, Model], and Memory that of Options.Memory, if it is set.
	X, Memory kernels.Tensor
	// Weights has the shapes of the weights, of those that the layer has.
	Weights MultiHeadWeights
	// Attention has the gradients of the options that [kernels.Gradients] has: Bias, RelativeBias, ALiBi and Sinks. Q,
	// K and V are the zero Tensor, and so is Sinks when the layer has its own.
	Attention kernels.Gradients
}

// Release frees all tensors of g.
func (g *LayerGradients) Release() {
	g.X.Release()
	g.Memory.Release()
	g.Weights.release()
	g.Attention.Release()
}

// Forward is Apply that keeps what Backward needs: q, k, v and the attention's output, also
// before norms and the gate, in O(S) memory. The caller releases the Pass. It returns ErrOption
// for a Cache, which is for generation, and ErrUnsupported for a [Norm] with Mean.
func (l *MultiHeadAttention) Forward(ctx context.Context, x kernels.Tensor, opt MultiHeadOptions) (p *Pass, err error) {
	defer op.Annotate(&err, "multi-head attention: forward")
	if opt.Cache != nil {
		return nil, fmt.Errorf("a Cache is set, which is for generation: leave it out: %w", kernels.ErrOption)
	}
	if n := l.config.Norm; n != nil && n.Mean {
		return nil, fmt.Errorf("the layer has a Norm with Mean, which has no gradients: %w", kernels.ErrUnsupported)
	}
	opt.LSE = true
	p = &Pass{keep: true}
	if err := l.apply(ctx, p, x, opt); err != nil {
		p.Release()
		return nil, err
	}
	return p, nil
}

// Backward computes the gradients of a loss with respect to the input of the pass p and to the
// weights, for the caller to Release. dy [B, 1, S, M], F32, F16 or BF16, is the gradient of the
// loss with respect to p.O. For a linear layer y = x·W + B the gradients are
//
//	dx = dy·Wᵀ    dW = xᵀ·dy    dB = Σ dy
//
// summed over all batches and rows. Intermediate gradients are F32. The same pass yields the same bits.
//
// Errors as for [kernels.Call.Backward].
func (l *MultiHeadAttention) Backward(ctx context.Context, p *Pass, dy kernels.Tensor) (g LayerGradients, err error) {
	b := steps.Steps{Ctx: ctx, Dev: l.dev}
	defer func() {
		b.Release()
		if err != nil {
			g.Release()
			g = LayerGradients{}
		}
		op.Annotate(&err, "multi-head attention: backward")
	}()
	if p == nil || p.call == nil {
		return g, fmt.Errorf("there is no pass, make it with Forward: %w", kernels.ErrOption)
	}
	if err := dy.CheckShape("dy", p.O.Shape(), "shape of y", floats...); err != nil {
		return g, err
	}
	l.backward(&b, p, dy, &g)
	return g, b.Err
}

// backward computes g. Its steps do nothing after an error.
func (l *MultiHeadAttention) backward(b *steps.Steps, p *Pass, dy kernels.Tensor, g *LayerGradients) {
	c, w := l.config, &g.Weights
	// y = joined·Wo + Bo
	b.LinearBackward(&w.Wo, &w.Bo, joinHeads(p.joined), dy, c.Bias)
	dO := allocHeads(b, p.x, c.Heads, c.ValueDim)
	b.Project(joinHeads(dO), dy, b.Transposed(l.w.Wo))
	dGate := l.gateBackward(b, p, dO)
	qkv := [3]kernels.Tensor{allocHeads(b, p.x, c.Heads, c.HeadDim), allocHeads(b, p.z, c.KVHeads, c.HeadDim), allocHeads(b, p.z, c.KVHeads, c.ValueDim)}
	dq, dk, dv := joinHeads(qkv[0]), joinHeads(qkv[1]), joinHeads(qkv[2])
	if b.Err != nil {
		return
	}
	want := p.call.Gradients()
	want.Q, want.K, want.V = kernels.Tensor{}, kernels.Tensor{}, kernels.Tensor{}
	if g.Attention, b.Err = p.call.AllocGradients(b.Ctx, want); b.Err != nil {
		return
	}
	all := g.Attention
	all.Q, all.K, all.V = qkv[0], qkv[1], qkv[2]
	b.Err = p.call.Backward(b.Ctx, all, kernels.Result{O: dO}, kernels.Result{O: p.attended, LSE: p.LSE})
	if c.Sinks {
		w.Sinks, g.Attention.Sinks = g.Attention.Sinks, kernels.Tensor{}
	}
	l.operandsBackward(b, p, qkv, w)
	b.LinearBackward(&w.Wq, &w.Bq, p.x, dq, c.Bias)
	weights, outputs := []kernels.Tensor{l.w.Wq}, []kernels.Tensor{dq}
	if !dGate.IsZero() {
		b.LinearBackward(&w.Wg, &w.Bg, p.x, dGate, c.Bias)
		weights, outputs = append(weights, l.w.Wg), append(outputs, dGate)
	}
	wv := l.w.Wv
	if c.KeysAsValues { // the gradients of Wk from keys and from values add up
		wv = l.w.Wk
		b.LinearBackward(&w.Wk, &w.Bk, b.Concat(kernels.Batch, p.z, p.z), b.Concat(kernels.Batch, dk, dv), c.Bias)
	} else {
		b.LinearBackward(&w.Wk, &w.Bk, p.z, dk, c.Bias)
		b.LinearBackward(&w.Wv, &w.Bv, p.z, dv, c.Bias)
	}
	if p.opt.Memory.IsZero() {
		weights, outputs = append(weights, l.w.Wk, wv), append(outputs, dk, dv)
	} else {
		b.InputBackward(&g.Memory, []kernels.Tensor{dk, dv}, []kernels.Tensor{l.w.Wk, wv})
	}
	b.InputBackward(&g.X, outputs, weights)
}
