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

// A layer of DeepSeek V3 keeps one row of its cache for each token. It computes a prompt with the keys and values of each
// head, and later tokens with the rows of the cache.
func ExampleLatentAttention() {
	ctx := context.Background()
	check := func(err error) {
		if err != nil {
			log.Fatal(err)
		}
	}
	config, err := os.ReadFile("testdata/families/deepseek_v3.json")
	check(err)
	model, err := nn.ParseConfig(config)
	check(err)
	layer, c := model.Layers[0], *model.Layers[0].Latent
	content, err := os.ReadFile("testdata/families/deepseek_v3.safetensors")
	check(err)
	weights, err := c.LoadSafetensors(bytes.NewReader(content), int64(len(content)), layer.Prefix)
	check(err)
	dev, err := kernels.Open("cpu")
	check(err)
	defer dev.Close()
	attention, err := nn.NewLatentAttention(ctx, dev, c, weights)
	check(err)
	defer attention.Release()
	cache, err := kvcache.New(ctx, dev, kvcache.Config{Dim: c.Rank + c.RopeDim, Latent: c.Rank, Capacity: 4096})
	check(err)
	defer cache.Release()
	apply := func(rows []float32, opt nn.MultiHeadOptions) []float32 {
		x, err := dev.FromFloat32(ctx, kernels.F32, rows, kernels.Shape{1, 1, len(rows) / c.Model, c.Model})
		check(err)
		defer x.Release()
		y, err := attention.Apply(ctx, x, opt)
		check(err)
		defer y.Release()
		numbers, err := dev.ToFloat32(ctx, y)
		check(err)
		return numbers
	}
	x := slices.Repeat([]float32{0.5, -0.25, 0.75, 0, -0.5, 1, 0.25}, c.Model) // seven tokens
	whole := apply(x, nn.MultiHeadOptions{Options: layer.Options})
	cached := nn.MultiHeadOptions{Options: layer.Options, Cache: cache}
	fmt.Println("numbers a token:", c.Rank+c.RopeDim, "in place of", c.Heads*(c.NopeDim+c.RopeDim+c.ValueDim))
	fmt.Println("equal:", slices.EqualFunc(append(apply(x[:5*c.Model], cached), apply(x[5*c.Model:], cached)...), whole, func(a, b float32) bool { return math.Abs(float64(a-b)) < 1e-4 }))
	// Output:
	// numbers a token: 24 in place of 120
	// equal: true
}
