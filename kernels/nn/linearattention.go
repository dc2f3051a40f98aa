package nn

import (
	"cmp"
	"context"
	"math"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/internal/op"
	"github.com/seed90331342/attn/kernels/internal/steps"
	"github.com/seed90331342/attn/kernels/kvcache"
)

// LinearAttention is a layer of linear attention with the gated delta rule, as in Qwen3-Next and Qwen3.5 (Yang et al.
// 2024, Gated Delta Networks) and Kimi Linear (Kimi Team 2025). A state of fixed size takes the place of a cache of
// keys and values:
//
//	q, k, v = SiLU(conv(x·W))    each head of q and k is divided by its length
//	β = σ(x·W)    g = -exp(A)·softplus(x·Wa + bias), or L·σ(exp(A)·(x·Wa + bias)) with a LowerBound L
//	o = linear attention of q, k and v with decays g and β, times K^-0.5
//	y = (norm(o) ⊙ f(x·Wz))·Wo    f is SiLU or σ, and the norm is that of a head
//
// [kernels.LinearAttention] has the rule. All numbers between x and y are F32. There is no backward pass. Methods are
// safe for concurrent use.
type LinearAttention struct {
	dev    *kernels.Device
	config LinearConfig
	w      LinearWeights  // in the device's memory
	fixed  kernels.Tensor // [1, 1, 1, 3] F32: 1, K^-0.5 and L
}

// NewLinearAttention returns a layer with weights w in the device's memory, for the caller to Release. Its matrices are
// rounded to c.DType. The weights come from [LinearConfig.LoadSafetensors]. Errors as for [NewMultiHeadAttention].
func NewLinearAttention(ctx context.Context, dev *kernels.Device, c LinearConfig, w LinearWeights) (l *LinearAttention, err error) {
	defer op.Annotate(&err, "linear attention layer")
	be := dev.Backend()
	if err := cmp.Or(c.check(), op.Lacks[backend.Projector](be, true, "projections"), op.Lacks[backend.Normaliser](be, true, "norms"), op.Lacks[backend.Gater](be, true, "gates"),
		op.Lacks[backend.Convolver](be, true, "convolutions"), op.Lacks[backend.LinearAttender](be, true, "linear attention")); err != nil {
		return nil, err
	}
	l = &LinearAttention{dev: dev, config: c}
	if err = w.list(c).Upload(ctx, dev, c.DType, l.w.list(c)); err == nil {
		fixed := []float32{1, float32(1 / math.Sqrt(float64(c.KeyDim))), float32(c.LowerBound)}
		l.fixed, err = dev.FromFloat32(ctx, kernels.F32, fixed, kernels.Shape{1, 1, 1, 3})
	}
	if err != nil {
		l.Release()
		return nil, err
	}
	return l, nil
}

// Release frees the memory of the weights.
func (l *LinearAttention) Release() {
	l.w.list(l.config).Release()
	l.fixed.Release()
}

// StateConfig returns the config of the states of one sequence for the layer, without a Window.
func (l *LinearAttention) StateConfig() kvcache.StateConfig {
	c := l.config
	s := kvcache.StateConfig{KVHeads: c.ValueHeads, Dim: c.KeyDim, ValueDim: c.ValueDim}
	if c.Conv > 1 { // else the convolution has no state
		s.Channels, s.Width = c.sizes().channels, c.Conv
	}
	return s
}

// LinearOptions are the options of one call of a [LinearAttention].
type LinearOptions struct {
	// States, unless nil, keeps the states of the sequences from one call to the next. Without them sequences start with x.
	// Their config is [LinearAttention.StateConfig] with any Batch and Window. After an error a Rewind to the Lens takes
	// back the convolution, up to the Window.
	States *kvcache.States
	// CuQ packs sequences as in [kernels.LinearAttention]; nil means that each batch of x is one.
	CuQ []int
}

