package nn_test

import (
	"slices"
	"testing"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/kernels/kvcache"
	"github.com/seed90331342/attn/kernels/nn"
)

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
