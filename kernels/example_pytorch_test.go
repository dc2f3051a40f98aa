package kernels_test

import (
	"context"
	"fmt"
	"log"

	_ "github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kvcache"
	"github.com/seed90331342/attn/kernels/nn"
)

// The examples of this file print what PyTorch 2.14 computes on a CPU in float64 for the call in the comment of each, rounded to four
// decimals. None of its numbers is within 3e-6 of where the rounding changes. They are below 2 in magnitude, and float32 is off by less than
// 2e-6, 16 roundings of 2·2^-24 each. The inputs are those of numbers, in Python:
//
//	def fill(seed, *shape):
//	    return torch.tensor([((seed*i*i + 5*i + seed) % 13 - 6) / 4 for i in range(math.prod(shape))]).reshape(shape)
//
// The package flash_attn needs a GPU. Its three examples print what scaled_dot_product_attention computes with a mask of the
// same meaning, lower(Sq, Sk): j <= i + Sk - Sq for row i and key j.

// numbers returns n inputs, which float32 represents exactly.
func numbers(seed, n int) []float32 {
	x := make([]float32, n)
	for i := range x {
		x[i] = float32((seed*i*i+5*i+seed)%13-6) / 4
	}
	return x
}

// opened returns the CPU. Programs handle errors as usual instead.
func opened() *kernels.Device { return got(kernels.Open("cpu")) }

// got returns x. It ends the program on an error.
func got[T any](x T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return x
}

// PyTorch's call, then the same with a mask and a scale. No key is visible to the last row.
//
//	q, k, v = fill(1, 1, 2, 2, 2), fill(2, 1, 1, 3, 2), fill(3, 1, 1, 3, 2)
//	scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
//	mask = torch.tensor([[True, False, True], [False, False, False]])
//	scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0, enable_gqa=True)
func Example_scaledDotProductAttention() {
	dev := opened()
	defer dev.Close()
	ctx := context.Background()
	q, k, v := numbers(1, 8), numbers(2, 6), numbers(3, 6)
	dims := kernels.Dims{Heads: 2, KVHeads: 1, SeqQ: 2, SeqK: 3, Dim: 2}

	fmt.Printf("%.4f\n", got(dev.AttentionFloat32(ctx, dims, kernels.BHSD, q, k, v, kernels.Options{Causal: true})))
	mask := got(kernels.HostBool([]bool{true, false, true, false, false, false}, kernels.Shape{1, 1, 2, 3}))
	fmt.Printf("%.4f\n", got(dev.AttentionFloat32(ctx, dims, kernels.BHSD, q, k, v, kernels.Options{Mask: mask, Scale: new(1.0)})))
	// Output:
	// [-0.7500 1.2500 -0.0922 0.8845 -0.7500 1.2500 -0.0922 0.8845]
	// [-0.3399 1.3867 0.0000 0.0000 -0.1838 1.4387 0.0000 0.0000]
}

// PyTorch's call, in eager mode:
//
//	q, k, v = fill(1, 1, 2, 3, 2), fill(2, 1, 2, 3, 2), fill(3, 1, 2, 3, 2)
//	causal = create_block_mask(lambda b, h, i, j: i >= j, None, None, 3, 3, device="cpu")
//	flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + (j - i) / 4, block_mask=causal, return_lse=True)
func Example_flexAttention() {
	dev := opened()
	defer dev.Close()
	ctx := context.Background()
	shape := kernels.Shape{1, 2, 3, 2}
	q := got(dev.FromFloat32(ctx, kernels.F32, numbers(1, 12), shape))
	defer q.Release()
	k := got(dev.FromFloat32(ctx, kernels.F32, numbers(2, 12), shape))
	defer k.Release()
	v := got(dev.FromFloat32(ctx, kernels.F32, numbers(3, 12), shape))
	defer v.Release()

	r := got(dev.Attention(ctx, q, k, v, kernels.Options{Causal: true, LSE: true, ScoreMod: &kernels.ScoreMod{
		Go: func(scores []float32, at kernels.Position) {
			for n := range scores {
				scores[n] += float32(at.Key+n-at.Row) / 4
			}
		},
		WGSL: "return score + f32(i32(j - i)) / 4.0;",
	}}))
	defer r.Release()
	fmt.Printf("%.4f\n", got(dev.ToFloat32(ctx, r.O)))
	fmt.Printf("%.4f\n", got(dev.ToFloat32(ctx, r.LSE)))
	// Output:
	// [-0.7500 1.2500 0.0299 0.8167 0.5938 0.7890 1.2500 -0.7500 0.4083 -0.5817 -0.4486 -0.3876]
	// [1.0165 1.6782 1.5551 1.0165 1.3096 0.1715]
}

