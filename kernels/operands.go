package kernels

import (
	"fmt"
	"slices"

	"github.com/seed90331342/attn/backend"
)

// Dims are the lengths of an attention call. In [Device.AttentionFloat32] zero values
// mean: Batch 1, Heads 1, KVHeads as Heads, SeqK as SeqQ, ValueDim as Dim.
type Dims = backend.Dims

// operandDims checks q, k and v and returns the lengths of the call. With pages, k and v
// are pools of pages.
func operandDims(q, k, v backend.Tensor, pages *backend.Pages) (Dims, error) {
	if err := floats(backend.Operand{Name: "q", Tensor: q}); err != nil {
		return Dims{}, err
	}
	if err := floatsOrQ8(backend.Operand{Name: "k", Tensor: k}, backend.Operand{Name: "v", Tensor: v}); err != nil {
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
		return d, fmt.Errorf("k %v has %d pages, v %v has %d: they must be equal: %w", ks, ks[backend.Batch], vs, vs[backend.Batch], backend.ErrShape)
	case pages == nil && (ks[backend.Batch] != d.Batch || vs[backend.Batch] != d.Batch):
		return d, fmt.Errorf("batches differ: q %v, k %v, v %v must have the same first length: %w", qs, ks, vs, backend.ErrShape)
	case ks[backend.Dim] != d.Dim:
		return d, fmt.Errorf("k %v has head size %d, q %v has %d: they must be equal: %w", ks, ks[backend.Dim], qs, d.Dim, backend.ErrShape)
	case vs[backend.Heads] != d.KVHeads || vs[backend.Seq] != ks[backend.Seq]:
		return d, fmt.Errorf("v %v and k %v must have the same heads and keys: %w", vs, ks, backend.ErrShape)
	}
	return d, divides(d.Heads, d.KVHeads, "k", "q")
}

// scoreDims is operandDims for a stage that takes q and k alone.
func scoreDims(q, k backend.Tensor) (Dims, error) {
	if err := floats(backend.Operand{Name: "q", Tensor: q}, backend.Operand{Name: "k", Tensor: k}); err != nil {
		return Dims{}, err
	}
	return operandDims(q, k, k, nil)
}

func divides(heads, kvHeads int, kv, q string) error {
	if heads%kvHeads != 0 {
		return fmt.Errorf("%s has %d heads, %s has %d: the kv heads must divide the query heads: %w", kv, kvHeads, q, heads, backend.ErrShape)
	}
	return nil
}

// floats checks that operands exist, have a floating point type and no empty axis.
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

// floatsOrQ8 is floats for keys and values, which may also be Q8.
func floatsOrQ8(ops ...backend.Operand) error {
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

// present checks that an operand exists and has no empty axis.
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

// expect checks an operand whose shape follows from others by the rule.
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
	// Clone keeps the variadic slice of successful calls on the stack.
	return fmt.Errorf("%s is %v, it must be one of %v: %w", name, t.DType(), slices.Clone(dtypes), backend.ErrDType)
}

// slicer slices tensors and keeps the first error.
type slicer struct{ err error }

// slice returns t from lo to hi along axis; the zero Tensor stays one.
func (s *slicer) slice(t backend.Tensor, axis, lo, hi int) backend.Tensor {
	if t.IsZero() || s.err != nil {
		return t
	}
	var view backend.Tensor
	view, s.err = t.Slice(axis, lo, hi)
	return view
}
