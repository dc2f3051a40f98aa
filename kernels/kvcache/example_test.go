package kvcache_test

import (
	"context"
	"fmt"
	"log"
	"slices"

	_ "github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kvcache"
	"github.com/seed90331342/attn/kernels/nn"
)

// Each step appends the keys and values of its new tokens, and attends from their queries to all tokens so far.
func Example() {
	ctx := context.Background()
	dev, err := kernels.Open("cpu")
	if err != nil {
		log.Fatal(err)
	}
	defer dev.Close()
	cache, err := kvcache.New(ctx, dev, kvcache.Config{Dim: 1, Capacity: 8})
	if err != nil {
		log.Fatal(err)
	}
	defer cache.Release()
	for _, tokens := range [][]float32{{1, 2}, {6}} { // a prompt of two tokens, and one more
		x, err := dev.FromFloat32(ctx, kernels.F32, tokens, kernels.Shape{1, 1, len(tokens), 1})
		if err != nil {
			log.Fatal(err)
		}
		if err := cache.Append(ctx, x, x, nil); err != nil {
			log.Fatal(err)
		}
		r, err := cache.Attention(ctx, x, kvcache.CallOptions{Options: kernels.Options{Scale: new(0.0)}}) // the mean
		if err != nil {
			log.Fatal(err)
		}
		o, err := dev.ToFloat32(ctx, r.O)
		if err != nil {
			log.Fatal(err)
		}
		r.Release()
		x.Release()
		fmt.Println(cache.Lens(), o)
	}
	// Output:
	// [2] [1 1.5]
	// [3] [3]
}

// Speculative decoding: a draft model proposes a tree of seven tokens. One call attends from all of them, each to the
// tokens before the tree, to its ancestors and to itself. Then the path that the model accepts stays.
func Example_speculation() {
	ctx := context.Background()
	dev, err := kernels.Open("cpu")
	if err != nil {
		log.Fatal(err)
	}
	defer dev.Close()
	cache, err := kvcache.New(ctx, dev, kvcache.Config{Dim: 2, Capacity: 64, RoPE: &nn.RoPE{}})
	if err != nil {
		log.Fatal(err)
	}
	defer cache.Release()
	rows := func(n int) kernels.Tensor { // a model would compute them
		x, err := dev.FromFloat32(ctx, kernels.F32, make([]float32, 2*n), kernels.Shape{1, 1, n, 2})
		if err != nil {
			log.Fatal(err)
		}
		return x
	}
	prompt := rows(30)
	if err := cache.Append(ctx, prompt, prompt, nil); err != nil {
		log.Fatal(err)
	}

	parents := []int{-1, 0, 0, 1, 1, 2, 2} // of each token, parents first
	n := cache.Lens()[0]
	positions, visible := make([]int, 7), make([]bool, 7*7)
	for i, parent := range parents {
		see := visible[7*i : 7*i+7]
		positions[i] = n // siblings share a position
		if parent >= 0 {
			positions[i] = positions[parent] + 1
			copy(see, visible[7*parent:7*parent+7])
		}
		see[i] = true
	}
	mask, err := kernels.HostBool(visible, kernels.Shape{1, 1, 7, 7})
	if err != nil {
		log.Fatal(err)
	}
	tree := rows(7)
	if err := cache.AppendAt(ctx, tree, tree, nil, [][]int{positions}); err != nil {
		log.Fatal(err)
	}
	r, err := cache.Attention(ctx, tree, kvcache.CallOptions{Options: kernels.Options{Mask: mask}, MaskLast: true, Positions: [][]int{positions}})
	if err != nil {
		log.Fatal(err)
	}
	defer r.Release()
	fmt.Println("positions", positions, "attention", r.O.Shape(), "tokens", cache.Lens()[0])

	// The model agrees with tokens 0, 2 and 5.
	if err := cache.Keep(ctx, 0, n, []int{0, 2, 5}); err != nil {
		log.Fatal(err)
	}
	fmt.Println("tokens after the accepted ones:", cache.Lens()[0])
	// Output:
	// positions [30 31 31 32 32 32 32] attention [1 1 7 2] tokens 37
	// tokens after the accepted ones: 33
}

