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

// appendPlan is an append before anything is written: the copies to make and the state of the sequences after them.
type appendPlan struct {
	count, from []int       // of each sequence: its new tokens, the position of the first
	after       []placement // of each sequence; only the append, which holds the lock, sees pages that extend an old list in place
	taken       int         // pages taken from the end of the free list
	unshared    []int32     // shared pages that a sequence replaces by a copy, once for each
	passed      []int32     // pages at the start of a sequence that its window has passed
	moves       []move
	writes      []write
	dst, src    []kernels.Tensor
	memory      turn.Memory
}

// move copies rows [lo, lo+n) of page from to rows [0, n) of page to.
type move struct {
	to, from int32
	lo, n    int
}

// write copies rows [from, from+n) that are appended to sequences [b, b+batch) to rows
// [lo, lo+n) of pages [page, page+batch).
type write struct {
	page                  int32
	b, batch, lo, from, n int
}

// Append appends n tokens to each sequence, or the first count[b] of them to sequence b:
//
//	k [B, Hkv, n, D]    v [B, Hkv, n, Dv]    count [B], each 0 to n, or nil for all
//
// k and v are in the device's memory, F32, F16 or BF16, each independently. v is the zero Tensor
// for a cache whose config is Latent. After an error no token is added; a Cache with a Window may
// have dropped tokens that the next row would not have seen.
//
// Errors: ErrShape and ErrDType for wrong operands, ErrCapacity when a sequence has no room
// or too few pages are free, ErrReleased for a cache or a sequence that was released,
// ErrOption for a sequence that is in the batch twice or of another cache, and the backend's.
func (x *batch) Append(ctx context.Context, k, v kernels.Tensor, count []int) error {
	return x.AppendAt(ctx, k, v, count, nil)
}

// AppendAt is Append of tokens at positions of their own, by which a rotary embedding rotates the keys:
//
//	positions [B or 1][n], or nil for the ones that follow those in the cache
//
// The siblings in a tree of speculated tokens share a position, that of their depth. The order of tokens stays that of the
// append, and without a rotary embedding positions have no effect. It returns ErrShape for other numbers of positions, and
// the errors of Append and of the embedding.
func (x *batch) AppendAt(ctx context.Context, k, v kernels.Tensor, count []int, positions [][]int) (err error) {
	defer op.Annotate(&err, "append")
	p, seqs := x.pool.orNone(), x.seqs
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := x.check(true); err != nil {
		return err
	}
	c, n := p.config, k.Shape()[kernels.Seq]
	rows := kernels.Shape{len(seqs), c.KVHeads, n, c.Dim}
	err = k.CheckShape("k", rows, appended, floats...)
	rows[kernels.Dim] = c.ValueDim
	switch {
	case err != nil:
	case c.Latent == 0:
		err = v.CheckShape("v", rows, appended, floats...)
	case !v.IsZero():
		err = fmt.Errorf("v has shape %v, but the values are the first %d elements of k: give the zero Tensor: %w", v.Shape(), c.Latent, kernels.ErrShape)
	}
	if err = cmp.Or(err, op.CheckPositions(positions, len(seqs), n, "k")); err == nil {
		err = p.plan(seqs, n, count)
	}
	if err != nil {
		return err
	}
	defer p.next.memory.Free()
	if k, err = p.turner.Keys(ctx, k, c.DType, p.next.from, positions, &p.next.memory); err == nil {
		v, err = p.turner.Values(ctx, v, &p.next.memory)
	}
	if err == nil && !p.paged {
		err = p.compact(ctx, seqs)
	}
	if err == nil {
		err = p.copyPlanned(ctx, p.next.moves, p.next.writes, k, v)
	}
	if err == nil {
		p.commit(seqs)
	}
	return err
}

// appended is the rule for the shapes of rows of keys and values, and floats are their types.
const appended = "sequences, heads and head size of the cache with as many rows as k"

