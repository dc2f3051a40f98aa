package cpu_test

import (
	"context"
	"fmt"
	"log"

	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
)

// A program opens the backend with options and gives it to a device, which closes it. gpu.Open is
// used in the same way, with the name of an adapter.
func ExampleOpen() {
	be, err := cpu.Open(cpu.Options{Threads: 1, Tier: "gonum"})
	if err != nil {
		log.Fatal(err)
	}
	dev := kernels.NewDevice(be)
	defer dev.Close()
	x := []float32{1, 0, 0, 1} // two tokens, one head of size 2
	o, err := dev.AttentionFloat32(context.Background(), kernels.Dims{SeqQ: 2, Dim: 2}, kernels.BHSD, x, x, x, kernels.Options{})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%.3f\n", o)
	// Output: [0.670 0.330 0.330 0.670]
}
