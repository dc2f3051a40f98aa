package kvcache

import (
	"context"
	"fmt"
	"math"
	"slices"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
)

// PagedConfig is the shape of a [Paged]. KVHeads, Dim, ValueDim, DType and RoPE are as in
// [Config].
type PagedConfig struct {
	KVHeads, Dim, ValueDim int
	DType                  backend.DType
	// PageSize is the number of tokens in a page; 0 means 64. The CPU reads pages in
	// place when it is a multiple of 16.
	PageSize int
	// Pages is the number of pages for all sequences together.
	Pages int
	// Window, unless 0, is the number of tokens that a row sees, including its own. Pages
	// that the next row does not see are freed at the end of the next append.
	Window int
	RoPE   Rotary
}

// Paged keeps the keys and values of sequences that come and go, in pages of one pool
// (Kwon et al. 2023, PagedAttention). Sequences take pages as they grow, and forks share
// the pages of their common prefix:
//
//	s, err := cache.NewSequence()
//	err = cache.Batch(s).Append(ctx, k, v, nil)
//	t, err := s.Fork()                  // the same tokens in the same pages
//	batch := cache.Batch(s, t)
//	err = batch.Append(ctx, k, v, nil)  // copies the page that both write to
//	r, err := batch.Attention(ctx, q, kvcache.CallOptions{})
//	t.Free()
//
// All methods, including those of its sequences and batches, are safe for concurrent use:
// attention calls run concurrently, all other methods wait for them.
type Paged struct{ pool pool }

// Sequence is one sequence of a [Paged].
type Sequence struct {
	cache *Paged
	placement
	freed bool
}

// NewPaged returns a cache without sequences, for the caller to Release. Errors as for
// [New].
func NewPaged(ctx context.Context, dev *kernels.Device, c PagedConfig) (*Paged, error) {
	if c.PageSize == 0 {
		c.PageSize = 64
	}
	x := &Paged{pool{dev: dev, size: c.PageSize, paged: true}}
	err := x.pool.configure(ctx, Config{KVHeads: c.KVHeads, Dim: c.Dim, ValueDim: c.ValueDim, DType: c.DType, Window: c.Window, RoPE: c.RoPE})
	if err == nil && (c.PageSize < 1 || c.Pages < 1 || c.Pages > math.MaxInt32 || c.PageSize > maxLength/c.Pages) {
		err = fmt.Errorf("config: Pages is %d and PageSize is %d, both must be at least 1 and their product at most %d: %w", c.Pages, c.PageSize, maxLength, backend.ErrOption)
	}
	if err == nil {
		err = x.pool.alloc(ctx, c.Pages)
	}
	if err != nil {
		return nil, fmt.Errorf("paged cache: %w", err)
	}
	x.pool.refs = make([]int32, c.Pages)
	for page := c.Pages - 1; page >= 0; page-- {
		x.pool.free = append(x.pool.free, int32(page))
	}
	return x, nil
}

// Release frees the memory. Later calls return ErrReleased.
func (c *Paged) Release() { c.pool.release() }

// FreePages returns the number of pages that no sequence refers to.
func (c *Paged) FreePages() int {
	c.pool.mu.RLock()
	defer c.pool.mu.RUnlock()
	return len(c.pool.free)
}

// NewSequence returns an empty sequence, for the caller to Free. It returns ErrReleased
// after Release.
func (c *Paged) NewSequence() (*Sequence, error) {
	c.pool.mu.RLock()
	defer c.pool.mu.RUnlock()
	if err := c.pool.released(); err != nil {
		return nil, fmt.Errorf("sequence: %w", err)
	}
	return &Sequence{cache: c}, nil
}

// Fork returns a sequence with the tokens that s has now, for the caller to Free. It takes
// no page: each of the two copies a shared page when it first writes to it. It returns
// ErrReleased after Free or Release.
func (s *Sequence) Fork() (*Sequence, error) {
	p := &s.cache.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := s.usable(s.cache); err != nil {
		return nil, fmt.Errorf("fork: %w", err)
	}
	return &Sequence{cache: s.cache, placement: placement{pages: p.share(s.pages), first: s.first, n: s.n}}, nil
}

