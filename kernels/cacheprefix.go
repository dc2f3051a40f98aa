package kernels

import (
	"context"
	"fmt"
	"slices"

	"github.com/seed90331342/attn/backend"
)

// What sequences begin with alike is a call of its own, in which their rows are the
// rows of one batch: its keys and values are read once, and not once a sequence. The
// rest is another, and the two are merged by their log-sum-exp (shared prefixes as in
// Juravsky et al. 2024, Hydragen).

// common returns how many pages all sequences begin with and all rows come after.
func (x *cacheCall) common(count []int) int {
	size := x.k.Shape()[backend.Seq]
	n := len(x.table[0])
	for b, pages := range x.table {
		n = min(n, max(0, x.used[b]-count[b])/size)
		for i := range n {
			if pages[i] != x.table[0][i] {
				n = i
				break
			}
		}
	}
	return n
}

// sharedResult is shared with memory for the result.
func (x *cacheCall) sharedResult(ctx context.Context, q backend.Tensor, opt CacheOptions) (r Result, err error) {
	if err := floats(backend.Operand{Name: "q", Tensor: q}); err != nil {
		return r, err
	}
	rows := q.Shape()
	alloc := func(t *backend.Tensor, want bool, dtype backend.DType, last int) {
		rows[backend.Dim] = last
		if want && err == nil {
			*t, err = x.rows.be.Alloc(ctx, dtype, rows)
		}
	}
	alloc(&r.O, true, q.DType(), x.rows.dim2)
	alloc(&r.LSE, opt.LSE, backend.F32, 1)
	if err == nil {
		err = x.shared(ctx, r, q, opt)
	}
	if err != nil {
		r.Release()
		return Result{}, err
	}
	return r, nil
}

// shared computes the call with the pages that all begin with taken once.
func (x *cacheCall) shared(ctx context.Context, out Result, q backend.Tensor, opt CacheOptions) error {
	if err := x.sharable(out, &opt); err != nil {
		return err
	}
	opt.SharePrefix = false
	o, q, k, v, turned, err := x.prepare(ctx, q, opt)
	if err != nil {
		return err
	}
	defer turned.Release()
	count, err := counts(opt.Count, len(x.used), q.Shape()[backend.Seq], "q")
	if err != nil {
		return err
	}
	be, pages := x.rows.be, x.common(count)
	if pages == 0 {
		return AttentionInto(ctx, be, out, q, k, v, o)
	}
	shape := q.Shape()
	rows := backend.Shape{shape[0], shape[1], shape[2], x.rows.dim2}
	if err := expect("o", out.O, rows, "[B, H, Sq, Dv] of q and the cache", q.DType(), backend.F32); err != nil {
		return err
	}
	rows[backend.Dim] = 1
	if !out.LSE.IsZero() {
		if err := expect("lse", out.LSE, rows, "[B, H, Sq, 1] of q", backend.F32); err != nil {
			return err
		}
	}
	whole, err := x.partial(ctx, shape, out)
	if err != nil {
		return err
	}
	defer whole.held.Release()
	begin, err := x.partial(ctx, shape, Result{})
	if err != nil {
		return err
	}
	defer begin.held.Release()
	keys := pages * x.k.Shape()[backend.Seq]
	for i := range shape[backend.Seq] {
		var s slicer
		out := Result{O: s.acrossBatches(begin.O, i), LSE: s.acrossBatches(begin.LSE, i)}
		row := s.acrossBatches(q, i)
		if s.err != nil {
			return s.err
		}
		all := Options{Scale: o.Scale, Softcap: o.Softcap, Pages: &backend.Pages{Table: x.table[:1], Keys: keys}}
		if err := AttentionInto(ctx, be, out, row, k, v, all); err != nil {
			return fmt.Errorf("prefix of %d tokens: %w", keys, err)
		}
	}
	rest := o
	rest.Pages = &backend.Pages{Table: slices.Clone(x.table), Keys: max(1, o.Pages.Keys-keys)}
	rest.KLen, rest.Offsets = slices.Clone(o.KLen), slices.Clone(o.Offsets)
	for b := range x.table {
		rest.Pages.Table[b] = x.table[b][pages:]
		rest.KLen[b] -= keys
		rest.Offsets[b] -= keys
	}
	if err := AttentionInto(ctx, be, whole.Result, q, k, v, rest); err != nil {
		return fmt.Errorf("after the prefix of %d tokens: %w", keys, err)
	}
	if err := Merge(ctx, be, whole.Result, begin.Result); err != nil {
		return err
	}
	if whole.held.O.IsZero() {
		return nil
	}
	return x.rows.copier.Copy(ctx, out.O, whole.O)
}

// sharable refuses options under which a prefix is not the same for all rows.
func (x *cacheCall) sharable(out Result, o *CacheOptions) error {
	for _, p := range []struct {
		name string
		set  bool
	}{
		{"Window", o.Window != nil || x.rows.window > 0}, {"ALiBi", o.ALiBi != nil}, {"Mask", !o.Mask.IsZero()}, {"Bias", !o.Bias.IsZero()},
		{"RelativeBias", !o.RelativeBias.IsZero()}, {"BlockMask", !o.BlockMask.IsZero()}, {"Prefix", o.Prefix != nil}, {"QSegments", o.QSegments != nil},
		{"KSegments", o.KSegments != nil}, {"Dropout", o.Dropout.P > 0}, {"Offset", o.Offset != 0}, {"Resume", o.Resume != nil},
		{"Weights", o.Options.Weights || !out.Weights.IsZero()},
	} {
		if p.set {
			return fmt.Errorf("SharePrefix is set with %s, with which rows see a prefix in ways of their own: leave one of them out: %w", p.name, backend.ErrOption)
		}
	}
	return nil
}

// partialResult is a result that merges, and what of it is not the caller's.
type partialResult struct {
	Result
	held Result
}

// partial returns F32 memory for a result for rows of a shape: out's where that fits.
func (x *cacheCall) partial(ctx context.Context, shape backend.Shape, out Result) (p partialResult, err error) {
	p.Result = Result{O: out.O, LSE: out.LSE}
	for _, t := range []struct {
		t, held *backend.Tensor
		last    int
	}{{&p.O, &p.held.O, x.rows.dim2}, {&p.LSE, &p.held.LSE, 1}} {
		if !t.t.IsZero() && t.t.DType() == backend.F32 {
			continue
		}
		shape[backend.Dim] = t.last
		if *t.held, err = x.rows.be.Alloc(ctx, backend.F32, shape); err != nil {
			p.held.Release()
			return p, err
		}
		*t.t = *t.held
	}
	return p, nil
}

// acrossBatches returns row i of each batch of t as the rows of one batch.
func (s *slicer) acrossBatches(t backend.Tensor, i int) backend.Tensor {
	if s.err != nil {
		return t
	}
	shape, st := t.Shape(), t.Strides()
	v, err := t.View(backend.Shape{1, shape[1], shape[0], shape[3]}, backend.Strides{0, st[1], st[0], st[3]}, i*st[2])
	s.err = err
	return v
}
