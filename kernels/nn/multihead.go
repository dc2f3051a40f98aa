package nn

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/internal/op"
	"github.com/seed90331342/attn/kernels/internal/steps"
	"github.com/seed90331342/attn/kernels/internal/weights"
	"github.com/seed90331342/attn/kernels/kvcache"
)

// MultiHeadConfig is the shape of a [MultiHeadAttention]. Lengths left 0 follow from the others.
type MultiHeadConfig struct {
	// Model is M, the size of an input and output token.
	Model int
	// Memory is the size of a token of the memory in cross attention; 0 means Model.
	Memory int
	// Heads is H; 0 means 1. KVHeads is Hkv, which divides it (grouped-query attention,
	// Ainslie et al. 2023); 0 means Heads.
	Heads, KVHeads int
	// HeadDim is D, of a query and a key; 0 means Model/Heads. ValueDim is Dv; 0 means HeadDim.
	HeadDim, ValueDim int
	// Bias gives each projection a bias.
	Bias bool
	// RoPE, unless nil, rotates queries and keys by their positions.
	RoPE *RoPE
	// Norm, unless nil, is the norm of queries and keys.
	Norm *Norm
	// Gate is the gate of the attention's output before Wo.
	Gate GateKind
	// Sinks gives each query head a learned sink. Then [kernels.Options].Sinks must be nil.
	Sinks bool
	// KeysAsValues means that there is no v projection: the values are the key projection
	// before its norm and rotation (Gemma 4). ValueDim is HeadDim.
	KeysAsValues bool
	// SharedKeys means that there are no k and v projections (the last layers of Gemma 3n and 4). The
	// layer reads the keys and values of another one: [MultiHeadOptions].Cache is that of the other
	// layer, which has appended those of x already, and nothing is appended.
	SharedKeys bool
	// Chunk, unless 0, hides the keys of other chunks of so many positions from a row (Llama 4): the
	// layer sets [kernels.Options].QSegments and KSegments, which must be nil, or for one row of a
	// Cache the Window and the Offset. A Cache must not have a window.
	Chunk int
	// Temperature, unless nil, multiplies queries by a factor of their position.
	Temperature *Temperature
	// DType is the type of the weights on the device; the zero value is F32.
	DType kernels.DType
}

// withDefaults returns c with every length set. It returns an error for a config out of range.
func (c MultiHeadConfig) withDefaults() (MultiHeadConfig, error) {
	if err := cmp.Or(op.CheckLength("Model", c.Model, 1), op.CheckLength("Memory", c.Memory, 0), op.CheckLength("Heads", c.Heads, 0),
		op.CheckLength("KVHeads", c.KVHeads, 0), op.CheckLength("HeadDim", c.HeadDim, 0), op.CheckLength("ValueDim", c.ValueDim, 0), op.CheckLength("Chunk", c.Chunk, 0)); err != nil {
		return c, err
	}
	c.Memory, c.Heads = cmp.Or(c.Memory, c.Model), cmp.Or(c.Heads, 1)
	c.KVHeads = cmp.Or(c.KVHeads, c.Heads)
	if c.HeadDim == 0 && c.Model%c.Heads != 0 {
		return c, fmt.Errorf("config: Model is %d, which %d heads do not divide: set HeadDim: %w", c.Model, c.Heads, kernels.ErrOption)
	}
	c.HeadDim = cmp.Or(c.HeadDim, c.Model/c.Heads)
	c.ValueDim = cmp.Or(c.ValueDim, c.HeadDim)
	n := cmp.Or(c.Norm, &Norm{})
	switch {
	case c.Heads%c.KVHeads != 0:
		return c, fmt.Errorf("config: KVHeads is %d, Heads is %d: the kv heads must divide the query heads: %w", c.KVHeads, c.Heads, kernels.ErrOption)
	case n.Weightless && n.PlusOne:
		return c, fmt.Errorf("config: norm: PlusOne is set, but a Weightless norm has no weights to add one to: leave one of them out: %w", kernels.ErrOption)
	case n.Mean && (n.Projection || n.Weightless || n.AfterRoPE || c.KeysAsValues):
		return c, fmt.Errorf("config: norm: Mean is set with Projection, Weightless, AfterRoPE or KeysAsValues: leave it or them out: %w", kernels.ErrOption)
	case c.Gate < GateNone || c.Gate > GateHeads:
		return c, fmt.Errorf("config: Gate is %d, it must be one of GateNone to GateHeads: %w", c.Gate, kernels.ErrOption)
	case c.Temperature != nil && !(c.Temperature.Scale >= 0 && finite(c.Temperature.Scale) && c.Temperature.Floor >= 1):
		return c, fmt.Errorf("config: Temperature is %+v, Scale must not be negative and Floor at least 1: %w", *c.Temperature, kernels.ErrOption)
	case c.SharedKeys && c.KeysAsValues:
		return c, fmt.Errorf("config: SharedKeys and KeysAsValues are both set, but a layer with shared keys has no projections of its own: leave one of them out: %w", kernels.ErrOption)
	case c.ValueDim != c.HeadDim && (c.KeysAsValues || c.Gate == GateInQuery):
		return c, fmt.Errorf("config: ValueDim is %d, HeadDim %d: they must be equal with KeysAsValues and with GateInQuery: %w", c.ValueDim, c.HeadDim, kernels.ErrOption)
	}
	return c, checkConfig(c.DType, c.RoPE, c.HeadDim, n.Epsilon)
}