// A generation loop: the layer takes the prompt, then one token at a time. Each token
// attends to all tokens before it, which are in the cache.
func ExampleCache() {
	ctx := context.Background()
	dev, err := kernels.Open("cpu")
	if err != nil {
		log.Fatal(err)
	}
	defer dev.Close()

	config := nn.MultiHeadConfig{Model: 8, Heads: 4, KVHeads: 2, RoPE: &nn.RoPE{}}
	weights, err := config.Initialise(nn.Initialiser{Seed: 1})
	if err != nil {
		log.Fatal(err)
	}
	layer, err := nn.NewMultiHeadAttention(ctx, dev, config, weights)
	if err != nil {
		log.Fatal(err)
	}
	defer layer.Release()
	cache, err := kvcache.New(ctx, dev, kvcache.Config{KVHeads: 2, Dim: 2, DType: kernels.F16, Capacity: 64})
	if err != nil {
		log.Fatal(err)
	}
	defer cache.Release()

	// step applies the layer to tokens and returns the output for the last one.
	step := func(tokens []float32) []float32 {
		x, err := dev.FromFloat32(ctx, kernels.F32, tokens, kernels.Shape{1, 1, len(tokens) / 8, 8})
		if err != nil {
			log.Fatal(err)
		}
		defer x.Release()
		y, err := layer.Apply(ctx, x, nn.MultiHeadOptions{Cache: cache})
		if err != nil {
			log.Fatal(err)
		}
		defer y.Release()
		all, err := dev.ToFloat32(ctx, y.O)
		if err != nil {
			log.Fatal(err)
		}
		return all[len(all)-8:]
	}
	prompt := make([]float32, 5*8)
	for i := range prompt {
		prompt[i] = float32(i%7) - 3
	}
	token := step(prompt)
	for range 3 {
		fmt.Printf("%d tokens: %.2f\n", cache.Lens()[0], token[:3])
		token = step(token) // a model would choose its next token here
	}
	// Output:
	// 5 tokens: [2.25 -0.32 1.08]
	// 6 tokens: [1.42 -0.59 -0.18]
	// 7 tokens: [0.29 -1.22 -0.54]
}

// A prompt is stored once for all the answers that fork from it. Their own tokens go to pages of their own.
func ExamplePaged() {
	ctx := context.Background()
	dev, err := kernels.Open("cpu")
	if err != nil {
		log.Fatal(err)
	}
	defer dev.Close()
	cache, err := kvcache.NewPaged(ctx, dev, kvcache.PagedConfig{KVHeads: 1, Dim: 4, PageSize: 16, Pages: 12})
	if err != nil {
		log.Fatal(err)
	}
	defer cache.Release()

	// rows returns n tokens for each of some sequences.
	rows := func(sequences, heads, n int) kernels.Tensor {
		data := make([]float32, sequences*heads*n*4)
		for i := range data {
			data[i] = float32(i*i%11) / 4
		}
		t, err := dev.FromFloat32(ctx, kernels.F32, data, kernels.Shape{sequences, heads, n, 4})
		if err != nil {
			log.Fatal(err)
		}
		return t
	}
	prompt, err := cache.NewSequence()
	if err != nil {
		log.Fatal(err)
	}
	if err := cache.Batch(prompt).Append(ctx, rows(1, 1, 70), rows(1, 1, 70), nil); err != nil {
		log.Fatal(err)
	}
	fmt.Println("pages free after the prompt:", cache.FreePages())

	answers := []*kvcache.Sequence{prompt}
	for range 3 {
		s, err := prompt.Fork()
		if err != nil {
			log.Fatal(err)
		}
		answers = append(answers, s)
	}
	batch := cache.Batch(answers...)
	if err := batch.Append(ctx, rows(4, 1, 1), rows(4, 1, 1), nil); err != nil {
		log.Fatal(err)
	}
	fmt.Println("after a token of each of 4 answers:", cache.FreePages())

	// SharePrefix reads the prompt's whole pages once for all four.
	r, err := batch.Attention(ctx, rows(4, 2, 1), kvcache.CallOptions{SharePrefix: true})
	if err != nil {
		log.Fatal(err)
	}
	defer r.Release()
	fmt.Println("attention:", r.O.Shape())
	for _, s := range answers {
		s.Free()
	}
	fmt.Println("when all are freed:", cache.FreePages())
	// Output:
	// pages free after the prompt: 7
	// after a token of each of 4 answers: 4
	// attention: [4 2 1 4]
	// when all are freed: 12
}

