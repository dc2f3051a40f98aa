package cpu

import (
	"fmt"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/strided"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// TestPack shows that packing finds the element that the strides select, for each
// type and layout.
func TestPack(t *testing.T) {
	const rows, cols = 11, 7
	shape := backend.Shape{2, 3, rows, cols}
	for _, dtype := range []backend.DType{backend.F32, backend.F16, backend.BF16} {
		for _, layout := range []string{"rows", "columns"} {
			t.Run(fmt.Sprintf("%v/%s", dtype, layout), func(t *testing.T) {
				x := typed(t, random(t, 1, shape), dtype)
				if layout == "columns" {
					x = swap(t, typed(t, random(t, 1, backend.Shape{2, 3, cols, rows}), dtype), backend.Seq, backend.Dim)
				}
				v := strided.Of(&x)
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
