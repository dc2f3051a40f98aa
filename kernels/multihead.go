package kernels

import (
	"context"
	"fmt"

	"github.com/seed90331342/attn/backend"
)

// MultiHeadConfig is the shape of a [MultiHeadAttention]. Lengths left 0 follow from
// the others.
type MultiHeadConfig struct {
	// Model is M, the size of a token that comes in and goes out.
	Model int
	// Memory is the size of a token that keys and values are made of, where it is
	// another one, as in cross attention between two models; 0 means Model.
	Memory int
	// Heads is H; 0 means 1. KVHeads is Hkv, which divides it (grouped-query
	// attention, Ainslie et al. 2023); 0 means Heads.
	Heads, KVHeads int
	// HeadDim is D, of a query and a key; 0 means Model/Heads. ValueDim is Dv; 0
	// means HeadDim.
	HeadDim, ValueDim int
	// Bias says that each projection has a bias.
	Bias bool
	// RoPE turns queries and keys by their positions; nil means none.
	RoPE *RoPE
	// DType is how weights are kept; the zero value is F32.
	DType backend.DType
}

// filled returns c with every length, or what is wrong with it.
func (c MultiHeadConfig) filled() (MultiHeadConfig, error) {
	for _, l := range []struct {
		name string
		n    int
	}{{"Model", c.Model}, {"Memory", c.Memory}, {"Heads", c.Heads}, {"KVHeads", c.KVHeads}, {"HeadDim", c.HeadDim}, {"ValueDim", c.ValueDim}} {
		if l.n < 0 || l.n > maxOffset || l.name == "Model" && l.n == 0 {
			return c, fmt.Errorf("config: %s is %d, it must be 1 to %d (all but Model may be 0, to follow from the others): %w", l.name, l.n, maxOffset, backend.ErrOption)
		}
	}
	or := func(n *int, def int) {
		if *n == 0 {
			*n = def
		}
	}
	or(&c.Memory, c.Model)
	or(&c.Heads, 1)
	or(&c.KVHeads, c.Heads)
	if c.HeadDim == 0 && c.Model%c.Heads != 0 {
		return c, fmt.Errorf("config: Model is %d, which %d heads do not divide: set HeadDim: %w", c.Model, c.Heads, backend.ErrOption)
	}
	or(&c.HeadDim, c.Model/c.Heads)
	or(&c.ValueDim, c.HeadDim)
	if c.Heads%c.KVHeads != 0 {
		return c, fmt.Errorf("config: KVHeads is %d, Heads is %d: the kv heads must divide the query heads: %w", c.KVHeads, c.Heads, backend.ErrOption)
	}
	if !c.DType.Float() {
		return c, fmt.Errorf("config: DType is %v, weights must be f32, f16 or bf16: %w", c.DType, backend.ErrDType)
	}
	if c.RoPE != nil {
		if _, err := c.RoPE.frequencies(c.HeadDim); err != nil {
			return c, fmt.Errorf("rope: %w", err)
		}
	}
	return c, nil
}

// MultiHeadAttention is the layer of Vaswani et al. 2017 on a backend:
//
//	q = x·Wq + Bq    k = z·Wk + Bk    v = z·Wv + Bv
//	y = concat over heads of softmax(scale·q·kᵀ + bias)·v, times Wo, + Bo
//
// with z the memory that is attended to, or x itself. Heads are split and joined as
// views, and nothing comes back from the device in between. Its methods are safe for
// concurrent use.
type MultiHeadAttention struct {
	be     backend.Backend
	config MultiHeadConfig // filled
	in     Projections
	wo, bo backend.Tensor
}

// NewMultiHeadAttention puts weights into the backend's memory, rounded to c.DType,
// for the caller to Release. The weights come from [MultiHeadConfig.Initialise] or
// [MultiHeadConfig.LoadWeights]; a backend that computes in host memory uses F32 ones where
// they are.
//
// Errors: ErrOption for a config out of range, ErrShape and ErrDType for weights that
// are not as it says, ErrUnsupported when the backend lacks an operation of the
// layer, and the backend's.
func NewMultiHeadAttention(ctx context.Context, be backend.Backend, c MultiHeadConfig, w MultiHeadWeights) (*MultiHeadAttention, error) {
	l, err := newMultiHead(ctx, be, c, w)
	if err != nil {
		return nil, fmt.Errorf("multi-head attention: %w", err)
	}
	return l, nil
}

