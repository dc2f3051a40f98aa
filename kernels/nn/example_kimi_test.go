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

// Two layers of Kimi Linear compute a prompt of five tokens, then two more tokens. The first is linear, with a state of fixed
// size and a decay for each channel. The second has latent attention without RoPE.
func ExampleLinearAttention_kimiLinear() {
	ctx := context.Background()
	check := func(err error) {
		if err != nil {
			log.Fatal(err)
		}
	}
	config, err := os.ReadFile("testdata/families/kimi_linear.json")
	check(err)
	model, err := nn.ParseConfig(config)
	check(err)
	content, err := os.ReadFile("testdata/families/kimi_linear.safetensors")
	check(err)
	file, size := bytes.NewReader(content), int64(len(content))
	dev, err := kernels.Open("cpu")
	check(err)
	defer dev.Close()
	c, d := *model.Layers[0].Linear, *model.Layers[1].Latent
	linearWeights, err := c.LoadSafetensors(file, size, model.Layers[0].Prefix)
	check(err)
	linear, err := nn.NewLinearAttention(ctx, dev, c, linearWeights)
	check(err)
	defer linear.Release()
	weights, err := d.LoadSafetensors(file, size, model.Layers[1].Prefix)
	check(err)
	latent, err := nn.NewLatentAttention(ctx, dev, d, weights)
	check(err)
	defer latent.Release()
	states, err := kvcache.NewStates(ctx, dev, linear.StateConfig())
	check(err)
	defer states.Release()
	cache, err := kvcache.New(ctx, dev, kvcache.Config{Dim: d.Rank + d.RopeDim, Latent: d.Rank, Capacity: 4096})
	check(err)
	defer cache.Release()
	apply := func(rows []float32, first nn.LinearOptions, second nn.MultiHeadOptions) []float32 {
		x, err := dev.FromFloat32(ctx, kernels.F32, rows, kernels.Shape{1, 1, len(rows) / c.Model, c.Model})
		check(err)
		defer x.Release()
		y, err := linear.Apply(ctx, x, first)
		check(err)
		defer y.Release()
		z, err := latent.Apply(ctx, y, second) // a model has norms and a feed-forward layer between the two
		check(err)
		defer z.Release()
		numbers, err := dev.ToFloat32(ctx, z)
		check(err)
		return numbers
	}

	x := slices.Repeat([]float32{0.5, -0.25, 0.75, 0, -0.5, 1, 0.25}, c.Model) // seven tokens
	opt := nn.MultiHeadOptions{Options: model.Layers[1].Options}
	whole := apply(x, nn.LinearOptions{}, opt)
	opt.Cache = cache
	y := append(apply(x[:5*c.Model], nn.LinearOptions{States: states}, opt), apply(x[5*c.Model:], nn.LinearOptions{States: states}, opt)...)
	fmt.Println("tokens in the states:", states.Lens()[0], "tokens in the cache:", cache.Lens()[0])
	fmt.Println("equal:", slices.EqualFunc(y, whole, func(a, b float32) bool { return math.Abs(float64(a-b)) < 1e-4 }))
	// Output:
	// tokens in the states: 7 tokens in the cache: 7
	// equal: true
}
