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

// run computes the call of s into out.
func (p *pool) run(ctx context.Context, s *step, seqs []*Sequence, out kernels.Result) error {
	var shared []prefix
	if s.asked.SharePrefix && p.paged && len(seqs) > 1 {
		shared = p.prefixes(s, nil, 0, len(seqs), 0)
	}
	if len(shared) == 0 && !s.asked.MaskLast {
		return s.call.RunInto(ctx, out)
	}
	// RunInto and Copy check the shapes.
	if t := out.O.DType(); t != s.q.DType() && t != kernels.F32 {
		return fmt.Errorf("o is %v, it must be %v as q or f32: %w", t, s.q.DType(), kernels.ErrDType)
	}
	if !out.LSE.IsZero() && out.LSE.DType() != kernels.F32 {
		return fmt.Errorf("lse is %v, it must be f32: %w", out.LSE.DType(), kernels.ErrDType)
	}
	b := steps.Steps{Ctx: ctx, Dev: p.dev}
	defer b.Release()
	// alloc returns a new tensor of rows that Rows places.
	rows := s.q.Shape()
	alloc := func(dtype kernels.DType, dim int) kernels.Tensor {
		return b.Must(b.AllocAs(dtype, kernels.Shape{rows[kernels.Batch], rows[kernels.Seq], rows[kernels.Heads], dim}).Swap(kernels.Heads, kernels.Seq))
	}
	if _, ok := s.q.Rows(); !ok && (len(shared) > 0 || p.config.Window > 0) {
		q := alloc(s.q.DType(), rows[kernels.Dim])
		b.Copy(q, s.q)
		s.q = q
	}
	whole := kernels.Result{O: alloc(kernels.F32, p.config.ValueDim), LSE: alloc(kernels.F32, 1)}
	part := kernels.Result{O: alloc(kernels.F32, p.config.ValueDim), LSE: alloc(kernels.F32, 1)}
	switch {
	case len(shared) > 0:
		p.afterPrefixes(&b, s, whole, shared)
	case p.config.Window > 0:
		p.byRow(&b, s, seqs, whole)
	default:
		b.Do(func() error { return s.call.RunInto(ctx, whole) })
	}
	if b.Err != nil {
		return b.Err
	}
	for _, x := range shared {
		to := batches(part, x.lo, x.hi)
		if p.prefix(&b, s, to, x); b.Err != nil {
			return fmt.Errorf("prefix of sequences %d to %d, tokens %d to %d: %w", x.lo, x.hi-1, x.from*p.size, x.to*p.size-1, b.Err)
		}
		b.Merge(batches(whole, x.lo, x.hi), to)
	}
	if s.asked.MaskLast {
		p.maskLast(&b, s, seqs, part)
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
func (p *pool) prefixes(s *step, all []prefix, lo, hi, from int) []prefix {
	table := s.pages.Table
	before := func(b int) int { return max(0, min(s.offsets[b], s.klen[b])) / p.size } // pages before its rows
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
			all = p.prefixes(s, all, b, end, to)
		}
		b = end
	}
	return all
}

// maskLast attends from all rows of s to the last tokens, which have the mask. It copies them, because they may begin
// inside a page.
func (p *pool) maskLast(b *steps.Steps, s *step, seqs []*Sequence, out kernels.Result) {
	rows, from, opt := make([]int, s.asked.Mask.Shape()[kernels.Dim]), make([]int, len(seqs)), s.asked.Options
	for i := range rows {
		rows[i] = i
	}
	opt.Causal, opt.Offset = !s.asked.Bidirectional, make([]int, len(seqs))
	for i, r := range seqs {
		from[i], opt.Offset[i] = r.n-len(rows), len(rows)-s.count[i]
	}
	last := p.gather(b, seqs, from, rows)
	b.Attend(out, s.q, last[0], last[1], opt)
}

// byRow attends from all rows of s to the tokens before the last ones. Each row is a batch, because its window begins at
// another token for each depth of a tree.
func (p *pool) byRow(b *steps.Steps, s *step, seqs []*Sequence, out kernels.Result) {
	opt, positions := s.opt, s.asked.Positions
	opt.Pages, opt.KLen = &kernels.Pages{Keys: max(1, slices.Max(s.klen))}, nil
	for i, r := range seqs {
		least := r.first + s.klen[i]
		if oldest := r.oldest(); oldest > 0 {
			least = max(least, oldest+p.config.Window-1)
		}
		for j := range s.q.Shape()[kernels.Seq] {
			at := s.from[i] + j
			if positions != nil {
				at = positions[min(i, len(positions)-1)][j]
			}
			if j >= s.count[i] {
				at = least // of an unspecified result
			} else if at < least || at >= r.n {
				b.Err = fmt.Errorf("row %d of sequence %d has position %d, with a mask of the last tokens and a window it must be %d to %d, of one of these tokens with a window that is in the cache: %w", j, i, at, least, r.n-1, kernels.ErrOption)
			}
			opt.Pages.Table, opt.KLen, opt.Offset = append(opt.Pages.Table, r.pages), append(opt.KLen, s.klen[i]), append(opt.Offset, at-r.first)
		}
	}
	each := func(t kernels.Tensor) kernels.Tensor { return b.Must(joined(t).Swap(kernels.Batch, kernels.Seq)) }
	b.Attend(kernels.Result{O: each(out.O), LSE: each(out.LSE)}, each(s.q), p.kv[0], p.kv[1], opt)
}

// prefix attends from all rows of the sequences of x to its keys.
func (p *pool) prefix(b *steps.Steps, s *step, out kernels.Result, x prefix) {
	opt := s.opt
	opt.Causal, opt.KLen, opt.Offset, opt.Sinks = false, nil, nil, nil // all rows see all keys, and sinks count once
	opt.Pages = &kernels.Pages{Table: [][]int32{s.pages.Table[x.lo][x.from:x.to]}, Keys: (x.to - x.from) * p.size}
	b.Attend(kernels.Result{O: joined(out.O), LSE: joined(out.LSE)}, joined(region.Slice(s.q, kernels.Batch, x.lo, x.hi)), s.k, s.v, opt)
}

// afterPrefixes attends from all rows of s to the keys after those of shared, before those of a mask of the last ones.
func (p *pool) afterPrefixes(b *steps.Steps, s *step, out kernels.Result, shared []prefix) {
	opt := s.opt
	opt.Pages = &kernels.Pages{Table: slices.Clone(s.pages.Table)}
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
	b.Attend(out, s.q, s.k, s.v, opt)
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
