package kvcache

import (
	"context"
	"fmt"
	"slices"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/internal/region"
	"github.com/seed90331342/attn/kernels/internal/steps"
)

// Rewind removes tokens from the end of sequence b and leaves length of them, for example
// to discard tokens that speculative decoding rejects.
//
// Errors: ErrOption for a sequence that does not exist, a length greater than the
// sequence's, or one for which the window needs tokens that are overwritten; ErrReleased.
func (c *Cache) Rewind(b, length int) error {
	return c.change("rewind", b, func(p *pool, s *Sequence) error { return p.keep(context.Background(), s, "length", length, nil) })
}

// Rewind is [Cache.Rewind] of s. It frees the pages that no token is left in and that no fork shares. The next append
// copies a shared page before it writes to it. Errors as there, and ErrReleased after Free.
func (s *Sequence) Rewind(length int) error {
	return s.change("rewind", func(p *pool) error { return p.keep(context.Background(), s, "length", length, nil) })
}

// Keep removes the tokens of sequence b from position from on, except those at from+rows[i],
// which move together. rows ascend from 0, and the length becomes from+len(rows).
//
// This is how a tree of speculated tokens ends, which were appended at from on with parents first. rows is the accepted
// path. The keys of a path need no new rotation, because the depth of a token in the tree gives its final position.
//
//	from-1 | a b c d e f g    Keep(ctx, 0, from, []int{0, 2, 5})    from-1 | a c f
//
// Rows of all dtypes move without rounding. After an error of the backend the sequence is
// unchanged, or ends before the first token that moves.
//
// Errors: ErrOption for a from that Rewind refuses, and for rows that do not ascend or are not
// in the cache; ErrMemory, ErrReleased, and the backend's.
func (c *Cache) Keep(ctx context.Context, b, from int, rows []int) error {
	return c.change("keep", b, func(p *pool, s *Sequence) error { return p.keep(ctx, s, "from", from, rows) })
}

// Keep is [Cache.Keep] of s. It copies pages that forks share before it writes to them. Errors as there, ErrCapacity
// when too few pages are free for such copies, and ErrReleased after Free.
func (s *Sequence) Keep(ctx context.Context, from int, rows []int) error {
	return s.change("keep", func(p *pool) error { return p.keep(ctx, s, "from", from, rows) })
}

// change applies f, an operation, to s.
func (s *Sequence) change(operation string, f func(p *pool) error) error {
	p := s.of.orNone()
	return p.change(operation, func() error {
		if err := s.usable(p); err != nil {
			return err
		}
		return f(p)
	})
}

// change applies f, an operation, to sequence b.
func (c *Cache) change(operation string, b int, f func(p *pool, s *Sequence) error) error {
	p := c.pool.orNone()
	return p.change(operation, func() error {
		if b < 0 || b >= len(c.seqs) {
			return fmt.Errorf("sequence %d does not exist, the cache has %d: %w", b, len(c.seqs), kernels.ErrOption)
		}
		if err := f(p, c.seqs[b]); err != nil {
			return fmt.Errorf("sequence %d: %w", b, err)
		}
		return nil
	})
}

// cut sets the length of s to n. It drops the pages of a Paged that no token is left in.
func (p *pool) cut(s *Sequence, n int) {
	s.n = n
	if p.paged {
		pages := region.CeilDiv(s.used(), p.size)
		p.drop(s.pages[pages:])
		s.pages = s.pages[:pages]
	}
}

// keep is Sequence.Keep, and without rows, where it needs no ctx, Sequence.Rewind to from, which is given as name. The rows
// that move are copied to memory of their own and appended again, so that pages are shared, copied and freed as in any append.
func (p *pool) keep(ctx context.Context, s *Sequence, name string, from int, rows []int) error {
	if from < 0 || from > s.n {
		return fmt.Errorf("%s is %d, it must be 0 to the %d tokens of the sequence: %w", name, from, s.n, kernels.ErrOption)
	}
	if oldest := s.oldest(); oldest > 0 && from-(p.config.Window-1) < oldest {
		return fmt.Errorf("the sequence has its tokens from %d on, the window needs older ones at length %d: append again to an empty sequence: %w", oldest, from, kernels.ErrOption)
	}
	for i, row := range rows {
		if row < 0 || row >= s.n-from || i > 0 && row <= rows[i-1] {
			return fmt.Errorf("rows[%d] is %d, rows must ascend and be 0 to %d, of the %d tokens from %d on: %w", i, row, s.n-from-1, s.n-from, from, kernels.ErrOption)
		}
	}
	still := 0 // rows that keep their places
	for still < len(rows) && rows[still] == still {
		still++
	}
	if still == len(rows) {
		p.cut(s, from+still)
		return nil
	}
	seqs := []*Sequence{s}
	b := steps.Steps{Ctx: ctx, Dev: p.dev}
	defer b.Release()
	kept := p.gather(&b, seqs, []int{from}, rows[still:])
	if b.Err != nil {
		return b.Err
	}
	before, free := s.placement, len(p.free)
	before.pages = slices.Clone(s.pages) // the plan overwrites the end of the list
	p.cut(s, from+still)
	if err := p.plan(seqs, len(rows)-still, nil); err != nil {
		p.free = p.free[:free]
		p.share(before.pages[len(s.pages):])
		s.placement = before
		return fmt.Errorf("without the tokens from %d on, %w", from+still, err)
	}
	if err := p.copyPlanned(ctx, p.next.moves, p.next.writes, kept[0], kept[1]); err != nil {
		return err
	}
	p.commit(seqs)
	return nil
}

// gather returns copies of keys and values, which the steps own. Row i of batch b is the token of
// seqs[b] at position from[b]+rows[i]:
//
//	[B, Hkv, len(rows), D] and Dv of the cache's dtype
func (p *pool) gather(b *steps.Steps, seqs []*Sequence, from, rows []int) (kept [2]kernels.Tensor) {
	for i, t := range p.stored() {
		kept[i] = b.AllocAs(p.config.DType, kernels.Shape{len(seqs), p.config.KVHeads, len(rows), t.Shape()[kernels.Dim]})
	}
	if p.config.Latent > 0 {
		kept[1] = region.Slice(kept[0], kernels.Dim, 0, p.config.Latent)
	}
	if b.Err == nil {
		b.Err = p.read(b.Ctx, kept[:len(p.stored())], seqs, from, rows)
	}
	return kept
}

// read is gather into keys, and values if to has them. It skips tokens that a sequence does not have.
func (p *pool) read(ctx context.Context, to []kernels.Tensor, seqs []*Sequence, from, rows []int) error {
	var dst, src []kernels.Tensor
	for batch, s := range seqs {
		for i, n := 0, 0; i < len(rows); i += n {
			n = 1
			at := from[batch] + rows[i] - s.first
			if at < s.stale || at >= s.used() {
				continue
			}
			for i+n < len(rows) && rows[i+n] == rows[i]+n && (at+n)%p.size != 0 && at+n < s.used() {
				n++
			}
			for j, t := range to {
				dst = append(dst, region.Rows(t, batch, 1, i, n))
				src = append(src, region.Rows(p.kv[j], int(s.pages[at/p.size]), 1, at%p.size, n))
			}
		}
	}
	return p.dev.Copy(ctx, dst, src)
}
