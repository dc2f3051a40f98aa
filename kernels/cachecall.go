package kernels

import (
	"context"
	"fmt"
	"slices"

	"github.com/seed90331342/attn/backend"
)

// KVCache is what a [MultiHeadAttention] appends to and attends to: a [Cache], or
// sequences of a [PagedCache].
type KVCache interface {
	Append(ctx context.Context, k, v backend.Tensor, count []int) error
	AttentionInto(ctx context.Context, out Result, q backend.Tensor, opt CacheOptions) error
	// Lens returns how many tokens each sequence has.
	Lens() []int
	// turns reports whether the cache turns keys and queries itself.
	turns() bool
}

// CacheOptions are those of a call that attends to a cache. The zero value is causal
// attention from the last tokens.
type CacheOptions struct {
	// Options are those of [Attention] over the tokens of the cache, the longest
	// sequence's number being Sk. KLen, Align, Offsets and Pages must be left zero, as
	// the cache knows them, and with a window so must what is shaped by the keys. Causal
	// need not be set.
	Options
	// Count is how many rows of q each sequence has, as given to Append; nil means all.
	// The rows after those get numbers of no meaning.
	Count []int
	// Bidirectional lets rows see the tokens after their own position too: cross
	// attention to tokens that do not go on, where q may have any number of rows.
	Bidirectional bool
	// SharePrefix reads the pages that all sequences begin with once for all of them, and
	// merges that with what each has of its own (see [Merge]). Only Scale, Softcap and
	// Sinks may be set beside it. The last bits may be others than without.
	SharePrefix bool
}

// cacheRows is what caches have in common: how rows are kept.
type cacheRows struct {
	be               backend.Backend
	copier           backend.Copier
	heads, dim, dim2 int // dim2 of a value
	dtype            backend.DType
	window           int
	rope             *RoPE
}

func newCacheRows(be backend.Backend, heads, dim, valueDim int, dtype backend.DType, window int, rope *RoPE) (cacheRows, error) {
	if heads == 0 {
		heads = 1
	}
	if valueDim == 0 {
		valueDim = dim
	}
	r := cacheRows{be: be, heads: heads, dim: dim, dim2: valueDim, dtype: dtype, window: window, rope: rope}
	for _, l := range []struct {
		name  string
		n, lo int
	}{{"KVHeads", heads, 1}, {"Dim", dim, 1}, {"ValueDim", valueDim, 1}, {"Window", window, 0}} {
		if l.n < l.lo || l.n > maxOffset {
			return r, fmt.Errorf("config: %s is %d, it must be %d to %d: %w", l.name, l.n, l.lo, maxOffset, backend.ErrOption)
		}
	}
	if !dtype.Float() && dtype != backend.Q8 {
		return r, fmt.Errorf("config: DType is %v, it must be f32, f16, bf16 or q8: %w", dtype, backend.ErrDType)
	}
	if dtype == backend.Q8 && (dim%4 != 0 || valueDim%4 != 0) {
		return r, fmt.Errorf("config: head sizes are %d and %d, of q8 they must be multiples of 4: %w", dim, valueDim, backend.ErrOption)
	}
	var ok bool
	if r.copier, ok = be.(backend.Copier); !ok {
		return r, fmt.Errorf("%s has no copies: %w", be.Info().Name, backend.ErrUnsupported)
	}
	if rope != nil {
		if _, ok := be.(backend.Rotator); !ok {
			return r, fmt.Errorf("%s has no rotary embedding: %w", be.Info().Name, backend.ErrUnsupported)
		}
		if _, err := rope.frequencies(dim); err != nil {
			return r, fmt.Errorf("rope: %w", err)
		}
	}
	return r, nil
}

// alloc returns memory for keys and values: n rows of each head, batch times.
func (r *cacheRows) alloc(ctx context.Context, batch, n int) (k, v backend.Tensor, err error) {
	if k, err = r.be.Alloc(ctx, r.dtype, backend.Shape{batch, r.heads, n, r.dim}); err != nil {
		return k, v, err
	}
	if v, err = r.be.Alloc(ctx, r.dtype, backend.Shape{batch, r.heads, n, r.dim2}); err != nil {
		k.Release()
		return backend.Tensor{}, v, err
	}
	return k, v, nil
}

// pools is alloc for pages, those of a head side by side: with all heads of a page side
// by side, the pages of a head would be as many bytes apart as a cache has lines for one
// place, and processors read what follows a page before they are asked.
func (r *cacheRows) pools(ctx context.Context, pages, size int) (k, v backend.Tensor, err error) {
	one := *r
	one.heads = pages
	if k, v, err = one.alloc(ctx, r.heads, size); err != nil {
		return k, v, err
	}
	k, err = k.Swap(backend.Batch, backend.Heads)
	if err == nil {
		v, err = v.Swap(backend.Batch, backend.Heads)
	}
	return k, v, err
}