func newMultiHead(ctx context.Context, be backend.Backend, c MultiHeadConfig, w MultiHeadWeights) (*MultiHeadAttention, error) {
	c, err := c.filled()
	if err != nil {
		return nil, err
	}
	if err := w.check(c); err != nil {
		return nil, err
	}
	if _, ok := be.(backend.Projector); !ok {
		return nil, fmt.Errorf("%s has no projections: %w", be.Info().Name, backend.ErrUnsupported)
	}
	if _, ok := be.(backend.Rotator); !ok && c.RoPE != nil {
		return nil, fmt.Errorf("%s has no rotary embedding: %w", be.Info().Name, backend.ErrUnsupported)
	}
	l := &MultiHeadAttention{be: be, config: c, in: Projections{Heads: c.Heads, KVHeads: c.KVHeads}}
	on := MultiHeadWeights{}
	to := on.named()
	for i, host := range w.named() {
		if host.t.IsZero() {
			continue
		}
		if *to[i].t, err = uploadAs(ctx, be, c.DType, *host.t); err != nil {
			on.release()
			return nil, fmt.Errorf("%s: %w", host.name, err)
		}
	}
	l.in.Wq, l.in.Wk, l.in.Wv, l.wo = on.Wq, on.Wk, on.Wv, on.Wo
	l.in.Bq, l.in.Bk, l.in.Bv, l.bo = on.Bq, on.Bk, on.Bv, on.Bo
	return l, nil
}

// uploadAs uploads an F32 host tensor, contiguous, as dtype.
func uploadAs(ctx context.Context, be backend.Backend, dtype backend.DType, host backend.Tensor) (backend.Tensor, error) {
	if dtype == backend.F32 {
		return be.Upload(ctx, host)
	}
	data, err := host.Float32s()
	if err != nil {
		return backend.Tensor{}, err
	}
	return FromFloat32(ctx, be, dtype, data[:host.Shape().Elements()], host.Shape())
}

// Release gives the memory of the weights back.
func (l *MultiHeadAttention) Release() {
	w := MultiHeadWeights{l.in.Wq, l.in.Wk, l.in.Wv, l.wo, l.in.Bq, l.in.Bk, l.in.Bv, l.bo}
	w.release()
}

// MultiHeadOptions are those of one call of a layer. The zero value is plain
// self-attention.
type MultiHeadOptions struct {
	// Options are those of [Attention], for [B, H, Sq, Sk].
	Options
	// Memory is what is attended to, [B, 1, Sk, Config.Memory] of x's dtype; the zero
	// Tensor means x itself.
	Memory backend.Tensor
	// Angles turn the queries, and the keys too unless there is a Memory, whose keys
	// MemoryAngles turn. Zero ones are made for the positions 0, 1, 2, .., or those that
	// follow the Cache's, where the layer has a RoPE. Layers that see the same positions should share them.
	Angles, MemoryAngles Angles
	// Cache, unless nil, gets the keys and values of x appended, and attention is from x's
	// rows to all that it has: a step of generation. Positions go on from the tokens that
	// it has, and the options are those that [CacheOptions] may have. Count is how many
	// rows of x each sequence has, nil meaning all. When the call fails, x may be appended
	// already: Lens tell.
	Cache KVCache
	Count []int
}

// Apply computes the layer's output for x and allocates it, for the caller to
// Release:
//
//	x [B, 1, S, M]    O [B, 1, S, M] of x's dtype
//	LSE [B, H, S, 1] F32, Weights [B, H, S, Sk] F32 when asked for
//
// Errors as for [Attention] and [Rotate].
func (l *MultiHeadAttention) Apply(ctx context.Context, x backend.Tensor, opt MultiHeadOptions) (Result, error) {
	r, err := l.apply(ctx, x, opt)
	if err != nil {
		r.Release()
		return Result{}, fmt.Errorf("multi-head attention: %w", err)
	}
	return r, nil
}

func (l *MultiHeadAttention) apply(ctx context.Context, x backend.Tensor, opt MultiHeadOptions) (r Result, err error) {
	z := x
	if !opt.Memory.IsZero() {
		z = opt.Memory
	}
	d, err := l.dims(x, z)
	if err != nil {
		return r, err
	}
	if opt.Cache != nil {
		if err := l.cached(&d, opt); err != nil {
			return r, err
		}
	} else if _, err := opt.problem(d); err != nil {
		return r, err
	}
	q, k, v, err := l.in.apply(ctx, l.be, x, z)
	if err != nil {
		return r, err
	}
	defer q.Release()
	defer k.Release()
	defer v.Release()
	if err := l.turn(ctx, q, k, opt); err != nil {
		return r, err
	}
	joined, err := l.be.Alloc(ctx, x.DType(), backend.Shape{d.Batch, 1, d.SeqQ, d.Heads * d.ValueDim})
	if err != nil {
		return r, err
	}
	defer joined.Release()
	out := Result{}
	if out.O, err = splitHeads(joined, d.Heads); err != nil {
		return r, err
	}
	rows := backend.Shape{d.Batch, d.Heads, d.SeqQ, 1}
	if opt.LSE {
		if r.LSE, err = l.be.Alloc(ctx, backend.F32, rows); err != nil {
			return r, err
		}
	}
	rows[backend.Dim] = d.SeqK
	if opt.Weights {
		if r.Weights, err = l.be.Alloc(ctx, backend.F32, rows); err != nil {
			return r, err
		}
	}
	out.LSE, out.Weights = r.LSE, r.Weights
	if opt.Cache == nil {
		err = AttentionInto(ctx, l.be, out, q, k, v, opt.Options)
	} else if err = opt.Cache.Append(ctx, k, v, opt.Count); err == nil {
		err = opt.Cache.AttentionInto(ctx, out, q, CacheOptions{Options: opt.Options, Count: opt.Count})
	}
	if err != nil {
		return r, err
	}
	r.O, err = project(ctx, l.be, "o", joined, l.wo, l.bo, 1)
	return r, err
}

