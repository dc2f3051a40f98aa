package kernels

import (
	"context"
	"fmt"
	"math"
	"slices"
	"sync"

	"github.com/seed90331342/attn/backend"
)

// PagedConfig is the shape of a [PagedCache]. KVHeads, Dim, ValueDim, DType and RoPE
// are those of [CacheConfig].
type PagedConfig struct {
	KVHeads, Dim, ValueDim int
	DType                  backend.DType
	// PageSize is how many tokens a page has; 0 means 64. The CPU reads pages in place
	// where it is a multiple of 16.
	PageSize int
	// Pages is how many there are, for all sequences together.
	Pages int
	// Window, unless 0, is how many tokens a row sees, its own included. Pages whose
	// tokens are all older than what the next row sees go back at the next append, after
	// that has taken its own.
	Window int
	RoPE   *RoPE
}

// PagedCache keeps the keys and values of sequences that come and go, in pages of one
// pool (Kwon et al. 2023, PagedAttention): a sequence takes pages as it grows, and
// sequences that begin alike share them.
//
//	s, err := cache.NewSequence()
//	err = cache.Batch(s).Append(ctx, k, v, nil)
//	t, err := s.Fork()                     // the same tokens, in the same pages
//	batch := cache.Batch(s, t)
//	err = batch.Append(ctx, k, v, nil)     // the page that s and t both write to is copied
//	r, err := batch.Attention(ctx, q, CacheOptions{})
//	t.Free()
//
// All methods, those of its sequences and batches too, are safe for concurrent use:
// attention calls run side by side, the others wait for those that run.
type PagedCache struct {
	rows   cacheRows
	config PagedConfig

	mu   sync.RWMutex
	k, v backend.Tensor // [P, Hkv, Size, D] and Dv, the zero Tensor once released
	free []int32        // pages that no sequence has
	refs []int32        // how many sequences have each page
}

// Sequence is the tokens of one sequence in a [PagedCache].
type Sequence struct {
	cache *PagedCache
	pages []int32
	first int // position of the first token of the first page
	n     int // tokens that were appended
	freed bool
}

// NewPagedCache returns a cache without sequences in be's memory, for the caller to
// Release. Errors as for [NewCache].
func NewPagedCache(ctx context.Context, be backend.Backend, c PagedConfig) (*PagedCache, error) {
	x, err := newPagedCache(ctx, be, c)
	if err != nil {
		return nil, fmt.Errorf("paged cache: %w", err)
	}
	return x, nil
}

func newPagedCache(ctx context.Context, be backend.Backend, c PagedConfig) (*PagedCache, error) {
	if c.PageSize == 0 {
		c.PageSize = 64
	}
	rows, err := newCacheRows(be, c.KVHeads, c.Dim, c.ValueDim, c.DType, c.Window, c.RoPE)
	if err != nil {
		return nil, err
	}
	if c.PageSize < 1 || c.Pages < 1 || c.Pages > math.MaxInt32 || c.PageSize > maxOffset/c.Pages {
		return nil, fmt.Errorf("config: %d Pages of %d tokens, both must be at least 1 and together at most %d tokens: %w", c.Pages, c.PageSize, maxOffset, backend.ErrOption)
	}
	x := &PagedCache{rows: rows, config: c, refs: make([]int32, c.Pages)}
	for p := range c.Pages {
		x.free = append(x.free, int32(c.Pages-1-p))
	}
	x.k, x.v, err = rows.pools(ctx, c.Pages, c.PageSize)
	return x, err
}

// Release gives the memory back. Later calls return ErrReleased.
func (c *PagedCache) Release() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.k.Release()
	c.v.Release()
	c.k, c.v = backend.Tensor{}, backend.Tensor{}
}

func (c *PagedCache) released() error {
	if c.k.IsZero() {
		return fmt.Errorf("the cache was released, make a new one: %w", backend.ErrReleased)
	}
	return nil
}

// FreePages returns how many pages no sequence has.
func (c *PagedCache) FreePages() int {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return len(c.free)
}

// NewSequence returns a sequence without tokens, for the caller to Free. It returns
// ErrReleased after Release.
func (c *PagedCache) NewSequence() (*Sequence, error) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	if err := c.released(); err != nil {
		return nil, fmt.Errorf("sequence: %w", err)
	}
	return &Sequence{cache: c}, nil
}

