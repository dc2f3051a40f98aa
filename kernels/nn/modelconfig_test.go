package nn_test

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/kernels/nn"
)

// norm returns a norm of queries and keys with an epsilon.
func norm(epsilon float64, change func(n *nn.Norm)) *nn.Norm {
	n := &nn.Norm{Norm: kernels.Norm{Epsilon: epsilon}}
	if change != nil {
		change(n)
	}
	return n
}

func plusOne(n *nn.Norm)    { n.PlusOne = true }
func projection(n *nn.Norm) { n.Projection = true }
func values(n *nn.Norm)     { n.Values = true }
func mean(n *nn.Norm)       { n.Mean = true }
func afterRoPE(n *nn.Norm)  { n.Weightless, n.AfterRoPE = true, true }

// causal returns options with a window of so many tokens, 0 for none, and a scale unless it is 0.
func causal(window int, scale, softcap float64) kernels.Options {
	o := kernels.Options{Causal: true, Softcap: softcap}
	if window > 0 {
		o.Window = &kernels.Window{Left: window - 1}
	}
	if scale != 0 {
		o.Scale = &scale
	}
	return o
}

// config returns the text of a config.json of testdata.
func config(t *testing.T, name string) string {
	t.Helper()
	return string(must.Get(os.ReadFile(filepath.Join("testdata", "configs", name+".json")))(t))
}

