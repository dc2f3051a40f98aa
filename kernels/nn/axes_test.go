package nn_test

import (
	"math"
	"slices"
	"testing"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/kernels/kvcache"
	"github.com/seed90331342/attn/kernels/nn"
)

// TestAxesInACache compares a prompt with an image, and two tokens after it one by one, over a cache with float64. A token
// of the prompt has a position on each of three axes; the tokens after it continue at 1 + the largest of all
// (Wang et al. 2024, Qwen2-VL).
func TestAxesInACache(t *testing.T) {
	const model, heads, kvHeads, dim, prompt, tokens = 12, 4, 2, 8, 10, 12
	// Two tokens of text, six of an image of 2 by 3, two of text; then the tokens after the prompt.
	positions := [3][tokens]int{
		{0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7, 8},
		{0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8},
		{0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8},
	}
	dev, ctx := onCPU(t), t.Context()
	x := random(t, dev, 1, 1, 1, tokens, model)
	for _, c := range []struct {
		name string
		rope nn.RoPE
		axes [dim / 2]int // of each pair
	}{
		{"adjacent", nn.RoPE{Base: 100, Sections: []int{2, 1, 1}}, [dim / 2]int{0, 0, 1, 2}},
		{"interleaved", nn.RoPE{Base: 100, Sections: []int{2, 1, 1}, SectionsInterleaved: true}, [dim / 2]int{0, 1, 2, 0}},
	} {
		config := nn.MultiHeadConfig{Model: model, Heads: heads, KVHeads: kvHeads, HeadDim: dim, RoPE: &c.rope}
		w := must.Get(config.Initialise(nn.Initialiser{Seed: 4}))(t)
		l := must.Get(nn.NewMultiHeadAttention(ctx, dev, config, w))(t)
		t.Cleanup(l.Release)
		cache := must.Get(kvcache.New(ctx, dev, kvcache.Config{KVHeads: kvHeads, Dim: dim, Capacity: tokens}))(t)
		t.Cleanup(cache.Release)
		apply := func(lo, hi int, opt nn.MultiHeadOptions) []float32 {
			opt.Cache = cache
			y := must.Get(l.Apply(ctx, must.Get(x.Slice(kernels.Seq, lo, hi))(t), opt))(t)
			defer y.Release()
			return must.Get(dev.ToFloat32(ctx, y.O))(t)
		}
		var axes [][][]int
		for _, p := range positions {
			axes = append(axes, [][]int{p[:prompt]})
		}
		angles := must.Get(c.rope.AnglesOfAxes(ctx, dev, dim, axes))(t)
		defer angles.Release()
		got := apply(0, prompt, nn.MultiHeadOptions{Angles: angles})
		for i := prompt; i < tokens; i++ {
			got = append(got, apply(i, i+1, nn.MultiHeadOptions{Positions: [][]int{{positions[0][i]}}})...)
		}

		float64s := func(x kernels.Tensor) (list []float64) {
			for _, f := range must.Get(dev.ToFloat32(ctx, x))(t) {
				list = append(list, float64(f))
			}
			return list
		}
		product := func(x, w []float64, m, n int) []float64 { // [tokens, m]·[m, n]
			y := make([]float64, tokens*n)
			for i := range y {
				for j := range m {
					y[i] += x[i/n*m+j] * w[j*n+i%n]
				}
			}
			return y
		}
		in := float64s(x)
		q, k, v := product(in, float64s(w.Wq), model, heads*dim), product(in, float64s(w.Wk), model, kvHeads*dim), product(in, float64s(w.Wv), model, kvHeads*dim)
		for _, rows := range [][]float64{q, k} {
			for i := 0; i < len(rows); i += dim {
				for pair, axis := range c.axes {
					sin, cos := math.Sincos(float64(positions[axis][i/(len(rows)/tokens)]) * math.Pow(100, -2*float64(pair)/dim))
					a, b := rows[i+pair], rows[i+pair+dim/2]
					rows[i+pair], rows[i+pair+dim/2] = a*cos-b*sin, a*sin+b*cos
				}
			}
		}
		o := make([]float64, tokens*heads*dim)
		for i := range tokens {
			for h := range heads {
				sum, to := 0.0, o[(i*heads+h)*dim:][:dim]
				for j := range i + 1 {
					at, score := (j*kvHeads+h*kvHeads/heads)*dim, 0.0
					for e := range dim {
						score += q[(i*heads+h)*dim+e] * k[at+e]
					}
					weight := math.Exp(score / math.Sqrt(dim))
					sum += weight
					for e := range to {
						to[e] += weight * v[at+e]
					}
				}
				for e := range to {
					to[e] /= sum
				}
			}
		}
		want := product(o, float64s(w.Wo), heads*dim, model)
		largest := math.Max(slices.Max(want), -slices.Min(want))
		for i, y := range want {
			// Four products follow each other, of at most 32 terms, as in TestFamilies: 2^-17 of the largest output.
			if !(math.Abs(float64(got[i])-y) <= 0x1p-17*largest) {
				t.Fatalf("%s: y[%d] of token %d is %v, should be %v, the largest is %v", c.name, i%model, i/model, got[i], y, largest)
			}
		}
	}
}
