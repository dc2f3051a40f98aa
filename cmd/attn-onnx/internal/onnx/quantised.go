package onnx

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/seed90331342/attn/cmd/attn-onnx/internal/onnxfile"
	"github.com/seed90331342/attn/kernels"
)

// factors are those of a cache of int8 of ONNX Runtime, [kv heads, size]: an element is an integer times the factor of
// its place in the head. attn's int8 rows have one factor each. They get 1, and the factors of keys multiply the
// queries, those of values the output.
type factors []float32

// quantTypeOf reads the kind of factors of a cache. "NONE" means that the cache is not quantised.
func quantTypeOf(a *attributes, name string) string {
	return a.word(name, "NONE", "PER_TENSOR", "PER_CHANNEL")
}

// factorsOf returns the factors in t, an input of this name, for a cache of a kind; nil for one that is not quantised.
func factorsOf(name, kind string, t *onnxfile.Tensor, kvHeads, size int) (factors, error) {
	n := map[string]int{"PER_TENSOR": 1, "PER_CHANNEL": kvHeads * size}[kind] // or 0
	if n == 0 && t == nil {
		return nil, nil
	}
	if t == nil || n == 0 || t.Type != onnxfile.Float || t.Elements() != n {
		return nil, fmt.Errorf("%s has shape %v for a cache of the kind %s: it must have 1 element of f32 for PER_TENSOR, %d·%d, heads and size, for PER_CHANNEL, and be missing for NONE: %w", name, shapeOf(t), kind, kvHeads, size, kernels.ErrShape)
	}
	f := make(factors, kvHeads*size)
	for i := range f {
		if f[i] = float32(t.At(i % n)); !(f[i] > 0 && f[i] <= math.MaxFloat32) {
			return nil, fmt.Errorf("%s has the element %v, it must be above 0 and finite: %w", name, f[i], kernels.ErrOption)
		}
	}
	return f, nil
}

// quantise returns x [..., kv heads·size] as the nearest integers times f, even ones for ties. Like ONNX Runtime, it
// multiplies by 1/f.
func (f factors) quantise(name string, x *onnxfile.Tensor) (*onnxfile.Tensor, error) {
	t := &onnxfile.Tensor{Type: onnxfile.Int8, Shape: x.Shape}
	for i := range x.Elements() {
		v := math.RoundToEven(float64(float32(x.At(i)) * (1 / f[i%len(f)])))
		if v != v {
			return nil, fmt.Errorf("%s has a NaN, which int8 cannot represent: %w", name, kernels.ErrDType)
		}
		t.Data = append(t.Data, byte(int8(min(max(v, math.MinInt8), math.MaxInt8))))
	}
	return t, nil
}

// scale returns x [..., heads·size], whose groups of heads share a kv head, times the factors, rounded to type d.
func (f factors) scale(x *onnxfile.Tensor, d onnxfile.DataType, heads, kvHeads int) *onnxfile.Tensor {
	t := &onnxfile.Tensor{Type: d, Shape: x.Shape}
	size := len(f) / kvHeads
	for i := range x.Elements() {
		h := i / size % heads * kvHeads / heads
		t.Data = appendNumber(t.Data, d, float64(float32(x.At(i))*f[h*size+i%size]))
	}
	return t
}

// cache is upload for keys or values, whose rows of int8 get the factor 1.
func (u *uploader) cache(name string, t *onnxfile.Tensor, dtype kernels.DType) (up kernels.Tensor) {
	shape := kernels.Shape(t.Shape)
	if u.err != nil || t.Type != onnxfile.Int8 {
		return u.upload(name, t, dtype, shape)
	}
	var data []byte
	for at := 0; at < len(t.Data); at += shape[kernels.Dim] {
		data = binary.LittleEndian.AppendUint32(data, math.Float32bits(1))
		data = append(data, t.Data[at:at+shape[kernels.Dim]]...)
	}
	host, err := kernels.Host(data, kernels.Q8, shape)
	if err == nil {
		up, err = u.dev.Upload(u.ctx, host)
	}
	if err != nil {
		u.err = fmt.Errorf("%s: %w", name, err)
		return kernels.Tensor{}
	}
	u.held = append(u.held, up)
	return up
}
