package nn_test

import (
	"context"
	"math"
	"runtime"
	"slices"
	"testing"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/kernels/kvcache"
	"github.com/seed90331342/attn/kernels/nn"
)

// TestChunksInABatch: two sequences of different lengths in a cache, one of which gets fewer tokens from each call, have
// the outputs of a whole sequence. Chunks and factors are those of the positions of each. A layer with shared keys and
// the same other weights has them too, over the cache of the first one.
//
// Keys are the same numbers, and sums of up to 8 terms have errors of 8·u = 2^-21 of their magnitudes, which
// are less than 8 here. A row in the wrong chunk or with the factor of another position differs by more than 2^-10.
func TestChunksInABatch(t *testing.T) {
	dev, ctx := onCPU(t), t.Context()
	c := nn.MultiHeadConfig{Model: 8, Heads: 4, KVHeads: 2, Chunk: 4, Temperature: &nn.Temperature{Scale: 2, Floor: 3}}
	l := layerOf(t, dev, c)
	const tokens, rows = 10, 4
	whole := random(t, dev, 1, 1, 1, tokens, c.Model)
	r := must.Get(l.Apply(ctx, whole, nn.MultiHeadOptions{Options: kernels.Options{Causal: true}}))(t)
	defer r.Release()
	want, in := must.Get(dev.ToFloat32(ctx, r.O))(t), must.Get(dev.ToFloat32(ctx, whole))(t)

	c.SharedKeys = true
	w := must.Get(c.Initialise(nn.Initialiser{Seed: 3}))(t)
	shared := must.Get(nn.NewMultiHeadAttention(ctx, dev, c, w))(t)
	defer shared.Release()
	cache := must.Get(kvcache.New(ctx, dev, kvcache.Config{Batch: 2, KVHeads: 2, Dim: 2, Capacity: tokens}))(t)
	defer cache.Release()
	for _, count := range [][]int{{4, 1}, {2, 4}, {4, 2}} {
		lens, data := cache.Lens(), make([]float32, 2*rows*c.Model)
		for b, n := range count {
			copy(data[b*rows*c.Model:], in[lens[b]*c.Model:(lens[b]+n)*c.Model])
		}
		for _, l := range []*nn.MultiHeadAttention{l, shared} {
			y, _, err := l.ApplyFloat32(ctx, data, 2, nn.MultiHeadOptions{Cache: cache, Count: count})
			must.Do(t, err)
			for b, n := range count {
				for i := range n * c.Model {
					got, want := y[b*rows*c.Model+i], want[lens[b]*c.Model+i]
					if !(math.Abs(float64(got-want)) < 0x1p-18) {
						t.Fatalf("sequence %d with %d tokens: y[%d] is %v, should be %v", b, lens[b], i, got, want)
					}
				}
			}
		}
	}
}

// seenCache is a cache that notes the options of the last call.
type seenCache struct {
	*kvcache.Cache
	opt kvcache.CallOptions
}

func (c *seenCache) AttentionInto(ctx context.Context, out kernels.Result, q kernels.Tensor, opt kvcache.CallOptions) error {
	c.opt = opt
	return c.Cache.AttentionInto(ctx, out, q, opt)
}

// TestChunksOfAToken: the call of one token has no list with a number for each token of the cache. It allocates less
// than they would take. A slope of 0 changes no score, but with it a token has segments, and the same outputs.
func TestChunksOfAToken(t *testing.T) {
	dev, ctx := onCPU(t), t.Context()
	l := layerOf(t, dev, nn.MultiHeadConfig{Model: 2, Chunk: 4})
	x := random(t, dev, 1, 2, 1, 1, 2)
	const most = 1 << 20 // bytes: a number for each of the many tokens of both sequences takes twice as many
	for _, tokens := range []int{9, 1 << 18} {
		cache := &seenCache{Cache: must.Get(kvcache.New(ctx, dev, kvcache.Config{Batch: 2, Dim: 2, Capacity: tokens + 8}))(t)}
		defer cache.Release()
		k := random(t, dev, 2, 2, 1, tokens, 2)
		must.Do(t, cache.Append(ctx, k, k, []int{tokens, tokens - 3}))
		lens := cache.Lens()
		apply := func(opt nn.MultiHeadOptions) []float32 {
			for b, n := range lens {
				must.Do(t, cache.Rewind(b, n))
			}
			opt.Cache = cache
			r := must.Get(l.Apply(ctx, x, opt))(t)
			defer r.Release()
			return must.Get(dev.ToFloat32(ctx, r.O))(t)
		}
		got := apply(nn.MultiHeadOptions{})
		if o := cache.opt; o.QSegments != nil || o.KSegments != nil || o.Window == nil {
			t.Errorf("%d tokens: a token has segments of %d keys, window %v", tokens, len(o.KSegments), o.Window)
		}
		if want := apply(nn.MultiHeadOptions{Options: kernels.Options{ALiBi: []float32{0}}}); cache.opt.KSegments == nil || !slices.Equal(got, want) {
			t.Errorf("%d tokens: outputs are %v, with segments %v", tokens, got, want)
		}
		var before, after runtime.MemStats
		for range 4 { // scratch memory grows in the first calls
			runtime.ReadMemStats(&before)
			apply(nn.MultiHeadOptions{})
			runtime.ReadMemStats(&after)
		}
		if n := after.TotalAlloc - before.TotalAlloc; n > most {
			t.Errorf("%d tokens: a token allocates %d bytes, at most %d", tokens, n, most)
		}
	}
}

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

