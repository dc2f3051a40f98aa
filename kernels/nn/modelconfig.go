package nn

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/seed90331342/attn/kernels"
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
	// Prefix starts the names of the layer's tensors, for [MultiHeadConfig.LoadSafetensors].
	Prefix string
	// Latent, unless nil, is the shape of a layer with latent attention. MultiHead is zero then.
	Latent *LatentConfig
	// Linear means linear attention, which MultiHead and Options do not describe: they are zero.
	Linear bool
}

// ropeJSON is rope_scaling or rope_parameters, of all layers or with one object for each kind.
type ropeJSON struct {
	Scaling
	OldKind     ScalingKind `json:"type"`
	Truncate    *bool       `json:"truncate"`
	Theta       float64     `json:"rope_theta"`
	Partial     float64     `json:"partial_rotary_factor"`
	Sections    []int       `json:"mrope_section"`
	Interleaved bool        `json:"mrope_interleaved"`
	Full        *ropeJSON   `json:"full_attention"`
	Sliding     *ropeJSON   `json:"sliding_attention"`
}

// configJSON has the fields of a config.json that describe attention.
type configJSON struct {
	Family        string           `json:"model_type"`
	Text          *json.RawMessage `json:"text_config"`
	Model         int              `json:"hidden_size"`
	Layers        int              `json:"num_hidden_layers"`
	Heads         int              `json:"num_attention_heads"`
	KVHeads       int              `json:"num_key_value_heads"`
	HeadDim       int              `json:"head_dim"`
	Bias          bool             `json:"attention_bias"`
	Epsilon       float64          `json:"rms_norm_eps"`
	Theta         float64          `json:"rope_theta"`
	LocalTheta    float64          `json:"rope_local_base_freq"`
	Partial       float64          `json:"partial_rotary_factor"`
	RopeScaling   *ropeJSON        `json:"rope_scaling"`
	RopeParams    *ropeJSON        `json:"rope_parameters"`
	RopeDefault   *ropeJSON        `json:"default rope_parameters"` // in families alone
	Longest       int              `json:"max_position_embeddings"`
	Original      int              `json:"original_max_position_embeddings"`
	Kinds         []string         `json:"layer_types"`
	Window        *int             `json:"sliding_window"`
	UseWindow     bool             `json:"use_sliding_window"`
	FullLayers    int              `json:"max_window_layers"` // so many at the start
	Pattern       int              `json:"sliding_window_pattern"`
	OldPattern    int              `json:"_sliding_window_pattern"`
	FullInterval  int              `json:"full_attention_interval"`
	Rotated       []int            `json:"no_rope_layers"` // 0 for a layer without RoPE
	NoRoPE        int              `json:"no_rope_layer_interval"`
	QueryScalar   float64          `json:"query_pre_attn_scalar"`
	Softcap       *float64         `json:"attn_logit_softcapping"`
	GlobalHeadDim int              `json:"global_head_dim"`
	GlobalKVHeads int              `json:"num_global_key_value_heads"`
	KeysAsValues  bool             `json:"attention_k_eq_v"`
	Shared        int              `json:"num_kv_shared_layers"`
	PerLayer      any              `json:"per_layer_config"`
	Bidirectional any              `json:"use_bidirectional_attention"`
	Rank          int              `json:"kv_lora_rank"`
	QueryRank     *int             `json:"q_lora_rank"`
	NopeDim       int              `json:"qk_nope_head_dim"`
	RopeDim       int              `json:"qk_rope_head_dim"`
	ValueDim      int              `json:"v_head_dim"`
	Interleave    bool             `json:"rope_interleave"`
}

// latentFamilies have latent attention, with the sizes of DeepSeek V3 for fields that are left out.
var latentFamilies = []string{"deepseek_v2", "deepseek_v3", "kimi_k2"}

const latentSizes = `"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_interleave": true`

// families have the fields that the config.json of a family may leave out.
var families = map[string]string{
	"deepseek_v2": `{"num_attention_heads": 32, ` + latentSizes + `}`,
	"deepseek_v3": `{"num_attention_heads": 128, ` + latentSizes + `}`,
	"gemma2":      `{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "attn_logit_softcapping": 50, "sliding_window": 4096, "sliding_window_pattern": 2}`,
	"gemma3": `{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096, "sliding_window_pattern": 6,
		"rope_theta": 1e6, "rope_local_base_freq": 10000}`,
	"gemma4": `{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512, "sliding_window": 512, "sliding_window_pattern": 6,
		"default rope_parameters": {"sliding_attention": {}, "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}}}`,
	"gpt_oss": `{"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "attention_bias": true, "sliding_window": 128, "sliding_window_pattern": 2,
		"rope_theta": 150000, "default rope_parameters": {"rope_type": "yarn", "factor": 32, "truncate": false, "original_max_position_embeddings": 4096}}`,
	"kimi_k2":    `{"num_attention_heads": 64, ` + latentSizes + `}`,
	"llama":      `{}`,
	"mistral":    `{"num_key_value_heads": 8, "sliding_window": 4096}`,
	"olmo2":      `{"rms_norm_eps": 1e-5}`,
	"olmo3":      `{"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4, "rope_theta": 500000}`,
	"phi3":       `{}`,
	"qwen2":      `{"sliding_window": 4096, "max_window_layers": 28}`,
	"qwen3":      `{"head_dim": 128, "sliding_window": 4096, "max_window_layers": 28}`,
	"qwen3_next": `{"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25, "full_attention_interval": 4}`,
	"smollm3":    `{"num_attention_heads": 16, "num_key_value_heads": 4, "rope_theta": 2e6, "no_rope_layer_interval": 4}`,
}

