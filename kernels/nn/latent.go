package nn

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"math"
	"slices"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/internal/op"
	"github.com/seed90331342/attn/kernels/internal/steps"
	"github.com/seed90331342/attn/kernels/internal/weights"
)

// LatentConfig is the shape of a [LatentAttention].
type LatentConfig struct {
	// Model is M, the size of an input and output token. Heads is H.
	Model, Heads int
	// QueryRank is the size of the latent of queries; 0 means that there is none (DeepSeek V2-Lite).
	QueryRank int
	// Rank is the size r of the latent of keys and values.
	Rank int
	// Each query and key has NopeDim elements without positions, then RopeDim elements with them.
	// A value has ValueDim elements.
	NopeDim, RopeDim, ValueDim int
	// RoPE, unless nil, rotates the RopeDim elements. Interleaved is that of DeepSeek's files.
	RoPE *RoPE
	// DType is the type of the weights on the device; the zero value is F32.
	DType kernels.DType
	// BlockBytes is the most memory for expanded keys and values of a cache's tokens; 0 means 128 MiB. 128 tokens of
	// each sequence may take more.
	BlockBytes int
}

// check returns an error for a config out of range.
func (c LatentConfig) check() error {
	if err := cmp.Or(op.CheckLength("Model", c.Model, 1), op.CheckLength("Heads", c.Heads, 1), op.CheckLength("QueryRank", c.QueryRank, 0), op.CheckLength("Rank", c.Rank, 1),
		op.CheckLength("NopeDim", c.NopeDim, 1), op.CheckLength("RopeDim", c.RopeDim, 1), op.CheckLength("ValueDim", c.ValueDim, 1),
		op.CheckLength("BlockBytes", c.BlockBytes, 0)); err != nil {
		return err
	}
	return checkConfig(c.DType, c.RoPE, c.RopeDim, 0)
}

// LatentWeights are the weights of a [LatentAttention] in host memory, F32 and contiguous, for
// y = x·W. With D = NopeDim + RopeDim and Mq = QueryRank, or Model without one:
//
//	Wqa  [1, 1, Model, QueryRank]     QNorm  [1, 1, 1, QueryRank]     with a QueryRank
//	Wq   [1, 1, Mq, Heads·D]
//	Wkva [1, 1, Model, Rank+RopeDim]  KVNorm [1, 1, 1, Rank]
//	Wk   [1, 1, Rank, Heads·NopeDim]
//	Wv   [1, 1, Rank, Heads·ValueDim]
//	Wo   [1, 1, Heads·ValueDim, Model]
type LatentWeights struct {
	Wqa, QNorm, Wq, Wkva, KVNorm, Wk, Wv, Wo kernels.Tensor
}

func (w *LatentWeights) list(c LatentConfig) weights.List {
	queries, name, none := c.Model, "q_proj.weight", kernels.Shape{}
	wqa, qnorm := none, none
	if c.QueryRank > 0 {
		queries, name = c.QueryRank, "q_b_proj.weight"
		wqa, qnorm = kernels.Shape{1, 1, c.Model, c.QueryRank}, kernels.Shape{1, 1, 1, c.QueryRank}
	}
	return weights.List{
		{Name: "wqa", T: &w.Wqa, Shape: wqa, Of: "QueryRank", Tensor: "q_a_proj.weight"},
		{Name: "qnorm", T: &w.QNorm, Shape: qnorm, Of: "QueryRank", Vector: true, Tensor: "q_a_layernorm.weight"},
		{Name: "wq", T: &w.Wq, Shape: kernels.Shape{1, 1, queries, c.Heads * (c.NopeDim + c.RopeDim)}, Of: "queries", Tensor: name},
		{Name: "wkva", T: &w.Wkva, Shape: kernels.Shape{1, 1, c.Model, c.Rank + c.RopeDim}, Of: "a latent of keys", Tensor: "kv_a_proj_with_mqa.weight"},
		{Name: "kvnorm", T: &w.KVNorm, Shape: kernels.Shape{1, 1, 1, c.Rank}, Of: "a latent of keys", Vector: true, Tensor: "kv_a_layernorm.weight"},
		// The rows of a head in the file are those of its keys, then those of its values.
		{Name: "wk", T: &w.Wk, Shape: kernels.Shape{1, 1, c.Rank, c.Heads * c.NopeDim}, Of: "keys", Tensor: "kv_b_proj.weight", Groups: c.Heads},
		{Name: "wv", T: &w.Wv, Shape: kernels.Shape{1, 1, c.Rank, c.Heads * c.ValueDim}, Of: "values", Tensor: "kv_b_proj.weight", Groups: c.Heads},
		{Name: "wo", T: &w.Wo, Shape: kernels.Shape{1, 1, c.Heads * c.ValueDim, c.Model}, Of: "an output", Tensor: "o_proj.weight"},
	}
}