// A layer attends from a tree of tokens, whether it or its cache rotates them, with the bits of its
// steps one by one. TestTree of kvcache compares trees with the paths in them.
func TestLayerOfATree(t *testing.T) {
	dev, ctx := onCPU(t), t.Context()
	const before, n, dim = 5, 4, 4
	config := nn.MultiHeadConfig{Model: 12, Heads: 4, KVHeads: 2, HeadDim: dim}
	rope := &nn.RoPE{Base: 100}
	positions := [][]int{{before, before + 1, before + 1, before + 2}} // of a root with two children, one of which has a child
	opt := nn.MultiHeadOptions{Positions: positions, MaskLast: true}
	opt.Mask = must.Get(kernels.HostBool([]bool{
		true, false, false, false,
		true, true, false, false,
		true, false, true, false,
		true, false, true, true,
	}, kernels.Shape{1, 1, n, n}))(t)
	prompt, tree := random(t, dev, 1, 1, 1, before, config.Model), random(t, dev, 2, 1, 1, n, config.Model)
	w := must.Get(config.Initialise(nn.Initialiser{Seed: 3}))(t)

	newCache := func(r kvcache.Rotary) *kvcache.Cache {
		cache := must.Get(kvcache.New(ctx, dev, kvcache.Config{KVHeads: config.KVHeads, Dim: dim, Capacity: before + n, RoPE: r}))(t)
		t.Cleanup(cache.Release)
		return cache
	}
	var got [2][]float32
	for i, turns := range []bool{false, true} { // the cache
		c, cache := config, newCache(nil)
		if c.RoPE = rope; turns {
			c.RoPE, cache = nil, newCache(rope)
		}
		l := must.Get(nn.NewMultiHeadAttention(ctx, dev, c, w))(t)
		t.Cleanup(l.Release)
		first := must.Get(l.Apply(ctx, prompt, nn.MultiHeadOptions{Cache: cache}))(t)
		first.Release()
		o := opt
		o.Cache = cache
		r := must.Get(l.Apply(ctx, tree, o))(t)
		got[i] = must.Get(dev.ToFloat32(ctx, r.O))(t)
		r.Release()
	}

	// By hand.
	project := func(x, w kernels.Tensor, heads int) kernels.Tensor { // [1, heads, rows, dim]
		rows := x.Shape()[kernels.Seq]
		y := must.Get(dev.Alloc(ctx, kernels.F32, kernels.Shape{1, 1, rows, heads * dim}))(t)
		must.Do(t, dev.Project(ctx, y, x, w, kernels.Tensor{}))
		return must.Get(y.View(kernels.Shape{1, heads, rows, dim}, kernels.Strides{rows * heads * dim, dim, heads * dim, 1}, 0))(t)
	}
	cache, kvHeads := newCache(rope), config.KVHeads
	must.Do(t, cache.Append(ctx, project(prompt, w.Wk, kvHeads), project(prompt, w.Wv, kvHeads), nil))
	q, k, v := project(tree, w.Wq, config.Heads), project(tree, w.Wk, kvHeads), project(tree, w.Wv, kvHeads)
	must.Do(t, cache.AppendAt(ctx, k, v, nil, positions))
	r := must.Get(cache.Attention(ctx, q, kvcache.CallOptions{Options: opt.Options, Positions: positions, MaskLast: true}))(t)
	joined := must.Get(dev.Alloc(ctx, kernels.F32, kernels.Shape{1, 1, n, config.Heads * dim}))(t)
	heads := must.Get(joined.View(r.O.Shape(), kernels.Strides{n * config.Heads * dim, dim, config.Heads * dim, 1}, 0))(t)
	must.Do(t, dev.Copy(ctx, []kernels.Tensor{heads}, []kernels.Tensor{r.O}))
	y := must.Get(dev.Alloc(ctx, kernels.F32, tree.Shape()))(t)
	must.Do(t, dev.Project(ctx, y, joined, w.Wo, kernels.Tensor{}))
	want := must.Get(dev.ToFloat32(ctx, y))(t)
	for i := range got {
		if !slices.Equal(got[i], want) {
			t.Errorf("the cache rotates %v: %v, want %v", i == 1, got[i], want)
		}
	}

	l := layerOf(t, dev, nn.MultiHeadConfig{Model: 12, Heads: 4, KVHeads: 2, RoPE: &nn.RoPE{Dim: 2}})
	angles := must.Get(rope.Angles(ctx, dev, 2, positions))(t)
	defer angles.Release()
	pool := must.Get(kvcache.NewPaged(ctx, dev, kvcache.PagedConfig{KVHeads: 2, Dim: 3, Pages: 2, Window: 8}))(t)
	defer pool.Release()
	windowed := pool.Batch(must.Get(pool.NewSequence())(t))
	for _, c := range []struct {
		opt  nn.MultiHeadOptions
		want error
		text string
	}{
		{nn.MultiHeadOptions{Positions: [][]int{{1, 2}}}, kernels.ErrShape, "positions[0] has 2 numbers, it must have one for each of the 4 rows of x"},
		{nn.MultiHeadOptions{Positions: make([][]int, 3)}, kernels.ErrShape, "positions has 3 lists"},
		{nn.MultiHeadOptions{Positions: positions, Angles: angles}, kernels.ErrOption, "Positions and Angles are both set"},
		{nn.MultiHeadOptions{MaskLast: true}, kernels.ErrOption, "MaskLast is set without a Cache"},
		{nn.MultiHeadOptions{SharePrefix: true}, kernels.ErrOption, "SharePrefix is set without a Cache"},
		{nn.MultiHeadOptions{Cache: windowed, SharePrefix: true}, kernels.ErrOption, "SharePrefix is set, but the cache has a window"},
	} {
		must.Fail(t, c.text, must.Err(l.Apply(ctx, tree, c.opt)), c.want, c.text)
	}
}