// ParseConfig reads the attention of the layers of a model from its config.json, as transformers
// of Hugging Face defines it, or from the text_config in it. The model_type decides the family:
//
//	llama, mistral, phi3      grouped heads; mistral and phi3 also windows in all layers
//	qwen2, qwen3, qwen3_next  biases; norms; norms, a gate, and linear attention in most layers
//	olmo2, olmo3              norms of whole projections; olmo3 also windows in most layers
//	gemma2, gemma3, gemma4    windows in most layers; a softcap; norms; a RoPE for each kind of layer
//	gpt_oss                   biases, sinks, windows in every other layer
//	smollm3                   some layers without RoPE
//	deepseek_v2, deepseek_v3, kimi_k2  latent attention
//
// Fields that are not in the file have the defaults of transformers. A RoPE with dynamic or
// longrope scaling is that of short sequences until the caller sets [Scaling].Length. Tokens of
// an image, which see each other in Gemma 3 and 4, are up to the caller.
//
// Errors: ErrUnsupported for another model_type, kind of layer or rope_type, for latent attention
// of other families, and for layers that are bidirectional or share keys with others. ErrFile for
// text that is not JSON and for numbers out of range.
func ParseConfig(data []byte) (m ModelConfig, err error) {
	defer op.Annotate(&err, "model config")
	var outer, head, c configJSON
	prefix := "model."
	if err := json.Unmarshal(data, &outer); err != nil {
		return m, op.As(kernels.ErrFile, err)
	}
	if head = outer; outer.Text != nil {
		data, prefix = *outer.Text, "language_model.model."
		head = configJSON{Family: outer.Family}
		if err := json.Unmarshal(data, &head); err != nil {
			return m, op.As(kernels.ErrFile, fmt.Errorf("text_config: %w", err))
		}
	}
	family := strings.TrimSuffix(head.Family, "_text")
	if head.Rank != 0 && !slices.Contains(latentFamilies, family) {
		return m, fmt.Errorf("%s has multi-head latent attention (kv_lora_rank is %d), which is read of %q alone: %w", head.Family, head.Rank, latentFamilies, kernels.ErrUnsupported)
	}
	defaults, ok := families[family]
	if !ok {
		return m, fmt.Errorf("model_type is %q, it must be one of %q: %w", head.Family, slices.Sorted(maps.Keys(families)), kernels.ErrUnsupported)
	}
	if family == "gemma4" && outer.Text != nil {
		prefix = "model.language_model."
	}
	const all = `{"rms_norm_eps": 1e-6, "rope_theta": 10000, "partial_rotary_factor": 1, "query_pre_attn_scalar": 256}`
	for _, text := range [][]byte{[]byte(all), []byte(defaults), data} {
		if err := json.Unmarshal(text, &c); err != nil {
			return m, op.As(kernels.ErrFile, err)
		}
	}
	c.Family = family
	if err := c.check(); err != nil {
		return m, err
	}
	of := map[string]LayerConfig{} // by kind
	for i := range c.Layers {
		kind := c.kind(i)
		layer, ok := of[kind]
		if !ok {
			if layer, err = c.layer(kind); err != nil {
				return m, fmt.Errorf("layer %d: %w", i, err)
			}
			of[kind] = layer
		}
		if !c.rotates(i) {
			layer.MultiHead.RoPE = nil
		}
		layer.Prefix = fmt.Sprintf("%slayers.%d.%s", prefix, i, layer.Prefix)
		m.Layers = append(m.Layers, layer)
	}
	return m, nil
}