// LoadSafetensors reads the weights of a layer of DeepSeek V2 and V3, or Kimi K2, from a .safetensors file of the given
// size. The names of its tensors begin with prefix, such as "model.layers.0.self_attn.", and go on with
//
//	q_a_proj q_a_layernorm q_b_proj     or q_proj without a QueryRank
//	kv_a_proj_with_mqa kv_a_layernorm   .weight [Rank+RopeDim, Model], .weight [Rank]
//	kv_b_proj                           .weight [Heads·(NopeDim+ValueDim), Rank]
//	o_proj                              .weight [Model, Heads·ValueDim]
//
// Elements are F16, BF16, F32 or F64. Other tensors below the prefix are refused by name: biases,
// indexers, scales of quantised weights. Errors as for [MultiHeadConfig.LoadSafetensors].
func (c LatentConfig) LoadSafetensors(r io.ReaderAt, size int64, prefix string) (w LatentWeights, err error) {
	defer op.Annotate(&err, "weights")
	if err = c.check(); err == nil {
		err = weights.Load(r, size, prefix, w.list(c), harmless...)
	}
	return w, err
}

// LatentAttention is multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2), as in DeepSeek V2
// and V3, Kimi K2 and, without a RoPE, Kimi Linear. Keys and values of all heads follow from one
// small row of a token, [c | p], and a cache stores that row alone:
//
//	c = norm(x·Wkva[:r])       p = RoPE(x·Wkva[r:])
//	[u | ρ] of head h = norm(x·Wqa)·Wq, whose last RopeDim elements are rotated
//
// There are two ways to compute the same attention, with scale m²/√(NopeDim+RopeDim), where m² is
// the [Scaling.SoftmaxFactor] of the RoPE:
//
//	expanded   q = [u | ρ]       k = [c·Wk | p]   v = c·Wv    o = softmax(scale·q·kᵀ)·v
//	absorbed   q = [u·Wkᵀ | ρ]   k = [c | p]      v = c       o = softmax(scale·q·kᵀ)·v·Wv
//
// Each head takes for a pair of a query and a key
//
//	expanded   2·(NopeDim+RopeDim+ValueDim) operations, and 2·Rank·(NopeDim+ValueDim) once for a key
//	absorbed   2·(2·Rank+RopeDim) operations, and 2·Rank·(NopeDim+ValueDim) once for a query
//
// which is 640 and 2,176 for DeepSeek V3, and 262,144 once. A call is expanded when rows of x see rows of x alone,
// without a cache or over an empty one. Over a cache with tokens it takes the form with fewer operations, where those
// of once count twice, because projections ran at about half the rate of attention on an AMD EPYC: expanded for
// DeepSeek V3 from 342 rows of x, and from fewer that follow few tokens. It then reads the cache in blocks of
// [LatentConfig].BlockBytes, and merges their results by their log-sum-exp. With options other than Scale, Softcap, Sinks
// and LowPrecision it is absorbed there. There is no backward pass. Methods are safe for concurrent use.
type LatentAttention struct {
	dev    *kernels.Device
	config LatentConfig
	w      LatentWeights // in the device's memory
}

// NewLatentAttention returns a layer with weights w, rounded to c.DType, in the device's memory, for the caller to
// Release. The weights come from [LatentConfig.LoadSafetensors]. Errors as for [NewMultiHeadAttention].
func NewLatentAttention(ctx context.Context, dev *kernels.Device, c LatentConfig, w LatentWeights) (l *LatentAttention, err error) {
	defer op.Annotate(&err, "latent attention")
	be := dev.Backend()
	if err := cmp.Or(c.check(), op.Lacks[backend.Projector](be, true, "projections"), op.Lacks[backend.Rotator](be, c.RoPE != nil, "rotary embedding"),
		op.Lacks[backend.Normaliser](be, true, "norms"), op.Lacks[backend.Copier](be, true, "copies"), op.Lacks[backend.Merger](be, true, "merge")); err != nil {
		return nil, err
	}
	l = &LatentAttention{dev: dev, config: c}
	if err := w.list(c).Upload(ctx, dev, c.DType, l.w.list(c)); err != nil {
		return nil, err
	}
	return l, nil
}

// Release frees the memory of the weights.
func (l *LatentAttention) Release() { l.w.list(l.config).Release() }

