package kernels

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/seed90331342/attn/backend"
)

// What the one visibility rule of backend.Problem does not say, a prefix that all see
// and documents that see themselves, is a few calls over slices of the operands, each
// of which it does say. They are views, and handed over together (backend.Batcher),
// so that they cost what their visible pairs do. A row belongs to one of them: its
// bits are those of that call alone.

// part is a rectangle of the scores that one call computes: [lo, hi) along batches,
// query heads, rows and keys.
type part struct {
	lo, hi [4]int
	// ahead says that the rows see the keys after their own position too, as far as
	// limit: those that stand before the end of a prefix.
	ahead bool
	// limit is the key from which on nothing is seen, whatever KLen says.
	limit int
	// offset moves its rows beside the whole's.
	offset int
}

// whole is the part that is all of a call.
func whole(d Dims) part {
	return part{hi: [4]int{d.Batch, d.Heads, d.SeqQ, d.SeqK}, limit: d.SeqK}
}

// split cuts the rows of x at i, if that lies among them; either side may be empty.
func (x part) split(i int) (before, after part) {
	i = max(x.lo[backend.Seq], min(i, x.hi[backend.Seq]))
	before, after = x, x
	before.hi[backend.Seq], after.lo[backend.Seq] = i, i
	return before, after
}

// partition returns the parts that Prefix, QSegments, KSegments and Offsets make of the
// canonical problem p of lengths d, nil when they make none of it. keys is how many
// keys the options count.
func (o *Options) partition(p *backend.Problem, d Dims, keys int) ([]part, error) {
	apart := o.offsetsApart(d)
	if o.Prefix == nil && o.QSegments == nil && o.KSegments == nil && !apart {
		return nil, nil
	}
	if err := o.checkPrefix(d.Batch, keys); err != nil {
		return nil, err
	}
	qs, ks, err := o.segments(d, keys)
	if err != nil {
		return nil, err
	}
	var parts []part
	for b := 0; b < d.Batch; {
		x := whole(d)
		x.lo[backend.Batch] = b
		if apart {
			x.offset = o.Offsets[b]
		}
		for b++; b < d.Batch && o.sameDivision(qs, ks, b) && (!apart || o.Offsets[b] == x.offset); b++ {
		}
		x.hi[backend.Batch] = b
		documents := []part{x}
		if qs != nil {
			if documents, err = x.documents(of(qs, x.lo[backend.Batch]), of(ks, x.lo[backend.Batch])); err != nil {
				return nil, err
			}
		}
		for _, x := range documents {
			if o.Prefix != nil && p.Visible.Right != backend.Unbounded {
				n := min(of(o.Prefix, x.lo[backend.Batch]), d.SeqK)
				// Row i sees keys up to i + Offset + Right by the rule; where that is before
				// the prefix ends, it sees as far as that.
				early, late := x.split(n - p.Visible.Offset - x.offset - p.Visible.Right)
				early.ahead, early.limit = true, min(n, early.limit)
				parts, x = early.blocked(p, parts), late
			}
			parts = x.blocked(p, parts)
		}
	}
	if len(parts) == 1 && parts[0] == whole(d) {
		return nil, nil
	}
	return parts, alignedBlocks(p, parts)
}

// of returns batch b's of a list that has one for each batch, or one for all.
func of[T any](all []T, b int) T {
	if len(all) == 1 {
		return all[0]
	}
	return all[b]
}

// sameDivision reports whether batch b has the prefix and the segments of the one
// before it.
func (o *Options) sameDivision(qs, ks [][]int32, b int) bool {
	return (len(o.Prefix) <= 1 || o.Prefix[b] == o.Prefix[b-1]) &&
		(len(qs) <= 1 || slices.Equal(qs[b], qs[b-1])) && (len(ks) <= 1 || slices.Equal(ks[b], ks[b-1]))
}

func (o *Options) checkPrefix(batch, keys int) error {
	if o.Prefix == nil {
		return nil
	}
	if n := len(o.Prefix); n != 1 && n != batch {
		return fmt.Errorf("prefix has %d lengths, there are %d batches: give 1 or %d: %w", n, batch, batch, backend.ErrShape)
	}
	for b, n := range o.Prefix {
		if n < 0 || n > keys {
			return fmt.Errorf("prefix[%d] is %d, there are %d keys: it must be 0 to %d: %w", b, n, keys, keys, backend.ErrOption)
		}
	}
	return nil
}

