package onnx

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/seed90331342/attn/cmd/attn-onnx/internal/onnxfile"
	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
)

// TestMultiHeadRefused has bad inputs of MultiHeadAttention: two batches, two heads of size
// 4, three queries, five keys, past 1.
func TestMultiHeadRefused(t *testing.T) {
	f32 := func(dims ...int) string { return jsoncTensorText("float32", dims...) }
	int32s := func(dims ...int) string { return jsoncTensorText("int32", dims...) }
	const missing = `{"data": null}`
	for _, c := range []struct {
		name   string
		inputs map[int]string
		says   string // "" when the case is valid
	}{
		{"nothing", nil, ""},
		{"no query", map[int]string{mhQuery: missing}, "input query is missing"},
		{"no key", map[int]string{mhKey: missing}, "query has shape [2 3 8], key missing and value [2 5 8]: they must be"},
		{"a key of 4 axes alone", map[int]string{mhKey: f32(2, 2, 5, 4)}, "key [2 2 5 4] and value [2 5 8]: they must be"},
		{"packed and not", map[int]string{mhKey: f32(2, 5, 2, 2, 4)}, "key [2 5 2 2 4] and value [2 5 8]: they must be"},
		{"packed pairs of other heads", map[int]string{mhKey: f32(2, 5, 4, 2, 2), mhValue: missing}, "key [2 5 4 2 2] and value missing: they must be"},
		{"all packed with other heads", map[int]string{mhQuery: f32(2, 3, 4, 3, 2), mhKey: missing, mhValue: missing}, "with H = num_heads = 2"},
		{"heads that do not divide", map[int]string{mhQuery: f32(2, 3, 7)}, "query has shape [2 3 7] for 2 batches and num_heads 2"},
		{"other batches", map[int]string{mhValue: f32(1, 5, 8)}, "value has shape [1 5 8] for 2 batches"},
		{"no queries", map[int]string{mhQuery: f32(2, 0, 8)}, "query has shape [2 0 8]"},
		{"another head size", map[int]string{mhKey: f32(2, 5, 4)}, "key must have the head size of query"},
		{"another number of values", map[int]string{mhValue: f32(2, 4, 8)}, "value the sequence of key"},
		{"a short bias", map[int]string{mhBias: f32(23)}, "bias has shape [23], it must be [24]"},
		{"a mask of floats", map[int]string{mhPaddingMask: f32(2, 6)}, "key_padding_mask is f32 and query f32: key_padding_mask must be int32"},
		{"a mask of another length", map[int]string{mhPaddingMask: int32s(2, 7)}, "key_padding_mask has shape [2 7], it must be [2], [8], [2 5], [2 6] or [2 3 6]"},
		{"more keys than there are", map[int]string{mhPaddingMask: numbers(3, 7)}, "key_padding_mask[1] is 7, there are 6 keys"},
		{"keys below 0", map[int]string{mhPaddingMask: numbers(-1, 6)}, "key_padding_mask[0] is -1"},
		{"a bias of new keys alone", map[int]string{mhAttentionBias: f32(2, 2, 3, 5)}, "attention_bias has shape [2 2 3 5], it must be [2 or 1, 2 or 1, 3, 6]"},
		{"a past key alone", map[int]string{mhPastValue: missing}, "past_key has shape [2 2 1 4] and past_value missing: they need each other"},
		{"a past of two lengths", map[int]string{mhPastValue: f32(2, 2, 2, 4)}, "past_value has shape [2 2 2 4], it must be [2 2 past 4]"},
		{"a past of 3 axes", map[int]string{mhPastKey: f32(2, 2, 4)}, "past_key has shape [2 2 4]"},
		{"another type", map[int]string{mhValue: jsoncTensorText("float16", 2, 5, 8)}, "value is f16 and query f32"},
		{"integers", map[int]string{mhQuery: int32s(2, 3, 8), mhKey: missing, mhValue: missing, mhPastKey: missing, mhPastValue: missing}, "query is int32, it must be f32"},
		{"a past length", map[int]string{mhPastLength: int32s(1)}, "input past_sequence_length is given, attn does not support it"},
		{"11 inputs", map[int]string{10: f32(1)}, "the node has 11 inputs"},
	} {
		t.Run(c.name, func(t *testing.T) {
			in := []string{f32(2, 3, 8), f32(2, 5, 8), f32(2, 5, 8), missing, missing, missing, f32(2, 2, 1, 4), f32(2, 2, 1, 4)}
			for i, text := range c.inputs {
				for len(in) <= i {
					in = append(in, missing)
				}
				in[i] = text
			}
			text := fmt.Sprintf(`[{"name": "bad", "operator": "MultiHeadAttention", "opset": {"domain": "com.microsoft", "version": 1},
				"attributes": [{"name": "num_heads", "data": 2, "type": "int"}],
				"cases": [{"name": "case", "inputs": [%s], "outputs": [%s, %s]}]}]`, strings.Join(in, ", "), f32(2, 3, 8), f32(2, 2, 6, 4))
			file := clitest.WriteFile(t, t.TempDir(), "case.jsonc", []byte(text))
			if c.says == "" {
				wantJSONC(t, "cpu", 1, file)
			} else {
				wantJSONCFailure(t, file, c.says)
			}
		})
	}
}

