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

// A layer of gpt-oss has a sink for each head, which takes a part of the weights of each row. This one has a window too.
func ExampleMultiHeadAttention_gptOSS() {
	ctx := context.Background()
	check := func(err error) {
		if err != nil {
			log.Fatal(err)
		}
	}
	config, err := os.ReadFile("testdata/families/gpt_oss.json")
	check(err)
	model, err := nn.ParseConfig(config)
	check(err)
	layer := model.Layers[0]
	content, err := os.ReadFile("testdata/families/gpt_oss.safetensors")
	check(err)
	weights, err := layer.MultiHead.LoadSafetensors(bytes.NewReader(content), int64(len(content)), layer.Prefix)
	check(err)
	dev, err := kernels.Open("cpu")
	check(err)
	defer dev.Close()
	attention, err := nn.NewMultiHeadAttention(ctx, dev, layer.MultiHead, weights)
	check(err)
	defer attention.Release()
	x := slices.Repeat([]float32{0.5, -0.25, 0.75, 0, -0.5, 1, 0.25}, 40) // seven tokens
	opt := nn.MultiHeadOptions{Options: layer.Options}
	opt.Weights = true
	whole, seen, err := attention.ApplyFloat32(ctx, x, 1, opt)
	check(err)
	sum := float32(0)
	for _, w := range seen[6*7 : 7*7] { // of the last token in the first head
		sum += w
	}
	cache, err := kvcache.New(ctx, dev, kvcache.Config{KVHeads: layer.MultiHead.KVHeads, Dim: layer.MultiHead.HeadDim, Window: opt.Window.Left + 1, Capacity: 64})
	check(err)
	defer cache.Release()
	opt.Weights, opt.Window, opt.Cache = false, nil, cache // which has the window
	prompt, _, err := attention.ApplyFloat32(ctx, x[:6*40], 1, opt)
	check(err)
	token, _, err := attention.ApplyFloat32(ctx, x[6*40:], 1, opt)
	check(err)
	fmt.Println("the sink has a weight:", sum < 0.999, "window:", cache.Config().Window)
	fmt.Println("equal:", slices.EqualFunc(append(prompt, token...), whole, func(a, b float32) bool { return math.Abs(float64(a-b)) < 1e-4 }))
	// Output:
	// the sink has a weight: true window: 5
	// equal: true
}
