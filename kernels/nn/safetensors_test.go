package nn_test

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"math/cmplx"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/x448/float16"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/kernels/nn"
)

// stored is a tensor of a file.
type stored struct {
	dtype string
	shape []int
	data  []float32
}

// safetensors returns a file of tensors, after the format's description.
func safetensors(tensors map[string]stored) []byte {
	var data []byte
	header := map[string]any{"__metadata__": map[string]string{"format": "pt"}}
	for _, name := range slices.Sorted(maps.Keys(tensors)) {
		s, start := tensors[name], len(data)
		for _, x := range s.data {
			switch bits := math.Float32bits(x); s.dtype {
			case "F32":
				data = binary.LittleEndian.AppendUint32(data, bits)
			case "F64":
				data = binary.LittleEndian.AppendUint64(data, math.Float64bits(float64(x)))
			case "F16":
				data = binary.LittleEndian.AppendUint16(data, float16.Fromfloat32(x).Bits())
			case "BF16":
				data = binary.LittleEndian.AppendUint16(data, uint16(bits>>16))
			default: // of one byte
				data = append(data, byte(x))
			}
		}
		header[name] = map[string]any{"dtype": s.dtype, "shape": s.shape, "data_offsets": []int{start, len(data)}}
	}
	text, err := json.Marshal(header)
	if err != nil {
		panic(err)
	}
	return append(append(binary.LittleEndian.AppendUint64(nil, uint64(len(text))), text...), data...)
}

// patterned returns tensors of these shapes, whose elements follow from their places and the lengths of the names.
func patterned(shapes map[string][]int) map[string]stored {
	tensors := map[string]stored{}
	for name, shape := range shapes {
		s := stored{"F32", shape, nil}
		n := 1
		for _, l := range shape {
			n *= l
		}
		for i := range n {
			s.data = append(s.data, float32((i*7+len(name))%11-5)/8)
		}
		tensors[name] = s
	}
	return tensors
}

// read loads a layer from a file of tensors.
func read[W any](load func(io.ReaderAt, int64, string) (W, error), prefix string, tensors map[string]stored) (W, error) {
	file := safetensors(tensors)
	return load(bytes.NewReader(file), int64(len(file)), prefix)
}

// grouped is a layer whose weights all have different shapes, none of a multiple of 16 columns.
var grouped = nn.MultiHeadConfig{Model: 40, Memory: 24, Heads: 4, KVHeads: 2, HeadDim: 9, ValueDim: 7, Bias: true}

// module has weights as their modules store them.
type module struct {
	t    *testing.T
	data map[string][]float32 // wq to bo, [in, out]
	c    nn.MultiHeadConfig
}

// modules returns a layer's weights, which all types represent, and the same for modules.
func modules(t *testing.T, c nn.MultiHeadConfig) (nn.MultiHeadWeights, module) {
	t.Helper()
	w := must.Get(c.Initialise(nn.Initialiser{Seed: 9}))(t)
	m := module{t, map[string][]float32{}, c}
	for i, data := range numbers(t, w)[:8] {
		for j := range data {
			if i >= 4 {
				data[j] = float32(i*64 + j)
			}
			data[j] = kernels.BF16.Round(kernels.F16.Round(data[j]))
		}
		m.data[[]string{"wq", "wk", "wv", "wo", "bq", "bk", "bv", "bo"}[i]] = data
	}
	return w, m
}

// conv is the weight of kinds next to each other as GPT-2's Conv1D stores it: [in, out].
func (m module) conv(kinds string) (s stored) {
	in := map[byte]int{'q': 40, 'k': m.c.Memory, 'v': m.c.Memory, 'o': 28}[kinds[0]]
	for row := range in {
		for _, kind := range kinds {
			w := m.data["w"+string(kind)]
			s.data = append(s.data, w[row*len(w)/in:(row+1)*len(w)/in]...)
		}
	}
	s.dtype, s.shape = "F32", []int{in, len(s.data) / in}
	return s
}