// check checks c and sets what follows from other fields.
func (c *configJSON) check() error {
	if c.PerLayer != nil || c.Shared != 0 || c.Bidirectional == true || c.Bidirectional == "all" {
		return fmt.Errorf("per_layer_config, num_kv_shared_layers (%d) or use_bidirectional_attention (%v) is set: layers with sizes of their own, with keys of other layers or without causality are not read: %w",
			c.Shared, c.Bidirectional, kernels.ErrUnsupported)
	}
	if strings.HasPrefix(c.Family, "qwen") && !c.UseWindow || c.Family == "llama" || c.Family == "olmo2" || c.Family == "smollm3" && !c.UseWindow {
		c.Window = nil
	}
	c.Bias = c.Bias || c.Family == "qwen2" // of q, k and v
	c.Pattern, c.KVHeads = cmp.Or(c.OldPattern, c.Pattern), cmp.Or(c.KVHeads, c.Heads)
	if c.HeadDim == 0 && c.Heads > 0 {
		c.HeadDim = c.Model / c.Heads
	}
	c.GlobalHeadDim, c.GlobalKVHeads = cmp.Or(c.GlobalHeadDim, c.HeadDim), cmp.Or(c.GlobalKVHeads, c.KVHeads)
	const size = 1 << 20
	for _, f := range []struct {
		name           string
		n, least, most float64
	}{
		{"num_hidden_layers", float64(c.Layers), 1, 4096},
		{"the number of layer_types", float64(cmp.Or(len(c.Kinds), c.Layers)), float64(c.Layers), float64(c.Layers)},
		{"the number of no_rope_layers", float64(cmp.Or(len(c.Rotated), c.Layers)), float64(c.Layers), size},
		{"hidden_size", float64(c.Model), 1, size},
		{"num_attention_heads", float64(c.Heads), 1, size},
		{"num_key_value_heads", float64(c.KVHeads), 1, float64(c.Heads)},
		{"num_global_key_value_heads", float64(c.GlobalKVHeads), 1, float64(c.Heads)},
		{"head_dim", float64(c.HeadDim), 1, size},
		{"global_head_dim", float64(c.GlobalHeadDim), 0, size},
		{"sliding_window", float64(*cmp.Or(c.Window, new(1))), 1, maxLength},
		{"rms_norm_eps", c.Epsilon, 0, 1},
		{"query_pre_attn_scalar", c.QueryScalar, 1, size},
		{"attn_logit_softcapping", *cmp.Or(c.Softcap, new(0.0)), 0, size},
	} {
		if f.n < f.least || f.n > f.most {
			return fmt.Errorf("%s is %v, it must be %v to %v: %w", f.name, f.n, f.least, f.most, kernels.ErrFile)
		}
	}
	if c.Heads%c.KVHeads != 0 || c.Heads%c.GlobalKVHeads != 0 {
		return fmt.Errorf("num_key_value_heads is %d, num_global_key_value_heads %d: they must divide num_attention_heads, %d: %w", c.KVHeads, c.GlobalKVHeads, c.Heads, kernels.ErrFile)
	}
	return nil
}

// rotates reports whether layer i has a RoPE.
func (c *configJSON) rotates(i int) bool {
	switch {
	case c.Family != "smollm3":
		return true
	case c.Rotated != nil:
		return c.Rotated[i] != 0
	}
	return c.NoRoPE == 0 || (i+1)%c.NoRoPE != 0
}

const fullAttention, slidingAttention, linearAttention = "full_attention", "sliding_attention", "linear_attention"

// kind returns the kind of layer i.
func (c *configJSON) kind(i int) string {
	switch {
	case c.Family == "gemma4" && i == c.Layers-1:
		return fullAttention // whatever layer_types has
	case c.Kinds != nil:
		return c.Kinds[i]
	case c.FullInterval > 0 && (i+1)%c.FullInterval != 0:
		return linearAttention
	case c.Window == nil || i < c.FullLayers || c.Pattern > 0 && (i+1)%c.Pattern == 0 || c.Family == "smollm3" && c.rotates(i):
		return fullAttention
	}
	return slidingAttention
}

