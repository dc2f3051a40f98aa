package kvcache

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/internal/op"
	"github.com/seed90331342/attn/kernels/internal/region"
	"github.com/seed90331342/attn/kernels/internal/turn"
)

// CallOptions are the options of an attention call to a cache. The zero value is causal attention from the last tokens.
type CallOptions struct {
	// Options are those of attention over the tokens of the cache, with the length of the longest sequence as Sk. Causal need
	// not be set. The cache sets KLen, Align and Pages, and adds the positions of the rows to Offset. With a window, the cache
	// refuses options whose shape or meaning depends on the number of keys.
	//
	// Spans are of positions in the sequences, in the order of tokens. A call ignores those without a row of q. One with a token
	// that is no row of q returns ErrOption: the tokens of a span are appended, and attended from, in one call.
	kernels.Options
	// Count is the number of rows of q that each sequence has, as given to Append; nil means all. The results of further rows
	// are unspecified.
	Count []int
	// Positions [B or 1][Sq] are the positions by which a rotary embedding rotates the rows of q, as given to AppendAt; nil means
	// those of the last tokens. Masks and biases still go by the order of tokens in the cache.
	Positions [][]int
	// MaskLast applies Mask, [B or 1, H or 1, Sq or 1, n], to the last n tokens of each sequence only. All rows see all tokens
	// before them. n is at least the number of rows of q. Results may differ in the last bits from those with a Mask of all
	// tokens. Options that SharePrefix refuses are refused.
	//
	// With a window, n is at most the window. A row at position p, of Positions, sees the tokens at positions after p - Window,
	// so that siblings in a tree see the same ones before it. p is at least the number of tokens before the last n, and less
	// than that of all. Append the last n at once: the cache keeps the window of the first one of an append.
	MaskLast bool
	// Bidirectional lets rows see tokens after their own position too, as in cross attention. q may then have any number of rows.
	Bidirectional bool
	// SharePrefix reads the pages that all sequences share at their start only once, then those that adjacent ones share after
	// them, on any number of levels, and merges the results with that of each sequence's other pages. Results may differ in the
	// last bits. Options by which rows see different parts of the prefix are refused, and so is a window. A [Cache] has no shared
	// pages and ignores SharePrefix.
	SharePrefix bool
}

// Attention attends from the last tokens of each sequence to all of its tokens, or to
// those of the window, and allocates the result, for the caller to Release:
//
//	q [B, H, Sq, D] F32, F16 or BF16    O [B, H, Sq, Dv] of q's dtype
//
// Errors as for [kernels.Device.Attention], ErrShape when the cache is empty or has fewer
// tokens than q has rows, and ErrReleased.
func (x *batch) Attention(ctx context.Context, q kernels.Tensor, opt CallOptions) (kernels.Result, error) {
	out, err := x.attend(ctx, true, kernels.Result{}, q, &opt)
	if err != nil {
		out.Release()
		return kernels.Result{}, err
	}
	return out, nil
}

// AttentionInto is Attention into preallocated tensors, as [kernels.Call.RunInto] takes them.
func (x *batch) AttentionInto(ctx context.Context, out kernels.Result, q kernels.Tensor, opt CallOptions) error {
	_, err := x.attend(ctx, false, out, q, &opt)
	return err
}

// attend computes a call into out, or with alloc into a new result.
func (x *batch) attend(ctx context.Context, alloc bool, out kernels.Result, q kernels.Tensor, opt *CallOptions) (_ kernels.Result, err error) {
	defer op.Annotate(&err, "cache")
	p := x.pool.orNone()
	p.mu.RLock()
	defer p.mu.RUnlock()
	if err := x.check(false); err != nil {
		return out, err
	}
	opt.Weights = opt.Weights || !out.Weights.IsZero()
	c, err := p.prepare(ctx, x.seqs, q, opt)
	if err != nil {
		return out, err
	}
	defer p.putBack(c)
	if alloc {
		if out, err = c.call.Alloc(ctx); err != nil {
			return out, err
		}
	}
	into := out
	if into.O, err = p.turner.Outputs(ctx, out.O, c.q, p.config.ValueDim, &c.memory); err == nil {
		err = p.run(ctx, c, x.seqs, into)
	}
	if err == nil {
		err = p.turner.Back(ctx, out.O, into.O)
	}
	return out, err
}

// cacheCall is one attention call to a cache. It is kept for the next one, which does not allocate then.
type cacheCall struct {
	call    *kernels.Call
	q, k, v kernels.Tensor
	asked   CallOptions     // of the caller
	opt     kernels.Options // with which call is prepared
	memory  turn.Memory

	count, klen, offsets, from []int // of each sequence: rows of q, keys, and of its first row the Offset and the position
	pages                      kernels.Pages
	window                     kernels.Window
}

