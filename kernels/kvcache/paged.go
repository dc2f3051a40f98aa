package kvcache

import (
	"cmp"
	"context"
	"fmt"
	"math"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/internal/op"
)

// PagedConfig is the shape of a [Paged]. KVHeads, Dim, ValueDim, Latent, DType, KScale, VScale,
// RoPE and Hadamard are as in [Config].
type PagedConfig struct {
	KVHeads, Dim, ValueDim int
	Latent                 int
	DType                  kernels.DType
	KScale, VScale         kernels.Tensor
	// PageSize is the number of tokens in a page; 0 means 64. The CPU reads pages in place when it is a multiple of 16.
	PageSize int
	// Pages is the number of pages for all sequences together.
	Pages int
	// Window, unless 0, is the number of tokens that a row sees, including its own. Pages
	// that the next row does not see are freed at the end of the next append.
	Window   int
	RoPE     Rotary
	Hadamard bool
}

// Paged keeps the keys and values of sequences that come and go, in pages of one pool (Kwon et al. 2023,
// PagedAttention). Sequences take pages as they grow, and forks share the pages of their common prefix:
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
type Paged struct{ pool *pool }

// Sequence is one sequence of a [Paged].
type Sequence struct {
	of *pool
	placement
	freed bool
}

// NewPaged returns a cache without sequences, for the caller to Release. Errors as for [New].
func NewPaged(ctx context.Context, dev *kernels.Device, c PagedConfig) (x *Paged, err error) {
	defer op.Annotate(&err, "paged cache")
	c.PageSize = cmp.Or(c.PageSize, 64)
	p := &pool{dev: dev, size: c.PageSize, paged: true}
	if err := p.configure(ctx, Config{KVHeads: c.KVHeads, Dim: c.Dim, ValueDim: c.ValueDim, Latent: c.Latent, DType: c.DType, KScale: c.KScale, VScale: c.VScale, Window: c.Window, RoPE: c.RoPE, Hadamard: c.Hadamard}); err != nil {
		return nil, err
	}
	if c.PageSize < 1 || c.Pages < 1 || c.Pages > math.MaxInt32 || c.PageSize > op.MaxLength/c.Pages {
		return nil, fmt.Errorf("config: Pages is %d and PageSize is %d, both must be at least 1 and their product at most %d: %w", c.Pages, c.PageSize, op.MaxLength, kernels.ErrOption)
	}
	if err := kernels.CheckMemory(8 * int64(c.Pages)); err != nil {
		return nil, err
	}
	if err := p.alloc(ctx, c.Pages); err != nil {
		return nil, err
	}
	p.refs, p.free = make([]int32, c.Pages), make([]int32, c.Pages)
	for i := range p.free {
		p.free[i] = int32(c.Pages - 1 - i)
	}
	return &Paged{p}, nil
}

// Release frees the memory. Later calls return ErrReleased.
func (c *Paged) Release() { c.pool.orNone().release() }

// FreePages returns the number of pages that no sequence refers to.
func (c *Paged) FreePages() int {
	p := c.pool.orNone()
	p.mu.RLock()
	defer p.mu.RUnlock()
	return len(p.free)
}

// NewSequence returns an empty sequence, for the caller to Free. It returns ErrReleased after Release.
func (c *Paged) NewSequence() (s *Sequence, err error) {
	p := c.pool.orNone()
	err = p.change("sequence", func() error {
		s = &Sequence{of: p}
		return nil
	})
	return s, err
}

// Fork returns a sequence with the tokens that s has now, for the caller to Free. It takes no page: each of the two
// copies a shared page when it first writes to it. It returns ErrReleased after Free or Release.
func (s *Sequence) Fork() (fork *Sequence, err error) {
	err = s.change("fork", func(p *pool) error {
		fork = &Sequence{of: p, placement: placement{pages: p.share(s.pages), first: s.first, n: s.n}}
		return nil
	})
	return fork, err
}

// Free releases the sequence's references to its pages. A second Free does nothing.
func (s *Sequence) Free() {
	p := s.of.orNone()
	p.mu.Lock()
	defer p.mu.Unlock()
	if !s.freed {
		p.drop(s.pages)
		s.pages, s.freed = nil, true
	}
}

// Len returns the number of tokens appended, including those that a window has dropped.
func (s *Sequence) Len() int {
	p := s.of.orNone()
	p.mu.RLock()
	defer p.mu.RUnlock()
	return s.n
}

// usable returns an error when s is not a sequence of the cache of p, or no longer one.
func (s *Sequence) usable(p *pool) error {
	switch {
	case s.of.orNone() != p:
		return fmt.Errorf("the sequence is of another cache: %w", kernels.ErrOption)
	case s.freed:
		return fmt.Errorf("the sequence was freed, make a new one: %w", kernels.ErrReleased)
	}
	return p.released()
}

// Batch is a list of sequences of a [Paged] that are appended to and attend together, as the batches of a call. It
// holds no memory: make one for each call when sequences come and go.
type Batch struct{ batch }

// Batch returns sequences of c as a batch. The batch's calls return an error for a sequence that cannot be one.
func (c *Paged) Batch(sequences ...*Sequence) *Batch {
	return &Batch{batch{pool: c.pool, seqs: sequences}}
}
