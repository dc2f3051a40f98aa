package kernels

import (
	"context"
	"fmt"

	"github.com/seed90331342/attn/backend"
)

// AttentionFloat32 is attention for the program that just wants an answer: plain
// row-major slices in, the output [B, H, Sq, Dv] out.
//
//	q [B, H, Sq, D]    k [B, Hkv, Sk, D]    v [B, Hkv, Sk, Dv]
//
// Lengths left 0 in d follow from the others, see [Dims]. The options'
// tensors (Mask, Bias, RelativeBias, BlockMask) are host tensors here; LSE and Weights are not returned, use
// [Attention] for them. Errors as for Attention, and ErrShape when a slice does
// not have the elements of its shape.
func AttentionFloat32(ctx context.Context, be backend.Backend, d Dims, q, k, v []float32, opt Options) ([]float32, error) {
	d = fillDims(d)
	opt.LSE, opt.Weights = false, false
	var held []backend.Tensor
	defer func() {
		for _, t := range held {
			t.Release()
		}
	}()
	up := func(name string, host backend.Tensor, err error) (backend.Tensor, error) {
		if err == nil {
			host, err = be.Upload(ctx, host)
		}
		if err != nil {
			return host, fmt.Errorf("attention: %s: %w", name, err)
		}
		held = append(held, host)
		return host, nil
	}
	slice := func(name string, data []float32, shape backend.Shape) (backend.Tensor, error) {
		t, err := backend.HostF32(data, shape)
		return up(name, t, err)
	}
	tq, err := slice("q", q, backend.Shape{d.Batch, d.Heads, d.SeqQ, d.Dim})
	if err != nil {
		return nil, err
	}
	tk, err := slice("k", k, backend.Shape{d.Batch, d.KVHeads, d.SeqK, d.Dim})
	if err != nil {
		return nil, err
	}
	tv, err := slice("v", v, backend.Shape{d.Batch, d.KVHeads, d.SeqK, d.ValueDim})
	if err != nil {
		return nil, err
	}
	for _, o := range []struct {
		name string
		t    *backend.Tensor
	}{{"mask", &opt.Mask}, {"bias", &opt.Bias}, {"relative bias", &opt.RelativeBias}, {"block mask", &opt.BlockMask}} {
		if o.t.IsZero() {
			continue
		}
		if *o.t, err = up(o.name, *o.t, nil); err != nil {
			return nil, err
		}
	}
	r, err := Attention(ctx, be, tq, tk, tv, opt)
	if err != nil {
		return nil, err
	}
	defer r.Release()
	return Float32s(ctx, be, r.O)
}

func fillDims(d Dims) Dims {
	or := func(n *int, def int) {
		if *n == 0 {
			*n = def
		}
	}
	or(&d.Batch, 1)
	or(&d.Heads, 1)
	or(&d.KVHeads, d.Heads)
	or(&d.SeqK, d.SeqQ)
	or(&d.ValueDim, d.Dim)
	return d
}

// FromFloat32 puts data into the backend's memory as a contiguous tensor of
// dtype F32, F16, BF16 or Q8, rounded to nearest even, for the caller to Release.
// On a backend that computes in host memory an F32 tensor is data itself, not
// a copy. It returns ErrShape when data does not have the elements of shape and
// ErrDType for another dtype.
func FromFloat32(ctx context.Context, be backend.Backend, dtype backend.DType, data []float32, shape backend.Shape) (backend.Tensor, error) {
	var host backend.Tensor
	var err error
	switch dtype {
	case backend.F32:
		host, err = backend.HostF32(data, shape)
	case backend.F16, backend.BF16:
		bits := make([]uint16, len(data))
		for i, x := range data {
			bits[i] = dtype.Encode(x)
		}
		host, err = backend.HostBits(bits, dtype, shape)
	case backend.Q8:
		host, err = quantised(data, shape)
	default:
		err = fmt.Errorf("numbers cannot be %v, only f32, f16, bf16 or q8: %w", dtype, backend.ErrDType)
	}
	if err != nil {
		return host, err
	}
	return be.Upload(ctx, host)
}

// quantised returns data as a Q8 tensor on the host.
func quantised(data []float32, shape backend.Shape) (backend.Tensor, error) {
	host, err := backend.AllocHost(backend.Q8, shape)
	if err != nil {
		return host, err
	}
	if n := shape.Elements(); len(data) != n {
		return host, fmt.Errorf("data has %d elements, shape %v needs %d: %w", len(data), shape, n, backend.ErrShape)
	}
	rows, err := host.Q8Rows()
	if err != nil {
		return host, err
	}
	cols, apart := shape[backend.Dim], host.Strides()[backend.Seq]
	for ; len(data) > 0; data, rows = data[cols:], rows[apart:] {
		backend.QuantiseQ8(rows, data[:cols])
	}
	return host, nil
}

// Float32s copies t, of any type of numbers and any strides, out of the
// backend's memory: its elements in row-major order. Errors: ErrDType for a
// Bool tensor, and the backend's.
func Float32s(ctx context.Context, be backend.Backend, t backend.Tensor) ([]float32, error) {
	if !t.DType().Float() && t.DType() != backend.Q8 {
		return nil, fmt.Errorf("tensor is %v, it must be f32, f16, bf16 or q8: %w", t.DType(), backend.ErrDType)
	}
	host, err := backend.AllocHost(t.DType(), t.Shape())
	if err != nil {
		return nil, err
	}
	if err := be.Download(ctx, host, t); err != nil {
		return nil, err
	}
	if t.DType() == backend.F32 {
		return host.Float32s()
	}
	if t.DType() == backend.Q8 {
		rows, err := host.Q8Rows()
		if err != nil {
			return nil, err
		}
		cols, apart := t.Shape()[backend.Dim], host.Strides()[backend.Seq]
		out := make([]float32, t.Shape().Elements())
		for rest := out; len(rest) > 0; rest, rows = rest[cols:], rows[apart:] {
			backend.DequantiseQ8(rest[:cols], rows)
		}
		return out, nil
	}
	bits, err := host.Bits()
	if err != nil {
		return nil, err
	}
	out := make([]float32, len(bits))
	for i, b := range bits {
		out[i] = t.DType().Decode(b)
	}
	return out, nil
}
