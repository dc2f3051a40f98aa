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

// TestAxesInACache compares a prompt with an image, and two tokens after it one by one, over a cache with all tokens at
// once. A token of the prompt has a position on each of three axes; the tokens after it continue at 1 + the largest of
// all (Wang et al. 2024, Qwen2-VL). TestSections compares the angles, and the conformance suite layers with angles.
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
	}{
		{"adjacent", nn.RoPE{Base: 100, Sections: []int{2, 1, 1}}},
		{"interleaved", nn.RoPE{Base: 100, Sections: []int{2, 1, 1}, SectionsInterleaved: true}},
	} {
		config := nn.MultiHeadConfig{Model: model, Heads: heads, KVHeads: kvHeads, HeadDim: dim, RoPE: &c.rope}
		w := must.Get(config.Initialise(nn.Initialiser{Seed: 4}))(t)
		l := must.Get(nn.NewMultiHeadAttention(ctx, dev, config, w))(t)
		t.Cleanup(l.Release)
		cache := must.Get(kvcache.New(ctx, dev, kvcache.Config{KVHeads: kvHeads, Dim: dim, Capacity: tokens}))(t)
		t.Cleanup(cache.Release)
		apply := func(lo, hi int, opt nn.MultiHeadOptions) []float32 {
			y := must.Get(l.Apply(ctx, must.Get(x.Slice(kernels.Seq, lo, hi))(t), opt))(t)
			defer y.Release()
			return must.Get(dev.ToFloat32(ctx, y.O))(t)
		}
		angles := func(n int) kernels.Angles {
			var axes [][][]int
			for _, p := range positions {
				axes = append(axes, [][]int{p[:n]})
			}
			a := must.Get(c.rope.AnglesOfAxes(ctx, dev, dim, axes))(t)
			t.Cleanup(a.Release)
			return a
		}
		got := apply(0, prompt, nn.MultiHeadOptions{Cache: cache, Angles: angles(prompt)})
		for i := prompt; i < tokens; i++ {
			got = append(got, apply(i, i+1, nn.MultiHeadOptions{Cache: cache, Positions: [][]int{{positions[0][i]}}})...)
		}
		want := apply(0, tokens, nn.MultiHeadOptions{Options: kernels.Options{Causal: true}, Angles: angles(tokens)})
		largest := float64(max(slices.Max(want), -slices.Min(want)))
		for i, y := range want {
			// Four products follow each other, of at most 32 terms, as in TestFamilies: 2^-17 of the largest output.
			if !(math.Abs(float64(got[i]-y)) <= 0x1p-17*largest) {
				t.Fatalf("%s: y[%d] of token %d is %v, should be %v, the largest is %v", c.name, i%model, i/model, got[i], y, largest)
			}
		}
	}
}
