package main

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
	"github.com/seed90331342/attn/kernels"
)

// TestHeadSizes: heads have any size, and values another one, as README and docs/options.md say. The
// results agree with float64.
func TestHeadSizes(t *testing.T) {
	for _, name := range []string{"gpu", "cpu"} {
		t.Run(name, func(t *testing.T) {
			clitest.NeedBackend(t, name)
			dev, err := kernels.Open(name)
			if err != nil {
				t.Fatal(err)
			}
			defer dev.Close()
			// A GPU compiles kernels for each; the conformance suite has 576 and smaller ones.
			sizes := [][2]int{{320, 64}, {640, 640}}
			if name == "cpu" {
				for n := 1; n <= 320; n += 7 {
					sizes = append(sizes, [2]int{n, n}, [2]int{n, 321 - n})
				}
				sizes = append(sizes, [][2]int{{128, 128}, {256, 256}, {257, 257}, {512, 512}, {512, 256}, {576, 512}, {1000, 3}, {64, 1000}, {1024, 1024}}...)
			}
			for i, size := range sizes {
				for n, dtype := range []kernels.DType{kernels.F32, kernels.BF16} {
					if name == "gpu" && i != n {
						continue
					}
					t.Run(fmt.Sprintf("%v %d %d", dtype, size[0], size[1]), func(t *testing.T) {
						c := with(kernels.Options{Causal: true, Align: kernels.LowerRight})
						c.dtype = dtype
						c.dims = kernels.Dims{Batch: 1, Heads: 2, KVHeads: 1, SeqQ: 9, SeqK: 40, Dim: size[0], ValueDim: size[1]}
						s := &support{t: t, dev: dev, rng: rand.New(rand.NewPCG(uint64(size[0]), 1))}
						if err := s.run(c); err != nil {
							t.Error(err)
						}
					})
				}
			}
			t.Run("values of int8 with 260 columns", func(t *testing.T) {
				s := &support{t: t, dev: dev, rng: rand.New(rand.NewPCG(260, 1))}
				x := s.draw(kernels.Q8, kernels.Shape{1, 1, 40, 260})
				r, err := dev.Attention(t.Context(), s.draw(kernels.F32, kernels.Shape{1, 1, 9, 260}), x, x, kernels.Options{})
				r.Release()
				if name == "cpu" && err != nil || name == "gpu" && !errors.Is(err, kernels.ErrUnsupported) {
					t.Error(err)
				}
			})
		})
	}
}