// Apply computes the layer's output for x and allocates it, for the caller to Release:
//
//	x [B, 1, S, Model]    y [B, 1, S, Model] of x's dtype
//
// Padding before the first token of a sequence must be rows of zeros, which change nothing. Padding after its last token
// must be left out, by CuQ for example, because it would change the state.
//
// Errors: ErrShape and ErrDType for x, those of CuQ as for [kernels.Device.LinearAttention], those of States, and the
// backend's.
func (l *LinearAttention) Apply(ctx context.Context, x kernels.Tensor, opt LinearOptions) (y kernels.Tensor, err error) {
	defer op.Annotate(&err, "linear attention layer")
	if err := checkInput(x, l.config.Model); err != nil {
		return y, err
	}
	b := steps.Steps{Ctx: ctx, Dev: l.dev, Conv: l.dev, Linear: l.dev}
	if opt.States != nil {
		if b.Linear = opt.States; l.config.Conv > 1 {
			b.Conv = opt.States
		}
	}
	l.apply(&b, &y, x, opt.CuQ)
	return b.Result(y)
}

// apply computes y. Its steps do nothing after an error.
func (l *LinearAttention) apply(b *steps.Steps, y *kernels.Tensor, x kernels.Tensor, cuQ []int) {
	c, w, s, h, n := l.config, l.w, x.Shape(), l.config.ValueHeads, l.config.sizes()
	rows := func(n int) kernels.Tensor { return b.Alloc(kernels.Shape{s[0], 1, s[2], n}) }
	in, conv, beta, f, g, attended := rows(n.channels+n.gates+h+c.Rank), rows(n.channels), rows(h), rows(n.decays), rows(n.decays), rows(n.values)
	at := n.channels + n.gates
	b.Project(in, x, w.Win)
	gate, u := b.Columns(in, n.channels, at), x
	if c.Rank > 0 {
		latent := gate
		gate, u = rows(n.values), b.Columns(in, at+h, at+h+c.Rank)
		b.Project(gate, latent, w.Wz)
	}
	b.Affine(f, u, w.Wa, w.Bias)
	b.CausalConv(kernels.CausalConv{Y: conv, X: b.Columns(in, 0, n.channels), W: w.Conv, SiLU: true, CuQ: cuQ})
	b.Gate(beta, l.number(b, 0, beta.Shape()), b.Columns(in, at, at+h), kernels.Sigmoid)
	if b.Err != nil {
		return
	}
	q, k, v := splitHeads(b.Columns(conv, 0, n.keys), c.KeyHeads), splitHeads(b.Columns(conv, n.keys, 2*n.keys), c.KeyHeads), splitHeads(b.Columns(conv, 2*n.keys, n.channels), h)
	for _, t := range []kernels.Tensor{q, k} { // by their lengths, see [kernels.Device.Normalise]
		b.Normalise(t, t, l.number(b, 1, kernels.Shape{1, 1, 1, c.KeyDim}), kernels.Norm{Epsilon: 1e-6 / float64(c.KeyDim)})
	}
	f, g, o := splitHeads(f, h), splitHeads(g, h), splitHeads(attended, h)
	if rates := b.Must(w.A.Broadcast(g.Shape())); c.LowerBound == 0 {
		b.Gate(g, rates, f, kernels.Softplus)
	} else {
		b.Gate(f, f, rates, kernels.Identity)
		b.Gate(g, l.number(b, 2, g.Shape()), f, kernels.Sigmoid)
	}
	b.LinearAttention(kernels.LinearAttention{O: o, Q: q, K: k, V: v, Decay: g, Beta: splitHeads(beta, h), CuQ: cuQ})
	b.Normalise(o, o, w.Norm, kernels.Norm{Epsilon: c.Epsilon})
	b.Gate(o, o, splitHeads(gate, h), c.Gate)
	b.DType = x.DType()
	b.Project(b.Keep(y, s), attended, w.Wo)
}

// number returns one of the fixed numbers in a shape.
func (l *LinearAttention) number(b *steps.Steps, i int, shape kernels.Shape) kernels.Tensor {
	return b.Must(b.Columns(l.fixed, i, i+1).Broadcast(shape))
}
