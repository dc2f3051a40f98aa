package backend

import (
	"encoding/binary"
	"fmt"
	"math"
)

// q8Lead is the bytes of the scale in front of a row of a Q8 tensor.
const q8Lead = 4

// q8Smallest is the largest absolute value of a row below which its scale would be
// subnormal, which devices take for 0.
const q8Smallest = 0x1p-118

// QuantiseQ8 writes a row as [Q8] keeps it, its scale and then its integers:
//
//	scale = max|x|/127    n_i = x_i/scale, rounded to nearest even
//
// A row with a NaN or an Inf gets a NaN as scale, so that all of it reads as NaN; one
// without anything beyond 2^-118 reads as zeros. dst holds 4 bytes more than row has
// elements. Other devices may round a quotient that lies within 1e-6 of a half the
// other way.
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

// DequantiseQ8 reads what [QuantiseQ8] writes: row_i = scale·n_i.
func DequantiseQ8(row []float32, src []byte) {
	scale := math.Float32frombits(binary.NativeEndian.Uint32(src))
	src = src[q8Lead:][:len(row)]
	for i, n := range src {
		row[i] = scale * float32(int8(n))
	}
}

// checkQ8 checks what a Q8 tensor's place must be like, for its rows to be whole and
// their scales to lie on words.
func (t Tensor) checkQ8() error {
	if t.dtype != Q8 || t.shape.Elements() <= 0 {
		return nil
	}
	words := t.offset >= q8Lead && t.offset%4 == 0 && t.shape[Dim]%4 == 0
	for _, s := range t.strides[:Dim] {
		words = words && s%4 == 0
	}
	if !words || t.strides[Dim] != 1 {
		return fmt.Errorf("shape %v with strides %v at offset %d cannot be q8: rows are whole, of a multiple of 4 elements side by side, each %d bytes after a multiple of 4: %w",
			t.shape, t.strides, t.offset, q8Lead, ErrShape)
	}
	return nil
}
