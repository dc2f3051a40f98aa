package nn

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/internal/op"
	"github.com/seed90331342/attn/kernels/internal/steps"
)

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
// Expanded, a pair of a query and a key takes 2·(NopeDim+RopeDim+ValueDim) operations for each head,
// absorbed 2·(2·Rank+RopeDim), which is 3.4 times as many for DeepSeek V3. Both multiply
// each row of x by Wk and Wv once, but expanded keys need it for each row of a cache too. A call is
// therefore expanded when rows of x see rows of x alone, without a cache or over an empty one, and
// absorbed over a cache with tokens. Methods are safe for concurrent use.
type LatentAttention struct {
	dev    *kernels.Device
	config LatentConfig
	w      LatentWeights // in the device's memory
}

// NewLatentAttention returns a layer with weights w, rounded to c.DType, in the device's memory, for
// the caller to Release. The weights come from [LatentConfig.LoadSafetensors]. Errors as for
// [NewMultiHeadAttention].
func NewLatentAttention(ctx context.Context, dev *kernels.Device, c LatentConfig, w LatentWeights) (l *LatentAttention, err error) {
	defer op.Annotate(&err, "latent attention")
	be := dev.Backend()
	if err := cmp.Or(c.check(), op.Lacks[backend.Projector](be, true, "projections"), op.Lacks[backend.Rotator](be, c.RoPE != nil, "rotary embedding"),
		op.Lacks[backend.Normaliser](be, true, "norms"), op.Lacks[backend.Copier](be, true, "copies")); err != nil {
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
	if err := l.check(x, &opt); err != nil {
		return y, err
	}
	b := steps.Steps{Ctx: ctx, Dev: l.dev, DType: x.DType()}
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
	return cmp.Or(opt.check(s[0], s[2]), op.CheckPath(&opt.Options, on))
}

// apply computes y. Its steps do nothing after an error.
func (l *LatentAttention) apply(b *steps.Steps, y *kernels.Tensor, x kernels.Tensor, opt MultiHeadOptions) {
	c, w, s := l.config, l.w, x.Shape()
	h, d := c.Heads, c.NopeDim+c.RopeDim
	rows := func(n int) kernels.Tensor { return b.Alloc(kernels.Shape{s[0], 1, s[2], n}) }
	u := x
	if c.QueryRank > 0 {
		u = rows(c.QueryRank)
		b.Project(u, x, w.Wqa)
		b.Normalise(u, u, w.QNorm, kernels.Norm{})
	}
	flat, latent, attended := rows(h*d), rows(c.Rank+c.RopeDim), rows(h*c.ValueDim)
	b.Project(flat, u, w.Wq)
	b.Project(latent, x, w.Wkva)
	if b.Err != nil {
		return
	}
	q, o, wk, wv := splitHeads(flat, h), splitHeads(attended, h), splitHeads(w.Wk, h), splitHeads(w.Wv, h)
	content, place := b.Columns(latent, 0, c.Rank), b.Columns(latent, c.Rank, c.Rank+c.RopeDim)
	b.Normalise(content, content, w.KVNorm, kernels.Norm{})
	rotated := b.Columns(q, c.NopeDim, d)
	b.Rotate(rotated, place, c.RoPE.anglesOf(b, rotated, place, &opt), false)
	expanded := expands(&opt, s[2])
	if opt.Cache != nil {
		opt.append(b, latent, kernels.Tensor{})
	}
	if b.Err != nil {
		return
	}
	if expanded {
		k, v := allocHeads(b, x, h, d), allocHeads(b, x, h, c.ValueDim)
		each := func(t kernels.Tensor) kernels.Tensor { // the same for each head
			return b.Must(t.Broadcast(kernels.Shape{s[0], h, s[2], t.Shape()[kernels.Dim]}))
		}
		b.Project(b.Columns(k, 0, c.NopeDim), each(content), wk)
		b.Copy(b.Columns(k, c.NopeDim, d), each(place))
		b.Project(v, each(content), wv)
		opt.Causal = opt.Causal || opt.Cache != nil
		b.Attend(kernels.Result{O: o}, q, k, v, opt.Options)
	} else {
		absorbed, sums := allocHeads(b, x, h, c.Rank+c.RopeDim), allocHeads(b, x, h, c.Rank)
		b.Project(b.Columns(absorbed, 0, c.Rank), b.Columns(q, 0, c.NopeDim), b.Transposed(wk))
		b.Copy(b.Columns(absorbed, c.Rank, c.Rank+c.RopeDim), b.Columns(q, c.NopeDim, d))
		opt.attend(b, kernels.Result{O: sums}, absorbed)
		b.Project(o, sums, wv)
	}
	b.Project(b.Keep(y, s), attended, w.Wo)
}

// expands reports whether S rows of x see rows of x alone, as far as one sequence has all of them.
func expands(opt *MultiHeadOptions, s int) bool {
	if opt.Cache == nil {
		return true
	}
	empty := !slices.ContainsFunc(opt.Cache.Lens(), func(n int) bool { return n > 0 })
	return empty && !opt.MaskLast && (opt.Count == nil || slices.Contains(opt.Count, s))
}