// segments checks the ids and returns those of rows and of the d.SeqK keys that take
// part out of so many.
func (o *Options) segments(d Dims, keys int) (qs, ks [][]int32, err error) {
	if o.QSegments == nil && o.KSegments == nil {
		return nil, nil, nil
	}
	qs, ks = o.QSegments, o.KSegments
	if qs == nil {
		return nil, nil, fmt.Errorf("ksegments are given without qsegments: a row needs an id too: %w", backend.ErrShape)
	}
	if ks == nil {
		if ks = qs; d.SeqQ != keys {
			return nil, nil, fmt.Errorf("qsegments have ids for %d rows, there are %d keys: give ksegments too: %w", d.SeqQ, keys, backend.ErrShape)
		}
	}
	for _, s := range []struct {
		name string
		ids  [][]int32
		n    int
		of   string
	}{{"qsegments", qs, d.SeqQ, "rows"}, {"ksegments", ks, keys, "keys"}} {
		if n := len(s.ids); n != 1 && n != d.Batch {
			return nil, nil, fmt.Errorf("%s has %d lists, there are %d batches: give 1 or %d: %w", s.name, n, d.Batch, d.Batch, backend.ErrShape)
		}
		for b, ids := range s.ids {
			if len(ids) != s.n {
				return nil, nil, fmt.Errorf("%s[%d] has %d ids, there are %d %s: one each: %w", s.name, b, len(ids), s.n, s.of, backend.ErrShape)
			}
		}
	}
	if d.SeqK < keys {
		cut := make([][]int32, len(ks))
		for b := range ks {
			cut[b] = ks[b][:d.SeqK]
		}
		ks = cut
	}
	return qs, ks, nil
}

// documents returns a part for each run of rows with one id, over the run of keys with
// that id.
func (x part) documents(rows, keys []int32) ([]part, error) {
	runs := make(map[int32][2]int)
	var err error
	eachRun(keys, func(id int32, lo, hi int) {
		if was, ok := runs[id]; ok && err == nil {
			err = fmt.Errorf("segment %d of batch %d has keys %d to %d and again %d to %d, the keys of a segment must follow one another: give a Mask: %w",
				id, x.lo[backend.Batch], was[0], was[1]-1, lo, hi-1, backend.ErrOption)
		}
		runs[id] = [2]int{lo, hi}
	})
	if err != nil {
		return nil, err
	}
	var parts []part
	eachRun(rows, func(id int32, lo, hi int) {
		y := x
		y.lo[backend.Seq], y.hi[backend.Seq] = lo, hi
		if run, ok := runs[id]; ok {
			y.lo[backend.Dim], y.hi[backend.Dim] = run[0], run[1]
		} else { // a call has a key, even where none is seen
			y.hi[backend.Dim], y.limit = 1, 0
		}
		parts = append(parts, y)
	})
	return parts, nil
}

// eachRun calls f for each run of equal ids.
func eachRun(ids []int32, f func(id int32, lo, hi int)) {
	for lo := 0; lo < len(ids); {
		hi := lo + 1
		for hi < len(ids) && ids[hi] == ids[lo] {
			hi++
		}
		f(ids[lo], lo, hi)
		lo = hi
	}
}

// blocked appends x, if it has rows, to parts: in two where its first row lies inside
// a block of rows of a mask of blocks, as a view can only begin with a block.
func (x part) blocked(p *backend.Problem, parts []part) []part {
	if !p.Blocks.IsZero() {
		var head part
		head, x = x.split(ceilDiv(x.lo[backend.Seq], p.BlockQ) * p.BlockQ)
		if head.lo[backend.Seq] < head.hi[backend.Seq] {
			parts = append(parts, head)
		}
	}
	if x.lo[backend.Seq] < x.hi[backend.Seq] {
		parts = append(parts, x)
	}
	return parts
}

// alignedBlocks refuses parts whose first key lies inside a block of keys.
func alignedBlocks(p *backend.Problem, parts []part) error {
	if p.Blocks.IsZero() {
		return nil
	}
	for _, x := range parts {
		if k := x.lo[backend.Dim]; k%p.BlockK != 0 {
			return fmt.Errorf("a segment of batch %d begins at key %d, inside a block of the block mask: with both, segments begin at multiples of %d; else give a Mask: %w",
				x.lo[backend.Batch], k, p.BlockK, backend.ErrOption)
		}
	}
	return nil
}

// slicer cuts tensors and keeps the first error.
type slicer struct{ err error }

