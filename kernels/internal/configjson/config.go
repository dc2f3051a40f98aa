// Package configjson reads the attention of a model from its config.json, as transformers of Hugging Face defines it.
package configjson

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/internal/op"
)

// Config has the fields of a config.json that describe attention, with the defaults of the family.
type Config struct {
	Family        string           `json:"model_type"` // without _text
	Text          *json.RawMessage `json:"text_config"`
	Model         int              `json:"hidden_size"`
	Layers        int              `json:"num_hidden_layers"`
	Heads         int              `json:"num_attention_heads"`
	KVHeads       int              `json:"num_key_value_heads"`
	HeadDim       int              `json:"head_dim"`
	Bias          bool             `json:"attention_bias"`
	InputBias     bool             `json:"qkv_bias"`
	QKNorm        bool             `json:"use_qk_norm"`
	Chunk         *int             `json:"attention_chunk_size"`
	Tuning        any              `json:"attn_temperature_tuning"` // false, true, or a number
	TuningScale   float64          `json:"attn_scale"`
	TuningFloor   int              `json:"floor_scale"`
	Clip          *float64         `json:"clip_qkv"`
	Epsilon       float64          `json:"rms_norm_eps"`
	LayerEpsilon  float64          `json:"layer_norm_eps"`
	Theta         float64          `json:"rope_theta"`
	LocalTheta    float64          `json:"rope_local_base_freq"`
	Partial       float64          `json:"partial_rotary_factor"`
	RopeScaling   *Rope            `json:"rope_scaling"`
	RopeParams    *Rope            `json:"rope_parameters"`
	RopeDefault   *Rope            `json:"default rope_parameters"` // in families alone
	Longest       int              `json:"max_position_embeddings"`
	Original      int              `json:"original_max_position_embeddings"`
	Kinds         []string         `json:"layer_types"`
	Window        *int             `json:"sliding_window"`
	UseWindow     bool             `json:"use_sliding_window"`
	FullLayers    int              `json:"max_window_layers"` // so many at the start, which the code of qwen3_moe does not read
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
	NoPE          bool             `json:"mla_use_nope"` // latent attention without RoPE
	OutputGate    bool             `json:"mla_use_output_gate"`
	KeyHeads      int              `json:"linear_num_key_heads"`
	ValueHeads    int              `json:"linear_num_value_heads"`
	LinearKeyDim  int              `json:"linear_key_head_dim"`
	LinearDim     int              `json:"linear_value_head_dim"`
	Conv          int              `json:"linear_conv_kernel_dim"`
	Kimi          struct {
		Linear     []int    `json:"kda_layers"` // from 1
		Full       []int    `json:"full_attn_layers"`
		Heads      int      `json:"num_heads"`
		Dim        int      `json:"head_dim"`
		Conv       int      `json:"short_conv_kernel_size"`
		LowerBound *float64 `json:"gate_lower_bound"`
		FullGate   bool     `json:"use_full_rank_gate"`
	} `json:"linear_attn_config"`

	// What no file has, in families alone.
	Own struct {
		Like        string // the family whose layers it has, unless empty
		Nested      string // how names of tensors begin under a text_config
		Norm        *Norm  // of queries and keys
		Scale       float64
		Sinks, Gate bool
		Interleaved bool // the pairs of its RoPE
	} `json:"of the family"`

	prefix string // of the names of tensors
}

const (
	// What the families whose names begin alike have of their own.
	gemmaOwn = `"of the family": {"Nested": "model.language_model.", "Norm": {"Values": true}, "Scale": 1}`
	qwenOwn  = `"of the family": {"Nested": "model.language_model.", "Norm": {"PlusOne": true}, "Gate": true}`
	olmoOwn  = `"of the family": {"Norm": {"Projection": true}}`

	latentSizes = `"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_interleave": true`
	qwenSizes   = `"num_attention_heads": 16, "head_dim": 256, "partial_rotary_factor": 0.25, "full_attention_interval": 4,
		"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, ` + qwenOwn
	qwenVLSizes = `"of the family": {"Like": "qwen2", "Nested": "model."}, "qkv_bias": true, "num_attention_heads": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": 4096, "max_window_layers": 80`
)

