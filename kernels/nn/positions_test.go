package nn_test

import (
	"math"
	"runtime"
	"testing"

	"github.com/seed90331342/attn/backend/backendtest/must"
	"github.com/seed90331342/attn/kernels"
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

// TestChunksOfATokenAreSmall: a token takes less memory than a number for each token of the cache.
func TestChunksOfATokenAreSmall(t *testing.T) {
	dev, ctx := onCPU(t), t.Context()
	const tokens = 1 << 18
	l := layerOf(t, dev, nn.MultiHeadConfig{Model: 2, Chunk: tokens / 2})
	cache := must.Get(kvcache.New(ctx, dev, kvcache.Config{Dim: 2, Capacity: tokens + 8}))(t)
	defer cache.Release()
	k := must.Get(kernels.AllocHost(kernels.F32, kernels.Shape{1, 1, tokens, 2}))(t)
	must.Do(t, cache.Append(ctx, k, k, nil))
	x := random(t, dev, 1, 1, 1, 1, 2)
	var before, after runtime.MemStats
	for range 4 { // the ids grow at most once
		runtime.ReadMemStats(&before)
		r := must.Get(l.Apply(ctx, x, nn.MultiHeadOptions{Cache: cache}))(t)
		runtime.ReadMemStats(&after)
		r.Release()
	}
	if n := after.TotalAlloc - before.TotalAlloc; n > tokens {
		t.Errorf("a token allocates %d bytes next to a cache of %d tokens", n, tokens)
	}
}
