package nn

import (
	"io"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/internal/op"
	"github.com/seed90331342/attn/kernels/internal/weights"
)

// MultiHeadWeights are the weights of a [MultiHeadAttention] in host memory, F32 and
// contiguous, for y = x·W + B:
//
//	Wq [1, 1, Model, Heads·D]       Bq [1, 1, 1, Heads·D]
//	Wk [1, 1, Memory, KVHeads·D]    Bk [1, 1, 1, KVHeads·D]
//	Wv [1, 1, Memory, KVHeads·Dv]   Bv [1, 1, 1, KVHeads·Dv]
//	Wo [1, 1, Heads·Dv, Model]      Bo [1, 1, 1, Model]
//
// The lengths are those of the [MultiHeadConfig]. Either all biases are present or none.
// These are present if the config has a Norm with weights, Sinks or a Gate:
//
//	QNorm [1, 1, 1, D], or [1, 1, 1, Heads·D] for a Norm of the whole Projection, or [1, Heads, 1, D] with Mean
//	KNorm [1, 1, 1, D], or [1, 1, 1, KVHeads·D], or [1, KVHeads, 1, D]
//	Sinks [1, Heads, 1, 1]
//	Wg    [1, 1, Model, Heads·Dv], or [1, 1, Model, Heads] for GateHeads    Bg [1, 1, 1, N]
//
// With KeysAsValues there are no Wv and Bv, and with SharedKeys no Wk, Bk, Wv, Bv and KNorm. KScale and VScale [1, 1, 1, 1], or the
// zero Tensor for 1, are for [MultiHeadAttention.CacheConfig].
// The columns of a head are adjacent, for Wo its rows. PyTorch's Linear stores the
// transpose, see [Transposed].
type MultiHeadWeights struct {
	Wq, Wk, Wv, Wo kernels.Tensor
	Bq, Bk, Bv, Bo kernels.Tensor

	QNorm, KNorm, Sinks kernels.Tensor
	Wg, Bg              kernels.Tensor
	KScale, VScale      kernels.Tensor
}

// list returns the weights with the shapes that they have in a layer of config c, which has its
// defaults. The zero config gives them no shapes.
func (w *MultiHeadWeights) list(c MultiHeadConfig) weights.List {
	q, k, v, o, gates := c.Heads*c.HeadDim, c.KVHeads*c.HeadDim, c.KVHeads*c.ValueDim, c.Heads*c.ValueDim, c.Heads*c.ValueDim
	if c.Gate == GateHeads {
		gates = c.Heads
	}
	normed, qnorm, knorm, qheads, kheads := c.Norm != nil && !c.Norm.Weightless, c.HeadDim, c.HeadDim, 1, 1
	if normed && c.Norm.Projection {
		qnorm, knorm = q, k
	} else if normed && c.Norm.Mean {
		qheads, kheads = c.Heads, c.KVHeads
	}
	hasK, hasGate := c.Heads > 0 && !c.SharedKeys, c.Gate != GateNone
	hasV := hasK && !c.KeysAsValues
	shape := func(has bool, heads, in, out int) (s kernels.Shape) {
		if has {
			s = kernels.Shape{1, heads, in, out}
		}
		return s
	}
	return weights.List{
		{Name: "wq", T: &w.Wq, Shape: shape(c.Heads > 0, 1, c.Model, q), Of: "q projection"},
		{Name: "wk", T: &w.Wk, Shape: shape(hasK, 1, c.Memory, k), Of: "k projection"},
		{Name: "wv", T: &w.Wv, Shape: shape(hasV, 1, c.Memory, v), Of: "v projection"},
		{Name: "wo", T: &w.Wo, Shape: shape(c.Heads > 0, 1, o, c.Model), Of: "o projection"},
		{Name: "bq", T: &w.Bq, Shape: shape(c.Bias, 1, 1, q), Of: "Bias", Vector: true},
		{Name: "bk", T: &w.Bk, Shape: shape(c.Bias && hasK, 1, 1, k), Of: "Bias", Vector: true},
		{Name: "bv", T: &w.Bv, Shape: shape(c.Bias && hasV, 1, 1, v), Of: "Bias of values", Vector: true},
		{Name: "bo", T: &w.Bo, Shape: shape(c.Bias, 1, 1, c.Model), Of: "Bias", Vector: true},
		{Name: "qnorm", T: &w.QNorm, Shape: shape(normed, qheads, 1, qnorm), Of: "Norm with weights", Vector: true, Tensor: "q_norm.weight"},
		{Name: "knorm", T: &w.KNorm, Shape: shape(normed && hasK, kheads, 1, knorm), Of: "Norm with weights", Vector: true, Tensor: "k_norm.weight"},
		{Name: "sinks", T: &w.Sinks, Shape: shape(c.Sinks, c.Heads, 1, 1), Of: "Sinks", Vector: true, Tensor: "sinks"},
		{Name: "wg", T: &w.Wg, Shape: shape(hasGate, 1, c.Model, gates), Of: "Gate", Tensor: "g_proj.weight"},
		{Name: "bg", T: &w.Bg, Shape: shape(c.Bias && hasGate, 1, 1, gates), Of: "Gate with Bias", Vector: true, Tensor: "g_proj.bias"},
		{Name: "kscale", T: &w.KScale, Shape: shape(!w.KScale.IsZero(), 1, 1, 1), Vector: true, F32: true},
		{Name: "vscale", T: &w.VScale, Shape: shape(!w.VScale.IsZero(), 1, 1, 1), Vector: true, F32: true},
	}
}

func (w *MultiHeadWeights) release() { w.list(MultiHeadConfig{}).Release() }

// WriteSafetensors writes w to a .safetensors file, under the names wq, wk, wv, wo, bq, bk, bv,
// bo, qnorm, knorm, sinks, wg, bg, kscale and vscale, which [MultiHeadConfig.LoadSafetensors] reads.
//
// Errors: ErrShape, ErrDType and ErrReleased for weights that are not as in
// [MultiHeadWeights], found before anything is written, and those of to.
func (w MultiHeadWeights) WriteSafetensors(to io.Writer) (err error) {
	defer op.Annotate(&err, "weights")
	return w.list(MultiHeadConfig{}).Write(to)
}
