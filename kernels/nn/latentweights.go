package nn

import (
	"cmp"
	"io"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/internal/op"
	"github.com/seed90331342/attn/kernels/internal/weights"
)

// LatentConfig is the shape of a [LatentAttention].
type LatentConfig struct {
	// Model is M, the size of an input and output token. Heads is H.
	Model, Heads int
	// QueryRank is the size of the latent of queries; 0 means that there is none (DeepSeek V2-Lite).
	QueryRank int
	// Rank is the size r of the latent of keys and values.
	Rank int
	// Each query and key has NopeDim elements without positions, then RopeDim elements with them.
	// A value has ValueDim elements.
	NopeDim, RopeDim, ValueDim int
	// RoPE, unless nil, rotates the RopeDim elements. Interleaved is that of DeepSeek's files.
	RoPE *RoPE
	// DType is the type of the weights on the device; the zero value is F32.
	DType kernels.DType
	// BlockBytes is the most memory for expanded keys and values of a cache's tokens; 0 means 128 MiB. 128 tokens of
	// each sequence may take more.
	BlockBytes int
}

// check returns an error for a config out of range.
func (c LatentConfig) check() error {
	if err := cmp.Or(op.CheckLength("Model", c.Model, 1), op.CheckLength("Heads", c.Heads, 1), op.CheckLength("QueryRank", c.QueryRank, 0), op.CheckLength("Rank", c.Rank, 1),
		op.CheckLength("NopeDim", c.NopeDim, 1), op.CheckLength("RopeDim", c.RopeDim, 1), op.CheckLength("ValueDim", c.ValueDim, 1),
		op.CheckLength("BlockBytes", c.BlockBytes, 0)); err != nil {
		return err
	}
	return checkConfig(c.DType, c.RoPE, c.RopeDim, 0)
}

// LatentWeights are the weights of a [LatentAttention] in host memory, F32 and contiguous, for
// y = x·W. With D = NopeDim + RopeDim and Mq = QueryRank, or Model without one:
//
//	Wqa  [1, 1, Model, QueryRank]     QNorm  [1, 1, 1, QueryRank]     with a QueryRank
//	Wq   [1, 1, Mq, Heads·D]
//	Wkva [1, 1, Model, Rank+RopeDim]  KVNorm [1, 1, 1, Rank]
//	Wk   [1, 1, Rank, Heads·NopeDim]
//	Wv   [1, 1, Rank, Heads·ValueDim]
//	Wo   [1, 1, Heads·ValueDim, Model]
type LatentWeights struct {
	Wqa, QNorm, Wq, Wkva, KVNorm, Wk, Wv, Wo kernels.Tensor
}

func (w *LatentWeights) list(c LatentConfig) weights.List {
	queries, name, none := c.Model, "q_proj.weight", kernels.Shape{}
	wqa, qnorm := none, none
	if c.QueryRank > 0 {
		queries, name = c.QueryRank, "q_b_proj.weight"
		wqa, qnorm = kernels.Shape{1, 1, c.Model, c.QueryRank}, kernels.Shape{1, 1, 1, c.QueryRank}
	}
	return weights.List{
		{Name: "wqa", T: &w.Wqa, Shape: wqa, Of: "QueryRank", Tensor: "q_a_proj.weight"},
		{Name: "qnorm", T: &w.QNorm, Shape: qnorm, Of: "QueryRank", Vector: true, Tensor: "q_a_layernorm.weight"},
		{Name: "wq", T: &w.Wq, Shape: kernels.Shape{1, 1, queries, c.Heads * (c.NopeDim + c.RopeDim)}, Of: "queries", Tensor: name},
		{Name: "wkva", T: &w.Wkva, Shape: kernels.Shape{1, 1, c.Model, c.Rank + c.RopeDim}, Of: "a latent of keys", Tensor: "kv_a_proj_with_mqa.weight"},
		{Name: "kvnorm", T: &w.KVNorm, Shape: kernels.Shape{1, 1, 1, c.Rank}, Of: "a latent of keys", Vector: true, Tensor: "kv_a_layernorm.weight"},
		// The rows of a head in the file are those of its keys, then those of its values.
		{Name: "wk", T: &w.Wk, Shape: kernels.Shape{1, 1, c.Rank, c.Heads * c.NopeDim}, Of: "keys", Tensor: "kv_b_proj.weight", Groups: c.Heads},
		{Name: "wv", T: &w.Wv, Shape: kernels.Shape{1, 1, c.Rank, c.Heads * c.ValueDim}, Of: "values", Tensor: "kv_b_proj.weight", Groups: c.Heads},
		{Name: "wo", T: &w.Wo, Shape: kernels.Shape{1, 1, c.Heads * c.ValueDim, c.Model}, Of: "an output", Tensor: "o_proj.weight"},
	}
}

// LoadSafetensors reads the weights of a layer of DeepSeek V2 and V3, or Kimi K2, from a .safetensors
// file of the given size. The names of its tensors begin with prefix, such as
// "model.layers.0.self_attn.", and go on with
//
//	q_a_proj q_a_layernorm q_b_proj     or q_proj without a QueryRank
//	kv_a_proj_with_mqa kv_a_layernorm   .weight [Rank+RopeDim, Model], .weight [Rank]
//	kv_b_proj                           .weight [Heads·(NopeDim+ValueDim), Rank]
//	o_proj                              .weight [Model, Heads·ValueDim]
//
// Elements are F16, BF16, F32 or F64. Other tensors below the prefix are refused by name: biases,
// indexers, scales of quantised weights. Errors as for [MultiHeadConfig.LoadSafetensors].
func (c LatentConfig) LoadSafetensors(r io.ReaderAt, size int64, prefix string) (w LatentWeights, err error) {
	defer op.Annotate(&err, "weights")
	if err = c.check(); err == nil {
		err = weights.Load(r, size, prefix, w.list(c), harmless...)
	}
	return w, err
}
