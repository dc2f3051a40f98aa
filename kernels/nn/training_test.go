package nn_test

import (
	"context"
	"fmt"
	"log"

	_ "github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/nn"
)

// lossOf returns the loss Σ (y - target)²/2 of a layer with these weights, and its gradients.
func lossOf(ctx context.Context, dev *kernels.Device, config nn.MultiHeadConfig, weights nn.MultiHeadWeights, x kernels.Tensor, target []float32) (loss float32, grads nn.LayerGradients, err error) {
	layer, err := nn.NewMultiHeadAttention(ctx, dev, config, weights)
	if err != nil {
		return 0, grads, err
	}
	defer layer.Release()
	pass, err := layer.Forward(ctx, x, nn.MultiHeadOptions{})
	if err != nil {
		return 0, grads, err
	}
	defer pass.Release()
	dy, err := dev.ToFloat32(ctx, pass.O)
	if err != nil {
		return 0, grads, err
	}
	for i := range dy {
		dy[i] -= target[i] // the gradient of the loss with respect to y
		loss += dy[i] * dy[i] / 2
	}
	up, err := dev.FromFloat32(ctx, kernels.F32, dy, pass.O.Shape())
	if err != nil {
		return 0, grads, err
	}
	defer up.Release()
	grads, err = layer.Backward(ctx, pass, up)
	return loss, grads, err
}

// step makes one step of gradient descent and returns the loss before it. It changes the weights in
// host memory, after lossOf has released the layer that used them.
func step(ctx context.Context, dev *kernels.Device, config nn.MultiHeadConfig, weights nn.MultiHeadWeights, x kernels.Tensor, target []float32, rate float32) (float32, error) {
	loss, grads, err := lossOf(ctx, dev, config, weights, x, target)
	if err != nil {
		return 0, err
	}
	defer grads.Release()
	g := grads.Weights
	for _, p := range [][2]kernels.Tensor{{weights.Wq, g.Wq}, {weights.Wk, g.Wk}, {weights.Wv, g.Wv}, {weights.Wo, g.Wo}} {
		w, err := p[0].Float32s()
		if err != nil {
			return 0, err
		}
		dw, err := dev.ToFloat32(ctx, p[1])
		if err != nil {
			return 0, err
		}
		for i := range dw {
			w[i] -= rate * dw[i]
		}
	}
	return loss, nil
}

// The weights of a layer do not change: each step makes a new layer of the changed weights.
func ExampleMultiHeadAttention_Backward() {
	ctx := context.Background()
	dev, err := kernels.Open("cpu")
	if err != nil {
		log.Fatal(err)
	}
	defer dev.Close()
	config := nn.MultiHeadConfig{Model: 4, Heads: 2}
	weights, err := config.Initialise(nn.Initialiser{Seed: 1})
	if err != nil {
		log.Fatal(err)
	}
	tokens := []float32{1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0}
	x, err := dev.FromFloat32(ctx, kernels.F32, tokens, kernels.Shape{1, 1, 3, 4})
	if err != nil {
		log.Fatal(err)
	}
	defer x.Release()
	before, err := step(ctx, dev, config, weights, x, tokens, 0.1) // the layer shall return its input
	if err != nil {
		log.Fatal(err)
	}
	after, err := step(ctx, dev, config, weights, x, tokens, 0.1)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("loss %.3f, after a step %.3f", before, after)
	// Output: loss 2.588, after a step 2.039
}
