package kvcache

import (
	"fmt"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/internal/op"
)

// Rewind removes tokens from the end of sequence b and leaves length of them, for example
// to discard tokens that speculative decoding rejects.
//
// Errors: ErrOption for a sequence that does not exist, a length greater than the
// sequence's, or one for which the window needs tokens that are overwritten; ErrReleased.
func (c *Cache) Rewind(b, length int) (err error) {
	defer op.Annotate(&err, "rewind")
	p := c.pool.orNone()
	p.mu.Lock()
	defer p.mu.Unlock()
	s, err := c.sequence(b)
	if err != nil {
		return err
	}
	if err := p.checkLength(s, length); err != nil {
		return fmt.Errorf("sequence %d: %w", b, err)
	}
	p.cut(s, length)
	return nil
}

// Rewind removes tokens from the end of s and leaves n of them, as [Cache.Rewind] does. It
// frees the pages after them that no fork shares. The next append copies a shared page
// before it writes to it.
//
// Errors: ErrOption for a length greater than that of s, or one for which the window needs
// tokens that are dropped; ErrReleased after Free or Release.
func (s *Sequence) Rewind(n int) (err error) {
	defer op.Annotate(&err, "rewind")
	p := s.of.orNone()
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := s.usable(p); err != nil {
		return err
	}
	if err := p.checkLength(s, n); err != nil {
		return err
	}
	p.cut(s, n)
	return nil
}

// sequence returns sequence b of a cache that is not released.
func (c *Cache) sequence(b int) (*Sequence, error) {
	if err := c.pool.orNone().released(); err != nil {
		return nil, err
	}
	if b < 0 || b >= len(c.seqs) {
		return nil, fmt.Errorf("sequence %d does not exist, the cache has %d: %w", b, len(c.seqs), kernels.ErrOption)
	}
	return c.seqs[b], nil
}

// checkLength returns an error for a length that s cannot be rewound to.
func (p *pool) checkLength(s *Sequence, n int) error {
	if n < 0 || n > s.n {
		return fmt.Errorf("length is %d, it must be 0 to the %d tokens of the sequence: %w", n, s.n, kernels.ErrOption)
	}
	if oldest := s.oldest(); oldest > 0 && n-(p.config.Window-1) < oldest {
		return fmt.Errorf("the sequence has its tokens from %d on, the window needs older ones at length %d: append again to an empty sequence: %w", oldest, n, kernels.ErrOption)
	}
	return nil
}

// cut sets the length of s to n. It drops the pages of a Paged that no token is left in.
func (p *pool) cut(s *Sequence, n int) {
	s.n = n
	if p.paged {
		pages := (s.used() + p.size - 1) / p.size
		p.drop(s.pages[pages:])
		s.pages = s.pages[:pages]
	}
}