// appended checks what is appended and returns how many rows each sequence gets.
func (r *cacheRows) appended(k, v backend.Tensor, batch int, count []int) ([]int, error) {
	if err := floats(backend.Operand{Name: "k", Tensor: k}, backend.Operand{Name: "v", Tensor: v}); err != nil {
		return nil, err
	}
	n := k.Shape()[backend.Seq]
	for _, o := range []struct {
		name string
		t    backend.Tensor
		want backend.Shape
	}{{"k", k, backend.Shape{batch, r.heads, n, r.dim}}, {"v", v, backend.Shape{batch, r.heads, n, r.dim2}}} {
		if o.t.Shape() != o.want {
			return nil, fmt.Errorf("%s has shape %v, it must be %v, the sequences, heads and head size of the cache with as many rows as k: %w", o.name, o.t.Shape(), o.want, backend.ErrShape)
		}
	}
	return counts(count, batch, n, "k")
}

// counts returns count, or n for each of batch sequences where it is nil.
func counts(count []int, batch, n int, of string) ([]int, error) {
	if count == nil {
		return slices.Repeat([]int{n}, batch), nil
	}
	if len(count) != batch {
		return nil, fmt.Errorf("count has %d numbers, there are %d sequences: one each: %w", len(count), batch, backend.ErrShape)
	}
	for b, m := range count {
		if m < 0 || m > n {
			return nil, fmt.Errorf("count[%d] is %d, %s has %d rows: it must be 0 to %d: %w", b, m, of, n, n, backend.ErrOption)
		}
	}
	return count, nil
}

// turnKeys returns k turned by the positions from on, in memory of its own that turned
// holds; or k itself when the cache turns nothing.
func (r *cacheRows) turnKeys(ctx context.Context, k backend.Tensor, from []int) (_, turned backend.Tensor, err error) {
	dtype := r.dtype
	if dtype == backend.Q8 {
		dtype = backend.F32
	}
	return r.turn(ctx, "k", k, dtype, from)
}

func (r *cacheRows) turn(ctx context.Context, name string, x backend.Tensor, dtype backend.DType, from []int) (_, turned backend.Tensor, err error) {
	if r.rope == nil {
		return x, turned, nil
	}
	positions := make([][]int, len(from))
	for b, p := range from {
		positions[b] = Positions(p, x.Shape()[backend.Seq])[0]
	}
	angles, err := r.rope.Angles(ctx, r.be, r.dim, positions)
	if err != nil {
		return x, turned, err
	}
	defer angles.Release()
	if turned, err = r.be.Alloc(ctx, dtype, x.Shape()); err != nil {
		return x, turned, err
	}
	if err := Rotate(ctx, r.be, turned, x, angles); err != nil {
		turned.Release()
		return x, backend.Tensor{}, fmt.Errorf("%s: %w", name, err)
	}
	return turned, turned, nil
}

// block is rows [lo, hi) of batches [b, to) of a tensor.
type block struct {
	t             backend.Tensor
	b, to, lo, hi int
}

// copies are those of an append, made at once.
type copies struct {
	slicer
	to, from []backend.Tensor
}

// add adds the copy of a block of keys and of one of values.
func (c *copies) add(kTo, kFrom, vTo, vFrom block) {
	cut := func(x block) backend.Tensor {
		return c.cut(c.cut(x.t, backend.Batch, x.b, x.to), backend.Seq, x.lo, x.hi)
	}
	c.to, c.from = append(c.to, cut(kTo), cut(vTo)), append(c.from, cut(kFrom), cut(vFrom))
}

// move adds the copies of a block of k and v to another of the same. Heads go one by
// one, as rows of one lie between those of another.
func (c *copies) move(k, v backend.Tensor, to, from block) {
	in := func(t backend.Tensor, x block) block {
		x.t = t
		return x
	}
	for h := range k.Shape()[backend.Heads] {
		hk, hv := c.cut(k, backend.Heads, h, h+1), c.cut(v, backend.Heads, h, h+1)
		c.add(in(hk, to), in(hk, from), in(hv, to), in(hv, from))
	}
}

// write makes copies.
func (r *cacheRows) write(ctx context.Context, c *copies) error {
	if c.err != nil {
		return c.err
	}
	return backend.CopyBatch(ctx, r.copier, c.to, c.from)
}

// cacheCall attends to what a cache has.
type cacheCall struct {
	rows *cacheRows
	err  error // why it cannot
	k, v backend.Tensor
	// table lists the pages of each sequence when k and v are pools.
	table [][]int32
	// Of each sequence: the position of the first row, how many rows there are, and
	// the position of the first one that is still right.
	start, used, oldest []int
}

// attention is into with memory for the result.
func (x *cacheCall) attention(ctx context.Context, q backend.Tensor, opt CacheOptions) (r Result, err error) {
	if opt.SharePrefix && len(x.table) > 1 && x.err == nil {
		if r, err = x.sharedResult(ctx, q, opt); err != nil {
			return Result{}, fmt.Errorf("cache: %w", err)
		}
		return r, nil
	}
	o, q, k, v, turned, err := x.prepare(ctx, q, opt)
	if err != nil {
		return r, fmt.Errorf("cache: %w", err)
	}
	defer turned.Release()
	if r, err = Attention(ctx, x.rows.be, q, k, v, o); err != nil {
		return r, fmt.Errorf("cache: %w", err)
	}
	return r, nil
}

