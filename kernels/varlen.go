package kernels

import (
	"context"
	"fmt"

	"github.com/seed90331342/attn/backend"
)

// Packed returns the view [1, H, total, D] of packed sequences, which lie one after the
// other as [total, H, D] and are a tensor of shape [1, total, H, D], without a copy:
// what [AttentionVarlen] takes. Applied to that view it gives the other one again.
// ErrShape when x has more than one batch.
func Packed(x backend.Tensor) (backend.Tensor, error) {
	if n := x.Shape()[backend.Batch]; n != 1 {
		return backend.Tensor{}, fmt.Errorf("packed: x has shape %v, packed sequences have 1 batch: %w", x.Shape(), backend.ErrShape)
	}
	return x.Swap(backend.Heads, backend.Seq)
}

// AttentionVarlen computes attention for sequences of different lengths that are packed
// into one tensor, each for itself, and allocates the result, for the caller to
// Release. It is FlashAttention's flash_attn_varlen_func (Dao 2023): no padding is
// stored or computed.
//
//	q [1, H, total, D]    k [1, Hkv, totalK, D]    v [1, Hkv, totalK, Dv]    (see Packed)
//	O [1, H, total, Dv], in memory [total, H, Dv]    LSE [1, H, total, 1]
//
// Sequence n has the rows from cuQ[n] to cuQ[n+1] of q and the keys from cuK[n] to
// cuK[n+1]; both begin with 0, end with the total, and never fall. cuK nil means cuQ.
// A sequence without keys gives what rows that see nothing give.
//
// Options hold for every sequence as if it came alone: positions, so Causal, Window,
// Align and Offset, count from its own first row and key. Offsets, KLen and Prefix have
// a number for each sequence (Prefix, or one for all), ALiBi is [H] or sequence by
// sequence [N·H], and Dropout counts the sequence as its batch. The bits are those of
// each sequence alone.
//
// Errors: those of [Attention]; ErrShape and ErrOption name the entry of cuQ or cuK;
// ErrUnsupported for options whose tensors have rows and keys of one length: Mask,
// Bias, RelativeBias, BlockMask, segments, Pages, Weights and Resume.
func AttentionVarlen(ctx context.Context, be backend.Backend, q, k, v backend.Tensor, cuQ, cuK []int, opt Options) (Result, error) {
	r, err := attentionVarlen(ctx, be, q, k, v, cuQ, cuK, opt)
	if err != nil {
		return Result{}, fmt.Errorf("varlen attention: %w", err)
	}
	return r, nil
}

func attentionVarlen(ctx context.Context, be backend.Backend, q, k, v backend.Tensor, cuQ, cuK []int, opt Options) (r Result, err error) {
	d, err := varlenDims(q, k, v, cuQ, &cuK, &opt)
	if err != nil {
		return r, err
	}
	defer func() {
		if err != nil {
			r.Release()
			r = Result{}
		}
	}()
	alloc := func(dtype backend.DType, last int) (t backend.Tensor) {
		if err == nil {
			t, err = be.Alloc(ctx, dtype, backend.Shape{1, d.SeqQ, d.Heads, last})
		}
		if err == nil {
			t, err = Packed(t)
		}
		return t
	}
	r.O = alloc(q.DType(), d.ValueDim)
	if opt.LSE {
		r.LSE = alloc(backend.F32, 1)
	}
	if err != nil {
		return r, err
	}
	_, calls, _, err := varlen(r, q, k, v, cuQ, cuK, &opt)
	if err != nil {
		return r, err
	}
	return r, attendAll(ctx, be, calls)
}

// PlanVarlen says what [AttentionVarlen] with the same arguments would do on be,
// without doing it, as [Plan] does.
func PlanVarlen(be backend.Backend, q, k, v backend.Tensor, cuQ, cuK []int, opt Options) (backend.Plan, error) {
	p, err := planVarlen(be, q, k, v, cuQ, cuK, opt)
	if err != nil {
		return p, fmt.Errorf("plan: %w", err)
	}
	return p, nil
}

