package cpu

import (
	"fmt"
	"testing"
	"unsafe"

	"github.com/seed90331342/attn/backend"
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
					y, err := filled(t, dtype, backend.Shape{2, 3, cols, rows}).Swap(backend.Seq, backend.Dim)
					if err != nil {
						t.Fatal(err)
					}
					x = y
				}
				v, err := openView("x", x)
				if err != nil {
					t.Fatal(err)
				}
				const s0, n, c0, c = 2, 9, 3, 4
				packed := make([]float32, n*8)
				v.pack(packed, 8, 1, 2, s0, n, c0, c)
				for r := range n {
					for j := range c {
						want := v.at(1, 2, s0+r, c0+j)
						if packed[r*8+j] != want {
							t.Fatalf("element (%d,%d) is %g packed, should be %g", r, j, packed[r*8+j], want)
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
	if err != nil {
		t.Fatal(err)
	}
	v, err := openView("x", x)
	if err != nil {
		t.Fatal(err)
	}
	for i := range shape.Elements() {
		y := float32(i%256) - 128
		switch dtype {
		case backend.F32:
			v.f32[i] = y
		case backend.F16:
			v.bits[i] = backend.F16.Encode(y)
		default:
			v.bits[i] = backend.BF16.Encode(y)
		}
	}
	return x
}

// TestScratchAligned shows that pieces of scratch are disjoint and start on a cache
// line.
func TestScratchAligned(t *testing.T) {
	w, err := getScratch(1000, 3)
	if err != nil {
		t.Fatal(err)
	}
	defer putScratch(w)
	var sizes = []int{1, 64, 3, 0, 128, 7, 500}
	var pieces [][]float32
	for _, n := range sizes {
		p := w.floats(n)
		if len(p) != n {
			t.Fatalf("asked for %d floats, got %d", n, len(p))
		}
		if n > 0 && uintptr(unsafe.Pointer(&p[0]))%64 != 0 {
			t.Errorf("a piece of %d floats is not aligned", n)
		}
		for i := range p {
			p[i] = float32(n)
		}
		pieces = append(pieces, p)
	}
	for i, p := range pieces {
		for _, x := range p {
			if x != float32(sizes[i]) {
				t.Fatalf("piece %d was overwritten by another", i)
			}
		}
	}
}
