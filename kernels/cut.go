package kernels

import (
	"cmp"
	"fmt"
	"iter"
	"slices"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/internal/view"
)

// The visibility rule of a backend.Problem cannot express a prefix, segments, or offsets that differ between batches.
// A call with these is cut into backend calls over slices of its operands, each of which the rule can express. The
// slices are views, and the calls run together (backend.Backend), so that they cost what their visible pairs cost.
// Every query row belongs to one call, whose bits it has.

// region is a rectangle of the scores that one backend call computes.
type region struct {
	view.Box
	// ahead lets the rows see the keys after their own position, up to limit: the rows
	// whose position lies before the end of a prefix.
	ahead bool
	// limit is the first key that is hidden from all rows, whatever KLen is.
	limit int
	// offset is added to the positions of the rows.
	offset int
}

// wholeRegion is all scores of a call.
func wholeRegion(d Dims) region { return region{Box: view.Whole(d), limit: d.SeqK} }

// regions returns the regions into which Prefix, QSegments, KSegments and Offset divide p,
// nil when one call computes all. keys is Sk, hidden keys included.
func (o *Options) regions(p *problem, keys int) ([]region, error) {
	d, differ := p.dims, o.offsetsDiffer()
	if o.Prefix == nil && o.QSegments == nil && o.KSegments == nil && !differ {
		return nil, nil
	}
	for b, n := range o.Prefix {
		if n < 0 || n > keys {
			return nil, fmt.Errorf("prefix[%d] is %d, there are %d keys: it must be 0 to %d: %w", b, n, keys, keys, ErrOption)
		}
	}
	qs, ks, err := o.segmentIDs(d, keys)
	if err != nil || empty(d) {
		return nil, err
	}
	var all []region
	first := 0 // region of the batch before
	for b := range d.Batch {
		if b > 0 && ofBatch(o.Prefix, b) == ofBatch(o.Prefix, b-1) && slices.Equal(ofBatch(qs, b), ofBatch(qs, b-1)) &&
			slices.Equal(ofBatch(ks, b), ofBatch(ks, b-1)) && (!differ || ofBatch(o.Offset, b) == ofBatch(o.Offset, b-1)) {
			for i := first; i < len(all); i++ {
				all[i].Hi[Batch]++
			}
			continue
		}
		first = len(all)
		x := wholeRegion(d)
		x.Lo[Batch], x.Hi[Batch] = b, b+1
		if differ {
			x.offset = o.Offset[b]
		}
		segments := []region{x}
		if qs != nil {
			if segments, err = x.splitSegments(p, ofBatch(qs, b), ofBatch(ks, b)); err != nil {
				return nil, err
			}
		}
		for _, x := range segments {
			if o.Prefix != nil && p.Visible.Right != Unbounded {
				n := min(ofBatch(o.Prefix, b), d.SeqK)
				// Row i sees the keys up to i + Offset + Right by the rule. Where that is
				// before the end of the prefix, the row sees up to that end.
				early, late := x.splitRows(n - p.Visible.Offset - x.offset - p.Visible.Right)
				early.ahead, early.limit = true, min(n, early.limit)
				all, x = early.appendTo(all, p), late
			}
			all = x.appendTo(all, p)
		}
	}
	if len(all) == 1 && all[0] == wholeRegion(d) {
		return nil, nil
	}
	return all, nil
}

// ofBatch returns the element of batch b of a list with one for each batch, one for all, or none.
func ofBatch[T any](all []T, b int) (x T) {
	if len(all) > 0 {
		x = all[min(b, len(all)-1)]
	}
	return x
}

