package kernels_test

import (
	"context"
	"fmt"
	"log"

	_ "github.com/seed90331342/attn/cpu" // and attn/gpu, for a GPU
	"github.com/seed90331342/attn/kernels"
)

func Example() {
	dev, err := kernels.Open("auto") // a hardware GPU if there is one, else the CPU
	if err != nil {
		log.Fatal(err)
	}
	defer dev.Close()

	x := []float32{1, 0, 0, 1, 1, 1} // three tokens, one head of size 2
	v := []float32{1, 2, 3, 4, 5, 6}
	o, err := dev.AttentionFloat32(context.Background(), kernels.Dims{SeqQ: 3, Dim: 2}, kernels.BHSD, x, x, v, kernels.Options{Causal: true})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%.3f\n", o)
	// Output: [1.000 2.000 2.340 3.340 3.510 4.510]
}