// cut returns t from lo to hi along axis; the zero Tensor stays one.
func (s *slicer) cut(t backend.Tensor, axis, lo, hi int) backend.Tensor {
	if t.IsZero() || s.err != nil {
		return t
	}
	var part backend.Tensor
	part, s.err = t.Slice(axis, lo, hi)
	return part
}

// rows returns the batches, query heads and rows of x of t, [B, H, Sq, any].
func (s *slicer) rows(t backend.Tensor, x part) backend.Tensor {
	for axis := backend.Batch; axis <= backend.Seq; axis++ {
		t = s.cut(t, axis, x.lo[axis], x.hi[axis])
	}
	return t
}

// pairs returns x of t, [B, H, Sq, Sk].
func (s *slicer) pairs(t backend.Tensor, x part) backend.Tensor {
	return s.cut(s.rows(t, x), backend.Dim, x.lo[backend.Dim], x.hi[backend.Dim])
}

// problem returns the canonical problem of part x of one of lengths d.
func (s *slicer) problem(p *backend.Problem, d Dims, x part) backend.Problem {
	q := *p
	b0, b1, h0, h1 := x.lo[backend.Batch], x.hi[backend.Batch], x.lo[backend.Heads], x.hi[backend.Heads]
	i0, i1, j0, j1 := x.lo[backend.Seq], x.hi[backend.Seq], x.lo[backend.Dim], x.hi[backend.Dim]
	q.Visible = x.visible(p.Visible)
	q.Mask, q.Bias = s.pairs(p.Mask, x), s.pairs(p.Bias, x)
	heads := func(t backend.Tensor) backend.Tensor {
		return s.cut(s.cut(t, backend.Batch, b0, b1), backend.Heads, h0, h1)
	}
	// Element j-i+Sq-1 for row i and key j: the first is for the last row and the first key.
	first := j0 - i1 + d.SeqQ
	q.Relative = s.cut(heads(p.Relative), backend.Dim, first, first+i1-i0+j1-j0-1)
	if !p.Blocks.IsZero() {
		q.Blocks = s.cut(heads(p.Blocks), backend.Seq, i0/p.BlockQ, ceilDiv(i1, p.BlockQ))
		q.Blocks = s.cut(q.Blocks, backend.Dim, j0/p.BlockK, ceilDiv(j1, p.BlockK))
	}
	switch n := d.Heads; {
	case p.Slopes == nil:
	case len(p.Slopes) == n:
		q.Slopes = p.Slopes[h0:h1]
	case h1-h0 == n:
		q.Slopes = p.Slopes[b0*n : b1*n]
	default:
		q.Slopes = nil
		for b := b0; b < b1; b++ {
			q.Slopes = append(q.Slopes, p.Slopes[b*n+h0:b*n+h1]...)
		}
	}
	if p.Sinks != nil {
		q.Sinks = p.Sinks[h0:h1]
	}
	for axis := range x.lo {
		q.Dropout.First[axis] += x.lo[axis]
	}
	return q
}

// visible returns the rule v as the rows and keys of x count.
func (x part) visible(v backend.Visibility) backend.Visibility {
	first, keys := x.lo[backend.Dim], x.hi[backend.Dim]-x.lo[backend.Dim]
	v.Offset += x.lo[backend.Seq] - first + x.offset
	if x.ahead {
		v.Right = backend.Unbounded
	}
	if v.KLen == nil && x.limit >= x.hi[backend.Dim] {
		return v
	}
	n := make([]int, x.hi[backend.Batch]-x.lo[backend.Batch])
	for b := range n {
		n[b] = x.limit
		if v.KLen != nil {
			n[b] = min(n[b], v.KLen[x.lo[backend.Batch]+b])
		}
		n[b] = max(0, min(n[b]-first, keys))
	}
	v.KLen = n
	return v
}

