package kvcache_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"math"
	"math/rand/v2"
	"slices"

	_ "github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kvcache"
	"github.com/seed90331342/attn/kernels/nn"
	"github.com/seed90331342/attn/kernels/safetensors"
)

// The lengths of the decoder: queries have 4 heads of 8 elements, keys and values 2.
const layers, width, kvWidth, vocabulary, pageSize = 2, 32, 16, 64, 16

const config = `{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}`

// decoder is a model of the Llama family without feed-forward layers: x += attention(norm(x)) for each layer, then
// logits = norm(x)·headᵀ. Closing the device frees the weights.
type decoder struct {
	layers    []*nn.MultiHeadAttention
	options   []kernels.Options
	embedding []float32
	head      *nn.Linear
}

// checkpoint returns a .safetensors file of random weights [out, in] under the names of Llama's files.
func checkpoint(seed uint64) []byte {
	rng, header, data := rand.New(rand.NewPCG(seed, 0)), map[string]any{}, []byte{}
	draw := func(name string, out, in int) {
		from := len(data)
		for range out * in {
			data = binary.LittleEndian.AppendUint32(data, math.Float32bits(float32(rng.NormFloat64()/math.Sqrt(width))))
		}
		header[name] = map[string]any{"dtype": "F32", "shape": []int{out, in}, "data_offsets": []int{from, len(data)}}
	}
	draw("model.embed_tokens.weight", vocabulary, width)
	for i := range layers {
		prefix := fmt.Sprintf("model.layers.%d.self_attn.", i)
		draw(prefix+"q_proj.weight", width, width)
		draw(prefix+"k_proj.weight", kvWidth, width)
		draw(prefix+"v_proj.weight", kvWidth, width)
		draw(prefix+"o_proj.weight", width, width)
	}
	draw("lm_head.weight", vocabulary, width)
	text := check(json.Marshal(header))
	return slices.Concat(binary.LittleEndian.AppendUint64(nil, uint64(len(text))), text, data)
}

// load reads the model from a file of the given size.
func load(ctx context.Context, dev *kernels.Device, file io.ReaderAt, size int64) *decoder {
	header := check(safetensors.ReadHeader(file, size))
	numbers := func(name string) []float32 {
		h := check(header.Tensor(name))
		raw, x := make([]byte, h.Count*h.Size), make([]float32, h.Count)
		check(file.ReadAt(raw, h.Start))
		h.Float32s(x, raw)
		return x
	}
	m := &decoder{embedding: numbers("model.embed_tokens.weight")}
	for _, c := range check(nn.ParseConfig([]byte(config))).Layers {
		weights := check(c.MultiHead.LoadSafetensors(file, size, c.Prefix))
		m.layers = append(m.layers, check(nn.NewMultiHeadAttention(ctx, dev, c.MultiHead, weights)))
		m.options = append(m.options, c.Options)
	}
	m.head = check(nn.NewLinear(ctx, dev, width, numbers("lm_head.weight"), nil))
	return m
}

// logits returns those of the token after each sequence. The sequences have unequal lengths: shorter ones are padded
// with rows of zeros, and Count tells the cache which rows are tokens. cache returns that of a layer, or is nil.
func (m *decoder) logits(ctx context.Context, tokens [][]int, cache func(layer int) nn.KVCache) [][]float32 {
	var count []int
	for _, t := range tokens {
		count = append(count, len(t))
	}
	rows := slices.Max(count)
	x := make([]float32, len(tokens)*rows*width)
	for b, t := range tokens {
		for i, token := range t {
			copy(x[(b*rows+i)*width:], m.embedding[token*width:][:width])
		}
	}
	for i, layer := range m.layers {
		opt := nn.MultiHeadOptions{Options: m.options[i]}
		if cache != nil {
			opt.Cache, opt.Count, opt.SharePrefix = cache(i), count, true
		}
		y, _, err := layer.ApplyFloat32(ctx, normed(x), len(tokens), opt)
		check(y, err)
		for j := range x {
			x[j] += y[j]
		}
		// A feed-forward layer, such as x += down(silu(gate(h))·up(h)) of h = normed(x), has its place here.
	}
	var last []float32
	for b, n := range count {
		last = append(last, x[(b*rows+n-1)*width:][:width]...)
	}
	all := check(m.head.ApplyFloat32(ctx, normed(last)))
	return slices.Collect(slices.Chunk(all, vocabulary))
}

