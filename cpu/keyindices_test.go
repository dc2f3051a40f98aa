package cpu_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/kernels/kvcache"
)

// TestKeyIndicesInCaches: lists count the tokens of a cache, contiguous or in pages, as the keys of a call.
func TestKeyIndicesInCaches(t *testing.T) {
	const heads, tokens, rows, d = 2, 50, 3, 16
	ctx, dev := t.Context(), kernels.NewDevice(cpu.New(cpu.Options{}))
	defer dev.Close()
	rng := rand.New(rand.NewPCG(3, 4))
	drawn := func(n int) kernels.Tensor {
		data := make([]float32, heads*n*d)
		for i := range data {
			data[i] = float32(rng.NormFloat64())
		}
		return must.Get(dev.FromFloat32(ctx, kernels.F32, data, kernels.Shape{1, heads, n, d}))(t)
	}
	q, k, v := drawn(rows), drawn(tokens), drawn(tokens)
	lists := &kernels.KeyIndices{TopK: 8}
	for range heads * rows {
		for _, key := range rng.Perm(tokens)[:lists.TopK] {
			lists.Indices = append(lists.Indices, int32(key))
		}
	}
	o := func(r kernels.Result, err error) []float32 {
		return must.Get(dev.ToFloat32(ctx, must.Get(r, err)(t).O))(t)
	}
	want := o(dev.Attention(ctx, q, k, v, kernels.Options{Causal: true, Align: kernels.LowerRight, KeyIndices: lists}))
	opt := kvcache.CallOptions{Options: kernels.Options{KeyIndices: lists}}
	cache := must.Get(kvcache.New(ctx, dev, kvcache.Config{KVHeads: heads, Dim: d, Capacity: 64}))(t)
	must.Do(t, cache.Append(ctx, k, v, nil))
	pool := must.Get(kvcache.NewPaged(ctx, dev, kvcache.PagedConfig{KVHeads: heads, Dim: d, PageSize: 7, Pages: 9}))(t)
	batch := pool.Batch(must.Get(pool.NewSequence())(t))
	must.Do(t, batch.Append(ctx, k, v, nil))
	tensor := must.Get(dev.Upload(ctx, must.Get(kernels.Host(lists.Indices, kernels.I32, kernels.Shape{1, heads, rows, lists.TopK}))(t)))(t)
	inTensor := kvcache.CallOptions{Options: kernels.Options{KeyIndices: &kernels.KeyIndices{Tensor: tensor}}}
	for name, got := range map[string][]float32{
		"contiguous": o(cache.Attention(ctx, q, opt)), "pages": o(batch.Attention(ctx, q, opt)),
		"contiguous, in a tensor": o(cache.Attention(ctx, q, inTensor)), "pages, in a tensor": o(batch.Attention(ctx, q, inTensor)),
	} {
		if !slices.Equal(got, want) {
			t.Errorf("%s: %v, should be %v", name, got, want)
		}
	}
}

// BenchmarkKeyIndices decodes with 2,048 of 131,072 keys of 8 heads in random order, and with as many adjacent keys of
// the same cache, other ones in each call, so that both read from memory. It includes Reset, as a step of generation does.
func BenchmarkKeyIndices(b *testing.B) {
	const heads, seq, topK = 8, 131072, 2048
	for _, d := range []int{64, 128} {
		dev := kernels.NewDevice(cpu.New(cpu.Options{}))
		tensor := func(s int) backend.Tensor {
			t := must.Get(dev.Alloc(b.Context(), backend.F32, backend.Shape{1, heads, s, d}))(b)
			data, _ := t.Float32s()
			for i := range data {
				data[i] = float32(i%251)/251 - 0.5
			}
			return t
		}
		q, k, v, o := tensor(1), tensor(seq), tensor(seq), tensor(1)
		rng := rand.New(rand.NewPCG(1, 2))
		for _, lists := range []int{0, 1, heads} {
			name := "plain"
			if lists > 0 {
				name = fmt.Sprintf("%d lists", lists)
			}
			b.Run(fmt.Sprintf("d%d/%s", d, name), func(b *testing.B) {
				var steps [16]kernels.KeyIndices
				for n := range steps {
					steps[n].TopK = topK
					for range lists {
						for _, key := range rng.Perm(seq)[:topK] {
							steps[n].Indices = append(steps[n].Indices, int32(key))
						}
					}
				}
				call := new(kernels.Call)
				for n := 0; b.Loop(); n++ {
					opt, keys, values := kernels.Options{KeyIndices: &steps[n%len(steps)]}, k, v
					if lists == 0 {
						opt.KeyIndices = nil
						at := n % (seq / topK) * topK
						keys, _ = k.Slice(backend.Seq, at, at+topK)
						values, _ = v.Slice(backend.Seq, at, at+topK)
					}
					if n == 0 {
						call, _ = dev.Prepare(q, keys, values, opt)
					} else if err := call.Reset(q, keys, values, opt); err != nil {
						b.Fatal(err)
					}
					must.Do(b, call.RunInto(b.Context(), kernels.Result{O: o}))
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*topK*heads), "ns/key")
			})
		}
	}
}
