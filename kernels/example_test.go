package kernels_test

import (
	"context"
	"fmt"
	"log"

	"github.com/seed90331342/attn/backend"
	_ "github.com/seed90331342/attn/cpu"
	_ "github.com/seed90331342/attn/gpu"
	"github.com/seed90331342/attn/kernels"
)

func Example() {
	be, err := backend.Open("auto") // a GPU when there is one, else the CPU
	if err != nil {
		log.Fatal(err)
	}
	defer be.Close()

	// Three tokens, one head of size 2; each token attends to itself and to
	// what came before it.
	q := []float32{1, 0, 0, 1, 1, 1}
	k := []float32{1, 0, 0, 1, 1, 1}
	v := []float32{1, 2, 3, 4, 5, 6}
	o, err := kernels.AttentionFloat32(context.Background(), be,
		kernels.Dims{SeqQ: 3, Dim: 2}, q, k, v, kernels.Options{Causal: true})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%.3f\n", o)
	// Output: [1.000 2.000 2.340 3.340 3.510 4.510]
}
