package gomlx_test

import (
	"fmt"
	"log"

	"github.com/gomlx/compute"
	. "github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/layers/attention"
	_ "github.com/seed90331342/attn/cpu"                    // and attn/gpu, for a GPU
	_ "github.com/seed90331342/attn/kernels/adapters/gomlx" // registers the backend "attn"
)

func Example() {
	backend, err := compute.NewWithConfig("attn:cpu") // or GOMLX_BACKEND=attn:cpu
	if err != nil {
		log.Fatal(err)
	}
	defer backend.Finalize()

	// Three tokens, one head of size 2: the causal attention of x to itself, and its gradient.
	exec := MustNewExec(backend, func(x, v *Node) (o, gradient *Node) {
		o, _ = attention.Core(x, x, v, attention.LayoutBHSD, attention.CoreOptions{UseCausalMask: true})
		return o, Gradient(ReduceAllSum(o), v)[0]
	})
	x := [][][][]float32{{{{1, 0}, {0, 1}, {1, 1}}}}
	v := [][][][]float32{{{{1, 2}, {3, 4}, {5, 6}}}}
	out := exec.MustCall(x, v)
	fmt.Printf("%.3f\n", out[0].Value())
	fmt.Printf("%.3f\n", out[1].Value())
	// Output:
	// [[[[1.000 2.000] [2.340 3.340] [3.510 4.510]]]]
	// [[[[1.578 1.578] [0.918 0.918] [0.503 0.503]]]]
}