// A draft model proposes four tokens. One call computes them, and the last two are rejected.
func ExampleStates() {
	ctx := context.Background()
	dev, err := kernels.Open("cpu")
	if err != nil {
		log.Fatal(err)
	}
	defer dev.Close()
	states, err := kvcache.NewStates(ctx, dev, kvcache.StateConfig{Dim: 1, Window: 4})
	if err != nil {
		log.Fatal(err)
	}
	defer states.Release()
	for _, tokens := range [][]float32{{1, 2, 3, 4, 5, 6}, {7, 8, 9, 9}, {9}} { // a prompt of six tokens, a draft, and one more
		shape := kernels.Shape{1, 1, len(tokens), 1}
		v, err := dev.FromFloat32(ctx, kernels.F32, tokens, shape)
		if err != nil {
			log.Fatal(err)
		}
		ones, err := dev.FromFloat32(ctx, kernels.F32, slices.Repeat([]float32{1}, len(tokens)), shape)
		if err != nil {
			log.Fatal(err)
		}
		o, err := dev.Alloc(ctx, kernels.F32, shape)
		if err != nil {
			log.Fatal(err)
		}
		if err := states.LinearAttention(ctx, kernels.LinearAttention{O: o, Q: ones, K: ones, V: v}); err != nil { // sums of v
			log.Fatal(err)
		}
		sums, err := dev.ToFloat32(ctx, o)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(states.Lens()[0], sums)
		if len(tokens) == 4 {
			if err := states.Rewind(0, states.Lens()[0]-2); err != nil {
				log.Fatal(err)
			}
		}
		o.Release()
		ones.Release()
		v.Release()
	}
	// Output:
	// 6 [1 3 6 10 15 21]
	// 10 [28 36 45 54]
	// 9 [45]
}

// Multi-head latent attention: a token takes one row of 6 elements. Its first 4 are the values too, and appends have no v. All
// 3 heads read the row. Queries are 0 here, so that outputs are means of the values.
func ExampleConfig_latent() {
	ctx, dev := context.Background(), check(kernels.Open("cpu"))
	defer dev.Close()
	cache := check(kvcache.New(ctx, dev, kvcache.Config{Dim: 6, Latent: 4, Capacity: 16}))
	defer cache.Release()
	rows := check(dev.FromFloat32(ctx, kernels.F32, []float32{
		1, 2, 3, 4, 0.5, 0.5, // 4 of the latent, 2 with a rotary embedding
		3, 4, 5, 6, 0.5, 0.5,
	}, kernels.Shape{1, 1, 2, 6}))
	defer rows.Release()
	if err := cache.Append(ctx, rows, kernels.Tensor{}, nil); err != nil {
		log.Fatal(err)
	}
	q := check(dev.FromFloat32(ctx, kernels.F32, make([]float32, 3*6), kernels.Shape{1, 3, 1, 6}))
	defer q.Release()
	r := check(cache.Attention(ctx, q, kvcache.CallOptions{}))
	defer r.Release()
	fmt.Println(r.O.Shape(), check(dev.ToFloat32(ctx, r.O)))
	// Output: [1 3 1 4] [2 3 4 5 2 3 4 5 2 3 4 5]
}

// Values in fp8 saturate at 448. A cache divides them by VScale before it stores them, and multiplies outputs by it; KScale does
// the same for keys. One token has the weight 1, so that the output is its value, as the cache stores it.
func ExampleConfig_factors() {
	ctx, dev := context.Background(), check(kernels.Open("cpu"))
	defer dev.Close()
	k := check(dev.FromFloat32(ctx, kernels.F32, []float32{1, 1, 1, 1}, kernels.Shape{1, 1, 1, 4}))
	defer k.Release()
	v := check(dev.FromFloat32(ctx, kernels.F32, []float32{1792, -832, 96, 3}, kernels.Shape{1, 1, 1, 4}))
	defer v.Release()
	factors := kvcache.Config{
		KScale: check(kernels.HostF32([]float32{0.5}, kernels.Shape{1, 1, 1, 1})),
		VScale: check(kernels.HostF32([]float32{4}, kernels.Shape{1, 1, 1, 1})),
	}
	for _, config := range []kvcache.Config{{}, factors} {
		config.Dim, config.DType, config.Capacity = 4, kernels.F8, 16
		cache := check(kvcache.New(ctx, dev, config))
		defer cache.Release()
		if err := cache.Append(ctx, k, v, nil); err != nil {
			log.Fatal(err)
		}
		r := check(cache.Attention(ctx, k, kvcache.CallOptions{}))
		defer r.Release()
		fmt.Println(check(dev.ToFloat32(ctx, r.O)))
	}
	// Output:
	// [448 -448 96 3]
	// [1792 -832 96 3]
}