// MultiHeadAttention is the attention layer of Vaswani et al. 2017, whose formula is in the comment of the package. Its
// config adds what later models have: a rotation and a norm of q and k, sinks, a gate before Wo. Heads are split and
// joined as views. Its methods are safe for concurrent use.
type MultiHeadAttention struct {
	dev    *kernels.Device
	config MultiHeadConfig  // with defaults
	w      MultiHeadWeights // in the device's memory
	sinks  []float32
}

// NewMultiHeadAttention returns a layer with weights w, rounded to c.DType, in the device's memory, for the caller to
// Release. The weights come from [MultiHeadConfig.Initialise] or [MultiHeadConfig.LoadSafetensors]. A device that
// computes in host memory uses F32 weights without a copy.
//
// Errors: ErrOption for a config out of range, ErrShape and ErrDType for weights that do not match it, ErrUnsupported
// when the device lacks an operation of the layer, and the backend's.
func NewMultiHeadAttention(ctx context.Context, dev *kernels.Device, c MultiHeadConfig, w MultiHeadWeights) (l *MultiHeadAttention, err error) {
	defer op.Annotate(&err, "multi-head attention")
	c, err = c.withDefaults()
	be := dev.Backend()
	if err := cmp.Or(err,
		op.Lacks[backend.Projector](be, true, "projections"),
		op.Lacks[backend.Rotator](be, c.RoPE != nil, "rotary embedding"),
		op.Lacks[backend.Normaliser](be, c.Norm != nil, "norms"),
		op.Lacks[backend.Gater](be, c.Gate != GateNone || c.Temperature != nil, "gates"),
		op.Lacks[backend.Copier](be, c.KeysAsValues, "copies")); err != nil {
		return nil, err
	}
	l = &MultiHeadAttention{dev: dev, config: c}
	if c.Norm != nil && c.Norm.Mean {
		for _, t := range []*kernels.Tensor{&w.Wq, &w.Wk, &w.Bq, &w.Bk} {
			if *t, err = weights.Centred(*t, c.HeadDim); err != nil {
				return nil, err
			}
		}
	}
	if err := w.list(c).Upload(ctx, dev, c.DType, l.w.list(c)); err != nil {
		return nil, err
	}
	if c.Sinks {
		sinks, _ := w.Sinks.Float32s() // as Upload has checked
		l.sinks = slices.Clone(sinks[:c.Heads])
	}
	return l, nil
}

