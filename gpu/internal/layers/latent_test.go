package layers_test

import (
	"slices"
	"testing"

	"github.com/seed90331342/attn/backend/backendtest/must"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kvcache"
	"github.com/seed90331342/attn/kernels/nn"
)

// TestLatentCache: attention over a latent cache, whose values have the stride of a key, has the
// bits of attention over a cache with values in memory of their own. One row and several attend,
// with a window, with a shared prefix and with a mask of the last tokens.
func TestLatentCache(t *testing.T) {
	const dim, latent, first = 40, 24, 37
	each(t, func(t *testing.T, dev *kernels.Device) {
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
			for _, dtype := range []kernels.DType{kernels.F32, kernels.F16, kernels.BF16} {
				if got, want := outputs(dtype, 0, latent), outputs(dtype, latent, 0); !slices.Equal(got, want) {
					t.Errorf("%s in %v: %v, with values of their own %v", c.name, dtype, got[:4], want[:4])
				}
			}
		}
	})
}
