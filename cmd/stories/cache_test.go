package main

import (
	"context"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/seed90331342/attn/cmd/internal/llama"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/kernels/kvcache"
	"github.com/seed90331342/attn/kernels/nn"
)

// joined is a cache of one key head of 32 elements, in which a token has the 4 key heads of the model, 8 elements
// each: as many as a block of q4. Queries are 0 where the other heads are.
type joined struct {
	*kvcache.Cache
	dev *kernels.Device
}

const group = llama.Heads / llama.KVHeads

// moved returns x, a tensor of the device, with element d of head h at place(h, d) of the tokens of a new tensor
// of some heads.
func (c joined) moved(ctx context.Context, x kernels.Tensor, heads, dim int, place func(h, d int) (int, int)) (kernels.Tensor, error) {
	n, s := x.Shape(), x.Shape()[kernels.Seq]
	data, err := c.dev.ToFloat32(ctx, x)
	y := make([]float32, heads*s*dim)
	for i, f := range data {
		if h, d := place(i/n[kernels.Dim]/s, i%n[kernels.Dim]); d >= 0 {
			y[(h*s+i/n[kernels.Dim]%s)*dim+d] = f
		}
	}
	if err != nil {
		return x, err
	}
	return kernels.HostF32(y, kernels.Shape{1, heads, s, dim})
}

func (c joined) AppendAt(ctx context.Context, k, v kernels.Tensor, count []int, positions [][]int) error {
	all := func(h, d int) (int, int) { return 0, h*llama.HeadDim + d }
	k, err := c.moved(ctx, k, 1, llama.KVHeads*llama.HeadDim, all)
	if err == nil {
		v, err = c.moved(ctx, v, 1, llama.KVHeads*llama.HeadDim, all)
	}
	if err != nil {
		return err
	}
	return c.Cache.AppendAt(ctx, k, v, count, positions)
}

func (c joined) AttentionInto(ctx context.Context, out kernels.Result, q kernels.Tensor, opt kvcache.CallOptions) error {
	wide, err := c.moved(ctx, q, llama.Heads, llama.KVHeads*llama.HeadDim, func(h, d int) (int, int) { return h, h/group*llama.HeadDim + d })
	if err != nil {
		return err
	}
	opt.Scale = new(1 / math.Sqrt(llama.HeadDim))
	r, err := c.Cache.Attention(ctx, wide, opt)
	if err != nil {
		return err
	}
	defer r.Release()
	own, err := c.moved(ctx, r.O, llama.Heads, llama.HeadDim, func(h, d int) (int, int) {
		if d -= h / group * llama.HeadDim; d >= llama.HeadDim {
			d = -1
		}
		return h, d
	})
	if err != nil {
		return err
	}
	return c.dev.Copy(ctx, []kernels.Tensor{out.O}, []kernels.Tensor{own})
}

// TestPerplexity prints what caches of few bits cost the trained model: its perplexity over texts that it wrote itself,
// at temperature 1 with a cache in f32, and how far the distributions of the next token are from those with that cache.
func TestPerplexity(t *testing.T) {
	const tokens = 256
	texts := make([][]int, 4)
	if testing.Short() {
		texts = texts[:2]
	}
	ctx := t.Context()
	dev := must.Get(kernels.Open("cpu"))(t)
	defer dev.Close()
	m := must.Get(llama.Load(ctx, dev, llama.CheckpointFile))(t)
	// read calls next with the logits after each token of a text, which returns the token after it, negative at
	// the end.
	read := func(dtype kernels.DType, hadamard bool, next func(logits []float32) int) {
		var layers [llama.Layers]joined
		for i := range layers {
			c := must.Get(kvcache.New(ctx, dev, kvcache.Config{Dim: llama.KVHeads * llama.HeadDim, DType: dtype, Capacity: tokens, Hadamard: hadamard}))(t)
			defer c.Release()
			layers[i] = joined{c, dev}
		}
		for token := llama.Beginning; token >= 0; {
			logits, _, err := m.Forward(ctx, [][]int{{token}}, func(layer int) nn.MultiHeadOptions { return nn.MultiHeadOptions{Cache: layers[layer]} })
			must.Do(t, err)
			token = next(logits[0])
		}
	}
	want := make([][][]float64, len(texts)) // log-probabilities
	for i := range texts {
		rng := rand.New(rand.NewPCG(35, uint64(i)))
		read(kernels.F32, false, func(logits []float32) int {
			want[i] = append(want[i], logProbabilities(logits))
			token := llama.Sample(logits, 1, rng)
			if texts[i] = append(texts[i], token); token == llama.Beginning || token == llama.Ending || len(texts[i]) == tokens {
				return -1
			}
			return token
		})
	}
	// cost returns the perplexity, and the mean Kullback-Leibler divergence from the cache in f32.
	cost := func(dtype kernels.DType, hadamard bool) (perplexity, divergence float64) {
		all := 0.
		for i, text := range texts {
			at := 0
			read(dtype, hadamard, func(logits []float32) int {
				got := logProbabilities(logits)
				for token, p := range want[i][at] {
					divergence += math.Exp(p) * (p - got[token])
				}
				perplexity -= got[text[at]]
				all++
				if at++; at == len(text) {
					return -1
				}
				return text[at-1]
			})
		}
		return math.Exp(perplexity / all), divergence / all
	}
	var off [2]float64
	for _, x := range []struct {
		name     string
		dtype    kernels.DType
		hadamard bool
	}{
		{"f32", kernels.F32, false}, {"f32, Hadamard", kernels.F32, true}, {"q8", kernels.Q8, false}, {"f8", kernels.F8, false}, {"q4", kernels.Q4, false}, {"q4, Hadamard", kernels.Q4, true},
	} {
		p, d := cost(x.dtype, x.hadamard)
		t.Logf("%-14s perplexity %.4f, divergence from f32 %.2g", x.name, p, d)
		if x.dtype == kernels.Q4 {
			off[map[bool]int{false: 0, true: 1}[x.hadamard]] = d
		}
	}
	if !(off[1] < off[0]) {
		t.Errorf("q4 diverges by %.3g with Hadamard matrices and by %.3g without", off[1], off[0])
	}
}

// logProbabilities returns the logarithm of softmax of the logits.
func logProbabilities(logits []float32) []float64 {
	sum := 0.
	for _, x := range logits {
		sum += math.Exp(float64(x))
	}
	p := make([]float64, len(logits))
	for i, x := range logits {
		p[i] = float64(x) - math.Log(sum)
	}
	return p
}