// TestParseConfig compares layers with what the published code of the models computes. The files have the
// published values of the models that they are named after; the other texts are the parts that matter.
func TestParseConfig(t *testing.T) {
	yarn := &nn.RoPE{Base: 150000, Scaling: &nn.Scaling{Kind: nn.ScalingYaRN, Factor: 32, OriginalMaxPositionEmbeddings: 4096, BetaFast: 32, BetaSlow: 1, NoTruncate: true}}
	defaultYarn := &nn.RoPE{Base: 150000, Scaling: &nn.Scaling{Kind: nn.ScalingYaRN, Factor: 32, OriginalMaxPositionEmbeddings: 4096, NoTruncate: true}}
	local := &nn.RoPE{Base: 10000}
	gptOSS := nn.MultiHeadConfig{Model: 2880, Heads: 64, KVHeads: 8, HeadDim: 64, Bias: true, Sinks: true, RoPE: yarn}
	gemma3 := nn.MultiHeadConfig{Model: 2560, Heads: 8, KVHeads: 4, HeadDim: 256, Norm: norm(1e-6, plusOne), RoPE: local}
	gemma3Full := gemma3
	gemma3Full.RoPE = &nn.RoPE{Base: 1e6, Scaling: &nn.Scaling{Kind: nn.ScalingLinear, Factor: 8}}
	gemma4 := nn.MultiHeadConfig{Model: 5376, Heads: 32, KVHeads: 16, HeadDim: 256, Norm: norm(1e-6, values), RoPE: local}
	gemma4Full := nn.MultiHeadConfig{Model: 5376, Heads: 32, KVHeads: 4, HeadDim: 512, Norm: norm(1e-6, values), KeysAsValues: true,
		RoPE: &nn.RoPE{Base: 1e6, Dim: 128, Scaling: &nn.Scaling{Kind: nn.ScalingProportional}}}
	gemma3n := nn.MultiHeadConfig{Model: 2048, Heads: 8, KVHeads: 2, HeadDim: 256, Norm: norm(1e-6, values), RoPE: local}
	full, shared := func(c *nn.MultiHeadConfig) { c.RoPE = &nn.RoPE{Base: 1e6} }, func(c *nn.MultiHeadConfig) { c.SharedKeys = true }
	qwen := &nn.LinearConfig{Model: 2048, KeyHeads: 16, ValueHeads: 32, KeyDim: 128, ValueDim: 128, Conv: 4, Gate: kernels.SiLU, Epsilon: 1e-6}
	qwen35 := &nn.LinearConfig{Model: 5120, KeyHeads: 16, ValueHeads: 48, KeyDim: 128, ValueDim: 128, Conv: 4, Gate: kernels.SiLU, Epsilon: 1e-6}
	kimi := &nn.LinearConfig{Model: 2304, KeyHeads: 32, ValueHeads: 32, KeyDim: 128, ValueDim: 128, Conv: 4, Channels: true, Rank: 128, Gate: kernels.Sigmoid, Epsilon: 1e-5}
	bounded := &nn.LinearConfig{Model: 64, KeyHeads: 2, ValueHeads: 2, KeyDim: 128, ValueDim: 128, Conv: 3, Channels: true, Rank: 128, LowerBound: -5, Epsilon: 1e-5}
	small := nn.MultiHeadConfig{Model: 64, Heads: 4, KVHeads: 2, HeadDim: 16, RoPE: local}
	with := func(c nn.MultiHeadConfig, change func(c *nn.MultiHeadConfig)) nn.MultiHeadConfig {
		change(&c)
		return c
	}
	const sizes = `"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2`
	qwenVL := nn.MultiHeadConfig{Model: 2048, Heads: 32, KVHeads: 4, HeadDim: 128, Norm: norm(1e-6, nil), RoPE: &nn.RoPE{Base: 5e6, Sections: []int{24, 20, 20}, SectionsInterleaved: true}}
	for _, c := range []struct {
		name, text, prefix string
		layers             int
		want               map[int]nn.LayerConfig // without Prefix
	}{
		{"Qwen3 0.6B", config(t, "qwen3-0.6b"), "model.", 28, map[int]nn.LayerConfig{
			0:  {MultiHead: nn.MultiHeadConfig{Model: 1024, Heads: 16, KVHeads: 8, HeadDim: 128, Norm: norm(1e-6, nil), RoPE: &nn.RoPE{Base: 1e6}}, Options: causal(0, 0, 0)},
			27: {MultiHead: nn.MultiHeadConfig{Model: 1024, Heads: 16, KVHeads: 8, HeadDim: 128, Norm: norm(1e-6, nil), RoPE: &nn.RoPE{Base: 1e6}}, Options: causal(0, 0, 0)}}},
		{"Gemma 3 4B", config(t, "gemma-3-4b"), "language_model.model.", 34, map[int]nn.LayerConfig{
			0: {MultiHead: gemma3, Options: causal(1024, 1./16, 0)}, 4: {MultiHead: gemma3, Options: causal(1024, 1./16, 0)},
			5: {MultiHead: gemma3Full, Options: causal(0, 1./16, 0)}, 33: {MultiHead: gemma3, Options: causal(1024, 1./16, 0)}}},
		{"gpt-oss 20b", config(t, "gpt-oss-20b"), "model.", 24, map[int]nn.LayerConfig{
			0: {MultiHead: gptOSS, Options: causal(128, 0, 0)}, 1: {MultiHead: gptOSS, Options: causal(0, 0, 0)}, 23: {MultiHead: gptOSS, Options: causal(0, 0, 0)}}},
		{"Llama 3.1 8B", config(t, "llama-3.1-8b"), "model.", 32, map[int]nn.LayerConfig{
			0: {MultiHead: nn.MultiHeadConfig{Model: 4096, Heads: 32, KVHeads: 8, HeadDim: 128, RoPE: &nn.RoPE{Base: 500000,
				Scaling: &nn.Scaling{Kind: nn.ScalingLlama3, Factor: 8, OriginalMaxPositionEmbeddings: 8192, LowFreqFactor: 1, HighFreqFactor: 4}}}, Options: causal(0, 0, 0)}}},
		{"OLMo 2 7B", config(t, "olmo-2-7b"), "model.", 32, map[int]nn.LayerConfig{
			0: {MultiHead: nn.MultiHeadConfig{Model: 4096, Heads: 32, KVHeads: 32, HeadDim: 128, Norm: norm(1e-6, projection), RoPE: &nn.RoPE{Base: 500000}}, Options: causal(0, 0, 0)}}},
		{"Qwen3-Next 80B", config(t, "qwen3-next-80b-a3b"), "model.", 48, map[int]nn.LayerConfig{
			0: {Linear: qwen}, 2: {Linear: qwen}, 4: {Linear: qwen},
			3: {MultiHead: nn.MultiHeadConfig{Model: 2048, Heads: 16, KVHeads: 2, HeadDim: 256, Norm: norm(1e-6, plusOne), Gate: nn.GateInQuery,
				RoPE: &nn.RoPE{Base: 1e7, Dim: 64}}, Options: causal(0, 0, 0)}}},
		{"Qwen3.5 27B", `{"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text", "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 24, "linear_num_value_heads": 48,
			"layer_types": [` + strings.Repeat(`"linear_attention", "linear_attention", "linear_attention", "full_attention", `, 15) + `"linear_attention", "linear_attention", "linear_attention", "full_attention"],
			"rope_parameters": {"mrope_interleaved": true, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"}}}`, "model.language_model.", 64, map[int]nn.LayerConfig{
			62: {Linear: qwen35}, 63: {MultiHead: nn.MultiHeadConfig{Model: 5120, Heads: 24, KVHeads: 4, HeadDim: 256, Norm: norm(1e-6, plusOne), Gate: nn.GateInQuery,
				RoPE: &nn.RoPE{Base: 1e7, Dim: 64, Sections: []int{11, 11, 10}, SectionsInterleaved: true}}, Options: causal(0, 0, 0)}}},
		{"Qwen3.5 35B-A3B, defaults", `{"model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 4}`, "model.", 4, map[int]nn.LayerConfig{
			2: {Linear: qwen}, 3: {MultiHead: nn.MultiHeadConfig{Model: 2048, Heads: 16, KVHeads: 2, HeadDim: 256, Norm: norm(1e-6, plusOne), Gate: nn.GateInQuery, RoPE: &nn.RoPE{Base: 10000, Dim: 64}}, Options: causal(0, 0, 0)}}},
		{"Qwen2.5-VL 7B", `{"model_type": "qwen2_5_vl", "hidden_size": 3584, "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
			"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "rope_theta": 1000000.0, "sliding_window": 32768, "use_sliding_window": false, "vision_config": {"hidden_size": 1280}}`, "model.", 28, map[int]nn.LayerConfig{
			27: {MultiHead: nn.MultiHeadConfig{Model: 3584, Heads: 28, KVHeads: 4, HeadDim: 128, Bias: true, RoPE: &nn.RoPE{Base: 1e6, Sections: []int{16, 24, 24}}}, Options: causal(0, 0, 0)}}},
		{"Qwen2-VL with a text_config, and windows", `{"model_type": "qwen2_vl", "text_config": {"model_type": "qwen2_vl_text", ` + sizes + `, "use_sliding_window": true, "max_window_layers": 2,
			"rope_parameters": {"type": "mrope", "rope_type": "default", "mrope_section": [4, 2, 2]}}}`, "model.", 4, map[int]nn.LayerConfig{
			1: {MultiHead: with(small, func(c *nn.MultiHeadConfig) { c.Bias, c.RoPE = true, &nn.RoPE{Base: 1e6, Sections: []int{4, 2, 2}} }), Options: causal(0, 0, 0)},
			2: {MultiHead: with(small, func(c *nn.MultiHeadConfig) { c.Bias, c.RoPE = true, &nn.RoPE{Base: 1e6, Sections: []int{4, 2, 2}} }), Options: causal(4096, 0, 0)}}},
		{"Qwen3-VL 30B-A3B", `{"model_type": "qwen3_vl_moe", "text_config": {"attention_bias": false, "head_dim": 128, "hidden_size": 2048, "model_type": "qwen3_vl_moe_text", "num_attention_heads": 32, "num_hidden_layers": 48,
			"num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_scaling": {"mrope_interleaved": true, "mrope_section": [24, 20, 20], "rope_type": "default"}, "rope_theta": 5000000}}`, "model.language_model.", 48, map[int]nn.LayerConfig{
			47: {MultiHead: qwenVL, Options: causal(0, 0, 0)}}},
		{"Qwen3-VL, defaults", `{"model_type": "qwen3_vl", "text_config": {"model_type": "qwen3_vl_text", "hidden_size": 4096, "num_hidden_layers": 32}}`, "model.language_model.", 32, map[int]nn.LayerConfig{
			0: {MultiHead: with(qwenVL, func(c *nn.MultiHeadConfig) {
				c.Model, c.KVHeads, c.RoPE = 4096, 32, &nn.RoPE{Base: 500000, Sections: []int{24, 20, 20}, SectionsInterleaved: true}
			}), Options: causal(0, 0, 0)}}},
		{"Kimi Linear 48B-A3B", `{"model_type": "kimi_linear", "head_dim": 72, "hidden_size": 2304, "kv_lora_rank": 512, "linear_attn_config": {"full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128,
			"kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26], "num_heads": 32, "short_conv_kernel_size": 4}, "mla_use_nope": true, "num_attention_heads": 32, "num_hidden_layers": 27,
			"num_key_value_heads": 32, "q_lora_rank": null, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 10000.0, "v_head_dim": 128}`, "model.", 27, map[int]nn.LayerConfig{
			0: {Linear: kimi}, 2: {Linear: kimi}, 25: {Linear: kimi}, 3: {Options: causal(0, 0, 0), Latent: &nn.LatentConfig{Model: 2304, Heads: 32, Rank: 512, NopeDim: 128, RopeDim: 64, ValueDim: 128}},
			26: {Options: causal(0, 0, 0), Latent: &nn.LatentConfig{Model: 2304, Heads: 32, Rank: 512, NopeDim: 128, RopeDim: 64, ValueDim: 128}}}},
		{"Kimi Linear with a bound", `{"model_type": "kimi_linear", ` + sizes + `, "mla_use_nope": true, "linear_attn_config": {"num_heads": 2, "short_conv_kernel_size": 3, "gate_lower_bound": -5.0, "kda_layers": [1, 2, 4], "full_attn_layers": [3]}}`, "model.", 4,
			map[int]nn.LayerConfig{1: {Linear: bounded}, 3: {Linear: bounded}}},
		{"Kimi Linear with empty lists", `{"model_type": "kimi_linear", "hidden_size": 2304, "num_hidden_layers": 4, "q_lora_rank": null, "mla_use_nope": true, "linear_attn_config": {"kda_layers": [], "full_attn_layers": []}}`, "model.", 4,
			map[int]nn.LayerConfig{2: {Linear: kimi}, 3: {Options: causal(0, 0, 0), Latent: &nn.LatentConfig{Model: 2304, Heads: 32, Rank: 512, NopeDim: 128, RopeDim: 64, ValueDim: 128}}}},
		{"gpt-oss without a RoPE", `{"model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 2}`, "model.", 2, map[int]nn.LayerConfig{
			0: {MultiHead: with(gptOSS, func(c *nn.MultiHeadConfig) { c.RoPE = defaultYarn }), Options: causal(128, 0, 0)},
			1: {MultiHead: with(gptOSS, func(c *nn.MultiHeadConfig) { c.RoPE = defaultYarn }), Options: causal(0, 0, 0)}}},
		{"Gemma 4 31B", `{"model_type": "gemma4", "text_config": {"attention_k_eq_v": true, "global_head_dim": 512, "head_dim": 256, "hidden_size": 5376, "model_type": "gemma4_text",
			"num_attention_heads": 32, "num_global_key_value_heads": 4, "num_hidden_layers": 60, "num_key_value_heads": 16, "num_kv_shared_layers": 0, "per_layer_config": null,
			"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
			"sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}}, "sliding_window": 1024, "use_bidirectional_attention": "vision"}}`,
			"model.language_model.", 60, map[int]nn.LayerConfig{
				0: {MultiHead: gemma4, Options: causal(1024, 1, 0)}, 5: {MultiHead: gemma4Full, Options: causal(0, 1, 0)}}},
		{"Gemma 4, defaults, last layer full", `{"model_type": "gemma4_text", "hidden_size": 64, "num_hidden_layers": 2}`, "model.", 2, map[int]nn.LayerConfig{
			0: {MultiHead: with(gemma4, func(c *nn.MultiHeadConfig) { c.Model, c.Heads, c.KVHeads = 64, 8, 4 }), Options: causal(512, 1, 0)},
			1: {MultiHead: with(gemma4Full, func(c *nn.MultiHeadConfig) { c.Model, c.Heads, c.KVHeads, c.KeysAsValues = 64, 8, 4, false }), Options: causal(0, 1, 0)}}},
		{"Gemma 3n, defaults", `{"model_type": "gemma3n", "text_config": {"model_type": "gemma3n_text", "hidden_size": 2048, "num_hidden_layers": 35}}`, "model.language_model.", 35, map[int]nn.LayerConfig{
			18: {MultiHead: gemma3n, Options: causal(512, 1, 0)}, 19: {MultiHead: with(gemma3n, full), Options: causal(0, 1, 0)},
			20: {MultiHead: with(gemma3n, shared), Options: causal(512, 1, 0), SharedWith: 18}, 34: {MultiHead: with(with(gemma3n, full), shared), Options: causal(0, 1, 0), SharedWith: 19}}},
		{"Gemma 4 with keys as values and shared keys", `{"model_type": "gemma4_text", "hidden_size": 5376, "num_attention_heads": 32, "num_global_key_value_heads": 4, "num_hidden_layers": 12, "num_kv_shared_layers": 6, "attention_k_eq_v": true}`, "model.", 12,
			map[int]nn.LayerConfig{5: {MultiHead: gemma4Full, Options: causal(0, 1, 0)},
				11: {MultiHead: with(gemma4Full, func(c *nn.MultiHeadConfig) { c.KeysAsValues, c.SharedKeys = false, true }), Options: causal(0, 1, 0), SharedWith: 5}}},
		{"Gemma 3 in the new format", `{"model_type": "gemma3_text", ` + sizes + `, "head_dim": 16, "query_pre_attn_scalar": 4, "_sliding_window_pattern": 2, "attn_logit_softcapping": 30,
			"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8, "rope_theta": 1e6}, "sliding_attention": {"rope_type": "default"}}}`, "model.", 4, map[int]nn.LayerConfig{
			0: {MultiHead: with(small, func(c *nn.MultiHeadConfig) { c.Norm = norm(1e-6, plusOne) }), Options: causal(4096, 0.5, 30)},
			1: {MultiHead: with(small, func(c *nn.MultiHeadConfig) { c.Norm, c.RoPE = norm(1e-6, plusOne), gemma3Full.RoPE }), Options: causal(0, 0.5, 30)}}},
		{"Command R+", `{"model_type": "cohere", "hidden_size": 12288, "layer_norm_eps": 1e-05, "num_attention_heads": 96, "num_hidden_layers": 64, "num_key_value_heads": 8, "rope_theta": 75000000.0, "use_qk_norm": true}`, "model.", 64,
			map[int]nn.LayerConfig{63: {MultiHead: nn.MultiHeadConfig{Model: 12288, Heads: 96, KVHeads: 8, HeadDim: 128, Norm: norm(1e-5, mean), RoPE: &nn.RoPE{Base: 75e6, Interleaved: true}}, Options: causal(0, 0, 0)}}},
		{"Command R, defaults", `{"model_type": "cohere", "hidden_size": 8192, "num_hidden_layers": 40}`, "model.", 40,
			map[int]nn.LayerConfig{0: {MultiHead: nn.MultiHeadConfig{Model: 8192, Heads: 64, KVHeads: 64, HeadDim: 128, RoPE: &nn.RoPE{Base: 5e5, Interleaved: true}}, Options: causal(0, 0, 0)}}},
		{"Command R7B", `{"model_type": "cohere2", "head_dim": 128, "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rope_theta": 50000, "sliding_window": 4096, "sliding_window_pattern": 4}`, "model.", 32,
			map[int]nn.LayerConfig{
				2: {MultiHead: nn.MultiHeadConfig{Model: 4096, Heads: 32, KVHeads: 8, HeadDim: 128, RoPE: &nn.RoPE{Base: 5e4, Interleaved: true}}, Options: causal(4096, 0, 0)},
				3: {MultiHead: nn.MultiHeadConfig{Model: 4096, Heads: 32, KVHeads: 8, HeadDim: 128}, Options: causal(0, 0, 0)}}},
		{"Gemma 2", `{"model_type": "gemma2", ` + sizes + `, "head_dim": 16}`, "model.", 4, map[int]nn.LayerConfig{
			0: {MultiHead: small, Options: causal(4096, 1./16, 50)}, 1: {MultiHead: small, Options: causal(0, 1./16, 50)}}},
		{"Gemma 2 without a softcap", `{"model_type": "gemma2", ` + sizes + `, "head_dim": 16, "attn_logit_softcapping": null}`, "model.", 4, map[int]nn.LayerConfig{
			3: {MultiHead: small, Options: causal(0, 1./16, 0)}}},
		{"Mistral", `{"model_type": "mistral", ` + sizes + `, "sliding_window": 7}`, "model.", 4, map[int]nn.LayerConfig{0: {MultiHead: small, Options: causal(7, 0, 0)}, 3: {MultiHead: small, Options: causal(7, 0, 0)}}},
		{"Mistral without the field", `{"model_type": "mistral", ` + sizes + `}`, "model.", 4, map[int]nn.LayerConfig{0: {MultiHead: small, Options: causal(4096, 0, 0)}}},
		{"Mistral without a window", `{"model_type": "mistral", ` + sizes + `, "sliding_window": null}`, "model.", 4, map[int]nn.LayerConfig{0: {MultiHead: small, Options: causal(0, 0, 0)}}},
		{"Qwen2", `{"model_type": "qwen2", ` + sizes + `, "sliding_window": 7, "use_sliding_window": true, "max_window_layers": 2}`, "model.", 4, map[int]nn.LayerConfig{
			1: {MultiHead: with(small, func(c *nn.MultiHeadConfig) { c.Bias = true }), Options: causal(0, 0, 0)}, 2: {MultiHead: with(small, func(c *nn.MultiHeadConfig) { c.Bias = true }), Options: causal(7, 0, 0)}}},
		{"Qwen2, window not used", `{"model_type": "qwen2", ` + sizes + `, "sliding_window": 7, "max_window_layers": 2}`, "model.", 4, map[int]nn.LayerConfig{
			3: {MultiHead: with(small, func(c *nn.MultiHeadConfig) { c.Bias = true }), Options: causal(0, 0, 0)}}},
		{"Qwen3-30B-A3B", `{"model_type": "qwen3_moe", "hidden_size": 2048, "head_dim": 128, "num_hidden_layers": 48, "max_window_layers": 48, "rope_theta": 1000000.0, "sliding_window": null, "use_sliding_window": false}`, "model.", 48,
			map[int]nn.LayerConfig{47: {MultiHead: nn.MultiHeadConfig{Model: 2048, Heads: 32, KVHeads: 4, HeadDim: 128, Norm: norm(1e-6, nil), RoPE: &nn.RoPE{Base: 1e6}}, Options: causal(0, 0, 0)}}},
		{"Qwen3-MoE with windows, in all layers", `{"model_type": "qwen3_moe", ` + sizes + `, "max_window_layers": 3, "sliding_window": 7, "use_sliding_window": true}`, "model.", 4,
			map[int]nn.LayerConfig{0: {MultiHead: with(small, func(c *nn.MultiHeadConfig) { c.Norm = norm(1e-6, nil) }), Options: causal(7, 0, 0)}}},
		{"Mixtral", `{"model_type": "mixtral", ` + sizes + `, "sliding_window": 7}`, "model.", 4,
			map[int]nn.LayerConfig{0: {MultiHead: with(small, func(c *nn.MultiHeadConfig) { c.RoPE = &nn.RoPE{Base: 1e6} }), Options: causal(7, 0, 0)}}},
		{"Mixtral without the field", `{"model_type": "mixtral", ` + sizes + `}`, "model.", 4,
			map[int]nn.LayerConfig{3: {MultiHead: with(small, func(c *nn.MultiHeadConfig) { c.RoPE = &nn.RoPE{Base: 1e6} }), Options: causal(0, 0, 0)}}},
		{"Qwen1.5-MoE without biases", `{"model_type": "qwen2_moe", ` + sizes + `, "qkv_bias": false}`, "model.", 4, map[int]nn.LayerConfig{0: {MultiHead: small, Options: causal(0, 0, 0)}}},
		{"OLMoE", `{"model_type": "olmoe", ` + sizes + `, "clip_qkv": null}`, "model.", 4,
			map[int]nn.LayerConfig{0: {MultiHead: with(small, func(c *nn.MultiHeadConfig) { c.Norm = norm(1e-5, projection) }), Options: causal(0, 0, 0)}}},
		{"OLMo 3, scaling of full layers only, default base", `{"model_type": "olmo3", ` + sizes + `, "rope_scaling": {"rope_type": "yarn", "factor": 8, "original_max_position_embeddings": 8192, "attention_factor": 1.2}}`, "model.", 4,
			map[int]nn.LayerConfig{
				2: {MultiHead: with(small, func(c *nn.MultiHeadConfig) { c.Norm, c.RoPE = norm(1e-5, projection), &nn.RoPE{Base: 1e4} }), Options: causal(4096, 0, 0)},
				3: {MultiHead: with(small, func(c *nn.MultiHeadConfig) {
					c.Norm = norm(1e-5, projection)
					c.RoPE = &nn.RoPE{Base: 1e4, Scaling: &nn.Scaling{Kind: nn.ScalingYaRN, Factor: 8, OriginalMaxPositionEmbeddings: 8192, AttentionFactor: 1.2}}
				}), Options: causal(0, 0, 0)}}},
		{"Llama 4 Scout", `{"model_type": "llama4", "text_config": {"model_type": "llama4_text", "attn_temperature_tuning": 4, "hidden_size": 5120, "num_hidden_layers": 48,
			"no_rope_layers": [], "rope_scaling": {"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}}}`, "language_model.model.", 48,
			map[int]nn.LayerConfig{
				46: {MultiHead: nn.MultiHeadConfig{Model: 5120, Heads: 40, KVHeads: 8, HeadDim: 128, Chunk: 8192, Norm: norm(1e-5, afterRoPE),
					RoPE: &nn.RoPE{Base: 5e5, Interleaved: true, Scaling: &nn.Scaling{Kind: nn.ScalingLlama3, Factor: 16, OriginalMaxPositionEmbeddings: 8192, LowFreqFactor: 1, HighFreqFactor: 1}}}, Options: causal(0, 0, 0)},
				47: {MultiHead: nn.MultiHeadConfig{Model: 5120, Heads: 40, KVHeads: 8, HeadDim: 128, Temperature: &nn.Temperature{Scale: 0.1, Floor: 8192}}, Options: causal(0, 0, 0)}}},
		{"Llama 4 without norms and factors", `{"model_type": "llama4_text", ` + sizes + `, "head_dim": 16, "use_qk_norm": false, "attn_temperature_tuning": false, "no_rope_layers": [0, 1, 1, 1], "attention_chunk_size": 7, "attention_bias": true}`, "model.", 4,
			map[int]nn.LayerConfig{
				0: {MultiHead: with(small, func(c *nn.MultiHeadConfig) { c.Bias, c.RoPE = true, nil }), Options: causal(0, 0, 0)},
				3: {MultiHead: with(small, func(c *nn.MultiHeadConfig) {
					c.Bias, c.RoPE, c.Chunk = true, &nn.RoPE{Base: 5e5, Interleaved: true}, 7
				}), Options: causal(0, 0, 0)}}},
		{"SmolLM3", `{"model_type": "smollm3", ` + sizes + `, "layer_types": [], "no_rope_layers": []}`, "model.", 4, map[int]nn.LayerConfig{
			2: {MultiHead: with(small, func(c *nn.MultiHeadConfig) { c.RoPE = &nn.RoPE{Base: 2e6} }), Options: causal(0, 0, 0)}, 3: {MultiHead: with(small, func(c *nn.MultiHeadConfig) { c.RoPE = nil }), Options: causal(0, 0, 0)}}},
		{"SmolLM3 with a list and a window", `{"model_type": "smollm3", ` + sizes + `, "rope_theta": 1e4, "no_rope_layers": [0, 1, 1, 1], "use_sliding_window": true, "sliding_window": 7}`, "model.", 4, map[int]nn.LayerConfig{
			0: {MultiHead: with(small, func(c *nn.MultiHeadConfig) { c.RoPE = nil }), Options: causal(7, 0, 0)}, 3: {MultiHead: small, Options: causal(0, 0, 0)}}},
		{"dynamic and partial", `{"model_type": "llama", ` + sizes + `, "partial_rotary_factor": 0.5, "max_position_embeddings": 2048, "rope_parameters": {"rope_type": "dynamic", "factor": 2, "rope_theta": 7}}`, "model.", 4,
			map[int]nn.LayerConfig{0: {MultiHead: with(small, func(c *nn.MultiHeadConfig) {
				c.RoPE = &nn.RoPE{Base: 7, Dim: 8, Scaling: &nn.Scaling{Kind: nn.ScalingDynamic, Factor: 2, OriginalMaxPositionEmbeddings: 2048}}
			}), Options: causal(0, 0, 0)}}},
		{"layer_types of Llama, with sections", `{"model_type": "llama", ` + sizes + `, "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": true}, "layer_types": ["full_attention", "full_attention", "full_attention", "full_attention"]}`,
			"model.", 4, map[int]nn.LayerConfig{
				0: {MultiHead: with(small, func(c *nn.MultiHeadConfig) {
					c.RoPE = &nn.RoPE{Base: 10000, Sections: []int{4, 2, 2}, SectionsInterleaved: true}
				}), Options: causal(0, 0, 0)}}},
		{"Kimi K2, sizes of the file and defaults", `{"model_type": "kimi_k2", ` + sizes + `, "q_lora_rank": 12, "rope_theta": 50000, "rope_scaling": {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"}}`,
			"model.", 4, map[int]nn.LayerConfig{3: {Options: causal(0, 0, 0), Latent: &nn.LatentConfig{Model: 64, Heads: 4, QueryRank: 12, Rank: 512, NopeDim: 128, RopeDim: 64, ValueDim: 128,
				RoPE: &nn.RoPE{Base: 50000, Interleaved: true, Scaling: &nn.Scaling{Kind: nn.ScalingYaRN, Factor: 64, MScale: 1, MScaleAllDim: 1, BetaFast: 1, BetaSlow: 1, OriginalMaxPositionEmbeddings: 4096}}}}}},
		{"DeepSeek V2-Lite, halves", `{"model_type": "deepseek_v2", ` + sizes + `, "q_lora_rank": null, "rope_interleave": false}`, "model.", 4, map[int]nn.LayerConfig{
			0: {Options: causal(0, 0, 0), Latent: &nn.LatentConfig{Model: 64, Heads: 4, Rank: 512, NopeDim: 128, RopeDim: 64, ValueDim: 128, RoPE: &nn.RoPE{Base: 10000}}}}},
	} {
		m, err := nn.ParseConfig([]byte(c.text))
		if err != nil || len(m.Layers) != c.layers {
			t.Errorf("%s: %d layers and error %v, should be %d layers", c.name, len(m.Layers), err, c.layers)
			continue
		}
		for i, want := range c.want {
			want.Prefix = fmt.Sprintf("%slayers.%d.self_attn.", c.prefix, i)
			if want.Linear != nil && want.Linear.Rank == 0 {
				want.Prefix = strings.Replace(want.Prefix, "self", "linear", 1)
			}
			if got := m.Layers[i]; !reflect.DeepEqual(got, want) {
				t.Errorf("%s: layer %d is\n%+v %+v %+v, should be\n%+v %+v %+v", c.name, i, got, got.MultiHead.RoPE, got.MultiHead.Norm, want, want.MultiHead.RoPE, want.MultiHead.Norm)
			}
		}
	}
}

