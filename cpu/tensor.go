package cpu

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// view is a tensor that is opened for one call: its memory as a slice of its
// type, its shape and its strides. The zero view is that of an absent tensor.
type view struct {
	dtype  backend.DType
	f32    []float32 // F32
	bits   []uint16  // F16, BF16
	bools  []bool    // Bool
	q8     []byte    // Q8, from the scale of the first row on
	shape  backend.Shape
	stride backend.Strides
	pages  [][]int32 // of a pool of pages: row s of batch b is in page pages[b][s/shape[Seq]]
}

// q8Lead is the size in bytes of the scale in front of a Q8 row.
const q8Lead = 4

// operand is a tensor of a call, its name in errors, and the view of it to open.
type operand struct {
	name string
	t    backend.Tensor
	to   *view
}

// openOperands pins the operands of a call and opens their views. The caller
// unpins them when it returns no error.
func openOperands(out, in []operand) (pinned backend.Pinned, err error) {
	var named [2][8]backend.Operand
	for i, list := range [2][]operand{out, in} {
		for n, o := range list {
			named[i][n] = backend.Operand{Name: o.name, Tensor: o.t}
		}
	}
	if err := pinned.Pin(nil, where, named[0][:len(out)], named[1][:len(in)]); err != nil {
		return pinned, err
	}
	for _, list := range [2][]operand{out, in} {
		if err = openViews(list); err != nil {
			pinned.Unpin()
			return pinned, err
		}
	}
	return pinned, nil
}

// openViews opens the views of operands that are pinned.
func openViews(list []operand) (err error) {
	for i := range list {
		if err = list[i].to.open(list[i].name, &list[i].t); err != nil {
			return err
		}
	}
	return nil
}

// openView returns the view of t, as open makes it.
func openView(name string, t backend.Tensor) (v view, err error) {
	err = v.open(name, &t)
	return v, err
}