// prepare returns the call that attends from q to seqs, for the caller to put back.
func (p *pool) prepare(ctx context.Context, seqs []*Sequence, q kernels.Tensor, opt *CallOptions) (*cacheCall, error) {
	c, _ := p.idle.Get().(*cacheCall)
	if c == nil {
		c = new(cacheCall)
	}
	c.asked = *opt
	err := p.fill(ctx, c, seqs, q)
	if err == nil && c.call == nil {
		c.call, err = p.dev.Prepare(c.q, c.k, c.v, c.opt)
	} else if err == nil {
		err = c.call.Reset(c.q, c.k, c.v, c.opt)
	}
	if err != nil {
		p.putBack(c)
		return nil, err
	}
	return c, nil
}

// putBack frees what c owns and keeps the rest.
func (p *pool) putBack(c *cacheCall) {
	c.memory.Free()
	clear(c.pages.Table)
	c.q, c.asked, c.opt = kernels.Tensor{}, CallOptions{}, kernels.Options{}
	p.idle.Put(c)
}

// fill sets the operands and options of c.
func (p *pool) fill(ctx context.Context, c *cacheCall, seqs []*Sequence, q kernels.Tensor) (err error) {
	opt := &c.asked
	if n := q.Shape()[kernels.Batch]; n != len(seqs) {
		return fmt.Errorf("q has shape %v, it must have one batch for each of %d sequences: %w", q.Shape(), len(seqs), kernels.ErrShape)
	}
	if err := p.checkOptions(opt); err != nil {
		return err
	}
	c.count, err = op.Counts(c.count, opt.Count, len(seqs), q.Shape()[kernels.Seq], "q")
	if err := cmp.Or(err, op.CheckPositions(opt.Positions, len(seqs), q.Shape()[kernels.Seq], "q")); err != nil {
		return err
	}
	if n := len(opt.Offset); n > 1 && n != len(seqs) {
		return fmt.Errorf("offset has %d elements, it must have 1 or one for each of %d sequences: %w", n, len(seqs), kernels.ErrShape)
	}
	keys, err := p.place(c, seqs)
	if err != nil {
		return err
	}
	c.opt = opt.Options
	c.opt.Causal, c.opt.KLen, c.opt.Offset = !opt.Bidirectional, c.klen, c.offsets
	if err := c.ownSpans(seqs); err != nil {
		return err
	}
	if opt.MaskLast { // the call over the tokens before the last ones
		c.opt.Causal, c.opt.Offset, c.opt.Mask, c.opt.Sinks = false, nil, kernels.Tensor{}, nil
	}
	if w := p.config.Window; w > 0 {
		c.window = kernels.Window{Left: w - 1}
		c.opt.Window = &c.window
	}
	c.k, c.v = p.kv[0], p.kv[1]
	if p.paged {
		c.pages.Keys = keys
		c.opt.Pages = &c.pages
	} else {
		c.k, c.v = region.Slice(c.k, kernels.Seq, 0, keys), region.Slice(c.v, kernels.Seq, 0, keys)
	}
	c.q, err = p.turner.Queries(ctx, q, c.from, opt.Positions, &c.memory)
	return err
}

// place sets the rows, keys and pages of each sequence, and returns the keys of the longest one.
func (p *pool) place(c *cacheCall, seqs []*Sequence) (keys int, _ error) {
	opt, last := &c.asked, 0
	c.klen, c.offsets, c.from, c.pages.Table = c.klen[:0], c.offsets[:0], c.from[:0], c.pages.Table[:0]
	if opt.MaskLast {
		keys, last = 1, opt.Mask.Shape()[kernels.Dim]
	}
	for b, r := range seqs {
		n, used := c.count[b], r.used()-last
		if opt.MaskLast && (used < 0 || n > last && !opt.Bidirectional) {
			return 0, fmt.Errorf("mask covers the last %d tokens, it must cover the %d rows of q for sequence %d and at most its %d tokens: %w", last, n, b, r.n, kernels.ErrShape)
		}
		keys = max(keys, used)
		from := r.n - n // position of the first row of q; offsets count from the first row in memory, at r.first
		if from < 0 && !opt.Bidirectional {
			return 0, fmt.Errorf("q has %d rows for sequence %d, which has %d tokens: append their keys first: %w", n, b, r.n, kernels.ErrShape)
		}
		if oldest := r.oldest(); oldest > 0 && n > 0 && from-(p.config.Window-1) < oldest {
			return 0, fmt.Errorf("q has %d rows for sequence %d, whose tokens before %d are overwritten: attend after each append, from as many rows: %w", n, b, oldest, kernels.ErrOption)
		}
		c.klen, c.offsets, c.from = append(c.klen, used), append(c.offsets, from-r.first), append(c.from, from)
		if n := len(opt.Offset); n > 0 {
			c.offsets[b] += opt.Offset[min(b, n-1)]
		}
		c.pages.Table = append(c.pages.Table, r.pages)
	}
	if keys == 0 {
		return 0, fmt.Errorf("the cache is empty, append keys first: %w", kernels.ErrShape)
	}
	return keys, nil
}

