package kernels_test

import (
	"context"
	"fmt"
	"log"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/seed90331342/attn/kernels"
)

// check stops an example at an error.
func check[T any](x T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return x
}

// Two tokens with two heads of size 1. By BSHD the heads of a token are adjacent, as a linear
// layer writes them: head 0 has the values 1 and 3, head 1 has 2 and 4.
func ExampleDevice_AttentionFloat32() {
	dev := check(kernels.Open("cpu"))
	defer dev.Close()
	q, k, v := make([]float32, 4), make([]float32, 4), []float32{1, 2, 3, 4}
	dims := kernels.Dims{Heads: 2, SeqQ: 2, Dim: 1}
	o := check(dev.AttentionFloat32(context.Background(), dims, kernels.BSHD, q, k, v, kernels.Options{Causal: true}))
	fmt.Println(o[:2], o[2:])
	// Output: [1 2] [2 3]
}

// A call that runs many times is validated and planned once. With preallocated outputs its runs do not allocate.
func ExampleDevice_Prepare() {
	ctx, dev := context.Background(), check(kernels.Open("cpu"))
	defer dev.Close()
	x := check(dev.FromFloat32(ctx, kernels.F32, []float32{1, 0, 0, 1, 1, 1}, kernels.Shape{1, 1, 3, 2}))
	defer x.Release()
	call := check(dev.Prepare(x, x, x, kernels.Options{Causal: true, LSE: true}))
	plan := check(call.Plan(ctx))
	fmt.Println(plan.Pairs, "pairs of a row and a key,", plan.FLOPs, "operations")
	out := check(call.Alloc(ctx))
	defer out.Release()
	for range 3 {
		if err := call.RunInto(ctx, out); err != nil {
			log.Fatal(err)
		}
	}
	fmt.Printf("%.2f\n", check(dev.ToFloat32(ctx, out.LSE)))
	report := check(call.Check(ctx, out, kernels.CheckOptions{}))
	fmt.Println(report.Rows, "rows are within the bound:", report.OK())
	// Output:
	// 6 pairs of a row and a key, 48 operations
	// [0.71 1.11 2.10]
	// 3 rows are within the bound: true
}

// Tensors are views of memory: data that lies as [B, S, H, D] becomes [B, H, S, D] without a copy,
// and so does a head or the first tokens.
func ExampleTensor() {
	ctx, dev := context.Background(), check(kernels.Open("cpu"))
	defer dev.Close()
	data := []float32{10, 20, 11, 21, 12, 22} // three tokens of two heads
	lies := check(dev.FromFloat32(ctx, kernels.F32, data, kernels.Shape{1, 3, 2, 1}))
	defer lies.Release()
	x := check(lies.Swap(kernels.Heads, kernels.Seq))
	fmt.Println(x.Shape(), check(dev.ToFloat32(ctx, x)))
	second := check(x.Slice(kernels.Heads, 1, 2))
	fmt.Println(second.Shape(), check(dev.ToFloat32(ctx, check(second.Slice(kernels.Seq, 0, 2)))))
	// Output:
	// [1 2 3 1] [10 11 12 20 21 22]
	// [1 1 3 1] [20 21]
}

// A mask, a window and slopes hide or weaken keys. The weights show it, in O(S²) memory.
func ExampleOptions() {
	ctx, dev := context.Background(), check(kernels.Open("cpu"))
	defer dev.Close()
	x := check(dev.FromFloat32(ctx, kernels.F32, make([]float32, 4), kernels.Shape{1, 1, 4, 1}))
	defer x.Release()
	mask := check(dev.Upload(ctx, check(kernels.HostBool([]bool{true, false, true, true}, kernels.Shape{1, 1, 1, 4}))))
	defer mask.Release()
	for _, opt := range []kernels.Options{
		{Mask: mask},
		{Causal: true, Window: &kernels.Window{Left: 1}},
		{Causal: true, ALiBi: []float32{1}},
	} {
		opt.Weights = true
		r := check(dev.Attention(ctx, x, x, x, opt))
		w := check(dev.ToFloat32(ctx, r.Weights))
		r.Release()
		fmt.Printf("row 1 %.2f, row 3 %.2f\n", w[4:8], w[12:])
	}
	// Output:
	// row 1 [0.33 0.00 0.33 0.33], row 3 [0.33 0.00 0.33 0.33]
	// row 1 [0.50 0.50 0.00 0.00], row 3 [0.00 0.00 0.50 0.50]
	// row 1 [0.27 0.73 0.00 0.00], row 3 [0.03 0.09 0.24 0.64]
}

