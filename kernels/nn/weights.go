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

// weight is one of a layer's weights.
type weight struct {
	name   string // in files and errors
	t      *kernels.Tensor
	vector bool   // files store one axis
	of     string // what a config without this weight lacks
}

// bias reports whether w is the bias of a projection.
func (w weight) bias() bool { return w.name[0] == 'b' }

func (w *MultiHeadWeights) named() [13]weight {
	return [13]weight{
		{"wq", &w.Wq, false, "q projection"}, {"wk", &w.Wk, false, "k projection"}, {"wv", &w.Wv, false, "v projection"}, {"wo", &w.Wo, false, "o projection"},
		{"bq", &w.Bq, true, "Bias"}, {"bk", &w.Bk, true, "Bias"}, {"bv", &w.Bv, true, "Bias of values"}, {"bo", &w.Bo, true, "Bias"},
		{"qnorm", &w.QNorm, true, "Norm with weights"}, {"knorm", &w.KNorm, true, "Norm with weights"}, {"sinks", &w.Sinks, true, "Sinks"},
		{"wg", &w.Wg, false, "Gate"}, {"bg", &w.Bg, true, "Gate with Bias"},
	}
}

func (w *MultiHeadWeights) release() {
	for _, p := range w.named() {
		p.t.Release()
	}
}

// shapeOf returns the shape of a weight by its name, the zero Shape for one that the layer does
// not have. c has its defaults.
func (c MultiHeadConfig) shapeOf(name string) (s kernels.Shape) {
	q, k, o := c.Heads*c.HeadDim, c.KVHeads*c.HeadDim, c.Heads*c.ValueDim
	switch {
	case name == "sinks" && c.Sinks:
		return kernels.Shape{1, c.Heads, 1, 1}
	case name == "sinks" || name[0] == 'b' && !c.Bias || name[1] == 'v' && c.KeysAsValues || name[1] == 'g' && c.Gate == GateNone:
		return s
	case name == "qnorm":
		return c.normShape(q)
	case name == "knorm":
		return c.normShape(k)
	}
	gates := o
	if c.Gate == GateHeads {
		gates = c.Heads
	}
	s = kernels.Shape{1, 1, 1, map[byte]int{'q': q, 'k': k, 'v': c.KVHeads * c.ValueDim, 'o': c.Model, 'g': gates}[name[1]]}
	if name[0] == 'w' {
		s[kernels.Seq] = map[byte]int{'q': c.Model, 'k': c.Memory, 'v': c.Memory, 'o': o, 'g': c.Model}[name[1]]
	}
	return s
}

// check compares w with c, which has its defaults.
func (w *MultiHeadWeights) check(c MultiHeadConfig) error {
	for _, p := range w.named() {
		want, got := c.shapeOf(p.name), *p.t
		if want == (kernels.Shape{}) {
			if !got.IsZero() {
				return fmt.Errorf("%s is present, but the config has no %s: %w", p.name, p.of, kernels.ErrShape)
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
