package onnx

import (
	"math"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/cmd/attn-onnx/internal/onnxfile"
)

// drawLinear draws a call of LinearAttention with any combination of options, of ONNX or of ONNX Runtime. Keys have a
// length of about 1 at most, as the delta rules need.
func drawLinear(seed uint64, runtime bool) *onnxFiles {
	rng := rand.New(rand.NewPCG(seed, 27))
	flip := func() bool { return rng.IntN(2) == 0 }
	pick := func(shapes ...[]int) []int { return shapes[rng.IntN(len(shapes))] }
	p := &linearProblem{batch: 1 + rng.IntN(2), tokens: 1 + rng.IntN(10), kvHeads: 1 + rng.IntN(3), dim: 8, valueDim: 1 + rng.IntN(9)}
	p.operator, p.opset, p.heads, p.keyHeads = "LinearAttention", 27, p.kvHeads*(1+rng.IntN(3)), p.kvHeads
	p.ints, p.floats = map[string]int64{}, map[string]float32{}
	if runtime {
		p.operator, p.opset = microsoft+".LinearAttention", 1
		if flip() {
			p.kvHeads, p.heads = p.heads, p.kvHeads
		}
		if p.keyHeads = p.kvHeads; flip() {
			p.keyHeads = 1
		}
		p.ints["state_window"] = rng.Int64N(9)
	}
	rule := []string{"linear", "gated", "delta", "gated_delta"}[rng.IntN(4)]
	d := []onnxfile.DataType{onnxfile.Float, onnxfile.Float16, onnxfile.BFloat16}[rng.IntN(3)]
	p.texts = map[string]string{"update_rule": rule}
	p.ints["q_num_heads"], p.ints["kv_num_heads"] = int64(p.heads), int64(p.kvHeads)
	p.in = make([]*onnxfile.Tensor, 6)
	p.in[linQuery] = uniform(rng, d, -1, p.batch, p.tokens, p.heads*p.dim)
	p.in[linKey] = times(uniform(rng, d, -1, p.batch, p.tokens, p.keyHeads*p.dim), 0.35) // sqrt(8)·0.35 < 1
	p.in[linValue] = uniform(rng, d, -1, p.batch, p.tokens, p.kvHeads*p.valueDim)
	if flip() {
		shape := []int{p.batch, p.kvHeads, p.dim, p.valueDim}
		if w := int(p.ints["state_window"]); w > 0 {
			shape = append([]int{w}, shape...)
		}
		state := d
		if flip() {
			state = onnxfile.Float
		}
		p.in[linPast] = uniform(rng, state, 0, shape...)
	}
	if strings.HasPrefix(rule, "gated") {
		p.in[linDecay] = times(uniform(rng, d, 0, pick([]int{p.batch, p.tokens, p.kvHeads}, []int{p.batch, p.tokens, p.kvHeads * p.dim})...), -1)
	}
	if strings.HasSuffix(rule, "delta") {
		p.in[linBeta] = uniform(rng, d, 0, pick([]int{p.batch, p.tokens, p.kvHeads}, []int{p.batch, p.tokens, 1})...)
	}
	if flip() {
		p.floats["scale"] = float32(0.01 + rng.Float64())
	}
	if flip() {
		p.ints["chunk_size"] = 1 + rng.Int64N(70)
	}
	p.solve()
	return &p.onnxFiles
}

// drawConv draws a call of CausalConvWithState, of ONNX or of ONNX Runtime.
func drawConv(seed uint64, runtime bool) *onnxFiles {
	rng := rand.New(rand.NewPCG(seed, 28))
	d := []onnxfile.DataType{onnxfile.Float, onnxfile.Float, onnxfile.Float16, onnxfile.BFloat16}[rng.IntN(4)]
	batch, channels, length, width := 1+rng.IntN(3), 1+rng.IntN(40), 1+rng.IntN(9), 1+rng.IntN(6)
	activation := []string{"none", "silu", "swish"}[rng.IntN(3)]
	c := &onnxFiles{operator: "CausalConvWithState", opset: 27, texts: map[string]string{"activation": activation}}
	shape := []int{batch, channels, length}
	if runtime {
		c.operator, c.opset = microsoft+".CausalConvWithState", 1
		c.ints = map[string]int64{"dilation": 1 + rng.Int64N(3), "state_window": rng.Int64N(9), "channels_last": rng.Int64N(2)}
		if c.ints["channels_last"] == 1 {
			shape = []int{batch, length, channels, 1 + rng.IntN(3)}
			channels *= shape[3]
		}
	}
	c.in = []*onnxfile.Tensor{uniform(rng, d, -1, shape...), uniform(rng, d, -1, channels, 1, width), nil, nil}
	if rng.IntN(2) == 0 {
		c.in[convBias] = uniform(rng, d, -1, channels)
	}
	if rng.IntN(2) == 0 {
		c.in[convPast] = uniform(rng, d, -1, c.convStates(width)...)
	}
	c.solveConv(batch, channels, length, width, activation != "none")
	return c
}

