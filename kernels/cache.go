package kernels

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/seed90331342/attn/backend"
)

// CacheConfig is the shape of a [Cache]. Lengths left 0 mean: Batch 1, KVHeads 1,
// ValueDim as Dim.
type CacheConfig struct {
	// Batch is how many sequences there are.
	Batch int
	// KVHeads is Hkv, Dim D and ValueDim Dv, of a key and of a value.
	KVHeads, Dim, ValueDim int
	// DType is how keys and values are kept: F32, F16, BF16, or Q8 where head sizes are
	// multiples of 4. What is appended is rounded to it.
	DType backend.DType
	// Capacity is how many tokens a sequence has room for.
	Capacity int
	// Window, unless 0, is how many tokens a row sees, its own included; older ones are
	// overwritten, and sequences may be of any length. Capacity is then at least twice
	// that: tokens are written one after the other, and when they reach the end the
	// last Window-1 move to the beginning. One append takes up to Capacity-2·(Window-1).
	Window int
	// RoPE turns keys when they are appended and queries when they attend, by their
	// positions in the sequence; nil means neither.
	RoPE *RoPE
}

// Cache keeps the keys and values of sequences that go on, one tensor each, in a
// backend's memory. A step of generation appends what its tokens give and attends:
//
//	err := cache.Append(ctx, k, v, nil)               // [B, Hkv, n, D], [B, Hkv, n, Dv]
//	r, err := cache.Attention(ctx, q, CacheOptions{}) // [B, H, n, D]
//
// Attention is causal, and the last row of q stands at the last token. Results are
// those of [Attention] over the same keys, rounded as the cache keeps them.
//
// Methods are safe for concurrent use: attention calls run side by side, the others
// wait for those that run. After an error Append has changed nothing.
type Cache struct {
	be     backend.Backend
	rows   cacheRows
	config CacheConfig

	mu   sync.RWMutex
	k, v backend.Tensor // [B, Hkv, Capacity, D] and Dv, the zero Tensor once released
	// Of each sequence: the position of the first slot, the slots in use, and how many
	// of those, the first ones, are overwritten.
	start, used, stale []int
}

// NewCache returns an empty cache in be's memory, for the caller to Release.
//
// Errors: ErrOption for a config out of range, ErrShape for lengths that are too
// large, ErrUnsupported when be is no [backend.Copier] or cannot keep the type,
// ErrMemory.
func NewCache(ctx context.Context, be backend.Backend, c CacheConfig) (*Cache, error) {
	x, err := newCache(ctx, be, c)
	if err != nil {
		return nil, fmt.Errorf("cache: %w", err)
	}
	return x, nil
}

func newCache(ctx context.Context, be backend.Backend, c CacheConfig) (*Cache, error) {
	if c.Batch == 0 {
		c.Batch = 1
	}
	rows, err := newCacheRows(be, c.KVHeads, c.Dim, c.ValueDim, c.DType, c.Window, c.RoPE)
	if err != nil {
		return nil, err
	}
	if c.Batch < 0 || c.Batch > maxOffset || c.Capacity < 1 || c.Capacity > maxOffset {
		return nil, fmt.Errorf("config: Batch is %d and Capacity %d, both must be 1 to %d: %w", c.Batch, c.Capacity, maxOffset, backend.ErrOption)
	}
	if c.Window > 0 && c.Capacity < 2*c.Window {
		return nil, fmt.Errorf("config: Capacity is %d, with a Window of %d it must be at least %d: %w", c.Capacity, c.Window, 2*c.Window, backend.ErrOption)
	}
	x := &Cache{be: be, rows: rows, config: c, start: make([]int, c.Batch), used: make([]int, c.Batch), stale: make([]int, c.Batch)}
	x.k, x.v, err = rows.alloc(ctx, c.Batch, c.Capacity)
	return x, err
}

// Release gives the memory back. Later calls return ErrReleased.
func (c *Cache) Release() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.k.Release()
	c.v.Release()
	c.k, c.v = backend.Tensor{}, backend.Tensor{}
}

// released returns ErrReleased once the cache is.
func (c *Cache) released() error {
	if c.k.IsZero() {
		return fmt.Errorf("the cache was released, make a new one: %w", backend.ErrReleased)
	}
	return nil
}

// Lens returns how many tokens each sequence has had appended, those that a window
// has dropped included.
func (c *Cache) Lens() []int {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.lens()
}

func (c *Cache) lens() []int {
	n := slices.Clone(c.used)
	for b := range n {
		n[b] += c.start[b]
	}
	return n
}

// Append adds n tokens to each sequence, or the first count[b] of them to sequence b:
//
//	k [B, Hkv, n, D]    v [B, Hkv, n, Dv]    count [B], each 0 to n, or nil
//
// k and v are F32, F16 or BF16, each on its own, in the backend's memory.
//
// Errors: ErrShape and ErrDType for what is not as above, ErrCapacity when a sequence
// has no room, ErrReleased, and the backend's.
func (c *Cache) Append(ctx context.Context, k, v backend.Tensor, count []int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.append(ctx, k, v, count); err != nil {
		return fmt.Errorf("append: %w", err)
	}
	return nil
}