// layer returns a layer of a kind. Its Prefix lacks that of the model.
func (c *configJSON) layer(kind string) (l LayerConfig, err error) {
	l = LayerConfig{Prefix: "self_attn.", Options: kernels.Options{Causal: true}}
	l.MultiHead = MultiHeadConfig{Model: c.Model, Heads: c.Heads, KVHeads: c.KVHeads, HeadDim: c.HeadDim, Bias: c.Bias}
	switch kind {
	case linearAttention:
		return LayerConfig{Prefix: "linear_attn.", Linear: true}, nil
	case slidingAttention:
		if c.Window == nil {
			return l, fmt.Errorf("it is %s, but sliding_window is not set: %w", kind, kernels.ErrFile)
		}
		l.Options.Window = &kernels.Window{Left: *c.Window - 1} // sliding_window counts the row itself
	case fullAttention:
		if c.Family == "gemma4" {
			l.MultiHead.HeadDim, l.MultiHead.KeysAsValues = c.GlobalHeadDim, c.KeysAsValues
		}
		if l.MultiHead.KeysAsValues {
			l.MultiHead.KVHeads = c.GlobalKVHeads
		}
	default:
		return l, fmt.Errorf("layer_types has %q, it must be one of %s, %s and %s: %w", kind, fullAttention, slidingAttention, linearAttention, kernels.ErrUnsupported)
	}
	if slices.Contains(latentFamilies, c.Family) {
		l.MultiHead = MultiHeadConfig{}
		l.Latent = &LatentConfig{Model: c.Model, Heads: c.Heads, QueryRank: *cmp.Or(c.QueryRank, new(0)), Rank: c.Rank, NopeDim: c.NopeDim, RopeDim: c.RopeDim, ValueDim: c.ValueDim}
		if l.Latent.RoPE, err = c.rope(kind, c.RopeDim); err != nil {
			return l, err
		}
		l.Latent.RoPE.Interleaved = c.Interleave
		return l, op.As(kernels.ErrFile, l.Latent.check())
	}
	norm := &Norm{Norm: kernels.Norm{Epsilon: c.Epsilon}}
	switch c.Family {
	case "qwen3":
		l.MultiHead.Norm = norm
	case "qwen3_next":
		norm.PlusOne = true
		l.MultiHead.Norm, l.MultiHead.Gate = norm, GateInQuery
	case "olmo2", "olmo3":
		norm.Projection = true
		l.MultiHead.Norm = norm
	case "gemma2":
		l.Options.Scale, l.Options.Softcap = new(1/math.Sqrt(c.QueryScalar)), *cmp.Or(c.Softcap, new(0.0))
	case "gemma3":
		norm.PlusOne = true
		l.MultiHead.Norm = norm
		l.Options.Scale, l.Options.Softcap = new(1/math.Sqrt(c.QueryScalar)), *cmp.Or(c.Softcap, new(0.0))
	case "gemma4":
		norm.Values = true
		l.MultiHead.Norm, l.Options.Scale = norm, new(1.0)
	case "gpt_oss":
		l.MultiHead.Sinks = true
	}
	l.MultiHead.RoPE, err = c.rope(kind, l.MultiHead.HeadDim)
	return l, err
}

// rope returns the RoPE of the layers of a kind.
func (c *configJSON) rope(kind string, headDim int) (*RoPE, error) {
	p, theta := cmp.Or(c.RopeScaling, c.RopeParams, c.RopeDefault, &ropeJSON{}), c.Theta
	switch flat := p.Full == nil && p.Sliding == nil; {
	case kind == slidingAttention && flat && (c.Family == "gemma3" || c.Family == "olmo3"):
		p = nil // one object is that of full layers
	case kind == slidingAttention && !flat:
		p = p.Sliding
	case !flat:
		p = p.Full
	}
	if kind == slidingAttention {
		theta = cmp.Or(c.LocalTheta, theta)
	}
	p = cmp.Or(p, &ropeJSON{})
	part, s := cmp.Or(p.Partial, c.Partial), p.Scaling
	r := &RoPE{Base: cmp.Or(p.Theta, theta), Dim: int(part * float64(headDim)), Sections: p.Sections, SectionsInterleaved: p.Interleaved}
	s.NoTruncate = p.Truncate != nil && !*p.Truncate
	switch s.Kind = cmp.Or(s.Kind, p.OldKind, "default"); s.Kind {
	case ScalingProportional:
		r.Dim = 2 * int(part*float64(headDim)/2)
	case ScalingDynamic:
		s.OriginalMaxPositionEmbeddings = c.Longest
	case ScalingLlama3, ScalingYaRN, ScalingLongRoPE, "su":
		s.OriginalMaxPositionEmbeddings = cmp.Or(c.Original, s.OriginalMaxPositionEmbeddings, c.Longest)
		s.Factor = cmp.Or(s.Factor, float64(c.Longest)/float64(s.OriginalMaxPositionEmbeddings))
		if s.Kind == "su" || s.Kind == ScalingYaRN && c.Family == "phi3" {
			s.Kind = ScalingLongRoPE // these are older names
		}
	case ScalingLinear, "default":
	default:
		return nil, fmt.Errorf("rope_type is %q, it must be one of default %s: %w", s.Kind, scalingKinds, kernels.ErrUnsupported)
	}
	if !(part > 0 && part <= 1) || r.Dim == 0 {
		return nil, fmt.Errorf("partial_rotary_factor is %v, it must be up to 1 and leave 2 of %d elements: %w", part, headDim, kernels.ErrFile)
	}
	if r.Dim == headDim {
		r.Dim = 0
	}
	if s.Kind != "default" {
		r.Scaling = &s
	}
	if _, err := r.frequencies(headDim); err != nil {
		return nil, op.As(kernels.ErrFile, err)
	}
	return r, nil
}
