package kvcache

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/internal/op"
	"github.com/seed90331342/attn/kernels/internal/region"
	"github.com/seed90331342/attn/kernels/internal/turn"
)

// pool is the memory of a cache, in pages of the same size. In a Cache, sequence b owns
// page b, whose size is the capacity.
type pool struct {
	dev    *kernels.Device
	config Config // of a Paged without Batch and Capacity
	size   int    // tokens of a page
	paged  bool

	mu sync.RWMutex
	kv [2]kernels.Tensor // [P, Hkv, Size, D] and Dv, zero once released; v is a view of k if the config is Latent
	// free lists the pages that no sequence refers to, refs counts the sequences that
	// refer to each page. Only a Paged has them.
	free, refs []int32
	next       appendPlan // of the append in progress, kept for its memory
	turner     turn.Turner
	idle       sync.Pool // of *cacheCall
}

// placement locates the tokens of one sequence in a pool: the token at position first+i is in
// row i of its pages, counted through all of them.
type placement struct {
	pages []int32
	first int // position of the token in the first row
	n     int // number of tokens appended: the last one is at position n-1
	// stale is the number of rows at the start that a failed append may have overwritten.
	stale int
}

// used returns the number of rows in use.
func (r *placement) used() int { return r.n - r.first }

// oldest returns the position of the first token that can still be read.
func (r *placement) oldest() int { return r.first + r.stale }

// batch is the sequences that a call appends to (append.go) or attends to (call.go): those of a [Cache] or of a [Batch].
type batch struct {
	pool *pool
	seqs []*Sequence
}

// check returns an error for sequences that cannot be used. With once, each may be among them once only.
func (x *batch) check(once bool) error {
	p := x.pool.orNone()
	if err := p.released(); err != nil {
		return err
	}
	if len(x.seqs) == 0 {
		return fmt.Errorf("the batch has no sequences: %w", kernels.ErrShape)
	}
	for i, s := range x.seqs {
		if s == nil {
			return fmt.Errorf("sequence %d is nil, make it with NewSequence: %w", i, kernels.ErrOption)
		}
		if err := s.usable(p); err != nil {
			return fmt.Errorf("sequence %d: %w", i, err)
		}
		if once && p.paged && slices.Index(x.seqs, s) < i {
			return fmt.Errorf("sequence %d is there twice, to continue it in two ways Fork it: %w", i, kernels.ErrOption)
		}
	}
	return nil
}

// configure checks what both caches have in common and fills in its defaults.
func (p *pool) configure(ctx context.Context, c Config) error {
	if err := c.checkLatent(); err != nil {
		return err
	}
	c.KVHeads, c.ValueDim = cmp.Or(c.KVHeads, 1), cmp.Or(c.Latent, c.ValueDim, c.Dim)
	p.config, p.turner = c, turn.Turner{Dev: p.dev, RoPE: c.RoPE, Dim: c.Dim}
	if err := cmp.Or(op.CheckLength("KVHeads", c.KVHeads, 1), op.CheckLength("Dim", c.Dim, 1), op.CheckLength("ValueDim", c.ValueDim, 1), op.CheckLength("Window", c.Window, 0)); err != nil {
		return err
	}
	if !c.DType.Float() && !c.DType.Quantised() {
		return fmt.Errorf("config: DType is %v, it must be f32, f16, bf16, q8, q4 or f8: %w", c.DType, kernels.ErrDType)
	}
	if unit := map[kernels.DType]int{kernels.Q8: 4, kernels.Q4: 32, kernels.F8: 4}[c.DType]; unit > 0 && (c.Dim%unit != 0 || c.ValueDim%unit != 0) {
		return fmt.Errorf("config: head sizes are %d and %d, they must be multiples of %d for %v: %w", c.Dim, c.ValueDim, unit, c.DType, kernels.ErrOption)
	}
	be := p.dev.Backend()
	if err := cmp.Or(op.Lacks[backend.Copier](be, true, "copies"), op.Lacks[backend.Projector](be, c.Hadamard, "projections"), op.Lacks[backend.Gater](be, c.scaled(), "gates"),
		op.Lacks[backend.Rotator](be, c.RoPE != nil, "rotary embedding")); err != nil || c.RoPE == nil {
		return err
	}
	// Find a wrong embedding now and not at the first append.
	angles, err := c.RoPE.Angles(ctx, p.dev, c.Dim, [][]int{{0}})
	angles.Release()
	return err
}

