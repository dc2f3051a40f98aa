package cpu

import (
	"fmt"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/vec"
	"github.com/seed90331342/attn/cpu/internal/view"
)

// TestPack shows that packing finds the element that the strides select, for each
// type and layout.
func TestPack(t *testing.T) {
	const rows, cols = 11, 7
	shape := backend.Shape{2, 3, rows, cols}
	for _, dtype := range []backend.DType{backend.F32, backend.F16, backend.BF16} {
		for _, layout := range []string{"rows", "columns"} {
			t.Run(fmt.Sprintf("%v/%s", dtype, layout), func(t *testing.T) {
				x := filled(t, dtype, shape)
				if layout == "columns" {
					y := swap(t, filled(t, dtype, backend.Shape{2, 3, cols, rows}), backend.Seq, backend.Dim)
					x = y
				}
				v := view.Of(&x)
				const s0, n, c0, c = 2, 9, 3, 4
				packed := make([]float32, n*8)
				for _, k := range vec.Tiers() {
					v.Load(k, packed, 8, 1, 2, s0, n, c0, c)
					for r := range n {
						for j := range c {
							want := v.At(1, 2, s0+r, c0+j)
							if packed[r*8+j] != want {
								t.Fatalf("%s: element (%d,%d) is %g packed, should be %g", k.Tier, r, j, packed[r*8+j], want)
							}
						}
					}
				}
			})
		}
	}
}

// filled returns a contiguous tensor of small distinct numbers, exact in every
// type.
func filled(t *testing.T, dtype backend.DType, shape backend.Shape) backend.Tensor {
	x, err := backend.AllocHost(dtype, shape)
	must(t, err)
	v := view.Of(&x)
	for i := range shape.Elements() {
		y := float32(i%256) - 128
		switch dtype {
		case backend.F32:
			v.F32[i] = y
		case backend.F16:
			v.Bits[i] = backend.F16.Encode(y)
		default:
			v.Bits[i] = backend.BF16.Encode(y)
		}
	}
	return x
}
