package nn_test

import (
	"context"
	"math"
	"testing"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/kernels/kvcache"
	"github.com/seed90331342/attn/kernels/nn"
)

// smallLatent has a size of its own for each axis of its weights.
var smallLatent = nn.LatentConfig{Model: 10, Heads: 2, QueryRank: 7, Rank: 6, NopeDim: 3, RopeDim: 4, ValueDim: 5, RoPE: &nn.RoPE{Interleaved: true}}

// latentFile returns a layer of smallLatent as its files have it.
func latentFile() map[string]stored {
	return patterned(map[string][]int{"a.q_a_proj.weight": {7, 10}, "a.q_a_layernorm.weight": {7}, "a.q_b_proj.weight": {14, 7}, "a.kv_a_proj_with_mqa.weight": {10, 10},
		"a.kv_a_layernorm.weight": {6}, "a.kv_b_proj.weight": {16, 6}, "a.o_proj.weight": {10, 10}})
}

// TestLatentWeights: the rows of kv_b_proj are those of the keys and then of the values of each head.
func TestLatentWeights(t *testing.T) {
	file := latentFile()
	w := must.Get(read(smallLatent.LoadSafetensors, "a.", file))(t)
	k, v, b := must.Get(w.Wk.Float32s())(t), must.Get(w.Wv.Float32s())(t), file["a.kv_b_proj.weight"].data
	for h := range 2 {
		for r := range 6 {
			for i := range 3 {
				if got, want := k[r*6+h*3+i], b[(h*8+i)*6+r]; got != want {
					t.Fatalf("wk[%d, head %d, %d] is %v, should be %v", r, h, i, got, want)
				}
			}
			for i := range 5 {
				if got, want := v[r*10+h*5+i], b[(h*8+3+i)*6+r]; got != want {
					t.Fatalf("wv[%d, head %d, %d] is %v, should be %v", r, h, i, got, want)
				}
			}
		}
	}
}

// TestLatentBatches: sequences of different lengths over a cache, expanded and then absorbed, have the outputs
// of one expanded call, and angles that are given those of the layer.
func TestLatentBatches(t *testing.T) {
	dev, ctx := onCPU(t), t.Context()
	c := smallLatent
	c.DType = kernels.BF16
	l := must.Get(nn.NewLatentAttention(ctx, dev, c, must.Get(read(c.LoadSafetensors, "a.", latentFile()))(t)))(t)
	defer l.Release()
	x := random(t, dev, 1, 2, 1, 6, 10)
	apply := func(x kernels.Tensor, opt nn.MultiHeadOptions) []float32 {
		y := must.Get(l.Apply(ctx, x, opt))(t)
		defer y.Release()
		return must.Get(dev.ToFloat32(ctx, y))(t)
	}
	want := apply(x, nn.MultiHeadOptions{Options: kernels.Options{Causal: true}})
	cache := must.Get(kvcache.New(ctx, dev, kvcache.Config{Batch: 2, Dim: 10, Latent: 6, Capacity: 6}))(t)
	defer cache.Release()
	// Sequence 0 has four tokens and then two, sequence 1 has two and then four.
	at := [2][2]int{{0, 4}, {0, 2}}
	for range 2 {
		rows, count := make([]float32, 2*4*10), make([]int, 2)
		all := must.Get(dev.ToFloat32(ctx, x))(t)
		for b, span := range at {
			copy(rows[b*40:], all[(b*6+span[0])*10:(b*6+span[1])*10])
			count[b] = span[1] - span[0]
		}
		part := must.Get(dev.FromFloat32(ctx, kernels.F32, rows, kernels.Shape{2, 1, 4, 10}))(t)
		defer part.Release()
		got := apply(part, nn.MultiHeadOptions{Cache: cache, Count: count})
		for b, span := range at {
			for i := range count[b] * 10 {
				// Seven products of at most 14 terms lie between x and y. Each has an error of √14·u times
				// magnitudes below 16: 7·√14·16·u < 2^-15.
				if a, e := got[b*40+i], want[(b*6+span[0])*10+i]; math.Abs(float64(a-e)) > 0x1p-15 {
					t.Fatalf("sequence %d from token %d: y[%d] is %v, should be %v", b, span[0], i, a, e)
				}
			}
		}
		at = [2][2]int{{4, 6}, {2, 6}}
	}
	angles := must.Get(smallLatent.RoPE.Angles(ctx, dev, 4, positionsOf(t, 0, 6)))(t)
	defer angles.Release()
	if got := apply(x, nn.MultiHeadOptions{Options: kernels.Options{Causal: true}, Angles: angles}); !same([][]float32{got}, [][]float32{want}) {
		t.Errorf("with angles given: %v, should be %v", got, want)
	}
}

