package region

import (
	"cmp"
	"fmt"
	"iter"
	"slices"

	"github.com/seed90331342/attn/backend"
)

// The visibility rule of a backend.Problem cannot express a prefix, spans or segments.
// A call with these is cut into backend calls over slices of its operands, each of which the rule can express. The
// slices are views, and the calls run together (backend.Backend), so that they cost what their visible pairs cost.
// Every query row belongs to one call, whose bits it has.

// Region is a rectangle of the scores that one backend call computes.
type Region struct {
	Box
	// Ahead lets the rows see the keys after their own position, up to Limit: the rows
	// whose position lies before the end of a prefix.
	Ahead bool
	// Behind lets the rows see the keys before the Window: those of their own span.
	Behind bool
	// Limit is the first key that is hidden from all rows, whatever KLen is.
	Limit int
}

// WholeRegion is all scores of a call.
func WholeRegion(d backend.Dims) Region {
	return Region{Box: Box{Hi: [4]int{d.Batch, d.Heads, d.SeqQ, d.SeqK}}, Limit: d.SeqK}
}

// Problem is a canonical problem and how it is cut into backend calls.
type Problem struct {
	backend.Problem
	// Dims are the lengths. SeqK counts the keys that take part, which are the first ones:
	// a short Mask or Bias hides the rest.
	Dims backend.Dims
	// Regions are the parts of the scores that need a backend call each; nil means that one call computes all.
	Regions []Region
	Lists   KeyLists // of Options.KeyIndices
}