// Apply computes the layer's output for x and allocates it, for the caller to Release:
//
//	x [B, 1, S, Model]    y [B, 1, S, Model] of x's dtype
//
// The Scale of the options is the one above unless it is set. Their Cache has the shape
// kvcache.Config{Dim: Rank+RopeDim, Latent: Rank} and no window. Memory, MemoryAngles, LSE and
// Weights are refused. Expanded keys and values take Heads·(NopeDim+RopeDim+ValueDim) elements for
// each row of x while the call runs. Errors as for [MultiHeadAttention.Apply].
func (l *LatentAttention) Apply(ctx context.Context, x kernels.Tensor, opt MultiHeadOptions) (y kernels.Tensor, err error) {
	defer op.Annotate(&err, "latent attention")
	b := steps.Steps{Ctx: ctx, Dev: l.dev, DType: x.DType(), Err: l.check(x, &opt)}
	l.apply(&b, &y, x, opt)
	return b.Result(y)
}

// check checks the inputs and sets the scale.
func (l *LatentAttention) check(x kernels.Tensor, opt *MultiHeadOptions) error {
	c, s := l.config, x.Shape()
	if err := checkInput(x, c.Model); err != nil {
		return err
	}
	switch {
	case !opt.Memory.IsZero() || opt.MemoryAngles != (kernels.Angles{}):
		return fmt.Errorf("options Memory or MemoryAngles is set, but keys of latent attention are those of x: leave them out: %w", kernels.ErrOption)
	case opt.LSE || opt.Weights:
		return fmt.Errorf("options LSE or Weights is set, but the layer returns its output alone: leave them out: %w", kernels.ErrOption)
	}
	if opt.Scale == nil {
		factor := 1.0
		if c.RoPE != nil {
			factor = c.RoPE.Scaling.SoftmaxFactor()
		}
		opt.Scale = new(factor / math.Sqrt(float64(c.NopeDim+c.RopeDim)))
	}
	on := op.LayerPath
	if opt.Cache != nil {
		on |= op.CachePath
		if k := opt.Cache.Config(); k.KVHeads != 1 || k.Dim != c.Rank+c.RopeDim || k.Latent != c.Rank || k.Window != 0 {
			return fmt.Errorf("the Cache has KVHeads %d, Dim %d, Latent %d and Window %d, they must be 1, %d, %d and 0 for the layer: %w",
				k.KVHeads, k.Dim, k.Latent, k.Window, c.Rank+c.RopeDim, c.Rank, kernels.ErrShape)
		}
	}
	return cmp.Or(opt.check(s[0], s[2]), op.CheckPath(opt.Set(), on))
}

// apply computes y. Its steps do nothing after an error.
func (l *LatentAttention) apply(b *steps.Steps, y *kernels.Tensor, x kernels.Tensor, opt MultiHeadOptions) {
	c, w, s := l.config, l.w, x.Shape()
	h, d := c.Heads, c.NopeDim+c.RopeDim
	u := x
	if c.QueryRank > 0 {
		u = allocRows(b, x, c.QueryRank)
		b.Project(u, x, w.Wqa)
		b.Normalise(u, u, w.QNorm, kernels.Norm{})
	}
	q, latent, o := allocHeads(b, x, h, d), allocRows(b, x, c.Rank+c.RopeDim), allocHeads(b, x, h, c.ValueDim)
	b.Project(joinHeads(q), u, w.Wq)
	b.Project(latent, x, w.Wkva)
	if b.Err != nil {
		return
	}
	content, place := b.Columns(latent, 0, c.Rank), b.Columns(latent, c.Rank, c.Rank+c.RopeDim)
	b.Normalise(content, content, w.KVNorm, kernels.Norm{})
	rotated := b.Columns(q, c.NopeDim, d)
	b.Rotate(rotated, place, c.RoPE.anglesOf(b, rotated, place, &opt), false)
	alone := ownRows(&opt, s[2])
	if opt.Cache != nil {
		opt.append(b, latent, kernels.Tensor{})
	}
	if b.Err != nil {
		return
	}
	switch {
	case alone:
		opt.Causal = opt.Causal || opt.Cache != nil
		k, v := allocHeads(b, x, h, d), allocHeads(b, x, h, c.ValueDim)
		l.expand(b, k, v, latent)
		b.Attend(kernels.Result{O: o}, q, k, v, opt.Options)
	case l.expands(&opt):
		l.attendInBlocks(b, o, q, &opt)
	default:
		absorbed, sums := allocHeads(b, x, h, c.Rank+c.RopeDim), allocHeads(b, x, h, c.Rank)
		b.Project(b.Columns(absorbed, 0, c.Rank), b.Columns(q, 0, c.NopeDim), b.Transposed(splitHeads(w.Wk, h)))
		b.Copy(b.Columns(absorbed, c.Rank, c.Rank+c.RopeDim), b.Columns(q, c.NopeDim, d))
		opt.attend(b, kernels.Result{O: sums}, absorbed)
		b.Project(o, sums, splitHeads(w.Wv, h))
	}
	b.Project(b.Keep(y, s), joinHeads(o), w.Wo)
}

