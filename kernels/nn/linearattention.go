package nn

import (
	"cmp"
	"context"
	"fmt"
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

// LinearState is what N sequences of any lengths keep from one call to the next. It starts with zeros. A program may
// slice and copy the tensors, for example to return to an earlier token.
type LinearState struct {
	S    kernels.Tensor // [N, ValueHeads, KeyDim, ValueDim] F32
	Conv kernels.Tensor // [N, 1, Conv-1, C] of any float type: the last inputs of the convolution, of C channels q|k|v
}

// Release frees the memory of s.
func (s LinearState) Release() {
	s.S.Release()
	s.Conv.Release()
}

// NewState returns the state of n sequences without tokens, in F32, for the caller to Release. It returns ErrShape for
// a negative n, ErrMemory, and the backend's errors.
func (l *LinearAttention) NewState(ctx context.Context, n int) (s LinearState, err error) {
	defer op.Annotate(&err, "linear attention state")
	to := [2]*kernels.Tensor{&s.S, &s.Conv}
	for i, shape := range l.config.states(n) {
		host, err := kernels.AllocHost(kernels.F32, shape)
		if err == nil {
			*to[i], err = l.dev.Upload(ctx, host)
		}
		if err != nil {
			s.Release()
			return LinearState{}, err
		}
	}
	return s, nil
}

// LinearOptions are the options of one call of a [LinearAttention].
type LinearOptions struct {
	// State, unless zero, is that before the tokens of x, which Apply replaces by that after them. Without it
	// sequences start with x. After an error it may be changed in part.
	State LinearState
	// States, unless nil, keeps the states of its sequences in the place of State, and can rewind, fork and save them. Its
	// config has the KVHeads, Dim, ValueDim, Channels and Width of ValueHeads, KeyDim, ValueDim, C and Conv of the layer. After
	// an error a Rewind to its Lens takes back the convolution, up to its Window.
	States *kvcache.States
	// CuQ packs sequences as in [kernels.LinearAttention]; nil means that each batch of x is one.
	CuQ []int
}

// Apply computes the layer's output for x and allocates it, for the caller to Release:
//
//	x [B, 1, S, Model]    y [B, 1, S, Model] of x's dtype
//
// Padding before the first token of a sequence must be rows of zeros, which change nothing. Padding after its last token
// must be left out, by CuQ for example, because it would change the State.
//
// Errors: ErrShape and ErrDType for x and the State, ErrOption for both kinds of states, those of CuQ as for
// [kernels.Device.LinearAttention], those of States, and the backend's.
func (l *LinearAttention) Apply(ctx context.Context, x kernels.Tensor, opt LinearOptions) (y kernels.Tensor, err error) {
	defer op.Annotate(&err, "linear attention layer")
	if err := checkInput(x, l.config.Model); err != nil {
		return y, err
	}
	if opt.State != (LinearState{}) {
		if opt.States != nil {
			return y, fmt.Errorf("both State and States are set: only one can be the state before x: %w", kernels.ErrOption)
		}
		shapes := l.config.states(backend.Sequences(opt.CuQ, x.Shape()[0]))
		if err := cmp.Or(opt.State.S.CheckShape("state S", shapes[0], "[N, Hv, K, V] of x and the layer", kernels.F32),
			opt.State.Conv.CheckShape("state Conv", shapes[1], "[N, 1, W-1, C] of x and the layer", floats...)); err != nil {
			return y, err
		}
	}
	b := steps.Steps{Ctx: ctx, Dev: l.dev, Conv: l.dev, Linear: l.dev}
	if opt.States != nil {
		if b.Linear = opt.States; l.config.Conv > 1 { // else the convolution has no state
			b.Conv = opt.States
		}
	}
	l.apply(&b, &y, x, opt)
	return b.Result(y)
}

// apply computes y. Its steps do nothing after an error.
func (l *LinearAttention) apply(b *steps.Steps, y *kernels.Tensor, x kernels.Tensor, opt LinearOptions) {
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
	b.CausalConv(kernels.CausalConv{Y: conv, X: b.Columns(in, 0, n.channels), W: w.Conv, SiLU: true, PastState: opt.State.Conv, PresentState: opt.State.Conv, CuQ: opt.CuQ})
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
	b.LinearAttention(kernels.LinearAttention{O: o, Q: q, K: k, V: v, Decay: g, Beta: splitHeads(beta, h), PastState: opt.State.S, PresentState: opt.State.S, CuQ: opt.CuQ})
	b.Normalise(o, o, w.Norm, kernels.Norm{Epsilon: c.Epsilon})
	b.Gate(o, o, splitHeads(gate, h), c.Gate)
	b.DType = x.DType()
	b.Project(b.Keep(y, s), attended, w.Wo)
}

// number returns one of the fixed numbers in a shape.
func (l *LinearAttention) number(b *steps.Steps, i int, shape kernels.Shape) kernels.Tensor {
	return b.Must(b.Columns(l.fixed, i, i+1).Broadcast(shape))
}
