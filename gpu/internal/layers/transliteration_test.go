package layers_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/kernels/kvcache"
	"github.com/seed90331342/attn/kernels/nn"
)

// transliterator is a trained encoder and decoder (Vaswani et al. 2017, layers normalised before): the test model
// aren-transliteration of CTranslate2, from Arabic to Latin letters. Attention and linear layers run on the device.
type transliterator struct {
	t        *testing.T
	dev      *kernels.Device
	vars     map[string]variable
	from, to []string // vocabularies
}

// variable has rows of cols elements.
type variable struct {
	cols int
	data []float32
}

const (
	translitLayers = 6
	translitHeads  = 8 // of every TransformerBase
	translitSize   = 32
)

// loadTransliterator reads model.bin of binary version 2: the version, the name and revision
// of the specification, then for each variable its name, lengths, element size and data.
func loadTransliterator(t *testing.T, dev *kernels.Device) *transliterator {
	x := &transliterator{t: t, dev: dev, vars: map[string]variable{}}
	folder := filepath.Join("testdata", "aren-transliteration")
	read := func(name string) []byte {
		return must.Get(os.ReadFile(filepath.Join(folder, name)))(t)
	}
	r := bytes.NewReader(read("model.bin"))
	get := func(to any) {
		must.Do(t, binary.Read(r, binary.LittleEndian, to))
	}
	text := func() string {
		var n uint16
		get(&n)
		b := make([]byte, n)
		get(b)
		return strings.TrimRight(string(b), "\x00")
	}
	var version, revision, count uint32
	get(&version)
	if name := text(); version != 2 || name != "TransformerBase" {
		t.Fatalf("model.bin has version %d of %s", version, name)
	}
	get(&revision)
	get(&count)
	for range count {
		name := text()
		var rank, size uint8
		get(&rank)
		lengths := make([]uint32, rank)
		get(lengths)
		get(&size)
		var n uint32
		get(&n)
		if size != 4 {
			t.Fatalf("%s has elements of %d bytes", name, size)
		}
		data := make([]float32, n)
		get(data)
		x.vars[name] = variable{int(lengths[rank-1]), data}
	}
	x.from = strings.Fields(string(read("source_vocabulary.txt")))
	x.to = strings.Fields(string(read("target_vocabulary.txt")))
	return x
}

// variable returns a variable that exists.
func (x *transliterator) variable(name string) variable {
	v, ok := x.vars[name]
	if !ok {
		x.t.Fatalf("the model has no %s", name)
	}
	return v
}

// linear returns rows lo to hi-1 of a weight, [outputs, inputs], transposed, and the same elements of its bias.
func (x *transliterator) linear(name string, lo, hi int) (w, b kernels.Tensor) {
	all := x.variable(name + "/weight")
	w = must.Get(nn.Transposed(all.data[lo*all.cols:hi*all.cols], all.cols))(x.t)
	b = must.Get(kernels.HostF32(x.variable(name + "/bias").data[lo:hi], kernels.Shape{1, 1, 1, hi - lo}))(x.t)
	return w, b
}

// attention returns the attention layer of a scope. A layer with two linear layers has the
// weights of q, k and v in the first, one with three has k and v in the second.
func (x *transliterator) attention(scope string) *nn.MultiHeadAttention {
	const m = translitSize
	var w nn.MultiHeadWeights
	if _, cross := x.vars[scope+"/linear_2/weight"]; cross {
		w.Wq, w.Bq = x.linear(scope+"/linear_0", 0, m)
		w.Wk, w.Bk = x.linear(scope+"/linear_1", 0, m)
		w.Wv, w.Bv = x.linear(scope+"/linear_1", m, 2*m)
		w.Wo, w.Bo = x.linear(scope+"/linear_2", 0, m)
	} else {
		w.Wq, w.Bq = x.linear(scope+"/linear_0", 0, m)
		w.Wk, w.Bk = x.linear(scope+"/linear_0", m, 2*m)
		w.Wv, w.Bv = x.linear(scope+"/linear_0", 2*m, 3*m)
		w.Wo, w.Bo = x.linear(scope+"/linear_1", 0, m)
	}
	l := must.Get(nn.NewMultiHeadAttention(x.t.Context(), x.dev, nn.MultiHeadConfig{Model: m, Heads: translitHeads, Bias: true}, w))(x.t)
	x.t.Cleanup(l.Release)
	return l
}

// apply runs an attention layer on rows of translitSize elements.
func (x *transliterator) apply(l *nn.MultiHeadAttention, rows []float32, opt nn.MultiHeadOptions) []float32 {
	out, _, err := l.ApplyFloat32(x.t.Context(), rows, 1, opt)
	must.Do(x.t, err)
	return out
}

// project runs a linear layer.
func (x *transliterator) project(name string, rows []float32) []float32 {
	w := x.variable(name + "/weight")
	l := must.Get(nn.NewLinear(x.t.Context(), x.dev, w.cols, w.data, x.variable(name+"/bias").data))(x.t)
	defer l.Release()
	out := must.Get(l.ApplyFloat32(x.t.Context(), rows))(x.t)
	return out
}

// norm normalises rows (Ba et al. 2016).
func (x *transliterator) norm(scope string, rows []float32) []float32 {
	gamma, beta := x.variable(scope+"/gamma").data, x.variable(scope+"/beta").data
	var y []float32
	for row := range slices.Chunk(rows, translitSize) {
		var sum, squares float64
		for _, v := range row {
			sum += float64(v)
		}
		mean := sum / translitSize
		for _, v := range row {
			squares += (float64(v) - mean) * (float64(v) - mean)
		}
		by := 1 / math.Sqrt(squares/translitSize+1e-5)
		for i, v := range row {
			y = append(y, float32((float64(v)-mean)*by)*gamma[i]+beta[i])
		}
	}
	return y
}

