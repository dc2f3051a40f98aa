package kernels

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/internal/region"
)

// regions returns the regions into which Prefix, Spans, QSegments and KSegments, of which some are set, divide p,
// nil when one call computes all. keys is Sk, hidden keys included.
func (o *Options) regions(p *region.Problem, keys int) ([]region.Region, error) {
	d := p.Dims
	qs, ks, err := o.segmentIDs(d, keys)
	if err := cmp.Or(o.checkSpans(keys), err); err != nil || region.Empty(d) {
		return nil, err
	}
	var all []region.Region
	first := 0 // region of the batch before
	for b := range d.Batch {
		if b > 0 && ofBatch(o.Prefix, b) == ofBatch(o.Prefix, b-1) && slices.Equal(ofBatch(o.Spans, b), ofBatch(o.Spans, b-1)) &&
			slices.Equal(ofBatch(qs, b), ofBatch(qs, b-1)) && slices.Equal(ofBatch(ks, b), ofBatch(ks, b-1)) &&
			(o.Prefix == nil && o.Spans == nil || p.Visible.OffsetOf(b) == p.Visible.OffsetOf(b-1)) {
			for i := first; i < len(all); i++ {
				all[i].Hi[Batch]++
			}
			continue
		}
		first = len(all)
		if all, err = o.appendRegions(all, p, b, ofBatch(qs, b), ofBatch(ks, b)); err != nil {
			return nil, err
		}
	}
	if len(all) == 1 && all[0] == region.WholeRegion(d) {
		return nil, nil
	}
	return all, nil
}

// appendRegions appends the regions of batch b to all. rows and keys are their segment ids, or nil.
func (o *Options) appendRegions(all []region.Region, p *region.Problem, b int, rows, keys []int32) (_ []region.Region, err error) {
	x := region.WholeRegion(p.Dims)
	x.Lo[Batch], x.Hi[Batch] = b, b+1
	segments := []region.Region{x}
	if o.QSegments != nil {
		if segments, err = x.SplitSegments(p, rows, keys); err != nil {
			return nil, err
		}
	}
	for _, x := range segments {
		if o.Prefix != nil && p.Visible.Right != Unbounded {
			n := min(ofBatch(o.Prefix, b), p.Dims.SeqK)
			// Row i sees the keys up to i + Offset + Right by the rule. Where that is
			// before the end of the prefix, the row sees up to that end.
			early, late := x.SplitRows(n - p.Visible.OffsetOf(b) - p.Visible.Right)
			early.Ahead, early.Limit = true, min(n, early.Limit)
			all, x = early.AppendTo(all, p), late
		}
		for _, span := range ofBatch(o.Spans, b) {
			if all, x, err = x.SplitSpan(all, p, span); err != nil {
				return nil, err
			}
		}
		all = x.AppendTo(all, p)
	}
	return all, nil
}

// checkSpans checks Prefix and Spans for a number of keys.
func (o *Options) checkSpans(keys int) error {
	for b, n := range o.Prefix {
		if n < 0 || n > keys {
			return fmt.Errorf("prefix[%d] is %d, there are %d keys: it must be 0 to %d: %w", b, n, keys, keys, ErrOption)
		}
	}
	if o.Prefix != nil && o.Spans != nil {
		return fmt.Errorf("prefix and spans are both set: give a prefix of n keys as the span 0 to n: %w", ErrOption)
	}
	for b, spans := range o.Spans {
		end := 0
		for _, s := range spans {
			if s[0] < end || s[1] <= s[0] || s[1] > keys {
				return fmt.Errorf("spans[%d] has the span %d to %d after %d, there are %d keys: spans must ascend, not overlap and not be empty: %w", b, s[0], s[1], end, keys, ErrOption)
			}
			end = s[1]
		}
	}
	return nil
}

// ofBatch returns the element of batch b of a list with one for each batch, one for all, or none.
func ofBatch[T any](all []T, b int) (x T) {
	if len(all) > 0 {
		x = all[min(b, len(all)-1)]
	}
	return x
}

// segmentIDs checks the segment ids and returns those of the rows and of the keys.
func (o *Options) segmentIDs(d backend.Dims, keys int) (qs, ks [][]int32, err error) {
	qs, ks = o.QSegments, o.KSegments
	switch {
	case qs == nil && ks != nil:
		return nil, nil, fmt.Errorf("ksegments are given without qsegments: rows need ids too: %w", ErrShape)
	case qs != nil && ks == nil:
		if ks = qs; d.SeqQ != keys {
			return nil, nil, fmt.Errorf("qsegments have ids for %d rows, there are %d keys: give ksegments too: %w", d.SeqQ, keys, ErrShape)
		}
	}
	return qs, ks, cmp.Or(checkIDs("qsegments", qs, d.Batch, d.SeqQ, "rows"), checkIDs("ksegments", ks, d.Batch, keys, "keys"))
}

