package onnx

import (
	"context"
	"fmt"
	"math"
	"slices"

	"github.com/seed90331342/attn/cmd/attn-onnx/internal/onnxfile"
	"github.com/seed90331342/attn/kernels"
)

// multiHeadOp is a MultiHeadAttention node of ONNX Runtime. Operands are one of
//
//	query [B, S, H·D]       key [B, L, H·D]      value [B, L, H·Dv]
//	query [B, S, H·D]       key [B, H, L, D]     value [B, H, L, Dv]    projected before
//	query [B, S, H·D]       key [B, L, H, 2, D]                         packed keys and values
//	query [B, S, H, 3, D]                                               all packed
//
// bias [H·D + H·D + H·Dv] is added to the operands that have not been projected before.
type multiHeadOp struct {
	heads      int
	scale      *float64 // nil means 1/sqrt(D)
	filter     float64  // the score of a key that key_padding_mask hides
	causal     bool
	hasPresent bool
}

// The inputs of MultiHeadAttention, by position.
const (
	mhQuery = iota
	mhKey
	mhValue
	mhBias
	mhPaddingMask
	mhAttentionBias
	mhPastKey
	mhPastValue
	mhPastLength
	mhIndirection
)

func newMultiHead(n *node, a *attributes) operator {
	op := &multiHeadOp{
		heads: headCount(a, "num_heads"), scale: scaleOf(a), filter: -10000,
		causal: a.flag("unidirectional"), hasPresent: n.has(outPresentKey),
	}
	if x := a.number("mask_filter_value"); x != nil {
		op.filter = *x
	}
	if n.has(outScores) {
		a.fail("the node has the output qk, which attn does not compute for MultiHeadAttention: leave it out: %w", kernels.ErrUnsupported)
	}
	return op
}

// headCount reads a required number of heads.
func headCount(a *attributes, name string) int {
	if a.list[name] == nil {
		a.fail("attribute %s is missing, it must be at least 1: %w", name, kernels.ErrOption)
	}
	return a.integer(name, 1, 1, math.MaxInt32)
}

// scaleOf reads the attribute scale of ONNX Runtime's operators, where 0 is the default.
func scaleOf(a *attributes) *float64 {
	if x := a.number("scale"); x != nil && *x != 0 {
		return x
	}
	return nil
}

func (op *multiHeadOp) run(ctx context.Context, dev *kernels.Device, in []*onnxfile.Tensor) ([]*onnxfile.Tensor, string, error) {
	if !in[mhQuery].Type.Float() {
		return nil, "", fmt.Errorf("query is %v, it must be f32, f16, bf16 or f64: %w", in[mhQuery].Type, kernels.ErrDType)
	}
	for i, name := range schemas[microsoft+".MultiHeadAttention"].inputs {
		t, want := in[i], in[mhQuery].Type
		if i == mhPaddingMask {
			want = onnxfile.Int32
		}
		switch {
		case t == nil:
		case i >= mhPastLength:
			return nil, "", fmt.Errorf("input %s is given, attn does not support it: leave it out: %w", name, kernels.ErrUnsupported)
		case t.Type != want:
			return nil, "", fmt.Errorf("%s is %v and query %v: key_padding_mask must be int32, the others must have the type of query: %w", name, t.Type, in[mhQuery].Type, kernels.ErrDType)
		}
	}
	q, k, v, err := op.operands(in)
	if err != nil {
		return nil, "", err
	}
	batch, seq, size := q.Shape[0], q.Shape[1], q.Shape[2]/op.heads
	valueSize := v.Shape[len(v.Shape)-1]
	if len(v.Shape) == 3 {
		valueSize /= op.heads
	}
	pastKey, pastValue := in[mhPastKey], in[mhPastValue]
	if err := checkPasts(pastKey, pastValue, batch, op.heads, size, valueSize); err != nil {
		return nil, "", err
	}
	note, past := "", 0
	if pastKey != nil && !op.hasPresent {
		// ONNX Runtime reads a past only together with the outputs that continue it.
		note, pastKey, pastValue = "; the past is not read, as there is no output present_key", nil, nil
	}
	if pastKey != nil {
		past = pastKey.Shape[2]
	}
	call := fused{
		q: q, heads: op.heads, opt: kernels.Options{Scale: op.scale, Causal: op.causal, Offset: []int{past}},
		keys: joined(pastKey, k, op.heads, size), values: joined(pastValue, v, op.heads, valueSize),
	}
	if call.mask, err = op.mask(in, batch, seq, past, call.keys.Shape[2]); err != nil {
		return nil, "", err
	}
	y, _, err := call.run(ctx, dev)
	return []*onnxfile.Tensor{y, call.keys, call.values}, call.how() + note, err
}

