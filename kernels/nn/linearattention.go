package nn

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"math"
	"strings"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/internal/op"
	"github.com/seed90331342/attn/kernels/internal/steps"
	"github.com/seed90331342/attn/kernels/internal/weights"
	"github.com/seed90331342/attn/kernels/kvcache"
)

// LinearConfig is the shape of a [LinearAttention].
type LinearConfig struct {
	// Model is M, the size of an input and output token.
	Model int
	// KeyHeads is Hk, the number of heads of queries and keys. It divides ValueHeads, Hv, that of values, states and
	// outputs.
	KeyHeads, ValueHeads int
	// KeyDim is K, of a query and a key. ValueDim is V.
	KeyDim, ValueDim int
	// Conv is W, the width of the convolution, up to 64.
	Conv int
	// Channels gives each of the K channels of a head a decay (Kimi Linear). Otherwise a head has one.
	Channels bool
	// Rank is the size of the latents of decays and gates (Kimi Linear); 0 means that there are none.
	Rank int
	// LowerBound is L, the lower bound of the logarithms of decays, such as -5; 0 means none.
	LowerBound float64
	// Gate is the function of the output's gate, SiLU (Qwen) or Sigmoid (Kimi Linear).
	Gate kernels.Activation
	// Epsilon is that of the output's norm; 0 means 1e-6.
	Epsilon float64
	// DType is the type of the matrices on the device; the zero value is F32.
	DType kernels.DType
}

// check returns an error for a config out of range.
func (c LinearConfig) check() error {
	if err := cmp.Or(op.CheckLength("Model", c.Model, 1), op.CheckLength("KeyHeads", c.KeyHeads, 1), op.CheckLength("ValueHeads", c.ValueHeads, 1), op.CheckLength("KeyDim", c.KeyDim, 1),
		op.CheckLength("ValueDim", c.ValueDim, 1), op.CheckLength("Rank", c.Rank, 0)); err != nil {
		return err
	}
	switch {
	case c.Conv < 1 || c.Conv > op.MaxConv:
		return fmt.Errorf("config: Conv is %d, it must be 1 to %d: %w", c.Conv, op.MaxConv, kernels.ErrOption)
	case c.ValueHeads%c.KeyHeads != 0:
		return fmt.Errorf("config: KeyHeads is %d, ValueHeads is %d: the key heads must divide the value heads: %w", c.KeyHeads, c.ValueHeads, kernels.ErrOption)
	case !(c.LowerBound >= -op.MaxFactor && c.LowerBound <= 0): // or NaN
		return fmt.Errorf("config: LowerBound is %v, it must be negative, or 0 for none: %w", c.LowerBound, kernels.ErrOption)
	case c.Gate != kernels.SiLU && c.Gate != kernels.Sigmoid:
		return fmt.Errorf("config: Gate is %d, it must be SiLU or Sigmoid: %w", c.Gate, kernels.ErrOption)
	}
	return checkConfig(c.DType, nil, 0, c.Epsilon)
}

// linearSizes are the numbers of elements of a token: of q and of k, of v, of the convolution, of gates in Win, and of
// decays.
type linearSizes struct{ keys, values, channels, gates, decays int }

func (c LinearConfig) sizes() linearSizes {
	n := linearSizes{keys: c.KeyHeads * c.KeyDim, values: c.ValueHeads * c.ValueDim, decays: c.ValueHeads}
	n.channels, n.gates = 2*n.keys+n.values, n.values
	if c.Rank > 0 {
		n.gates = c.Rank
	}
	if c.Channels {
		n.decays *= c.KeyDim
	}
	return n
}

// LinearWeights are the weights of a [LinearAttention] in host memory, F32 and contiguous, for y = x·W. With
// C = 2·Hk·K + Hv·V, and Na = Hv decays, or Hv·K with Channels:
//
//	Win  [1, 1, Model, C+Hv·V+Hv]         columns of q, k, v, gates and β
//	Conv [1, 1, W, C]                     columns of q, k and v
//	Wa   [1, 1, Model, Na]                decays
//	Bias [1, 1, 1, Na]
//	A    [1, Hv, 1, 1]                    -exp(A_log), or exp(A_log) with a LowerBound
//	Norm [1, 1, 1, V]
//	Wo   [1, 1, Hv·V, Model]
//
// With a Rank the gates and decays come from latents, whose columns are in Win:
//
//	Win  [1, 1, Model, C+Rank+Hv+Rank]    columns of q, k, v, latents of gates, β and latents of decays
//	Wz   [1, 1, Rank, Hv·V]
//	Wa   [1, 1, Rank, Na]
type LinearWeights struct {
	Win, Conv, Wz, Wa, Bias, A, Norm, Wo kernels.Tensor
}

