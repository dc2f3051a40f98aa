package backend

import (
	"cmp"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"unsafe"

	"github.com/seed90331342/attn/backend/internal/hugepage"
)

// Shape is the length of a tensor along each axis. All four are written: Go fills in zeros for
// those that are not, and a tensor of Shape{S, D}, which is [S, D, 0, 0], has no elements.
type Shape [4]int

// The axes of a [Shape] [B, H, S, D].
const (
	Batch = iota
	Heads
	Seq
	Dim
)

// Elements returns the product of the lengths, or -1 when a length is negative or the product overflows.
func (s Shape) Elements() int {
	n := uint64(1)
	for _, l := range s {
		if l == 0 {
			return 0
		}
	}
	for _, l := range s {
		if l < 0 {
			return -1
		}
		hi, lo := bits.Mul64(n, uint64(l))
		if hi != 0 || lo > math.MaxInt/8 {
			return -1
		}
		n = lo
	}
	return int(n)
}

// Hint is the end of an error about a shape that looks like [S, D] without its leading axes, else "".
func (s Shape) Hint() string {
	if s[Batch] > 0 && s[Seq] == 0 && s[Dim] == 0 {
		rows, dim := s[Batch], s[Heads]
		if dim == 0 {
			rows, dim = 1, rows
		}
		return fmt.Sprintf(" (a Shape has four lengths, [batch, heads, seq, dim]: write %v?)", Shape{1, 1, rows, dim})
	}
	return ""
}

// Strides are the distances in elements between neighbours along each axis. They are never
// negative; a zero repeats one element along the axis.
type Strides [4]int

// Contiguous returns the strides of a tensor of shape s stored row by row.
func (s Shape) Contiguous() Strides {
	return Strides{s[1] * s[2] * s[3], s[2] * s[3], s[3], 1}
}

// Tensor is a view of memory as [batch, heads, seq, dim]: a shape, a stride for each axis and an offset, all in
// elements of one [DType]. Copies of a Tensor share the memory. The zero Tensor means none.
//
// Element (b, h, s, d) is at offset + b·strides[0] + h·strides[1] + s·strides[2] + d·strides[3]. [B,S,H,D] data, one
// head of many, and a mask shared by all heads are views, not copies.
type Tensor struct {
	mem     *Memory
	dtype   DType
	shape   Shape
	strides Strides
	offset  int
}

// NewTensor returns the contiguous tensor at the start of m; backends call it in Alloc. It
// returns ErrShape when m is too small.
func NewTensor(m *Memory, dtype DType, shape Shape) (Tensor, error) {
	n := shape.Elements()
	if n < 0 {
		return Tensor{}, fmt.Errorf("shape %v is negative or too large: %w", shape, ErrShape)
	}
	if need := dtype.Bytes(shape); m != nil && need > m.bytes {
		return Tensor{}, fmt.Errorf("shape %v of %v needs %d bytes, the memory has %d: %w", shape, dtype, need, m.bytes, ErrShape)
	}
	t := Tensor{mem: m, dtype: dtype, shape: shape}
	t.strides, t.offset = dtype.Contiguous(shape)
	return t, t.checkRows()
}

// Meta returns a tensor that has a dtype and a shape but no memory, for [Backend.Plan] and
// [Warmer]. It returns ErrShape for a shape that is negative or too large.
func Meta(dtype DType, shape Shape) (Tensor, error) { return NewTensor(nil, dtype, shape) }

// Host returns data as a tensor in host memory, without copying it: float32 for F32, the bits of F16 or BF16 as uint16,
// bool for Bool, int32 for I32, and bytes for numbers of F8 and for rows of Q8 or Q4 in the format of [DType.Quantise]. It
// returns ErrShape when data does not have exactly the elements of shape, and ErrDType when its type is that of another dtype.
func Host[T float32 | uint16 | bool | byte | int32](data []T, dtype DType, shape Shape) (Tensor, error) {
	var of []DType
	switch any(data).(type) {
	case []float32:
		of = []DType{F32}
	case []uint16:
		of = []DType{F16, BF16}
	case []bool:
		of = []DType{Bool}
	case []int32:
		of = []DType{I32}
	case []byte:
		of = []DType{Q8, Q4, F8}
	}
	if !slices.Contains(of, dtype) {
		return Tensor{}, fmt.Errorf("%T cannot be %v, only one of %v: %w", data, dtype, slices.Clone(of), ErrDType)
	}
	if _, err := Meta(dtype, shape); err != nil {
		return Tensor{}, err
	}
	if n, want := int64(len(data)), dtype.Bytes(shape)/int64(dtype.Size()); n != want {
		return Tensor{}, fmt.Errorf("data has %d elements, shape %v needs %d%s: %w", n, shape, want, shape.Hint(), ErrShape)
	}
	return NewTensor(hostMemory(data), dtype, shape)
}

