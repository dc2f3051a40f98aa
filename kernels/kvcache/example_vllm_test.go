package kvcache_test

import (
	"cmp"
	"context"
	"fmt"
	"log"
	"math/rand/v2"
	"slices"

	_ "github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
)

// writeSlots copies row i of rows, [1, n, Hkv, D], to slot slots[i] of pool, [blocks, size, Hkv, D].
// Rows with slot -1 are padding.
func writeSlots(ctx context.Context, dev *kernels.Device, pool, rows kernels.Tensor, slots []int) error {
	size := pool.Shape()[1]
	var dst, src []kernels.Tensor
	for i, n := 0, 0; i < len(slots); i += n {
		n = 1
		slot := slots[i]
		if slot < 0 {
			continue
		}
		for i+n < len(slots) && slots[i+n] == slot+n && (slot+n)%size != 0 {
			n++
		}
		block, err1 := pool.Slice(0, slot/size, slot/size+1)
		to, err2 := block.Slice(1, slot%size, slot%size+n)
		from, err3 := rows.Slice(1, i, i+n)
		if err := cmp.Or(err1, err2, err3); err != nil {
			return err
		}
		dst, src = append(dst, to), append(src, from)
	}
	return dev.Copy(ctx, dst, src)
}

// A program with vLLM's block table, slot mapping and pools: a step in which one request decodes its
// 21st token, and another one begins, whose first 16 of 34 tokens are in a block of the first.
func Example_vllm() {
	const heads, kvHeads, dim, blockSize = 4, 2, 8, 16
	ctx := context.Background()
	check := func(err error) {
		if err != nil {
			log.Fatal(err)
		}
	}
	dev, err := kernels.Open("cpu")
	check(err)
	defer dev.Close()
	rng := rand.New(rand.NewPCG(3, 4))
	draw := func(n int) []float32 {
		data := make([]float32, n)
		for i := range data {
			data[i] = rng.Float32() - 0.5
		}
		return data
	}
	upload := func(data []float32, shape kernels.Shape) kernels.Tensor {
		t, err := dev.FromFloat32(ctx, kernels.F32, data, shape)
		check(err)
		return t
	}
	const row = kvHeads * dim
	var pools [2]kernels.Tensor // key_cache and value_cache
	var tokens [2][2][]float32  // keys and values of the requests
	for i := range pools {
		pools[i] = upload(make([]float32, 6*blockSize*row), kernels.Shape{6, blockSize, kvHeads, dim})
		defer pools[i].Release()
		tokens[0][i] = draw(21 * row)
		tokens[1][i] = slices.Concat(tokens[0][i][:16*row], draw(18*row))

		prompt := upload(tokens[0][i][:20*row], kernels.Shape{1, 20, kvHeads, dim})
		defer prompt.Release()
		slots := []int{48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63, 16, 17, 18, 19}
		check(writeSlots(ctx, dev, pools[i], prompt, slots)) // blocks 3 and 1
	}

	blockTable := [][]int32{{3, 1, 0}, {3, 0, 5}} // with padding
	seqLens, queryStartLoc := []int{21, 34}, []int{0, 1, 19}
	slotMapping := []int{20, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 80, 81, -1}
	queries := draw(19 * heads * dim)
	opt := kernels.Options{Causal: true, CuQ: queryStartLoc, KLen: seqLens, Pages: &kernels.Pages{Table: blockTable, Keys: slices.Max(seqLens)}}
	for b, n := range seqLens {
		opt.Offset = append(opt.Offset, n-(queryStartLoc[b+1]-queryStartLoc[b])) // the last row sees the last key
	}
	view := func(t kernels.Tensor) kernels.Tensor {
		t, err := t.Swap(kernels.Heads, kernels.Seq)
		check(err)
		return t
	}
	for i := range pools {
		step := slices.Concat(tokens[0][i][20*row:], tokens[1][i][16*row:], make([]float32, row))
		rows := upload(step, kernels.Shape{1, 20, kvHeads, dim})
		defer rows.Release()
		check(writeSlots(ctx, dev, pools[i], rows, slotMapping))
	}
	q := upload(queries, kernels.Shape{1, 19, heads, dim})
	defer q.Release()
	r, err := dev.Attention(ctx, view(q), view(pools[0]), view(pools[1]), opt)
	check(err)
	defer r.Release()
	all, err := dev.ToFloat32(ctx, view(r.O)) // [19, heads, dim]
	check(err)

	for b, n := range seqLens { // a plain call over the same tokens
		lo, hi := queryStartLoc[b], queryStartLoc[b+1]
		dims := kernels.Dims{Heads: heads, KVHeads: kvHeads, SeqQ: hi - lo, SeqK: n, Dim: dim}
		plain, err := dev.AttentionFloat32(ctx, dims, kernels.BSHD, queries[lo*heads*dim:hi*heads*dim], tokens[b][0], tokens[b][1], kernels.Options{Causal: true, Align: kernels.LowerRight})
		check(err)
		fmt.Printf("request %d: %d rows, %d keys, the bits of a plain call: %t\n", b, hi-lo, n, slices.Equal(plain, all[lo*heads*dim:hi*heads*dim]))
	}
	// Output:
	// request 0: 1 rows, 21 keys, the bits of a plain call: true
	// request 1: 18 rows, 34 keys, the bits of a plain call: true
}
