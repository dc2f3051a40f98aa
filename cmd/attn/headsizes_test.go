package main

import (
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
	"github.com/seed90331342/attn/kernels"
)

// TestHeadSizes: heads have any size, and values another one, as README and docs/options.md say. The
// results agree with float64.
func TestHeadSizes(t *testing.T) {
	// A GPU compiles kernels for each; the conformance suite has 576 and smaller ones.
	sizes := [][2]int{{320, 64}, {640, 640}}
	for _, name := range []string{"gpu", "cpu"} {
		t.Run(name, func(t *testing.T) {
			clitest.NeedBackend(t, name)
			dev, err := kernels.Open(name)
			if err != nil {
				t.Fatal(err)
			}
			defer dev.Close()
			sizes := sizes
			if name == "cpu" {
				for n := 1; n <= 320; n += 7 {
					sizes = append(sizes, [2]int{n, n}, [2]int{n, 321 - n})
				}
				sizes = append(sizes, [][2]int{{128, 128}, {256, 256}, {257, 257}, {512, 512}, {512, 256}, {576, 512}, {1000, 3}, {64, 1000}, {1024, 1024}}...)
			}
			for i, size := range sizes {
				for n, dtype := range []backend.DType{backend.F32, backend.BF16} {
					if name == "cpu" || i == n {
						checkHeadSize(t, dev, dtype, size[0], size[1])
					}
				}
			}
			x := random(t, dev, backend.Q8, backend.Shape{1, 1, 40, 260})
			defer x.Release()
			q := random(t, dev, backend.F32, backend.Shape{1, 1, 9, 260})
			defer q.Release()
			r, err := dev.Attention(t.Context(), q, x, x, kernels.Options{})
			r.Release()
			if name == "cpu" && err != nil || name == "gpu" && !errors.Is(err, backend.ErrUnsupported) {
				t.Errorf("values of int8 with 260 columns: %v", err)
			}
		})
	}
}

// checkHeadSize compares a call with keys of size d and values of size dv with float64.
func checkHeadSize(t *testing.T, dev *kernels.Device, dtype backend.DType, d, dv int) {
	t.Helper()
	q, k, v := random(t, dev, dtype, backend.Shape{1, 2, 9, d}), random(t, dev, dtype, backend.Shape{1, 1, 40, d}), random(t, dev, dtype, backend.Shape{1, 1, 40, dv})
	defer q.Release()
	defer k.Release()
	defer v.Release()
	call, err := dev.Prepare(q, k, v, kernels.Options{Causal: true, Align: kernels.LowerRight})
	if err != nil {
		t.Fatal(err)
	}
	r, err := call.Run(t.Context())
	if err != nil {
		t.Errorf("%v, heads of %d with values of %d: %v", dtype, d, dv, err)
		return
	}
	defer r.Release()
	report, err := call.Check(t.Context(), r, kernels.CheckOptions{Rows: 18})
	if err != nil || !report.OK() || report.Rows != 18 {
		t.Errorf("%v, heads of %d with values of %d: %+v, %v", dtype, d, dv, report, err)
	}
}

func random(t *testing.T, dev *kernels.Device, dtype backend.DType, shape backend.Shape) backend.Tensor {
	t.Helper()
	rng, data := rand.New(rand.NewPCG(uint64(shape[3]), 1)), make([]float32, shape.Elements())
	for i := range data {
		data[i] = float32(rng.NormFloat64())
	}
	x, err := dev.FromFloat32(t.Context(), dtype, data, shape)
	if err != nil {
		t.Fatal(err)
	}
	return x
}