// TestParseConfigPhi3: the lists of longrope come from the file. So does the factor, as in transformers 5; without one it
// is the ratio of the two lengths.
func TestParseConfigPhi3(t *testing.T) {
	for _, c := range []struct {
		old, new string
		factor   float64
	}{
		{`"longrope"`, `"longrope"`, 32},
		{`"longrope"`, `"su"`, 32},
		{`"longrope"`, `"yarn"`, 32},
		{`"longrope"`, `"longrope", "factor": 8`, 8},
		{`"longrope"`, `"longrope", "factor": null, "original_max_position_embeddings": 8192`, 32},
		{`"original_max_position_embeddings": 4096,`, ``, 32},
	} {
		m := must.Get(nn.ParseConfig([]byte(strings.Replace(config(t, "phi-3.5-mini"), c.old, c.new, 1))))(t)
		l := m.Layers[31]
		s := l.MultiHead.RoPE.Scaling
		if l.MultiHead.HeadDim != 96 || l.MultiHead.KVHeads != 32 || !reflect.DeepEqual(l.Options, causal(262144, 0, 0)) || l.MultiHead.RoPE != m.Layers[0].MultiHead.RoPE {
			t.Errorf("%s: layer is %+v", c.new, l)
		}
		if s.Kind != nn.ScalingLongRoPE || s.Factor != c.factor || s.OriginalMaxPositionEmbeddings != 4096 || len(s.ShortFactor) != 48 || s.ShortFactor[1] != 1.0199999809265137 || s.LongFactor[47] != 64.83999633789062 {
			t.Errorf("%s: scaling is %+v", c.new, s)
		}
	}
}

