package cpu

import (
	"encoding/binary"
	"fmt"
	"math"
	"unsafe"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// view is a tensor opened for one call: its memory as a slice, with the shape
// and strides beside it. The zero view stands for no tensor.
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

// q8Lead is the bytes of a Q8 row's scale, which lies before it.
const q8Lead = 4

// viewOf opens t, which errors call name; the zero Tensor gives the zero view. It
// passes the errors of Tensor.Float32s on: ErrDType, ErrDevice, ErrReleased.
func viewOf(name string, t backend.Tensor) (view, error) {
	switch {
	case t.DType() == backend.Bool:
		return boolView(name, t)
	case t.DType() == backend.F32:
		return f32View(name, t)
	}
	return numberView(name, t)
}

// f32View is viewOf for what must be F32, else ErrDType.
func f32View(name string, t backend.Tensor) (v view, err error) {
	if t.IsZero() {
		return view{}, nil
	}
	v = newView(t)
	if data, ok := hostData[float32](t); ok {
		v.f32 = data
		return v, nil
	}
	v.f32, err = t.Float32s()
	return v, named(name, err)
}

// floatView is viewOf for what may be F32, F16 or BF16, else ErrDType.
func floatView(name string, t backend.Tensor) (v view, err error) {
	if t.IsZero() || t.DType() == backend.F32 {
		return f32View(name, t)
	}
	v = newView(t)
	if data, ok := hostData[uint16](t); ok {
		v.bits = data
		return v, nil
	}
	v.bits, err = t.Bits()
	return v, named(name, err)
}

// numberView is viewOf for what may be of any type but Bool, else ErrDType.
func numberView(name string, t backend.Tensor) (v view, err error) {
	if t.DType() != backend.Q8 {
		return floatView(name, t)
	}
	v = newView(t)
	v.q8, err = t.Q8Rows()
	return v, named(name, err)
}

// cacheView is numberView for keys or values, which pages may hold.
func cacheView(name string, t backend.Tensor, p *backend.Pages) (view, error) {
	v, err := numberView(name, t)
	if p != nil {
		v.pages = p.Table
	}
	return v, err
}

// boolView is viewOf for what must be Bool, else ErrDType.
func boolView(name string, t backend.Tensor) (v view, err error) {
	if t.IsZero() {
		return view{}, nil
	}
	v = newView(t)
	if data, ok := hostData[bool](t); ok {
		v.bools = data
		return v, nil
	}
	v.bools, err = t.Bools()
	return v, named(name, err)
}

// hostData returns the memory behind t from its first element on, when its
// elements are of type T in host memory: what Tensor.Float32s does, but that
// allocates. A call's operands are pinned, so they are not released.
func hostData[T any](t backend.Tensor) ([]T, bool) {
	if !t.OnHost() {
		return nil, false
	}
	data, ok := t.Memory().Handle().([]T)
	return data[min(t.Offset(), len(data)):], ok
}

func newView(t backend.Tensor) view {
	return view{dtype: t.DType(), shape: t.Shape(), stride: t.Strides()}
}

func named(name string, err error) error {
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// isZero reports whether v stands for no tensor.
func (v *view) isZero() bool { return v.shape == backend.Shape{} }

// index returns the index of element (b, h, s, 0).
func (v *view) index(b, h, s int) int {
	return b*v.stride[backend.Batch] + h*v.stride[backend.Heads] + s*v.stride[backend.Seq]
}

// rowIndex is index for row s of batch b in whatever page it is.
func (v *view) rowIndex(b, h, s int) int {
	if v.pages == nil {
		return v.index(b, h, s)
	}
	size := v.shape[backend.Seq]
	return v.index(int(v.pages[b][s/size]), h, s%size)
}

// together returns how many of the n rows from s on follow one another in memory, by
// the stride: n, or those of a page.
func (v *view) together(s, n int) int {
	if v.pages == nil {
		return n
	}
	size := v.shape[backend.Seq]
	return min(n, size-s%size)
}

// rowsInPlace reports whether rows of t can be handed to a matrix product as
// they lie: float32, neighbours along dim, rows that do not overlap. Only type,
// shape and strides count, so a plan knows it too.
func rowsInPlace(t backend.Tensor) bool {
	shape, stride := t.Shape(), t.Strides()
	return t.DType() == backend.F32 &&
		(shape[backend.Dim] == 1 || stride[backend.Dim] == 1) &&
		(shape[backend.Seq] == 1 || stride[backend.Seq] >= shape[backend.Dim])
}

// rowsAt returns the rows from s on as they lie, with their leading dimension,
// for a view whose tensor is rowsInPlace.
func (v *view) rowsAt(b, h, s int) (rows []float32, ld int) {
	return v.f32[v.index(b, h, s):], max(v.stride[backend.Seq], v.shape[backend.Dim])
}

// aligned reports whether every row lies on a 16 byte boundary. gonum's dot
// product takes the elements of its second operand before such a boundary one by
// one, so that the order of its sum, and with it the last bit, would otherwise
// follow from where in memory a row happens to lie.
func aligned(rows []float32, ld int) bool {
	return uintptr(unsafe.Pointer(unsafe.SliceData(rows)))%16 == 0 && ld%4 == 0
}

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
				row[c] = f16ToF32(x)
			}
		case v.dtype == backend.F16:
			for c := range row {
				row[c] = f16ToF32(v.bits[at+c*step])
			}
		case v.dtype == backend.BF16 && step == 1:
			for c, x := range v.bits[at : at+cols] {
				row[c] = bf16ToF32(x)
			}
		default:
			for c := range row {
				row[c] = bf16ToF32(v.bits[at+c*step])
			}
		}
	}
}