// dims checks what comes in and returns the lengths of the attention.
func (l *MultiHeadAttention) dims(x, z backend.Tensor) (Dims, error) {
	if err := floats(backend.Operand{Name: "x", Tensor: x}, backend.Operand{Name: "memory", Tensor: z}); err != nil {
		return Dims{}, err
	}
	c, xs, zs := l.config, x.Shape(), z.Shape()
	if want := (backend.Shape{xs[0], 1, xs[2], c.Model}); xs != want {
		return Dims{}, fmt.Errorf("x has shape %v, it must be [B, 1, S, %d], the layer's model size: %w", xs, c.Model, backend.ErrShape)
	}
	if want := (backend.Shape{xs[0], 1, zs[2], c.Memory}); zs != want {
		return Dims{}, fmt.Errorf("memory has shape %v, it must be [%d, 1, Sk, %d], x's batches and the layer's memory size (x itself where Options have no Memory): %w",
			zs, xs[0], c.Memory, backend.ErrShape)
	}
	if x.DType() != z.DType() {
		return Dims{}, fmt.Errorf("x is %v, memory is %v: they must have one dtype: %w", x.DType(), z.DType(), backend.ErrDType)
	}
	return Dims{Batch: xs[0], Heads: c.Heads, KVHeads: c.KVHeads, SeqQ: xs[2], SeqK: zs[2], Dim: c.HeadDim, ValueDim: c.ValueDim}, nil
}

// cached checks that a cache may be what the layer attends to, and counts its tokens
// and the new ones as d's keys.
func (l *MultiHeadAttention) cached(d *Dims, opt MultiHeadOptions) error {
	if !opt.Memory.IsZero() {
		return fmt.Errorf("a Cache is given with a Memory: attend to one of them: %w", backend.ErrOption)
	}
	if opt.Cache.turns() && (l.config.RoPE != nil || opt.Angles != (Angles{})) {
		return fmt.Errorf("the layer and its Cache both have a RoPE, keys would turn twice: leave one of them out: %w", backend.ErrOption)
	}
	lens := opt.Cache.Lens()
	if len(lens) != d.Batch {
		return fmt.Errorf("x has %d batches, the Cache %d sequences: one each: %w", d.Batch, len(lens), backend.ErrShape)
	}
	count, err := counts(opt.Count, d.Batch, d.SeqQ, "x")
	if err != nil {
		return err
	}
	d.SeqK = 0
	for b, n := range count {
		d.SeqK = max(d.SeqK, lens[b]+n)
	}
	return nil
}

// positions returns those of n rows of each batch: from those that a cache has on.
func (opt *MultiHeadOptions) positions(n int) [][]int {
	if opt.Cache == nil {
		return Positions(0, n)
	}
	var all [][]int
	for _, from := range opt.Cache.Lens() {
		all = append(all, Positions(from, n)...)
	}
	return all
}

// turn rotates q and k in place, by the angles of opt or those that the layer's
// RoPE has from position 0 on.
func (l *MultiHeadAttention) turn(ctx context.Context, q, k backend.Tensor, opt MultiHeadOptions) error {
	angles := func(given Angles, t backend.Tensor) (a, made Angles, err error) {
		if given != (Angles{}) || l.config.RoPE == nil {
			return given, Angles{}, nil
		}
		a, err = l.config.RoPE.Angles(ctx, l.be, l.config.HeadDim, opt.positions(t.Shape()[backend.Seq]))
		return a, a, err
	}
	forQ, made, err := angles(opt.Angles, q)
	if err != nil {
		return err
	}
	defer made.Release()
	forK := forQ
	if !opt.Memory.IsZero() {
		if forK, made, err = angles(opt.MemoryAngles, k); err != nil {
			return err
		}
		defer made.Release()
	}
	if (forQ == Angles{}) != (forK == Angles{}) {
		return fmt.Errorf("queries and keys must both have angles or neither: give Angles and MemoryAngles: %w", backend.ErrOption)
	}
	if (forQ == Angles{}) {
		return nil
	}
	if err := Rotate(ctx, l.be, q, q, forQ); err != nil {
		return fmt.Errorf("q: %w", err)
	}
	if err := Rotate(ctx, l.be, k, k, forK); err != nil {
		return fmt.Errorf("k: %w", err)
	}
	return nil
}