// PyTorch's layer, then the same one with add_zero_attn:
//
//	m = torch.nn.MultiheadAttention(4, 2, batch_first=True)
//	m.in_proj_weight[:], m.in_proj_bias[:] = fill(1, 12, 4) / 4, fill(2, 12)
//	m.out_proj.weight[:], m.out_proj.bias[:] = fill(3, 4, 4) / 4, fill(4, 4)
//	x, hidden = fill(5, 1, 3, 4), torch.ones(3, 3, dtype=torch.bool).triu(1)
//	m(x, x, x, attn_mask=hidden)
//	m.add_zero_attn = True
//	m(x, x, x, attn_mask=hidden)
//
// LoadSafetensors reads the four tensors of such a layer from a file.
func Example_multiheadAttention() {
	dev := opened()
	defer dev.Close()
	ctx := context.Background()
	linear := func(weights []float32) kernels.Tensor { // of PyTorch, with inputs of 4 elements
		for i := range weights {
			weights[i] /= 4
		}
		return got(nn.Transposed(weights, 4))
	}
	bias := func(b []float32) kernels.Tensor { return got(kernels.HostF32(b, kernels.Shape{1, 1, 1, len(b)})) }
	in, inBias := numbers(1, 48), numbers(2, 12)
	layer := got(nn.NewMultiHeadAttention(ctx, dev, nn.MultiHeadConfig{Model: 4, Heads: 2, Bias: true}, nn.MultiHeadWeights{
		Wq: linear(in[:16]), Wk: linear(in[16:32]), Wv: linear(in[32:]), Wo: linear(numbers(3, 16)),
		Bq: bias(inBias[:4]), Bk: bias(inBias[4:8]), Bv: bias(inBias[8:]), Bo: bias(numbers(4, 4)),
	}))
	defer layer.Release()

	var opt nn.MultiHeadOptions
	opt.Causal = true
	for _, opt.Sinks = range [][]float32{nil, {0, 0}} {
		y, _, err := layer.ApplyFloat32(ctx, numbers(5, 12), 1, opt)
		fmt.Printf("%.4f\n", got(y, err))
	}
	// Output:
	// [-0.4619 -1.6895 0.2305 -0.4023 -0.6586 -1.6136 0.1448 -0.8861 -0.7138 -1.5576 0.1290 -1.0826]
	// [-0.4403 -1.6752 -0.0183 -0.3414 -0.6000 -1.7603 -0.0393 -0.4513 -0.6750 -1.5810 0.0117 -0.9531]
}

// The call of flash_attn:
//
//	q, k, v = fill(1, 1, 2, 2, 2), fill(2, 1, 4, 1, 2), fill(3, 1, 4, 1, 2)
//	flash_attn_func(q, k, v, causal=True, window_size=(1, -1))
//
// The numbers are those of scaled_dot_product_attention(q.transpose(1, 2), ..) with the mask lower(2, 4) where
// j >= i + 1, too.
func Example_flashAttnFunc() {
	dev := opened()
	defer dev.Close()
	dims := kernels.Dims{Heads: 2, KVHeads: 1, SeqQ: 2, SeqK: 4, Dim: 2}
	opt := kernels.Options{Causal: true, Align: kernels.LowerRight, Window: &kernels.Window{Left: 1, Right: kernels.Unbounded}}
	fmt.Printf("%.4f\n", got(dev.AttentionFloat32(context.Background(), dims, kernels.BSHD, numbers(1, 8), numbers(2, 8), numbers(3, 8), opt)))
	// Output: [0.3373 1.1627 0.2358 1.2642 0.1141 1.2946 0.6388 0.3501]
}

