package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cmd/attn/internal/onnx"
)

// onnxMask is attn_mask with the keys that it lacks.
type onnxMask struct {
	host   *onnx.Tensor
	shape  backend.Shape // each length 1 or that of the scores
	device backend.Tensor
}

// loadMask completes a mask to the scores' four axes, at the front with axes of
// length 1, and along the keys with such that are hidden. A last axis of length 1 is
// short like any other since opset 24; before, it broadcasts.
func (r *onnxRun) loadMask(ctx context.Context, t *onnx.Tensor) (*onnxMask, error) {
	n := len(t.Shape)
	if n < 1 || n > 4 {
		return nil, fmt.Errorf("attn_mask has shape %v, it must have 1 to 4 axes: %w", t.Shape, backend.ErrShape)
	}
	m := &onnxMask{host: t, shape: backend.Shape{1, 1, 1, 1}}
	copy(m.shape[4-n:], t.Shape)
	if keys := r.dims.SeqK; m.shape[backend.Dim] < keys && !(r.opset == 23 && m.shape[backend.Dim] == 1) {
		m.host = longer(t, keys)
		m.shape[backend.Dim] = keys
	}
	dtype := map[onnx.DataType]backend.DType{onnx.Bool: backend.Bool, onnx.Float16: backend.F16, onnx.BFloat16: backend.BF16}[t.Type]
	scores := backend.Shape{r.dims.Batch, r.dims.Heads, r.dims.SeqQ, r.dims.SeqK}
	x, err := backend.Meta(dtype, m.shape)
	if err == nil {
		_, err = x.Broadcast(scores)
	}
	if err != nil {
		return nil, fmt.Errorf("attn_mask: %w", err)
	}
	m.device, err = r.upload(ctx, "attn_mask", clamped(m.host), dtype, m.shape)
	return m, err
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

// at returns what the mask adds to a score: -Inf, or 0, for a boolean one.
func (m *onnxMask) at(b, h, i, j int) float64 {
	n := 0
	for axis, at := range [4]int{b, h, i, j} {
		n = n*m.shape[axis] + min(at, m.shape[axis]-1) // the only one of an axis of length 1
	}
	x := m.host.At(n)
	switch {
	case m.host.Type != onnx.Bool:
		return x
	case x == 0:
		return math.Inf(-1)
	}
	return 0
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
