package cut

import (
	"cmp"
	"context"
	"slices"

	"github.com/seed90331342/attn/backend"
)

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

// Pack reads elements of src with strides ss and passes them to write as they are to be
// placed with strides ds. Gaps get unspecified bytes. Offsets and lengths are multiples
// of 4, so up to 3 bytes follow the last element. No write is longer than TransferBytes
// unless a row is.
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
