package born_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/born-ml/born/models/llama"
	"github.com/seed90331342/attn/kernels"
	attnborn "github.com/seed90331342/attn/kernels/adapters/born"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// writeGGUF writes a file of version 3 with a LLaMA model of random weights: embeddings, norms and
// the head in f32, the matrices of the layers in q8_0, 32 numbers of 8 bits below one scale in f16.
// It follows ggml's document of the format. The model has a head of its own.
func writeGGUF(path string, c llama.Config) error {
	rng := rand.New(rand.NewPCG(9, 10))
	var meta, infos, data bytes.Buffer
	put := func(b *bytes.Buffer, values ...any) {
		for _, v := range values {
			if s, ok := v.(string); ok {
				binary.Write(b, binary.LittleEndian, uint64(len(s)))
				v = []byte(s)
			}
			binary.Write(b, binary.LittleEndian, v) // to memory, of types of fixed size
		}
	}
	const typeU32, typeF32, typeString, typeArray = uint32(4), uint32(6), uint32(8), uint32(9)
	put(&meta, "general.architecture", typeString, "llama")
	put(&meta, "llama.rope.freq_base", typeF32, float32(c.RopeTheta))
	put(&meta, "llama.attention.layer_norm_rms_epsilon", typeF32, c.NormEpsilon)
	for _, n := range []struct {
		key   string
		value int
	}{{"embedding_length", c.HiddenSize}, {"block_count", c.NumLayers}, {"attention.head_count", c.NumHeads},
		{"attention.head_count_kv", c.NumKVHeads}, {"attention.key_length", c.HeadDim},
		{"feed_forward_length", c.FFNSize}, {"context_length", c.MaxSeqLen}} {
		put(&meta, "llama."+n.key, typeU32, uint32(n.value))
	}
	put(&meta, "tokenizer.ggml.tokens", typeArray, typeString, uint64(c.VocabSize))
	for i := range c.VocabSize {
		put(&meta, fmt.Sprintf("<%d>", i))
	}
	const metadata = 3 + 7 + 1

	tensors := 0
	add := func(name string, q8 bool, rows, cols int) {
		tensors++
		shape, ggmlType := []uint64{uint64(cols), uint64(rows)}, uint32(0)
		if rows == 1 {
			shape = shape[:1]
		}
		if q8 {
			ggmlType = 8
		}
		data.Write(make([]byte, -data.Len()&31)) // tensors begin at multiples of 32
		put(&infos, name, uint32(len(shape)), shape, ggmlType, uint64(data.Len()))
		sigma := 1 / math.Sqrt(float64(cols))
		for i := 0; i < rows*cols; i++ {
			switch {
			case rows == 1: // the gains of a norm
				put(&data, float32(1+0.1*rng.NormFloat64()))
			case !q8:
				put(&data, float32(sigma*rng.NormFloat64()))
			default:
				if i%32 == 0 { // the scale, 2^-8 in f16: rows of 64 numbers and more fit into 8 bits at four sigma
					put(&data, uint16(7<<10))
				}
				put(&data, int8(math.Round(max(-127, min(127, sigma*256*rng.NormFloat64())))))
			}
		}
	}
	width, kv := c.NumHeads*c.HeadDim, c.NumKVHeads*c.HeadDim
	add("token_embd.weight", false, c.VocabSize, c.HiddenSize)
	for i := range c.NumLayers {
		layer := func(name string) string { return fmt.Sprintf("blk.%d.%s.weight", i, name) }
		add(layer("attn_norm"), false, 1, c.HiddenSize)
		add(layer("attn_q"), true, width, c.HiddenSize)
		add(layer("attn_k"), true, kv, c.HiddenSize)
		add(layer("attn_v"), true, kv, c.HiddenSize)
		add(layer("attn_output"), true, c.HiddenSize, width)
		add(layer("ffn_norm"), false, 1, c.HiddenSize)
		add(layer("ffn_gate"), true, c.FFNSize, c.HiddenSize)
		add(layer("ffn_up"), true, c.FFNSize, c.HiddenSize)
		add(layer("ffn_down"), true, c.HiddenSize, c.FFNSize)
	}
	add("output_norm.weight", false, 1, c.HiddenSize)
	add("output.weight", false, c.VocabSize, c.HiddenSize)

	var file bytes.Buffer
	put(&file, []byte("GGUF"), uint32(3), uint64(tensors), uint64(metadata), meta.Bytes(), infos.Bytes())
	file.Write(make([]byte, -file.Len()&31))
	put(&file, data.Bytes())
	return os.WriteFile(path, file.Bytes(), 0o600)
}

// loaded returns the model of a GGUF file, read by born's loader.
func loaded(t testing.TB, c llama.Config) *llama.Model[Backend] {
	path := filepath.Join(t.TempDir(), "llama.gguf")
	must.Do(t, writeGGUF(path, c))
	return must.Get(llama.LoadGGUF(path, backend))(t)
}

// TestGGUF loads a LLaMA from a GGUF file and decodes greedily, with born alone and with attn: the
// same tokens, and logits that agree to 2^-16 of the largest, the bound of TestModel.
func TestGGUF(t *testing.T) {
	c := config
	c.RopeTheta = 500000
	model := loaded(t, c)
	if model.Config != c {
		t.Fatalf("born read the configuration %+v, should be %+v", model.Config, c)
	}
	const prompt, steps = 17, 24
	decode := func(attention llama.AttentionFunc[Backend]) (chosen []int32, logits [][]float32) {
		model.SetAttentionFunc(attention)
		cache := llama.NewModelCache(c, c.MaxSeqLen, backend)
		next := func(x []float32) int32 {
			last, best := x[len(x)-c.VocabSize:], 0
			for i := range last {
				if last[i] > last[best] {
					best = i
				}
			}
			chosen, logits = append(chosen, int32(best)), append(logits, last)
			return int32(best)
		}
		token := next(model.Forward(tokens(1, prompt, 1), cache, 0).AsFloat32())
		for at := prompt; at < prompt+steps; at++ {
			token = next(model.Forward(tokens(1, 1, int(token)), cache, at).AsFloat32())
		}
		return chosen, logits
	}
	eachDevice(t, func(t *testing.T, dev *kernels.Device) {
		wantTokens, want := decode(nil)
		calls := 0
		function := attnborn.New[Backend](ctx, dev, nil)
		gotTokens, got := decode(func(q, k, v, mask Tensor, scale float32) (Tensor, Tensor) {
			calls++
			return function(q, k, v, mask, scale)
		})
		if n := (1 + steps) * c.NumLayers; calls != n {
			t.Errorf("attn ran %d times, should run %d times", calls, n)
		}
		for i := range want {
			if gotTokens[i] != wantTokens[i] {
				t.Fatalf("token %d is %d, born alone has %d", i, gotTokens[i], wantTokens[i])
			}
			agree(t, fmt.Sprintf("token %d", i), got[i], want[i])
		}
	})
}