// open makes v, a zero view, the view of t; the zero Tensor leaves it zero. Errors name the
// tensor: they are ErrDevice and ErrReleased.
func (v *view) open(name string, t *backend.Tensor) (err error) {
	if t.IsZero() {
		return nil
	}
	v.dtype, v.shape, v.stride = t.DType(), t.Shape(), t.Strides()
	switch v.dtype {
	case backend.F32:
		if v.f32 = hostData[float32](t); v.f32 == nil {
			v.f32, err = t.Float32s()
		}
	case backend.F16, backend.BF16:
		if v.bits = hostData[uint16](t); v.bits == nil {
			v.bits, err = t.Bits()
		}
	case backend.Bool:
		if v.bools = hostData[bool](t); v.bools == nil {
			v.bools, err = t.Bools()
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

// isZero reports whether the tensor is absent.
func (v *view) isZero() bool { return v.shape == backend.Shape{} }

// index returns the index of element (b, h, s, 0).
func (v *view) index(b, h, s int) int {
	return b*v.stride[backend.Batch] + h*v.stride[backend.Heads] + s*v.stride[backend.Seq]
}

// rowIndex is index for a tensor that may lie in pages.
func (v *view) rowIndex(b, h, s int) int {
	if v.pages == nil {
		return v.index(b, h, s)
	}
	size := v.shape[backend.Seq]
	return v.index(int(v.pages[b][s/size]), h, s%size)
}

// adjacent returns the number of the n rows from s on that lie one stride apart: n, or those
// of the page of row s.
func (v *view) adjacent(s, n int) int {
	if v.pages == nil {
		return n
	}
	size := v.shape[backend.Seq]
	return min(n, size-s%size)
}

// rowsInPlace reports whether the kernels can read and write the rows of t in place:
// float32, adjacent along dim, rows that do not overlap. It depends on type, shape
// and strides only, so a plan can use it.
func rowsInPlace(t *backend.Tensor) bool {
	shape, stride := t.Shape(), t.Strides()
	return t.DType() == backend.F32 &&
		(shape[backend.Dim] == 1 || stride[backend.Dim] == 1) &&
		(shape[backend.Seq] == 1 || stride[backend.Seq] >= shape[backend.Dim])
}

// rowsAt returns the rows from s on, with their leading dimension, for a tensor that
// is rowsInPlace.
func (v *view) rowsAt(b, h, s int) (rows []float32, ld int) {
	return v.f32[v.index(b, h, s):], v.rowStride()
}

// rowStride returns the distance between the rows of a tensor that is rowsInPlace. Where there
// is one row, the stride may be anything.
func (v *view) rowStride() int { return max(v.stride[backend.Seq], v.shape[backend.Dim]) }

// pack copies elements [c0, c0+cols) of rows [s, s+n) as float32 to dst, whose
// rows are ld apart.
func (v *view) pack(dst []float32, ld, b, h, s, n, c0, cols int) {
	step := v.stride[backend.Dim]
	for r := range n {
		at := v.rowIndex(b, h, s+r) + c0*step
		row := dst[r*ld : r*ld+cols]
		switch {
		case v.dtype == backend.Q8:
			scale := q8Scale(v.q8[at-c0:])
			for c, x := range v.q8[at+q8Lead : at+q8Lead+cols] {
				row[c] = scale * float32(int8(x))
			}
		case v.dtype == backend.F32 && step == 1:
			copy(row, v.f32[at:at+cols])
		case v.dtype == backend.F32:
			for c := range row {
				row[c] = v.f32[at+c*step]
			}
		case v.dtype == backend.F16 && step == 1:
			for c, x := range v.bits[at : at+cols] {
				row[c] = vec.F16ToF32(x)
			}
		case v.dtype == backend.F16:
			for c := range row {
				row[c] = vec.F16ToF32(v.bits[at+c*step])
			}
		case v.dtype == backend.BF16 && step == 1:
			for c, x := range v.bits[at : at+cols] {
				row[c] = vec.BF16ToF32(x)
			}
		default:
			for c := range row {
				row[c] = vec.BF16ToF32(v.bits[at+c*step])
			}
		}
	}
}

// finite reports whether x is neither NaN nor infinite.
func finite(x float32) bool { return x-x == 0 }

// at returns element (b, h, s, c) as float32.
func (v *view) at(b, h, s, c int) float32 {
	i := v.rowIndex(b, h, s) + c*v.stride[backend.Dim]
	switch v.dtype {
	case backend.F32:
		return v.f32[i]
	case backend.Q8:
		return q8Scale(v.q8[i-c:]) * float32(int8(v.q8[i+q8Lead]))
	case backend.F16:
		return vec.F16ToF32(v.bits[i])
	default:
		return vec.BF16ToF32(v.bits[i])
	}
}

// q8Scale returns the scale of a Q8 row.
func q8Scale(row []byte) float32 {
	return math.Float32frombits(binary.NativeEndian.Uint32(row))
}

// store writes row to elements [c0, c0+len(row)) of row s, rounded to v's type. For
// Q8 they must be the whole row.
func (v *view) store(row []float32, b, h, s, c0 int) {
	step := v.stride[backend.Dim]
	i := v.index(b, h, s) + c0*step
	switch v.dtype {
	case backend.F32:
		if step == 1 {
			copy(v.f32[i:i+len(row)], row)
			return
		}
		for _, x := range row {
			v.f32[i] = x
			i += step
		}
	case backend.F16:
		for _, x := range row {
			v.bits[i] = backend.F16.Encode(x)
			i += step
		}
	case backend.Q8:
		backend.QuantiseQ8(v.q8[i:i+q8Lead+len(row)], row)
	default:
		for _, x := range row {
			v.bits[i] = backend.BF16.Encode(x)
			i += step
		}
	}
}

// loadRows copies rows [s, s+n) of v as float32 to dst, whose rows are ld apart,
// and zeros the elements between the row's own and ld.
func loadRows(k *vec.Kernels, v *view, dst []float32, ld, b, h, s, n int) {
	cols := v.shape[backend.Dim]
	for n > 0 {
		m := v.adjacent(s, n)
		v.load(k, dst, ld, b, h, s, m, 0, cols)
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

// load is pack for rows that lie one stride apart, with the kernels where they can
// convert whole vectors. Of Q8 rows c0 must be 0.
func (v *view) load(k *vec.Kernels, dst []float32, ld, b, h, s, n, c0, cols int) {
	whole := 0 // columns that the kernels convert
	if v.f32 == nil && v.stride[backend.Dim] == 1 {
		whole = cols / k.Lanes * k.Lanes
	}
	if whole > 0 {
		i, apart := v.rowIndex(b, h, s)+c0, v.stride[backend.Seq]
		switch v.dtype {
		case backend.F16:
			k.LoadF16(dst, ld, v.bits[i:], apart, n, whole)
		case backend.BF16:
			k.LoadBF16(dst, ld, v.bits[i:], apart, n, whole)
		default:
			k.LoadQ8(dst, ld, v.q8[i:], apart, n, whole)
		}
	}
	if whole < cols {
		v.pack(dst[whole:], ld, b, h, s, n, c0+whole, cols-whole)
	}
}

// storeRow writes row to row s of v, rounded to v's type. len(row) is a multiple of
// k.Lanes; the elements after those of v's row are padding.
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

// element returns the kernels' name of v's type.
func (v *view) element() vec.Element {
	switch v.dtype {
	case backend.F16:
		return vec.F16
	case backend.BF16:
		return vec.BF16
	case backend.Q8:
		return vec.Q8
	}
	return vec.F32
}

// appendRun appends the n rows from index i on; the kernels prefetch those from index next
// on.
func (v *view) appendRun(runs []vec.Run, i, next, n int) []vec.Run {
	ld, d := v.stride[backend.Seq], v.shape[backend.Dim]
	switch {
	case v.f32 != nil:
		return vec.AppendRun(runs, v.f32[i:], ld, n, d, v.f32[next:])
	case v.bits != nil:
		return vec.AppendRun(runs, v.bits[i:], ld, n, d, v.bits[next:])
	}
	return vec.AppendRun(runs, v.q8[i:], ld, n, d, v.q8[next:])
}
