package backend

import (
	"fmt"

	"github.com/seed90331342/attn/backend/internal/quantise"
)

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