var floats = []kernels.DType{kernels.F32, kernels.F16, kernels.BF16}

// plan plans an append of up to n tokens to each sequence in p.next. It changes nothing that another call can see.
func (p *pool) plan(seqs []*Sequence, n int, count []int) (err error) {
	a := &p.next
	a.taken, a.from, a.after, a.unshared, a.passed, a.moves, a.writes = 0, a.from[:0], a.after[:0], a.unshared[:0], a.passed[:0], a.moves[:0], a.writes[:0]
	if a.count, err = op.Counts(a.count, count, len(seqs), n, "k"); err != nil {
		return err
	}
	for b, s := range seqs {
		a.from = append(a.from, s.n)
		a.after = append(a.after, s.placement)
		g, n := &a.after[b], a.count[b]
		if n == 0 {
			continue
		}
		if err := p.makeRoom(g, b, n); err != nil {
			return err
		}
		a.planWrites(b, n, p.size, g)
		g.n += n
	}
	return nil
}

// makeRoom makes room for n tokens in the pages of a sequence, or in its only one: when they do not
// fit after the others, the tokens that the window still needs move to the start.
func (p *pool) makeRoom(g *placement, b, n int) error {
	used, size, w := g.used(), p.size, p.config.Window
	switch {
	case p.paged:
		return p.makeRoomInPages(g, b, n)
	case used+n <= size:
		return nil
	case w == 0:
		return fmt.Errorf("sequence %d has %d of %d tokens, %d more do not fit: make the cache with a larger Capacity, or with a Window: %w",
			b, used, size, n, kernels.ErrCapacity)
	case n > size-2*(w-1):
		return fmt.Errorf("%d tokens at once do not fit next to a window of %d in a Capacity of %d: append up to %d at a time, or make the cache with a larger Capacity: %w",
			n, w, size, size-2*(w-1), kernels.ErrCapacity)
	}
	// used > size-n >= 2*(w-1), so source and destination do not overlap.
	keep := w - 1
	p.next.moves = append(p.next.moves, move{to: g.pages[0], from: g.pages[0], lo: used - keep, n: keep})
	g.first, g.stale = g.n-keep, 0
	return nil
}

// makeRoomInPages plans room for n tokens of sequence b: pages before the window leave, a copy takes the place
// of a shared last page, and pages are added.
func (p *pool) makeRoomInPages(g *placement, b, n int) error {
	a, size := &p.next, p.size
	if w := p.config.Window; w > 0 {
		passed := min(max(0, g.used()-(w-1))/size, len(g.pages))
		a.passed = append(a.passed, g.pages[:passed]...)
		g.first += passed * size
		g.pages = g.pages[passed:]
	}
	used := g.used()
	needs, copies := max(0, region.CeilDiv(used+n, size)-len(g.pages)), used%size != 0 && p.sharesLast(g.pages)
	if copies {
		needs++
	}
	if needs > len(p.free)-a.taken {
		return fmt.Errorf("%d of %d pages of %d tokens are free, sequence %d needs %d for its %d tokens and %d new ones, those before it %d: Free sequences, or make the cache with more Pages: %w",
			len(p.free), len(p.refs), size, b, needs, g.n, n, a.taken, kernels.ErrCapacity)
	}
	take := func() int32 {
		a.taken++
		return p.free[len(p.free)-a.taken]
	}
	if copies {
		before, last := g.pages[:len(g.pages)-1], g.pages[len(g.pages)-1]
		g.pages = slices.Concat(before, []int32{take()})
		a.unshared = append(a.unshared, last)
		a.moves = append(a.moves, move{to: g.pages[len(before)], from: last, n: used % size})
	}
	for len(g.pages)*size < used+n {
		g.pages = append(g.pages, take())
	}
	return nil
}