func TestParseConfigRefuses(t *testing.T) {
	const sizes = `"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2`
	llama := func(more string) string { return `{"model_type": "llama", ` + sizes + `, ` + more + `}` }
	for _, c := range []struct {
		text  string
		want  error
		texts []string
	}{
		{``, kernels.ErrFile, nil},
		{`[]`, kernels.ErrFile, nil},
		{`{"text_config": 3}`, kernels.ErrFile, []string{"text_config"}},
		{`{}`, kernels.ErrUnsupported, []string{`model_type is ""`, `"gpt_oss" "kimi_k2" "kimi_linear" "llama"`}},
		{`{"model_type": "falcon"}`, kernels.ErrUnsupported, []string{`model_type is "falcon"`}},
		{`{"model_type": "deepseek_v32", "kv_lora_rank": 512}`, kernels.ErrUnsupported, []string{"deepseek_v32 has multi-head latent attention"}},
		{`{"model_type": "deepseek_v3", ` + sizes + `, "v_head_dim": 0}`, kernels.ErrFile, []string{"ValueDim is 0"}},
		{`{"model_type": "deepseek_v3", ` + sizes + `, "kv_lora_rank": 0}`, kernels.ErrFile, []string{"Rank is 0"}},
		{`{"model_type": "kimi_vl", "text_config": {"kv_lora_rank": 512}}`, kernels.ErrUnsupported, []string{"kimi_vl has multi-head latent attention"}},
		{`{"model_type": "llama"}`, kernels.ErrFile, []string{"num_hidden_layers is 0"}},
		{`{"model_type": "llama", "num_hidden_layers": 5000}`, kernels.ErrFile, []string{"num_hidden_layers is 5000, it must be 1 to 4096"}},
		{`{"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 64}`, kernels.ErrFile, []string{"num_attention_heads is 0"}},
		{`{"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 1e99}`, kernels.ErrFile, []string{"hidden_size"}},
		{llama(`"hidden_size": 2097152`), kernels.ErrFile, []string{"hidden_size is 2.097152e+06"}},
		{llama(`"head_dim": -2`), kernels.ErrFile, []string{"head_dim is -2"}},
		{llama(`"head_dim": 15`), kernels.ErrFile, []string{"dim is 15"}},
		{llama(`"num_key_value_heads": 3`), kernels.ErrFile, []string{"num_key_value_heads is 3"}},
		{llama(`"num_key_value_heads": 8`), kernels.ErrFile, []string{"num_key_value_heads is 8, it must be 1 to 4"}},
		{llama(`"layer_types": ["full_attention"]`), kernels.ErrFile, []string{"the number of layer_types is 1, it must be 4 to 4"}},
		{llama(`"layer_types": ["full_attention", "strided_attention", "", ""]`), kernels.ErrUnsupported, []string{`layer 1: layer_types has "strided_attention"`, "full_attention, sliding_attention, linear_attention and chunked_attention"}},
		{llama(`"layer_types": ["chunked_attention", "", "", ""]`), kernels.ErrFile, []string{"attention_chunk_size is not set"}},
		{`{"model_type": "llama4_text", ` + sizes + `, "attention_chunk_size": 0}`, kernels.ErrFile, []string{"attention_chunk_size is 0"}},
		{`{"model_type": "llama4_text", ` + sizes + `, "floor_scale": -1}`, kernels.ErrFile, []string{"floor_scale is -1"}},
		{`{"model_type": "llama4_text", ` + sizes + `, "attn_scale": -1}`, kernels.ErrFile, []string{"attn_scale is -1"}},
		{llama(`"layer_types": ["linear_attention", "", "", ""]`), kernels.ErrUnsupported, []string{"layer 0: llama has linear attention"}},
		{`{"model_type": "qwen3_next", ` + sizes + `, "linear_key_head_dim": 0}`, kernels.ErrFile, []string{"layer 0", "KeyDim is 0"}},
		{`{"model_type": "kimi_linear", ` + sizes + `}`, kernels.ErrUnsupported, []string{"mla_use_nope is false"}},
		{`{"model_type": "kimi_linear", ` + sizes + `, "mla_use_nope": true, "linear_attn_config": {"use_full_rank_gate": true}}`, kernels.ErrUnsupported, []string{"use_full_rank_gate true"}},
		{`{"model_type": "kimi_linear", ` + sizes + `, "mla_use_nope": true, "linear_attn_config": {"kda_layers": [1, 2]}}`, kernels.ErrFile, []string{"the number of kda_layers and full_attn_layers is 2, it must be 4 to 4"}},
		{llama(`"layer_types": ["sliding_attention", "", "", ""]`), kernels.ErrFile, []string{"sliding_window is not set"}},
		{llama(`"rope_scaling": {"type": "ntk", "factor": 2}`), kernels.ErrUnsupported, []string{`rope_type is "ntk", it must be one of default linear dynamic llama3 yarn longrope proportional`}},
		{llama(`"rope_scaling": {"type": "linear"}`), kernels.ErrFile, []string{"Factor is 0"}},
		{llama(`"rope_scaling": {"type": "yarn"}`), kernels.ErrFile, []string{"Factor is NaN"}},
		{llama(`"rope_theta": -1`), kernels.ErrFile, []string{"base is -1"}},
		{llama(`"partial_rotary_factor": 0.01`), kernels.ErrFile, []string{"partial_rotary_factor is 0.01"}},
		{llama(`"partial_rotary_factor": 1.5`), kernels.ErrFile, []string{"partial_rotary_factor is 1.5"}},
		{llama(`"rms_norm_eps": -1`), kernels.ErrFile, []string{"rms_norm_eps is -1"}},
		{`{"model_type": "cohere", ` + sizes + `, "layer_norm_eps": -1}`, kernels.ErrFile, []string{"layer_norm_eps is -1"}},
		{llama(`"use_bidirectional_attention": true`), kernels.ErrUnsupported, []string{"use_bidirectional_attention (true)"}},
		{`{"model_type": "gemma2", ` + sizes + `, "query_pre_attn_scalar": 0}`, kernels.ErrFile, []string{"query_pre_attn_scalar is 0"}},
		{`{"model_type": "gemma2", ` + sizes + `, "sliding_window": 0}`, kernels.ErrFile, []string{"sliding_window is 0"}},
		{`{"model_type": "gemma2", ` + sizes + `, "attn_logit_softcapping": -1}`, kernels.ErrFile, []string{"attn_logit_softcapping is -1"}},
		{llama(`"num_kv_shared_layers": 2`), kernels.ErrUnsupported, []string{"num_kv_shared_layers (2) of llama"}},
		{`{"model_type": "gemma4_text", ` + sizes + `, "num_kv_shared_layers": 2}`, kernels.ErrFile, []string{"layer 3: num_kv_shared_layers is 2, but none of the first 2 layers is full_attention"}},
		{`{"model_type": "gemma3n_text", ` + sizes + `, "num_kv_shared_layers": 4}`, kernels.ErrFile, []string{"num_kv_shared_layers is 4, it must be 0 to 3"}},
		{`{"model_type": "gemma4_text", ` + sizes + `, "per_layer_config": {}}`, kernels.ErrUnsupported, []string{"per_layer_config"}},
		{`{"model_type": "olmoe", ` + sizes + `, "clip_qkv": 8}`, kernels.ErrUnsupported, []string{"clip_qkv is set"}},
		{`{"model_type": "qwen2_moe", ` + sizes + `, "use_sliding_window": true}`, kernels.ErrUnsupported, []string{"use_sliding_window of qwen2_moe"}},
		{`{"model_type": "smollm3", ` + sizes + `, "no_rope_layers": [1]}`, kernels.ErrFile, []string{"the number of no_rope_layers is 1"}},
	} {
		must.Fail(t, c.text, must.Err(nn.ParseConfig([]byte(c.text))), c.want, append(c.texts, "model config: ")...)
	}
}

