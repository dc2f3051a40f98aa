// Package view reads and writes the rows of tensors in host memory, of any type and strides.
package view

import (
	"encoding/binary"
	"fmt"
	"math"
	"unsafe"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// View is a tensor that is opened for one call: its memory as a slice of its
// type, its shape and its strides. The zero View is that of an absent tensor.
type View struct {
	DType  backend.DType
	F32    []float32
	Bits   []uint16 // F16, BF16
	Bools  []bool
	q8     []byte // from the scale of the first row on
	Shape  backend.Shape
	Stride backend.Strides
	Pages  [][]int32 // of a pool of pages: row s of batch b is in page Pages[b][s/Shape[Seq]]
}

// q8Lead is the size in bytes of the scale in front of a Q8 row.
const q8Lead = 4

// Operand is a tensor of a call, its name in errors, and the view of it to open.
type Operand struct {
	Name string
	T    backend.Tensor
	To   *View
}

// Pin pins the operands of a call, whose memory has the name where in errors, and opens
// their views. The caller unpins them when it returns no error.
func Pin(where string, out, in []Operand) (pinned backend.Pinned, err error) {
	var named [2][8]backend.Operand
	for i, list := range [2][]Operand{out, in} {
		for n, o := range list {
			named[i][n] = backend.Operand{Name: o.Name, Tensor: o.T}
		}
	}
	if err := pinned.Pin(nil, where, named[0][:len(out)], named[1][:len(in)]); err != nil {
		return pinned, err
	}
	for _, list := range [2][]Operand{out, in} {
		if err = OpenAll(list); err != nil {
			pinned.Unpin()
			return pinned, err
		}
	}
	return pinned, nil
}

// OpenAll opens the views of operands that are pinned.
func OpenAll(list []Operand) error {
	for i := range list {
		if err := list[i].To.open(list[i].Name, &list[i].T); err != nil {
			return err
		}
	}
	return nil
}

// Open returns the view of t, zero for the zero Tensor. Errors name the tensor: they are
// ErrDevice and ErrReleased.
func Open(name string, t backend.Tensor) (v View, err error) {
	err = v.open(name, &t)
	return v, err
}

func (v *View) open(name string, t *backend.Tensor) (err error) {
	if t.IsZero() {
		return nil
	}
	v.DType, v.Shape, v.Stride = t.DType(), t.Shape(), t.Strides()
	switch v.DType {
	case backend.F32:
		if v.F32 = hostData[float32](t); v.F32 == nil {
			v.F32, err = t.Float32s()
		}
	case backend.F16, backend.BF16:
		if v.Bits = hostData[uint16](t); v.Bits == nil {
			v.Bits, err = t.Bits()
		}
	case backend.Bool:
		if v.Bools = hostData[bool](t); v.Bools == nil {
			v.Bools, err = t.Bools()
		}
	default:
		v.q8, err = t.Q8Rows()
	}
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// hostData returns the memory of t from its first element on when that is host
// memory of type T, else nil. Unlike Tensor.Float32s it does not allocate.
func hostData[T any](t *backend.Tensor) []T {
	if !t.OnHost() {
		return nil
	}
	data, ok := t.Memory().Handle().([]T)
	if !ok {
		return nil
	}
	return data[min(t.Offset(), len(data)):]
}

// IsZero reports whether the tensor is absent.
func (v *View) IsZero() bool { return v.Shape == backend.Shape{} }

// Index returns the index of element (b, h, s, 0).
func (v *View) Index(b, h, s int) int {
	return b*v.Stride[backend.Batch] + h*v.Stride[backend.Heads] + s*v.Stride[backend.Seq]
}

// RowIndex is Index for a tensor that may lie in pages.
func (v *View) RowIndex(b, h, s int) int {
	if v.Pages == nil {
		return v.Index(b, h, s)
	}
	size := v.Shape[backend.Seq]
	return v.Index(int(v.Pages[b][s/size]), h, s%size)
}

// Adjacent returns the number of the n rows from s on that lie one stride apart: n, or those
// of the page of row s.
func (v *View) Adjacent(s, n int) int {
	if v.Pages == nil {
		return n
	}
	size := v.Shape[backend.Seq]
	return min(n, size-s%size)
}

// InPlace reports whether the kernels can read and write the rows of t in place:
// float32, adjacent along dim, rows that do not overlap. It depends on type, shape
// and strides only, so a plan can use it.
func InPlace(t *backend.Tensor) bool {
	shape, stride := t.Shape(), t.Strides()
	return t.DType() == backend.F32 &&
		(shape[backend.Dim] == 1 || stride[backend.Dim] == 1) &&
		(shape[backend.Seq] == 1 || stride[backend.Seq] >= shape[backend.Dim])
}

// RowStride returns the distance between rows as the kernels take it. The stride of one row of
// float32 may be anything.
func (v *View) RowStride() int {
	if v.F32 == nil {
		return v.Stride[backend.Seq]
	}
	return max(v.Stride[backend.Seq], v.Shape[backend.Dim])
}

// Pack copies elements [c0, c0+cols) of rows [s, s+n) as float32 to dst, whose
// rows are ld apart.
func (v *View) Pack(dst []float32, ld, b, h, s, n, c0, cols int) {
	step := v.Stride[backend.Dim]
	for r := range n {
		at := v.RowIndex(b, h, s+r) + c0*step
		row := dst[r*ld : r*ld+cols]
		switch {
		case v.DType == backend.F32 && step == 1:
			copy(row, v.F32[at:at+cols])
		case v.DType == backend.F32:
			CopyElements(row, 1, v.F32[at:], step, cols)
		case v.DType == backend.Q8:
			scale := math.Float32frombits(binary.NativeEndian.Uint32(v.q8[at-c0:]))
			for c, x := range v.q8[at+q8Lead : at+q8Lead+cols] {
				row[c] = scale * float32(int8(x))
			}
		case v.DType == backend.F16:
			for c := range row {
				row[c] = vec.F16ToF32(v.Bits[at+c*step])
			}
		default:
			for c := range row {
				row[c] = vec.BF16ToF32(v.Bits[at+c*step])
			}
		}
	}
}

// At returns element (b, h, s, c) as float32.
func (v *View) At(b, h, s, c int) float32 {
	var x [1]float32
	v.Pack(x[:], 1, b, h, s, 1, c, 1)
	return x[0]
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

// CopyRow copies row s of from, which has the same type and shape, to v.
func (v *View) CopyRow(from *View, b, h, s int) {
	i, j := v.Index(b, h, s), from.Index(b, h, s)
	n, di, dj := v.Shape[backend.Dim], v.Stride[backend.Dim], from.Stride[backend.Dim]
	switch v.DType {
	case backend.Q8:
		copy(v.q8[i:i+q8Lead+n], from.q8[j:])
	case backend.F32:
		CopyElements(v.F32[i:], di, from.F32[j:], dj, n)
	case backend.Bool:
		CopyElements(v.Bools[i:], di, from.Bools[j:], dj, n)
	default:
		CopyElements(v.Bits[i:], di, from.Bits[j:], dj, n)
	}
}

// Store writes row to elements [c0, c0+len(row)) of row s, rounded to v's type. For
// Q8 they must be the whole row.
func (v *View) Store(row []float32, b, h, s, c0 int) {
	step := v.Stride[backend.Dim]
	i := v.Index(b, h, s) + c0*step
	switch v.DType {
	case backend.F32:
		CopyElements(v.F32[i:], step, row, 1, len(row))
	case backend.Q8:
		backend.QuantiseQ8(v.q8[i:i+q8Lead+len(row)], row)
	default:
		for _, x := range row {
			v.Bits[i] = v.DType.Encode(x)
			i += step
		}
	}
}

// LoadRows copies rows [s, s+n) of v as float32 to dst, whose rows are ld apart,
// and zeros the elements between the row's own and ld.
func (v *View) LoadRows(k *vec.Kernels, dst []float32, ld, b, h, s, n int) {
	cols := v.Shape[backend.Dim]
	for n > 0 {
		m := v.Adjacent(s, n)
		v.Load(k, dst, ld, b, h, s, m, 0, cols)
		if cols < ld {
			for r := range m {
				clear(dst[r*ld+cols : (r+1)*ld])
			}
		}
		if n -= m; n > 0 {
			dst, s = dst[m*ld:], s+m
		}
	}
}

// Load is Pack for rows that lie one stride apart, with the kernels where they can
// convert whole vectors. Of Q8 rows c0 must be 0.
func (v *View) Load(k *vec.Kernels, dst []float32, ld, b, h, s, n, c0, cols int) {
	whole := 0 // columns that the kernels convert
	if v.F32 == nil && v.Stride[backend.Dim] == 1 {
		whole = cols / k.Lanes * k.Lanes
	}
	if whole > 0 {
		i, apart := v.RowIndex(b, h, s)+c0, v.Stride[backend.Seq]
		switch v.DType {
		case backend.F16:
			k.LoadF16(dst, ld, v.Bits[i:], apart, n, whole)
		case backend.BF16:
			k.LoadBF16(dst, ld, v.Bits[i:], apart, n, whole)
		default:
			k.LoadQ8(dst, ld, v.q8[i:], apart, n, whole)
		}
	}
	if whole < cols {
		v.Pack(dst[whole:], ld, b, h, s, n, c0+whole, cols-whole)
	}
}

// StoreRow writes row to row s of v, rounded to v's type. len(row) is a multiple of
// k.Lanes; the elements after those of v's row are padding.
func (v *View) StoreRow(k *vec.Kernels, row []float32, b, h, s int) {
	cols := v.Shape[backend.Dim]
	whole := 0
	if v.DType == backend.F16 && v.Stride[backend.Dim] == 1 {
		if whole = cols / k.Lanes * k.Lanes; whole > 0 {
			k.StoreF16(v.Bits[v.Index(b, h, s):], row[:whole])
		}
	}
	if whole < cols {
		v.Store(row[whole:cols], b, h, s, whole)
	}
}

// Element returns the kernels' name of v's type.
func (v *View) Element() vec.Element {
	switch v.DType {
	case backend.F16:
		return vec.F16
	case backend.BF16:
		return vec.BF16
	case backend.Q8:
		return vec.Q8
	}
	return vec.F32
}

// AppendRun appends the n rows from index i on; the kernels prefetch those from index next
// on.
func (v *View) AppendRun(runs []vec.Run, i, next, n int) []vec.Run {
	ld, d := v.Stride[backend.Seq], v.Shape[backend.Dim]
	switch {
	case v.F32 != nil:
		return vec.AppendRun(runs, v.F32[i:], ld, n, d, v.F32[next:])
	case v.Bits != nil:
		return vec.AppendRun(runs, v.Bits[i:], ld, n, d, v.Bits[next:])
	}
	return vec.AppendRun(runs, v.q8[i:], ld, n, d, v.q8[next:])
}

// Memory returns the bytes of v from its first element to its last; nil for no
// tensor.
func (v *View) Memory() []byte {
	if v.IsZero() {
		return nil
	}
	n := 1
	for i, l := range v.Shape {
		if l == 0 {
			return nil
		}
		n += (l - 1) * v.Stride[i]
	}
	switch v.DType {
	case backend.F32:
		return bytesOf(v.F32[:n])
	case backend.Bool:
		return bytesOf(v.Bools[:n])
	case backend.Q8:
		return v.q8[:q8Lead+n]
	default:
		return bytesOf(v.Bits[:n])
	}
}

// bytesOf returns the memory of s.
func bytesOf[T float32 | uint16 | bool](s []T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(s))), len(s)*int(unsafe.Sizeof(s[0])))
}
