// Walk makes one causal call of two heads, or stops before it, so that the difference between the
// functions of two runs is the way of a call.
//
//	walk BACKEND [stop]
package main

import (
	"context"
	"log"
	"os"

	_ "github.com/seed90331342/attn/cpu"
	_ "github.com/seed90331342/attn/gpu"
	"github.com/seed90331342/attn/kernels"
)

func main() {
	if err := walk(os.Args[1], len(os.Args) > 2); err != nil {
		log.Fatal(err)
	}
}

func walk(backend string, stop bool) error {
	dev, err := kernels.Open(backend)
	if err != nil {
		return err
	}
	defer dev.Close()
	ctx := context.Background()
	var operands [3]kernels.Tensor
	for i := range operands {
		numbers := make([]float32, 2*300*64)
		for j := range numbers {
			numbers[j] = float32((j*7+i)%13) / 13
		}
		host, err := kernels.HostF32(numbers, kernels.Shape{1, 2, 300, 64})
		if err != nil {
			return err
		}
		if operands[i], err = dev.Upload(ctx, host); err != nil {
			return err
		}
		defer operands[i].Release()
	}
	if stop {
		return nil
	}
	out, err := dev.Attention(ctx, operands[0], operands[1], operands[2], kernels.Options{Causal: true})
	if err != nil {
		return err
	}
	defer out.Release()
	return dev.Wait(ctx)
}
