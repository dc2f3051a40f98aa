package backend

import (
	"fmt"

	"github.com/seed90331342/attn/backend/internal/quantise"
)

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
func QuantiseQ8(dst []byte, row []float32) { quantise.Q8(dst, row) }

// DequantiseQ8 reads a row that [QuantiseQ8] wrote: row_i = scale·n_i.
func DequantiseQ8(row []float32, src []byte) { quantise.FromQ8(row, src) }

// QuantiseQ4 writes a row in the format of [Q4], block by block of 32 elements:
//
//	scale = x_m/-8 with the largest |x_m|, the first of equals    n_i = min(15, ⌊x_i·(1/scale) + 8.5⌋)
//
// rounded to float32 after each operation. The scale is rounded to float16 after that.
//
// A block with a NaN or an Inf, or whose scale exceeds the largest float16, gets the scale NaN, so
// that all its elements read as NaN. One whose scale rounds to 0 reads as zeros. dst has 18 bytes
// for each 32 elements of row. Devices may round quotients within 2^-16 of a half to the other side.
func QuantiseQ4(dst []byte, row []float32) { quantise.Q4(dst, row) }

// DequantiseQ4 reads a row that [QuantiseQ4] wrote: row_i = scale·(n_i - 8), exactly.
func DequantiseQ4(row []float32, src []byte) { quantise.FromQ4(row, src) }

// checkRows returns ErrShape unless the rows of a Q8 or Q4 tensor are whole, and aligned to 4 or 2 bytes.
func (t Tensor) checkRows() error {
	if !t.dtype.Quantised() || t.shape.Elements() <= 0 {
		return nil
	}
	unit, multiple, rule := 4, 4, "of a multiple of 4 elements, and begin 4 bytes after a multiple of 4"
	if t.dtype == Q4 {
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
