package vec

import (
	"math"
	"unsafe"
)

// The integers of Fix have 16 bits: n = 256·upper + lower, both signed bytes.
const fixedTop = 127 << 8

// MaxFixed is the most elements of a row of Fix. Sums of more products could exceed 32 bits.
const MaxFixed = 512

// HasFixed reports whether Dots has kernels for Fixed.
func (x *Kernels) HasFixed() bool { return x.dots[Fixed] != nil }

// Fix replaces a query row by integers, for Dots with Fixed. Their unit is the largest magnitude
// divided by fixedTop, by half of which an element errs. Dots sums their products with the
// integers of keys without an error, and then multiplies by the key's scale and by the unit. The
// unit is NaN if the row has NaN or Inf.
//
// len(row) is a multiple of 4 and at most MaxFixed. Of each four integers the upper bytes precede
// the lower ones; the unit and 128 times the sum of the integers follow.
func Fix(row []float32) {
	top, nan, sum := float32(0), float32(0), int32(0)
	for _, x := range row {
		top = max(top, x, -x)
		nan += x - x
	}
	steps := fixedTop / max(float64(top), math.SmallestNonzeroFloat32)
	bytes := unsafe.Slice((*int8)(unsafe.Pointer(unsafe.SliceData(row))), 4*len(row))
	for i := 0; i < len(row); i += 4 {
		for j, x := range [4]float32(row[i:]) {
			n := int32(math.RoundToEven(float64(x) * steps))
			upper := (n + 128) >> 8
			bytes[2*i+j], bytes[2*i+4+j] = int8(upper), int8(n-upper<<8)
			sum += n
		}
	}
	row[len(row)/2], row[len(row)/2+1] = top/fixedTop+nan, math.Float32frombits(uint32(sum)<<7)
}