// linear is the same as PyTorch's Linear stores it: [out, in].
func (m module) linear(kinds string) (s stored) {
	c := m.conv(kinds)
	s.dtype, s.shape = "F32", []int{c.shape[1], c.shape[0]}
	for out := range s.shape[0] {
		for in := range s.shape[1] {
			s.data = append(s.data, c.data[in*s.shape[0]+out])
		}
	}
	return s
}

// bias is the bias of kinds next to each other: [out].
func (m module) bias(kinds string) (s stored) {
	for _, kind := range kinds {
		s.data = append(s.data, m.data["b"+string(kind)]...)
	}
	s.dtype, s.shape = "F32", []int{len(s.data)}
	return s
}

// inLayouts are layers as families of models store them, each in the terms of its modules.
var inLayouts = []struct {
	name   string
	packed bool // which needs Memory equal to Model
	prefix string
	module func(m module) map[string]stored
}{
	{"q_proj k_proj v_proj o_proj", false, "model.layers.0.self_attn.", func(m module) map[string]stored {
		return m.separate("q_proj", "k_proj", "v_proj", "o_proj")
	}},
	{"q_proj k_proj v_proj out_proj", false, "decoder.layers.0.self_attn.", func(m module) map[string]stored {
		return m.separate("q_proj", "k_proj", "v_proj", "out_proj")
	}},
	{"wq wk wv wo of Meta", false, "layers.0.attention.", func(m module) map[string]stored {
		return m.separate("wq", "wk", "wv", "wo")
	}},
	{"BERT", false, "encoder.layer.0.attention.", func(m module) map[string]stored {
		return m.separate("self.query", "self.key", "self.value", "output.dense")
	}},
	{"qkv_proj o_proj", true, "", func(m module) map[string]stored {
		return map[string]stored{"qkv_proj.weight": m.linear("qkv"), "o_proj.weight": m.linear("o"), "qkv_proj.bias": m.bias("qkv"), "o_proj.bias": m.bias("o")}
	}},
	{"qkv proj", true, "", func(m module) map[string]stored {
		return map[string]stored{"qkv.weight": m.linear("qkv"), "proj.weight": m.linear("o"), "qkv.bias": m.bias("qkv"), "proj.bias": m.bias("o")}
	}},
	{"MultiheadAttention", true, "", func(m module) map[string]stored {
		return map[string]stored{"in_proj_weight": m.linear("qkv"), "in_proj_bias": m.bias("qkv"), "out_proj.weight": m.linear("o"), "out_proj.bias": m.bias("o")}
	}},
	{"MultiheadAttention with kdim", false, "", func(m module) map[string]stored {
		return map[string]stored{"q_proj_weight": m.linear("q"), "k_proj_weight": m.linear("k"), "v_proj_weight": m.linear("v"), "in_proj_bias": m.bias("qkv"),
			"out_proj.weight": m.linear("o"), "out_proj.bias": m.bias("o")}
	}},
	{"c_attn c_proj", true, "", func(m module) map[string]stored {
		return map[string]stored{"c_attn.weight": m.conv("qkv"), "c_attn.bias": m.bias("qkv"), "c_proj.weight": m.conv("o"), "c_proj.bias": m.bias("o")}
	}},
	{"wq wk wv wo", false, "", func(m module) map[string]stored {
		return map[string]stored{"wq": m.conv("q"), "wk": m.conv("k"), "wv": m.conv("v"), "wo": m.conv("o"), "bq": m.bias("q"), "bk": m.bias("k"), "bv": m.bias("v"), "bo": m.bias("o")}
	}},
}

// separate has a Linear module for each of q, k, v and o.
func (m module) separate(modules ...string) map[string]stored {
	all := map[string]stored{}
	for i, name := range modules {
		all[name+".weight"], all[name+".bias"] = m.linear("qkvo"[i:i+1]), m.bias("qkvo"[i:i+1])
	}
	return all
}

