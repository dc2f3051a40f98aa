package kernels

import (
	"fmt"

	"github.com/seed90331342/attn/backend"
)

// MultiHeadWeights are the weights of a [MultiHeadAttention] in host memory, F32 and
// contiguous, y = x·W + B:
//
//	Wq [1, 1, Model, Heads·D]       Bq [1, 1, 1, Heads·D]
//	Wk [1, 1, Memory, KVHeads·D]    Bk [1, 1, 1, KVHeads·D]
//	Wv [1, 1, Memory, KVHeads·Dv]   Bv [1, 1, 1, KVHeads·Dv]
//	Wo [1, 1, Heads·Dv, Model]      Bo [1, 1, 1, Model]
//
// with the lengths of the [MultiHeadConfig]. Biases are there all or none. A head's
// columns (of Wo, rows) follow one another. PyTorch's Linear keeps the transpose.
type MultiHeadWeights struct {
	Wq, Wk, Wv, Wo backend.Tensor
	Bq, Bk, Bv, Bo backend.Tensor
}

// weight is one of a layer's weights by the name that files and errors have.
type weight struct {
	name string
	t    *backend.Tensor
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

// shapeOf returns the shape of a weight by its name; c is filled.
func (c MultiHeadConfig) shapeOf(name string) backend.Shape {
	cols := map[byte]int{'q': c.Heads * c.HeadDim, 'k': c.KVHeads * c.HeadDim, 'v': c.KVHeads * c.ValueDim, 'o': c.Model}[name[1]]
	if name[0] == 'b' {
		return backend.Shape{1, 1, 1, cols}
	}
	rows := map[byte]int{'q': c.Model, 'k': c.Memory, 'v': c.Memory, 'o': c.Heads * c.ValueDim}[name[1]]
	return backend.Shape{1, 1, rows, cols}
}

// check compares w with what c, which is filled, asks for.
func (w *MultiHeadWeights) check(c MultiHeadConfig) error {
	for _, p := range w.named() {
		if p.bias && !c.Bias {
			if !p.t.IsZero() {
				return fmt.Errorf("%s is there, but the config has no Bias: %w", p.name, backend.ErrShape)
			}
			continue
		}
		if err := expect(p.name, *p.t, c.shapeOf(p.name), "one that follows from the config", backend.F32); err != nil {
			return err
		}
		if !p.t.OnHost() {
			return fmt.Errorf("%s is not in host memory: %w", p.name, backend.ErrDevice)
		}
		if !p.t.IsContiguous() {
			return fmt.Errorf("%s has strides %v, weights must be contiguous: %w", p.name, p.t.Strides(), backend.ErrShape)
		}
	}
	return nil
}