func planVarlen(be backend.Backend, q, k, v backend.Tensor, cuQ, cuK []int, opt Options) (backend.Plan, error) {
	all, calls, err := plannedVarlen(q, k, v, cuQ, cuK, &opt)
	if err != nil {
		return backend.Plan{}, err
	}
	return planCalls(be, all, calls)
}

// WarmupVarlen compiles what [AttentionVarlen] with the same arguments needs on be, as
// [Warmup] does.
func WarmupVarlen(ctx context.Context, be backend.Backend, q, k, v backend.Tensor, cuQ, cuK []int, opt Options) error {
	_, calls, err := plannedVarlen(q, k, v, cuQ, cuK, &opt)
	if err != nil {
		return fmt.Errorf("warmup: %w", err)
	}
	return warmUp(ctx, be, calls, false)
}

// plannedVarlen returns the calls that AttentionVarlen would make, and one over all
// their operands, with outputs that have no memory.
func plannedVarlen(q, k, v backend.Tensor, cuQ, cuK []int, opt *Options) (all *backend.Call, calls []*backend.Call, err error) {
	d, err := varlenDims(q, k, v, cuQ, &cuK, opt)
	if err != nil {
		return nil, nil, err
	}
	var out Result
	if out.O, err = backend.Meta(q.DType(), backend.Shape{1, d.Heads, d.SeqQ, d.ValueDim}); err != nil {
		return nil, nil, err
	}
	if opt.LSE {
		if out.LSE, err = backend.Meta(backend.F32, backend.Shape{1, d.Heads, d.SeqQ, 1}); err != nil {
			return nil, nil, err
		}
	}
	all, calls, _, err = varlen(out, q, k, v, cuQ, cuK, opt)
	return all, calls, err
}

// varlenDims checks what does not depend on a sequence, and fills in cuK.
func varlenDims(q, k, v backend.Tensor, cuQ []int, cuK *[]int, opt *Options) (Dims, error) {
	d, err := dims(q, k, v)
	if err != nil {
		return d, err
	}
	if d.Batch != 1 {
		return d, fmt.Errorf("q has shape %v, packed sequences have 1 batch (see Packed): %w", q.Shape(), backend.ErrShape)
	}
	for _, o := range []struct {
		name string
		is   bool
	}{
		{"a mask", !opt.Mask.IsZero()}, {"a bias", !opt.Bias.IsZero()}, {"a relative bias", !opt.RelativeBias.IsZero()},
		{"a block mask", !opt.BlockMask.IsZero()}, {"segments", opt.QSegments != nil || opt.KSegments != nil},
		{"pages", opt.Pages != nil}, {"weights", opt.Weights}, {"resume", opt.Resume != nil},
	} {
		if o.is {
			return d, fmt.Errorf("%s cannot be given for packed sequences, whose lengths differ: call Attention for each: %w", o.name, backend.ErrUnsupported)
		}
	}
	if *cuK == nil {
		*cuK = cuQ
	}
	n := len(cuQ) - 1
	if err := cumulative("cuQ", cuQ, d.SeqQ, "rows"); err != nil {
		return d, err
	}
	if err := cumulative("cuK", *cuK, d.SeqK, "keys"); err != nil {
		return d, err
	}
	switch {
	case len(*cuK) != len(cuQ):
		return d, fmt.Errorf("cuK has %d entries, cuQ has %d: both have one more than there are sequences: %w", len(*cuK), len(cuQ), backend.ErrShape)
	case opt.KLen != nil && len(opt.KLen) != n:
		return d, fmt.Errorf("klen has %d lengths, there are %d sequences: one each: %w", len(opt.KLen), n, backend.ErrShape)
	case opt.Offsets != nil && len(opt.Offsets) != n:
		return d, fmt.Errorf("offsets has %d, there are %d sequences: one each: %w", len(opt.Offsets), n, backend.ErrShape)
	case opt.Prefix != nil && len(opt.Prefix) != 1 && len(opt.Prefix) != n:
		return d, fmt.Errorf("prefix has %d lengths, there are %d sequences: give 1 or %d: %w", len(opt.Prefix), n, n, backend.ErrShape)
	case opt.ALiBi != nil && len(opt.ALiBi) != d.Heads && len(opt.ALiBi) != n*d.Heads:
		return d, fmt.Errorf("alibi has %d slopes, there are %d heads in %d sequences: give %d or %d: %w", len(opt.ALiBi), d.Heads, n, d.Heads, n*d.Heads, backend.ErrShape)
	}
	return d, nil
}