// TestModelsPage: the table of docs/models.md has the families that ParseConfig reads and no others, and each row has a
// program.
func TestModelsPage(t *testing.T) {
	page := string(must.Get(os.ReadFile("../../docs/models.md"))(t))
	err := must.Err(nn.ParseConfig([]byte(`{"model_type": "none"}`)))
	_, list, _ := strings.Cut(err.Error(), "one of ")
	var read, rows []string
	for _, m := range regexp.MustCompile(`"(\w+)"`).FindAllStringSubmatch(list, -1) {
		read = append(read, m[1])
	}
	for _, m := range regexp.MustCompile(`(?m)^\| [^|\n]*\(([^|\n]*)\)[^|\n]* \|(.*)$`).FindAllStringSubmatch(page, -1) {
		for _, family := range regexp.MustCompile("`(\\w+)`").FindAllStringSubmatch(m[1], -1) {
			rows = append(rows, family[1])
		}
		if !strings.Contains(m[2], "](../kernels/nn/example_") {
			t.Errorf("docs/models.md has a row without a program: %s", m[0])
		}
	}
	slices.Sort(rows)
	if rows = slices.Compact(rows); len(read) == 0 || !slices.Equal(rows, read) {
		t.Errorf("the rows of docs/models.md are of %q, ParseConfig reads %q", rows, read)
	}
}