func (x *cacheCall) into(ctx context.Context, out Result, q backend.Tensor, opt CacheOptions) error {
	if opt.SharePrefix && len(x.table) > 1 && x.err == nil {
		if err := x.shared(ctx, out, q, opt); err != nil {
			return fmt.Errorf("cache: %w", err)
		}
		return nil
	}
	o, q, k, v, turned, err := x.prepare(ctx, q, opt)
	if err != nil {
		return fmt.Errorf("cache: %w", err)
	}
	defer turned.Release()
	if err := AttentionInto(ctx, x.rows.be, out, q, k, v, o); err != nil {
		return fmt.Errorf("cache: %w", err)
	}
	return nil
}

// prepare returns the options and operands of the call; turned is memory that q may be
// in.
func (x *cacheCall) prepare(ctx context.Context, q backend.Tensor, opt CacheOptions) (o Options, _, k, v, turned backend.Tensor, err error) {
	fail := func(err error) (Options, backend.Tensor, backend.Tensor, backend.Tensor, backend.Tensor, error) {
		return o, q, k, v, turned, err
	}
	if x.err != nil {
		return fail(x.err)
	}
	if err := floats(backend.Operand{Name: "q", Tensor: q}); err != nil {
		return fail(err)
	}
	o = opt.Options
	if err := x.check(q, &opt); err != nil {
		return fail(err)
	}
	count, err := counts(opt.Count, len(x.used), q.Shape()[backend.Seq], "q")
	if err != nil {
		return fail(err)
	}
	keys := slices.Max(x.used)
	if keys == 0 {
		return fail(fmt.Errorf("the cache is empty, append keys first: %w", backend.ErrShape))
	}
	o.Causal = !opt.Bidirectional
	o.KLen = slices.Clone(x.used)
	o.Offsets = make([]int, len(x.used))
	from := make([]int, len(x.used)) // positions
	for b, n := range count {
		o.Offsets[b] = x.used[b] - n
		from[b] = x.start[b] + o.Offsets[b]
		if from[b] < 0 && !opt.Bidirectional {
			return fail(fmt.Errorf("q has %d rows for sequence %d, which has %d tokens: append their keys first: %w", n, b, x.start[b]+x.used[b], backend.ErrShape))
		}
		if x.oldest[b] > 0 && n > 0 && from[b]-(x.rows.window-1) < x.oldest[b] {
			return fail(fmt.Errorf("q has %d rows for sequence %d, whose tokens before %d are overwritten: attend after each append, to as many rows: %w", n, b, x.oldest[b], backend.ErrOption))
		}
	}
	if w := x.rows.window; w > 0 {
		o.Window = &Window{Left: w - 1}
	}
	k, v = x.k, x.v
	if x.table != nil {
		o.Pages = &backend.Pages{Table: x.table, Keys: keys}
	} else {
		var s slicer
		if k, v = s.cut(k, backend.Seq, 0, keys), s.cut(v, backend.Seq, 0, keys); s.err != nil {
			return fail(s.err)
		}
	}
	q, turned, err = x.rows.turn(ctx, "q", q, q.DType(), from)
	return fail(err)
}

// check refuses options that the cache knows itself, or that do not fit a window.
func (x *cacheCall) check(q backend.Tensor, o *CacheOptions) error {
	if n := q.Shape()[backend.Batch]; n != len(x.used) {
		return fmt.Errorf("q has shape %v, the cache has %d sequences: one batch each: %w", q.Shape(), len(x.used), backend.ErrShape)
	}
	for _, p := range []struct {
		name string
		set  bool
	}{
		{"KLen", o.KLen != nil}, {"Align", o.Align != UpperLeft}, {"Offsets", o.Offsets != nil}, {"Pages", o.Pages != nil},
	} {
		if p.set {
			return fmt.Errorf("%s is set, which the cache knows itself: leave it out: %w", p.name, backend.ErrOption)
		}
	}
	if x.rows.window == 0 {
		return nil
	}
	for _, p := range []struct {
		name string
		set  bool
	}{
		{"Window", o.Window != nil}, {"Bidirectional", o.Bidirectional}, {"Mask", !o.Mask.IsZero()}, {"Bias", !o.Bias.IsZero()}, {"RelativeBias", !o.RelativeBias.IsZero()},
		{"BlockMask", !o.BlockMask.IsZero()}, {"Prefix", o.Prefix != nil}, {"QSegments", o.QSegments != nil}, {"KSegments", o.KSegments != nil}, {"Weights", o.Options.Weights},
		{"Offset", o.Offset != 0}, {"Dropout", o.Dropout.P > 0},
	} {
		if p.set {
			return fmt.Errorf("%s is set, but the cache has a window, whose keys begin somewhere else after each append: %w", p.name, backend.ErrOption)
		}
	}
	return nil
}