// TestSafetensorsLayouts loads known weights from each layout in each type, from memory and
// from a file. They are those of the plain layer.
func TestSafetensorsLayouts(t *testing.T) {
	for _, l := range inLayouts {
		c := grouped
		if l.packed {
			c.Memory = c.Model
		}
		want, m := modules(t, c)
		modules := l.module(m)
		for _, dtype := range []string{"F32", "F16", "BF16", "F64"} {
			tensors := map[string]stored{}
			ignored := []string{"rotary_emb.inv_freq", "bias", "masked_bias", "output.LayerNorm.weight", "relative_position_index"}
			if l.prefix != "" {
				tensors["lm_head"], ignored = stored{"F8_E4M3", []int{3}, make([]float32, 3)}, append(ignored, "inner_attention.rope.freqs")
			}
			for _, name := range ignored {
				tensors[l.prefix+name] = stored{"F8_E4M3", []int{3}, make([]float32, 3)}
			}
			for name, s := range modules {
				tensors[l.prefix+name] = stored{dtype, s.shape, s.data}
			}
			content := safetensors(tensors)
			path := filepath.Join(t.TempDir(), "x.safetensors")
			must.Do(t, os.WriteFile(path, content, 0o600))
			file := must.Get(os.Open(path))(t)
			for kind, r := range map[string]io.ReaderAt{"memory": bytes.NewReader(content), "a file": file} {
				got, err := c.LoadSafetensors(r, int64(len(content)), l.prefix)
				if err != nil || !same(numbers(t, got), numbers(t, want)) || got.Wv.Shape() != want.Wv.Shape() || got.Bo.Shape() != want.Bo.Shape() {
					t.Errorf("%s, %s from %s: %v", l.name, dtype, kind, err)
				}
			}
			file.Close()
			if t.Failed() {
				return
			}
		}
	}
}

// product is a projection as the modules of PyTorch (linear: [out, in]) or GPT-2 (Conv1D: [in, out])
// compute it, from row first of the outputs on, n of them.
func product(x []float64, w, b stored, conv bool, first, n int) []float64 {
	y := make([]float64, n)
	for o := range y {
		if b.data != nil {
			y[o] = float64(b.data[first+o])
		}
		for i := range x {
			at := (first+o)*len(x) + i
			if conv {
				at = i*w.shape[1] + first + o
			}
			y[o] += x[i] * float64(w.data[at])
		}
	}
	return y
}

// rotateHalf rotates a head as Llama's implementation in transformers does, with the pairs
// (i, i+D/2); rotatePairs as that of Meta, with the pairs (2i, 2i+1) as complex numbers.
func rotateHalf(x []float64, at int) []float64 {
	y, half := make([]float64, len(x)), len(x)/2
	for i := range x {
		sin, cos := math.Sincos(float64(at) * math.Pow(10000, -float64(i%half)/float64(half)))
		other := -x[(i+half)%len(x)]
		if i >= half {
			other = -other
		}
		y[i] = x[i]*cos + other*sin
	}
	return y
}

func rotatePairs(x []float64, at int) []float64 {
	y := make([]float64, len(x))
	for i := 0; i < len(x); i += 2 {
		z := complex(x[i], x[i+1]) * cmplx.Rect(1, float64(at)*math.Pow(10000, -float64(i)/float64(len(x))))
		y[i], y[i+1] = real(z), imag(z)
	}
	return y
}