// feed adds the position-wise network.
func (x *transliterator) feed(scope string, rows []float32) {
	h := x.project(scope+"/linear_0", x.norm(scope+"/layer_norm", rows))
	for i := range h {
		h[i] = max(h[i], 0)
	}
	add(rows, x.project(scope+"/linear_1", h))
}

func add(x, y []float32) {
	for i := range x {
		x[i] += y[i]
	}
}

// embed returns the embeddings of tokens at positions from on, times √M, plus the encoding
// of their positions: sines, then cosines, of rates from 1 to 1/10000.
func (x *transliterator) embed(scope string, tokens []int, from int) (rows []float32) {
	table := x.variable(scope + "/embeddings/weight").data
	const half = translitSize / 2
	for i, token := range tokens {
		row := slices.Clone(table[token*translitSize : (token+1)*translitSize])
		for j := range half {
			angle := float64(from+i+1) * math.Pow(10000, -float64(j)/(half-1))
			row[j] = row[j]*float32(math.Sqrt(translitSize)) + float32(math.Sin(angle))
			row[half+j] = row[half+j]*float32(math.Sqrt(translitSize)) + float32(math.Cos(angle))
		}
		rows = append(rows, row...)
	}
	return rows
}

// transliterate returns the letters of prefix and then the most probable ones.
func (x *transliterator) transliterate(word, prefix string) string {
	ctx := x.t.Context()
	var tokens []int
	for _, letter := range word {
		tokens = append(tokens, slices.Index(x.from, string(letter)))
	}
	memory := x.embed("encoder", tokens, 0)
	for i := range translitLayers {
		scope := "encoder/layer_" + string(rune('0'+i))
		add(memory, x.apply(x.attention(scope+"/self_attention"), x.norm(scope+"/self_attention/layer_norm", memory), nn.MultiHeadOptions{}))
		x.feed(scope+"/ffn", memory)
	}
	memory = x.norm("encoder/layer_norm", memory)
	encoded := must.Get(x.dev.FromFloat32(ctx, kernels.F32, memory, kernels.Shape{1, 1, len(tokens), translitSize}))(x.t)
	defer encoded.Release()
	var self, cross []*nn.MultiHeadAttention
	var caches []*kvcache.Cache
	for i := range translitLayers {
		scope := "decoder/layer_" + string(rune('0'+i))
		self, cross = append(self, x.attention(scope+"/self_attention")), append(cross, x.attention(scope+"/attention"))
		c := must.Get(kvcache.New(ctx, x.dev, kvcache.Config{KVHeads: translitHeads, Dim: translitSize / translitHeads, Capacity: 32}))(x.t)
		defer c.Release()
		caches = append(caches, c)
	}
	tokens = []int{slices.Index(x.to, "<s>")}
	for _, letter := range prefix {
		tokens = append(tokens, slices.Index(x.to, string(letter)))
	}
	out := prefix
	for at := 0; at < 32; {
		h := x.embed("decoder", tokens, at)
		at += len(tokens)
		for i := range translitLayers {
			scope := "decoder/layer_" + string(rune('0'+i))
			add(h, x.apply(self[i], x.norm(scope+"/self_attention/layer_norm", h), nn.MultiHeadOptions{Cache: caches[i]}))
			add(h, x.apply(cross[i], x.norm(scope+"/attention/layer_norm", h), nn.MultiHeadOptions{Memory: encoded}))
			x.feed(scope+"/ffn", h)
		}
		logits := x.project("decoder/projection", x.norm("decoder/layer_norm", h[len(h)-translitSize:]))
		token := slices.Index(logits, slices.Max(logits))
		if x.to[token] == "</s>" {
			break
		}
		out, tokens = out+x.to[token], []int{token}
	}
	return out
}

// TestTransliteration runs a trained model with cross attention on each CPU tier and on the GPU. What it writes is
// stated in CTranslate2's translator_test.cc: TranslateBatch and TranslateBatchWithHardPrefixAndEmpty.
func TestTransliteration(t *testing.T) {
	test := func(t *testing.T, dev *kernels.Device, words int) {
		x := loadTransliterator(t, dev)
		for _, c := range []struct{ word, prefix, want string }{
			{"آتزمون", "ats", "atsumon"}, {"آتزمون", "", "atzmon"}, {"آتزمون", "atzo", "atzomon"}, {"آزا", "", "azza"},
		}[:words] {
			if got := x.transliterate(c.word, c.prefix); got != c.want {
				t.Errorf("%s is written %q, should be %q", c.word, got, c.want)
			}
		}
	}
	for _, tier := range cpu.Tiers() {
		t.Run(tier, func(t *testing.T) {
			dev := kernels.NewDevice(cpu.New(cpu.Options{Tier: tier}))
			t.Cleanup(func() { dev.Close() })
			test(t, dev, 4)
		})
	}
	t.Run("gpu", func(t *testing.T) {
		words := 4
		if testing.Short() {
			words = 1
		}
		test(t, onGPU(t), words)
	})
}

// TestRecording compares the queries, keys and values of a word with those that every backend is tested with.
func TestRecording(t *testing.T) {
	dev, recorder := kernelstest.Record(t, cpu.New(cpu.Options{}))
	loadTransliterator(t, dev).transliterate("آتزمون", "atzmon")
	var names []string
	for i := range translitLayers {
		names = append(names, fmt.Sprintf("encoder-%d", i+1))
	}
	for i := range translitLayers {
		names = append(names, fmt.Sprintf("decoder-%d", i+1), fmt.Sprintf("cross-%d", i+1))
	}
	recorder.Check("aren-transliteration.safetensors", names)
}