// operands returns query [B, S, H·D] and key and value, which have 3 axes or 4,
// [B, H, L, D], after the bias.
func (op *multiHeadOp) operands(in []*onnxfile.Tensor) (q, k, v *onnxfile.Tensor, err error) {
	q, k, v = in[mhQuery], in[mhKey], in[mhValue]
	switch {
	case len(q.Shape) == 5 && k == nil && v == nil && q.Shape[2] == op.heads && q.Shape[3] == 3:
		all := q
		q, k, v = op.unpacked(all, 0), op.unpacked(all, 1), op.unpacked(all, 2)
	case len(q.Shape) == 3 && k != nil && len(k.Shape) == 5 && v == nil && k.Shape[2] == op.heads && k.Shape[3] == 2:
		pairs := k
		k, v = op.unpacked(pairs, 0), op.unpacked(pairs, 1)
	case len(q.Shape) == 3 && k != nil && v != nil && len(k.Shape) == len(v.Shape) && (len(k.Shape) == 3 || len(k.Shape) == 4):
	default:
		return nil, nil, nil, fmt.Errorf("query has shape %v, key %v and value %v: they must be [B S H·D], [B L H·D] and [B L H·Dv], or [B S H·D] with [B H L D] and [B H L Dv], or [B S H·D] with key [B L H 2 D] alone, or query [B S H 3 D] alone, with H = num_heads = %d: %w",
			shapeOf(in[mhQuery]), shapeOf(in[mhKey]), shapeOf(in[mhValue]), op.heads, kernels.ErrShape)
	}
	for i, t := range []*onnxfile.Tensor{q, k, v} {
		what := []string{"query", "key", "value"}[i]
		s := t.Shape
		if t.Elements() == 0 || s[0] != q.Shape[0] || len(s) == 3 && s[2]%op.heads != 0 || len(s) == 4 && s[1] != op.heads {
			return nil, nil, nil, fmt.Errorf("%s has shape %v for %d batches and num_heads %d: its heads must be as many, and no length 0: %w", what, s, q.Shape[0], op.heads, kernels.ErrShape)
		}
	}
	if len(in) <= mhBias || in[mhBias] == nil {
		return q, k, v, op.checkOperands(q, k, v)
	}
	bias, at := in[mhBias], 0
	hidden := func(t *onnxfile.Tensor) int { return t.Elements() / (t.Shape[0] * seqOf(t)) }
	if want := hidden(q) + hidden(k) + hidden(v); !slices.Equal(bias.Shape, []int{want}) {
		return nil, nil, nil, fmt.Errorf("bias has shape %v, it must be [%d], the hidden sizes of query, key and value together: %w", bias.Shape, want, kernels.ErrShape)
	}
	for _, t := range []**onnxfile.Tensor{&q, &k, &v} {
		n := hidden(*t)
		if len((*t).Shape) == 3 {
			*t = added(*t, bias, at, n)
		}
		at += n
	}
	return q, k, v, op.checkOperands(q, k, v)
}

// checkOperands checks how operands fit each other.
func (op *multiHeadOp) checkOperands(q, k, v *onnxfile.Tensor) error {
	size := k.Shape[len(k.Shape)-1]
	if len(k.Shape) == 3 {
		size /= op.heads
	}
	if size != q.Shape[2]/op.heads || seqOf(k) != seqOf(v) {
		return fmt.Errorf("query has shape %v, key %v and value %v with %d heads: key must have the head size of query, value the sequence of key: %w", q.Shape, k.Shape, v.Shape, op.heads, kernels.ErrShape)
	}
	return nil
}

// seqOf returns the length of the sequence of an operand of 3 or 4 axes.
func seqOf(t *onnxfile.Tensor) int { return t.Shape[len(t.Shape)-2] }

// shapeOf returns the shape of a tensor that may be missing.
func shapeOf(t *onnxfile.Tensor) any {
	if t == nil {
		return "missing"
	}
	return t.Shape
}

// unpacked returns part n of a tensor [B, L, H, parts, D] as [B, L, H·D].
func (op *multiHeadOp) unpacked(t *onnxfile.Tensor, n int) *onnxfile.Tensor {
	s := t.Shape
	return columns(t, s[3]*s[4], n*s[4], (n+1)*s[4], []int{s[0], s[1], s[2] * s[4]})
}

// columns returns the elements from lo to hi of each row of n elements.
func columns(t *onnxfile.Tensor, n, lo, hi int, shape []int) *onnxfile.Tensor {
	x := &onnxfile.Tensor{Type: t.Type, Shape: shape}
	size := t.Type.Size()
	for at := 0; at < len(t.Data); at += n * size {
		x.Data = append(x.Data, t.Data[at+lo*size:at+hi*size]...)
	}
	return x
}

// added returns t plus n elements of bias from at on, for each row of n elements, rounded to the type of t.
func added(t, bias *onnxfile.Tensor, at, n int) *onnxfile.Tensor {
	x := &onnxfile.Tensor{Type: t.Type, Shape: t.Shape}
	for i := range t.Elements() {
		x.Data = appendNumber(x.Data, t.Type, t.At(i)+bias.At(at+i%n))
	}
	return x
}