// Release frees the memory of the weights.
func (l *MultiHeadAttention) Release() { l.w.release() }

// CacheConfig returns the config of a cache for the layer's keys and values without a Capacity. That of [kernels.F8] has
// the layer's KScale and VScale; they change no results of other types, which leave them out. The layer owns them.
func (l *MultiHeadAttention) CacheConfig(dtype kernels.DType) kvcache.Config {
	c := kvcache.Config{KVHeads: l.config.KVHeads, Dim: l.config.HeadDim, ValueDim: l.config.ValueDim, DType: dtype}
	if dtype == kernels.F8 {
		c.KScale, c.VScale = l.w.KScale, l.w.VScale
	}
	return c
}

// KVCache is a cache that a layer appends to, by AppendAt, and attends to: a [kvcache.Cache] or a [kvcache.Batch].
type KVCache interface {
	Append(ctx context.Context, k, v kernels.Tensor, count []int) error
	AppendAt(ctx context.Context, k, v kernels.Tensor, count []int, positions [][]int) error
	AttentionInto(ctx context.Context, out kernels.Result, q kernels.Tensor, opt kvcache.CallOptions) error
	// Lens returns the number of tokens of each sequence.
	Lens() []int
	// Config returns the shape of the cache, for a batch without its number of sequences.
	Config() kvcache.Config
}

// MultiHeadOptions are the options of one call of a layer. The zero value is plain self-attention.
type MultiHeadOptions struct {
	// Options are those of the attention, for [B, H, Sq, Sk]. Packed sequences and pages are not supported.
	kernels.Options
	// Memory is the input of keys and values, [B, 1, Sk, Config.Memory] of x's dtype; the zero Tensor means x.
	Memory kernels.Tensor
	// Angles rotate queries, and keys unless there is a Memory, whose keys MemoryAngles rotate. When they are zero and
	// the layer has a RoPE, it computes them for the positions 0, 1, 2, .., or those after the Cache's tokens. Layers
	// whose rows have the same positions should share them.
	Angles, MemoryAngles kernels.Angles
	// Positions [B or 1][S] are the positions of the rows of x by which the layer's RoPE or that of
	// the Cache rotates them, in place of Angles and of consecutive positions. The siblings in a
	// tree of speculated tokens share a position.
	Positions [][]int
	// Cache, unless nil, is for generation: the layer appends the keys and values of x to it and attends from x to all
	// tokens of the cache. Options are then those of [kvcache.CallOptions]. Count is the number of rows of x that each
	// sequence has; nil means all. After an error the cache may have the keys of x already; Lens shows it. MaskLast and
	// SharePrefix are those of [kvcache.CallOptions]: Mask is for the last tokens only, and pages that sequences share
	// are read once. Both need a Cache.
	Cache                 KVCache
	Count                 []int
	MaskLast, SharePrefix bool

	last bool // x are the last tokens of the Cache, of a layer with SharedKeys
}

// Apply computes the layer's output for x and allocates it, for the caller to Release:
//
//	x [B, 1, S, M]    O [B, 1, S, M] of x's dtype
//	LSE [B, H, S, 1] F32 and Weights [B, H, S, Sk] F32 when the options ask for them
//
// Errors as for [kernels.Device.Attention] and [kernels.Device.Rotate].
func (l *MultiHeadAttention) Apply(ctx context.Context, x kernels.Tensor, opt MultiHeadOptions) (r kernels.Result, err error) {
	var p Pass
	err = l.apply(ctx, &p, x, opt)
	if err == nil {
		r, p.Result = p.Result, kernels.Result{}
	}
	p.Release()
	op.Annotate(&err, "multi-head attention")
	return r, err
}

