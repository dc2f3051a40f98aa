package kvcache_test

import (
	"context"
	"fmt"
	"log"
	"math/rand/v2"
	"slices"

	_ "github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
)

// A program with FlashInfer's page table and pools: a call for two requests, which hold 37 and 32
// tokens and have 4 and 1 rows of queries.
func Example_flashInfer() {
	const heads, kvHeads, dim, pageSize = 4, 2, 8, 16
	qoIndptr := []int{0, 4, 5}
	kvIndptr, kvIndices, kvLastPageLen := []int{0, 3, 5}, []int32{4, 0, 6, 2, 5}, []int{5, 16}

	ctx := context.Background()
	check := func(err error) {
		if err != nil {
			log.Fatal(err)
		}
	}
	dev, err := kernels.Open("cpu")
	check(err)
	defer dev.Close()
	rng := rand.New(rand.NewPCG(1, 2))
	upload := func(shape kernels.Shape) (kernels.Tensor, []float32) {
		data := make([]float32, shape.Elements())
		for i := range data {
			data[i] = rng.Float32() - 0.5
		}
		t, err := dev.FromFloat32(ctx, kernels.F32, data, shape)
		check(err)
		return t, data
	}
	// paged_kv_cache [7, 2, page_size, kv_heads, dim], NHD, and q [5, heads, dim].
	pool, stored := upload(kernels.Shape{7, 2 * pageSize, kvHeads, dim})
	defer pool.Release()
	packed, queries := upload(kernels.Shape{1, 5, heads, dim})
	defer packed.Release()

	// view returns rows [lo, hi) of an NHD tensor with the axes of a call.
	view := func(t kernels.Tensor, lo, hi int) kernels.Tensor {
		t, err := t.Slice(1, lo, hi)
		check(err)
		t, err = t.Swap(kernels.Heads, kernels.Seq)
		check(err)
		return t
	}
	k, v, q := view(pool, 0, pageSize), view(pool, pageSize, 2*pageSize), view(packed, 0, 5)
	opt := kernels.Options{Causal: true, CuQ: qoIndptr, Pages: &kernels.Pages{}}
	for b, last := range kvLastPageLen {
		pages := kvIndices[kvIndptr[b]:kvIndptr[b+1]]
		n := (len(pages)-1)*pageSize + last
		opt.Pages.Table = append(opt.Pages.Table, pages)
		opt.Pages.Keys = max(opt.Pages.Keys, n)
		opt.KLen = append(opt.KLen, n)
		opt.Offset = append(opt.Offset, n-(qoIndptr[b+1]-qoIndptr[b])) // the last row sees the last key
	}
	r, err := dev.Attention(ctx, q, k, v, opt)
	check(err)
	defer r.Release()
	o, err := r.O.Swap(kernels.Heads, kernels.Seq)
	check(err)
	all, err := dev.ToFloat32(ctx, o) // [5, heads, dim]
	check(err)

	for b, n := range opt.KLen { // a plain call over the same tokens
		var keys, values []float32
		for j := range n {
			const row = kvHeads * dim
			at := (int(opt.Pages.Table[b][j/pageSize])*2*pageSize + j%pageSize) * row
			keys = append(keys, stored[at:at+row]...)
			values = append(values, stored[at+pageSize*row:at+(pageSize+1)*row]...)
		}
		lo, hi := qoIndptr[b], qoIndptr[b+1]
		dims := kernels.Dims{Heads: heads, KVHeads: kvHeads, SeqQ: hi - lo, SeqK: n, Dim: dim}
		plain, err := dev.AttentionFloat32(ctx, dims, kernels.BSHD, queries[lo*heads*dim:hi*heads*dim], keys, values, kernels.Options{Causal: true, Align: kernels.LowerRight})
		check(err)
		fmt.Printf("request %d: %d rows, %d keys, the bits of a plain call: %t\n", b, hi-lo, n, slices.Equal(plain, all[lo*heads*dim:hi*heads*dim]))
	}
	// Output:
	// request 0: 4 rows, 37 keys, the bits of a plain call: true
	// request 1: 1 rows, 32 keys, the bits of a plain call: true
}
