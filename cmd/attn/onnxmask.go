package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cmd/attn/internal/onnx"
)

// loadMask uploads a mask with the scores' four axes, completed at the front with axes
// of length 1. Since opset 24 a last axis of length 1 is shorter than the keys like any
// other, and hides those that it lacks; before, it broadcasts, as it does in kernels.
func (r *onnxRun) loadMask(ctx context.Context, t *onnx.Tensor) (backend.Tensor, error) {
	n := len(t.Shape)
	if n < 1 || n > 4 {
		return backend.Tensor{}, fmt.Errorf("attn_mask has shape %v, it must have 1 to 4 axes: %w", t.Shape, backend.ErrShape)
	}
	shape := backend.Shape{1, 1, 1, 1}
	copy(shape[4-n:], t.Shape)
	if keys := r.dims.SeqK; shape[backend.Dim] == 1 && r.opset > 23 {
		t = longer(t, keys)
		shape[backend.Dim] = keys
	}
	for axis, want := range [4]int{r.dims.Batch, r.dims.Heads, r.dims.SeqQ, r.dims.SeqK} {
		if l := shape[axis]; l != 1 && l != want && (axis != backend.Dim || l < 1 || l > want) {
			return backend.Tensor{}, fmt.Errorf("attn_mask: shape %v does not broadcast to [%d %d %d %d] (of the keys there may be fewer): %w", shape, r.dims.Batch, r.dims.Heads, r.dims.SeqQ, r.dims.SeqK, backend.ErrShape)
		}
	}
	dtype := map[onnx.DataType]backend.DType{onnx.Bool: backend.Bool, onnx.Float16: backend.F16, onnx.BFloat16: backend.BF16}[t.Type]
	return r.upload(ctx, "attn_mask", clamped(t), dtype, shape)
}

// longer returns t with every row, along the last axis, continued to n elements
// that hide their key.
func longer(t *onnx.Tensor, n int) *onnx.Tensor {
	last := len(t.Shape) - 1
	out := &onnx.Tensor{Type: t.Type, Shape: append([]int(nil), t.Shape...)}
	out.Shape[last] = n
	rows, row := 1, t.Shape[last]*t.Type.Size()
	for _, l := range t.Shape[:last] {
		rows *= l
	}
	for i := range rows {
		out.Data = append(out.Data, t.Data[i*row:(i+1)*row]...)
		for range n - t.Shape[last] {
			out.Data = appendNumber(out.Data, t.Type, math.Inf(-1))
		}
	}
	return out
}

// clamped moves a float64 mask's finite numbers beyond float32's range into it, where
// they would become infinite, which hides. What they do to a row stays the same, as
// backends bound them anyway (backend.MaxBias).
func clamped(t *onnx.Tensor) *onnx.Tensor {
	if t.Type != onnx.Double {
		return t
	}
	out := &onnx.Tensor{Type: t.Type, Shape: t.Shape}
	for i := range t.Elements() {
		x := t.At(i)
		if !math.IsInf(x, 0) {
			x = min(max(x, -backend.MaxBias), backend.MaxBias)
		}
		out.Data = appendNumber(out.Data, t.Type, x)
	}
	return out
}

// appendNumber appends x, rounded to the type d, little endian; for a bool whether x
// is above 0, so that -Inf hides a key in a mask of any type.
func appendNumber(b []byte, d onnx.DataType, x float64) []byte {
	switch d {
	case onnx.Bool:
		if x > 0 {
			return append(b, 1)
		}
		return append(b, 0)
	case onnx.Float16:
		return binary.LittleEndian.AppendUint16(b, backend.F16.Encode(float32(x)))
	case onnx.BFloat16:
		return binary.LittleEndian.AppendUint16(b, backend.BF16.Encode(float32(x)))
	case onnx.Double:
		return binary.LittleEndian.AppendUint64(b, math.Float64bits(x))
	}
	return binary.LittleEndian.AppendUint32(b, math.Float32bits(float32(x)))
}
