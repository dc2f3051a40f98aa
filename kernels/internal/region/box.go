// Package region divides the scores of a call into regions that backend calls compute, and returns the parts of the
// call's operands that belong to each.
package region

import "github.com/seed90331342/attn/backend"

// Key is the axis of a Box that counts keys.
const Key = backend.Dim

// Box is a rectangle of the scores of a call: Lo <= index < Hi along batches, query heads, rows
// and keys.
type Box struct{ Lo, Hi [4]int }

// Row is n rows of one head from a row on, without keys.
func Row(batch, head, row, n int) Box {
	return Box{Lo: [4]int{batch, head, row}, Hi: [4]int{batch + 1, head + 1, row + n}}
}

// Len returns the length along an axis.
func (x Box) Len(axis int) int { return x.Hi[axis] - x.Lo[axis] }

// HasRow reports whether a row of a head belongs to x.
func (x Box) HasRow(row [3]int) bool {
	for axis, i := range row {
		if i < x.Lo[axis] || i >= x.Hi[axis] {
			return false
		}
	}
	return true
}

// Relative returns the box of a bias by distance, [B, H, 1, Sq+Sk-1], that x reads in a call of
// seqQ rows. Row i and key j read element j-i+Sq-1: the first one is that of the last row and the
// first key.
func (x Box) Relative(seqQ int) Box {
	y := x
	y.Lo[backend.Seq], y.Hi[backend.Seq] = 0, 1
	y.Lo[Key] += seqQ - x.Hi[backend.Seq]
	y.Hi[Key] += seqQ - x.Lo[backend.Seq] - 1
	return y
}

// Blocks returns the box of a mask of blocks of q rows and k keys that x reads.
func (x Box) Blocks(q, k int) Box {
	x.Lo[backend.Seq], x.Hi[backend.Seq] = x.Lo[backend.Seq]/q, CeilDiv(x.Hi[backend.Seq], q)
	x.Lo[Key], x.Hi[Key] = x.Lo[Key]/k, CeilDiv(x.Hi[Key], k)
	return x
}

// CeilDiv returns ⌈a/b⌉.
func CeilDiv(a, b int) int { return a/b + min(1, a%b) }

// Slice returns t from lo to hi along axis. The zero Tensor stays one. It cannot fail: boxes come
// from that of the whole call by cuts and intersections, operands have the lengths of the call, and
// both are checked before (TestAnyOptions tries calls of all kinds).
func Slice(t backend.Tensor, axis, lo, hi int) backend.Tensor {
	if lo == 0 && hi == t.Shape()[axis] || t.IsZero() {
		return t
	}
	v, err := t.Slice(axis, lo, hi)
	if err != nil {
		panic("attn: a part exceeds its operand: " + err.Error())
	}
	return v
}

// axes returns x of t along axes from and to, and those between.
func (x *Box) axes(t backend.Tensor, from, to int) backend.Tensor {
	for axis := from; axis <= to; axis++ {
		t = Slice(t, axis, x.Lo[axis], x.Hi[axis])
	}
	return t
}

// Rows returns the batches, query heads and rows of x of t [B, H, Sq, any].
func (x *Box) Rows(t backend.Tensor) backend.Tensor { return x.axes(t, backend.Batch, backend.Seq) }

// Scores returns x of t [B, H, Sq, Sk].
func (x *Box) Scores(t backend.Tensor) backend.Tensor { return x.axes(t, backend.Batch, backend.Dim) }

// Keys returns the keys and key heads of x of t, which is K or V of a call of lengths d, or a pool
// of pages.
func (x *Box) Keys(t backend.Tensor, d backend.Dims, paged bool) backend.Tensor {
	share := d.Heads / d.KVHeads
	t = Slice(t, backend.Heads, x.Lo[backend.Heads]/share, CeilDiv(x.Hi[backend.Heads], share))
	if paged {
		return t
	}
	t = Slice(t, backend.Batch, x.Lo[backend.Batch], x.Hi[backend.Batch])
	return Slice(t, backend.Seq, x.Lo[Key], x.Hi[Key])
}

// Part returns x of t, whose axes of length 1 stand for all of x.
func (x *Box) Part(t backend.Tensor) backend.Tensor {
	for axis, n := range t.Shape() {
		if n > 1 {
			t = Slice(t, axis, x.Lo[axis], x.Hi[axis])
		}
	}
	return t
}

// Rows returns rows [lo, lo+n) of batches [b, b+batch) of t.
func Rows(t backend.Tensor, b, batch, lo, n int) backend.Tensor {
	return Slice(Slice(t, backend.Batch, b, b+batch), backend.Seq, lo, lo+n)
}
