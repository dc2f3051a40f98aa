package main

import (
	"errors"
	"fmt"
	"testing"

	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestHeadSizes: heads have any size, and values another one, as README and docs/options.md say. The
// results agree with float64.
func TestHeadSizes(t *testing.T) {
	for _, name := range []string{"gpu", "cpu"} {
		t.Run(name, func(t *testing.T) {
			dev := clitest.Open(t, name)
			put := func(t *testing.T, dtype, keys kernels.DType, dim, valueDim int) kernelstest.Operands {
				dims := kernels.Dims{Batch: 1, Heads: 2, KVHeads: 1, SeqQ: 9, SeqK: 40, Dim: dim, ValueDim: valueDim}
				c := kernelstest.Case{Dims: dims, DType: dtype, Keys: &keys, Options: kernels.Options{Causal: true, Align: kernels.LowerRight}}
				s := c.Put(t, dev)
				t.Cleanup(func() { s.Q.Release(); s.K.Release(); s.V.Release() })
				return s
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
						s := put(t, dtype, dtype, size[0], size[1])
						call := must.Get(dev.Prepare(s.Q, s.K, s.V, s.Options))(t)
						r := must.Get(call.Run(t.Context()))(t)
						defer r.Release()
						report, err := call.Check(t.Context(), r, kernels.CheckOptions{Rows: 1 << 20})
						if err != nil || !report.OK() {
							t.Errorf("%s, %v", report.Worst, err)
						}
					})
				}
			}
			t.Run("values of int8 with 260 columns", func(t *testing.T) {
				s := put(t, kernels.F32, kernels.Q8, 260, 260)
				r, err := dev.Attention(t.Context(), s.Q, s.K, s.V, s.Options)
				r.Release()
				if name == "cpu" && err != nil || name == "gpu" && !errors.Is(err, kernels.ErrUnsupported) {
					t.Error(err)
				}
			})
		})
	}
}
