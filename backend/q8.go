package backend

import (
	"encoding/binary"
	"fmt"
	"math"
)

// q8Lead is the size of the scale before each row of a Q8 tensor, in bytes.
const q8Lead = 4

// q8Smallest is the smallest maximum of a row whose scale is a normal number. Devices treat
// subnormal numbers as 0.
const q8Smallest = 0x1p-118

// QuantiseQ8 writes a row in the format of [Q8], its scale and then its integers:
//
//	scale = max|x|·(1/127)    n_i = x_i·(1/scale), rounded to the nearest integer, ties to even
//
// where 1/127, 1/scale and both products are rounded to float32 first. Where x_i/scale is
// within 2^-16 of a half, n_i may therefore be the integer on the other side of it.
//
// A row with a NaN or an Inf gets the scale NaN, so that all its elements read as NaN; a row
// whose elements are all below 2^-118 reads as zeros. dst has 4 bytes more than row has
// elements. Devices may round such quotients to the other side, too.
func QuantiseQ8(dst []byte, row []float32) {
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
	dst = dst[q8Lead:][:len(row)]
	if by == 0 {
		clear(dst)
		return
	}
	for i, x := range row {
		dst[i] = byte(int8(math.RoundToEven(float64(x * by))))
	}
}

// DequantiseQ8 reads a row that [QuantiseQ8] wrote: row_i = scale·n_i.
func DequantiseQ8(row []float32, src []byte) {
	scale := math.Float32frombits(binary.NativeEndian.Uint32(src))
	src = src[q8Lead:][:len(row)]
	for i, n := range src {
		row[i] = scale * float32(int8(n))
	}
}

// checkQ8 returns ErrShape unless the rows of a Q8 tensor are whole and their scales are
// aligned to 4 bytes.
func (t Tensor) checkQ8() error {
	if t.dtype != Q8 || t.shape.Elements() <= 0 {
		return nil
	}
	words := t.offset >= q8Lead && t.offset%4 == 0 && t.shape[Dim]%4 == 0
	for _, s := range t.strides[:Dim] {
		words = words && s%4 == 0
	}
	if !words || t.strides[Dim] != 1 {
		return fmt.Errorf("shape %v with strides %v at offset %d cannot be q8: rows must be whole and contiguous, of a multiple of 4 elements, and begin %d bytes after a multiple of 4: %w",
			t.shape, t.strides, t.offset, q8Lead, ErrShape)
	}
	return nil
}
