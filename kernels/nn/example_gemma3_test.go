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

// Gemma 3 has layers with a window and layers without one. The tokens 1 to 4 belong to an image and see each other.
func ExampleMultiHeadAttention_gemma3() {
	ctx := context.Background()
	check := func(err error) {
		if err != nil {
			log.Fatal(err)
		}
	}
	config, err := os.ReadFile("testdata/families/gemma3.json")
	check(err)
	model, err := nn.ParseConfig(config)
	check(err)
	content, err := os.ReadFile("testdata/families/gemma3.safetensors")
	check(err)
	dev, err := kernels.Open("cpu")
	check(err)
	defer dev.Close()
	x := slices.Repeat([]float32{0.5, -0.25, 0.75, 0, -0.5, 1, 0.25}, 36) // seven tokens
	for _, layer := range model.Layers {
		weights, err := layer.MultiHead.LoadSafetensors(bytes.NewReader(content), int64(len(content)), layer.Prefix)
		check(err)
		attention, err := nn.NewMultiHeadAttention(ctx, dev, layer.MultiHead, weights)
		check(err)
		opt := nn.MultiHeadOptions{Options: layer.Options}
		opt.Spans, opt.Weights = [][][2]int{{{1, 5}}}, true
		whole, seen, err := attention.ApplyFloat32(ctx, x, 1, opt)
		check(err)
		shape := kvcache.Config{KVHeads: layer.MultiHead.KVHeads, Dim: layer.MultiHead.HeadDim, Capacity: 64}
		if opt.Window != nil {
			shape.Window = opt.Window.Left + 1
		}
		cache, err := kvcache.New(ctx, dev, shape)
		check(err)
		opt.Weights, opt.Window, opt.Cache = false, nil, cache          // which has the window
		prompt, _, err := attention.ApplyFloat32(ctx, x[:6*36], 1, opt) // with all tokens of the image
		check(err)
		token, _, err := attention.ApplyFloat32(ctx, x[6*36:], 1, opt)
		check(err)
		fmt.Println("window:", shape.Window, "token 1 sees token 4:", seen[1*7+4] > 0, "token 6 sees token 0:", seen[6*7+0] > 0)
		fmt.Println("equal:", slices.EqualFunc(append(prompt, token...), whole, func(a, b float32) bool { return math.Abs(float64(a-b)) < 1e-4 }))
		cache.Release()
		attention.Release()
	}
	// Output:
	// window: 4 token 1 sees token 4: true token 6 sees token 0: false
	// equal: true
	// window: 0 token 1 sees token 4: true token 6 sees token 0: true
	// equal: true
}
