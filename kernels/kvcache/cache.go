package kvcache

import (
	"cmp"
	"context"
	"fmt"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/internal/op"
)

// Config is the shape of a [Cache]. Fields left 0 mean: Batch 1, KVHeads 1, ValueDim as Dim.
type Config struct {
	// Batch is the number of sequences.
	Batch int
	// KVHeads is Hkv. Dim and ValueDim are the head sizes D of keys and Dv of values.
	KVHeads, Dim, ValueDim int
	// Latent, unless 0, means that the values are the first Latent elements of the keys, as in
	// multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2): a token takes Dim elements, not
	// Dim and ValueDim. Appends then have the zero Tensor for v, and ValueDim is 0 or Latent. DType is
	// not quantised, and neither a RoPE nor Hadamard, which turn keys alone, can be set.
	Latent int
	// DType is the type of the stored keys and values: F32, F16, BF16, or Q8 or F8 with head sizes
	// that are multiples of 4, or Q4 with multiples of 32. Appended tokens are rounded to it.
	DType kernels.DType
	// KScale and VScale, unless they are zero Tensors, are factors that stored keys and values are multiplied by when
	// they are read: k_scale and v_scale of vLLM, FlashInfer and ONNX Runtime, one for all, for a head or for an
	// element of all rows. Appends divide by them, queries are multiplied by those of keys and outputs by those of
	// values, so that a key costs no more. [kernels.F8], which saturates at 448, needs them for larger numbers.
	//
	//	KScale [1, Hkv or 1, 1, D or 1]    VScale [1, Hkv or 1, 1, Dv or 1]    2^-100 to 2^100
	//
	// They are F32, F16 or BF16 and are read once. They follow a RoPE and Hadamard, and Latent excludes them. Queries are
	// rounded to their type again.
	KScale, VScale kernels.Tensor
	// Capacity is the number of tokens that a sequence has room for.
	Capacity int
	// Window, unless 0, is the number of tokens that a row sees, including its own. Sequences then have no maximum length:
	// when a sequence reaches the end of its memory, its last Window-1 tokens move to the start. Capacity is at least twice
	// the Window, and an append takes at most Capacity-2·(Window-1) tokens.
	Window int
	// RoPE, unless nil, rotates keys when they are appended and queries when they attend, by their positions in the sequence.
	RoPE Rotary
	// Hadamard multiplies the rows of keys and values by the orthogonal matrix of ±1/√D before they are rounded to DType,
	// queries by the same one, and outputs by that of values (Ashkboos et al. 2024, QuaRot). Without rounding this changes no
	// result. It spreads large elements over their row, which [kernels.Q4] stores better. Head sizes must be powers of two up
	// to 4096. For n tokens of a head it takes 2·n·D² operations.
	Hadamard bool
}

// scaled reports whether rows are divided by factors.
func (c *Config) scaled() bool { return !c.KScale.IsZero() || !c.VScale.IsZero() }

// Rotary is a rotary position embedding, such as nn.RoPE.
type Rotary interface {
	// Angles returns the rotation angles of rows of headDim elements at positions, [B or 1][S], for the caller to Release.
	// They depend on the position alone: a cache keeps angles for the tokens to come.
	Angles(ctx context.Context, dev *kernels.Device, headDim int, positions [][]int) (kernels.Angles, error)
}

// Cache keeps the keys and values of a fixed number of sequences, each in contiguous memory. Its methods are safe for
// concurrent use: attention calls run concurrently, all other methods wait for them.
type Cache struct{ batch }

// New returns an empty cache, for the caller to Release.
//
// Errors: ErrOption for a config out of range, ErrShape for lengths that are too large, ErrUnsupported when the device cannot
// copy or rotate tensors or does not store the dtype, ErrMemory.
func New(ctx context.Context, dev *kernels.Device, c Config) (x *Cache, err error) {
	defer op.Annotate(&err, "cache")
	p := &pool{dev: dev, size: c.Capacity}
	c.Batch = cmp.Or(c.Batch, 1)
	if err := cmp.Or(p.configure(ctx, c), op.CheckLength("Batch", c.Batch, 1), op.CheckLength("Capacity", c.Capacity, 1)); err != nil {
		return nil, err
	}
	if c.Capacity < 2*c.Window {
		return nil, fmt.Errorf("config: Capacity is %d, with a Window of %d it must be at least %d: %w", c.Capacity, c.Window, 2*c.Window, kernels.ErrOption)
	}
	if err := p.alloc(ctx, c.Batch); err != nil {
		return nil, err
	}
	x = &Cache{batch{pool: p}}
	for b := range c.Batch {
		x.seqs = append(x.seqs, &Sequence{of: p, placement: placement{pages: []int32{int32(b)}}})
	}
	return x, nil
}

// Release frees the memory. Later calls return ErrReleased.
func (c *Cache) Release() { c.pool.orNone().release() }

// Reset removes all tokens. It returns ErrReleased after Release.
func (c *Cache) Reset() error {
	return c.pool.orNone().change("reset", func() error {
		for _, s := range c.seqs {
			s.first, s.n, s.stale = 0, 0, 0
		}
		return nil
	})
}
