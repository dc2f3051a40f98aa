package onnx

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// publishedJSONC returns the four files of ONNX Runtime, with 40 cases.
func publishedJSONC(t testing.TB) []string {
	t.Helper()
	names, err := filepath.Glob("../../testdata/onnxruntime/*.jsonc")
	if err != nil || len(names) != 4 {
		t.Fatalf("%d files, %v", len(names), err)
	}
	return names
}

// wantJSONC runs files and fails the test unless they have n cases that all pass.
func wantJSONC(t *testing.T, device string, n int, names ...string) {
	t.Helper()
	code, stdout, stderr := attn(t, append([]string{"--jsonc", "--backend", device}, names...)...)
	if code != 0 || stderr != "" || strings.Count(stdout, "\nok    ") != n-1 || !strings.HasSuffix(stdout, fmt.Sprintf("\n%d passed, 0 failed\n", n)) {
		t.Errorf("exit code %d, stderr %q, %d cases should pass:\n%s", code, stderr, n, stdout)
	}
}

// TestJSONCPublished runs the files of ONNX Runtime on every instruction set of the CPU and on the GPU.
func TestJSONCPublished(t *testing.T) {
	names := publishedJSONC(t)
	everywhere(t, func(t *testing.T, backend string) {
		if backend == "gpu" && testing.Short() {
			wantJSONC(t, backend, 5, names[:1]...)
			return
		}
		wantJSONC(t, backend, 40, names...)
	})
}

// jsoncTensorText returns a tensor of ones.
func jsoncTensorText(kind string, dims ...int) string {
	data := strings.TrimSuffix(strings.Repeat("1,", clitest.Elements(dims)), ",")
	return fmt.Sprintf(`{"type": %q, "dims": %s, "data": [%s]}`, kind, strings.ReplaceAll(fmt.Sprint(dims), " ", ","), data)
}

// gqaText is a small GroupQueryAttention case: one head of size 8, as in the tests of ONNX
// Runtime's group_query_attention_op_test.cc.
type gqaText struct {
	batch, seq, past int // past < 0: none
	attributes       string
	lens, total      string // tensors
	inputs           map[int]string
}

func newGQAText() *gqaText {
	return &gqaText{batch: 1, seq: 1, past: -1, lens: `{"type": "int32", "dims": [1], "data": [0]}`, total: `{"type": "int32", "dims": [1], "data": [1]}`, inputs: map[int]string{}}
}

func (g *gqaText) String() string {
	q := jsoncTensorText("float32", g.batch, g.seq, 8)
	in := []string{q, q, q, `{"data": null}`, `{"data": null}`, g.lens, g.total, `{"data": null}`, `{"data": null}`, `{"data": null}`, `{"data": null}`, `{"data": null}`}
	if g.past >= 0 {
		in[3] = jsoncTensorText("float32", g.batch, 1, g.past, 8)
		in[4] = in[3]
	}
	for i, text := range g.inputs {
		for len(in) <= i {
			in = append(in, `{"data": null}`)
		}
		in[i] = text
	}
	attributes := g.attributes
	for _, name := range []string{"num_heads", "kv_num_heads"} {
		if !strings.Contains(attributes, `"`+name+`"`) {
			attributes = fmt.Sprintf(`{"name": %q, "data": 1, "type": "int"}, %s`, name, attributes)
		}
	}
	return fmt.Sprintf(`[{"name": "bad", "operator": "GroupQueryAttention", "opset": {"domain": "com.microsoft", "version": 1},
		"attributes": [%s],
		"cases": [{"name": "case", "inputs": [%s], "outputs": [%s],},],},]`, attributes, strings.Join(in, ", "), q)
}

// quantText returns the attribute with the kind of factors of a cache, of keys (k) or values (v).
func quantText(of, kind string) string {
	return fmt.Sprintf(`{"name": "%s_quant_type", "data": %q, "type": "string"}`, of, kind)
}

// slidingText is the attributes of a cache of a window of two keys.
const slidingText = `{"name": "sliding_window_cache", "data": 1, "type": "int"}, {"name": "local_window_size", "data": 2, "type": "int"}`

func numbers(n ...int) string {
	return fmt.Sprintf(`{"type": "int32", "dims": [%d], "data": %s}`, len(n), strings.ReplaceAll(fmt.Sprint(n), " ", ","))
}

