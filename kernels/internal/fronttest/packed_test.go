package fronttest

import (
	"context"
	"fmt"
	"log"

	"github.com/seed90331342/attn/kernels"
)

// Three sequences of 2, 1 and 3 tokens are packed one after the other without padding, with one
// head of size 2. Each attends only to its own tokens.
func ExampleOptions_packed() {
	dev, err := kernels.Open("cpu")
	if err != nil {
		log.Fatal(err)
	}
	defer dev.Close()
	ctx := context.Background()

	shape := kernels.Shape{1, 6, 1, 2} // [total, H, D]
	x, err := dev.FromFloat32(ctx, kernels.F32, []float32{
		1, 0, 0, 1, // the first
		7, 8, // the second
		1, 1, 0, 2, 2, 0, // the third
	}, shape)
	if err != nil {
		log.Fatal(err)
	}
	defer x.Release()
	packed, err := x.Swap(kernels.Heads, kernels.Seq) // [1, H, total, D]
	if err != nil {
		log.Fatal(err)
	}
	r, err := dev.Attention(ctx, packed, packed, packed, kernels.Options{Causal: true, CuQ: []int{0, 2, 3, 6}})
	if err != nil {
		log.Fatal(err)
	}
	defer r.Release()
	o, err := dev.ToFloat32(ctx, r.O)
	if err != nil {
		log.Fatal(err)
	}
	for i := range 6 {
		fmt.Printf("%.2f\n", o[2*i:2*i+2])
	}
	// Output:
	// [1.00 0.00]
	// [0.33 0.67]
	// [7.00 8.00]
	// [1.00 1.00]
	// [0.20 1.80]
	// [1.72 0.28]
}
