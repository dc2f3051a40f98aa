package nn_test

import (
	"bytes"
	"context"
	"fmt"
	"log"
	"math"
	"os"
	"slices"

	_ "github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kvcache"
	"github.com/seed90331342/attn/kernels/nn"
)

// A layer of Qwen 3 computes a prompt of five tokens, then two more tokens with its cache. The outputs are those of the
// seven tokens at once, up to 1e-4: TestFamilies allows 2^-16 of the largest output, which is 6 here.
func ExampleParseConfig() {
	ctx := context.Background()
	check := func(err error) {
		if err != nil {
			log.Fatal(err)
		}
	}
	config, err := os.ReadFile("testdata/families/qwen3.json")
	check(err)
	model, err := nn.ParseConfig(config)
	check(err)
	layer := model.Layers[0]
	content, err := os.ReadFile("testdata/families/qwen3.safetensors") // an os.File and its size serve too
	check(err)
	weights, err := layer.MultiHead.LoadSafetensors(bytes.NewReader(content), int64(len(content)), layer.Prefix)
	check(err)
	dev, err := kernels.Open("cpu")
	check(err)
	defer dev.Close()
	attention, err := nn.NewMultiHeadAttention(ctx, dev, layer.MultiHead, weights)
	check(err)
	defer attention.Release()
	cache, err := kvcache.New(ctx, dev, kvcache.Config{KVHeads: layer.MultiHead.KVHeads, Dim: layer.MultiHead.HeadDim, Capacity: 4096})
	check(err)
	defer cache.Release()

	m := layer.MultiHead.Model
	x := slices.Repeat([]float32{0.5, -0.25, 0.75, 0, -0.5, 1, 0.25}, m) // seven tokens
	whole, _, err := attention.ApplyFloat32(ctx, x, 1, nn.MultiHeadOptions{Options: layer.Options})
	check(err)
	var y []float32
	for from, to := 0, 5; from < 7; from, to = to, to+1 {
		next, _, err := attention.ApplyFloat32(ctx, x[from*m:to*m], 1, nn.MultiHeadOptions{Options: layer.Options, Cache: cache})
		check(err)
		y = append(y, next...)
		fmt.Println("tokens in the cache:", cache.Lens()[0])
	}
	fmt.Println("equal:", slices.EqualFunc(y, whole, func(a, b float32) bool { return math.Abs(float64(a-b)) < 1e-4 }))
	// Output:
	// tokens in the cache: 5
	// tokens in the cache: 6
	// tokens in the cache: 7
	// equal: true
}