// checkOptions refuses options that the cache sets, or that cannot be combined with its window or a shared prefix.
func (p *pool) checkOptions(opt *CallOptions) error {
	on, window, share := op.CachePath, p.config.Window > 0, opt.SharePrefix && p.paged
	switch {
	case window && opt.Bidirectional:
		return fmt.Errorf("option Bidirectional is set, but the cache has a window: %w", kernels.ErrOption)
	case window && share:
		return fmt.Errorf("option SharePrefix is set, but the cache has a window: %w", kernels.ErrOption)
	case opt.MaskLast && opt.Mask.IsZero():
		return fmt.Errorf("option MaskLast is set without a Mask: %w", kernels.ErrOption)
	case opt.MaskLast && window && opt.Mask.Shape()[kernels.Dim] > p.config.Window:
		return fmt.Errorf("mask covers the last %d tokens, it must cover at most the %d of the cache's window: %w", opt.Mask.Shape()[kernels.Dim], p.config.Window, kernels.ErrOption)
	}
	if window {
		on |= op.WindowPath
	}
	if opt.MaskLast || share {
		on |= op.SharedPath
	}
	set := opt.Set()
	if opt.MaskLast { // the call over the tokens before the last ones has no mask
		set = slices.DeleteFunc(set, func(name string) bool { return name == "Mask" })
	}
	return op.CheckPath(set, on)
}

// ownSpans leaves each sequence the spans of its rows of q, counted from its first token in memory.
func (c *cacheCall) ownSpans(seqs []*Sequence) error {
	given := c.asked.Spans
	if len(given) != 1 && len(given) != len(seqs) {
		return nil // none, or an error of the call
	}
	c.opt.Spans = nil
	for b, r := range seqs {
		for _, x := range given[min(b, len(given)-1)] {
			from := c.offsets[b] + r.first
			end := from + c.count[b]
			switch {
			case x[0] < x[1] && (x[1] <= from || x[0] >= end): // of another call
			case x[0] < from || x[1] > end:
				return fmt.Errorf("spans: the tokens %d to %d of sequence %d are a span, and q has rows for %d to %d: append all tokens of a span at once, and attend from them in one call: %w",
					x[0], x[1]-1, b, from, end-1, kernels.ErrOption)
			default:
				if c.opt.Spans == nil {
					c.opt.Spans = make([][][2]int, len(seqs))
				}
				c.opt.Spans[b] = append(c.opt.Spans[b], [2]int{x[0] - r.first, x[1] - r.first})
			}
		}
	}
	return nil
}

// Config returns the shape of the cache with its defaults. That of a [Paged] has neither Batch nor Capacity.
func (x *batch) Config() Config { return x.pool.orNone().config }

// Lens returns the number of tokens appended to each sequence, including those that a window has dropped.
func (x *batch) Lens() []int {
	p := x.pool.orNone()
	p.mu.RLock()
	defer p.mu.RUnlock()
	n := make([]int, len(x.seqs))
	for b, s := range x.seqs {
		if s != nil {
			n[b] = s.n
		}
	}
	return n
}

// ReadKeys copies the stored keys of the tokens at positions from, from+1, .. of each sequence:
//
//	k [B, Hkv, n, D] F32, F16 or BF16
//
// They have been rotated, multiplied by a Hadamard matrix and divided by KScale, if the cache does so. Rows of tokens
// that a sequence does not have, or no longer, are unchanged. Errors: ErrShape and ErrDType for another k, ErrOption
// for a negative from, ErrReleased, and the backend's.
func (x *batch) ReadKeys(ctx context.Context, k kernels.Tensor, from int) (err error) {
	defer op.Annotate(&err, "read keys")
	p := x.pool.orNone()
	p.mu.RLock()
	defer p.mu.RUnlock()
	n := k.Shape()[kernels.Seq]
	if err := cmp.Or(x.check(false), k.CheckShape("k", kernels.Shape{len(x.seqs), p.config.KVHeads, n, p.config.Dim}, appended, floats...)); err != nil {
		return err
	}
	if from < 0 {
		return fmt.Errorf("from is %d, it must be at least 0: %w", from, kernels.ErrOption)
	}
	rows, err := op.Positions([]int{from}, n)
	if err == nil {
		err = p.read(ctx, []kernels.Tensor{k}, x.seqs, make([]int, len(x.seqs)), rows[0])
	}
	return err
}