// ApplyFloat32 is Apply for a number of batches of x in host memory:
//
//	x [B][S][M]    y [B][S][M]    weights [B][H][S][Sk] when the options ask for them
func (l *MultiHeadAttention) ApplyFloat32(ctx context.Context, x []float32, batches int, opt MultiHeadOptions) (y, weights []float32, err error) {
	defer op.Annotate(&err, "multi-head attention")
	return onHost(ctx, l.dev, x, batches, l.config.Model, func(t kernels.Tensor) (kernels.Result, error) { return l.Apply(ctx, t, opt) })
}

// apply computes a forward pass. The caller releases p, also after an error.
func (l *MultiHeadAttention) apply(ctx context.Context, p *Pass, x kernels.Tensor, opt MultiHeadOptions) error {
	c, w, n, z := l.config, l.w, x.Shape(), x
	if !opt.Memory.IsZero() {
		z = opt.Memory
	}
	// Validate before anything is computed.
	if err := l.check(x, z, &opt); err != nil {
		return err
	}
	if opt.last = c.SharedKeys; c.Sinks {
		opt.Sinks = l.sinks
	}
	if err := l.chunk(&opt, n[2]); err != nil {
		return err
	}
	p.x, p.z, p.opt = x, z, opt
	p.steps = steps.Steps{Ctx: ctx, Dev: l.dev, DType: x.DType()}
	b := &p.steps
	if p.qkv[0] = allocHeads(b, x, c.Heads, c.HeadDim); !c.SharedKeys {
		p.qkv[1], p.qkv[2] = allocHeads(b, z, c.KVHeads, c.HeadDim), allocHeads(b, z, c.KVHeads, c.ValueDim)
	}
	keys := z.Shape()[kernels.Seq]
	if opt.Cache != nil {
		keys = opt.keys()
	} else if b.Err == nil {
		p.call, b.Err = l.dev.Prepare(p.qkv[0], p.qkv[1], p.qkv[2], opt.Options)
	}
	if b.Err != nil {
		return b.Err
	}
	l.operands(b, p)
	p.attended = allocHeads(b, x, c.Heads, c.ValueDim)
	b.DType = kernels.F32
	if opt.LSE {
		b.Keep(&p.LSE, kernels.Shape{n[0], c.Heads, n[2], 1})
	}
	if opt.Weights {
		b.Keep(&p.Weights, kernels.Shape{n[0], c.Heads, n[2], keys})
	}
	b.DType = x.DType()
	out := kernels.Result{O: p.attended, LSE: p.LSE, Weights: p.Weights}
	if opt.Cache != nil {
		opt.append(b, p.qkv[1], p.qkv[2])
		opt.attend(b, out, p.qkv[0])
	} else {
		b.Do(func() error { return p.call.RunInto(ctx, out) })
	}
	l.applyGate(b, p)
	b.Affine(b.Keep(&p.O, n), joinHeads(p.joined), w.Wo, w.Bo)
	return b.Err
}

// check returns an error for options that a call of a layer cannot have, for rows of so many batches. It sets Count for a
// Cache.
func (opt *MultiHeadOptions) check(batches, rows int) (err error) {
	switch {
	case opt.Positions != nil && opt.Angles != (kernels.Angles{}):
		return fmt.Errorf("options Positions and Angles are both set: leave one of them out: %w", kernels.ErrOption)
	case opt.MaskLast && opt.Cache == nil:
		return fmt.Errorf("option MaskLast is set without a Cache: %w", kernels.ErrOption)
	case opt.SharePrefix && opt.Cache == nil:
		return fmt.Errorf("option SharePrefix is set without a Cache: %w", kernels.ErrOption)
	case opt.Cache != nil && len(opt.Cache.Lens()) != batches:
		return fmt.Errorf("x has %d batches, the Cache has %d sequences: they must be equally many: %w", batches, len(opt.Cache.Lens()), kernels.ErrShape)
	}
	if opt.Cache != nil {
		opt.Count, err = op.Counts(nil, opt.Count, batches, rows, "x")
	}
	return cmp.Or(err, op.CheckPositions(opt.Positions, batches, rows, "x"))
}