// keys returns the keys and values of part x of c, whose lengths are d.
func (s *slicer) keys(c *backend.Call, d Dims, x part) (k, v backend.Tensor, pages *backend.Pages) {
	share := d.Heads / d.KVHeads
	b0, b1, j0, j1 := x.lo[backend.Batch], x.hi[backend.Batch], x.lo[backend.Dim], x.hi[backend.Dim]
	cut := func(t backend.Tensor) backend.Tensor {
		t = s.cut(t, backend.Heads, x.lo[backend.Heads]/share, ceilDiv(x.hi[backend.Heads], share))
		if c.Pages != nil {
			return t // a pool
		}
		return s.cut(s.cut(t, backend.Batch, b0, b1), backend.Seq, j0, j1)
	}
	if c.Pages != nil {
		size := c.K.Shape()[backend.Seq]
		if j0%size != 0 && s.err == nil {
			s.err = fmt.Errorf("a segment of batch %d begins at key %d, inside a page: with pages, segments begin at multiples of %d: %w", b0, j0, size, backend.ErrUnsupported)
		}
		pages = &backend.Pages{Table: make([][]int32, b1-b0), Keys: j1 - j0}
		for b := range pages.Table {
			own := c.Pages.Table[b0+b]
			pages.Table[b] = own[min(j0/size, len(own)):]
		}
	}
	return cut(c.K), cut(c.V), pages
}

// call returns part x of c.
func (s *slicer) call(c *backend.Call, x part) *backend.Call {
	d := c.Dims()
	part := &backend.Call{
		Q: s.rows(c.Q, x), O: s.rows(c.O, x), LSE: s.rows(c.LSE, x),
		Problem: s.problem(&c.Problem, d, x), Resume: c.Resume,
	}
	part.K, part.V, part.Pages = s.keys(c, d, x)
	return part
}

// inParts returns c cut into parts.
func inParts(c *backend.Call, parts []part) ([]*backend.Call, error) {
	var s slicer
	calls := make([]*backend.Call, len(parts))
	for n, x := range parts {
		calls[n] = s.call(c, x)
	}
	return calls, s.err
}

// attendParts computes c in parts: fused, or by the stages when there are weights.
func attendParts(ctx context.Context, be backend.Backend, w backend.Tensor, c *backend.Call, parts []part) error {
	// A part of an output may lie over what another part reads: look at the whole.
	err := backend.Distinct(
		[]backend.Operand{{Name: "o", Tensor: c.O}, {Name: "lse", Tensor: c.LSE}, {Name: "weights", Tensor: w}},
		[]backend.Operand{{Name: "q", Tensor: c.Q}, {Name: "k", Tensor: c.K}, {Name: "v", Tensor: c.V}, {Name: "mask", Tensor: c.Mask},
			{Name: "bias", Tensor: c.Bias}, {Name: "relative", Tensor: c.Relative}, {Name: "blocks", Tensor: c.Blocks}})
	if err != nil {
		return err
	}
	calls, err := inParts(c, parts)
	if err != nil {
		return err
	}
	if w.IsZero() {
		return attendAll(ctx, be, calls)
	}
	for n, x := range parts {
		var s slicer
		part := s.pairs(w, x)
		if s.err != nil {
			return s.err
		}
		if err := staged(ctx, be, part, calls[n]); err != nil {
			return err
		}
		if err := hideOutside(ctx, be, w, x); err != nil {
			return err
		}
	}
	return nil
}

// attendAll runs calls side by side. What one of several left unfinished is nothing
// that the caller could go on from.
func attendAll(ctx context.Context, be backend.Backend, calls []*backend.Call) error {
	err := backend.AttentionBatch(ctx, be, calls)
	var some *backend.Interrupted
	if len(calls) > 1 && errors.As(err, &some) {
		return some.Err
	}
	return err
}

// hideOutside writes zeros to the weights of the rows of x beside its keys.
func hideOutside(ctx context.Context, be backend.Backend, w backend.Tensor, x part) error {
	return outside(w, x, func(rest backend.Tensor, nothing *backend.Problem) error {
		return be.Softmax(ctx, rest, backend.Tensor{}, nothing)
	})
}

// outside calls f with the rows of x of t, [B, H, Sq, Sk], beside its keys, and a problem
// in which they see nothing.
func outside(t backend.Tensor, x part, f func(rest backend.Tensor, nothing *backend.Problem) error) error {
	for _, keys := range [2][2]int{{0, x.lo[backend.Dim]}, {x.hi[backend.Dim], t.Shape()[backend.Dim]}} {
		if keys[0] == keys[1] {
			continue
		}
		var s slicer
		rest := s.cut(s.rows(t, x), backend.Dim, keys[0], keys[1])
		if s.err != nil {
			return s.err
		}
		nothing := backend.Problem{Scale: 1, Visible: backend.Everything()}
		nothing.Visible.KLen = make([]int, rest.Shape()[backend.Batch]) // zeros
		if err := f(rest, &nothing); err != nil {
			return err
		}
	}
	return nil
}
