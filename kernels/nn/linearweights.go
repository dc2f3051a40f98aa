package nn

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"strings"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/internal/op"
	"github.com/seed90331342/attn/kernels/internal/weights"
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
	case c.Conv < 1 || c.Conv > backend.MaxConv:
		return fmt.Errorf("config: Conv is %d, it must be 1 to %d: %w", c.Conv, backend.MaxConv, kernels.ErrOption)
	case c.ValueHeads%c.KeyHeads != 0:
		return fmt.Errorf("config: KeyHeads is %d, ValueHeads is %d: the key heads must divide the value heads: %w", c.KeyHeads, c.ValueHeads, kernels.ErrOption)
	case !(c.LowerBound >= -backend.MaxFactor && c.LowerBound <= 0): // or NaN
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
