package layers_test

import (
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/kernels/kvcache"
	"github.com/seed90331342/attn/kernels/nn"
)

// TestLatentCache: attention over a latent cache, whose values have the stride of a key, has the
// bits of attention over a cache with values in memory of their own. One row and several attend,
// with a window, with a shared prefix and with a mask of the last tokens.
func TestLatentCache(t *testing.T) {
	const dim, latent, first = 40, 24, 37
	each(t, func(t *testing.T, dev *kernels.Device) {
		types := []kernels.DType{kernels.F32, kernels.F16, kernels.BF16}
		if testing.Short() && strings.HasSuffix(t.Name(), "gpu") { // a driver compiles kernels for each
			types = types[:2]
		}
		ctx := t.Context()
		k, q := random(t, dev, 1, 2, 1, first+6, dim), random(t, dev, 2, 2, 3, 5, dim)
		rows := func(x kernels.Tensor, lo, hi int) kernels.Tensor { return must.Get(x.Slice(kernels.Seq, lo, hi))(t) }
		for _, c := range []struct {
			name   string
			paged  bool
			window int
			opt    kvcache.CallOptions
		}{
			{"contiguous", false, 0, kvcache.CallOptions{}},
			{"window", false, 9, kvcache.CallOptions{}},
			{"pages", true, 0, kvcache.CallOptions{}},
			{"shared pages", true, 0, kvcache.CallOptions{SharePrefix: true}},
			{"mask of the last tokens", true, 0, kvcache.CallOptions{MaskLast: true}},
		} {
			// outputs returns those of a row, and then of five, after a prompt.
			outputs := func(dtype kernels.DType, valueDim, latentDim int) (all []float32) {
				add := func(cache nn.KVCache, k kernels.Tensor) {
					v := kernels.Tensor{}
					if latentDim == 0 {
						v = must.Get(k.Slice(kernels.Dim, 0, latent))(t)
					}
					must.Do(t, cache.Append(ctx, k, v, nil))
				}
				var cache nn.KVCache
				if c.paged {
					p := must.Get(kvcache.NewPaged(ctx, dev, kvcache.PagedConfig{Dim: dim, ValueDim: valueDim, Latent: latentDim, DType: dtype, PageSize: 16, Pages: 8}))(t)
					defer p.Release()
					s := must.Get(p.NewSequence())(t)
					add(p.Batch(s), must.Get(rows(k, 0, first).Slice(kernels.Batch, 0, 1))(t))
					cache = p.Batch(s, must.Get(s.Fork())(t))
				} else {
					x := must.Get(kvcache.New(ctx, dev, kvcache.Config{Batch: 2, Dim: dim, ValueDim: valueDim, Latent: latentDim, DType: dtype, Window: c.window, Capacity: 64}))(t)
					defer x.Release()
					cache = x
					add(cache, rows(k, 0, first))
				}
				for _, step := range [][2]int{{0, 1}, {1, 6}} {
					n := step[1] - step[0]
					add(cache, rows(k, first+step[0], first+step[1]))
					opt := c.opt
					if opt.MaskLast {
						mask := make([]bool, n*n)
						for i := range mask {
							mask[i] = i%n == 0 || i%n == i/n
						}
						opt.Mask = must.Get(kernels.HostBool(mask, kernels.Shape{1, 1, n, n}))(t)
					}
					o := must.Get(dev.Alloc(ctx, kernels.F32, kernels.Shape{2, 3, n, latent}))(t)
					defer o.Release()
					must.Do(t, cache.AttentionInto(ctx, kernels.Result{O: o}, rows(q, 0, n), opt))
					all = append(all, must.Get(dev.ToFloat32(ctx, o))(t)...)
				}
				return all
			}
			for _, dtype := range types {
				if got, want := outputs(dtype, 0, latent), outputs(dtype, latent, 0); !slices.Equal(got, want) {
					t.Errorf("%s in %v: %v, with values of their own %v", c.name, dtype, got[:4], want[:4])
				}
			}
		}
	})
}