// Fork returns a sequence with the tokens of s so far, for the caller to Free. It takes
// no page: both have the same ones until one of them writes to a page, which is then
// copied. It returns ErrReleased after Free or Release.
func (s *Sequence) Fork() (*Sequence, error) {
	c := s.cache
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := s.usable(c); err != nil {
		return nil, fmt.Errorf("fork: %w", err)
	}
	for _, p := range s.pages {
		c.refs[p]++
	}
	return &Sequence{cache: c, pages: slices.Clone(s.pages), first: s.first, n: s.n}, nil
}

// Free gives the pages that no other sequence has back to the cache. A second Free
// does nothing.
func (s *Sequence) Free() {
	c := s.cache
	c.mu.Lock()
	defer c.mu.Unlock()
	if !s.freed {
		c.drop(s.pages)
		s.pages, s.freed = nil, true
	}
}

// drop takes one sequence's part of pages.
func (c *PagedCache) drop(pages []int32) {
	for _, p := range pages {
		if c.refs[p]--; c.refs[p] == 0 {
			c.free = append(c.free, p)
		}
	}
}

// Len returns how many tokens s has had appended, those that a window has dropped
// included.
func (s *Sequence) Len() int {
	s.cache.mu.RLock()
	defer s.cache.mu.RUnlock()
	return s.n
}

// usable returns what is wrong with using s as a sequence of c.
func (s *Sequence) usable(c *PagedCache) error {
	switch {
	case s.cache != c:
		return fmt.Errorf("the sequence is of another cache: %w", backend.ErrOption)
	case s.freed:
		return fmt.Errorf("the sequence was freed, make a new one: %w", backend.ErrReleased)
	}
	return c.released()
}

// PagedBatch is some sequences of a [PagedCache] that go on together, in the order of
// a call's batches. It holds nothing: make one for each call as they come and go.
type PagedBatch struct {
	cache     *PagedCache
	sequences []*Sequence
}

// Batch returns sequences of c as the batches of a call. What is wrong with them is
// the error of the calls.
func (c *PagedCache) Batch(sequences ...*Sequence) *PagedBatch {
	return &PagedBatch{c, sequences}
}

// check returns what is wrong with the sequences, which a batch that is written to
// must have once each.
func (b *PagedBatch) check(once bool) error {
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
			return fmt.Errorf("sequences %d and %d are the same one, which cannot go on in two ways: Fork it: %w", j, i, backend.ErrOption)
		}
	}
	return nil
}

// Lens returns how many tokens each sequence has had appended.
func (b *PagedBatch) Lens() []int {
	b.cache.mu.RLock()
	defer b.cache.mu.RUnlock()
	return b.lens()
}

func (b *PagedBatch) lens() []int {
	n := make([]int, len(b.sequences))
	for i, s := range b.sequences {
		if s != nil {
			n[i] = s.n
		}
	}
	return n
}

// growth is what an append does to a sequence, before it is done.
type growth struct {
	dropped int     // pages before those that are left
	shared  int32   // the last page, when it is replaced by a copy, else -1
	pages   []int32 // after the append
	first   int
}

// appending is what an append does to a cache.
type appending struct {
	cache  *PagedCache
	taken  int             // pages off the end of the free list
	fewer  map[int32]int32 // references that pages lose to copies
	copies [][2]int32      // page to page
	rows   []int           // of each copy
	writes []pageWrite
}

// pageWrite is rows [from, from+n) of batch b for rows from lo on of a page.
type pageWrite struct {
	page           int32
	lo, b, from, n int
}

// take returns a page that nobody has.
func (a *appending) take() (int32, bool) {
	free := a.cache.free
	if a.taken == len(free) {
		return 0, false
	}
	a.taken++
	return free[len(free)-a.taken], true
}

// grow plans an append of n tokens, batch b of a call, to s.
func (a *appending) grow(s *Sequence, b, n int) (growth, bool) {
	c, size := a.cache, a.cache.config.PageSize
	g := growth{shared: -1, pages: s.pages, first: s.first}
	if n == 0 {
		return g, true
	}
	if w := c.config.Window; w > 0 {
		g.dropped = min(max(0, s.n-(w-1)-s.first)/size, len(s.pages))
		g.first += g.dropped * size
	}
	g.pages = slices.Clone(s.pages[g.dropped:])
	at := s.n - g.first // row after the last
	if last := len(g.pages) - 1; at%size != 0 && c.refs[g.pages[last]]-a.fewer[g.pages[last]] > 1 {
		page, ok := a.take()
		if !ok {
			return g, false
		}
		g.shared = g.pages[last]
		a.fewer[g.shared]++
		a.copies, a.rows = append(a.copies, [2]int32{page, g.shared}), append(a.rows, at%size)
		g.pages[last] = page
	}
	for from := 0; from < n; {
		if at == len(g.pages)*size {
			page, ok := a.take()
			if !ok {
				return g, false
			}
			g.pages = append(g.pages, page)
		}
		w := pageWrite{page: g.pages[at/size], lo: at % size, b: b, from: from, n: min(n-from, size-at%size)}
		a.writes = append(a.writes, w)
		from, at = from+w.n, at+w.n
	}
	return g, true
}

