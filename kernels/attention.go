package kernels

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/seed90331342/attn/backend"
)

// Result is what an attention call gives, in the backend's memory.
type Result struct {
	// O is the output, [B, H, Sq, Dv].
	O backend.Tensor
	// LSE is log Σ exp(score) of each row, [B, H, Sq, 1] F32, when asked for.
	LSE backend.Tensor
	// Weights are the softmax weights, [B, H, Sq, Sk] F32, when asked for.
	Weights backend.Tensor
}

// Release gives the memory of all tensors in r back.
func (r Result) Release() {
	r.O.Release()
	r.LSE.Release()
	r.Weights.Release()
}

// Attention computes softmax(scale·Q·Kᵀ + bias)·V and allocates the result,
// for the caller to Release:
//
//	q [B, H, Sq, D]    k [B, Hkv, Sk, D]    v [B, Hkv, Sk, Dv]
//
// Hkv divides H: query head h attends with key and value head h/(H/Hkv). q is F32,
// F16 or BF16, which O gets too, k and v are one of these or Q8, the same one. Any
// strides. With Options.Pages k and v are pools of pages.
//
// Errors: ErrShape, ErrDType and ErrOption name the argument and the rule;
// ErrDevice, ErrReleased, ErrMemory, ErrUnsupported, ErrDeviceLost and context
// errors come from the backend. Dao et al. 2022 (FlashAttention) is the method
// that the fused kernels follow.
func Attention(ctx context.Context, be backend.Backend, q, k, v backend.Tensor, opt Options) (Result, error) {
	d, err := pagedDims(q, k, v, opt.Pages)
	if err != nil {
		return Result{}, fmt.Errorf("attention: %w", err)
	}
	var r Result
	alloc := func(t *backend.Tensor, want bool, dtype backend.DType, last int) {
		if want && err == nil {
			*t, err = be.Alloc(ctx, dtype, backend.Shape{d.Batch, d.Heads, d.SeqQ, last})
		}
	}
	// Options first: a call that cannot run should not allocate O(S²).
	if _, err = opt.problem(d); err != nil {
		return Result{}, fmt.Errorf("attention: %w", err)
	}
	alloc(&r.O, true, q.DType(), d.ValueDim)
	alloc(&r.LSE, opt.LSE, backend.F32, 1)
	alloc(&r.Weights, opt.Weights, backend.F32, d.SeqK)
	if err != nil {
		r.Release()
		return Result{}, fmt.Errorf("attention: %w", err)
	}
	if err := AttentionInto(ctx, be, r, q, k, v, opt); err != nil {
		r.Release()
		return Result{}, err
	}
	return r, nil
}

// AttentionInto is [Attention] into tensors that the caller has: out.O, of q's
// dtype or F32, and out.LSE and out.Weights where they are not the zero Tensor
// (Options.LSE and Options.Weights are not looked at). No output may share
// memory with an input or another output: ErrOverlap.
func AttentionInto(ctx context.Context, be backend.Backend, out Result, q, k, v backend.Tensor, opt Options) error {
	c := calls.Get().(*backend.Call)
	defer func() {
		*c = backend.Call{} // keeps nobody's memory alive
		calls.Put(c)
	}()
	parts, err := call(c, out, q, k, v, &opt)
	if err != nil {
		return fmt.Errorf("attention: %w", err)
	}
	switch {
	case out.Weights.IsZero() && parts == nil:
		err = be.Attention(ctx, c)
	case out.Weights.IsZero():
		err = attendParts(ctx, be, out.Weights, c, parts)
	default:
		if err := weighted(ctx, be, out.Weights, c, parts); err != nil {
			return fmt.Errorf("attention with weights: %w", err)
		}
	}
	if err != nil {
		return fmt.Errorf("attention: %w", err)
	}
	return nil
}