// TestGroupQueryRefused has the bad inputs of ONNX Runtime's test of the operator, under their names there, and more.
func TestGroupQueryRefused(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(g *gqaText)
		says   string // "" when the case is valid
	}{
		{"BoundaryValidSeqlensK", func(*gqaText) {}, ""},
		{"NegativeSeqlensK_OOB", func(g *gqaText) { g.lens = numbers(-5) }, "seqlens_k[0] is -5, it must be 0 to"},
		{"OversizedSeqlensK_OOB", func(g *gqaText) { g.lens = numbers(100) }, "seqlens_k[0] is 100, it must be 0 to"},
		{"MultiBatchOneBadSeqlensK_OOB", func(g *gqaText) { g.batch, g.lens = 2, numbers(0, -3) }, "seqlens_k[1] is -3"},
		{"NegativeSeqlensKWithPast_OOB", func(g *gqaText) { g.past, g.lens, g.total = 1, numbers(-1), numbers(2) }, "seqlens_k[0] is -1"},
		{"BoundaryValidSeqlensKWithLargerPast", func(g *gqaText) { g.past, g.lens, g.total = 4, numbers(1), numbers(2) }, ""},
		{"NonPromptSeqlensKUnderflow_OOB", func(g *gqaText) { g.seq, g.past, g.lens, g.total = 3, 4, numbers(1), numbers(5) }, "seqlens_k[0] is 1, which is too small for a query sequence of 3"},
		{"Int32MaxSeqlensK_OOB", func(g *gqaText) { g.lens = numbers(1<<31 - 1) }, "seqlens_k[0] is 2147483647"},
		{"MaxBoundarySeqlensK", func(g *gqaText) { g.past, g.lens, g.total = 4, numbers(3), numbers(4) }, ""},
		{"OffByOneSeqlensK_OOB", func(g *gqaText) { g.past, g.lens, g.total = 4, numbers(4), numbers(4) }, "seqlens_k[0] is 4, it must be 0 to 3"},
		{"TotalSeqLenZero", func(g *gqaText) { g.total = numbers(0) }, "total_sequence_length is 0, it must be positive"},
		{"TotalSeqLenNegative", func(g *gqaText) { g.total = numbers(-5) }, "total_sequence_length is -5, it must be positive"},
		{"SeqlensKLegacy2DShape", func(g *gqaText) { g.lens = `{"type": "int32", "dims": [1, 1], "data": [0]}` }, ""},
		{"SeqlensKLegacy2DShapeMultiBatch", func(g *gqaText) { g.batch, g.lens = 2, `{"type": "int32", "dims": [2, 1], "data": [0, 0]}` }, ""},
		{"SeqlensKLegacy2DShapeTrailingBatch", func(g *gqaText) { g.batch, g.lens = 2, `{"type": "int32", "dims": [1, 2], "data": [0, 0]}` }, ""},
		{"SeqlensKInvalidFactoredShape", func(g *gqaText) { g.batch, g.lens = 4, `{"type": "int32", "dims": [2, 2], "data": [0, 0, 0, 0]}` }, "seqlens_k has shape [2 2], it must be [4], [4 1] or [1 4]"},
		{"SeqlensKWrongLength", func(g *gqaText) { g.lens = numbers(0, 0) }, "seqlens_k has shape [2], it must be [1]"},
		{"SeqlensKWrongElementCount2D", func(g *gqaText) { g.lens = `{"type": "int32", "dims": [2, 1], "data": [0, 0]}` }, "seqlens_k has shape [2 1], it must be [1]"},
		{"SeqlensKScalarRejected", func(g *gqaText) { g.lens = `{"type": "int32", "dims": [], "data": [0]}` }, "seqlens_k has shape [], it must be [1]"},
		{"SharedKV_EmptyKV_WithPast", func(g *gqaText) {
			g.past, g.lens, g.total = 8, numbers(7), numbers(8)
			g.inputs[1] = jsoncTensorText("float32", 1, 0, 8)
			g.inputs[2] = g.inputs[1]
		}, ""},

		{"more keys in all than there are", func(g *gqaText) { g.total = numbers(1 << 30) }, "total_sequence_length is 1073741824, it must be positive and at most 1"},
		{"no lengths", func(g *gqaText) { g.lens = `{"data": null}` }, "input seqlens_k is missing"},
		{"lengths of int64", func(g *gqaText) { g.lens = jsoncTensorText("int64", 1) }, "seqlens_k is int64, it must be int32"},
		{"two totals", func(g *gqaText) { g.total = numbers(1, 1) }, "total_sequence_length has shape [2]"},
		{"a query of 4 axes", func(g *gqaText) { g.inputs[0] = jsoncTensorText("float32", 1, 1, 1, 8) }, "query has shape [1 1 1 8]"},
		{"a key without a value", func(g *gqaText) { g.inputs[2] = `{"data": null}` }, "key has shape [1 1 8] and value missing"},
		{"a key of another size", func(g *gqaText) { g.inputs[1] = jsoncTensorText("float32", 1, 1, 16) }, "key has shape [1 1 16], it must be [1 1 8]"},
		{"a past key alone", func(g *gqaText) { g.inputs[3] = jsoncTensorText("float32", 1, 1, 1, 8) }, "they need each other"},
		{"a past of two lengths", func(g *gqaText) { g.past, g.inputs = 1, map[int]string{4: jsoncTensorText("float32", 1, 1, 2, 8)} }, "past_value has shape [1 1 2 8]"},
		{"a key of another type", func(g *gqaText) { g.inputs[1] = jsoncTensorText("float16", 1, 1, 8) }, "key is f16 and query f32"},
		{"rotary without angles", func(g *gqaText) { g.attributes = `{"name": "do_rotary", "data": 1, "type": "int"}` }, "do_rotary needs both"},
		{"a position without angles", func(g *gqaText) {
			g.attributes = `{"name": "do_rotary", "data": 1, "type": "int"}`
			g.past, g.lens, g.total = 2, numbers(2), numbers(3)
			g.inputs[7] = jsoncTensorText("float32", 2, 4)
			g.inputs[8] = g.inputs[7]
		}, "position 2 (element 0) has no row in cos_cache, it must be 0 to 1"},
		{"a bias of another shape", func(g *gqaText) { g.inputs[10] = jsoncTensorText("float32", 1, 1, 1, 2) }, "attention_bias has shape [1 1 1 2], it must be [1 or 1, 1 or 1, 1, 1]"},
		{"sinks of other heads", func(g *gqaText) { g.inputs[11] = jsoncTensorText("float32", 2) }, "head_sink has shape [2], it must be [1]"},
		{"no window", func(g *gqaText) { g.attributes = `{"name": "local_window_size", "data": 0, "type": "int"}` }, "local_window_size is 0"},
		{"a softcap below 0", func(g *gqaText) { g.attributes = `{"name": "softcap", "data": -1.5, "type": "float"}` }, "softcap is -1.5"},
		{"an unknown attribute", func(g *gqaText) { g.attributes = `{"name": "k_bits", "data": 8, "type": "int"}` }, `attribute "k_bits" is none of GroupQueryAttention`},
		{"heads that do not divide", func(g *gqaText) { g.attributes = `{"name": "kv_num_heads", "data": 3, "type": "int"}` }, "num_heads is 1 and kv_num_heads 3"},
		{"an attribute twice", func(g *gqaText) {
			g.attributes = `{"name": "softcap", "data": 1.5, "type": "float"}, {"name": "softcap", "data": 2, "type": "float"}`
		}, `attribute "softcap" is given twice`},
		{"a norm of queries alone", func(g *gqaText) { g.inputs[14] = jsoncTensorText("float32", 8) }, "q_norm_weight has shape [8] and k_norm_weight missing: they need each other"},
		{"norms of another size", func(g *gqaText) {
			g.inputs[14], g.inputs[15] = jsoncTensorText("float32", 8), jsoncTensorText("float32", 4)
		}, "k_norm_weight [4]: they need each other, and must be [8]"},
		{"norms of f16", func(g *gqaText) {
			g.inputs[14], g.inputs[15] = jsoncTensorText("float16", 8), jsoncTensorText("float32", 8)
		}, "q_norm_weight is f16 and query f32"},
		{"norms without epsilon", func(g *gqaText) {
			g.attributes = `{"name": "qk_norm_epsilon", "data": 0, "type": "float"}`
			g.inputs[14], g.inputs[15] = jsoncTensorText("float32", 8), jsoncTensorText("float32", 8)
		}, "attribute qk_norm_epsilon is 0, it must be above 0"},
		{"scores without an output", func(g *gqaText) { g.attributes = `{"name": "qk_output", "data": 1, "type": "int"}` }, "attribute qk_output and the output output_qk need each other"},
		{"scores of another kind", func(g *gqaText) { g.attributes = `{"name": "qk_output", "data": 3, "type": "int"}` }, "qk_output is 3, it must be 0 to 2"},
		{"a window without causality", func(g *gqaText) {
			g.attributes = `{"name": "causal", "data": 0, "type": "int"}, {"name": "local_window_size", "data": 2, "type": "int"}`
		}, "attribute causal is 0 and local_window_size 2"},
		{"a scale alone", func(g *gqaText) { g.inputs[12] = jsoncTensorText("float32", 1) }, "k_scale has shape [1] for a cache of the kind NONE"},
		{"quantized keys alone", func(g *gqaText) { g.attributes = quantText("k", "PER_TENSOR") }, "attribute k_quant_type is PER_TENSOR, v_quant_type NONE and kv_cache_bit_width 8"},
		{"4 bits", func(g *gqaText) {
			g.attributes = quantText("k", "PER_TENSOR") + ", " + quantText("v", "PER_TENSOR") + `, {"name": "kv_cache_bit_width", "data": 4, "type": "int"}`
		}, "and kv_cache_bit_width 4: attn has quantized caches of 8 bits"},
		{"no scale", func(g *gqaText) { g.attributes = quantText("k", "PER_TENSOR") + ", " + quantText("v", "PER_TENSOR") }, "k_scale has shape missing for a cache of the kind PER_TENSOR"},
		{"a scale of another size", func(g *gqaText) {
			g.attributes = quantText("k", "PER_TENSOR") + ", " + quantText("v", "PER_CHANNEL")
			g.inputs[12], g.inputs[13] = jsoncTensorText("float32", 1), jsoncTensorText("float32", 1)
		}, "v_scale has shape [1] for a cache of the kind PER_CHANNEL: it must have 1 element of f32 for PER_TENSOR, 1·8"},
		{"a scale of 0", func(g *gqaText) {
			g.attributes = quantText("k", "PER_TENSOR") + ", " + quantText("v", "PER_TENSOR")
			g.inputs[12], g.inputs[13] = `{"type": "float32", "dims": [1], "data": [0]}`, jsoncTensorText("float32", 1)
		}, "k_scale has the element 0, it must be above 0 and finite"},
		{"a quantized cache of floats", func(g *gqaText) {
			g.past, g.lens, g.total = 1, numbers(1), numbers(2)
			g.attributes = quantText("k", "PER_TENSOR") + ", " + quantText("v", "PER_TENSOR")
			g.inputs[12], g.inputs[13] = jsoncTensorText("float32", 1), jsoncTensorText("float32", 1)
		}, "past_key is f32, it must be int8 for k_quant_type PER_TENSOR"},
		{"NaN in int8", func(g *gqaText) {
			g.attributes = quantText("k", "PER_TENSOR") + ", " + quantText("v", "PER_TENSOR")
			g.inputs[12], g.inputs[13] = jsoncTensorText("float32", 1), jsoncTensorText("float32", 1)
			g.inputs[2] = strings.Replace(jsoncTensorText("float32", 1, 1, 8), "1,1]", `1,"NaN"]`, 1)
		}, "value has a NaN, which int8 cannot represent"},
		{"a cache of no window", func(g *gqaText) { g.attributes = `{"name": "sliding_window_cache", "data": 1, "type": "int"}` }, "attribute sliding_window_cache is 1, local_window_size -1"},
		{"a cache of a window", func(g *gqaText) {
			g.past, g.lens, g.total, g.attributes = 2, numbers(1000), numbers(1001), slidingText
		}, ""},
		{"a small cache of a window", func(g *gqaText) {
			g.past, g.lens, g.total, g.attributes = 1, numbers(1), numbers(2), slidingText
		}, "past_key has shape [1 1 1 8], sliding_window_cache needs it with at least the 2 rows"},
		{"no cache of a window", func(g *gqaText) { g.attributes = slidingText }, "past_key has shape missing, sliding_window_cache needs it"},
		{"a cache of a window alone", func(g *gqaText) {
			g.past, g.lens, g.total, g.attributes = 2, numbers(1), numbers(2), slidingText
			g.inputs[1] = jsoncTensorText("float32", 1, 0, 8)
			g.inputs[2] = g.inputs[1]
		}, "key has no rows, sliding_window_cache needs those of query"},
		{"more tokens than in all", func(g *gqaText) {
			g.past, g.lens, g.total, g.attributes = 2, numbers(5), numbers(5), slidingText
		}, "seqlens_k[0] is 5, it must be one less than the tokens of the batch: from the 1 rows of query, or 1 in a prompt, to total_sequence_length, 5"},
		{"fewer tokens than queries", func(g *gqaText) {
			g.seq, g.past, g.lens, g.total, g.attributes = 3, 2, numbers(1), numbers(5), slidingText
		}, "seqlens_k[0] is 1, it must be one less than the tokens"},
		{"no heads", func(g *gqaText) { g.attributes = `{"name": "num_heads", "data": 0, "type": "int"}` }, "num_heads is 0"},
		{"no heads of keys", func(g *gqaText) { g.attributes = `{"name": "kv_num_heads", "data": 0, "type": "int"}` }, "attribute kv_num_heads is 0, it must be 1 to 2147483647"},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := newGQAText()
			c.change(g)
			if g.batch > 1 && c.says == "" && !strings.Contains(g.lens, ", ") {
				t.Fatal("each batch has a length")
			}
			file := clitest.WriteFile(t, t.TempDir(), "case.jsonc", []byte(g.String()))
			if c.says == "" {
				code, stdout, stderr := attn(t, "--jsonc", "--backend", "cpu", file)
				// Keys and values of ones give ones.
				if code != 0 || !strings.HasSuffix(stdout, "\n1 passed, 0 failed\n") {
					t.Errorf("exit code %d, stderr %q:\n%s", code, stderr, stdout)
				}
				return
			}
			wantJSONCFailure(t, file, c.says)
		})
	}
}

