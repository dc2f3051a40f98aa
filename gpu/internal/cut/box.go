// Package cut divides a call so that it fits a device: the largest binding, the largest
// buffer, the alignment of bindings, and the device memory that is left.
//
// The index space of a call has five axes: batches, query heads, query rows, columns (keys of attention, columns of a
// product) and the terms of a sum. An [Operand] is a tensor with the axes that it follows. A [Cutter] divides the index
// space into boxes whose operands all fit into bindings, and each box along one inner axis into chunks:
//
//	space ──► boxes, independent of one another
//	box   ──► chunks, each of which continues from the state of the one before
//
// [Operand.View] returns the window that a box needs, with the strides that find an element in it. Elements that are in
// host memory, or too far apart to be bound, have a [Staged] window: package queue fills a buffer with them before the
// step that reads them, and copies it back after a step that writes them.
package cut

import (
	"slices"

	"github.com/seed90331342/attn/backend"
)

// Axes of the index space. Each axis of an operand follows one of them, or is Whole.
const (
	Batch = iota
	Head  // query heads
	Row   // query rows
	Col   // keys of attention and softmax, columns of a product
	Sum   // terms of a product's sums
	axes
	Whole = -1
)

// Axes of tensors [B, H, Sq, x], [B, Hkv, Sk, x] and [B, H, Sq, Sk].
var (
	RowAxes  = [4]int{Batch, Head, Row, Whole}
	KeyAxes  = [4]int{Batch, Head, Col, Whole}
	PairAxes = [4]int{Batch, Head, Row, Col}
)

// Box is a part of the index space: Lo <= index < Hi along each axis.
type Box struct{ Lo, Hi [axes]int }

// Space returns the box of a whole index space.
func Space(batches, heads, rows, cols, terms int) Box {
	return Box{Hi: [axes]int{batches, heads, rows, cols, terms}}
}

// Len returns the length along an axis.
func (x Box) Len(axis int) int { return x.Hi[axis] - x.Lo[axis] }

// Rows returns the query rows of x.
func (x Box) Rows() backend.Rows {
	var r backend.Rows
	for i, axis := range []int{Batch, Head, Row} {
		r.Lo[i], r.Hi[i] = x.Lo[axis], x.Hi[axis]
	}
	return r
}

// AlignUp returns the smallest multiple of align that is at least n.
func AlignUp(n, align int) int { return (n + align - 1) / align * align }

// maxSeq bounds lengths, so that positions and their differences fit in 32 bits.
const maxSeq = 1 << 30

// Bounds returns the visibility rule in the form that kernels use: row i sees key j when
// i+lo <= j < i+hi, where i includes the batch's own offset. Both are within ±2^30, which is beyond every position.
func Bounds(v backend.Visibility) (lo, hi int) {
	lo, hi = -(maxSeq - 1), maxSeq-1
	if v.Left != backend.Unbounded {
		lo = max(min(v.Offset-v.Left, hi), lo)
	}
	if v.Right != backend.Unbounded {
		hi = max(min(v.Offset+v.Right+1, maxSeq-1), -(maxSeq - 1))
	}
	return lo, hi
}

// bounds is Bounds with the least and the most that the offsets of the batches of x add.
func (x Box) bounds(v backend.Visibility) (lo, hi int) {
	lo, hi = Bounds(v)
	if v.Offsets != nil {
		own := v.Offsets[x.Lo[Batch]:x.Hi[Batch]]
		lo, hi = lo+slices.Min(own), hi+slices.Max(own)
	}
	return lo, hi
}

// Visible narrows x to the keys that any of its rows sees, in whole tiles of so many
// keys. The result has no keys when no row sees any.
func (x Box) Visible(v backend.Visibility, tile int) Box {
	lo, hi := x.bounds(v)
	first, last := max(x.Lo[Col], x.Lo[Row]+lo), min(x.Hi[Col], x.Hi[Row]-1+hi, x.longest(v))
	if first >= last {
		x.Hi[Col] = x.Lo[Col]
		return x
	}
	x.Lo[Col], x.Hi[Col] = first/tile*tile, min(AlignUp(last, tile), x.Hi[Col])
	return x
}

// VisibleRows narrows x to the rows that see any of its keys, from a multiple of tile on. The
// result has no rows when no key is seen.
func (x Box) VisibleRows(v backend.Visibility, tile int) Box {
	lo, hi := x.bounds(v)
	end := min(x.Hi[Col], x.longest(v))
	first, last := max(x.Lo[Row], x.Lo[Col]-hi+1), min(x.Hi[Row], end-lo)
	if x.Lo[Col] >= end || first >= last {
		first, last = x.Lo[Row], x.Lo[Row]
	}
	x.Lo[Row], x.Hi[Row] = max(first/tile*tile, x.Lo[Row]), last
	return x
}

// longest returns the most keys that v gives a batch of x.
func (x Box) longest(v backend.Visibility) int {
	if v.KLen == nil {
		return x.Hi[Col]
	}
	return slices.Max(v.KLen[x.Lo[Batch]:x.Hi[Batch]])
}