// Append adds n tokens to each sequence, or the first count[b] of them to the b-th:
//
//	k [B, Hkv, n, D]    v [B, Hkv, n, Dv]    count [B], each 0 to n, or nil
//
// as [Cache.Append]. After an error nothing has changed. ErrCapacity says that there
// are too few free pages; ErrOption that a sequence is there twice or of another
// cache, ErrReleased that it was freed.
func (b *PagedBatch) Append(ctx context.Context, k, v backend.Tensor, count []int) error {
	b.cache.mu.Lock()
	defer b.cache.mu.Unlock()
	if err := b.append(ctx, k, v, count); err != nil {
		return fmt.Errorf("append: %w", err)
	}
	return nil
}

func (b *PagedBatch) append(ctx context.Context, k, v backend.Tensor, count []int) error {
	c := b.cache
	if err := b.check(true); err != nil {
		return err
	}
	count, err := c.rows.appended(k, v, len(b.sequences), count)
	if err != nil {
		return err
	}
	a := appending{cache: c, fewer: map[int32]int32{}}
	all := make([]growth, len(b.sequences))
	for i, s := range b.sequences {
		var ok bool
		if all[i], ok = a.grow(s, i, count[i]); !ok {
			return fmt.Errorf("%d of %d pages of %d tokens are free, sequence %d needs more for its %d tokens and %d new ones: Free sequences, or make the cache with more Pages: %w",
				len(c.free), c.config.Pages, c.config.PageSize, i, s.n, count[i], backend.ErrCapacity)
		}
	}
	k, turned, err := c.rows.turnKeys(ctx, k, b.lens())
	if err != nil {
		return err
	}
	defer turned.Release()
	var writes copies
	for i, p := range a.copies {
		to, from, n := int(p[0]), int(p[1]), a.rows[i]
		writes.move(c.k, c.v, block{b: to, to: to + 1, hi: n}, block{b: from, to: from + 1, hi: n})
	}
	for _, w := range a.writes {
		to, hi, end := int(w.page), w.lo+w.n, w.from+w.n
		writes.add(block{c.k, to, to + 1, w.lo, hi}, block{k, w.b, w.b + 1, w.from, end}, block{c.v, to, to + 1, w.lo, hi}, block{v, w.b, w.b + 1, w.from, end})
	}
	if err := c.rows.write(ctx, &writes); err != nil {
		return err
	}
	b.commit(&a, all, count)
	return nil
}

// commit makes what an append has written part of the sequences.
func (b *PagedBatch) commit(a *appending, all []growth, count []int) {
	c := b.cache
	for _, p := range c.free[len(c.free)-a.taken:] {
		c.refs[p] = 1
	}
	c.free = c.free[:len(c.free)-a.taken]
	for i, s := range b.sequences {
		g := all[i]
		c.drop(s.pages[:g.dropped])
		if g.shared >= 0 {
			c.drop([]int32{g.shared})
		}
		s.pages, s.first = g.pages, g.first
		s.n += count[i]
	}
}

// Attention attends from the last tokens of each sequence to all of its tokens, or to
// those of the window, as [Cache.Attention].
func (b *PagedBatch) Attention(ctx context.Context, q backend.Tensor, opt CacheOptions) (Result, error) {
	b.cache.mu.RLock()
	defer b.cache.mu.RUnlock()
	return b.call().attention(ctx, q, opt)
}

// AttentionInto is [PagedBatch.Attention] into tensors that the caller has, as
// [AttentionInto].
func (b *PagedBatch) AttentionInto(ctx context.Context, out Result, q backend.Tensor, opt CacheOptions) error {
	b.cache.mu.RLock()
	defer b.cache.mu.RUnlock()
	return b.call().into(ctx, out, q, opt)
}

func (b *PagedBatch) call() *cacheCall {
	c := b.cache
	x := &cacheCall{rows: &c.rows, err: b.check(false), k: c.k, v: c.v}
	if x.err != nil {
		return x
	}
	for _, s := range b.sequences {
		x.table = append(x.table, s.pages)
		x.start, x.used, x.oldest = append(x.start, s.first), append(x.used, s.n-s.first), append(x.oldest, s.first)
	}
	return x
}

func (b *PagedBatch) turns() bool { return b.cache.rows.rope != nil }
