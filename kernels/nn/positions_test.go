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