// AllocHost returns a contiguous tensor of zeros in host memory, on Linux in large pages where these fit: attention of
// a few rows reads it faster than a slice of make. It returns ErrShape for a shape that is negative or too large, and
// ErrMemory when there is not enough memory.
func AllocHost(dtype DType, shape Shape) (Tensor, error) {
	switch dtype {
	case Bool:
		return allocHost[bool](dtype, shape)
	case F32:
		return allocHost[float32](dtype, shape)
	case I32:
		return allocHost[int32](dtype, shape)
	case Q8, Q4, F8:
		return allocHost[byte](dtype, shape)
	default:
		return allocHost[uint16](dtype, shape)
	}
}

func allocHost[T float32 | uint16 | bool | byte | int32](dtype DType, shape Shape) (Tensor, error) {
	if _, err := Meta(dtype, shape); err != nil {
		return Tensor{}, err
	}
	bytes := int(dtype.Bytes(shape))
	data, err := Make[T](bytes / dtype.Size())
	if err != nil {
		return Tensor{}, fmt.Errorf("shape %v of %v: %w", shape, dtype, err)
	}
	if bytes >= hugepage.Size {
		hugepage.Advise(unsafe.Pointer(unsafe.SliceData(data)), bytes)
	}
	return Host(data, dtype, shape)
}

// IsZero reports whether t is the zero Tensor, which means none.
func (t Tensor) IsZero() bool { return t.shape == Shape{} && t.mem == nil }

// Check checks an operand: it returns ErrShape when t is the zero Tensor or its rows have no
// elements, and ErrDType when it has none of the dtypes. name is that of the operand in errors.
func (t Tensor) Check(name string, dtypes ...DType) error {
	if !t.IsZero() && t.shape[Dim] < 1 {
		return fmt.Errorf("%s has shape %v: the last length must be at least 1%s: %w", name, t.shape, t.shape.Hint(), ErrShape)
	}
	return t.CheckDType(name, dtypes...)
}

// CheckDType is Check for an operand whose rows may have no elements.
func (t Tensor) CheckDType(name string, dtypes ...DType) error {
	switch {
	case t.IsZero():
		return fmt.Errorf("%s is missing (the zero Tensor): %w", name, ErrShape)
	case !slices.Contains(dtypes, t.dtype):
		// Clone keeps the variadic slice of successful calls on the stack. An output's may list the dtype of q twice.
		return fmt.Errorf("%s is %v, it must be one of %v: %w", name, t.dtype, slices.Compact(slices.Clone(dtypes)), ErrDType)
	}
	return nil
}

// CheckShape is CheckDType for an operand whose shape follows from others by a rule.
func (t Tensor) CheckShape(name string, shape Shape, rule string, dtypes ...DType) error {
	switch {
	case t.IsZero():
		return fmt.Errorf("%s is missing (the zero Tensor), it must have shape %v: %w", name, shape, ErrShape)
	case t.shape != shape:
		return fmt.Errorf("%s has shape %v, it must be %v, the %s%s: %w", name, t.shape, shape, rule, t.shape.Hint(), ErrShape)
	}
	return t.CheckDType(name, dtypes...)
}

// DType returns the element type of t.
func (t Tensor) DType() DType { return t.dtype }

// Shape returns the lengths along [batch, heads, seq, dim].
func (t Tensor) Shape() Shape { return t.shape }

// Strides returns the distances between neighbours, in elements.
func (t Tensor) Strides() Strides { return t.strides }

// Offset returns the position of the first element in the memory, in elements.
func (t Tensor) Offset() int { return t.offset }

// Memory returns the memory that t is a view of; nil for a tensor of [Meta].
func (t Tensor) Memory() *Memory { return t.mem }

// OnHost reports whether t is in host memory.
func (t Tensor) OnHost() bool { return t.mem != nil && t.mem.owner == nil }

// Bytes returns the bytes of t's elements, broadcast ones counted once.
func (t Tensor) Bytes() int64 {
	once := t.shape
	for i, l := range t.shape {
		if t.strides[i] == 0 && l > 0 {
			once[i] = 1
		}
	}
	return t.dtype.Bytes(once)
}

// IsContiguous reports whether the elements of t are stored row by row without gaps.
func (t Tensor) IsContiguous() bool {
	want, _ := t.dtype.Contiguous(t.shape)
	for i, l := range t.shape {
		if l > 1 && t.strides[i] != want[i] {
			return false
		}
	}
	return true
}

