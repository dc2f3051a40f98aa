package main

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestHeadSizes: heads have any size, and values another one, as README and docs/options.md say. The
// results agree with float64.
func TestHeadSizes(t *testing.T) {
	for _, name := range []string{"gpu", "cpu"} {
		t.Run(name, func(t *testing.T) {
			dev := clitest.Open(t, name)
			rng := rand.New(rand.NewPCG(1, 1))
			draw := func(dtype kernels.DType, shape kernels.Shape) kernels.Tensor {
				data := make([]float32, shape.Elements())
				for i := range data {
					data[i] = float32(rng.NormFloat64())
				}
				x := must.Get(dev.FromFloat32(t.Context(), dtype, data, shape))(t)
				return x
			}
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
						q, k, v := draw(dtype, kernels.Shape{1, 2, 9, size[0]}), draw(dtype, kernels.Shape{1, 1, 40, size[0]}), draw(dtype, kernels.Shape{1, 1, 40, size[1]})
						call := must.Get(dev.Prepare(q, k, v, kernels.Options{Causal: true, Align: kernels.LowerRight}))(t)
						r := must.Get(call.Run(t.Context()))(t)
						report, err := call.Check(t.Context(), r, kernels.CheckOptions{Rows: 1 << 20})
						if err != nil || !report.OK() {
							t.Errorf("%s, %v", report.Worst, err)
						}
						for _, x := range []kernels.Tensor{q, k, v, r.O} {
							x.Release()
						}
					})
				}
			}
			t.Run("values of int8 with 260 columns", func(t *testing.T) {
				x := draw(kernels.Q8, kernels.Shape{1, 1, 40, 260})
				r, err := dev.Attention(t.Context(), draw(kernels.F32, kernels.Shape{1, 1, 9, 260}), x, x, kernels.Options{})
				r.Release()
				if name == "cpu" && err != nil || name == "gpu" && !errors.Is(err, kernels.ErrUnsupported) {
					t.Error(err)
				}
			})
		})
	}
}