// normed divides each row by its root mean square. The norms of a real model have weights too.
func normed(x []float32) (y []float32) {
	for row := range slices.Chunk(x, width) {
		sum := 1e-6
		for _, v := range row {
			sum += float64(v) * float64(v) / width
		}
		for _, v := range row {
			y = append(y, v/float32(math.Sqrt(sum)))
		}
	}
	return y
}

// answer is a text that grows. Its keys and values are those of a Sequence for each layer.
type answer struct {
	tokens []int
	cached []*kvcache.Sequence
}

func (a *answer) fork() *answer {
	f := &answer{tokens: slices.Clone(a.tokens)}
	for _, s := range a.cached {
		f.cached = append(f.cached, check(s.Fork()))
	}
	return f
}

func (a *answer) free() {
	for _, s := range a.cached {
		s.Free()
	}
}

// next computes the tokens of each answer that are not in the cache yet, a whole prompt or one token, and returns logits.
func (m *decoder) next(ctx context.Context, pool *kvcache.Paged, answers ...*answer) [][]float32 {
	var tokens [][]int
	for _, a := range answers {
		tokens = append(tokens, a.tokens[a.cached[0].Len():])
	}
	return m.logits(ctx, tokens, func(layer int) nn.KVCache {
		var list []*kvcache.Sequence
		for _, a := range answers {
			list = append(list, a.cached[layer])
		}
		return pool.Batch(list...)
	})
}

// best returns the token with the largest logit. Sampling would take its place.
func best(logits []float32) int { return slices.Index(logits, slices.Max(logits)) }

// Generation: two prompts of unequal length begin with the same 20 tokens, which are computed and stored once. They
// continue in one batch, and one of them forks. All tokens are those of a computation without a cache. The largest two logits
// differ by at least 0.019 at each token. Rounding changes them by about 1e-6.
func Example_generation() {
	ctx := context.Background()
	dev := check(kernels.Open("cpu"))
	defer dev.Close()
	file := checkpoint(12)
	m := load(ctx, dev, bytes.NewReader(file), int64(len(file)))
	const pages = 24
	shape := m.layers[0].CacheConfig(kernels.F32)
	pool := check(kvcache.NewPaged(ctx, dev, kvcache.PagedConfig{KVHeads: shape.KVHeads, Dim: shape.Dim, PageSize: pageSize, Pages: pages}))
	defer pool.Release()
	used := func(what string) { fmt.Printf("%s: %d pages\n", what, pages-pool.FreePages()) }

	prefix := &answer{}
	for i := range 20 {
		prefix.tokens = append(prefix.tokens, i*i%vocabulary)
	}
	for range layers {
		prefix.cached = append(prefix.cached, check(pool.NewSequence()))
	}
	m.next(ctx, pool, prefix)
	used("prefix")

	a, b := prefix.fork(), prefix.fork()
	prefix.free()
	a.tokens, b.tokens = append(a.tokens, 7, 8, 9, 10, 11), append(b.tokens, 40, 41) // prompts of 25 and 22 tokens
	answers, begin := []*answer{a, b}, []int{25, 22}
	for i := range 8 { // the first pass is the prefill
		if i == 4 { // c goes on with another token than b
			c := b.fork()
			c.tokens[len(c.tokens)-1] = 50
			answers, begin = append(answers, c), append(begin, len(c.tokens))
			used("fork")
		}
		for j, logits := range m.next(ctx, pool, answers...) {
			answers[j].tokens = append(answers[j].tokens, best(logits))
		}
	}
	used("end")

	for j, t := range answers {
		same := true
		for n := begin[j]; n < len(t.tokens); n++ {
			same = same && t.tokens[n] == best(m.logits(ctx, [][]int{t.tokens[:n]}, nil)[0])
		}
		fmt.Println(t.tokens[20:], "as without a cache:", same)
		t.free()
	}
	used("all freed")
	// Output:
	// prefix: 4 pages
	// fork: 6 pages
	// end: 8 pages
	// [7 8 9 10 11 10 44 44 9 44 12 51 44] as without a cache: true
	// [40 41 10 44 12 44 17 44 9 45] as without a cache: true
	// [40 41 10 44 12 50 0 10 44 12] as without a cache: true
	// all freed: 0 pages
}

// check stops an example at an error.
func check[T any](x T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return x
}
