package born_test

import (
	"context"
	"fmt"
	"log"
	"math"

	"github.com/born-ml/born/autodiff"
	"github.com/born-ml/born/backend/cpu"
	"github.com/born-ml/born/models/llama"
	"github.com/born-ml/born/tensor"
	_ "github.com/seed90331342/attn/cpu" // and attn/gpu, for a GPU
	"github.com/seed90331342/attn/kernels"
	attnborn "github.com/seed90331342/attn/kernels/adapters/born"
)

func Example() {
	dev, err := kernels.Open("auto") // a hardware GPU if there is one, else the CPU
	if err != nil {
		log.Fatal(err)
	}
	defer dev.Close()

	backend := autodiff.New(cpu.New())
	type Backend = *autodiff.Backend[*cpu.Backend]
	config := llama.Config{VocabSize: 32, HiddenSize: 64, NumLayers: 2, NumHeads: 4, NumKVHeads: 2, HeadDim: 16,
		FFNSize: 128, MaxSeqLen: 64, RopeTheta: 10000, NormEpsilon: 1e-5}
	attention := attnborn.New[Backend](context.Background(), dev, nil)
	model := llama.NewModel(config, backend, llama.WithAttentionFunc(attention))

	ids, err := tensor.NewRaw(tensor.Shape{1, 48}, tensor.Int32, tensor.CPU)
	if err != nil {
		log.Fatal(err)
	}
	with := model.Forward(ids, nil, 0)
	model.SetAttentionFunc(nil) // born's own attention
	without := model.Forward(ids, nil, 0)

	most := 0.0
	for i, x := range with.AsFloat32() {
		most = max(most, math.Abs(float64(x-without.AsFloat32()[i])))
	}
	fmt.Println("logits", with.Shape(), "equal to 0.0001:", most < 0.0001)
	// Output: logits [1 48 32] equal to 0.0001: true
}
