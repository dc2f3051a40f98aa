package cpu

import (
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// loadRows copies rows [s, s+n) of v as float32 to dst, whose rows are ld apart,
// and zeros the elements between the row's own and ld.
func loadRows(k *vec.Kernels, v *view, dst []float32, ld, b, h, s, n int) {
	for n > 0 {
		m := v.together(s, n)
		loadTogether(k, v, dst, ld, b, h, s, m)
		if n -= m; n > 0 {
			dst, s = dst[m*ld:], s+m
		}
	}
}

// loadTogether is loadRows for rows that are together.
func loadTogether(k *vec.Kernels, v *view, dst []float32, ld, b, h, s, n int) {
	cols := v.shape[backend.Dim]
	whole := 0 // columns that the kernels convert
	if v.bits != nil && v.stride[backend.Dim] == 1 {
		whole = cols / k.Lanes * k.Lanes
	}
	if whole > 0 {
		from, apart := v.bits[v.rowIndex(b, h, s):], v.stride[backend.Seq]
		if v.dtype == backend.F16 {
			k.LoadF16(dst, ld, from, apart, n, whole)
		} else {
			k.LoadBF16(dst, ld, from, apart, n, whole)
		}
	}
	if whole < cols {
		v.pack(dst[whole:], ld, b, h, s, n, whole, cols-whole)
	}
	if cols < ld {
		for r := range n {
			clear(dst[r*ld+cols : (r+1)*ld])
		}
	}
}

// storeRow writes row, whose length beyond v's row is padding, to row s of v,
// rounded to v's type. len(row) is a multiple of k.Lanes; it is overwritten.
func storeRow(k *vec.Kernels, v *view, row []float32, b, h, s int) {
	cols := v.shape[backend.Dim]
	whole := 0
	if v.dtype == backend.F16 && v.stride[backend.Dim] == 1 {
		if whole = cols / k.Lanes * k.Lanes; whole > 0 {
			k.StoreF16(v.bits[v.index(b, h, s):], row[:whole])
		}
	}
	if whole < cols {
		v.store(row[whole:cols], b, h, s, whole)
	}
}

// bitRows returns the rows from s on of a tensor of 16 bit numbers as they lie,
// with the distance between rows; nothing for another tensor.
func (v *view) bitRows(b, h, s int) (rows []uint16, ld int) {
	if v.bits == nil {
		return nil, 0
	}
	return v.bits[v.index(b, h, s):], v.stride[backend.Seq]
}
