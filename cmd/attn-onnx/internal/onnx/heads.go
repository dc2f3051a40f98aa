package onnx

import (
	"context"
	"fmt"
	"slices"

	"github.com/seed90331342/attn/cmd/attn-onnx/internal/onnxfile"
	"github.com/seed90331342/attn/kernels"
)

// What GroupQueryAttention and PagedAttention of ONNX Runtime do with heads before the attention.

// sinksOf returns head_sink, the logit of each head that counts in the denominator of the softmax. smooth_softmax is a
// logit of 0.
func sinksOf(t *onnxfile.Tensor, heads int, smooth bool) (sinks []float32, err error) {
	if t == nil {
		if smooth {
			sinks = make([]float32, heads)
		}
		return sinks, nil
	}
	if !slices.Equal(t.Shape, []int{heads}) {
		return nil, fmt.Errorf("head_sink has shape %v, it must be [%d], one logit a head: %w", t.Shape, heads, kernels.ErrShape)
	}
	for h := range heads {
		sinks = append(sinks, float32(t.At(h)))
	}
	return sinks, nil
}

// epsilonOf reads ε of the norm of queries and keys.
func epsilonOf(a *attributes) float64 {
	if x := a.number("qk_norm_epsilon"); x != nil {
		return *x
	}
	return 1e-6
}

// normedHeads norms the heads of queries and of keys, [batch, sequence, heads·size], if there are weights for it.
func normedHeads(ctx context.Context, dev *kernels.Device, q, k, qWeight, kWeight *onnxfile.Tensor, heads, kvHeads int, epsilon float64) (_, _ *onnxfile.Tensor, err error) {
	if qWeight == nil && kWeight == nil {
		return q, k, nil
	}
	size := q.Shape[2] / heads
	if qWeight == nil || kWeight == nil || !slices.Equal(qWeight.Shape, []int{size}) || !slices.Equal(kWeight.Shape, []int{size}) {
		return nil, nil, fmt.Errorf("q_norm_weight has shape %v and k_norm_weight %v: they need each other, and must be [%d], a weight for each element of a head: %w", shapeOf(qWeight), shapeOf(kWeight), size, kernels.ErrShape)
	}
	if !(epsilon > 0) {
		return nil, nil, fmt.Errorf("attribute qk_norm_epsilon is %v, it must be above 0: %w", epsilon, kernels.ErrOption)
	}
	if q, err = normed(ctx, dev, q, qWeight, heads, epsilon); err == nil && k.Elements() > 0 {
		k, err = normed(ctx, dev, k, kWeight, kvHeads, epsilon)
	}
	return q, k, err
}

// normed returns the root-mean-square norm of each head of x, in the type of x.
func normed(ctx context.Context, dev *kernels.Device, x, w *onnxfile.Tensor, heads int, epsilon float64) (*onnxfile.Tensor, error) {
	up := uploader{ctx: ctx, dev: dev}
	defer up.release()
	rows := up.rows("query or key", x, dtypeOf(x.Type), heads)
	weights := up.upload("norm weight", w, kernels.F32, kernels.Shape{1, 1, 1, w.Shape[0]})
	if up.err != nil {
		return nil, up.err
	}
	if err := dev.Normalise(ctx, rows, rows, weights, kernels.Norm{Epsilon: epsilon}); err != nil {
		return nil, err
	}
	return unrows(ctx, dev, rows, x)
}

// checkAngles checks cos_cache and sin_cache, [positions, pairs], for the rotation of up to size elements of a head.
func checkAngles(cos, sin *onnxfile.Tensor, size int) error {
	if cos == nil || sin == nil || len(cos.Shape) != 2 || !slices.Equal(cos.Shape, sin.Shape) || cos.Shape[1] < 1 || 2*cos.Shape[1] > size {
		return fmt.Errorf("cos_cache has shape %v and sin_cache %v: do_rotary needs both as [positions pairs] with at most %d pairs, half of the head size: %w", shapeOf(cos), shapeOf(sin), size/2, kernels.ErrShape)
	}
	return nil
}
