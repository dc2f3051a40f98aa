package backendtest

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
)

// testTransfer uploads and downloads tensors of every dtype, size and stride, and compares
// their bits.
func testTransfer(t *testing.T, dev *kernels.Device) {
	rng := rand.New(rand.NewPCG(3, 3))
	for _, n := range []int{1, 2, 3, 5, 8, 255, 4097} {
		for _, dtype := range []backend.DType{backend.F32, backend.F16, backend.BF16, backend.Bool} {
			t.Run(fmt.Sprintf("%v %d", dtype, n), func(t *testing.T) {
				host := randomHost(t, rng, dtype, backend.Shape{1, 1, n, 3})
				uploaded := must(dev.Upload(t.Context(), host))(t)
				defer uploaded.Release()
				if uploaded.Shape() != host.Shape() || uploaded.DType() != dtype {
					t.Fatalf("uploaded %v %v, got %v %v", dtype, host.Shape(), uploaded.DType(), uploaded.Shape())
				}
				sameElements(t, dev, host, uploaded)
				// Views: every second row from row 1 on, the transpose, and one column.
				for _, v := range []struct {
					shape   backend.Shape
					strides backend.Strides
					offset  int
				}{
					{backend.Shape{1, 1, (n + 1) / 2, 2}, backend.Strides{0, 0, 2 * 3, 1}, 1},
					{backend.Shape{1, 3, 1, n}, backend.Strides{0, 1, 0, 3}, 0},
					{backend.Shape{2, 1, n, 1}, backend.Strides{0, 0, 3, 1}, 2},
				} {
					hv := must(host.View(v.shape, v.strides, v.offset))(t)
					dv := must(dev.Upload(t.Context(), hv))(t)
					sameElements(t, dev, hv, dv)
					dv.Release()
					if uploaded.IsContiguous() {
						dv = must(uploaded.View(v.shape, v.strides, v.offset))(t)
						sameElements(t, dev, hv, dv)
					}
				}
			})
		}
	}
	t.Run("into a strided host tensor", func(t *testing.T) {
		uploaded := must(dev.FromFloat32(t.Context(), backend.F32, []float32{1, 2, 3, 4, 5, 6}, backend.Shape{1, 1, 2, 3}))(t)
		defer uploaded.Release()
		mem := make([]float32, 8)
		host := must(backend.HostF32(mem, backend.Shape{1, 1, 1, 8}))(t)
		view := must(host.View(backend.Shape{1, 1, 2, 3}, backend.Strides{0, 0, 1, 2}, 1))(t)
		noError(t, dev.Download(t.Context(), view, uploaded))
		if want := []float32{0, 1, 4, 2, 5, 3, 6, 0}; !slices.Equal(mem, want) {
			t.Errorf("memory is %v, should be %v", mem, want)
		}
	})
}

// randomHost returns a tensor with random bits, without NaN.
func randomHost(t testing.TB, rng *rand.Rand, dtype backend.DType, s backend.Shape) backend.Tensor {
	t.Helper()
	host := must(backend.AllocHost(dtype, s))(t)
	switch dtype {
	case backend.F32:
		x, _ := host.Float32s()
		for i := range x {
			x[i] = float32(rng.NormFloat64())
		}
	case backend.Bool:
		x, _ := host.Bools()
		for i := range x {
			x[i] = rng.IntN(2) == 0
		}
	default:
		x, _ := host.Bits()
		for i := range x {
			x[i] = uint16(rng.IntN(1 << 14))
		}
	}
	return host
}

// sameElements downloads uploaded and compares it with host, element by element.
func sameElements(t *testing.T, dev *kernels.Device, host, uploaded backend.Tensor) {
	t.Helper()
	back := must(backend.AllocHost(host.DType(), host.Shape()))(t)
	noError(t, dev.Download(t.Context(), back, uploaded))
	want, got := walk(t, host), walk(t, back)
	if !slices.Equal(want, got) {
		t.Errorf("%v %v strides %v: came back different", host.DType(), host.Shape(), host.Strides())
	}
}

// walk returns the elements of a host tensor of any dtype in row-major order.
func walk(t *testing.T, h backend.Tensor) []float32 {
	t.Helper()
	out := make([]float32, h.Shape().Elements())
	at := func(i int) int { return index(i, h.Shape(), h.Strides()) }
	switch h.DType() {
	case backend.F32:
		x := must(h.Float32s())(t)
		for i := range out {
			out[i] = x[at(i)]
		}
	case backend.Bool:
		x := must(h.Bools())(t)
		for i := range out {
			if x[at(i)] {
				out[i] = 1
			}
		}
	default:
		x := must(h.Bits())(t)
		for i := range out {
			out[i] = float32(x[at(i)])
		}
	}
	return out
}
