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

// Two layers of Qwen3-Next, a linear one and a full one, compute a prompt of four tokens and three tokens of a draft. The model
// accepts the first of these. Rewind removes the others from the states and from the cache.
func ExampleLinearAttention() {
	ctx := context.Background()
	check := func(err error) {
		if err != nil {
			log.Fatal(err)
		}
	}
	config, err := os.ReadFile("testdata/families/qwen3_next.json")
	check(err)
	model, err := nn.ParseConfig(config)
	check(err)
	content, err := os.ReadFile("testdata/families/qwen3_next.safetensors")
	check(err)
	file, size := bytes.NewReader(content), int64(len(content))
	dev, err := kernels.Open("cpu")
	check(err)
	defer dev.Close()
	c, full := *model.Layers[0].Linear, model.Layers[1]
	linearWeights, err := c.LoadSafetensors(file, size, model.Layers[0].Prefix)
	check(err)
	linear, err := nn.NewLinearAttention(ctx, dev, c, linearWeights)
	check(err)
	defer linear.Release()
	weights, err := full.MultiHead.LoadSafetensors(file, size, full.Prefix)
	check(err)
	attention, err := nn.NewMultiHeadAttention(ctx, dev, full.MultiHead, weights)
	check(err)
	defer attention.Release()
	shape := linear.StateConfig()
	shape.Window = 3 // tokens that Rewind can remove
	states, err := kvcache.NewStates(ctx, dev, shape)
	check(err)
	defer states.Release()
	cache, err := kvcache.New(ctx, dev, kvcache.Config{KVHeads: full.MultiHead.KVHeads, Dim: full.MultiHead.HeadDim, Capacity: 4096})
	check(err)
	defer cache.Release()
	apply := func(rows []float32, first nn.LinearOptions, second nn.MultiHeadOptions) []float32 {
		x, err := dev.FromFloat32(ctx, kernels.F32, rows, kernels.Shape{1, 1, len(rows) / c.Model, c.Model})
		check(err)
		defer x.Release()
		y, err := linear.Apply(ctx, x, first)
		check(err)
		defer y.Release()
		z, err := attention.Apply(ctx, y, second) // a model has norms and a feed-forward layer between the two
		check(err)
		defer z.Release()
		numbers, err := dev.ToFloat32(ctx, z.O)
		check(err)
		return numbers
	}

	x := slices.Repeat([]float32{0.5, -0.25, 0.75, 0, -0.5, 1, 0.25}, c.Model) // seven tokens
	whole := apply(x, nn.LinearOptions{}, nn.MultiHeadOptions{Options: full.Options})
	first, second := nn.LinearOptions{States: states}, nn.MultiHeadOptions{Options: full.Options, Cache: cache}
	apply(x[:4*c.Model], first, second)
	apply(slices.Concat(x[4*c.Model:5*c.Model], x[:2*c.Model]), first, second) // the draft: token 4, and two wrong ones
	fmt.Println("tokens with the draft:", states.Lens()[0], cache.Lens()[0])
	check(states.Rewind(0, 5))
	check(cache.Rewind(0, 5))
	fmt.Println("tokens after Rewind:", states.Lens()[0], cache.Lens()[0])
	y := apply(x[5*c.Model:], first, second)
	fmt.Println("equal:", slices.EqualFunc(y, whole[5*c.Model:], func(a, b float32) bool { return math.Abs(float64(a-b)) < 1e-4 }))
	// Output:
	// tokens with the draft: 7 7
	// tokens after Rewind: 5 5
	// equal: true
}