// checkPasts checks past_key and past_value, [batch, heads, past, size].
func checkPasts(pk, pv *onnxfile.Tensor, batch, heads, size, valueSize int) error {
	if (pk == nil) != (pv == nil) {
		return fmt.Errorf("past_key has shape %v and past_value %v: they need each other: %w", shapeOf(pk), shapeOf(pv), kernels.ErrShape)
	}
	if pk == nil {
		return nil
	}
	for _, p := range []struct {
		name string
		t    *onnxfile.Tensor
		size int
	}{{"past_key", pk, size}, {"past_value", pv, valueSize}} {
		s := p.t.Shape
		if len(s) != 4 || len(pk.Shape) != 4 || !slices.Equal(s, []int{batch, heads, pk.Shape[2], p.size}) {
			return fmt.Errorf("%s has shape %v, it must be [%d %d past %d] with one past for keys and values: %w", p.name, s, batch, heads, p.size, kernels.ErrShape)
		}
	}
	return nil
}

// mask returns the term that is added to the scores, [B or 1, H or 1, S or 1, T]: the attention bias, and the filter
// value where key_padding_mask hides a key. Like ONNX Runtime, it adds a finite value: a row without visible keys is no
// special case. nil means none.
func (op *multiHeadOp) mask(in []*onnxfile.Tensor, batch, seq, past, total int) (*onnxfile.Tensor, error) {
	bias, padding := in[mhAttentionBias], in[mhPaddingMask]
	if err := checkBias(bias, batch, op.heads, seq, total); err != nil || padding == nil {
		return bias, err
	}
	hidden, rows, err := op.padding(padding, batch, seq, past, total)
	if err != nil {
		return nil, err
	}
	shape := []int{batch, 1, rows, total}
	if bias != nil {
		shape = []int{batch, bias.Shape[1], seq, total}
	}
	sum, err := newTensor(in[mhQuery].Type, shape)
	if err != nil {
		return nil, err
	}
	for b := range shape[0] {
		for h := range shape[1] {
			for i := range shape[2] {
				for j := range total {
					x := 0.0
					if bias != nil {
						x = bias.At((((b%bias.Shape[0])*bias.Shape[1]+h)*seq+i)*total + j)
					}
					if hidden(b, i, j) {
						x += op.filter
					}
					sum.Data = appendNumber(sum.Data, sum.Type, x)
				}
			}
		}
	}
	return sum, nil
}

// checkBias checks an attention_bias, which may be missing.
func checkBias(t *onnxfile.Tensor, batch, heads, seq, total int) error {
	if t == nil {
		return nil
	}
	if s := t.Shape; len(s) != 4 || s[0] != 1 && s[0] != batch || s[1] != 1 && s[1] != heads || s[2] != seq || s[3] != total {
		return fmt.Errorf("attention_bias has shape %v, it must be [%d or 1, %d or 1, %d, %d], [batch heads sequence keys]: %w", s, batch, heads, seq, total, kernels.ErrShape)
	}
	return nil
}

// padding reads a key_padding_mask of one of the published shapes and reports whether
// query i of batch b must not see key j. rows is the number of queries it distinguishes.
//
//	[B]          number of keys        [B, L]       of the new keys, 0 for hidden
//	[3B+2]       the same, first B     [B, T]       of all keys
//	                                   [B, S, T]    of each query
func (op *multiHeadOp) padding(t *onnxfile.Tensor, batch, seq, past, total int) (hidden func(b, i, j int) bool, rows int, err error) {
	switch s := t.Shape; {
	case slices.Equal(s, []int{batch}), slices.Equal(s, []int{3*batch + 2}):
		for b := range batch {
			if n := t.Int(b); n < 0 || n > int64(total) {
				return nil, 0, fmt.Errorf("key_padding_mask[%d] is %d, there are %d keys: it must be 0 to %d: %w", b, n, total, total, kernels.ErrOption)
			}
		}
		return func(b, _, j int) bool { return int64(j) >= t.Int(b) }, 1, nil
	case slices.Equal(s, []int{batch, total}):
		return func(b, _, j int) bool { return t.Int(b*total+j) <= 0 }, 1, nil
	case slices.Equal(s, []int{batch, total - past}):
		return func(b, _, j int) bool { return j >= past && t.Int(b*(total-past)+j-past) <= 0 }, 1, nil
	case slices.Equal(s, []int{batch, seq, total}):
		return func(b, i, j int) bool { return t.Int((b*seq+i)*total+j) <= 0 }, seq, nil
	default:
		return nil, 0, fmt.Errorf("key_padding_mask has shape %v, it must be [%d], [%d], [%d %d], [%d %d] or [%d %d %d]: %w",
			s, batch, 3*batch+2, batch, total-past, batch, total, batch, seq, total, kernels.ErrShape)
	}
}
