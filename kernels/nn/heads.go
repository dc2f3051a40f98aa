package nn

import (
	"fmt"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/internal/op"
	"github.com/seed90331342/attn/kernels/internal/steps"
)

var floats = []kernels.DType{kernels.F32, kernels.F16, kernels.BF16}

// splitHeads returns [B, 1, S, heads·D] memory as [B, heads, S, D].
func splitHeads(y kernels.Tensor, heads int) kernels.Tensor {
	shape, st := y.Shape(), y.Strides()
	d := shape[kernels.Dim] / heads
	split, _ := y.View(kernels.Shape{shape[0], heads, shape[2], d}, kernels.Strides{st[0], d * st[3], st[2], st[3]}, 0) // elements of y
	return split
}

// joinHeads undoes splitHeads.
func joinHeads(t kernels.Tensor) kernels.Tensor {
	shape, st := t.Shape(), t.Strides()
	joined, _ := t.View(kernels.Shape{shape[0], 1, shape[2], shape[1] * shape[3]}, kernels.Strides{st[0], st[0], st[2], st[3]}, 0)
	return joined
}

// allocRows returns new memory for n elements of each row of x, and allocHeads for d of each head, whose heads are split.
func allocRows(b *steps.Steps, x kernels.Tensor, n int) kernels.Tensor {
	return b.Alloc(kernels.Shape{x.Shape()[kernels.Batch], 1, x.Shape()[kernels.Seq], n})
}

func allocHeads(b *steps.Steps, x kernels.Tensor, heads, d int) kernels.Tensor {
	return splitHeads(allocRows(b, x, heads*d), heads)
}

// checkInput returns an error unless x is [B, 1, S, model] of floats.
func checkInput(x kernels.Tensor, model int) error {
	if err := x.Check("x", floats...); err != nil {
		return err
	}
	if s := x.Shape(); s != (kernels.Shape{s[0], 1, s[2], model}) {
		return fmt.Errorf("x has shape %v, it must be [B, 1, S, %d] for the layer: %w", s, model, kernels.ErrShape)
	}
	return nil
}

// checkConfig returns an error for the type of a layer's weights, its RoPE, which may be nil, for heads
// of a size, or the ε of its norms.
func checkConfig(dtype kernels.DType, r *RoPE, headDim int, epsilon float64) error {
	if !dtype.Float() {
		return fmt.Errorf("config: DType is %v, weights must be f32, f16 or bf16: %w", dtype, kernels.ErrDType)
	}
	if r != nil {
		if _, _, err := r.frequencies(headDim); err != nil {
			return fmt.Errorf("config: rope: %w", err)
		}
	}
	if epsilon != 0 && !(epsilon >= op.MinEpsilon && epsilon <= op.MaxEpsilon) { // or NaN
		return fmt.Errorf("config: Epsilon of norms is %v, it must be from 2^-100 to 1, or 0 for 1e-6: %w", epsilon, kernels.ErrOption)
	}
	return nil
}