// Three sequences of 2, 1 and 3 tokens are packed one after the other without padding, with one
// head of size 2. Each attends only to its own tokens.
func ExampleOptions_packed() {
	ctx, dev := context.Background(), check(kernels.Open("cpu"))
	defer dev.Close()
	x := check(dev.FromFloat32(ctx, kernels.F32, []float32{
		1, 0, 0, 1, // the first
		7, 8, // the second
		1, 1, 0, 2, 2, 0, // the third
	}, kernels.Shape{1, 6, 1, 2})) // [1, total, H, D]
	defer x.Release()
	packed := check(x.Swap(kernels.Heads, kernels.Seq)) // [1, H, total, D]
	r := check(dev.Attention(ctx, packed, packed, packed, kernels.Options{Causal: true, CuQ: []int{0, 2, 3, 6}}))
	defer r.Release()
	o := check(dev.ToFloat32(ctx, r.O))
	for i := range 6 {
		fmt.Printf("%.2f\n", o[2*i:2*i+2])
	}
	// Output:
	// [1.00 0.00]
	// [0.33 0.67]
	// [7.00 8.00]
	// [1.00 1.00]
	// [0.20 1.80]
	// [1.72 0.28]
}

// The gradients of the sum of all outputs with respect to v are the sums of the weights of each key.
func ExampleCall_Backward() {
	ctx, dev := context.Background(), check(kernels.Open("cpu"))
	defer dev.Close()
	shape := kernels.Shape{1, 1, 3, 1}
	x := check(dev.FromFloat32(ctx, kernels.F32, make([]float32, 3), shape))
	defer x.Release()
	call := check(dev.Prepare(x, x, x, kernels.Options{Causal: true, LSE: true})) // gradients need the LSE
	out := check(call.Run(ctx))
	defer out.Release()
	grads := check(call.AllocGradients(ctx, call.Gradients())) // or .Operands()
	defer grads.Release()
	ones := check(dev.FromFloat32(ctx, kernels.F32, []float32{1, 1, 1}, shape))
	defer ones.Release()
	if err := call.Backward(ctx, grads, kernels.Result{O: ones}, out); err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%.3f\n", check(dev.ToFloat32(ctx, grads.V)))
	// Output: [1.833 0.833 0.333]
}

// The three stages of attention, each with its result in memory. Device.Attention fuses them.
func ExampleDevice_Softmax() {
	ctx, dev := context.Background(), check(kernels.Open("cpu"))
	defer dev.Close()
	x := check(dev.FromFloat32(ctx, kernels.F32, []float32{1, 0, 0, 1}, kernels.Shape{1, 1, 2, 2}))
	defer x.Release()
	s := check(dev.QK(ctx, x, x))
	defer s.Release()
	fmt.Println("scores ", check(dev.ToFloat32(ctx, s)))
	if err := dev.Softmax(ctx, s, kernels.Tensor{}, kernels.Options{Scale: new(1.0)}); err != nil {
		log.Fatal(err)
	}
	fmt.Printf("weights %.2f\n", check(dev.ToFloat32(ctx, s)))
	o := check(dev.PV(ctx, s, x))
	defer o.Release()
	fmt.Printf("output  %.2f\n", check(dev.ToFloat32(ctx, o)))
	// Output:
	// scores  [1 0 0 1]
	// weights [0.73 0.27 0.27 0.73]
	// output  [0.73 0.27 0.27 0.73]
}

// Keys that do not fit together are attended to in parts. Merging the results gives that of all keys.
func ExampleDevice_Merge() {
	ctx, dev := context.Background(), check(kernels.Open("cpu"))
	defer dev.Close()
	x := check(dev.FromFloat32(ctx, kernels.F32, []float32{0, 1, 2, 3}, kernels.Shape{1, 1, 4, 1}))
	defer x.Release()
	part := func(lo, hi int) kernels.Result {
		keys := check(x.Slice(kernels.Seq, lo, hi))
		return check(dev.Attention(ctx, x, keys, keys, kernels.Options{LSE: true}))
	}
	first, second := part(0, 2), part(2, 4)
	defer first.Release()
	defer second.Release()
	if err := dev.Merge(ctx, first, second); err != nil {
		log.Fatal(err)
	}
	whole := check(dev.Attention(ctx, x, x, x, kernels.Options{}))
	defer whole.Release()
	fmt.Printf("merged %.3f\n", check(dev.ToFloat32(ctx, first.O)))
	fmt.Printf("whole  %.3f\n", check(dev.ToFloat32(ctx, whole.O)))
	// Output:
	// merged [1.500 2.493 2.845 2.948]
	// whole  [1.500 2.493 2.845 2.948]
}