func (w *LinearWeights) list(c LinearConfig) weights.List {
	n, wz, latent := c.sizes(), kernels.Shape{}, c.Model
	if c.Rank > 0 {
		wz, latent = kernels.Shape{1, 1, c.Rank, n.values}, c.Rank
	}
	const of = "linear attention"
	return weights.List{
		{Name: "wz", T: &w.Wz, Shape: wz, Of: "Rank", Tensor: "g_b_proj.weight"},
		{Name: "wa", T: &w.Wa, Shape: kernels.Shape{1, 1, latent, n.decays}, Of: of, Tensor: "f_b_proj.weight"},
		{Name: "bias", T: &w.Bias, Shape: kernels.Shape{1, 1, 1, n.decays}, Of: of, Tensor: "dt_bias", Vector: true, F32: true},
		{Name: "a", T: &w.A, Shape: kernels.Shape{1, c.ValueHeads, 1, 1}, Of: of, Tensor: "A_log", Vector: true, F32: true},
		{Name: "norm", T: &w.Norm, Shape: kernels.Shape{1, 1, 1, c.ValueDim}, Of: of, Tensor: "o_norm.weight", Vector: true, F32: true},
		{Name: "wo", T: &w.Wo, Shape: kernels.Shape{1, 1, n.values, c.Model}, Of: of, Tensor: "o_proj.weight"},
		{Name: "conv", T: &w.Conv, Shape: kernels.Shape{1, 1, c.Conv, n.channels}, F32: true},
		{Name: "win", T: &w.Win, Shape: kernels.Shape{1, 1, c.Model, n.channels + n.gates + c.ValueHeads + c.Rank}},
	}
}

// LoadSafetensors reads the weights of a layer of Qwen3-Next, Qwen3.5 or, with a Rank, Kimi Linear from a .safetensors
// file of the given size. The names of its tensors begin with prefix, such as "model.layers.0.linear_attn.", and go on
// with
//
//	in_proj_qkvz in_proj_ba              Qwen3-Next: .weight [out, Model], with adjacent rows for each key head
//	in_proj_qkv in_proj_z                Qwen3.5: .weight [out, Model]
//	in_proj_b in_proj_a                  the same
//	conv1d norm out_proj                 both: .weight [C, 1, W], [V], [Model, Hv·V]
//	q_proj k_proj v_proj b_proj          Kimi Linear: .weight [out, Model]
//	g_a_proj g_b_proj f_a_proj f_b_proj  .weight [Rank, Model], [out, Rank], of gates and of decays
//	q_conv1d k_conv1d v_conv1d           .weight [out, 1, W]
//	o_norm o_proj                        .weight [V], [Model, Hv·V]
//	A_log dt_bias                        all: [Hv], [Na]
//
// The rows of a key head of Qwen3-Next are those of its query, of its key, of the values and of the gates of its value
// heads, and those of their β and of their decays. Elements are F16, BF16, F32 or F64. A_log of Kimi Linear may be
// [1, 1, Hv, 1]. Other tensors below the prefix are refused by name. Errors as for [MultiHeadConfig.LoadSafetensors].
func (c LinearConfig) LoadSafetensors(r io.ReaderAt, size int64, prefix string) (w LinearWeights, err error) {
	defer op.Annotate(&err, "weights")
	if err := c.check(); err != nil {
		return w, err
	}
	f, err := weights.Open(r, size, prefix)
	if err != nil {
		return w, err
	}
	names, heads, list, n := "q_proj k_proj v_proj g_a_proj b_proj f_a_proj q_conv1d k_conv1d v_conv1d", 1, w.list(c)[:6], c.sizes()
	if c.Rank == 0 {
		names = "in_proj_qkv in_proj_qkv in_proj_qkv in_proj_z in_proj_b in_proj_a conv1d conv1d conv1d"
		if f.Has(prefix + "in_proj_qkvz.weight") {
			names, heads = "in_proj_qkvz in_proj_qkvz in_proj_qkvz in_proj_qkvz in_proj_ba in_proj_ba conv1d conv1d conv1d", c.KeyHeads
		}
		list[1].Tensor, list[1].Groups = strings.Fields(names)[5]+".weight", heads
		list[4].Tensor, list[5].Tensor = "norm.weight", "out_proj.weight"
	}
	var parts [9]kernels.Tensor // of Win and Conv
	columns := []int{n.keys, n.keys, n.values, n.gates, c.ValueHeads, c.Rank, n.keys, n.keys, n.values}
	all := make(weights.List, 9, 15)
	for i, name := range strings.Fields(names) {
		all[i] = weights.Weight{T: &parts[i], Shape: kernels.Shape{1, 1, c.Model, columns[i]}, Of: "linear attention", Tensor: name + ".weight", Groups: heads}
		if i > 5 {
			all[i].Shape[kernels.Seq], all[i].Groups = c.Conv, 1
		}
	}
	if c.Rank == 0 {
		all[5].Shape = kernels.Shape{}
	}
	all = append(all, list...)
	if err = f.Load(all); err != nil {
		return w, err
	}
	a, _ := w.A.Float32s() // F32
	for i := range a {
		if a[i] = float32(math.Exp(float64(a[i]))); c.LowerBound == 0 {
			a[i] = -a[i]
		}
	}
	if w.Win, err = weights.Joined(parts[:6]...); err == nil {
		w.Conv, err = weights.Joined(parts[6:]...)
	}
	return w, err
}

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
	b := steps.Steps{Ctx: ctx, Dev: l.dev, Conv: l.dev, Linear: l.dev, Err: checkInput(x, l.config.Model)}
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
	rows := func(n int) kernels.Tensor { return allocRows(b, x, n) }
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
