package kvcache

import (
	"context"
	"fmt"
	"slices"

	"github.com/seed90331342/attn/kernels"
)

// A call with a shared prefix is two calls whose results are merged by their log-sum-exp
// (Juravsky et al. 2024, Hydragen). In the first, over the pages that all sequences begin
// with, the rows of all sequences are rows of one batch, so that these keys and values are
// read once and not once for each sequence. The second is over the other pages.

// sharedPages returns the number of pages to share in a call, those that all sequences begin
// with and that precede all rows; 0 for a plain call.
func (p *pool) sharedPages(s *step) int {
	table := s.pages.Table
	if !s.asked.SharePrefix || !p.paged || len(table) < 2 {
		return 0
	}
	n := len(table[0])
	for b, pages := range table {
		n = min(n, max(0, min(s.offsets[b], s.klen[b]))/p.size)
		for i := 0; i < n; i++ {
			if pages[i] != table[0][i] {
				n = i
			}
		}
	}
	return n
}

// run computes the call of s into out.
func (p *pool) run(ctx context.Context, s *step, out kernels.Result) error {
	pages := p.sharedPages(s)
	if pages == 0 {
		return s.call.RunInto(ctx, out)
	}
	keys := pages * p.size
	return p.union(ctx, s, out, func(to kernels.Result) error {
		if err := p.prefix(ctx, s, to, keys); err != nil {
			return fmt.Errorf("prefix of %d tokens: %w", keys, err)
		}
		return nil
	}, func(to kernels.Result) error {
		if err := p.afterPrefix(ctx, s, to, pages); err != nil {
			return fmt.Errorf("after the prefix of %d tokens: %w", keys, err)
		}
		return nil
	})
}

// maskLast merges the call of s, over the tokens before those of the mask, with one over the
// others. It copies the others, because they may begin inside a page.
func (p *pool) maskLast(ctx context.Context, s *step, seqs []*Sequence, out kernels.Result) error {
	return p.union(ctx, s, out, func(to kernels.Result) error { return p.run(ctx, s, to) }, func(to kernels.Result) error {
		rows, opt := make([]int, s.asked.Mask.Shape()[kernels.Dim]), s.asked.Options
		for i := range rows {
			rows[i] = i
		}
		opt.Causal, opt.Offset = !s.asked.Bidirectional, slices.Clone(s.offsets)
		for b, n := range s.klen {
			opt.Offset[b] -= n
		}
		last, err := p.gather(ctx, seqs, s.klen, rows)
		defer last[0].Release()
		defer last[1].Release()
		if err != nil {
			return err
		}
		call, err := p.dev.Prepare(s.q, last[0], last[1], opt)
		if err != nil {
			return err
		}
		return call.RunInto(ctx, to)
	})
}

// union computes the results of s over disjoint keys and merges them into out.
func (p *pool) union(ctx context.Context, s *step, out kernels.Result, first, second func(to kernels.Result) error) error {
	// RunInto and Copy check the shapes.
	if t := out.O.DType(); t != s.q.DType() && t != kernels.F32 {
		return fmt.Errorf("o is %v, it must be %v as q or f32: %w", t, s.q.DType(), kernels.ErrDType)
	}
	if !out.LSE.IsZero() && out.LSE.DType() != kernels.F32 {
		return fmt.Errorf("lse is %v, it must be f32: %w", out.LSE.DType(), kernels.ErrDType)
	}
	whole, err := p.partial(ctx, s.q.Shape())
	if err != nil {
		return err
	}
	defer whole.Release()
	begin, err := p.partial(ctx, s.q.Shape())
	if err != nil {
		return err
	}
	defer begin.Release()
	if err := first(begin); err != nil {
		return err
	}
	if err := second(whole); err != nil {
		return err
	}
	if err := p.dev.Merge(ctx, whole, begin); err != nil {
		return err
	}
	dst, src := []kernels.Tensor{out.O, out.LSE}, []kernels.Tensor{whole.O, whole.LSE}
	if out.LSE.IsZero() {
		dst, src = dst[:1], src[:1]
	}
	return p.dev.Copy(ctx, dst, src)
}

// prefix attends from all rows of s to its first keys. Row i of all sequences is one call.
func (p *pool) prefix(ctx context.Context, s *step, out kernels.Result, keys int) error {
	opt := s.opt
	opt.Causal, opt.KLen, opt.Offset, opt.Sinks = false, nil, nil, nil // all rows see all keys, and sinks count once
	opt.Pages = &kernels.Pages{Table: s.pages.Table[:1], Keys: keys}
	for i := range s.q.Shape()[kernels.Seq] {
		call, err := p.dev.Prepare(acrossBatches(s.q, i), s.k, s.v, opt)
		if err == nil {
			err = call.RunInto(ctx, kernels.Result{O: acrossBatches(out.O, i), LSE: acrossBatches(out.LSE, i)})
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// afterPrefix attends from all rows of s to the keys after so many pages.
func (p *pool) afterPrefix(ctx context.Context, s *step, out kernels.Result, pages int) error {
	keys, opt := pages*p.size, s.opt
	opt.Pages = &kernels.Pages{Table: slices.Clone(s.pages.Table), Keys: max(1, s.pages.Keys-keys)}
	opt.KLen, opt.Offset = slices.Clone(opt.KLen), slices.Clone(opt.Offset) // nil stays nil
	for b := range opt.KLen {
		opt.Pages.Table[b] = opt.Pages.Table[b][pages:]
		opt.KLen[b] -= keys
	}
	for b := range opt.Offset {
		opt.Offset[b] -= keys
	}
	call, err := p.dev.Prepare(s.q, s.k, s.v, opt)
	if err != nil {
		return err
	}
	return call.RunInto(ctx, out)
}

// partial returns a new result in F32 for rows of shape, which can be merged.
func (p *pool) partial(ctx context.Context, shape kernels.Shape) (r kernels.Result, err error) {
	shape[kernels.Dim] = p.config.ValueDim
	if r.O, err = p.dev.Alloc(ctx, kernels.F32, shape); err == nil {
		shape[kernels.Dim] = 1
		r.LSE, err = p.dev.Alloc(ctx, kernels.F32, shape)
	}
	if err != nil {
		r.Release()
	}
	return r, err
}

// acrossBatches returns row i of each batch of t as the rows of one batch.
func acrossBatches(t kernels.Tensor, i int) kernels.Tensor {
	n, by := t.Shape(), t.Strides()
	v, _ := t.View(kernels.Shape{1, n[1], n[0], n[3]}, kernels.Strides{0, by[1], by[0], by[3]}, i*by[2]) // elements of t
	return v
}