// TestSafetensorsLayers compares causal layers from files with the plain layer of the models that
// have such files, in float64: packed and separate weights, grouped heads, both rotations.
func TestSafetensorsLayers(t *testing.T) {
	const tokens, model, heads, d = 7, 24, 4, 6
	dev := onCPU(t)
	for i, c := range []struct {
		name       string
		kvHeads    int
		q, k, v, o string // modules; for one that is packed all but o are equal
		conv       bool
		rope       *nn.RoPE
		rotate     func(x []float64, at int) []float64
	}{
		{"Llama", 2, "q_proj", "k_proj", "v_proj", "o_proj", false, &nn.RoPE{}, rotateHalf},
		{"Llama of Meta", 2, "wq", "wk", "wv", "wo", false, &nn.RoPE{Interleaved: true}, rotatePairs},
		{"Phi-3", 2, "qkv_proj", "qkv_proj", "qkv_proj", "o_proj", false, &nn.RoPE{}, rotateHalf},
		{"GPT-2", 4, "c_attn", "c_attn", "c_attn", "c_proj", true, nil, nil},
		{"OPT", 4, "q_proj", "k_proj", "v_proj", "out_proj", false, nil, nil},
	} {
		rng := rand.New(rand.NewPCG(uint64(i), 7))
		normal := func(shape ...int) stored {
			n := 1
			for _, l := range shape {
				n *= l
			}
			s := stored{"F32", shape, make([]float32, n)}
			for i := range s.data {
				s.data[i] = float32(rng.NormFloat64() / 4)
			}
			return s
		}
		out := map[string]int{c.o: model}
		first := map[string]int{} // of k and v in a packed tensor
		for _, p := range []struct {
			kind, name string
			n          int
		}{{"q", c.q, heads * d}, {"k", c.k, c.kvHeads * d}, {"v", c.v, c.kvHeads * d}} {
			first[p.kind] = out[p.name]
			out[p.name] += p.n
		}
		tensors := map[string]stored{}
		for _, name := range slices.Sorted(maps.Keys(out)) {
			tensors[name+".weight"], tensors[name+".bias"] = normal(out[name], model), normal(out[name])
			if c.conv {
				tensors[name+".weight"] = normal(model, out[name])
			}
		}
		config := nn.MultiHeadConfig{Model: model, Heads: heads, KVHeads: c.kvHeads, Bias: true, RoPE: c.rope}
		content := safetensors(tensors)
		w := must.Get(config.LoadSafetensors(bytes.NewReader(content), int64(len(content)), ""))(t)
		layer := must.Get(nn.NewMultiHeadAttention(t.Context(), dev, config, w))(t)
		defer layer.Release()
		x := random(t, dev, uint64(i), 1, 1, tokens, model)
		r := must.Get(layer.Apply(t.Context(), x, nn.MultiHeadOptions{Options: kernels.Options{Causal: true}}))(t)
		defer r.Release()
		got, errO := dev.ToFloat32(t.Context(), r.O)
		in, errX := dev.ToFloat32(t.Context(), x)
		if errO != nil || errX != nil {
			t.Fatal(errO, errX)
		}
		// head returns head h of q, k or v of a token.
		head := func(kind, name string, h, token int) []float64 {
			row := make([]float64, model)
			for i := range row {
				row[i] = float64(in[token*model+i])
			}
			y := product(row, tensors[name+".weight"], tensors[name+".bias"], c.conv, first[kind]+h*d, d)
			if c.rotate != nil && kind != "v" {
				y = c.rotate(y, token)
			}
			return y
		}
		for token := range tokens {
			var joined []float64
			for h := range heads {
				kv, q := h/(heads/c.kvHeads), head("q", c.q, h, token)
				o, sum := make([]float64, d), 0.0
				for j := range token + 1 {
					score := 0.0
					for i, k := range head("k", c.k, kv, j) {
						score += q[i] * k / math.Sqrt(d)
					}
					p := math.Exp(score)
					sum += p
					for i, v := range head("v", c.v, kv, j) {
						o[i] += p * v
					}
				}
				for i := range o {
					joined = append(joined, o[i]/sum)
				}
			}
			want := product(joined, tensors[c.o+".weight"], tensors[c.o+".bias"], c.conv, 0, model)
			for i := range want {
				// A score sums at most 48 products whose magnitudes add up to less than 32: it is off by
				// less than 2^11 roundings of 2^-24, and so is the weight, in sums of less than 8.
				if y := float64(got[token*model+i]); !(math.Abs(y-want[i]) <= 0x1p-10) {
					t.Fatalf("%s: y[%d,%d] is %v, should be %v", c.name, token, i, y, want[i])
				}
			}
		}
	}
}