// weighted runs a call whose weights are wanted.
func weighted(ctx context.Context, be backend.Backend, w backend.Tensor, c *backend.Call, parts []part) error {
	d := c.Dims()
	if parts == nil && d.SeqK == w.Shape()[backend.Dim] {
		return staged(ctx, be, w, c)
	}
	if parts == nil {
		parts = []part{whole(d)}
	}
	return attendParts(ctx, be, w, c, parts)
}

// calls are pooled, as a call that is handed to an interface would otherwise be
// allocated each time.
var calls = sync.Pool{New: func() any { return new(backend.Call) }}

// staged runs a call as its three stages, leaving the weights in w.
func staged(ctx context.Context, be backend.Backend, w backend.Tensor, c *backend.Call) error {
	if err := be.QK(ctx, w, c.Q, c.K); err != nil {
		return err
	}
	if err := be.Softmax(ctx, w, c.LSE, &c.Problem); err != nil {
		return err
	}
	return be.PV(ctx, c.O, w, c.V)
}

// call validates everything that follows from shapes, types and options, and
// writes the canonical call to c, over the keys that take part, with the parts that
// make it up where it takes several. Ownership, release and overlap can change at
// any time, so that backends check them when they start.
func call(c *backend.Call, out Result, q, k, v backend.Tensor, opt *Options) ([]part, error) {
	d, err := pagedDims(q, k, v, opt.Pages)
	if err != nil {
		return nil, err
	}
	p, err := opt.problem(d)
	if err != nil {
		return nil, err
	}
	rows := backend.Shape{d.Batch, d.Heads, d.SeqQ, d.ValueDim}
	if err := expect("o", out.O, rows, "[B, H, Sq, Dv] of q and v", q.DType(), backend.F32); err != nil {
		return nil, err
	}
	if !out.LSE.IsZero() {
		rows[backend.Dim] = 1
		if err := expect("lse", out.LSE, rows, "[B, H, Sq, 1] of q", backend.F32); err != nil {
			return nil, err
		}
	}
	if !out.Weights.IsZero() {
		if opt.Resume != nil {
			return nil, fmt.Errorf("resume is set and weights are wanted: the stages leave nothing to go on from: %w", backend.ErrOption)
		}
		if opt.Pages != nil || k.DType() == backend.Q8 {
			return nil, fmt.Errorf("weights are wanted of keys that are paged or q8, which the stages do not take: %w", backend.ErrUnsupported)
		}
		rows[backend.Dim] = d.SeqK
		if err := expect("weights", out.Weights, rows, "[B, H, Sq, Sk] of q and k", backend.F32); err != nil {
			return nil, err
		}
	}
	if opt.Resume != nil && p.parts != nil {
		return nil, fmt.Errorf("resume is set with a prefix or segments: what runs as several calls leaves nothing to go on from: %w", backend.ErrOption)
	}
	*c = backend.Call{Q: q, K: k, V: v, O: out.O, LSE: out.LSE, Problem: p.Problem, Pages: opt.Pages, Resume: opt.Resume}
	if err := c.CheckPages(); err != nil {
		return nil, err
	}
	if p.keys < d.SeqK {
		var s slicer
		d.SeqK = p.keys
		if c.K, c.V, c.Pages = s.keys(c, d, whole(d)); s.err != nil {
			return nil, s.err
		}
	}
	return p.parts, nil
}

// dims reads and checks the lengths of q, k and v.
func dims(q, k, v backend.Tensor) (Dims, error) { return pagedDims(q, k, v, nil) }