// TestLatentForms: many rows after the tokens of a cache, expanded in blocks of 128 keys and at once, and the same rows a
// few at a time, absorbed, have the outputs of one call without a cache. The sequences have 240 and 140 tokens before.
// Caches of 16 bits round these, so that there the forms are compared with each other. Each form has bits of its own.
func TestLatentForms(t *testing.T) {
	const model, heads, after, all = 10, 2, 60, 300
	before := []int{240, 140}
	config := nn.LatentConfig{Model: model, Heads: heads, Rank: 6, NopeDim: 3, RopeDim: 4, ValueDim: 5, RoPE: &nn.RoPE{}}
	var w nn.LatentWeights
	for i, x := range []struct {
		to   *kernels.Tensor
		m, n int
	}{{&w.Wq, model, heads * 7}, {&w.Wkva, model, 10}, {&w.KVNorm, 1, 6}, {&w.Wk, 6, heads * 3}, {&w.Wv, 6, heads * 5}, {&w.Wo, heads * 5, model}} {
		data := make([]float32, x.m*x.n)
		for j := range data {
			data[j] = float32((j*7+i)%11-5) / 8
		}
		*x.to = must.Get(kernels.HostF32(data, kernels.Shape{1, 1, x.m, x.n}))(t)
	}
	each(t, func(t *testing.T, dev *kernels.Device) {
		ctx, x := t.Context(), random(t, dev, 1, 2, 1, all, model)
		rows := must.Get(dev.ToFloat32(ctx, x))(t)
		layer := func(blocks int) func(x kernels.Tensor, opt nn.MultiHeadOptions) []float32 {
			c := config
			c.BlockBytes = blocks
			l := must.Get(nn.NewLatentAttention(ctx, dev, c, w))(t)
			t.Cleanup(l.Release)
			return func(x kernels.Tensor, opt nn.MultiHeadOptions) []float32 {
				opt.Sinks, opt.Softcap, opt.Causal = []float32{2, -1}, 3, opt.Cache == nil
				y := must.Get(l.Apply(ctx, x, opt))(t)
				defer y.Release()
				return must.Get(dev.ToFloat32(ctx, y))(t)
			}
		}
		// last returns the rows of numbers after those before.
		last := func(numbers []float32) (list []float32) {
			for b, n := range before {
				list = append(list, numbers[(b*all+n)*model:][:after*model]...)
			}
			return list
		}
		exact := last(layer(0)(x, nn.MultiHeadOptions{}))
		for _, dtype := range []kernels.DType{kernels.F32, kernels.F16, kernels.BF16} {
			want, other := exact, [][]float32(nil)
			for _, c := range []struct {
				name         string
				blocks, step int
			}{{"absorbed", 0, 6}, {"expanded", 0, after}, {"in blocks", 1, after}} {
				apply := layer(c.blocks)
				cache := must.Get(kvcache.New(ctx, dev, kvcache.Config{Batch: 2, Dim: 10, Latent: 6, Capacity: all, DType: dtype}))(t)
				defer cache.Release()
				apply(must.Get(x.Slice(kernels.Seq, 0, before[0]))(t), nn.MultiHeadOptions{Cache: cache, Count: before})
				rest := must.Get(dev.FromFloat32(ctx, kernels.F32, last(rows), kernels.Shape{2, 1, after, model}))(t)
				defer rest.Release()
				got := make([]float32, len(want))
				for i := 0; i < after; i += c.step {
					y := apply(must.Get(rest.Slice(kernels.Seq, i, i+c.step))(t), nn.MultiHeadOptions{Cache: cache})
					for b := range before {
						copy(got[(b*after+i)*model:], y[b*c.step*model:][:c.step*model])
					}
				}
				if slices.ContainsFunc(other, func(y []float32) bool { return slices.Equal(y, got) }) {
					t.Errorf("%s, %v: the bits are those of another form", c.name, dtype)
				}
				other = append(other, got)
				if dtype != kernels.F32 && c.name == "absorbed" {
					want = got
				}
				// As in TestLatentBatches of package nn.
				for i := range want {
					if e := math.Abs(float64(got[i] - want[i])); !(e <= 0x1p-15) {
						t.Fatalf("%s, %v: y[%d] is %v, should be %v", c.name, dtype, i, got[i], want[i])
					}
				}
			}
		}
	})
}
