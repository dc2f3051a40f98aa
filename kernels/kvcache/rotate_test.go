package kvcache_test

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/kernels/kvcache"
	"github.com/seed90331342/attn/kernels/nn"
)

// TestRotaryCache compares the bits of a cache that rotates with those of one whose keys and
// queries are rotated before: steps, prompts, tokens that are taken back, and sequences of
// different lengths. A cache has one position for each token: Sections change nothing.
func TestRotaryCache(t *testing.T) {
	yarn := nn.RoPE{Scaling: &nn.Scaling{Kind: nn.ScalingYaRN, Factor: 8, OriginalMaxPositionEmbeddings: 4096}}
	sections := yarn
	sections.Sections = []int{2, 1, 1}
	testRotaryCache(t, kernels.F32, &nn.RoPE{Interleaved: true}, &nn.RoPE{Interleaved: true})
	testRotaryCache(t, kernels.F32, &sections, &yarn)
	testRotaryCache(t, kernels.Q8, &yarn, &yarn)
}

func testRotaryCache(t *testing.T, dtype kernels.DType, inside, rope *nn.RoPE) {
	t.Helper()
	const heads, dim, capacity = 2, 8, 700
	dev, ctx := onCPU(t, cpu.Options{Threads: 1}), t.Context()
	for _, batch := range []int{1, 2} {
		rng := rand.New(rand.NewPCG(21, uint64(batch)))
		config := kvcache.Config{Batch: batch, KVHeads: heads, Dim: dim, Capacity: capacity, DType: dtype}
		plain := must.Get(kvcache.New(ctx, dev, config))(t)
		config.RoPE = inside
		rotary := must.Get(kvcache.New(ctx, dev, config))(t)
		tensor := func(n int) kernels.Tensor {
			data := make([]float32, batch*heads*n*dim)
			for i := range data {
				data[i] = rng.Float32() - 0.5
			}
			return must.Get(kernels.HostF32(data, kernels.Shape{batch, heads, n, dim}))(t)
		}
		rotated := func(x kernels.Tensor, from []int) kernels.Tensor {
			n := x.Shape()[kernels.Seq]
			positions := make([][]int, batch)
			for b := range positions {
				for i := range n {
					positions[b] = append(positions[b], from[b]+i)
				}
			}
			angles := must.Get(rope.Angles(ctx, dev, dim, positions))(t)
			y := must.Get(kernels.AllocHost(kernels.F32, x.Shape()))(t)
			must.Do(t, dev.Rotate(ctx, y, x, angles))
			return y
		}
		for step := range 300 {
			n := 1
			if rng.IntN(20) == 0 {
				n = 1 + rng.IntN(40)
			}
			before := rotary.Lens()
			if slices.Max(before)+n > capacity {
				break
			}
			k, v := tensor(n), tensor(n)
			var count []int
			if rng.IntN(10) == 0 { // the sequences have different lengths from now on
				for range batch {
					count = append(count, n-rng.IntN(2))
				}
			}
			must.Do(t, rotary.Append(ctx, k, v, count))
			must.Do(t, plain.Append(ctx, rotated(k, before), v, count))
			lens := rotary.Lens()
			rows := min(n, slices.Min(lens))
			if rows == 0 {
				continue
			}
			from := slices.Clone(lens)
			for b := range from {
				from[b] -= rows
			}
			q := tensor(rows)
			got := must.Get(rotary.Attention(ctx, q, kvcache.CallOptions{}))(t)
			want := must.Get(plain.Attention(ctx, rotated(q, from), kvcache.CallOptions{}))(t)
			g, w := must.Get(got.O.Float32s())(t), must.Get(want.O.Float32s())(t)
			if !slices.Equal(g, w) {
				t.Fatalf("%v, batch %d, step %d of %d tokens at %v: %v, should be %v", dtype, batch, step, n, before, g[:4], w[:4])
			}
			if rng.IntN(8) == 0 {
				b := rng.IntN(batch)
				back := rng.IntN(min(24, lens[b]))
				for _, c := range []*kvcache.Cache{rotary, plain} {
					must.Do(t, c.Rewind(b, lens[b]-back))
				}
			}
		}
	}
}
