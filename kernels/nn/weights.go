package nn

import (
	"fmt"

	"github.com/seed90331342/attn/kernels"
)

// MultiHeadWeights are the weights of a [MultiHeadAttention] in host memory, F32 and
// contiguous, for y = x·W + B:
//
//	Wq [1, 1, Model, Heads·D]       Bq [1, 1, 1, Heads·D]
//	Wk [1, 1, Memory, KVHeads·D]    Bk [1, 1, 1, KVHeads·D]
//	Wv [1, 1, Memory, KVHeads·Dv]   Bv [1, 1, 1, KVHeads·Dv]
//	Wo [1, 1, Heads·Dv, Model]      Bo [1, 1, 1, Model]
//
// The lengths are those of the [MultiHeadConfig]. Either all biases are present or none.
// These are present if the config has a Norm with weights, Sinks or a Gate:
//
//	QNorm [1, 1, 1, D], or [1, 1, 1, Heads·D] for a Norm of the whole Projection
//	KNorm [1, 1, 1, D], or [1, 1, 1, KVHeads·D]
//	Sinks [1, Heads, 1, 1]
//	Wg    [1, 1, Model, Heads·Dv], or [1, 1, Model, Heads] for GateHeads    Bg [1, 1, 1, N]
//
// With KeysAsValues there are no Wv and Bv.
// The columns of a head are adjacent, for Wo its rows. PyTorch's Linear stores the
// transpose, see [Transposed].
type MultiHeadWeights struct {
	Wq, Wk, Wv, Wo kernels.Tensor
	Bq, Bk, Bv, Bo kernels.Tensor

	QNorm, KNorm, Sinks kernels.Tensor
	Wg, Bg              kernels.Tensor
}

// weight is one of a layer's weights with its name in files and errors.
type weight struct {
	name string
	t    *kernels.Tensor
	bias bool
}

func (w *MultiHeadWeights) named() [8]weight {
	return [8]weight{
		{"wq", &w.Wq, false}, {"wk", &w.Wk, false}, {"wv", &w.Wv, false}, {"wo", &w.Wo, false},
		{"bq", &w.Bq, true}, {"bk", &w.Bk, true}, {"bv", &w.Bv, true}, {"bo", &w.Bo, true},
	}
}

func (w *MultiHeadWeights) release() {
	for _, p := range w.named() {
		p.t.Release()
	}
}

// shapeOf returns the shape of a weight by its name, w or b and then q, k, v or o; c has its
// defaults.
func (c MultiHeadConfig) shapeOf(name string) kernels.Shape {
	cols := map[byte]int{'q': c.Heads * c.HeadDim, 'k': c.KVHeads * c.HeadDim, 'v': c.KVHeads * c.ValueDim, 'o': c.Model}[name[1]]
	if name[0] == 'b' {
		return kernels.Shape{1, 1, 1, cols}
	}
	rows := map[byte]int{'q': c.Model, 'k': c.Memory, 'v': c.Memory, 'o': c.Heads * c.ValueDim}[name[1]]
	return kernels.Shape{1, 1, rows, cols}
}

// check compares w with c, which has its defaults.
func (w *MultiHeadWeights) check(c MultiHeadConfig) error {
	for _, p := range w.named() {
		want, got := c.shapeOf(p.name), *p.t
		if p.bias && !c.Bias {
			if !got.IsZero() {
				return fmt.Errorf("%s is present, but the config has no Bias: %w", p.name, kernels.ErrShape)
			}
			continue
		}
		if err := got.CheckShape(p.name, want, "shape for the config", kernels.F32); err != nil {
			return err
		}
		if !got.OnHost() {
			return fmt.Errorf("%s is not in host memory: %w", p.name, kernels.ErrDevice)
		}
		if !got.IsContiguous() {
			return fmt.Errorf("%s has strides %v, weights must be contiguous: %w", p.name, got.Strides(), kernels.ErrShape)
		}
	}
	return nil
}
