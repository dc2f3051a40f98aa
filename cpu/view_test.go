package cpu

import (
	"fmt"
	"math"
	"testing"

	"github.com/seed90331342/attn/backend"
)

// TestPackTranspose shows that packing and transposing find the element that
// the strides say, for each type and layout.
func TestPackTranspose(t *testing.T) {
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
				v, err := viewOf("x", x)
				if err != nil {
					t.Fatal(err)
				}
				const s0, n, c0, c = 2, 9, 3, 4
				packed, turned, tmp := make([]float32, n*8), make([]float32, c*12), make([]float32, 4*c)
				v.pack(packed, 8, 1, 2, s0, n, c0, c)
				if !v.packT(turned, 12, 1, 2, s0, n, c0, c, tmp) {
					t.Error("finite elements are reported as not finite")
				}
				for r := range n {
					for j := range c {
						want := v.at(1, 2, s0+r, c0+j)
						if packed[r*8+j] != want || turned[j*12+r] != want {
							t.Fatalf("element (%d,%d) is %g packed, %g transposed, should be %g", r, j, packed[r*8+j], turned[j*12+r], want)
						}
					}
				}
				for _, bad := range []float32{float32(math.NaN()), float32(math.Inf(1)), float32(math.Inf(-1))} {
					for _, at := range []int{s0, s0 + n - 1} {
						keep := []float32{v.at(1, 2, at, c0+1)}
						v.store([]float32{bad}, 1, 2, at, c0+1)
						if v.packT(turned, 12, 1, 2, s0, n, c0, c, tmp) {
							t.Errorf("%g in row %d goes unseen", bad, at)
						}
						v.store(keep, 1, 2, at, c0+1)
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
	v, err := viewOf("x", x)
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

// TestScratchAligned shows that pieces of scratch are disjoint and start where
// gonum's dot product wants them.
func TestScratchAligned(t *testing.T) {
	w := getScratch(1000, 3)
	defer putScratch(w)
	var sizes = []int{1, 64, 3, 0, 128, 7, 500}
	var pieces [][]float32
	for _, n := range sizes {
		p := w.floats(n)
		if len(p) != n {
			t.Fatalf("asked for %d floats, got %d", n, len(p))
		}
		if n > 0 && !aligned(p, 4) {
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

// TestMulNT shows that a row's product has the same bits however many rows there
// are, and that columns beyond one piece come out right.
func TestMulNT(t *testing.T) {
	const m, n, k = queryBlock, 2*colBlock + 9, keyBlock
	a, err := random(t, 1, backend.Shape{1, 1, m, k}).Float32s()
	if err != nil {
		t.Fatal(err)
	}
	b, err := random(t, 2, backend.Shape{1, 1, n, k}).Float32s()
	if err != nil {
		t.Fatal(err)
	}
	c, one := make([]float32, m*n), make([]float32, n)
	mulNT(m, n, k, a, k, b, k, c, n)
	for r := range m {
		mulNT(1, n, k, a[r*k:], k, b, k, one, n)
		for j := range n {
			var want, size float64
			for x := range k {
				p := float64(a[r*k+x]) * float64(b[j*k+x])
				want += p
				size += math.Abs(p)
			}
			if got := c[r*n+j]; got != one[j] {
				t.Fatalf("c[%d,%d] is %g among %d rows, %g alone", r, j, got, m, one[j])
			} else if math.Abs(float64(got)-want) > k*0x1p-24*size { // k roundings (Higham 2002, ch. 3)
				t.Fatalf("c[%d,%d] is %g, should be %g", r, j, got, want)
			}
		}
	}
}

// TestSumSpan shows that leaving out what is zero around the elements of a sum
// changes no bit of it, wherever they lie.
func TestSumSpan(t *testing.T) {
	const n = 20
	b, err := random(t, 2, backend.Shape{1, 1, n, keyBlock}).Float32s()
	if err != nil {
		t.Fatal(err)
	}
	full, some := make([]float32, n), make([]float32, n)
	for lo := range keyBlock {
		for hi := lo + 1; hi <= keyBlock; hi++ {
			a := make([]float32, keyBlock)
			for j := lo; j < hi; j++ {
				a[j] = b[j*3%len(b)]
			}
			mulNT(1, n, keyBlock, a, keyBlock, b, keyBlock, full, n)
			from, to := sumSpan(lo, hi)
			mulNT(1, n, to-from, a[from:], keyBlock, b[from:], keyBlock, some, n)
			for j := range n {
				if math.Float32bits(full[j]) != math.Float32bits(some[j]) {
					t.Fatalf("the sum of elements [%d, %d) is %g, of the whole block %g", lo, hi, some[j], full[j])
				}
			}
		}
	}
}