// checkIDs checks the lengths of segment ids of n rows or keys of each batch, or of all.
func checkIDs(name string, all [][]int32, batches, n int, of string) error {
	if have := len(all); all != nil && have != 1 && have != batches {
		return wrongLength(name, have, "batches", 1, batches)
	}
	for b, ids := range all {
		if len(ids) != n {
			return wrongLength(fmt.Sprintf("%s[%d]", name, b), len(ids), of, n)
		}
	}
	return nil
}

// addSequences validates the options of packed sequences and appends the subcalls of each.
func (c *Call) addSequences() error {
	opt, d := &c.opt, c.dims
	n := len(opt.CuQ) - 1
	switch {
	case opt.Pages != nil && opt.CuK != nil:
		return fmt.Errorf("cuK is set with pages, of which each sequence has its own: give KLen instead: %w", ErrOption)
	case opt.Pages != nil && len(opt.Pages.Table) != n:
		return fmt.Errorf("pages: the table has %d rows, cuQ has %d sequences: give one for each: %w", len(opt.Pages.Table), n, ErrShape)
	case opt.Pages == nil && opt.CuK == nil:
		opt.CuK = opt.CuQ
	}
	if opt.Pages == nil && len(opt.CuK) != len(opt.CuQ) || n < 1 {
		return fmt.Errorf("cuQ has %d entries and cuK %d: both have 0 and then the end of each sequence: %w", len(opt.CuQ), len(opt.CuK), ErrShape)
	}
	err := cmp.Or(checkSequences(opt.CuQ, d.Batch, d.SeqQ, "rows"), opt.checkLengths(n, d.Heads, "sequences"))
	if opt.Pages == nil {
		err = cmp.Or(err, checkCumulative("cuK", opt.CuK, d.SeqK, "keys"))
	} else if err == nil { // Keys, by the longest row; sequences check their own
		longest := slices.MaxFunc(opt.Pages.Table, func(x, y []int32) int { return len(x) - len(y) })
		whole := backend.Problem{Visible: backend.Visibility{KLen: []int{0}}}
		err = (&backend.Call{Q: c.q, K: c.k, V: c.v, Problem: whole, Pages: &backend.Pages{Table: [][]int32{longest}, Keys: d.SeqK}}).CheckPages()
	}
	if err != nil {
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
	row, key, keys, pages := opt.CuQ[n], 0, c.dims.SeqK, c.pages
	switch {
	case pages == nil:
		key, keys = opt.CuK[n], opt.CuK[n+1]-opt.CuK[n]
	case opt.KLen != nil:
		keys = max(0, min(opt.KLen[n], keys))
	}
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
	if err != nil || region.Empty(c.dims) {
		return err
	}
	if pages != nil {
		pages = &backend.Pages{Table: pages.Table[n : n+1], Keys: keys}
		if err := (&backend.Call{Q: c.q, K: c.k, V: c.v, Problem: p.Problem, Pages: pages}).CheckPages(); err != nil {
			return err
		}
	}
	return c.add(&p, pages, n, row, key)
}

// Part is a rectangle of the scores of a call in which one visibility rule holds.
type Part struct {
	// Lo and Hi are the ranges [Lo, Hi) of batches, query rows and keys.
	Lo, Hi [3]int
	// Visible is the rule for the rows and keys of the part, counted from its first ones.
	// Its KLen and Offsets, unless nil, have one element for each batch of the part.
	Visible Visibility
}

// Parts returns the parts of a call with lengths d. It is for programs that distribute a call over machines: they
// compute each part, or rows and keys of it, as a call of its own with a Window, an Offset and a KLen. Every row of
// every batch belongs to one part, which has all keys that the row may see. A call without a Prefix and
// segments is one part; a call without rows or keys has none. Parts ignores CuQ and CuK.
//
// It returns ErrShape and ErrOption as [Device.Prepare] does.
func (o *Options) Parts(d Dims) (parts []Part, err error) {
	if err := divides(d.Heads, d.KVHeads, "k", "q"); err != nil {
		return nil, err
	}
	if o.KeyIndices != nil {
		return nil, fmt.Errorf("key indices: each part would need its own: compute the call on one machine: %w", ErrUnsupported)
	}
	p, err := o.problem(backend.Dims(d))
	if err != nil {
		return nil, err
	}
	err = p.Each(func(x region.Region, own backend.Problem, _ [][]int32) error {
		parts = append(parts, Part{
			Lo:      [3]int{x.Lo[Batch], x.Lo[Seq], x.Lo[region.Key]},
			Hi:      [3]int{x.Hi[Batch], x.Hi[Seq], x.Hi[region.Key]},
			Visible: Visibility(own.Visible),
		})
		return nil
	})
	return parts, err
}