// Each calls f with each region of p and its problem, unless p has no scores. Where p has lists of keys, it divides the
// regions further, into rows that see the same listed keys; otherwise listed is nil.
func (p *Problem) Each(f func(x Region, own backend.Problem, listed [][]int32) error) error {
	if Empty(p.Dims) {
		return nil
	}
	regions := p.Regions
	if regions == nil {
		whole := WholeRegion(p.Dims)
		if p.Lists.Lists == nil {
			return f(whole, p.Problem, nil)
		}
		regions = []Region{whole}
	}
	for _, x := range regions {
		var err error
		if p.Lists.Lists != nil {
			err = p.Lists.each(p, x, f)
		} else {
			err = f(x, p.Cut(x), nil)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Cut returns the canonical problem of part x of p.
func (p *Problem) Cut(x Region) backend.Problem {
	q := p.Problem
	b0, b1, h0, h1 := x.Lo[backend.Batch], x.Hi[backend.Batch], x.Lo[backend.Heads], x.Hi[backend.Heads]
	q.Visible = x.visible(p.Visible)
	relative := x.Relative(p.Dims.SeqQ)
	q.Mask, q.Bias, q.Relative = x.Scores(p.Mask), x.Scores(p.Bias), relative.Scores(p.Relative)
	if !p.Blocks.IsZero() {
		blocks := x.Blocks(p.BlockQ, p.BlockK)
		q.Blocks = blocks.Scores(p.Blocks)
	}
	switch n := p.Dims.Heads; {
	case len(p.Slopes) > n: // heads are cut within one batch only
		q.Slopes = p.Slopes[b0*n+h0 : (b1-1)*n+h1]
	case p.Slopes != nil:
		q.Slopes = p.Slopes[h0:h1]
	}
	if p.Sinks != nil {
		q.Sinks = p.Sinks[h0:h1]
	}
	for axis := range x.Lo {
		q.Dropout.First[axis] += x.Lo[axis]
	}
	if p.ScoreMod != nil {
		mod := *p.ScoreMod // positions of rows count from the first key: see visible
		for axis, from := range [4]int{backend.Seq: backend.Dim, backend.Batch: backend.Batch, backend.Heads: backend.Heads, backend.Dim: backend.Dim} {
			mod.First[axis] += x.Lo[from]
		}
		q.ScoreMod = &mod
	}
	return q
}

// visible returns the rule v for the rows and keys of x, counted from their first ones.
func (x Region) visible(v backend.Visibility) backend.Visibility {
	first, keys := x.Lo[Key], x.Len(Key)
	v.Offset += x.Lo[backend.Seq] - first
	if v.Offsets != nil {
		v.Offsets = v.Offsets[x.Lo[backend.Batch]:x.Hi[backend.Batch]]
	}
	if x.Ahead {
		v.Right = backend.Unbounded
	}
	if x.Behind {
		v.Left = backend.Unbounded
	}
	if v.KLen == nil && x.Limit >= x.Hi[Key] {
		return v
	}
	n := make([]int, x.Len(backend.Batch))
	for b := range n {
		n[b] = x.Limit
		if v.KLen != nil {
			n[b] = min(n[b], v.KLen[x.Lo[backend.Batch]+b])
		}
		n[b] = max(0, min(n[b]-first, keys))
	}
	v.KLen = n
	return v
}

// PagesOf returns the pages of the batches and keys of x. size is the number of keys of a page.
func (x Region) PagesOf(p *backend.Pages, size int) (*backend.Pages, error) {
	b0, b1, j0, j1 := x.Lo[backend.Batch], x.Hi[backend.Batch], x.Lo[Key], x.Hi[Key]
	if b0 == 0 && b1 == len(p.Table) && j0 == 0 && j1 == p.Keys {
		return p, nil
	}
	if j0%size != 0 {
		return nil, fmt.Errorf("a segment of batch %d, or a span longer than the window, begins at key %d, inside a page: with pages, it must begin at a multiple of %d: %w", b0, j0, size, backend.ErrUnsupported)
	}
	own := &backend.Pages{Table: make([][]int32, b1-b0), Keys: j1 - j0}
	for b, row := range p.Table[b0:b1] {
		own.Table[b] = row[min(j0/size, len(row)):]
	}
	return own, nil
}

// Empty reports whether a call of lengths d has no scores: its result is empty, or its rows
// have no keys.
func Empty(d backend.Dims) bool { return d.Batch == 0 || d.Heads == 0 || d.SeqQ == 0 || d.SeqK == 0 }

// SplitSegments returns a region for each run of rows with one id, over the keys with that id.
func (x Region) SplitSegments(p *Problem, rows, keys []int32) ([]Region, error) {
	keysOf := make(map[int32][2]int)
	for lo, hi := range runs(keys[:x.Hi[Key]]) {
		was, twice := keysOf[keys[lo]]
		switch {
		case twice:
			return nil, fmt.Errorf("segment %d of batch %d has keys %d to %d and again %d to %d, the keys of a segment must be adjacent (otherwise use Mask): %w",
				keys[lo], x.Lo[backend.Batch], was[0], was[1]-1, lo, hi-1, backend.ErrOption)
		case !p.Blocks.IsZero() && lo%p.BlockK != 0:
			return nil, fmt.Errorf("a segment of batch %d begins at key %d, inside a block of the block mask: segments must begin at multiples of %d (otherwise use Mask): %w",
				x.Lo[backend.Batch], lo, p.BlockK, backend.ErrOption)
		}
		keysOf[keys[lo]] = [2]int{lo, hi}
	}
	var all []Region
	for lo, hi := range runs(rows) {
		y := x
		y.Lo[backend.Seq], y.Hi[backend.Seq] = lo, hi
		if own, ok := keysOf[rows[lo]]; ok {
			y.Lo[Key], y.Hi[Key] = own[0], own[1]
		} else { // a call needs a key, even if no row sees it
			y.Hi[Key], y.Limit = 1, 0
		}
		all = append(all, y)
	}
	return all, nil
}

// SplitSpan appends the rows of x before the end of a span of positions to all, and returns the rows after it.
func (x Region) SplitSpan(all []Region, p *Problem, span [2]int) ([]Region, Region, error) {
	v, lo, hi := p.Visible, span[0], span[1]
	at := v.OffsetOf(x.Lo[backend.Batch]) // position of row 0
	x, after := x.SplitRows(hi - at)
	before, x := x.SplitRows(lo - at)
	all = before.AppendTo(all, p)
	own := []Region{x}
	if v.Right != backend.Unbounded { // rows whose Right ends in the span see up to its end
		ahead, rest := x.SplitRows(hi - at - v.Right)
		ahead.Ahead, ahead.Limit = true, min(hi, ahead.Limit)
		own = []Region{ahead, rest}
	}
	for _, y := range own {
		if v.Left != backend.Unbounded && lo < y.Hi[Key] { // rows whose Left begins in the span see from its begin on
			near, far := y.SplitRows(lo + v.Left + 1 - at)
			far.Behind, far.Lo[Key] = true, max(lo, far.Lo[Key])
			if far.Len(backend.Seq) > 0 && !p.Blocks.IsZero() && far.Lo[Key]%p.BlockK != 0 {
				return nil, x, fmt.Errorf("the span %d to %d of batch %d is longer than the window and begins inside a block of the block mask: it must begin at a multiple of %d (otherwise use Mask): %w",
					lo, hi, x.Lo[backend.Batch], p.BlockK, backend.ErrOption)
			}
			all, y = near.AppendTo(all, p), far
		}
		all = y.AppendTo(all, p)
	}
	return all, after, nil
}

// runs yields the bounds of each run of equal ids.
func runs(ids []int32) iter.Seq2[int, int] {
	return func(yield func(lo, hi int) bool) {
		for lo, hi := 0, 1; hi <= len(ids); hi++ {
			if hi == len(ids) || ids[hi] != ids[lo] {
				if !yield(lo, hi) {
					return
				}
				lo = hi
			}
		}
	}
}

// SplitRows cuts the rows of x at row i; either side may be empty.
func (x Region) SplitRows(i int) (before, after Region) {
	i = max(x.Lo[backend.Seq], min(i, x.Hi[backend.Seq]))
	before, after = x, x
	before.Hi[backend.Seq], after.Lo[backend.Seq] = i, i
	return before, after
}

// AppendTo appends x to all unless it has no rows. With a block mask it becomes two when its
// first row lies inside a block, because a slice of the mask begins with a block.
func (x Region) AppendTo(all []Region, p *Problem) []Region {
	if !p.Blocks.IsZero() {
		var head Region
		head, x = x.SplitRows(CeilDiv(x.Lo[backend.Seq], p.BlockQ) * p.BlockQ)
		if head.Lo[backend.Seq] < head.Hi[backend.Seq] {
			all = append(all, head)
		}
	}
	if x.Lo[backend.Seq] < x.Hi[backend.Seq] {
		all = append(all, x)
	}
	return all
}

// KeyLists are the valid lists of a call. Each is in ascending order.
type KeyLists struct {
	Lists        [][]int32 // [B, heads, blocks]
	Heads        int       // Hkv or 1
	Blocks, Rows int       // blocks of query rows, rows of each
}

// each calls f with each part of region x of p whose rows see the same listed keys, its problem, and these keys of
// each batch, counted from the first key of x.
func (l *KeyLists) each(p *Problem, x Region, f func(x Region, own backend.Problem, listed [][]int32) error) error {
	parts, share := []Region{x}, p.Dims.Heads/p.Dims.KVHeads
	if l.Heads > 1 {
		parts = nil
		for n := range x.Len(backend.Batch) * l.Heads {
			y := x
			y.Lo[backend.Batch] += n / l.Heads
			y.Hi[backend.Batch] = y.Lo[backend.Batch] + 1
			y.Lo[backend.Heads], y.Hi[backend.Heads] = n%l.Heads*share, (n%l.Heads+1)*share
			parts = append(parts, y)
		}
	}
	for _, y := range parts {
		visible := y.visible(p.Visible)
		same := visible.Left == backend.Unbounded && visible.Right == backend.Unbounded // rows of a block see the same
		seen := func(i int) [][]int32 {
			lists := make([][]int32, y.Len(backend.Batch))
			for b := range lists {
				list := l.Lists[((y.Lo[backend.Batch]+b)*l.Heads+y.Lo[backend.Heads]/share)*l.Blocks+i/l.Rows]
				lo, hi := visible.Range(b, i-y.Lo[backend.Seq], y.Len(Key))
				from, _ := slices.BinarySearchFunc(list, y.Lo[Key]+lo, compareKey)
				to, _ := slices.BinarySearchFunc(list, y.Lo[Key]+hi, compareKey)
				lists[b] = list[from:max(from, to)]
			}
			return lists
		}
		for i := y.Lo[backend.Seq]; i < y.Hi[backend.Seq]; {
			z, lists, end := y, seen(i), min((i/l.Rows+1)*l.Rows, y.Hi[backend.Seq])
			z.Lo[backend.Seq] = i
			for i++; i < end && (same || slices.EqualFunc(lists, seen(i), equalSpans)); i++ {
			}
			z.Hi[backend.Seq] = i
			for b := range lists {
				if first := int32(y.Lo[Key]); first > 0 {
					lists[b] = slices.Clone(lists[b])
					for n := range lists[b] {
						lists[b][n] -= first
					}
				}
			}
			for _, part := range z.AppendTo(nil, p) {
				own := p.Cut(part)
				own.Visible.Left, own.Visible.Right, own.Visible.KLen = backend.Unbounded, backend.Unbounded, make([]int, len(lists))
				for b, list := range lists {
					own.Visible.KLen[b] = len(list)
				}
				if err := f(part, own, lists); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

func compareKey(key int32, than int) int { return cmp.Compare(int(key), than) }

// equalSpans reports whether two spans of one list are the same.
func equalSpans(a, b []int32) bool {
	return len(a) == len(b) && (len(a) == 0 || a[0] == b[0])
}