// ownRows reports whether S rows of x see rows of x alone, as far as one sequence has all of them.
func ownRows(opt *MultiHeadOptions, s int) bool {
	if opt.Cache == nil {
		return true
	}
	empty := !slices.ContainsFunc(opt.Cache.Lens(), func(n int) bool { return n > 0 })
	return empty && !opt.MaskLast && slices.Contains(opt.Count, s)
}

// keyReader is a [KVCache] whose keys can be read.
type keyReader interface {
	ReadKeys(ctx context.Context, k kernels.Tensor, from int) error
}

// expands reports whether rows of x, which are in the cache, take less time in the expanded form.
func (l *LatentAttention) expands(opt *MultiHeadOptions) bool {
	if _, ok := opt.Cache.(keyReader); !ok || opt.MaskLast || opt.SharePrefix || op.CheckPath(opt.Set(), op.SharedPath) != nil {
		return false
	}
	c, less := l.config, 0.0
	for b, keys := range opt.Cache.Lens() {
		rows := opt.Count[b]
		less += float64(rows)*float64(keys)*float64(2*c.Rank-c.NopeDim-c.ValueDim) - 2*float64(keys-rows)*float64(c.Rank)*float64(c.NopeDim+c.ValueDim)
	}
	return less > 0
}

// expand computes the keys and values of all heads from rows of a cache.
func (l *LatentAttention) expand(b *steps.Steps, k, v, rows kernels.Tensor) {
	c, w := l.config, l.w
	each := func(lo, hi int) kernels.Tensor { // the same for each head
		t := b.Columns(rows, lo, hi)
		n := t.Shape()
		n[kernels.Heads] = c.Heads
		return b.Must(t.Broadcast(n))
	}
	b.Project(b.Columns(k, 0, c.NopeDim), each(0, c.Rank), splitHeads(w.Wk, c.Heads))
	b.Copy(b.Columns(k, c.NopeDim, c.NopeDim+c.RopeDim), each(c.Rank, c.Rank+c.RopeDim))
	b.Project(v, each(0, c.Rank), splitHeads(w.Wv, c.Heads))
}

// blockKeys divides the length of a block. It is that of a step of the online softmax.
const blockKeys = 128

// attendInBlocks attends from q to the cache in the expanded form.
func (l *LatentAttention) attendInBlocks(b *steps.Steps, o, q kernels.Tensor, opt *MultiHeadOptions) {
	c, s, lens := l.config, q.Shape(), opt.Cache.Lens()
	keys, d := slices.Max(lens), c.NopeDim+c.RopeDim
	key := s[0] * c.Heads * (d + c.ValueDim) * b.DType.Size()
	n := min(keys, max(1, cmp.Or(c.BlockBytes, 128<<20)/key/blockKeys)*blockKeys)
	x := b.Alloc(kernels.Shape{s[0], 1, n, c.Rank + c.RopeDim})
	k, v := allocHeads(b, x, c.Heads, d), allocHeads(b, x, c.Heads, c.ValueDim)
	whole, part := kernels.Result{O: o}, kernels.Result{}
	if n < keys {
		whole, part = b.Partial(o.Shape()), b.Partial(o.Shape())
	}
	own := opt.Options
	own.Causal, own.Offset = true, make([]int, s[0])
	for from := 0; from < keys && b.Err == nil; from += n {
		has := min(n, keys-from)
		first := func(t kernels.Tensor) kernels.Tensor { return b.Must(t.Slice(kernels.Seq, 0, has)) }
		b.Err = opt.Cache.(keyReader).ReadKeys(b.Ctx, first(x), from)
		l.expand(b, first(k), first(v), first(x))
		for i, all := range lens {
			own.Offset[i] = all - opt.Count[i] - from
		}
		if from == 0 {
			b.Attend(whole, q, first(k), first(v), own)
			own.Sinks = nil // they count once
			continue
		}
		b.Attend(part, q, first(k), first(v), own)
		b.Merge(whole, part)
	}
	if n < keys {
		b.Copy(o, whole.O)
	}
}