// wantJSONCFailure runs a file with one failing case.
func wantJSONCFailure(t *testing.T, file, says string) {
	t.Helper()
	code, stdout, stderr := attn(t, "--jsonc", "--backend", "cpu", file)
	if code != 1 || stderr != "" || !strings.HasPrefix(stdout, "FAIL  "+file) || !strings.Contains(stdout, says) || strings.Count(stdout, "\n") != 2 || !strings.HasSuffix(stdout, "\n0 passed, 1 failed\n") {
		t.Errorf("exit code %d, stderr %q, should say %q:\n%s", code, stderr, says, stdout)
	}
}

// TestJSONCFailures reads files that are damaged, of something else or missing.
func TestJSONCFailures(t *testing.T) {
	text := must.Get(os.ReadFile(publishedJSONC(t)[0]))(t)
	one := func(test string) []byte { return []byte("[\n// a comment, then one test\n" + test + ",]") }
	tensor := func(text string) []byte {
		return one(`{"name": "x", "operator": "GroupQueryAttention", "opset": {"domain": "com.microsoft", "version": 1},
			"attributes": [{"name": "num_heads", "data": 1, "type": "int"}, {"name": "kv_num_heads", "data": 1, "type": "int"}], "cases": [{"inputs": [` + text + `]}]}`)
	}
	for _, c := range []struct {
		name string
		text []byte
		says string
	}{
		{"empty", nil, "not a list of tests"},
		{"binary", []byte("\x7fELF\x02\x01\x00"), "not a list of tests"},
		{"an object", []byte("{}"), "not a list of tests"},
		{"a list of nothing", []byte("[ /* none */ ]"), "there are no tests in it"},
		{"cut short", text[:len(text)/2], "not JSON: the file is cut short"},
		{"no JSON", []byte("[\n\n  hello]"), "line 3: not JSON"},
		{"nested deeply", []byte(strings.Repeat("[", 1<<20)), "exceeded max depth"},
		{"a list of numbers", []byte("[1]"), "[0]: the element is a number"},
		{"a test without cases", one(`{"name": "x", "operator": "GroupQueryAttention"}`), "it has no cases"},
		{"a name of two lines", one(`{"name": "evil\u001b[2J\nok", "cases": [{}]}`), "[0] evil"},
		{"another operator", one(`{"name": "x", "operator": "Add", "opset": {"domain": "", "version": 7}, "cases": [{"name": "T[0]"}]}`), `x, T[0]: the node is "Add" of domain ""`},
		{"another domain", one(`{"name": "x", "operator": "GroupQueryAttention", "cases": [{}]}`), `the node is "GroupQueryAttention" of domain ""`},
		{"another version", one(`{"name": "x", "operator": "GroupQueryAttention", "opset": {"domain": "com.microsoft", "version": 2}, "cases": [{}]}`), `GroupQueryAttention is known from 1 to 1`},
		{"cases of another kind", one(`{"name": "x", "cases": 3}`), "[0] x: not a list"},
		{"10,001 cases", one(`{"name": "x", "cases": [{}` + strings.Repeat(",{}", 10_000) + "]}"), "[0] x: it has more than 10000 elements"},
		{"10,001 tests", []byte("[{}" + strings.Repeat(",{}", 10_000) + "]"), "it has more than 10000 elements"},
		{"an attribute that is a list", one(`{"name": "x", "operator": "GroupQueryAttention", "opset": {"domain": "com.microsoft", "version": 1},
			"attributes": [{"name": "num_heads", "data": [1], "type": "ints"}], "cases": [{}]}`), "attribute num_heads is a undefined, it must be a int"},
		{"an attribute of another kind", one(`{"name": "x", "operator": "GroupQueryAttention", "opset": {"domain": "com.microsoft", "version": 1},
			"attributes": [{"name": "num_heads", "data": 1.5, "type": "int"}], "cases": [{}]}`), `attribute "num_heads": the element is a number 1.5`},
		{"a case of another kind", one(`{"name": "x", "cases": ["T"]}`), "x, case 0: the element is a string"},
		{"no inputs", tensor(""), "input query is missing"},
		{"an unknown type", tensor(`{"data": [1], "dims": [1], "type": "uint4"}`), `input 0, query: its type is "uint4"`},
		{"no dims", tensor(`{"data": [1], "type": "float32"}`), "input 0, query: it has no dims"},
		{"too few numbers", tensor(`{"data": [1, 2], "dims": [3], "type": "float32"}`), "shape [3] of f32 needs 12 bytes, there are 8"},
		{"huge dims", tensor(`{"data": [1], "dims": [2147483647, 2147483647, 2147483647], "type": "float32"}`), "is too large"},
		{"dims below 0", tensor(`{"data": [1], "dims": [-1], "type": "float32"}`), "its length along axis 0 is -1"},
		{"dims of another kind", tensor(`{"data": [1], "dims": [1.5], "type": "float32"}`), "inputs: dims is a number 1.5"},
		{"numbers beyond f32", tensor(`{"data": [1e39], "dims": [1], "type": "float32"}`), "element 0 is 1e39, not a f32"},
		{"a number of many digits", tensor(`{"data": [1` + strings.Repeat("0", 9000) + `], "dims": [1], "type": "float32"}`), "element 0 is 1" + strings.Repeat("0", 39) + ", not a f32"},
		{"many axes", tensor(`{"data": [1], "dims": [1` + strings.Repeat(",1", 9000) + `], "type": "float32"}`), "it has 9001 axes, at most 8 are read"},
		{"a list in a list", tensor(`{"data": [[1]], "dims": [1], "type": "float32"}`), "element 0 is [, not a f32"},
		{"data without a list", tensor(`{"data": 1, "dims": [1], "type": "float32"}`), "its data is not a list"},
		{"a fraction for an integer", tensor(`{"data": [1.5], "dims": [1], "type": "int32"}`), "element 0 is 1.5, not a int32"},
		{"too many inputs", tensor(strings.TrimSuffix(strings.Repeat(`{"data": null},`, 20), ",")), "the node has 20 inputs"},
	} {
		t.Run(c.name, func(t *testing.T) {
			file := clitest.WriteFile(t, t.TempDir(), "case.jsonc", c.text)
			wantJSONCFailure(t, file, c.says)
		})
	}
	t.Run("no file", func(t *testing.T) { wantJSONCFailure(t, filepath.Join(t.TempDir(), "none.jsonc"), "no such file") })
	t.Run("a directory", func(t *testing.T) { wantJSONCFailure(t, t.TempDir(), "is a directory") })
	t.Run("other numbers", func(t *testing.T) {
		file := clitest.WriteFile(t, t.TempDir(), "case.jsonc", []byte(strings.Replace(newGQAText().String(), `"outputs": [{"type": "float32", "dims": [1,1,8], "data": [1,`, `"outputs": [{"type": "float32", "dims": [1,1,8], "data": [2,`, 1)))
		wantJSONCFailure(t, file, "bad, case: output[0][0][0] is 1, should be 2")
	})
}