func (c *Cache) append(ctx context.Context, k, v backend.Tensor, count []int) error {
	if err := c.released(); err != nil {
		return err
	}
	count, err := c.rows.appended(k, v, c.config.Batch, count)
	if err != nil {
		return err
	}
	for b, n := range count {
		if err := c.fits(b, n); err != nil {
			return err
		}
	}
	k, turned, err := c.rows.turnKeys(ctx, k, c.lens())
	if err != nil {
		return err
	}
	defer turned.Release()
	for b, n := range count {
		if c.used[b]+n > c.config.Capacity {
			if err := c.moveUp(ctx, b); err != nil {
				return err
			}
		}
	}
	// Sequences next to each other that write to the same slots are written together.
	var writes copies
	for b := 0; b < len(count); {
		to := b + 1
		for to < len(count) && count[to] == count[b] && c.used[to] == c.used[b] {
			to++
		}
		if n, at := count[b], c.used[b]; n > 0 {
			writes.add(block{c.k, b, to, at, at + n}, block{k, b, to, 0, n}, block{c.v, b, to, at, at + n}, block{v, b, to, 0, n})
		}
		b = to
	}
	if err := c.rows.write(ctx, &writes); err != nil {
		return err
	}
	for b, n := range count {
		c.used[b] += n
	}
	return nil
}

// fits returns ErrCapacity where sequence b has no room for n tokens.
func (c *Cache) fits(b, n int) error {
	most, w := c.config.Capacity, c.config.Window
	switch {
	case c.used[b]+n <= most:
		return nil
	case w == 0:
		return fmt.Errorf("sequence %d has %d of %d tokens, %d more do not fit: make the cache with a larger Capacity, or with a Window: %w",
			b, c.used[b], most, n, backend.ErrCapacity)
	case n > most-2*(w-1):
		return fmt.Errorf("%d tokens at once do not fit beside a window of %d in %d slots: append up to %d at a time, or make the cache with a larger Capacity: %w",
			n, w, most, most-2*(w-1), backend.ErrCapacity)
	}
	return nil
}

// moveUp moves the last tokens of sequence b, as many as the next row sees beside its
// own, to the first slots. Where it comes to that, they lie beyond those.
func (c *Cache) moveUp(ctx context.Context, b int) error {
	keep := min(c.config.Window-1, c.used[b])
	from := c.used[b] - keep
	if keep > 0 {
		c.stale[b] = max(c.stale[b], keep)
		var moves copies
		moves.move(c.k, c.v, block{b: b, to: b + 1, hi: keep}, block{b: b, to: b + 1, lo: from, hi: c.used[b]})
		if err := c.rows.write(ctx, &moves); err != nil {
			return err
		}
	}
	c.start[b] += from
	c.used[b], c.stale[b] = keep, 0
	return nil
}

// Rewind takes tokens off the end of sequence b, so that length are left, as when what
// was guessed ahead turns out wrong.
//
// Errors: ErrOption for a sequence that is not there, a length beyond the sequence's,
// or one whose window has been overwritten; ErrReleased.
func (c *Cache) Rewind(b, length int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.released(); err != nil {
		return fmt.Errorf("rewind: %w", err)
	}
	if b < 0 || b >= len(c.used) {
		return fmt.Errorf("rewind: there is no sequence %d, the cache has %d: %w", b, len(c.used), backend.ErrOption)
	}
	if n := c.start[b] + c.used[b]; length < 0 || length > n {
		return fmt.Errorf("rewind: sequence %d has %d tokens, %d cannot be left: %w", b, n, length, backend.ErrOption)
	}
	if oldest := c.start[b] + c.stale[b]; oldest > 0 && length-(c.config.Window-1) < oldest {
		return fmt.Errorf("rewind: sequence %d keeps tokens from %d on, of length %d the window needs older ones: Reset and append again: %w", b, oldest, length, backend.ErrOption)
	}
	c.used[b] = length - c.start[b]
	return nil
}

// Reset empties all sequences. It returns ErrReleased after Release.
func (c *Cache) Reset() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.released(); err != nil {
		return fmt.Errorf("reset: %w", err)
	}
	clear(c.start)
	clear(c.used)
	clear(c.stale)
	return nil
}

// Attention attends from the last tokens of each sequence to all of its tokens, or to
// those of the window, and allocates the result, for the caller to Release:
//
//	q [B, H, Sq, D] F32, F16 or BF16    O [B, H, Sq, Dv] of q's type
//
// Errors as for [Attention], ErrShape when the cache is empty or has fewer tokens than
// q rows, and ErrReleased.
func (c *Cache) Attention(ctx context.Context, q backend.Tensor, opt CacheOptions) (Result, error) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.call().attention(ctx, q, opt)
}

// AttentionInto is [Cache.Attention] into tensors that the caller has, as
// [AttentionInto].
func (c *Cache) AttentionInto(ctx context.Context, out Result, q backend.Tensor, opt CacheOptions) error {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.call().into(ctx, out, q, opt)
}

// call returns what attends to the cache as it is.
func (c *Cache) call() *cacheCall {
	x := &cacheCall{rows: &c.rows, err: c.released(), k: c.k, v: c.v, start: c.start, used: c.used}
	for b := range c.used {
		x.oldest = append(x.oldest, c.start[b]+c.stale[b])
	}
	return x
}

func (c *Cache) turns() bool { return c.rows.rope != nil }