// checkLatent refuses what has no meaning when values are elements of the keys.
func (c *Config) checkLatent() error {
	switch {
	case c.Latent == 0:
		return nil
	case c.Latent < 0 || c.Latent > c.Dim:
		return fmt.Errorf("config: Latent is %d, it must be 1 to Dim, which is %d: %w", c.Latent, c.Dim, kernels.ErrOption)
	case c.ValueDim != 0 && c.ValueDim != c.Latent:
		return fmt.Errorf("config: ValueDim is %d and Latent is %d, which is the size of a value: leave ValueDim out: %w", c.ValueDim, c.Latent, kernels.ErrOption)
	case c.DType.Quantised():
		return fmt.Errorf("config: DType is %v, elements of such a key are not a value: with Latent it must be f32, f16 or bf16: %w", c.DType, kernels.ErrUnsupported)
	case c.RoPE != nil:
		return fmt.Errorf("config: RoPE and Latent are both set, but a cache would rotate the values with the keys: rotate keys before they are appended: %w", kernels.ErrOption)
	case c.scaled() || c.Hadamard:
		return fmt.Errorf("config: KScale, VScale or Hadamard is set with Latent, but keys and values of one row cannot have factors or a matrix each: leave it out: %w", kernels.ErrOption)
	}
	return nil
}

// stored returns keys and values, or the keys alone if values are elements of them.
func (p *pool) stored() []kernels.Tensor {
	if p.config.Latent > 0 {
		return p.kv[:1]
	}
	return p.kv[:]
}

// alloc allocates the memory of so many pages.
func (p *pool) alloc(ctx context.Context, pages int) (err error) {
	c := p.config
	dims, factors := [2]int{c.Dim, c.ValueDim}, [2]kernels.Tensor{c.KScale, c.VScale}
	for i := range p.stored() {
		shape := kernels.Shape{pages, c.KVHeads, p.size, dims[i]}
		if p.paged {
			// The pages of a head are adjacent. With the heads of a page adjacent, the pages
			// of one head would lie a power of two apart and compete for the same lines of a
			// processor's cache, and prefetching past a page would miss the next one.
			shape[0], shape[1] = shape[1], shape[0]
		}
		if p.kv[i], err = p.dev.Alloc(ctx, c.DType, shape); err == nil && p.paged {
			p.kv[i], err = p.kv[i].Swap(kernels.Batch, kernels.Heads)
		}
		if err == nil {
			err = p.turner.Turn(ctx, i, c.Hadamard, factors[i], c.KVHeads, dims[i])
		}
		if err != nil {
			p.release()
			return err
		}
	}
	if c.Latent > 0 {
		p.kv[1] = region.Slice(p.kv[0], kernels.Dim, 0, c.Latent)
	}
	return nil
}

func (p *pool) release() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.kv[0].Release()
	p.kv[1].Release()
	p.turner.Release()
	p.kv = [2]kernels.Tensor{}
}

// change applies f, an operation on the cache, which no other call uses then.
func (p *pool) change(operation string, f func() error) (err error) {
	defer op.Annotate(&err, operation)
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.released(); err != nil {
		return err
	}
	return f()
}

// none is the pool of zero values.
var none = new(pool)

// orNone returns p, or none when p is nil.
func (p *pool) orNone() *pool {
	if p == nil {
		return none
	}
	return p
}

// released returns ErrReleased after a release, and ErrOption for none.
func (p *pool) released() error {
	if p == none {
		return fmt.Errorf("the cache is a zero value, make it with New, NewPaged or NewStates: %w", kernels.ErrOption)
	}
	if p.kv[0].IsZero() {
		return fmt.Errorf("the cache was released, make a new one: %w", kernels.ErrReleased)
	}
	return nil
}