// pagedDims is dims where k and v are pools of pages, unless pages is nil.
func pagedDims(q, k, v backend.Tensor, pages *backend.Pages) (Dims, error) {
	if err := floats(backend.Operand{Name: "q", Tensor: q}); err != nil {
		return Dims{}, err
	}
	if err := stored(backend.Operand{Name: "k", Tensor: k}, backend.Operand{Name: "v", Tensor: v}); err != nil {
		return Dims{}, err
	}
	if k.DType() != v.DType() {
		return Dims{}, fmt.Errorf("k is %v, v is %v: they must have one dtype: %w", k.DType(), v.DType(), backend.ErrDType)
	}
	c := backend.Call{Q: q, K: k, V: v, Pages: pages}
	d := c.Dims()
	qs, ks, vs := q.Shape(), k.Shape(), v.Shape()
	switch {
	case pages != nil && ks[backend.Batch] != vs[backend.Batch]:
		return d, fmt.Errorf("k %v has %d pages, v %v has %d: they must be as many: %w", ks, ks[backend.Batch], vs, vs[backend.Batch], backend.ErrShape)
	case pages == nil && (ks[backend.Batch] != d.Batch || vs[backend.Batch] != d.Batch):
		return d, fmt.Errorf("batches differ: q %v, k %v, v %v must start with the same length: %w", qs, ks, vs, backend.ErrShape)
	case ks[backend.Dim] != d.Dim:
		return d, fmt.Errorf("k %v has head size %d, q %v has %d: they must be equal: %w", ks, ks[backend.Dim], qs, d.Dim, backend.ErrShape)
	case vs[backend.Heads] != d.KVHeads || vs[backend.Seq] != ks[backend.Seq]:
		return d, fmt.Errorf("v %v and k %v must have the same heads and keys: %w", vs, ks, backend.ErrShape)
	}
	return d, divides(d.Heads, d.KVHeads, "k", "q")
}

func divides(heads, kvHeads int, kv, q string) error {
	if heads%kvHeads != 0 {
		return fmt.Errorf("%s has %d heads, %s has %d: the kv heads must divide the query heads: %w", kv, kvHeads, q, heads, backend.ErrShape)
	}
	return nil
}

// floats checks that operands are there, have a floating point type and no
// empty axis.
func floats(ops ...backend.Operand) error {
	for _, o := range ops {
		if err := present(o); err != nil {
			return err
		}
		if !o.Tensor.DType().Float() {
			return fmt.Errorf("%s is %v, it must be f32, f16 or bf16: %w", o.Name, o.Tensor.DType(), backend.ErrDType)
		}
	}
	return nil
}

// stored is floats for keys and values, which may be Q8 too.
func stored(ops ...backend.Operand) error {
	for _, o := range ops {
		if err := present(o); err != nil {
			return err
		}
		if d := o.Tensor.DType(); !d.Float() && d != backend.Q8 {
			return fmt.Errorf("%s is %v, it must be f32, f16, bf16 or q8: %w", o.Name, d, backend.ErrDType)
		}
	}
	return nil
}

// present checks that an operand is there and has no empty axis.
func present(o backend.Operand) error {
	if o.Tensor.IsZero() {
		return fmt.Errorf("%s is missing (the zero Tensor): %w", o.Name, backend.ErrShape)
	}
	for _, l := range o.Tensor.Shape() {
		if l < 1 {
			return fmt.Errorf("%s has shape %v: every length must be at least 1: %w", o.Name, o.Tensor.Shape(), backend.ErrShape)
		}
	}
	return nil
}

// expect checks an operand whose shape follows from others: rule says how.
func expect(name string, t backend.Tensor, shape backend.Shape, rule string, dtypes ...backend.DType) error {
	if t.IsZero() {
		return fmt.Errorf("%s is missing (the zero Tensor), it must have shape %v: %w", name, shape, backend.ErrShape)
	}
	if t.Shape() != shape {
		return fmt.Errorf("%s has shape %v, it must be %v, the %s: %w", name, t.Shape(), shape, rule, backend.ErrShape)
	}
	for _, d := range dtypes {
		if t.DType() == d {
			return nil
		}
	}
	return fmt.Errorf("%s is %v, it must be one of %v: %w", name, t.DType(), slices.Clone(dtypes), backend.ErrDType) // a copy: the argument stays on the stack
}