// segmentIDs checks the segment ids and returns those of the rows and of the keys.
func (o *Options) segmentIDs(d Dims, keys int) (qs, ks [][]int32, err error) {
	qs, ks = o.QSegments, o.KSegments
	switch {
	case qs == nil && ks != nil:
		return nil, nil, fmt.Errorf("ksegments are given without qsegments: rows need ids too: %w", ErrShape)
	case qs != nil && ks == nil:
		if ks = qs; d.SeqQ != keys {
			return nil, nil, fmt.Errorf("qsegments have ids for %d rows, there are %d keys: give ksegments too: %w", d.SeqQ, keys, ErrShape)
		}
	}
	for _, s := range []struct {
		name string
		ids  [][]int32
		n    int
		of   string
	}{{"qsegments", qs, d.SeqQ, "rows"}, {"ksegments", ks, keys, "keys"}} {
		if n := len(s.ids); s.ids != nil && n != 1 && n != d.Batch {
			return nil, nil, wrongLength(s.name, n, "batches", 1, d.Batch)
		}
		for b, ids := range s.ids {
			if len(ids) != s.n {
				return nil, nil, wrongLength(fmt.Sprintf("%s[%d]", s.name, b), len(ids), s.of, s.n)
			}
		}
	}
	return qs, ks, nil
}