// cumulative checks a list of cumulative lengths.
func cumulative(name string, cu []int, total int, of string) error {
	if len(cu) < 2 {
		return fmt.Errorf("%s has %d entries, it must have 0, then where each sequence ends: %w", name, len(cu), backend.ErrShape)
	}
	for n, at := range cu {
		switch {
		case n == 0 && at != 0:
			return fmt.Errorf("%s[0] is %d, the first sequence begins at 0: %w", name, at, backend.ErrOption)
		case n > 0 && at < cu[n-1]:
			return fmt.Errorf("%s[%d] is %d, less than %s[%d], which is %d: a sequence cannot end before it begins: %w", name, n, at, name, n-1, cu[n-1], backend.ErrOption)
		}
	}
	if last := cu[len(cu)-1]; last != total {
		return fmt.Errorf("%s[%d] is %d, there are %d %s: the last sequence ends with them: %w", name, len(cu)-1, last, total, of, backend.ErrOption)
	}
	return nil
}

// varlen returns the calls of all sequences, the rows that each has, and a call over all
// their operands.
func varlen(out Result, q, k, v backend.Tensor, cuQ, cuK []int, opt *Options) (all *backend.Call, calls []*backend.Call, rowsOf []part, err error) {
	heads := q.Shape()[backend.Heads]
	for n := range len(cuQ) - 1 {
		q0, q1, k0, k1 := cuQ[n], cuQ[n+1], cuK[n], cuK[n+1]
		if q0 == q1 {
			continue
		}
		own := *opt
		own.Dropout.First[backend.Batch] += n
		if opt.KLen != nil {
			own.KLen = opt.KLen[n : n+1]
		}
		if opt.Prefix != nil {
			own.Prefix = []int{of(opt.Prefix, n)}
		}
		if opt.Offsets != nil {
			own.Offsets = opt.Offsets[n : n+1]
		}
		if len(opt.ALiBi) > heads {
			own.ALiBi = opt.ALiBi[n*heads : (n+1)*heads]
		}
		if k0 == k1 { // a call has a key, even where none is seen
			if opt.KLen != nil && opt.KLen[n] != 0 {
				return nil, nil, nil, fmt.Errorf("klen[%d] is %d, sequence %d has no keys: %w", n, opt.KLen[n], n, backend.ErrOption)
			}
			own.KLen, own.Prefix = []int{0}, nil
			k0 = min(k0, k.Shape()[backend.Seq]-1)
			k1 = k0 + 1
		} else if len(opt.Prefix) == 1 {
			own.Prefix[0] = min(own.Prefix[0], k1-k0)
		}
		var s slicer
		rows := func(t backend.Tensor) backend.Tensor { return s.cut(t, backend.Seq, q0, q1) }
		keys := func(t backend.Tensor) backend.Tensor { return s.cut(t, backend.Seq, k0, k1) }
		c := new(backend.Call)
		parts, err := call(c, Result{O: rows(out.O), LSE: rows(out.LSE)}, rows(q), keys(k), keys(v), &own)
		if err == nil {
			err = s.err
		}
		if err != nil {
			return nil, nil, nil, fmt.Errorf("sequence %d: %w", n, err)
		}
		if parts == nil {
			parts = []part{whole(c.Dims())}
		}
		some, err := inParts(c, parts)
		if err != nil {
			return nil, nil, nil, fmt.Errorf("sequence %d: %w", n, err)
		}
		calls = append(calls, some...)
		for _, x := range parts {
			x.lo[backend.Seq] += q0
			x.hi[backend.Seq] += q0
			rowsOf = append(rowsOf, x)
		}
	}
	return &backend.Call{Q: q, K: k, V: v, O: out.O, LSE: out.LSE}, calls, rowsOf, nil
}