// sharesLast reports whether other sequences still refer to the last page when those
// before in the plan have their copies of it.
func (p *pool) sharesLast(pages []int32) bool {
	last := pages[len(pages)-1]
	left := p.refs[last]
	for _, page := range p.next.unshared {
		if page == last {
			left--
		}
	}
	return left > 1
}

// planWrites adds the writes of n rows of sequence b after those in use. Sequences that write to the same rows of consecutive
// pages are written together, as all sequences of a Cache are when they are equally long.
func (a *appendPlan) planWrites(b, n, size int, g *placement) {
	at := g.used()
	for from := 0; from < n; {
		w := write{page: g.pages[at/size], b: b, batch: 1, lo: at % size, from: from, n: min(n-from, size-at%size)}
		from, at = from+w.n, at+w.n
		if len(a.writes) > 0 {
			if l := &a.writes[len(a.writes)-1]; l.page+int32(l.batch) == w.page && l.b+l.batch == b && l.lo == w.lo && l.from == w.from && l.n == w.n {
				l.batch++
				continue
			}
		}
		a.writes = append(a.writes, w)
	}
}

// compact makes the moves of a plan within a rolling window. It commits them before
// anything is appended, because the append may overwrite the rows that they came from.
func (p *pool) compact(ctx context.Context, seqs []*Sequence) error {
	for _, m := range p.next.moves {
		// Sequence b owns page b.
		seqs[m.to].stale = max(seqs[m.to].stale, m.n)
	}
	if err := p.copyPlanned(ctx, p.next.moves, nil, kernels.Tensor{}, kernels.Tensor{}); err != nil {
		return err
	}
	for _, m := range p.next.moves {
		s := seqs[m.to]
		s.first, s.stale = s.n-m.n, 0
	}
	p.next.moves = p.next.moves[:0]
	return nil
}

// copyPlanned makes moves and then writes from k and v, in one call of the device.
func (p *pool) copyPlanned(ctx context.Context, moves []move, writes []write, k, v kernels.Tensor) error {
	a := &p.next
	a.dst, a.src = a.dst[:0], a.src[:0]
	rows := [2]kernels.Tensor{k, v}
	for _, m := range moves {
		for _, t := range p.stored() {
			// Heads one by one: the rows of one lie between those of another, which the device would take for an overlap.
			for h := range p.config.KVHeads {
				head := region.Slice(t, kernels.Heads, h, h+1)
				a.dst = append(a.dst, region.Rows(head, int(m.to), 1, 0, m.n))
				a.src = append(a.src, region.Rows(head, int(m.from), 1, m.lo, m.n))
			}
		}
	}
	for _, w := range writes {
		for i, t := range p.stored() {
			a.dst = append(a.dst, region.Rows(t, int(w.page), w.batch, w.lo, w.n))
			a.src = append(a.src, region.Rows(rows[i], w.b, w.batch, w.from, w.n))
		}
	}
	if len(a.dst) == 0 {
		return nil
	}
	err := p.dev.Copy(ctx, a.dst, a.src)
	clear(a.dst) // so that they do not keep the caller's memory alive
	clear(a.src)
	return err
}

// commit makes the tokens that were written part of the sequences.
func (p *pool) commit(seqs []*Sequence) {
	a := &p.next
	for _, page := range p.free[len(p.free)-a.taken:] {
		p.refs[page] = 1
	}
	p.free = p.free[:len(p.free)-a.taken]
	p.drop(a.unshared)
	p.drop(a.passed)
	for b, s := range seqs {
		s.placement = a.after[b]
	}
}

// drop removes a sequence's references to pages. Pages without references are free.
func (p *pool) drop(pages []int32) {
	for _, page := range pages {
		if p.refs[page]--; p.refs[page] == 0 {
			p.free = append(p.free, page)
		}
	}
}

// share adds a sequence's references to pages, and returns its list of them.
func (p *pool) share(pages []int32) []int32 {
	for _, page := range pages {
		p.refs[page]++
	}
	return slices.Clone(pages)
}
