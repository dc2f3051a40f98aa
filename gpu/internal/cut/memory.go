package cut

import (
	"cmp"
	"context"
	"iter"
	"slices"
	"unsafe"

	"github.com/seed90331342/attn/backend"
)

// Limits are the device's limits that cuts respect, in bytes.
type Limits struct {
	Binding uint64 // the largest span that is bound
	Buffer  uint64 // the largest buffer
	Align   uint64 // of the offset of a binding
}

// partAlign divides the size of the parts of a tensor, so that a window that is aligned
// in the tensor is aligned in its part.
const partAlign = 4 << 10

// Part returns the largest size of a tensor in one buffer. Larger tensors take several buffers of that size.
func (l Limits) Part() uint64 { return max(l.Buffer/partAlign*partAlign, partAlign) }

// Memory is a bound on device memory and what tensors use of it, in bytes.
type Memory struct {
	Bound int64 // 0 is no bound
	Used  int64
}

// Of bounded memory, tensors take up to 5/8 and the pool up to 1/8. At least 1/4 is left for streaming.
const tensorEighths, poolEighths = 5, 1

// Fits reports whether device memory has room for another tensor of so many bytes.
func (m Memory) Fits(bytes int64) bool {
	return m.Bound == 0 || m.Used+bytes <= m.Bound/8*tensorEighths
}

// Pool returns the bytes that released buffers may keep.
func (m Memory) Pool() int64 { return m.Bound / 8 * poolEighths }

// BoundOf returns the bound that leaves a room next to used bytes of tensors.
func BoundOf(used, room int64) int64 { return (used + room) / (8 - poolEighths) * 8 }

// MostRoom is the most memory for streaming on a device whose memory has no bound.
const MostRoom = 512 << 20

// Room returns the bytes that a call may use for streaming.
func (m Memory) Room() uint64 {
	if m.Bound == 0 {
		return MostRoom
	}
	return uint64(max(m.Bound-m.Pool()-m.Used, 0))
}

// RoomShares is the number of shares of the room for streaming: one each for windows that stay while a box goes through
// its chunks, for the windows of a chunk, for those of the next chunk, which are uploaded while the device computes,
// for the state, for what is downloaded, and for rounding up the sizes of buffers. HeldShares are for windows, with the
// rounding.
const RoomShares, HeldShares = 6, 4

// Buffer is memory on a device.
type Buffer interface {
	// Size returns the bytes.
	Size() uint64
	// Release frees the memory once running submissions have ended.
	Release()
}

// Window is a span of a buffer that is bound. Buf is nil for operands that a call does not have.
type Window struct {
	Buf    Buffer
	Offset uint64
	Size   uint64
}

// Copy copies Size bytes of Src from SrcOffset to Dst at DstOffset.
type Copy struct {
	Src, Dst                   Buffer
	SrcOffset, DstOffset, Size uint64
}

// Store is the memory behind a tensor: consecutive buffers of the device, or host memory that calls stream from and to.
type Store struct {
	Parts []Buffer
	Part  uint64 // bytes of each part but the last
	Host  []byte // unless nil, the tensor is in host memory and has no parts
}

// StoreOf returns the memory of a tensor, nil for the tensors of a plan. Tensors of the host have a new Store each
// time: calls that use them wait, so their order needs none.
func StoreOf(t backend.Tensor) *Store {
	m := t.Memory()
	if m == nil {
		return nil
	}
	if host := m.HostBytes(); host != nil {
		return &Store{Host: host}
	}
	s, _ := m.Handle().(*Store)
	return s
}

// Spans yields the span of each buffer that contains bytes of [lo, hi).
func (s *Store) Spans(lo, hi uint64) iter.Seq[Window] {
	return func(yield func(Window) bool) {
		for lo < hi {
			i := lo / s.Part
			n := min(hi, (i+1)*s.Part) - lo
			if !yield(Window{s.Parts[i], lo - i*s.Part, n}) {
				return
			}
			lo += n
		}
	}
}

// Words returns t as it is copied and as kernels see it. Rows of Q8 become words, the scale in
// the first and four integers in each of the others. Those of F8 become words of four numbers. Rows of Q4 become 16-bit elements, nine a
// block, because rows of an odd number of blocks begin in the middle of words.
func Words(t backend.Tensor) (backend.Tensor, error) {
	as, d := backend.F32, t.DType()
	if d == backend.Q4 {
		as = backend.F16
	}
	if !d.Quantised() || t.Shape().Elements() == 0 {
		return t, nil
	}
	size, n := as.Size(), 1
	if m := t.Memory(); m != nil {
		n = int(m.Bytes()) / size
	}
	all, err := backend.NewTensor(t.Memory(), as, backend.Shape{1, 1, 1, n})
	if err != nil {
		return t, err
	}
	shape, strides := t.Shape(), t.Strides()
	for i := range strides[:backend.Dim] {
		strides[i] /= size
	}
	shape[backend.Dim] = d.Row(shape[backend.Dim]) / size
	return all.View(shape, strides, (t.Offset()-d.Lead())/size)
}