// TestRotaryAndScatterRefused damages cases of RotaryEmbedding and TensorScatter.
func TestRotaryAndScatterRefused(t *testing.T) {
	rotary, scatter := rotaryCases()["test_rotary_embedding"], scatterCases()["test_tensorscatter"]
	for _, c := range []struct {
		name   string
		good   *onnxFiles
		change func(c *onnxFiles)
		says   string
	}{
		{"opset 22", rotary, func(c *onnxFiles) { c.opset = 22 }, "opset 22"},
		{"X of 2 axes", rotary, func(c *onnxFiles) { c.in[0] = repeated(onnxfile.Float, 1, 3, 8) }, "input X has shape [3 8] and num_heads is 0"},
		{"X of 3 axes without heads", rotary, func(c *onnxFiles) { c.in[0] = repeated(onnxfile.Float, 1, 2, 3, 32) }, "input X has shape [2 3 32] and num_heads is 0"},
		{"other heads", rotary, func(c *onnxFiles) { c.ints = map[string]int64{"num_heads": 5} }, "num_heads is 5"},
		{"no rows", rotary, func(c *onnxFiles) { c.in[0] = repeated(onnxfile.Float, 1, 2, 4, 0, 8) }, "every length must be at least 1"},
		{"an odd dim", rotary, func(c *onnxFiles) { c.ints = map[string]int64{"rotary_embedding_dim": 3} }, "rotary_embedding_dim is 3, it must be even"},
		{"a large dim", rotary, func(c *onnxFiles) { c.ints = map[string]int64{"rotary_embedding_dim": 10} }, "rotary_embedding_dim is 10"},
		{"interleaved 2", rotary, func(c *onnxFiles) { c.ints = map[string]int64{"interleaved": 2} }, "interleaved is 2, it must be 0 to 1"},
		{"a cache of other pairs", rotary, func(c *onnxFiles) { c.in[2] = repeated(onnxfile.Float, 1, 50, 3) }, "sin_cache has shape [50 3], it must be [50 4]"},
		{"a cache without axes", rotary, func(c *onnxFiles) { c.in[1] = repeated(onnxfile.Float, 1) }, "cos_cache has shape [], it must be [0 4]"},
		{"a cache of 2 axes without positions", rotary, func(c *onnxFiles) { c.in = c.in[:3] }, "cos_cache has shape [50 4], it must be [2 3 4]"},
		{"a cache of integers", rotary, func(c *onnxFiles) {
			c.in[1] = &onnxfile.Tensor{Type: onnxfile.Int64, Shape: []int{50, 4}, Data: make([]byte, 1600)}
		}, "cos_cache int64"},
		{"a position beyond the cache", rotary, func(c *onnxFiles) { c.in[3] = int64s(1, 2, 3, 4, 5, 50); c.in[3].Shape = []int{2, 3} }, "position 50 (element 5) has no row in cos_cache, it must be 0 to 49"},
		{"positions of another shape", rotary, func(c *onnxFiles) { c.in[3] = int64s(1, 2, 3) }, "position_ids has shape [3], it must be [2 3]"},
		{"positions of floats", rotary, func(c *onnxFiles) { c.in[3] = repeated(onnxfile.Float, 1, 2, 3) }, "position_ids is f32"},

		{"opset 23", scatter, func(c *onnxFiles) { c.opset = 23 }, "opset 23"},
		{"another mode", scatter, func(c *onnxFiles) { c.texts = map[string]string{"mode": "ring"} }, `attribute mode is "ring", it must be one of linear, circular`},
		{"axis 0", scatter, func(c *onnxFiles) { c.ints = map[string]int64{"axis": 0} }, "axis is 0, past_cache has shape [2 1 4 5]"},
		{"axis 4", scatter, func(c *onnxFiles) { c.ints = map[string]int64{"axis": 4} }, "axis is 4"},
		{"more rows than the cache", scatter, func(c *onnxFiles) { c.in[1] = repeated(onnxfile.Float, 1, 2, 1, 5, 5) }, "update has shape [2 1 5 5], past_cache [2 1 4 5]"},
		{"another width", scatter, func(c *onnxFiles) { c.in[1] = repeated(onnxfile.Float, 1, 2, 1, 1, 4) }, "update has shape [2 1 1 4]"},
		{"other axes", scatter, func(c *onnxFiles) { c.in[1] = repeated(onnxfile.Float, 1, 2, 1, 5) }, "update has shape [2 1 5]"},
		{"another type", scatter, func(c *onnxFiles) { c.in[1] = repeated(onnxfile.Float16, 1, 2, 1, 1, 5) }, "past_cache is f32 and update f16"},
		{"integers", scatter, func(c *onnxFiles) { c.in[0], c.in[1] = int64s(1, 2), int64s(1, 2) }, "axis is -2"},
		{"a row beyond the end", scatter, func(c *onnxFiles) { c.in[2] = int64s(1, 4) }, "write_indices[1] is 4, it must be 0 to 3 for 1 rows in a cache of 4"},
		{"indices of another length", scatter, func(c *onnxFiles) { c.in[2] = int64s(1) }, "write_indices has shape [1] of int64, it must be [2]"},
		{"an empty cache", scatter, func(c *onnxFiles) {
			c.in[0], c.in[1] = repeated(onnxfile.Float, 1, 2, 1, 4, 0), repeated(onnxfile.Float, 1, 2, 1, 1, 0)
		}, "past_cache has shape [2 1 4 0], every length must be at least 1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			bad := *c.good
			bad.in = append([]*onnxfile.Tensor(nil), c.good.in...)
			c.change(&bad)
			dir := bad.write(t, filepath.Join(t.TempDir(), "case"))
			wantOutcome(t, dir, c.says)
		})
	}
}
