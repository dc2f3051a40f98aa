package kernels

import (
	"cmp"
	"fmt"

	"github.com/seed90331342/attn/backend"
)

// Dims are the lengths of an attention call: Batch (B), Heads (H, query heads), KVHeads (Hkv, key
// and value heads), SeqQ (Sq), SeqK (Sk), Dim (D, of a query and a key) and ValueDim (Dv, of a
// value and an output). [Device.AttentionFloat32] has defaults for those that are zero.
type Dims = backend.Dims

// operandDims checks q, k and v and returns the lengths of the call. With pages, k and v
// are pools of pages.
func operandDims(q, k, v Tensor, pages *Pages) (Dims, error) {
	if err := cmp.Or(q.CheckDType("q", floats...), k.CheckDType("k", numbers...), v.CheckDType("v", numbers...)); err != nil {
		return Dims{}, err
	}
	if k.DType() != v.DType() {
		return Dims{}, fmt.Errorf("k is %v, v is %v: they must have one dtype: %w", k.DType(), v.DType(), ErrDType)
	}
	c := backend.Call{Q: q, K: k, V: v, Pages: pages}
	d := c.Dims()
	qs, ks, vs := q.Shape(), k.Shape(), v.Shape()
	switch {
	case d.Dim == 0 || d.ValueDim == 0:
		return d, fmt.Errorf("the head sizes of q %v and v %v are %d and %d: both must be at least 1%s: %w", qs, vs, d.Dim, d.ValueDim, cmp.Or(qs.Hint(), vs.Hint()), ErrShape)
	case pages != nil && ks[Batch] != vs[Batch]:
		return d, fmt.Errorf("k %v has %d pages, v %v has %d: they must be equal: %w", ks, ks[Batch], vs, vs[Batch], ErrShape)
	case pages == nil && (ks[Batch] != d.Batch || vs[Batch] != d.Batch):
		return d, fmt.Errorf("batches differ: q %v, k %v, v %v must have the same first length: %w", qs, ks, vs, ErrShape)
	case ks[Dim] != d.Dim:
		return d, fmt.Errorf("k %v has head size %d, q %v has %d: they must be equal: %w", ks, ks[Dim], qs, d.Dim, ErrShape)
	case vs[Heads] != d.KVHeads || vs[Seq] != ks[Seq]:
		return d, fmt.Errorf("v %v and k %v must have the same heads and keys: %w", vs, ks, ErrShape)
	}
	return d, divides(d.Heads, d.KVHeads, "k", "q")
}

// scoreDims is operandDims for a stage that takes q and k alone.
func scoreDims(q, k Tensor) (Dims, error) {
	if err := cmp.Or(q.CheckDType("q", floats...), k.CheckDType("k", floats...)); err != nil {
		return Dims{}, err
	}
	return operandDims(q, k, k, nil)
}

func divides(heads, kvHeads int, kv, q string) error {
	if heads > 0 && (kvHeads == 0 || heads%kvHeads != 0) {
		return fmt.Errorf("%s has %d heads, %s has %d: the kv heads must divide the query heads: %w", kv, kvHeads, q, heads, ErrShape)
	}
	return nil
}

// The dtypes of numbers, and of keys and values.
var (
	floats  = []DType{F32, F16, BF16}
	numbers = []DType{F32, F16, BF16, Q8, Q4, F8}
)

// checkOptional is Tensor.CheckShape unless t is the zero Tensor.
func checkOptional(name string, t Tensor, shape Shape, rule string, dtypes ...DType) error {
	if t.IsZero() {
		return nil
	}
	return t.CheckShape(name, shape, rule, dtypes...)
}
