package kernelstest

import (
	"math"
	"slices"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kvcache"
	"github.com/seed90331342/attn/kernels/nn"
)

// testFactors compares caches in F8 with KScale and VScale, of elements of heads, with those without that get what the others
// store and read: quotients of keys and values, products of queries. Their outputs are multiplied here. Factors are powers of
// two, so that bits are compared, and most products of keys and values are beyond the largest number of F8.
func testFactors(t *testing.T, dev *kernels.Device) {
	f8 := backend.F8
	needs(t, dev, Case{Keys: &f8})
	if !implements[backend.Gater](dev) {
		t.Skipf("%s is no backend.Gater, which factors need", dev.Info().Name)
	}
	const tokens = 37
	s := newHistory(t, dev, 2, backend.F32, backend.F32, nil)
	d := s.dims
	factors := func(dim int) operand {
		o := operand{backend.Shape{1, d.KVHeads, 1, dim}, backend.F32, make([]float32, d.KVHeads*dim)}
		for i := range o.data {
			o.data[i] = float32(math.Ldexp(1, 7+i*3%5))
		}
		return o
	}
	kf, vf := factors(d.Dim), factors(d.ValueDim)
	// times returns o·f^power. Query heads have the factors of their key head.
	times := func(o, f operand, power int) operand {
		o.data = slices.Clone(o.data)
		for i := range o.data {
			n := o.shape[3]
			head := i / n / o.shape[2] % o.shape[1] * d.KVHeads / o.shape[1]
			o.data[i] *= float32(math.Pow(float64(f.data[head*n+i%n]), float64(power)))
		}
		return o
	}
	k, v := s.draw(2, d.KVHeads, tokens, d.Dim, backend.F32), s.draw(2, d.KVHeads, tokens, d.ValueDim, backend.F32)
	for _, paged := range []bool{false, true} {
		if paged && lacking(dev, "pages") {
			continue
		}
		for _, rows := range []int{1, 20} {
			q := s.draw(2, d.Heads, rows, d.Dim, backend.F32)
			run := func(kf, vf kernels.Tensor, q, k, v operand) operand {
				t.Helper()
				var cache nn.KVCache
				if paged {
					p := must(kvcache.NewPaged(t.Context(), dev, kvcache.PagedConfig{KVHeads: d.KVHeads, Dim: d.Dim, ValueDim: d.ValueDim, DType: f8, PageSize: 16, Pages: 6, KScale: kf, VScale: vf}))(t)
					defer p.Release()
					cache = p.Batch(sequence(t, p), sequence(t, p))
				} else {
					c := must(kvcache.New(t.Context(), dev, kvcache.Config{Batch: 2, KVHeads: d.KVHeads, Dim: d.Dim, ValueDim: d.ValueDim, DType: f8, Capacity: 40, KScale: kf, VScale: vf}))(t)
					defer c.Release()
					cache = c
				}
				noError(t, cache.Append(t.Context(), s.put(t, k), s.put(t, v), nil))
				return operand{backend.Shape{2, d.Heads, rows, d.ValueDim}, backend.F32, s.result(t, cache, s.put(t, q))}
			}
			got := run(s.put(t, kf), s.put(t, vf), times(q, kf, -1), times(k, kf, 1), times(v, vf, 1))
			if err := differIn("o", times(run(kernels.Tensor{}, kernels.Tensor{}, q, k, v), vf, 1).data, got.data); err != nil {
				t.Errorf("pages %t, %d rows, of quotients: %v", paged, rows, err)
			}
		}
	}
}