// families have the fields that the config.json of a family may leave out. Those with latent attention have the
// sizes of DeepSeek V3.
var families = map[string]string{
	"cohere":      `{"of the family": {"Norm": {"Mean": true}, "Interleaved": true}, "num_attention_heads": 64, "rope_theta": 500000, "layer_norm_eps": 1e-5}`,
	"cohere2":     `{"of the family": {"Interleaved": true}, "num_attention_heads": 64, "sliding_window": 4096, "sliding_window_pattern": 4}`,
	"deepseek_v2": `{"num_attention_heads": 32, "q_lora_rank": 1536, ` + latentSizes + `}`,
	"deepseek_v3": `{"num_attention_heads": 128, "q_lora_rank": 1536, ` + latentSizes + `}`,
	"gemma2":      `{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "attn_logit_softcapping": 50, "sliding_window": 4096, "sliding_window_pattern": 2}`,
	"gemma3": `{"of the family": {"Norm": {"PlusOne": true}}, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096, "sliding_window_pattern": 6,
		"rope_theta": 1e6, "rope_local_base_freq": 10000}`,
	"gemma3n": `{` + gemmaOwn + `, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "sliding_window": 512, "sliding_window_pattern": 5,
		"rope_theta": 1e6, "rope_local_base_freq": 10000, "num_kv_shared_layers": 15}`,
	"gemma4": `{` + gemmaOwn + `, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512, "sliding_window": 512, "sliding_window_pattern": 6,
		"default rope_parameters": {"sliding_attention": {}, "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}}}`,
	"gpt_oss": `{"of the family": {"Sinks": true}, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "attention_bias": true, "sliding_window": 128, "sliding_window_pattern": 2,
		"rope_theta": 150000, "default rope_parameters": {"rope_type": "yarn", "factor": 32, "truncate": false, "original_max_position_embeddings": 4096}}`,
	"kimi_k2":     `{"num_attention_heads": 64, "q_lora_rank": 1536, ` + latentSizes + `}`,
	"kimi_linear": `{"num_attention_heads": 32, "rms_norm_eps": 1e-5, "full_attention_interval": 4, ` + latentSizes + `, "linear_attn_config": {"num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4}}`,
	"llama":       `{}`,
	"llama4": `{"of the family": {"Norm": {"Weightless": true, "AfterRoPE": true}, "Interleaved": true}, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500000, "use_qk_norm": true,
		"no_rope_layer_interval": 4, "attention_chunk_size": 8192, "attn_temperature_tuning": true, "attn_scale": 0.1, "floor_scale": 8192}`,
	"mistral":     `{"num_key_value_heads": 8, "sliding_window": 4096}`,
	"mixtral":     `{"num_key_value_heads": 8, "rope_theta": 1e6}`,
	"olmo2":       `{` + olmoOwn + `, "rms_norm_eps": 1e-5}`,
	"olmoe":       `{` + olmoOwn + `, "rms_norm_eps": 1e-5, "num_attention_heads": 16}`,
	"olmo3":       `{` + olmoOwn + `, "rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4}`,
	"phi3":        `{"original_max_position_embeddings": 4096}`,
	"qwen2":       `{"qkv_bias": true, "sliding_window": 4096, "max_window_layers": 28}`,
	"qwen2_vl":    `{` + qwenVLSizes + `}`,
	"qwen2_5_vl":  `{` + qwenVLSizes + `}`,
	"qwen2_moe":   `{"num_attention_heads": 16, "num_key_value_heads": 16, "qkv_bias": true}`,
	"qwen3":       `{"of the family": {"Norm": {}}, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28}`,
	"qwen3_5":     `{"num_key_value_heads": 4, ` + qwenSizes + `}`,
	"qwen3_5_moe": `{"num_key_value_heads": 2, ` + qwenSizes + `}`,
	"qwen3_moe":   `{"of the family": {"Norm": {}}, "num_attention_heads": 32, "num_key_value_heads": 4, "sliding_window": 4096}`,
	"qwen3_vl": `{"of the family": {"Like": "qwen3", "Nested": "model.language_model.", "Norm": {}}, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "rope_theta": 500000,
		"default rope_parameters": {"mrope_section": [24, 20, 20]}}`,
	"qwen3_vl_moe": `{"of the family": {"Like": "qwen3_moe", "Nested": "model.language_model.", "Norm": {}}, "num_attention_heads": 16, "num_key_value_heads": 16, "rope_theta": 500000,
		"default rope_parameters": {"mrope_section": [24, 20, 20]}}`,
	"qwen3_next": `{"num_key_value_heads": 2, ` + qwenSizes + `}`,
	"smollm3":    `{"num_attention_heads": 16, "num_key_value_heads": 4, "rope_theta": 2e6, "no_rope_layer_interval": 4}`,
}

// latent reports whether a family has latent attention.
func latent(family string) bool { return strings.Contains(families[family], latentSizes) }

