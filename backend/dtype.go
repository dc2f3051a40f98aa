package backend

import (
	"fmt"
	"math"

	"github.com/seed90331342/attn/backend/internal/quantise"
	"github.com/x448/float16"
)

// DType is the element type of a [Tensor] in memory. Arithmetic is in float32 or wider for all types.
type DType uint8

const (
	F32  DType = iota // IEEE 754 binary32
	F16               // IEEE 754 binary16, stored as its bits
	BF16              // the upper half of a binary32, stored as its bits
	Bool              // one byte per element, 0 or 1, for masks; true means visible
	// Q8 is one signed byte per element and one float32 scale per row of D elements, in the 4 bytes before the row: x =
	// scale·integer. Only keys and values have it. D is a multiple of 4; strides and offsets are in bytes and multiples
	// of 4. The offset is that of the first integer, not of its scale.
	Q8
	// Q4 is ggml's q4_0: 18 bytes for each 32 elements of a row, x = scale·(n-8). The first 2
	// are the scale, a little-endian float16; in byte i of the others, the lower 4 bits are n
	// of element i and the upper 4 that of element 16+i. Only keys and values have it. D is a
	// multiple of 32; strides, except the last, and offsets are in bytes and even.
	Q4
	// F8 is e4m3fn, one byte per element: a sign, 4 bits of exponent with bias 7 and 3 of fraction. The largest number
	// is 448, the least subnormal one 2^-9; 0x7f and 0xff are NaN, and there is no infinity. Only keys and values have
	// it. D, strides, except the last, and offsets are multiples of 4.
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

// Size returns the size of an element in bytes; for Q8 without the scale, for Q4 that of the unit of offsets, a byte.
func (d DType) Size() int { return d.info().size }

// Contiguous returns the strides of a tensor of shape s stored row by row, and the offset of its first element.
func (d DType) Contiguous(s Shape) (st Strides, offset int) {
	row := d.Row(s[Dim])
	return Strides{s[Heads] * s[Seq] * row, s[Seq] * row, row, 1}, d.Lead()
}

// Row returns the least distance between rows of dim elements, in the units of strides; for Q8 with the scale.
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

// Bytes returns the size of a tensor of shape s stored row by row, or -1 when [Shape.Elements] is -1.
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

// UnitRoundoff returns u, half the distance between 1 and the next larger number of type d: 2^-24, 2^-11, 2^-8, and
// 2^-4 for F8. It is 0 for Bool and I32, which are exact, and for Q8 and Q4, whose steps depend on the row.
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

// Decode returns the exact number with the F16 or BF16 bits b. For the other types it returns 0.
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

// Quantise writes a row in the format of d. In [Q8] that is its scale and then its integers:
//
//	scale = max|x|·(1/127)    n_i = x_i·(1/scale), rounded to the nearest integer, ties to even
//
// where 1/127, 1/scale and both products are rounded to float32 first. Where x_i/scale is
// within 2^-16 of a half, n_i may therefore be the integer on the other side of it. In [Q4] each
// 32 elements have a scale, with the element x_m of largest magnitude, the first of equals:
//
//	scale = x_m/-8    n_i = min(15, ⌊x_i·(1/scale) + 8.5⌋)
//
// and each operation is rounded to float32, the scale to float16 after that. In [F8] each element
// is rounded to nearest even, and to ±448 where it is larger, Inf too; NaN remains NaN. Packages cpu and gpu
// write these integers on every device. Other drivers may round such quotients to the other side.
//
// Elements that share a scale with a NaN, an Inf or a scale too large for its type read as NaN;
// those below 2^-118 in Q8, and those whose scale rounds to 0 in Q4, read as zeros. dst has
// d.Row(len(row)) bytes. For other types Quantise does nothing.
func (d DType) Quantise(dst []byte, row []float32) {
	switch d {
	case Q8:
		quantise.Q8(dst, row)
	case Q4:
		quantise.Q4(dst, row)
	case F8:
		quantise.F8(dst, row)
	}
}

// Dequantise reads a row that Quantise wrote: row_i = scale·n_i, in Q4 scale·(n_i - 8), or the number in F8, exactly.
func (d DType) Dequantise(row []float32, src []byte) {
	switch d {
	case Q8:
		quantise.FromQ8(row, src)
	case Q4:
		quantise.FromQ4(row, src)
	case F8:
		quantise.FromF8(row, src)
	}
}

// checkRows returns ErrShape unless the rows of a Q8, Q4 or F8 tensor are whole, and aligned to 4 or 2 bytes.
func (t Tensor) checkRows() error {
	if !t.dtype.Quantised() || t.shape.Elements() <= 0 {
		return nil
	}
	unit, multiple, rule := 4, 4, "of a multiple of 4 elements, and begin 4 bytes after a multiple of 4"
	switch t.dtype {
	case F8:
		rule = "of a multiple of 4 elements, and begin at a multiple of 4"
	case Q4:
		unit, multiple, rule = 2, quantise.Q4Values, "of a multiple of 32 elements, and begin at a multiple of 2"
	}
	aligned := t.offset >= t.dtype.Lead() && t.offset%unit == 0 && t.shape[Dim]%multiple == 0
	for _, s := range t.strides[:Dim] {
		aligned = aligned && s%unit == 0
	}
	if !aligned || t.strides[Dim] != 1 {
		return fmt.Errorf("shape %v with strides %v at offset %d cannot be %v: rows must be whole and contiguous, %s: %w",
			t.shape, t.strides, t.offset, t.dtype, rule, ErrShape)
	}
	return nil
}
