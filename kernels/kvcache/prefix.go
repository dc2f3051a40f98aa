package kvcache

import (
	"context"
	"fmt"
	"slices"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/internal/region"
	"github.com/seed90331342/attn/kernels/internal/steps"
)

// A call over shared prefixes, or with a mask of the last tokens, is several calls over disjoint keys, whose results are
// merged by their log-sum-exp (Juravsky et al. 2024, Hydragen; Ye et al. 2025, FlashInfer). They have the same options,
// but for those that the cache sets: op.SharedPath refuses what would differ between them. In the call over a prefix the
// rows of all its sequences are rows of one batch, so that it reads its keys once. Prefixes may begin with prefixes:
//
//	sequence 0  A A B B d
//	sequence 1  A A B B e f     calls over A, B, C, and d to h
//	sequence 2  A A C g
//	sequence 3  A A C h

// run computes the call of c into out, by one call of the device if no others have to be merged with it.
func (p *pool) run(ctx context.Context, c *cacheCall, seqs []*Sequence, out kernels.Result) error {
	var shared []prefix
	if c.asked.SharePrefix && p.paged && len(seqs) > 1 {
		shared = p.prefixes(c, nil, 0, len(seqs), 0)
	}
	if len(shared) == 0 && !c.asked.MaskLast {
		return c.call.RunInto(ctx, out)
	}
	err := out.O.CheckDType("o", c.q.DType(), kernels.F32) // Copy takes other types, and checks the shapes
	if err == nil && !out.LSE.IsZero() {
		err = out.LSE.CheckDType("lse", kernels.F32)
	}
	if err != nil {
		return err
	}
	return p.runMerged(ctx, c, seqs, shared, out)
}

// runMerged computes the call of c over shared, over the other keys and over those of a mask, and merges the results.
func (p *pool) runMerged(ctx context.Context, c *cacheCall, seqs []*Sequence, shared []prefix, out kernels.Result) error {
	b := steps.Steps{Ctx: ctx, Dev: p.dev}
	defer b.Release()
	// alloc returns a new tensor of rows that Rows places.
	rows := c.q.Shape()
	alloc := func(dtype kernels.DType, dim int) kernels.Tensor {
		return b.Must(b.AllocAs(dtype, kernels.Shape{rows[kernels.Batch], rows[kernels.Seq], rows[kernels.Heads], dim}).Swap(kernels.Heads, kernels.Seq))
	}
	if _, ok := c.q.Rows(); !ok && (len(shared) > 0 || p.config.Window > 0) {
		q := alloc(c.q.DType(), rows[kernels.Dim])
		b.Copy(q, c.q)
		c.q = q
	}
	whole := kernels.Result{O: alloc(kernels.F32, p.config.ValueDim), LSE: alloc(kernels.F32, 1)}
	part := kernels.Result{O: alloc(kernels.F32, p.config.ValueDim), LSE: alloc(kernels.F32, 1)}
	switch {
	case len(shared) > 0:
		p.afterPrefixes(&b, c, whole, shared)
	case p.config.Window > 0:
		p.byRow(&b, c, seqs, whole)
	default:
		b.Do(func() error { return c.call.RunInto(ctx, whole) })
	}
	if b.Err != nil {
		return b.Err
	}
	for _, x := range shared {
		to := batches(part, x.lo, x.hi)
		if p.prefix(&b, c, to, x); b.Err != nil {
			return fmt.Errorf("prefix of sequences %d to %d, tokens %d to %d: %w", x.lo, x.hi-1, x.from*p.size, x.to*p.size-1, b.Err)
		}
		b.Merge(batches(whole, x.lo, x.hi), to)
	}
	if c.asked.MaskLast {
		p.maskLast(&b, c, seqs, part)
		b.Merge(whole, part)
	}
	b.Copy(out.O, whole.O)
	if !out.LSE.IsZero() {
		b.Copy(out.LSE, whole.LSE)
	}
	return b.Err
}

// prefix is pages [from, to) of the sequences [lo, hi) of a batch, which these share.
type prefix struct{ lo, hi, from, to int }

// prefixes appends the prefixes of sequences [lo, hi), whose first pages up to from are shared already, to all. They
// precede all rows. The pages that all of the sequences share come before those that some adjacent ones share.
func (p *pool) prefixes(c *cacheCall, all []prefix, lo, hi, from int) []prefix {
	table := c.pages.Table
	before := func(b int) int { return max(0, min(c.offsets[b], c.klen[b])) / p.size } // pages before its rows
	to := before(lo)
	for b := lo + 1; b < hi; b++ {
		to = min(to, before(b))
		for i := from; i < to; i++ {
			if table[b][i] != table[lo][i] {
				to = i
			}
		}
	}
	if to > from {
		all = append(all, prefix{lo, hi, from, to})
	}
	for b := lo; b < hi; {
		end := b + 1
		for end < hi && min(before(b), before(end)) > to && table[end][to] == table[b][to] {
			end++
		}
		if end-b > 1 {
			all = p.prefixes(c, all, b, end, to)
		}
		b = end
	}
	return all
}