// HostTensor returns the host tensor over the memory of a tensor with a Host store.
func HostTensor(t backend.Tensor) (all backend.Tensor, err error) {
	data := StoreOf(t).Host
	n := len(data) / t.DType().Size()
	at := unsafe.Pointer(unsafe.SliceData(data))
	if shape := (backend.Shape{1, 1, 1, n}); t.DType() == backend.F32 {
		all, err = backend.Host(unsafe.Slice((*float32)(at), n), backend.F32, shape)
	} else {
		all, err = backend.Host(unsafe.Slice((*uint16)(at), n), t.DType(), shape)
	}
	if err != nil {
		return all, err
	}
	return all.View(t.Shape(), t.Strides(), t.Offset())
}

// TransferBytes is the size of a transfer between host and device: large enough to make
// the cost of a submission small, small enough for the memory in between.
const TransferBytes = 16 << 20

// Distinct returns shape with 1 along every axis of stride zero.
func Distinct(shape backend.Shape, strides backend.Strides) backend.Shape {
	for i := range shape {
		if strides[i] == 0 && shape[i] > 1 {
			shape[i] = 1
		}
	}
	return shape
}

// Extent returns the number of elements from the first to the last, inclusive.
func Extent(shape backend.Shape, strides backend.Strides) int {
	n := 1
	for i, l := range shape {
		if l == 0 {
			return 0
		}
		n += (l - 1) * strides[i]
	}
	return n
}

// SameOrder reports whether both strides place the elements identically and without
// gaps, so that one copy moves them all.
func SameOrder(shape backend.Shape, a, b backend.Strides) bool {
	for i, l := range shape {
		if l > 1 && a[i] != b[i] {
			return false
		}
	}
	return Extent(shape, a) == shape.Elements()
}

// Pack reads elements of src with strides ss and passes them to write as they are to be placed with strides ds. Gaps
// get unspecified bytes. Offsets and lengths are multiples of 4, so up to 3 bytes follow the last element. No write is
// longer than TransferBytes unless a row is.
func Pack(ctx context.Context, ds backend.Strides, src []byte, ss backend.Strides, shape backend.Shape, size int, write func(at uint64, data []byte) error) error {
	total := Extent(shape, ds) * size
	if SameOrder(shape, ds, ss) {
		words := total &^ 3
		for at := 0; at < words; at += TransferBytes {
			if err := ctx.Err(); err != nil {
				return err
			}
			if err := write(uint64(at), src[at:min(at+TransferBytes, words)]); err != nil {
				return err
			}
		}
		if words == total {
			return nil
		}
		return write(uint64(words), append(slices.Clone(src[words:total]), 0, 0, 0)[:4])
	}
	// Slices along the outermost axis keep the copy on the host small.
	outer := 0
	if axes := byStride([4]int{}, shape, ds); len(axes) > 0 {
		outer = axes[len(axes)-1]
	}
	step := ds[outer] * size
	rows := shape[outer]
	if n := TransferBytes / max(step, 1); n < rows && step%4 == 0 {
		rows = max(n, 1)
	}
	var packed []byte
	for lo := 0; lo < shape[outer]; lo += rows {
		if err := ctx.Err(); err != nil {
			return err
		}
		part := shape
		part[outer] = min(rows, shape[outer]-lo)
		n := (Extent(part, ds)*size + 3) &^ 3
		if cap(packed) < n {
			var err error
			if packed, err = backend.Make[byte](n); err != nil {
				return err
			}
		}
		Scatter(packed[:n], ds, src[lo*ss[outer]*size:], ss, part, size)
		if err := write(uint64(lo*step), packed[:n]); err != nil {
			return err
		}
	}
	return nil
}

// Scatter copies every element from src to dst, each with its own strides in elements.
func Scatter(dst []byte, ds backend.Strides, src []byte, ss backend.Strides, shape backend.Shape, size int) {
	if shape.Elements() == 0 {
		return
	}
	// The outermost axis of src comes first, to make runs as long as possible.
	order := []int{0, 1, 2, 3}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(ss[b], ss[a]) })
	var n backend.Shape
	var d, s backend.Strides
	for to, from := range order {
		n[to], d[to], s[to] = shape[from], ds[from]*size, ss[from]*size
	}
	// Axes without gaps on both sides merge into one run of bytes.
	run := size
	for i := 3; i >= 0 && (n[i] == 1 || d[i] == run && s[i] == run); i-- {
		run *= n[i]
		n[i], d[i], s[i] = 1, 0, 0
	}
	for w := range n[0] {
		for x := range n[1] {
			for y := range n[2] {
				to, from := w*d[0]+x*d[1]+y*d[2], w*s[0]+x*s[1]+y*s[2]
				for range n[3] {
					copy(dst[to:to+run], src[from:])
					to += d[3]
					from += s[3]
				}
			}
		}
	}
}