// TestLinearRefused damages cases of LinearAttention and CausalConvWithState.
func TestLinearRefused(t *testing.T) {
	linear, conv, runtime := linearCases()["test_linear_attention_prefill_with_past"], convCases()["test_causal_conv_with_state_with_bias_and_past_state"], *linearCases()["test_linear_attention_gated_delta"]
	runtime.operator, runtime.opset = microsoft+".LinearAttention", 1
	runtimeConv := *conv
	runtimeConv.operator, runtimeConv.opset = microsoft+".CausalConvWithState", 1
	ones := func(shape ...int) *onnxfile.Tensor { return repeated(onnxfile.Float, 1, shape...) }
	ints := func(name string, x int64) func(c *onnxFiles) {
		return func(c *onnxFiles) {
			c.ints = map[string]int64{"q_num_heads": 4, "kv_num_heads": 4}
			c.ints[name] = x
		}
	}
	input := func(i int, x *onnxfile.Tensor) func(c *onnxFiles) { return func(c *onnxFiles) { c.in[i] = x } }
	rule := func(s string) func(c *onnxFiles) {
		return func(c *onnxFiles) { c.texts = map[string]string{"update_rule": s} }
	}
	for _, c := range []struct {
		name   string
		good   *onnxFiles
		change func(c *onnxFiles)
		says   string // "" when the case is valid
	}{
		{"nothing", linear, func(*onnxFiles) {}, ""},
		{"opset 26", linear, func(c *onnxFiles) { c.opset = 26 }, "opset 26, LinearAttention is known from 27 to 27"},
		{"no heads", linear, func(c *onnxFiles) { c.ints = map[string]int64{"q_num_heads": 4} }, "attribute kv_num_heads is missing"},
		{"heads 0", linear, ints("kv_num_heads", 0), "attribute kv_num_heads is 0"},
		{"heads that do not divide", linear, ints("kv_num_heads", 3), "q_num_heads is 4 and kv_num_heads 3: q_num_heads must be a multiple of it"},
		{"more state heads", linear, ints("kv_num_heads", 8), "q_num_heads is 4 and kv_num_heads 8: q_num_heads must be a multiple of it"},
		{"another rule", linear, rule("retention"), `attribute update_rule is "retention", it must be one of gated_delta, linear, gated, delta`},
		{"a window", linear, ints("state_window", 2), `attribute "state_window" is none of LinearAttention in opset 27`},
		{"chunks of 0", linear, ints("chunk_size", 0), "attribute chunk_size is 0"},
		{"a scale of NaN", linear, func(c *onnxFiles) { c.floats = map[string]float32{"scale": float32(math.NaN())} }, "scale is NaN"},
		{"a decay too many", linear, rule("delta"), "update_rule is delta, decay has shape [2 4 32] and beta [2 4 4]: gated and gated_delta need decay"},
		{"a beta too many", linear, rule("gated"), "update_rule is gated, decay has shape [2 4 32] and beta [2 4 4]: gated and gated_delta need decay"},
		{"no decay", linear, input(linDecay, nil), "decay has shape missing"},
		{"no beta", linear, input(linBeta, nil), "beta missing"},
		{"no key", linear, input(linKey, nil), "input key is missing"},
		{"query of 4 axes", linear, input(linQuery, ones(2, 4, 4, 8)), "query has shape [2 4 4 8], it must be [batch sequence 4·size] for q_num_heads 4"},
		{"query of another width", linear, input(linQuery, ones(2, 4, 30)), "query has shape [2 4 30]"},
		{"no tokens", linear, input(linQuery, ones(2, 0, 32)), "query has shape [2 0 32]"},
		{"key of fewer heads", linear, input(linKey, ones(2, 4, 8)), "key has shape [2 4 8], it must be one of [[2 4 32]]"},
		{"value of another length", linear, input(linValue, ones(2, 3, 32)), "value has shape [2 3 32], it must be one of [[2 4 32]]"},
		{"value of another width", linear, input(linValue, ones(2, 4, 33)), "value has shape [2 4 33], it must be [batch sequence 4·size] for kv_num_heads 4"},
		{"a state of another value size", linear, input(linPast, ones(2, 4, 8, 7)), "past_state has shape [2 4 8 7], it must be one of [[2 4 8 8]]"},
		{"a decay of another width", linear, input(linDecay, ones(2, 4, 8)), "decay has shape [2 4 8], it must be one of [[2 4 4] [2 4 32]]"},
		{"a beta of another width", linear, input(linBeta, ones(2, 4, 2)), "beta has shape [2 4 2], it must be one of [[2 4 4] [2 4 1]]"},
		{"f64", linear, input(linQuery, repeated(onnxfile.Double, 1, 2, 4, 32)), "query is f64"},
		{"a value of f16", linear, input(linValue, repeated(onnxfile.Float16, 1, 2, 4, 32)), "value is f16 and query f32"},
		{"a state of integers", linear, input(linPast, int64s(1, 2)), "past_state is int64"},

		{"a window of ONNX Runtime", &runtime, ints("state_window", 9), "attribute state_window is 9, it must be 0 to 8"},
		{"heads that do not divide either way", &runtime, ints("kv_num_heads", 3), "q_num_heads is 4 and kv_num_heads 3: one must be a multiple of the other"},
		{"three key heads", &runtime, input(linKey, ones(2, 4, 24)), "key has shape [2 4 24], it must be one of [[2 4 32]]"},
		{"a state without windows", &runtime, func(c *onnxFiles) { ints("state_window", 2)(c); c.in[linPast] = ones(2, 4, 8, 8) }, "past_state has shape [2 4 8 8], it must be one of [[2 2 4 8 8]]"},

		{"nothing", conv, func(*onnxFiles) {}, ""},
		{"opset 26", conv, func(c *onnxFiles) { c.opset = 26 }, "opset 26, CausalConvWithState is known from 27 to 27"},
		{"another activation", conv, func(c *onnxFiles) { c.texts = map[string]string{"activation": "gelu"} }, `attribute activation is "gelu", it must be one of none, silu, swish`},
		{"input of 4 axes", conv, input(convInput, ones(2, 4, 8, 1)), "input has shape [2 4 8 1] and weight [4 1 4]"},
		{"no elements", conv, input(convInput, ones(2, 4, 0)), "input has shape [2 4 0] and weight [4 1 4]"},
		{"weights of other channels", conv, input(convWeight, ones(3, 1, 4)), "weight has shape [3 1 4], it must be [4 1 4] for input [2 4 8]"},
		{"weights that are too wide", conv, func(c *onnxFiles) { c.in = []*onnxfile.Tensor{c.in[0], ones(4, 1, 65)} }, "W from 1 to 64"},
		{"a bias of another length", conv, input(convBias, ones(3)), "bias has shape [3], it must be [4]"},
		{"a state of another width", conv, input(convPast, ones(2, 4, 4)), "past_state has shape [2 4 4], it must be [2 4 3]"},
		{"f64", conv, input(convInput, repeated(onnxfile.Double, 1, 2, 4, 8)), "input is f64"},
		{"a bias of f16", conv, input(convBias, repeated(onnxfile.Float16, 1, 4)), "bias is f16 and input f32"},
		{"dilation in ONNX", conv, func(c *onnxFiles) { c.ints = map[string]int64{"dilation": 2} }, `attribute "dilation" is none of CausalConvWithState in opset 27`},

		{"nothing of ONNX Runtime", &runtimeConv, func(*onnxFiles) {}, ""},
		{"two axes", &runtimeConv, func(c *onnxFiles) { c.ints = map[string]int64{"ndim": 2} }, "attribute ndim is 2, attn convolves along one axis"},
		{"dilation 0", &runtimeConv, func(c *onnxFiles) { c.ints = map[string]int64{"dilation": 0} }, "attribute dilation is 0, it must be 1 to 63"},
		{"a state without dilation", &runtimeConv, func(c *onnxFiles) { c.ints = map[string]int64{"dilation": 2} }, "past_state has shape [2 4 3], it must be [2 4 6]"},
		{"a convolution's state without windows", &runtimeConv, func(c *onnxFiles) { c.ints = map[string]int64{"state_window": 2} }, "past_state has shape [2 4 3], it must be [2 2 4 3]"},
		{"channels of another axis", &runtimeConv, func(c *onnxFiles) { c.ints = map[string]int64{"channels_last": 1} }, "weight has shape [4 1 4], it must be [8 1 4]"},
	} {
		t.Run(c.name, func(t *testing.T) {
			bad := *c.good
			bad.in = slices.Clone(c.good.in)
			c.change(&bad)
			dir := bad.write(t, filepath.Join(t.TempDir(), "case"))
			wantOutcome(t, dir, c.says)
		})
	}
}