// The call of flash_attn:
//
//	q, k, v = fill(1, 3, 2, 2), fill(2, 5, 1, 2), fill(3, 5, 1, 2)
//	flash_attn_varlen_func(q, k, v, cu_seqlens_q=[0, 1, 3], cu_seqlens_k=[0, 2, 5], max_seqlen_q=2, max_seqlen_k=3, causal=True)
//
// The numbers are those of scaled_dot_product_attention for each sequence alone, with the masks lower(1, 2) and lower(2, 3).
func Example_flashAttnVarlenFunc() {
	dev := opened()
	defer dev.Close()
	dims := kernels.Dims{Heads: 2, KVHeads: 1, SeqQ: 3, SeqK: 5, Dim: 2}
	opt := kernels.Options{Causal: true, Align: kernels.LowerRight, CuQ: []int{0, 1, 3}, CuK: []int{0, 2, 5}}
	fmt.Printf("%.4f\n", got(dev.AttentionFloat32(context.Background(), dims, kernels.BSHD, numbers(1, 12), numbers(2, 10), numbers(3, 10), opt)))
	// Output: [-0.1901 0.9390 -0.0922 0.8845 0.1141 1.2946 0.6388 0.3501 0.2093 0.6853 0.0731 0.5980]
}

// The call of flash_attn, with caches of three tokens and of one:
//
//	k_cache, v_cache = fill(2, 2, 3, 1, 2), fill(3, 2, 3, 1, 2) # and room for more
//	q, k, v = fill(1, 2, 1, 2, 2), fill(4, 2, 1, 1, 2), fill(5, 2, 1, 1, 2)
//	flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=[3, 1], causal=True)
//
// The numbers are those of scaled_dot_product_attention for each sequence alone, over its cache and its new key.
func Example_flashAttnWithKVCache() {
	dev := opened()
	defer dev.Close()
	ctx := context.Background()
	bshd := func(seed, seq, heads int) kernels.Tensor { // of two sequences, as [B, H, S, D]
		t := got(dev.FromFloat32(ctx, kernels.F32, numbers(seed, 2*seq*heads*2), kernels.Shape{2, seq, heads, 2}))
		return got(t.Swap(kernels.Heads, kernels.Seq))
	}
	cache := got(kvcache.New(ctx, dev, kvcache.Config{Batch: 2, Dim: 2, Capacity: 16}))
	defer cache.Release()
	kCache, vCache := bshd(2, 3, 1), bshd(3, 3, 1)
	defer kCache.Release()
	defer vCache.Release()
	q, k, v := bshd(1, 1, 2), bshd(4, 1, 1), bshd(5, 1, 1)
	defer q.Release()
	defer k.Release()
	defer v.Release()
	if err := cache.Append(ctx, kCache, vCache, []int{3, 1}); err != nil {
		log.Fatal(err)
	}
	if err := cache.Append(ctx, k, v, nil); err != nil {
		log.Fatal(err)
	}
	r := got(cache.Attention(ctx, q, kvcache.CallOptions{}))
	defer r.Release()
	fmt.Println(cache.Lens())
	fmt.Printf("%.4f\n", got(dev.ToFloat32(ctx, got(r.O.Swap(kernels.Heads, kernels.Seq)))))
	// Output:
	// [4 2]
	// [-0.1243 0.8712 -0.0396 1.2208 0.9563 -1.1906 1.0945 -0.9832]
}