// Free releases the sequence's references to its pages. A second Free does nothing.
func (s *Sequence) Free() {
	p := &s.cache.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	if !s.freed {
		p.drop(s.pages)
		s.pages, s.freed = nil, true
	}
}

// Len returns the number of tokens appended, including those that a window has dropped.
func (s *Sequence) Len() int {
	s.cache.pool.mu.RLock()
	defer s.cache.pool.mu.RUnlock()
	return s.n
}

// usable returns an error when s is not a sequence of c, or no longer one.
func (s *Sequence) usable(c *Paged) error {
	switch {
	case s.cache != c:
		return fmt.Errorf("the sequence is of another cache: %w", backend.ErrOption)
	case s.freed:
		return fmt.Errorf("the sequence was freed, make a new one: %w", backend.ErrReleased)
	}
	return c.pool.released()
}

// Batch is a list of sequences of a [Paged] that are appended to and attend together, as
// the batches of a call. It holds no memory: make one for each call when sequences come
// and go.
type Batch struct {
	cache     *Paged
	sequences []*Sequence
	seqs      []*placement // theirs
}

// Batch returns sequences of c as a batch. The batch's calls return an error for a
// sequence that cannot be one.
func (c *Paged) Batch(sequences ...*Sequence) *Batch {
	b := &Batch{cache: c, sequences: sequences, seqs: make([]*placement, len(sequences))}
	for i, s := range sequences {
		if s != nil {
			b.seqs[i] = &s.placement
		}
	}
	return b
}

func (b *Batch) check(once bool) error {
	if len(b.sequences) == 0 {
		return fmt.Errorf("the batch has no sequences: %w", backend.ErrShape)
	}
	for i, s := range b.sequences {
		if s == nil {
			return fmt.Errorf("sequence %d is nil, make it with NewSequence: %w", i, backend.ErrOption)
		}
		if err := s.usable(b.cache); err != nil {
			return fmt.Errorf("sequence %d: %w", i, err)
		}
		if j := slices.Index(b.sequences, s); once && j < i {
			return fmt.Errorf("sequences %d and %d are the same, to continue it in two ways Fork it: %w", j, i, backend.ErrOption)
		}
	}
	return nil
}

// Rotates reports whether the cache has a rotary embedding.
func (b *Batch) Rotates() bool { return b.cache.pool.config.RoPE != nil }

// Lens returns the number of tokens appended to each sequence.
func (b *Batch) Lens() []int { return b.cache.pool.lens(b.seqs) }

// Append appends tokens to each sequence, as [Cache.Append] does. After an error the
// sequences are unchanged.
//
// Errors as for Cache.Append; ErrCapacity when too few pages are free, ErrOption for a
// sequence that is in the batch twice or of another cache, ErrReleased for one that was
// freed.
func (b *Batch) Append(ctx context.Context, k, v backend.Tensor, count []int) error {
	return b.cache.pool.append(ctx, b, b.seqs, k, v, count)
}

// Attention attends from the last tokens of each sequence to all of its tokens, or to
// those of the window, as [Cache.Attention] does.
func (b *Batch) Attention(ctx context.Context, q backend.Tensor, opt CallOptions) (kernels.Result, error) {
	return b.cache.pool.attend(ctx, b, b.seqs, true, kernels.Result{}, q, opt)
}

// AttentionInto is [Batch.Attention] into preallocated tensors, as
// [kernels.Call.RunInto] takes them.
func (b *Batch) AttentionInto(ctx context.Context, out kernels.Result, q backend.Tensor, opt CallOptions) error {
	_, err := b.cache.pool.attend(ctx, b, b.seqs, false, out, q, opt)
	return err
}