// TestSafetensorsBiases: with Bias, biases that are not in the file are zeros, as those of o in
// Qwen and of k in Whisper.
func TestSafetensorsBiases(t *testing.T) {
	_, m := modules(t, grouped)
	tensors := m.separate("q_proj", "k_proj", "v_proj", "o_proj")
	delete(tensors, "o_proj.bias")
	delete(tensors, "k_proj.bias")
	content := safetensors(tensors)
	w := must.Get(grouped.LoadSafetensors(bytes.NewReader(content), int64(len(content)), ""))(t)
	got := numbers(t, w)
	if !slices.Equal(got[4], m.data["bq"]) || !slices.Equal(got[5], make([]float32, 18)) || !slices.Equal(got[7], make([]float32, 40)) {
		t.Errorf("biases are %v", got[4:8])
	}
}

func TestLoadSafetensorsRefuses(t *testing.T) {
	square := grouped
	square.Memory = square.Model
	none := grouped
	none.Bias = false
	_, m := modules(t, grouped)
	good := m.separate("a.q_proj", "a.k_proj", "a.v_proj", "a.o_proj")
	_, m = modules(t, square)
	for name, s := range map[string]stored{"mha.in_proj_weight": m.linear("qkv"), "mha.out_proj.weight": m.linear("o"), "mha.in_proj_bias": m.bias("qkv"), "mha.out_proj.bias": m.bias("o")} {
		good[name] = s
	}
	// with returns the good file with another tensor, under more names too, or without it.
	with := func(name string, s stored, more ...string) []byte {
		tensors := maps.Clone(good)
		for _, other := range more {
			tensors[other] = s
		}
		if tensors[name] = s; s.data == nil {
			delete(tensors, name)
		}
		return safetensors(tensors)
	}
	as := func(name, dtype string, change func(s *stored)) []byte {
		s := good[name]
		s.dtype, s.data, s.shape = dtype, slices.Clone(s.data), slices.Clone(s.shape)
		change(&s)
		return with(name, s)
	}
	whole := safetensors(good)
	for _, c := range []struct {
		name    string
		config  nn.MultiHeadConfig
		content []byte
		prefix  string
		want    error
		text    string
	}{
		{"config", nn.MultiHeadConfig{}, whole, "a.", kernels.ErrOption, "Model is 0"},
		{"another format", grouped, []byte("PK\x03\x04, an archive of arrays"), "a.", kernels.ErrFile, "not a .safetensors file"},
		{"truncated", grouped, whole[:len(whole)-1], "a.", kernels.ErrFile, "truncated: tensor"},
		{"another prefix", grouped, whole, "b.", kernels.ErrFile, `after the prefix "b." (one starts with q_proj.weight, wq.weight, self.query.weight, qkv_proj.weight, qkv.weight, in_proj_weight, q_proj_weight, c_attn.weight, wq); the file has ["a.k_proj.bias" `},
		{"a weight missing", grouped, with("a.o_proj.weight", stored{}), "a.", kernels.ErrFile, `the file has ["a.k_proj.bias" "a.k_proj.weight" "a.o_proj.bias" "a.q_proj.bias" "a.q_proj.weight" "a.v_proj.bias" "a.v_proj.weight"]`},
		{"biases too many", none, whole, "a.", kernels.ErrFile, `loading would ignore ["a.k_proj.bias" "a.o_proj.bias" "a.q_proj.bias" "a.v_proj.bias"]: set the field of the config`},
		{"no biases", grouped, safetensors(map[string]stored{"q_proj.weight": good["a.q_proj.weight"], "k_proj.weight": good["a.k_proj.weight"],
			"v_proj.weight": good["a.v_proj.weight"], "o_proj.weight": good["a.o_proj.weight"]}), "", kernels.ErrFile, "the config has Bias, but there is no q_proj.bias"},
		{"shape", square, whole, "a.", kernels.ErrShape, "a.k_proj.weight: shape is [18 24], for the config it must be [18 40]"},
		{"transposed", grouped, as("a.k_proj.weight", "F32", func(s *stored) { slices.Reverse(s.shape) }), "a.", kernels.ErrShape, "a.k_proj.weight: shape is [24 18], for the config it must be [18 24]"},
		{"packed and shape", square, as("mha.in_proj_weight", "F32", func(s *stored) { slices.Reverse(s.shape) }), "mha.", kernels.ErrShape, "mha.in_proj_weight: shape is [40 68], for the config it must be [68 40]"},
		{"packed for another memory", grouped, whole, "mha.", kernels.ErrShape, `"mha.in_proj_weight" has the weights of q, k and v, but Model is 40 and Memory 24: they must be equal`},
		{"integers", grouped, as("a.q_proj.bias", "I8", func(*stored) {}), "a.", kernels.ErrDType, "a.q_proj.bias: elements are i1, they must be f2, f4, f8 or bf16"},
		{"8-bit numbers", grouped, as("a.q_proj.bias", "F8_E5M2", func(*stored) {}), "a.", kernels.ErrDType, `a.q_proj.bias: tensor "a.q_proj.bias" is F8_E5M2, which is not read: convert it to F32, F16 or BF16`},
		{"norms of q and k", grouped, with("a.q_norm.weight", good["a.q_proj.bias"]), "a.", kernels.ErrFile, `loading would ignore ["a.q_norm.weight"]`},
		{"sinks", grouped, with("a.sinks", good["a.q_proj.bias"]), "a.", kernels.ErrFile, `would ignore ["a.sinks"]`},
		{"a gate", grouped, with("a.g_proj.weight", good["a.q_proj.bias"]), "a.", kernels.ErrFile, `would ignore ["a.g_proj.weight"]`},
		{"an indexer", grouped, with("a.indexer.wk.weight", good["a.q_proj.bias"]), "a.", kernels.ErrFile, `would ignore ["a.indexer.wk.weight"]`},
		{"a bias of another layout", grouped, with("a.bq", good["a.q_proj.bias"]), "a.", kernels.ErrFile, `would ignore ["a.bq"]`},
		{"biases of keys", square, with("mha.bias_k", good["a.q_proj.bias"]), "mha.", kernels.ErrFile, `would ignore ["mha.bias_k"]`},
		{"a factor of each head", grouped, with("a.k_proj.k_scale", stored{"F32", []int{2}, []float32{1, 1}}), "a.", kernels.ErrShape, "a.k_proj.k_scale: shape is [2], for the config it must be [1]"},
		{"a factor of integers", grouped, with("a.attn.v_scale", stored{"I8", []int{1}, []float32{1}}), "a.", kernels.ErrDType, "a.attn.v_scale: elements are i1"},
		{"a factor of both and one of keys", grouped, with("a.kv_scale", stored{"F32", []int{}, []float32{1}}, "a.k_proj.k_scale"), "a.", kernels.ErrFile, `would ignore ["a.k_proj.k_scale"]`},
		{"a factor of both and one of values", grouped, with("a.kv_scale", stored{"F32", []int{}, []float32{1}}, "a.v_scale"), "a.", kernels.ErrFile, `would ignore ["a.v_scale"]`},
		{"a factor of queries", grouped, with("a.attn.q_scale", stored{"F32", []int{}, []float32{1}}), "a.", kernels.ErrFile, `would ignore ["a.attn.q_scale"]`},
		{"4 bits", grouped, as("a.q_proj.bias", "NF4", func(*stored) {}), "a.", kernels.ErrDType, "is NF4, which is not read"},
	} {
		must.Fail(t, c.name, must.Err(c.config.LoadSafetensors(bytes.NewReader(c.content), int64(len(c.content)), c.prefix)), c.want, c.text)
	}
	must.Fail(t, "no reader", must.Err(grouped.LoadSafetensors(nil, 0, "")), kernels.ErrOption)
	// A file that shrinks, and memory that runs out.
	if _, err := square.LoadSafetensors(bytes.NewReader(whole[:len(whole)-9]), int64(len(whole)), "mha."); !errors.Is(err, kernels.ErrFile) || !errors.Is(err, io.EOF) {
		t.Errorf("a file that shrinks: %v", err)
	}
	for n := 1; ; n++ {
		stop := backend.FailMemory(n)
		_, err := grouped.LoadSafetensors(bytes.NewReader(whole), int64(len(whole)), "a.")
		if stop() < n {
			break
		}
		must.Fail(t, fmt.Sprintf("request %d of memory fails", n), err, kernels.ErrMemory)
	}
}