// View returns another view of the same memory, whose first element is offset elements after
// that of t. It returns ErrShape when a stride or the offset is negative, or when the view
// would exceed the memory or divide a row of Q8, Q4 or F8.
func (t Tensor) View(shape Shape, strides Strides, offset int) (Tensor, error) {
	if shape.Elements() < 0 {
		return Tensor{}, fmt.Errorf("view: shape %v is negative or too large: %w", shape, ErrShape)
	}
	if offset < 0 || offset > math.MaxInt-t.offset {
		return Tensor{}, fmt.Errorf("view: offset %d: %w", offset, ErrShape)
	}
	for _, s := range strides {
		if s < 0 {
			return Tensor{}, fmt.Errorf("view: strides %v must not be negative: %w", strides, ErrShape)
		}
	}
	v := Tensor{mem: t.mem, dtype: t.dtype, shape: shape, strides: strides, offset: t.offset + offset}
	last, ok := v.last()
	if !ok {
		return Tensor{}, fmt.Errorf("view: shape %v with strides %v is too large: %w", shape, strides, ErrShape)
	}
	if t.mem != nil && shape.Elements() > 0 {
		if have := t.mem.bytes / int64(t.dtype.Size()); int64(last) >= have {
			return Tensor{}, fmt.Errorf("view: shape %v with strides %v at offset %d reaches element %d, the memory has %d: %w",
				shape, strides, v.offset, last, have, ErrShape)
		}
	}
	if err := v.checkRows(); err != nil {
		return Tensor{}, fmt.Errorf("view: %w", err)
	}
	return v, nil
}

// Slice returns the view of t from lo to hi along axis. It returns ErrShape when the range
// exceeds the axis or divides a row of Q8, Q4 or F8.
func (t Tensor) Slice(axis, lo, hi int) (Tensor, error) {
	if axis < 0 || axis > Dim || lo < 0 || hi < lo || hi > t.shape[axis] {
		return Tensor{}, fmt.Errorf("slice [%d:%d] of axis %d of shape %v: %w", lo, hi, axis, t.shape, ErrShape)
	}
	if t.dtype.Quantised() && axis == Dim && hi-lo != t.shape[Dim] {
		return Tensor{}, fmt.Errorf("slice [%d:%d] of axis %d of shape %v of %v, whose rows are whole: %w", lo, hi, axis, t.shape, t.dtype, ErrShape)
	}
	v := t
	v.shape[axis] = hi - lo
	if hi > lo {
		v.offset += lo * t.strides[axis]
	}
	return v, nil
}

// Swap returns the view of t with two axes exchanged: Swap(Heads, Seq) turns [B,S,H,D] data into [B,H,S,D]. It returns
// ErrShape for an axis that is not 0 to 3, and for Dim of a tensor of Q8, Q4 or F8.
func (t Tensor) Swap(a, b int) (Tensor, error) {
	if min(a, b) < 0 || max(a, b) > Dim {
		return Tensor{}, fmt.Errorf("swap of axes %d and %d, a tensor has axes 0 to 3: %w", a, b, ErrShape)
	}
	if t.dtype.Quantised() && a != b && max(a, b) == Dim {
		return Tensor{}, fmt.Errorf("swap of axes %d and %d of %v, whose rows lie side by side: %w", a, b, t.dtype, ErrShape)
	}
	t.shape[a], t.shape[b] = t.shape[b], t.shape[a]
	t.strides[a], t.strides[b] = t.strides[b], t.strides[a]
	return t, nil
}

// Rows returns the view of t [B, H, S, D] in which the rows of all batches are those of one, [1, H, B·S, D]. It reports
// false if no stride places them, as in a slice of several rows of each batch: copy t first.
func (t Tensor) Rows() (Tensor, bool) {
	batches, rows := t.shape[Batch], t.shape[Seq]
	switch {
	case batches == 1:
	case rows == 1: // whose stride places no element
		t.strides[Seq] = t.strides[Batch]
	case t.strides[Batch] != rows*t.strides[Seq]:
		return t, false
	}
	t.shape[Batch], t.shape[Seq] = 1, batches*rows
	return t, true
}

// Broadcast returns the view of t with the given shape, in which axes of length 1 repeat by a
// stride of zero. It returns ErrShape when another length differs.
func (t Tensor) Broadcast(shape Shape) (Tensor, error) {
	v := t
	for i, l := range t.shape {
		switch {
		case l == shape[i]:
		case l == 1:
			v.shape[i], v.strides[i] = shape[i], 0
		default:
			return Tensor{}, fmt.Errorf("shape %v does not broadcast to %v (each length must be equal or 1)%s: %w", t.shape, shape, t.shape.Hint(), ErrShape)
		}
	}
	return v, nil
}

// Float32s returns the memory of an F32 tensor in host memory from its first element on; index it with Strides. It
// returns ErrDevice when t is not in host memory, ErrDType when it is not F32, and ErrReleased after Release.
func (t Tensor) Float32s() ([]float32, error) { return hostSlice[float32](t, F32) }

// Bits is Float32s for an F16 or BF16 tensor.
func (t Tensor) Bits() ([]uint16, error) { return hostSlice[uint16](t, F16, BF16) }