// before returns the tokens of the sequences of the cache before x.
func (opt *MultiHeadOptions) before() []int {
	lens := opt.Cache.Lens()
	for b := range lens {
		if opt.last {
			lens[b] -= opt.Count[b]
		}
	}
	return lens
}

// keys returns the tokens of the cache's longest sequence after those of x.
func (opt *MultiHeadOptions) keys() (most int) {
	for b, n := range opt.before() {
		most = max(most, n+opt.Count[b])
	}
	return most
}

// append appends keys and values to the cache, unless it has them.
func (opt *MultiHeadOptions) append(b *steps.Steps, k, v kernels.Tensor) {
	if b.Err == nil && !opt.last {
		b.Err = opt.Cache.AppendAt(b.Ctx, k, v, opt.Count, opt.Positions)
	}
}

// attend attends to the tokens of the cache.
func (opt *MultiHeadOptions) attend(b *steps.Steps, out kernels.Result, q kernels.Tensor) {
	if b.Err == nil {
		b.Err = opt.Cache.AttentionInto(b.Ctx, out, q, kvcache.CallOptions{Options: opt.Options, Count: opt.Count, Positions: opt.Positions, MaskLast: opt.MaskLast, SharePrefix: opt.SharePrefix})
	}
}

// check returns an error unless the layer can be applied to x and its memory z.
func (l *MultiHeadAttention) check(x, z kernels.Tensor, opt *MultiHeadOptions) error {
	c, xs, zs := l.config, x.Shape(), z.Shape()
	if err := cmp.Or(checkInput(x, c.Model), z.Check("memory", floats...), opt.check(xs[0], xs[2])); err != nil {
		return err
	}
	cached := opt.Cache != nil
	rotates := cached && opt.Cache.Config().RoPE != nil
	switch want := (kernels.Shape{xs[0], 1, zs[2], c.Memory}); {
	case c.SharedKeys && !cached:
		return fmt.Errorf("the layer has SharedKeys, but options Cache is not set: give the cache of the layer whose keys it shares, after that layer: %w", kernels.ErrOption)
	case c.Sinks && opt.Sinks != nil:
		return fmt.Errorf("options Sinks is set, but the layer has its own: leave it out: %w", kernels.ErrOption)
	case zs != want:
		return fmt.Errorf("memory (x without Options.Memory) has shape %v, it must be [%d, 1, Sk, %d], the batches of x and the layer's memory size: %w",
			zs, xs[0], c.Memory, kernels.ErrShape)
	case c.Chunk > 0 && (opt.QSegments != nil || opt.KSegments != nil || !opt.Memory.IsZero()):
		return fmt.Errorf("options QSegments, KSegments or Memory is set, but the layer's Chunk sets the segments of x: leave them out: %w", kernels.ErrOption)
	case x.DType() != z.DType():
		return fmt.Errorf("x is %v, memory is %v: they must have one dtype: %w", x.DType(), z.DType(), kernels.ErrDType)
	case cached && !opt.Memory.IsZero():
		return fmt.Errorf("options Cache and Memory are both set: leave one of them out: %w", kernels.ErrOption)
	case rotates && (c.RoPE != nil || opt.Angles != (kernels.Angles{})):
		return fmt.Errorf("the layer and its Cache would both rotate the keys: leave one RoPE out: %w", kernels.ErrOption)
	case rotates && c.afterRoPE():
		return fmt.Errorf("the Cache rotates the keys after the layer's norm, which is AfterRoPE: give the layer the RoPE and the Cache none: %w", kernels.ErrOption)
	case !cached:
		return op.CheckPath(opt.Set(), op.LayerPath)
	}
	return nil
}
