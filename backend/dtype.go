package backend

import (
	"math"

	"github.com/seed90331342/attn/backend/internal/quantise"
	"github.com/x448/float16"
)

// DType is the element type of a [Tensor] in memory. Arithmetic is in float32 or wider for all
// types.
type DType uint8

const (
	F32  DType = iota // IEEE 754 binary32
	F16               // IEEE 754 binary16, stored as its bits
	BF16              // the upper half of a binary32, stored as its bits
	Bool              // one byte per element, 0 or 1, for masks; true means visible
	// Q8 is one signed byte per element and one float32 scale per row of D elements, in
	// the 4 bytes before the row: x = scale·integer. Only keys and values have it. D is a
	// multiple of 4; strides and offsets are in bytes and multiples of 4. The offset is
	// that of the first integer, not of its scale.
	Q8
	// Q4 is ggml's q4_0: 18 bytes for each 32 elements of a row, x = scale·(n-8). The first 2
	// are the scale, a little-endian float16; in byte i of the others, the lower 4 bits are n
	// of element i and the upper 4 that of element 16+i. Only keys and values have it. D is a
	// multiple of 32; strides, except the last, and offsets are in bytes and even.
	Q4
	// F8 is e4m3fn, one byte per element: a sign, 4 bits of exponent with bias 7 and 3 of fraction.
	// The largest number is 448, the least subnormal one 2^-9; 0x7f and 0xff are NaN, and there is no
	// infinity. Only keys and values have it. D, strides, except the last, and offsets are
	// multiples of 4.
	F8
	I32 // 32-bit two's complement, for lists of keys (see [Call.Lists])
)

type dtypeInfo struct {
	name     string
	size     int
	roundoff float64
}

var dtypes = [...]dtypeInfo{F32: {"f32", 4, 0x1p-24}, F16: {"f16", 2, 0x1p-11}, BF16: {"bf16", 2, 0x1p-8}, Bool: {"bool", 1, 0}, Q8: {"q8", 1, 0}, Q4: {"q4", 1, 0}, F8: {"f8", 1, 0x1p-4}, I32: {"i32", 4, 0}}

func (d DType) info() dtypeInfo {
	if int(d) < len(dtypes) {
		return dtypes[d]
	}
	return dtypeInfo{name: "dtype?", size: 1}
}

// Size returns the size of an element in bytes; for Q8 without the scale, for Q4
// that of the unit of offsets, a byte.
func (d DType) Size() int { return d.info().size }

// Contiguous returns the strides of a tensor of shape s stored row by row, and the offset of
// its first element.
func (d DType) Contiguous(s Shape) (st Strides, offset int) {
	row := d.Row(s[Dim])
	return Strides{s[Heads] * s[Seq] * row, s[Seq] * row, row, 1}, d.Lead()
}

// Row returns the least distance between rows of dim elements, in the units of strides; for Q8
// with the scale.
func (d DType) Row(dim int) int {
	if d == Q4 {
		return dim / quantise.Q4Values * quantise.Q4Bytes
	}
	return dim + d.Lead()
}

// Lead returns the bytes before the first element of a row that belong to it: 4 for Q8, else 0.
func (d DType) Lead() int {
	if d == Q8 {
		return quantise.Q8Lead
	}
	return 0
}

// Bytes returns the size of a tensor of shape s stored row by row, or -1 when [Shape.Elements]
// is -1.
func (d DType) Bytes(s Shape) int64 {
	n := int64(s.Elements())
	if n > 0 {
		n = n / int64(s[Dim]) * int64(d.Row(s[Dim]))
	}
	return n * int64(d.Size())
}

// Float reports whether d is F32, F16 or BF16.
func (d DType) Float() bool { return d <= BF16 }

// Quantised reports whether d is Q8, Q4 or F8, whose rows are bytes and whole.
func (d DType) Quantised() bool { return d >= Q8 && d <= F8 }

// String returns the name on the command line: f32, f16, bf16, bool, q8, q4, f8, i32.
func (d DType) String() string { return d.info().name }

// UnitRoundoff returns u, half the distance between 1 and the next larger number of type d:
// 2^-24, 2^-11, 2^-8, and 2^-4 for F8. It is 0 for Bool and I32, which are exact, and for Q8 and Q4, whose
// steps depend on the row.
func (d DType) UnitRoundoff() float64 { return d.info().roundoff }

// Encode returns the bits of x as an F16 or BF16 number, rounded to nearest even; NaN remains
// NaN. For the other types it returns 0.
func (d DType) Encode(x float32) uint16 {
	switch d {
	case F16:
		return float16.Fromfloat32(x).Bits()
	case BF16:
		b := math.Float32bits(x)
		if x != x {
			return uint16(b>>16) | 0x40 // quiet, and never rounded up to infinity
		}
		return uint16((b + 0x7fff + b>>16&1) >> 16)
	}
	return 0
}

// Decode returns the exact number with the F16 or BF16 bits b. For the other types it returns
// 0.
func (d DType) Decode(b uint16) float32 {
	switch d {
	case F16:
		return float16.Frombits(b).Float32()
	case BF16:
		return math.Float32frombits(uint32(b) << 16)
	}
	return 0
}

// Round returns x rounded to nearest even to type d, as storing it does.
func (d DType) Round(x float32) float32 {
	if d == F16 || d == BF16 {
		return d.Decode(d.Encode(x))
	}
	return x
}