// Bools is Float32s for a Bool tensor.
func (t Tensor) Bools() ([]bool, error) { return hostSlice[bool](t, Bool) }

// Int32s is Float32s for an I32 tensor.
func (t Tensor) Int32s() ([]int32, error) { return hostSlice[int32](t, I32) }

// QuantisedRows is Float32s for a Q8, Q4 or F8 tensor, from the scale of its first row on.
// [DType.Dequantise] reads a row.
func (t Tensor) QuantisedRows() ([]byte, error) {
	t.offset -= t.dtype.Lead()
	return hostSlice[byte](t, Q8, Q4, F8)
}

func hostSlice[T any](t Tensor, want ...DType) ([]T, error) {
	if !slices.Contains(want, t.dtype) {
		return nil, fmt.Errorf("tensor is %v, not %v: %w", t.dtype, want, ErrDType)
	}
	if _, err := HostBytes(t); err != nil {
		return nil, err
	}
	data := t.mem.handle.([]T)
	return data[min(t.offset, len(data)):], nil
}

// HostBytes returns the memory of a tensor of any type in host memory, from its first element on; for Q8 and Q4 from the
// scale of its first row. It returns ErrDevice when t is not in host memory, and ErrReleased after Release.
func HostBytes(t Tensor) ([]byte, error) {
	if !t.OnHost() {
		return nil, fmt.Errorf("tensor is not in host memory, download it first: %w", ErrDevice)
	}
	if t.mem.released() {
		return nil, ErrReleased
	}
	return t.mem.data[min(max(t.offset*t.dtype.Size()-t.dtype.Lead(), 0), len(t.mem.data)):], nil
}

// Alias returns a tensor on the same host memory that is released independently. Backends that compute in host memory
// return it from Upload. It returns ErrDevice when t is not in host memory and ErrReleased after Release.
func (t Tensor) Alias() (Tensor, error) {
	if !t.OnHost() {
		return Tensor{}, fmt.Errorf("tensor is not in host memory: %w", ErrDevice)
	}
	m := t.mem
	if m.released() {
		return Tensor{}, ErrReleased
	}
	t.mem = &Memory{where: m.where, handle: m.handle, data: m.data, bytes: m.bytes}
	return t, nil
}

// Release frees the memory of t and of all views of it, after the calls that are using it. Later uses return
// ErrReleased. Releasing a tensor twice, or one without memory, does nothing.
func (t Tensor) Release() {
	if t.mem != nil {
		t.mem.release()
	}
}

// last returns the position of t's last element in the memory, and false when it overflows.
func (t *Tensor) last() (int, bool) {
	sum := uint64(t.offset)
	for i, l := range t.shape {
		if l == 0 {
			return t.offset, true
		}
		if i == Dim && t.dtype == Q4 {
			l = max(1, t.dtype.Row(l))
		}
		hi, lo := bits.Mul64(uint64(l-1), uint64(t.strides[i]))
		sum += lo
		if hi != 0 || lo > math.MaxInt || sum > math.MaxInt {
			return 0, false
		}
	}
	return int(sum), true
}

// overlaps reports whether the spans of memory of t and o overlap.
func (t *Tensor) overlaps(o *Tensor) bool {
	if t.mem == nil || o.mem == nil {
		return false
	}
	host := t.mem.owner == nil && o.mem.owner == nil
	if !host && t.mem != o.mem {
		return false
	}
	a0, a1 := t.span()
	b0, b1 := o.span()
	return a0 < b1 && b0 < a1
}

// span returns the addresses of t's first byte and of the byte after its last byte, 0 for no elements.
func (t *Tensor) span() (lo, hi uintptr) {
	if t.shape.Elements() == 0 {
		return 0, 0
	}
	size := uintptr(t.dtype.Size())
	last, _ := t.last()
	base := uintptr(unsafe.Pointer(unsafe.SliceData(t.mem.data)))
	return base + uintptr(t.offset)*size - uintptr(t.dtype.Lead()), base + uintptr(last+1)*size
}

// selfOverlaps reports whether two indices of t may have the same element. They cannot if, in
// the order of strides, each stride exceeds the extent of all smaller ones.
func (t *Tensor) selfOverlaps() bool {
	axes := [4]int{0, 1, 2, 3}
	slices.SortFunc(axes[:], func(a, b int) int { return cmp.Compare(t.strides[a], t.strides[b]) })
	reach := 0
	for _, a := range axes {
		if t.shape[a] <= 1 {
			continue
		}
		if t.strides[a] <= reach {
			return t.shape.Elements() != 0
		}
		n := t.shape[a]
		if a == Dim {
			n = t.dtype.Row(n)
		}
		reach += (n - 1) * t.strides[a]
	}
	return false
}
