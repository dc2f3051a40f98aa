package kvcache_test

import (
	"context"
	"fmt"
	"log"
	"math"
	"math/rand/v2"
	"slices"

	_ "github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kvcache"
)

// A program with llama.cpp's sequences: a prompt for two answers, a batch with rows of both, and
// tokens that are taken back.
func Example_llamaCpp() {
	const heads, kvHeads, dim = 4, 2, 8
	const row = kvHeads * dim
	ctx := context.Background()
	check := func(err error) {
		if err != nil {
			log.Fatal(err)
		}
	}
	dev, err := kernels.Open("cpu")
	check(err)
	defer dev.Close()
	cache, err := kvcache.NewPaged(ctx, dev, kvcache.PagedConfig{KVHeads: kvHeads, Dim: dim, PageSize: 16, Pages: 8})
	check(err)
	defer cache.Release()
	rng := rand.New(rand.NewPCG(5, 6))
	draw := func(n int) []float32 {
		data := make([]float32, n)
		for i := range data {
			data[i] = rng.Float32() - 0.5
		}
		return data
	}
	upload := func(data []float32, sequences, heads int) kernels.Tensor { // [sequences, n, heads, dim]
		t, err := dev.FromFloat32(ctx, kernels.F32, data, kernels.Shape{sequences, len(data) / (sequences * heads * dim), heads, dim})
		check(err)
		t, err = t.Swap(kernels.Heads, kernels.Seq)
		check(err)
		return t
	}

	prompt, err := cache.NewSequence()
	check(err)
	text := draw(40 * row) // keys, which are the values too
	x := upload(text, 1, kvHeads)
	defer x.Release()
	check(cache.Batch(prompt).Append(ctx, x, x, nil))
	other, err := prompt.Fork() // llama_memory_seq_cp(mem, 0, 1, -1, -1)
	check(err)
	batch := cache.Batch(prompt, other)
	texts := [2][]float32{text, slices.Clone(text)}

	// decode appends count[b] tokens to each sequence, attends from them and compares. Results have the
	// bits of plain calls, unless a prefix is shared. Then both sum up to 45 values within ±1/2 whose
	// weights are off by 22u, u = 2^-24, and are within 82u of each other, less than 2^-17.
	decode := func(share bool, count ...int) {
		n := slices.Max(count)
		tokens, queries := draw(2*n*row), draw(2*n*heads*dim)
		x, q := upload(tokens, 2, kvHeads), upload(queries, 2, heads)
		defer x.Release()
		defer q.Release()
		check(batch.Append(ctx, x, x, count))
		r, err := batch.Attention(ctx, q, kvcache.CallOptions{Count: count, SharePrefix: share})
		check(err)
		defer r.Release()
		o, err := r.O.Swap(kernels.Heads, kernels.Seq)
		check(err)
		all, err := dev.ToFloat32(ctx, o) // [2, n, heads, dim]
		check(err)
		allowed, furthest := 0.0, 0.0
		if share {
			allowed = 0x1p-17
		}
		for b, rows := range count { // a plain call over the same tokens
			texts[b] = append(texts[b], tokens[b*n*row:(b*n+rows)*row]...)
			at := b * n * heads * dim
			dims := kernels.Dims{Heads: heads, KVHeads: kvHeads, SeqQ: rows, SeqK: len(texts[b]) / row, Dim: dim}
			plain, err := dev.AttentionFloat32(ctx, dims, kernels.BSHD, queries[at:at+rows*heads*dim], texts[b], texts[b], kernels.Options{Causal: true, Align: kernels.LowerRight})
			check(err)
			for i, y := range plain {
				furthest = max(furthest, math.Abs(float64(y-all[at+i])))
			}
		}
		fmt.Println("tokens", batch.Lens(), "pages free", cache.FreePages(), "as plain calls:", furthest <= allowed)
	}
	decode(false, 5, 3)
	check(prompt.Rewind(42)) // llama_memory_seq_rm(mem, 0, 42, -1)
	texts[0] = texts[0][:42*row]
	decode(false, 1, 1)
	decode(true, 1, 1) // the whole pages of the prompt are read once for both
	other.Free()       // llama_memory_seq_rm(mem, 1, -1, -1)
	fmt.Println("pages free", cache.FreePages())
	// Output:
	// tokens [45 43] pages free 4 as plain calls: true
	// tokens [43 44] pages free 4 as plain calls: true
	// tokens [44 45] pages free 4 as plain calls: true
	// pages free 5
}
