// Package quantise converts rows of float32 to integers with scales or to 8-bit numbers, and back.
package quantise

import (
	"encoding/binary"
	"math"

	"github.com/x448/float16"
)

// The sizes in bytes of the scale before a row of Q8, and of a block of Q4, and the elements of a block.
const (
	Q8Lead   = 4
	Q4Bytes  = 2 + Q4Values/2
	Q4Values = 32
)

// q8Smallest is the smallest maximum of a row whose scale is a normal number. Devices treat
// subnormal numbers as 0.
const q8Smallest = 0x1p-118

// Q8 writes the scale of row and its integers.
func Q8(dst []byte, row []float32) {
	var most float32
	for _, x := range row {
		most = max(most, x, -x) // NaN stays
	}
	scale, by := most*(1./127), float32(0)
	switch {
	case !(most <= math.MaxFloat32):
		scale = float32(math.NaN())
	case most < q8Smallest:
		scale = 0
	default:
		by = 1 / scale
	}
	binary.NativeEndian.PutUint32(dst, math.Float32bits(scale))
	dst = dst[Q8Lead:][:len(row)]
	if by == 0 {
		clear(dst)
		return
	}
	for i, x := range row {
		dst[i] = byte(int8(math.RoundToEven(float64(x * by))))
	}
}

// FromQ8 reads a row that [Q8] wrote.
func FromQ8(row []float32, src []byte) {
	scale := math.Float32frombits(binary.NativeEndian.Uint32(src))
	src = src[Q8Lead:][:len(row)]
	for i, n := range src {
		row[i] = scale * float32(int8(n))
	}
}

// Q4 writes the blocks of row, whose length is a multiple of [Q4Values].
func Q4(dst []byte, row []float32) {
	for ; len(row) > 0; row, dst = row[Q4Values:], dst[Q4Bytes:] {
		to, x := (*[Q4Bytes]byte)(dst), (*[Q4Values]float32)(row)
		var largest, nan float32
		for _, y := range x {
			if max(y, -y) > max(largest, -largest) {
				largest = y
			}
			nan += y - y
		}
		d := largest / -8
		scale, by := float16.Fromfloat32(d+nan), 1/d
		switch {
		case scale.IsInf(0) || scale.IsNaN():
			scale, by = float16.NaN(), 0
		case scale&0x7fff == 0:
			scale, by = 0, 0
		}
		binary.LittleEndian.PutUint16(to[:], scale.Bits())
		for i := range Q4Values / 2 {
			to[2+i] = q4Integer(x[i], by) | q4Integer(x[Q4Values/2+i], by)<<4
		}
	}
}

// q4Integer returns the integer of x, plus 8. The conversion keeps the compiler from fusing product and sum.
func q4Integer(x, by float32) byte {
	if by == 0 {
		return 8
	}
	return min(15, byte(float32(x*by)+8.5))
}

// FromQ4 reads a row that [Q4] wrote.
func FromQ4(row []float32, src []byte) {
	for ; len(row) > 0; row, src = row[Q4Values:], src[Q4Bytes:] {
		scale := float16.Frombits(binary.LittleEndian.Uint16(src)).Float32()
		for i, n := range src[2:Q4Bytes] {
			row[i] = scale * float32(int(n&15)-8)
			row[Q4Values/2+i] = scale * float32(int(n>>4)-8)
		}
	}
}

// The float32 bits of the largest number of e4m3fn, 448, and of its least normal one, 2^-6.
const (
	f8Largest = 0x43e00000
	f8Normal  = 0x3c800000
)

// F8 writes row as e4m3fn, rounded to nearest even. Numbers above 448 become 448, NaN becomes 0x7f.
func F8(dst []byte, row []float32) {
	for i, x := range row {
		bits := math.Float32bits(x)
		n := bits & 0x7fffffff
		switch {
		case x != x:
			n = 0x7f
		case n >= f8Largest:
			n = 0x7e
		case n < f8Normal: // the sum rounds to steps of 2^-9, which its low bits count
			n = math.Float32bits(math.Float32frombits(n)+0x1p14) - math.Float32bits(0x1p14)
		default: // the exponent's bias becomes 7
			n = (n+0x7ffff+n>>20&1)>>20 - 120<<3
		}
		dst[i] = byte(bits>>24&0x80 | n)
	}
}

// fromF8 has the number of each code: that of the float16 with the same exponent and fraction, times 2^8 because its
// bias is 15, not 7.
var fromF8 = func() (all [256]float32) {
	for i := range all {
		all[i] = 0x1p8 * float16.Frombits(uint16(i&0x80<<8|i&0x7f<<7)).Float32()
	}
	all[0x7f], all[0xff] = float32(math.NaN()), float32(math.Copysign(math.NaN(), -1))
	return all
}()

// FromF8 reads a row of e4m3fn.
func FromF8(row []float32, src []byte) {
	for i, n := range src[:len(row)] {
		row[i] = fromF8[n]
	}
}
