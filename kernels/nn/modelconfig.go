package nn

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/internal/configjson"
	"github.com/seed90331342/attn/kernels/internal/op"
)

// ModelConfig is the attention of a model, from its config.json.
type ModelConfig struct{ Layers []LayerConfig }

// LayerConfig is the attention of one layer of a model.
type LayerConfig struct {
	// MultiHead is the shape of the layer. Layers of one kind share their RoPE and Norm.
	MultiHead MultiHeadConfig
	// Options are Causal, and the Window, Scale and Softcap of the layer.
	Options kernels.Options
	// SharedWith is the number of the layer whose cache this one reads, if MultiHead has SharedKeys. It
	// is applied to the same tokens after that layer. Otherwise it is 0.
	SharedWith int
	// Prefix starts the names of the layer's tensors, for [MultiHeadConfig.LoadSafetensors].
	Prefix string
	// Latent, unless nil, is the shape of a layer with latent attention. MultiHead is zero then.
	Latent *LatentConfig
	// Linear, unless nil, is the shape of a layer with linear attention. MultiHead and Options are zero then.
	Linear *LinearConfig
}

// ParseConfig reads the attention of the layers of a model from its config.json, as transformers
// of Hugging Face defines it, or from the text_config in it. The model_type decides the family:
//
//	cohere, cohere2           layer norms; windows, and in every fourth layer neither a window nor a RoPE
//	llama, mistral, phi3      grouped heads; mistral and phi3 also windows in all layers
//	qwen2, qwen3              biases; norms
//	olmo2, olmo3              norms of whole projections; olmo3 also windows in most layers
//	qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_vl_moe   those of qwen2 and qwen3, with positions on three axes
//	mixtral, qwen2_moe, qwen3_moe, olmoe   those of mistral, qwen2, qwen3 and olmo2
//	gemma2, gemma3, gemma4    windows in most layers; a softcap; norms; a RoPE for each kind of layer
//	gemma3n                   the same without a softcap; the last layers read caches of others, also in gemma4
//	gpt_oss                   biases, sinks, windows in every other layer
//	smollm3                   some layers without RoPE
//	llama4                    chunks, norms after RoPE; in some layers a factor of positions, without RoPE
//	deepseek_v2, deepseek_v3, kimi_k2      latent attention
//	qwen3_next, qwen3_5, qwen3_5_moe       norms, a gate, and linear attention in most layers
//	kimi_linear               latent attention without RoPE, and linear attention in most layers
//
// Fields that are not in the file have the defaults of transformers. A RoPE with dynamic or longrope scaling is that of
// short sequences until the caller sets [Scaling].Length. Tokens of an image are up to the caller: they see each other
// in Gemma 3, and in Gemma 4 only in layers with a window of models whose use_bidirectional_attention is "vision".
//
// Errors: ErrUnsupported for another model_type, kind of layer or rope_type, for latent or linear
// attention of other families, for clip_qkv, for windows of qwen2_moe, for the gates of Kimi K3, and for layers that are bidirectional or
// have sizes of their own. ErrFile for text that is not JSON and for numbers out of range.
func ParseConfig(data []byte) (m ModelConfig, err error) {
	defer op.Annotate(&err, "model config")
	c, err := configjson.Read(data)
	if err != nil {
		return m, err
	}
	type kind struct {
		name            string
		rotates, shares bool
	}
	of := map[kind]LayerConfig{}
	for i := range c.Layers {
		k := kind{c.Kind(i), c.Rotates(i), i >= c.Layers-c.Shared}
		layer, ok := of[k]
		if !ok {
			if layer, err = layerOf(c, i); err != nil {
				return ModelConfig{}, fmt.Errorf("layer %d: %w", i, err)
			}
			of[k] = layer
		}
		layer.Prefix = c.Prefix(i)
		m.Layers = append(m.Layers, layer)
	}
	return m, nil
}

// layerOf returns layer i, without its Prefix.
func layerOf(c *configjson.Config, i int) (l LayerConfig, err error) {
	from, err := c.Layer(i)
	if err != nil {
		return l, err
	}
	if l.Linear = (*LinearConfig)(from.Linear); l.Linear != nil {
		return l, op.As(kernels.ErrFile, l.Linear.check())
	}
	l.Options = kernels.Options{Causal: true, Softcap: from.Softcap}
	if from.Window > 0 {
		l.Options.Window = &kernels.Window{Left: from.Window - 1}
	}
	if from.Scale != 0 {
		l.Options.Scale = &from.Scale
	}
	var rope *RoPE
	if from.Rope != nil {
		if rope, err = ropeOf(from.Rope, from.HeadDim); err != nil {
			return l, err
		}
	}
	if s := from.Latent; s != nil {
		l.Latent = &LatentConfig{Model: from.Model, Heads: from.Heads, QueryRank: s.QueryRank, Rank: s.Rank, NopeDim: s.NopeDim, RopeDim: s.RopeDim, ValueDim: s.ValueDim, RoPE: rope}
		return l, op.As(kernels.ErrFile, l.Latent.check())
	}
	l.MultiHead = MultiHeadConfig{Model: from.Model, Heads: from.Heads, KVHeads: from.KVHeads, HeadDim: from.HeadDim, Bias: from.Bias, RoPE: rope, Sinks: from.Sinks, KeysAsValues: from.KeysAsValues,
		Chunk: from.Chunk, Norm: (*Norm)(from.Norm), Temperature: (*Temperature)(from.Temperature)}
	if from.Shared >= 0 {
		l.SharedWith, l.MultiHead.SharedKeys, l.MultiHead.KeysAsValues = from.Shared, true, false
	}
	if from.Gate {
		l.MultiHead.Gate = GateInQuery
	}
	return l, nil
}

// ropeOf returns the RoPE of heads of a size.
func ropeOf(from *configjson.Rope, headDim int) (*RoPE, error) {
	r := &RoPE{Base: from.Base, Dim: from.Dim, Interleaved: from.Interleaved, Sections: from.Sections, SectionsInterleaved: from.SectionsInterleaved}
	if from.Kind != "default" {
		if !slices.Contains(strings.Fields(scalingKinds), from.Kind) {
			return nil, fmt.Errorf("rope_type is %q, it must be one of default %s: %w", from.Kind, scalingKinds, kernels.ErrUnsupported)
		}
		r.Scaling = &Scaling{}
		if err := json.Unmarshal(from.Text, r.Scaling); err != nil {
			return nil, op.As(kernels.ErrFile, err)
		}
		r.Scaling.Kind, r.Scaling.Factor, r.Scaling.OriginalMaxPositionEmbeddings = ScalingKind(from.Kind), from.Factor, from.Original
		r.Scaling.NoTruncate = from.Truncate != nil && !*from.Truncate
	}
	if _, _, err := r.frequencies(headDim); err != nil {
		return nil, op.As(kernels.ErrFile, err)
	}
	return r, nil
}