// The two keys that each row attends to most, for sequences that are too long to keep all weights.
func ExampleDevice_TopWeights() {
	ctx, dev := context.Background(), check(kernels.Open("cpu"))
	defer dev.Close()
	x := check(dev.FromFloat32(ctx, kernels.F32, []float32{0, 1, 2, 3}, kernels.Shape{1, 1, 4, 1}))
	defer x.Release()
	top := check(dev.TopWeights(ctx, x, x, 2, kernels.Options{Causal: true}))
	for i := range 4 {
		fmt.Printf("row %d: keys %d, weights %.2f\n", i, top.Keys[2*i:2*i+2], top.Weights[2*i:2*i+2])
	}
	// Output:
	// row 0: keys [0 -1], weights [1.00 0.00]
	// row 1: keys [1 0], weights [0.73 0.27]
	// row 2: keys [2 1], weights [0.87 0.12]
	// row 3: keys [3 2], weights [0.95 0.05]
}

// Several goroutines share a device, which is safe for concurrent use. A Call is not: each goroutine prepares its own.
func ExampleDevice() {
	dev := check(kernels.Open("cpu"))
	defer dev.Close()
	results := make(chan float32)
	for i := range 3 {
		go func() {
			x := []float32{float32(i), float32(i)}
			dims := kernels.Dims{SeqQ: 2, Dim: 1}
			o := check(dev.AttentionFloat32(context.Background(), dims, kernels.BHSD, x, x, x, kernels.Options{}))
			results <- o[0] + o[1]
		}()
	}
	fmt.Println(<-results + <-results + <-results)
	// Output: 6
}

// Three of the gallery of PyTorch's FlexAttention (docs/score-mods.md): all keys have the same
// product with the query of the last row, so that the weights show what each function does.
func ExampleScoreMod() {
	inf := float32(math.Inf(1))
	alibi := func(scores []float32, at kernels.Position) {
		slope := at.Values[at.Head]
		for n := range scores {
			scores[n] += slope * float32(at.Key+n-at.Row)
		}
	}
	softcap := func(scores []float32, _ kernels.Position) {
		for n, s := range scores {
			scores[n] = 30 * float32(math.Tanh(float64(s)/30))
		}
	}
	documents := func(scores []float32, at kernels.Position) {
		own, keys := at.Values[at.Row], at.Values[at.Key:]
		for n := range scores {
			if keys[n] != own {
				scores[n] = -inf
			}
		}
	}
	ctx, dev := context.Background(), check(kernels.Open("cpu"))
	defer dev.Close()
	x := check(dev.FromFloat32(ctx, kernels.F32, []float32{1, 1, 1, 1}, kernels.Shape{1, 1, 4, 1}))
	defer x.Release()
	for _, mod := range []kernels.ScoreMod{{Go: alibi, Values: []float32{0.5}}, {Go: softcap}, {Go: documents, Values: []float32{7, 7, 9, 9}}} {
		call := check(dev.Prepare(x, x, x, kernels.Options{Causal: true, ScoreMod: &mod, Weights: true}))
		out := check(call.Run(ctx))
		weights := check(dev.ToFloat32(ctx, out.Weights))
		fmt.Printf("%.2f, right: %t\n", weights[12:], check(call.Check(ctx, out, kernels.CheckOptions{})).OK())
		out.Release()
	}
	// Output:
	// [0.10 0.17 0.28 0.46], right: true
	// [0.25 0.25 0.25 0.25], right: true
	// [0.00 0.00 0.50 0.50], right: true
}