// Read reads a config.json, or the text_config in it, and checks it.
func Read(data []byte) (*Config, error) {
	var outer Config
	if err := json.Unmarshal(data, &outer); err != nil {
		return nil, op.As(kernels.ErrFile, err)
	}
	c, head := Config{}, outer
	if outer.Text != nil {
		data, head = *outer.Text, Config{Family: outer.Family}
		if err := json.Unmarshal(data, &head); err != nil {
			return nil, op.As(kernels.ErrFile, fmt.Errorf("text_config: %w", err))
		}
	}
	family := strings.TrimSuffix(head.Family, "_text")
	defaults, ok := families[family]
	if head.Rank != 0 && !latent(family) {
		list := slices.DeleteFunc(slices.Sorted(maps.Keys(families)), func(f string) bool { return !latent(f) })
		return nil, fmt.Errorf("%s has multi-head latent attention (kv_lora_rank is %d), which is read of %q alone: %w", head.Family, head.Rank, list, kernels.ErrUnsupported)
	}
	if !ok {
		return nil, fmt.Errorf("model_type is %q, it must be one of %q: %w", head.Family, slices.Sorted(maps.Keys(families)), kernels.ErrUnsupported)
	}
	const all = `{"rms_norm_eps": 1e-6, "rope_theta": 10000, "partial_rotary_factor": 1, "query_pre_attn_scalar": 256, "of the family": {"Nested": "language_model.model."}}`
	for _, text := range [][]byte{[]byte(all), []byte(defaults), data} {
		if err := json.Unmarshal(text, &c); err != nil {
			return nil, op.As(kernels.ErrFile, err)
		}
	}
	c.Family, c.prefix = cmp.Or(c.Own.Like, family), "model."
	if outer.Text != nil {
		c.prefix = c.Own.Nested
	}
	return &c, c.check()
}

// check checks c and sets what follows from other fields.
func (c *Config) check() error {
	if shares := c.Family == "gemma4" || c.Family == "gemma3n"; c.PerLayer != nil || c.Shared != 0 && !shares || c.Bidirectional == true || c.Bidirectional == "all" {
		return fmt.Errorf("per_layer_config, num_kv_shared_layers (%d) of %s or use_bidirectional_attention (%v) is set: layers with sizes of their own or without causality are not read, and keys of other layers of gemma3n and gemma4 alone: %w",
			c.Shared, c.Family, c.Bidirectional, kernels.ErrUnsupported)
	}
	if c.Family == "kimi_linear" && (!c.NoPE || c.OutputGate || c.Kimi.FullGate) {
		return fmt.Errorf("mla_use_nope is %v, mla_use_output_gate %v and use_full_rank_gate %v: layers of kimi_linear are read with true, false and false: %w",
			c.NoPE, c.OutputGate, c.Kimi.FullGate, kernels.ErrUnsupported)
	}
	if c.Clip != nil || c.Family == "qwen2_moe" && c.UseWindow {
		return fmt.Errorf("clip_qkv is set, or use_sliding_window of qwen2_moe: clipped projections and these windows are not read: %w", kernels.ErrUnsupported)
	}
	if optional := strings.HasPrefix(c.Family, "qwen") || c.Family == "smollm3"; optional && !c.UseWindow || slices.Contains([]string{"cohere", "llama", "olmo2", "olmoe"}, c.Family) {
		c.Window = nil
	}
	c.Bias = c.Bias || c.InputBias // of q, k and v
	c.Pattern, c.KVHeads, c.HeadDim = cmp.Or(c.OldPattern, c.Pattern), cmp.Or(c.KVHeads, c.Heads), cmp.Or(c.HeadDim, c.Model/max(c.Heads, 1))
	c.GlobalHeadDim, c.GlobalKVHeads = cmp.Or(c.GlobalHeadDim, c.HeadDim), cmp.Or(c.GlobalKVHeads, c.KVHeads)
	const size = 1 << 20
	for _, f := range []struct {
		name           string
		n, least, most float64
	}{
		{"num_hidden_layers", float64(c.Layers), 1, 4096},
		{"the number of layer_types", float64(cmp.Or(len(c.Kinds), c.Layers)), float64(c.Layers), float64(c.Layers)},
		{"the number of kda_layers and full_attn_layers", float64(cmp.Or(len(c.Kimi.Linear)+len(c.Kimi.Full), c.Layers)), float64(c.Layers), float64(c.Layers)},
		{"the number of no_rope_layers", float64(cmp.Or(len(c.Rotated), c.Layers)), float64(c.Layers), size},
		{"num_kv_shared_layers", float64(c.Shared), 0, float64(c.Layers - 1)},
		{"hidden_size", float64(c.Model), 1, size},
		{"num_attention_heads", float64(c.Heads), 1, size},
		{"num_key_value_heads", float64(c.KVHeads), 1, float64(c.Heads)},
		{"num_global_key_value_heads", float64(c.GlobalKVHeads), 1, float64(c.Heads)},
		{"head_dim", float64(c.HeadDim), 1, size},
		{"global_head_dim", float64(c.GlobalHeadDim), 0, size},
		{"attention_chunk_size", float64(*cmp.Or(c.Chunk, new(1))), 1, 1 << 30},
		{"attn_scale", c.TuningScale, 0, size},
		{"floor_scale", float64(cmp.Or(c.TuningFloor, 1)), 1, 1 << 30},
		{"sliding_window", float64(*cmp.Or(c.Window, new(1))), 1, 1 << 30},
		{"rms_norm_eps", c.Epsilon, 0, 1},
		{"layer_norm_eps", c.LayerEpsilon, 0, 1},
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
