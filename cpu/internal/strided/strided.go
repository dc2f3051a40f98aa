// Package strided reads and writes the rows of tensors in host memory, of any type and strides.
package strided

import (
	"encoding/binary"
	"math"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// Tensor is a tensor that is opened for one call: its memory as a slice of its
// type, its shape and its strides. The zero Tensor is that of an absent tensor.
type Tensor struct {
	DType  backend.DType
	F32    []float32
	Bits   []uint16 // F16, BF16
	Bools  []bool
	Ints   []int32 // I32
	Bytes  []byte  // Q8, from the scale of the first row on, Q4 and F8
	Shape  backend.Shape
	Stride backend.Strides
	Pages  [][]int32 // of a pool of pages: row s of batch b is in page Pages[b][s/Shape[Seq]]
	Listed [][]int32 // unless nil, what stands for row s of batch b is row Listed[b][s]
}

// Of returns the view of t, which is in host memory; zero for the zero Tensor. Call
// [backend.Pinned.Pin], which refuses other tensors, before you use its elements.
func Of(t *backend.Tensor) (v Tensor) {
	if t.IsZero() {
		return v
	}
	v.DType, v.Shape, v.Stride = t.DType(), t.Shape(), t.Strides()
	if v.Shape[backend.Seq] == 1 && v.DType == backend.F32 {
		v.Stride[backend.Seq] = v.Shape[backend.Dim] // that of one row may be anything; kernels want this
	}
	switch memory := t.Memory().Handle().(type) {
	case []float32: // an empty tensor may begin after its end
		v.F32 = memory[min(t.Offset(), len(memory)):]
	case []uint16:
		v.Bits = memory[min(t.Offset(), len(memory)):]
	case []int32:
		v.Ints = memory[min(t.Offset(), len(memory)):]
	case []bool:
		v.Bools = memory[min(t.Offset(), len(memory)):]
	case []byte:
		v.Bytes = memory[min(t.Offset()-v.DType.Lead(), len(memory)):]
	}
	return v
}

// IsZero reports whether the tensor is absent.
func (v *Tensor) IsZero() bool { return v.Shape == backend.Shape{} }

// Index returns the index of element (b, h, s, 0).
func (v *Tensor) Index(b, h, s int) int {
	return b*v.Stride[backend.Batch] + h*v.Stride[backend.Heads] + s*v.Stride[backend.Seq]
}

// RowIndex is Index for a tensor that may lie in pages and be listed.
func (v *Tensor) RowIndex(b, h, s int) int {
	if v.Listed != nil {
		s = int(v.Listed[b][s])
	}
	if v.Pages == nil {
		return v.Index(b, h, s)
	}
	size := v.Shape[backend.Seq]
	return v.Index(int(v.Pages[b][s/size]), h, s%size)
}

// InPlace reports whether the kernels can read and write the rows of t in place: float32, adjacent along dim, rows
// that do not overlap. It depends on type, shape and strides only, so a plan can use it.
func InPlace(t *backend.Tensor) bool {
	shape, stride := t.Shape(), t.Strides()
	return t.DType() == backend.F32 &&
		(shape[backend.Dim] == 1 || stride[backend.Dim] == 1) &&
		(shape[backend.Seq] == 1 || stride[backend.Seq] >= shape[backend.Dim])
}

// RowsInPlace reports whether kernels with query rows as lanes read the rows of t, K or V of c, in place. Pages of fewer
// keys, or of odd numbers of them, would take kernels for few keys: they are copied, and so are listed keys.
func RowsInPlace(t *backend.Tensor, c *backend.Call) bool {
	return InPlace(t) && c.Listed == nil && (c.Pages == nil || t.Shape()[backend.Seq]%16 == 0)
}

// KeysInPlace is RowsInPlace for kernels with keys as lanes: whole vectors of adjacent elements in rows of a multiple of
// 16 bytes, and whole groups of keys in each page.
func KeysInPlace(k *vec.Kernels, t *backend.Tensor, c *backend.Call) bool {
	d, dtype := t.Shape()[backend.Dim], t.DType()
	return d%k.Lanes == 0 && k.Reads(dtype) && d*dtype.Size()%16 == 0 && t.Strides()[backend.Dim] == 1 &&
		(dtype != backend.F32 || InPlace(t)) && c.Listed == nil && (c.Pages == nil || t.Shape()[backend.Seq]%k.Lanes == 0)
}

// Load copies elements [c0, c0+cols) of rows [s, s+n) as float32 to dst, whose rows are ld
// apart, and zeros what follows them there. k converts whole vectors. Of Q8, Q4 and F8 rows c0 is 0.
func (v *Tensor) Load(k *vec.Kernels, dst []float32, ld, b, h, s, n, c0, cols int) {
	apart, step := v.Stride[backend.Seq], v.Stride[backend.Dim]
	if v.Listed != nil && v.Pages == nil && v.DType == backend.F32 && step == 1 {
		v.gather(dst, ld, b, h, s, n, c0, cols)
		return
	}
	for m, first := 0, s; n > 0; n, s = n-m, s+m {
		if m = v.adjacent(s, n); v.Listed != nil && (s-first)%prefetched == 0 {
			v.prefetch(b, h, s, s == first)
		}
		at, whole := v.RowIndex(b, h, s)+c0*step, 0
		if v.DType != backend.F32 && step == 1 {
			whole = cols / k.Lanes * k.Lanes
		}
		switch {
		case whole == 0:
		case v.DType.Quantised():
			vec.Load(k, v.DType, dst, ld, v.Bytes[at:], apart, m, whole)
		default:
			vec.Load(k, v.DType, dst, ld, v.Bits[at:], apart, m, whole)
		}
		if v.DType == backend.F32 && step == 1 && cols == ld && apart == ld { // one copy is faster than one of each row
			whole = copy(dst[:m*ld], v.F32[at:])
		}
		for r := 0; r < m && whole < ld; r++ {
			row := dst[r*ld : (r+1)*ld]
			if v.DType == backend.F32 {
				CopyElements(row, 1, v.F32[at+r*apart:], step, cols)
			} else {
				for c := whole; c < cols; c++ {
					row[c] = v.At(b, h, s+r, c0+c)
				}
			}
			clear(row[cols:])
		}
		dst = dst[min(m*ld, len(dst)):]
	}
}

// gather is Load for listed rows of float32.
func (v *Tensor) gather(dst []float32, ld, b, h, s, n, c0, cols int) {
	at, apart := v.Index(b, h, 0)+c0, v.Stride[backend.Seq]
	for r, key := range v.Listed[b][s : s+n] {
		if r%prefetched == 0 {
			v.prefetch(b, h, s+r, r == 0)
		}
		row := dst[r*ld : (r+1)*ld]
		copy(row[:cols], v.F32[at+int(key)*apart:])
		clear(row[cols:])
	}
}

// prefetched is the number of rows that prefetch takes at a time. Three times as many lie between them and those in use.
const prefetched = 16

// prefetch prefetches listed rows after the next ones from s on, and with all set these too. Without, each read would
// wait for memory, because no processor foresees where the next row is.
func (v *Tensor) prefetch(b, h, s int, all bool) {
	from, to := s+3*prefetched, s+4*prefetched
	if all {
		from = s
	}
	list := v.Listed[b]
	v.prefetchRows(v.Index(b, h, 0), list[min(from, len(list)):min(to, len(list))])
}

// Prefetch prefetches row s of head h of batch b.
func (v *Tensor) Prefetch(b, h, s int) { v.prefetchRows(v.Index(b, h, s), firstRow) }

var firstRow = []int32{0} // allocated once

// prefetchRows prefetches the listed ones of the rows from index at on, unless they are in pages.
func (v *Tensor) prefetchRows(at int, list []int32) {
	ld, d := v.Stride[backend.Seq], v.DType.Row(v.Shape[backend.Dim])
	switch {
	case v.Pages != nil:
	case v.F32 != nil:
		vec.PrefetchRows(v.F32[at:], list, ld, d)
	case v.Bits != nil:
		vec.PrefetchRows(v.Bits[at:], list, ld, d)
	default:
		vec.PrefetchRows(v.Bytes[at:], list, ld, d)
	}
}

// adjacent returns the number of the n rows from s on that lie one stride apart: n, or those of the page of row s.
func (v *Tensor) adjacent(s, n int) int {
	if v.Listed != nil {
		return 1
	}
	if v.Pages == nil {
		return n
	}
	size := v.Shape[backend.Seq]
	return min(n, size-s%size)
}

// LoadRows is Load for whole rows.
func (v *Tensor) LoadRows(k *vec.Kernels, dst []float32, ld, b, h, s, n int) {
	v.Load(k, dst, ld, b, h, s, n, 0, v.Shape[backend.Dim])
}

// CopyRows copies rows [s, s+n) of v, whose memory is all, to dst, whose rows are ld apart, and
// zeros what follows them there. Those of bytes include their scales.
func CopyRows[T uint16 | byte](v *Tensor, dst, all []T, ld, b, h, s, n int) {
	cols, step := v.DType.Row(v.Shape[backend.Dim]), v.Stride[backend.Dim]
	for m := 0; n > 0; n, s = n-m, s+m {
		m = v.adjacent(s, n)
		from := all[v.RowIndex(b, h, s):]
		if ld == cols && v.Stride[backend.Seq] == ld && step == 1 {
			copy(dst[:m*ld], from)
		} else {
			for r := range m {
				CopyElements(dst[r*ld:], 1, from[r*v.Stride[backend.Seq]:], step, cols)
				clear(dst[r*ld+cols : (r+1)*ld])
			}
		}
		dst = dst[m*ld:]
	}
}

// At returns element (b, h, s, c) as float32.
func (v *Tensor) At(b, h, s, c int) float32 {
	row := v.RowIndex(b, h, s)
	at := row + c*v.Stride[backend.Dim]
	switch v.DType {
	case backend.F32:
		return v.F32[at]
	case backend.F16, backend.BF16:
		return v.DType.Decode(v.Bits[at])
	case backend.F8:
		var x [1]float32
		v.DType.Dequantise(x[:], v.Bytes[at:])
		return x[0]
	case backend.Q4:
		block := v.Bytes[row+v.DType.Row(c):]
		return backend.F16.Decode(binary.LittleEndian.Uint16(block)) * float32(int(block[2+c%16]>>(c/4&4)&15)-8)
	}
	return math.Float32frombits(binary.NativeEndian.Uint32(v.Bytes[row:])) * float32(int8(v.Bytes[at+vec.Q8Lead]))
}

// CopyElements copies n elements that lie dj apart to where they lie di apart.
func CopyElements[T any](dst []T, di int, src []T, dj, n int) {
	if di == 1 && dj == 1 {
		copy(dst[:n], src)
		return
	}
	for c := range n {
		dst[c*di] = src[c*dj]
	}
}

// Store writes row to elements [c0, c0+len(row)) of row s, rounded to v's type. For Q8, Q4 and F8 they must be the whole row.
func (v *Tensor) Store(k *vec.Kernels, row []float32, b, h, s, c0 int) {
	step := v.Stride[backend.Dim]
	i := v.RowIndex(b, h, s) + c0*step
	switch v.DType {
	case backend.F32:
		CopyElements(v.F32[i:], step, row, 1, len(row))
		return
	case backend.Q8, backend.Q4, backend.F8:
		v.DType.Quantise(v.Bytes[i:i+v.DType.Row(len(row))], row)
		return
	}
	if whole := len(row) / k.Lanes * k.Lanes; whole > 0 && step == 1 {
		k.Store(v.DType, v.Bits[i:], row[:whole])
		i, row = i+whole, row[whole:]
	}
	for _, x := range row {
		v.Bits[i] = v.DType.Encode(x)
		i += step
	}
}

// Runs returns rows [lo, hi) of head h, in the memory of *runs. The kernels prefetch as many rows from prefetchFrom on, if
// that is before row prefetchEnd.
func (v *Tensor) Runs(runs *[]vec.Run, b, h, lo, hi, prefetchFrom, prefetchEnd int) []vec.Run {
	n := hi - lo
	*runs = (*runs)[:0]
	if v.Pages == nil {
		if prefetchFrom >= prefetchEnd {
			prefetchFrom = lo
		}
		v.appendRun(runs, v.Index(b, h, lo), v.Index(b, h, prefetchFrom), n)
		return *runs
	}
	// Each run prefetches a share of the four quarters of the next rows, and has as many rows as to lie, like these
	// quarters, in one page each.
	size, ld, stride := v.Shape[backend.Seq], v.Stride[backend.Seq], v.Stride[backend.Batch]
	most, quarter, bytes := size&-size, n/4, v.DType.Size()
	pages, head, last := v.Pages[b], h*v.Stride[backend.Heads], (prefetchEnd-1)/size
	from := pagedRow{lo / size, lo % size}
	var ahead [4]pagedRow
	for q := range ahead {
		r := prefetchFrom + q*quarter
		ahead[q] = pagedRow{r / size, r % size}
	}
	for m := most - from.row%most; n > 0; m = most {
		m = min(m, n)
		at := int(pages[from.page])*stride + head + from.row*ld
		to := [4]int{at, at, at, at}
		for q := range ahead {
			if a := &ahead[q]; a.page <= last {
				to[q] = int(pages[a.page])*stride + head + a.row*ld
				a.add(m/4, size)
			}
		}
		v.appendRun(runs, at, to[0], m)
		(*runs)[len(*runs)-1].Spread(bytes*(to[1]-to[0]), bytes*(to[2]-to[0]), bytes*(to[3]-to[0]))
		from.add(m, size)
		n -= m
	}
	vec.Chain(*runs)
	return *runs
}

// pagedRow is a row of a page.
type pagedRow struct{ page, row int }

// add moves r by n rows, at most the size of a page.
func (r *pagedRow) add(n, size int) {
	if r.row += n; r.row >= size {
		r.page, r.row = r.page+1, r.row-size
	}
}

// appendRun appends the n rows from index i on; the kernels prefetch those from index next on.
func (v *Tensor) appendRun(runs *[]vec.Run, i, next, n int) {
	ld, d := v.Stride[backend.Seq], v.DType.Row(v.Shape[backend.Dim])
	switch {
	case v.F32 != nil:
		*runs = vec.AppendRun(*runs, v.F32[i:], ld, n, d, v.F32[next:])
	case v.Bits != nil:
		*runs = vec.AppendRun(*runs, v.Bits[i:], ld, n, d, v.Bits[next:])
	default:
		*runs = vec.AppendRun(*runs, v.Bytes[i:], ld, n, d, v.Bytes[next:])
	}
}