// Sparse attention in two steps. An indexer, here the products of half of the columns, selects 256 of 4,096 keys for each
// of two heads. Attention then reads these alone. Recall counts the keys among them that have the 256 largest weights; how
// much of the weight the selected keys have follows from the log-sum-exp of both calls.
func ExampleKeyIndices() {
	const heads, keys, size, topK = 2, 4096, 64, 256
	ctx, dev := context.Background(), check(kernels.Open("cpu"))
	defer dev.Close()
	rng := rand.New(rand.NewPCG(1, 2))
	drawn := func(n int, scale float64) kernels.Tensor {
		data := make([]float32, heads*n*size)
		for i := range data {
			data[i] = float32(rng.NormFloat64() * scale)
		}
		return check(dev.FromFloat32(ctx, kernels.F32, data, kernels.Shape{1, heads, n, size}))
	}
	q, k, v := drawn(1, 3), drawn(keys, 1), drawn(keys, 1)
	half := func(t kernels.Tensor) kernels.Tensor { return check(t.Slice(kernels.Dim, 0, size/2)) }
	top := check(dev.TopWeights(ctx, half(q), half(k), topK, kernels.Options{}))
	best := check(dev.TopWeights(ctx, q, k, topK, kernels.Options{}))
	lse := func(lists *kernels.KeyIndices) []float32 {
		out := check(dev.Attention(ctx, q, k, v, kernels.Options{LSE: true, KeyIndices: lists}))
		defer out.Release()
		return check(dev.ToFloat32(ctx, out.LSE))
	}
	selected, all := lse(&kernels.KeyIndices{Indices: top.Keys, TopK: topK}), lse(nil)
	for h := range heads {
		found := 0
		for _, key := range top.Keys[h*topK:][:topK] {
			if slices.Contains(best.Keys[h*topK:][:topK], key) {
				found++
			}
		}
		fmt.Printf("head %d: recall %d of %d, %.0f%% of the weight\n", h, found, topK, 100*math.Exp(float64(selected[h]-all[h])))
	}
	// Output:
	// head 0: recall 133 of 256, 69% of the weight
	// head 1: recall 102 of 256, 66% of the weight
}

// Sparse attention with the lightning indexer of DeepSeek V3.2: each of 6 tokens attends to the 2 keys with the largest
// index scores up to its own. An indexer has few and small heads, here one of size 1, and projects their weights from the tokens.
func ExampleDevice_Index() {
	ctx, dev := context.Background(), check(kernels.Open("cpu"))
	defer dev.Close()
	column := func(dim int, x ...float32) kernels.Tensor {
		return check(dev.FromFloat32(ctx, kernels.F32, x, kernels.Shape{1, 1, 6, dim}))
	}
	q, k, w := column(1, 1, 1, 1, -1, -1, -1), column(1, 3, 1, -2, 5, 4, -6), column(1, 1, 1, 1, 1, 1, -1)
	causal := kernels.Options{Causal: true, Align: kernels.LowerRight}
	lists := check(dev.Index(ctx, q, k, w, 2, causal))
	defer lists.Tensor.Release()
	for list := range slices.Chunk(check(dev.ToInt32(ctx, lists.Tensor)), lists.TopK) {
		fmt.Print(list, " ")
	}
	values := column(2, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6, 0)
	causal.KeyIndices = lists
	out := check(dev.Attention(ctx, column(2, make([]float32, 12)...), column(2, make([]float32, 12)...), values, causal))
	fmt.Println(check(dev.ToFloat32(ctx, check(out.O.Slice(kernels.Dim, 0, 1)))))
	// Output: [0 -1] [0 1] [0 1] [0 2] [0 2] [0 1] [1 1.5 1.5 2 2 1.5]
}

// The rows of a span see all its keys, as the tokens of one image do inside a causal mask. Tokens 1 to 3 are the image. Keys are
// equal, so that a row has the same weight for each key that it sees.
func ExampleOptions_spans() {
	ctx, dev := context.Background(), check(kernels.Open("cpu"))
	defer dev.Close()
	x := check(dev.FromFloat32(ctx, kernels.F32, make([]float32, 5), kernels.Shape{1, 1, 5, 1}))
	defer x.Release()
	r := check(dev.Attention(ctx, x, x, x, kernels.Options{Causal: true, Spans: [][][2]int{{{1, 4}}}, Weights: true}))
	defer r.Release()
	for row := range slices.Chunk(check(dev.ToFloat32(ctx, r.Weights)), 5) {
		fmt.Printf("%.2f\n", row)
	}
	// Output:
	// [1.00 0.00 0.00 0.00 0.00]
	// [0.25 0.25 0.25 0.25 0.00]
	// [0.25 0.25 0.25 0.25 0.00]
	// [0.25 0.25 0.25 0.25 0.00]
	// [0.20 0.20 0.20 0.20 0.20]
}