func TestLatentRefuses(t *testing.T) {
	dev, ctx := onCPU(t), t.Context()
	with := func(change func(c *nn.LatentConfig)) nn.LatentConfig {
		c := smallLatent
		change(&c)
		return c
	}
	file := latentFile()
	file["a.indexer.wk.weight"] = stored{"F32", []int{1}, []float32{1}}
	must.Fail(t, "an indexer", must.Err(read(smallLatent.LoadSafetensors, "a.", file)), kernels.ErrFile, `would ignore ["a.indexer.wk.weight"]`)
	w := must.Get(read(smallLatent.LoadSafetensors, "a.", latentFile()))(t)
	for _, c := range []struct {
		name   string
		config nn.LatentConfig
		want   error
		text   string
	}{
		{"no rank", with(func(c *nn.LatentConfig) { c.Rank = 0 }), kernels.ErrOption, "config: Rank is 0, it must be 1 to"},
		{"negative query rank", with(func(c *nn.LatentConfig) { c.QueryRank = -1 }), kernels.ErrOption, "QueryRank is -1, it must be 0 to"},
		{"rope", with(func(c *nn.LatentConfig) { c.RoPE = &nn.RoPE{Base: -1} }), kernels.ErrOption, "rope: base is -1"},
		{"type", with(func(c *nn.LatentConfig) { c.DType = kernels.Q8 }), kernels.ErrDType, "DType is q8"},
		{"queries without a latent", with(func(c *nn.LatentConfig) { c.QueryRank = 0 }), kernels.ErrShape, "wqa is present, but the config has no QueryRank"},
		{"another rank", with(func(c *nn.LatentConfig) { c.Rank = 5 }), kernels.ErrShape, "wkva has shape [1 1 10 10], it must be [1 1 10 9]"},
	} {
		must.Fail(t, c.name, must.Err(nn.NewLatentAttention(ctx, dev, c.config, w)), c.want, c.text)
	}
	must.Fail(t, "a file for another config", must.Err(read(with(func(c *nn.LatentConfig) { c.ValueDim = 4 }).LoadSafetensors, "a.", latentFile())), kernels.ErrShape, "kv_b_proj.weight: shape is [16 6], for the config it must be [14 6]")
	must.Fail(t, "no projections", must.Err(nn.NewLatentAttention(ctx, kernels.NewDevice(plainBackend{dev.Backend()}), smallLatent, w)), kernels.ErrUnsupported, "no projections")

	l := must.Get(nn.NewLatentAttention(ctx, dev, smallLatent, w))(t)
	x := random(t, dev, 1, 2, 1, 3, 10)
	cache := func(c kvcache.Config) nn.KVCache {
		c.Capacity = 8
		k := must.Get(kvcache.New(ctx, dev, c))(t)
		t.Cleanup(k.Release)
		return k
	}
	for _, a := range []wrongCall{
		{"no x", kernels.Tensor{}, nn.MultiHeadOptions{}, kernels.ErrShape, "x is missing"},
		{"model size", random(t, dev, 2, 2, 1, 3, 9), nn.MultiHeadOptions{}, kernels.ErrShape, "x has shape [2 1 3 9], it must be [B, 1, S, 10]"},
		{"memory", x, nn.MultiHeadOptions{Memory: x}, kernels.ErrOption, "Memory or MemoryAngles is set"},
		{"lse", x, nn.MultiHeadOptions{Options: kernels.Options{LSE: true}}, kernels.ErrOption, "LSE or Weights is set"},
		{"positions", x, nn.MultiHeadOptions{Positions: [][]int{{1}}}, kernels.ErrShape, "positions[0] has 1 numbers"},
		{"shared prefix without a cache", x, nn.MultiHeadOptions{SharePrefix: true}, kernels.ErrOption, "SharePrefix is set without a Cache"},
		{"mask without a cache", x, nn.MultiHeadOptions{MaskLast: true}, kernels.ErrOption, "MaskLast is set without a Cache"},
		{"packed", x, nn.MultiHeadOptions{Options: kernels.Options{CuQ: []int{0, 3}}}, kernels.ErrUnsupported, "CuQ is set, but a layer computes"},
		{"a cache of values", x, nn.MultiHeadOptions{Cache: cache(kvcache.Config{Batch: 2, Dim: 10})}, kernels.ErrShape, "the Cache has KVHeads 1, Dim 10, Latent 0 and Window 0, they must be 1, 10, 6 and 0"},
		{"a window", x, nn.MultiHeadOptions{Cache: cache(kvcache.Config{Batch: 2, Dim: 10, Latent: 6, Window: 3})}, kernels.ErrShape, "Window 3"},
		{"sequences", x, nn.MultiHeadOptions{Cache: cache(kvcache.Config{Dim: 10, Latent: 6})}, kernels.ErrShape, "x has 2 batches, the Cache has 1 sequences"},
		{"count", x, nn.MultiHeadOptions{Cache: cache(kvcache.Config{Batch: 2, Dim: 10, Latent: 6}), Count: []int{4, 1}}, kernels.ErrOption, "count[0] is 4"},
		{"an option of the cache", x, nn.MultiHeadOptions{Cache: cache(kvcache.Config{Batch: 2, Dim: 10, Latent: 6}), Options: kernels.Options{KLen: []int{1}}}, kernels.ErrOption, "KLen"},
	} {
		a.refused(t, must.Err(l.Apply(ctx, a.x, a.opt)))
	}
	done, cancel := context.WithCancel(ctx)
	cancel()
	must.Fail(t, "cancelled", must.Err(l.Apply(done, x, nn.MultiHeadOptions{})), context.Canceled)
	plain := layerOf(t, dev, nn.MultiHeadConfig{Model: 10, KVHeads: 1})
	must.Fail(t, "a latent cache for heads of values", must.Err(plain.Apply(ctx, x, nn.MultiHeadOptions{Cache: cache(kvcache.Config{Batch: 2, Dim: 10, Latent: 6})})), kernels.ErrShape, "the values are the first 6 elements of k: give the zero Tensor")
	l.Release()
	must.Fail(t, "released", must.Err(l.Apply(ctx, x, nn.MultiHeadOptions{})), kernels.ErrReleased)
}