// maskLast attends from all rows of c to the last tokens, which have the mask. It copies them, because they may begin
// inside a page.
func (p *pool) maskLast(b *steps.Steps, c *cacheCall, seqs []*Sequence, out kernels.Result) {
	rows, from, opt := make([]int, c.asked.Mask.Shape()[kernels.Dim]), make([]int, len(seqs)), c.asked.Options
	for i := range rows {
		rows[i] = i
	}
	opt.Causal, opt.Offset = !c.asked.Bidirectional, make([]int, len(seqs))
	for i, r := range seqs {
		from[i], opt.Offset[i] = r.n-len(rows), len(rows)-c.count[i]
	}
	last := p.gather(b, seqs, from, rows)
	b.Attend(out, c.q, last[0], last[1], opt)
}

// byRow attends from all rows of c to the tokens before the last ones. Each row is a batch, because its window begins at
// another token for each depth of a tree.
func (p *pool) byRow(b *steps.Steps, c *cacheCall, seqs []*Sequence, out kernels.Result) {
	opt, positions := c.opt, c.asked.Positions
	opt.Pages, opt.KLen = &kernels.Pages{Keys: max(1, slices.Max(c.klen))}, nil
	for i, r := range seqs {
		least := r.first + c.klen[i]
		if oldest := r.oldest(); oldest > 0 {
			least = max(least, oldest+p.config.Window-1)
		}
		for j := range c.q.Shape()[kernels.Seq] {
			at := c.from[i] + j
			if positions != nil {
				at = positions[min(i, len(positions)-1)][j]
			}
			if j >= c.count[i] {
				at = least // of an unspecified result
			} else if at < least || at >= r.n {
				b.Err = fmt.Errorf("row %d of sequence %d has position %d, with a mask of the last tokens and a window it must be %d to %d, of one of these tokens with a window that is in the cache: %w", j, i, at, least, r.n-1, kernels.ErrOption)
			}
			opt.Pages.Table, opt.KLen, opt.Offset = append(opt.Pages.Table, r.pages), append(opt.KLen, c.klen[i]), append(opt.Offset, at-r.first)
		}
	}
	each := func(t kernels.Tensor) kernels.Tensor { return b.Must(joined(t).Swap(kernels.Batch, kernels.Seq)) }
	b.Attend(kernels.Result{O: each(out.O), LSE: each(out.LSE)}, each(c.q), p.kv[0], p.kv[1], opt)
}

// prefix attends from all rows of the sequences of x to its keys.
func (p *pool) prefix(b *steps.Steps, c *cacheCall, out kernels.Result, x prefix) {
	opt := c.opt
	opt.Causal, opt.KLen, opt.Offset, opt.Sinks = false, nil, nil, nil // all rows see all keys, and sinks count once
	opt.Pages = &kernels.Pages{Table: [][]int32{c.pages.Table[x.lo][x.from:x.to]}, Keys: (x.to - x.from) * p.size}
	b.Attend(kernels.Result{O: joined(out.O), LSE: joined(out.LSE)}, joined(region.Slice(c.q, kernels.Batch, x.lo, x.hi)), c.k, c.v, opt)
}

// afterPrefixes attends from all rows of c to the keys after those of shared, before those of a mask of the last ones.
func (p *pool) afterPrefixes(b *steps.Steps, c *cacheCall, out kernels.Result, shared []prefix) {
	opt := c.opt
	opt.Pages = &kernels.Pages{Table: slices.Clone(c.pages.Table)}
	opt.KLen, opt.Offset = slices.Clone(opt.KLen), slices.Clone(opt.Offset) // nil stays nil
	for _, x := range shared {
		for b, pages := x.lo, x.to-x.from; b < x.hi; b++ {
			opt.Pages.Table[b] = opt.Pages.Table[b][pages:]
			opt.KLen[b] -= pages * p.size
			if opt.Offset != nil {
				opt.Offset[b] -= pages * p.size
			}
		}
	}
	opt.Pages.Keys = max(1, slices.Max(opt.KLen))
	b.Attend(out, c.q, c.k, c.v, opt)
}

// batches returns the results of batches [lo, hi).
func batches(r kernels.Result, lo, hi int) kernels.Result {
	return kernels.Result{O: region.Slice(r.O, kernels.Batch, lo, hi), LSE: region.Slice(r.LSE, kernels.Batch, lo, hi)}
}

// joined returns the rows of all batches of t as rows of one batch.
func joined(t kernels.Tensor) kernels.Tensor {
	t, _ = t.Rows() // run places them so
	return t
}