// packT copies the transpose of rows [s, s+n), elements [c0, c0+cols), to dst:
// element c of row r goes to dst[c*ld+r]. tmp holds 4·cols floats. It returns
// whether everything it copied is finite.
func (v *view) packT(dst []float32, ld, b, h, s, n, c0, cols int, tmp []float32) bool {
	direct := v.dtype == backend.F32 && v.stride[backend.Dim] == 1
	var seen uint32 // bit 31 is set once an exponent of all ones went by
	r := 0
	for ; r+4 <= n; r += 4 {
		var x0, x1, x2, x3 []float32
		if direct {
			x0, x1 = v.f32[v.rowIndex(b, h, s+r)+c0:][:cols], v.f32[v.rowIndex(b, h, s+r+1)+c0:][:cols]
			x2, x3 = v.f32[v.rowIndex(b, h, s+r+2)+c0:][:cols], v.f32[v.rowIndex(b, h, s+r+3)+c0:][:cols]
		} else {
			v.pack(tmp, cols, b, h, s+r, 4, c0, cols)
			x0, x1, x2, x3 = tmp[:cols], tmp[cols:][:cols], tmp[2*cols:][:cols], tmp[3*cols:][:cols]
		}
		for c, a := range x0 {
			d := (*[4]float32)(dst[c*ld+r:])
			d[0], d[1], d[2], d[3] = a, x1[c], x2[c], x3[c]
			seen |= expBits(a) | expBits(x1[c]) | expBits(x2[c]) | expBits(x3[c])
		}
	}
	for ; r < n; r++ {
		v.pack(tmp, cols, b, h, s+r, 1, c0, cols)
		for c, a := range tmp[:cols] {
			dst[c*ld+r] = a
			seen |= expBits(a)
		}
	}
	return seen>>31 == 0
}

// expBits returns a word whose bit 31 is set exactly when x is NaN or infinite.
func expBits(x float32) uint32 { return math.Float32bits(x)&0x7fffffff + 0x00800000 }

// finite reports whether x is neither NaN nor infinite.
func finite(x float32) bool { return expBits(x)>>31 == 0 }

// at returns element (b, h, s, c) as float32.
func (v *view) at(b, h, s, c int) float32 {
	i := v.rowIndex(b, h, s) + c*v.stride[backend.Dim]
	switch v.dtype {
	case backend.F32:
		return v.f32[i]
	case backend.Q8:
		return q8Scale(v.q8[i-c:]) * float32(int8(v.q8[i+q8Lead]))
	case backend.F16:
		return f16ToF32(v.bits[i])
	default:
		return bf16ToF32(v.bits[i])
	}
}

// q8Scale returns the scale of the row that begins with row.
func q8Scale(row []byte) float32 {
	return math.Float32frombits(binary.NativeEndian.Uint32(row))
}

// store writes row to elements [c0, c0+len(row)) of row s, rounded to v's type. Of a
// Q8 row these must be all.
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
	if v.f32 == nil && v.stride[backend.Dim] == 1 {
		whole = cols / k.Lanes * k.Lanes
	}
	if whole > 0 {
		i, apart := v.rowIndex(b, h, s), v.stride[backend.Seq]
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

// element returns v's type as the kernels call it.
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

// run returns the n rows from index i on, with those from index next on to be asked
// for meanwhile.
func (v *view) run(i, next, n int) vec.Run {
	ld, d := v.stride[backend.Seq], v.shape[backend.Dim]
	switch {
	case v.f32 != nil:
		return vec.RunOf(v.f32[i:], ld, n, d, v.f32[next:])
	case v.bits != nil:
		return vec.RunOf(v.bits[i:], ld, n, d, v.bits[next:])
	}
	return vec.RunOf(v.q8[i:], ld, n, d, v.q8[next:])
}

// Loading is a call a number on the gonum path, so these are small enough to be
// compiled into their callers; what is stored is rounded by backend.DType.Encode.

// f16ToF32 returns the number whose binary16 bits are h, exactly. The exponent
// and fraction move to their binary32 places, and a multiplication by 2^112
// corrects the exponent's bias, subnormals included; Inf and NaN keep an
// exponent of ones.
func f16ToF32(h uint16) float32 {
	sign := uint32(h&0x8000) << 16
	rest := uint32(h&0x7fff) << 13
	if rest >= 0x7c00<<13 {
		return math.Float32frombits(sign | rest | 0x7f800000)
	}
	return math.Float32frombits(math.Float32bits(math.Float32frombits(rest)*0x1p112) | sign)
}

// bf16ToF32 returns the number whose bfloat16 bits are h, exactly.
func bf16ToF32(h uint16) float32 { return math.Float32frombits(uint32(h) << 16) }