// splitSegments returns a region for each run of rows with one id, over the keys with that id.
func (x region) splitSegments(p *problem, rows, keys []int32) ([]region, error) {
	keysOf := make(map[int32][2]int)
	for lo, hi := range runs(keys[:x.Hi[Dim]]) {
		was, twice := keysOf[keys[lo]]
		switch {
		case twice:
			return nil, fmt.Errorf("segment %d of batch %d has keys %d to %d and again %d to %d, the keys of a segment must be adjacent (otherwise use Mask): %w",
				keys[lo], x.Lo[Batch], was[0], was[1]-1, lo, hi-1, ErrOption)
		case !p.Blocks.IsZero() && lo%p.BlockK != 0:
			return nil, fmt.Errorf("a segment of batch %d begins at key %d, inside a block of the block mask: segments must begin at multiples of %d (otherwise use Mask): %w",
				x.Lo[Batch], lo, p.BlockK, ErrOption)
		}
		keysOf[keys[lo]] = [2]int{lo, hi}
	}
	var all []region
	for lo, hi := range runs(rows) {
		y := x
		y.Lo[Seq], y.Hi[Seq] = lo, hi
		if own, ok := keysOf[rows[lo]]; ok {
			y.Lo[Dim], y.Hi[Dim] = own[0], own[1]
		} else { // a call needs a key, even if no row sees it
			y.Hi[Dim], y.limit = 1, 0
		}
		all = append(all, y)
	}
	return all, nil
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

// splitRows cuts the rows of x at row i; either side may be empty.
func (x region) splitRows(i int) (before, after region) {
	i = max(x.Lo[Seq], min(i, x.Hi[Seq]))
	before, after = x, x
	before.Hi[Seq], after.Lo[Seq] = i, i
	return before, after
}

// appendTo appends x to all unless it has no rows. With a block mask it becomes two when its
// first row lies inside a block, because a slice of the mask begins with a block.
func (x region) appendTo(all []region, p *problem) []region {
	if !p.Blocks.IsZero() {
		var head region
		head, x = x.splitRows(view.CeilDiv(x.Lo[Seq], p.BlockQ) * p.BlockQ)
		if head.Lo[Seq] < head.Hi[Seq] {
			all = append(all, head)
		}
	}
	if x.Lo[Seq] < x.Hi[Seq] {
		all = append(all, x)
	}
	return all
}

// cut returns the canonical problem of part x of p.
func (p *problem) cut(x region) backend.Problem {
	q := p.Problem
	if x == wholeRegion(p.dims) {
		return q
	}
	b0, b1, h0, h1 := x.Lo[Batch], x.Hi[Batch], x.Lo[Heads], x.Hi[Heads]
	q.Visible = x.visible(p.Visible)
	relative := x.Relative(p.dims.SeqQ)
	q.Mask, q.Bias, q.Relative = x.Scores(p.Mask), x.Scores(p.Bias), relative.Scores(p.Relative)
	if !p.Blocks.IsZero() {
		blocks := x.Blocks(p.BlockQ, p.BlockK)
		q.Blocks = blocks.Scores(p.Blocks)
	}
	switch n := p.dims.Heads; {
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
		for axis, from := range [4]int{Seq: Dim, Batch: Batch, Heads: Heads, Dim: Dim} {
			mod.First[axis] += x.Lo[from]
		}
		q.ScoreMod = &mod
	}
	return q
}

// visible returns the rule v for the rows and keys of x, counted from their first ones.
func (x region) visible(v backend.Visibility) backend.Visibility {
	first, keys := x.Lo[Dim], x.Hi[Dim]-x.Lo[Dim]
	v.Offset += x.Lo[Seq] - first + x.offset
	if x.ahead {
		v.Right = Unbounded
	}
	if v.KLen == nil && x.limit >= x.Hi[Dim] {
		return v
	}
	n := make([]int, x.Hi[Batch]-x.Lo[Batch])
	for b := range n {
		n[b] = x.limit
		if v.KLen != nil {
			n[b] = min(n[b], v.KLen[x.Lo[Batch]+b])
		}
		n[b] = max(0, min(n[b]-first, keys))
	}
	v.KLen = n
	return v
}

// pages returns the pages of the batches and keys of x; nil stays nil. size is the number of keys of a page.
func (x region) pages(p *Pages, size int) (*Pages, error) {
	b0, b1, j0, j1 := x.Lo[Batch], x.Hi[Batch], x.Lo[Dim], x.Hi[Dim]
	if p == nil || b0 == 0 && b1 == len(p.Table) && j0 == 0 && j1 == p.Keys {
		return p, nil
	}
	if j0%size != 0 {
		return nil, fmt.Errorf("a segment of batch %d begins at key %d, inside a page: with pages, segments must begin at multiples of %d: %w", b0, j0, size, ErrUnsupported)
	}
	own := &Pages{Table: make([][]int32, b1-b0), Keys: j1 - j0}
	for b, row := range p.Table[b0:b1] {
		own.Table[b] = row[min(j0/size, len(row)):]
	}
	return own, nil
}

// addSequences validates the options of packed sequences and appends the subcalls of each.
func (c *Call) addSequences() error {
	if c.opt.CuK == nil {
		c.opt.CuK = c.opt.CuQ
	}
	opt, d := &c.opt, c.dims
	n := len(opt.CuQ) - 1
	if d.Batch != 1 {
		return fmt.Errorf("q has shape %v, packed sequences have 1 batch: %w", c.q.Shape(), ErrShape)
	}
	if len(opt.CuK) != len(opt.CuQ) || n < 1 {
		return fmt.Errorf("cuQ has %d entries and cuK %d: both have 0 and then the end of each sequence: %w", len(opt.CuQ), len(opt.CuK), ErrShape)
	}
	if err := cmp.Or(checkCumulative("cuQ", opt.CuQ, d.SeqQ, "rows"), checkCumulative("cuK", opt.CuK, d.SeqK, "keys"),
		opt.checkLengths(n, d.Heads, "sequences")); err != nil {
		return err
	}
	for i := range n {
		if opt.CuQ[i] == opt.CuQ[i+1] {
			continue
		}
		if err := c.addSequence(i); err != nil {
			return fmt.Errorf("sequence %d: %w", i, err)
		}
	}
	return nil
}

// checkCumulative checks a list of cumulative lengths.
func checkCumulative(name string, cu []int, total int, of string) error {
	for n, at := range cu {
		if before := cu[max(n-1, 0)]; n == 0 && at != 0 || at < before {
			return fmt.Errorf("%s[%d] is %d, after %d: the list must begin with 0 and never fall: %w", name, n, at, before, ErrOption)
		}
	}
	if last := cu[len(cu)-1]; last != total {
		return fmt.Errorf("%s[%d] is %d, there are %d %s: they must be equal: %w", name, len(cu)-1, last, total, of, ErrOption)
	}
	return nil
}

// addSequence appends the subcalls of sequence n, which has rows.
func (c *Call) addSequence(n int) error {
	opt, heads := c.opt, c.dims.Heads
	row, key, keys := opt.CuQ[n], opt.CuK[n], opt.CuK[n+1]-opt.CuK[n]
	opt.Dropout.First[Batch] += n
	if opt.ScoreMod != nil {
		mod := *opt.ScoreMod
		mod.First[Batch] += n
		opt.ScoreMod = &mod
	}
	if opt.KLen != nil {
		opt.KLen = c.opt.KLen[n : n+1]
	}
	if opt.Prefix != nil {
		opt.Prefix = []int{ofBatch(c.opt.Prefix, n)}
	}
	if len(opt.Offset) > 1 {
		opt.Offset = c.opt.Offset[n : n+1]
	}
	if len(opt.ALiBi) > heads {
		opt.ALiBi = c.opt.ALiBi[n*heads : (n+1)*heads]
	}
	if keys == 0 { // a backend call needs a key, even if no row sees it
		if opt.KLen != nil && opt.KLen[0] != 0 {
			return fmt.Errorf("klen[%d] is %d, the sequence has no keys: %w", n, opt.KLen[0], ErrOption)
		}
		opt.KLen, opt.Prefix = []int{0}, nil
		key, keys = min(key, c.dims.SeqK-1), 1
	} else if len(c.opt.Prefix) == 1 {
		opt.Prefix[0] = min(opt.Prefix[0], keys)
	}
	d := c.dims
	d.SeqQ, d.SeqK = opt.CuQ[n+1]-row, keys
	p, err := opt.problem(d)
	if err != nil || empty(c.dims) {
		return err
	}
	return c.add(&p, n, row, key)
}

// Part is a rectangle of the scores of a call in which one visibility rule holds.
type Part struct {
	// Lo and Hi are the ranges [Lo, Hi) of batches, query rows and keys.
	Lo, Hi [3]int
	// Visible is the rule for the rows and keys of the part, counted from its first ones.
	// Its KLen, unless nil, has one length for each batch of the part.
	Visible Visibility
}

// Parts returns the parts of a call with lengths d. It is for programs that distribute a call over machines: they
// compute each part, or rows and keys of it, as a call of its own with a Window, an Offset and a KLen. Every row of
// every batch belongs to one part, which has all keys that the row may see. A call without a Prefix, segments and
// different offsets is one part; a call without rows or keys has none. Parts ignores CuQ and CuK.
//
// It returns ErrShape and ErrOption as [Device.Prepare] does.
func (o *Options) Parts(d Dims) (parts []Part, err error) {
	if err := divides(d.Heads, d.KVHeads, "k", "q"); err != nil {
		return nil, err
	}
	if o.KeyIndices != nil {
		return nil, fmt.Errorf("key indices: each part would need its own: compute the call on one machine: %w", ErrUnsupported)
	}
	p, err := o.problem(d)
	if err != nil {
		return nil, err
	}
	err = p.eachRegion(func(x region, own backend.Problem) error {
		parts = append(parts, Part{
			Lo:      [3]int{x.Lo[Batch], x.Lo[Seq], x.Lo[Dim]},
			Hi:      [3]int{x.Hi[Batch], x.Hi[Seq], x.Hi[Dim]},
			Visible: own.Visible,
		})
		return nil
	})
	return parts, err
}

// eachRegion calls f with each region of p and its problem, unless p has no scores.
func (p *problem) eachRegion(f func(x region, own backend.Problem) error) error {
	if empty(p.dims) {
		return nil
	}
	whole := [1]region{wholeRegion(p.dims)}
	regions := p.regions
	if regions == nil {
		regions = whole[:]
	}
	for _, x := range regions {
		if err := f(x, p.cut(x)); err != nil {
			return err
		}
	}
	return nil
}
