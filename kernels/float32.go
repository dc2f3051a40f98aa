package kernels

import (
	"context"
	"fmt"

	"github.com/seed90331342/attn/backend"
)

// AttentionFloat32 computes attention of row-major slices and returns the output
// [B, H, Sq, Dv]:
//
//	q [B, H, Sq, D]    k [B, Hkv, Sk, D]    v [B, Hkv, Sk, Dv]
//
// Zero lengths in dims have defaults, see [Dims]. Tensors in opt are in host memory here.
// LSE and Weights are refused, use [Device.Attention] for them. Errors as for Attention,
// and ErrShape when a slice does not have the elements of its shape.
func (d *Device) AttentionFloat32(ctx context.Context, dims Dims, q, k, v []float32, opt Options) ([]float32, error) {
	if err := opt.CheckPath(slicePath); err != nil {
		return nil, fmt.Errorf("attention: %w", err)
	}
	dims = fillDims(dims)
	var uploaded []backend.Tensor
	defer func() {
		for _, t := range uploaded {
			t.Release()
		}
	}()
	upload := func(name string, host backend.Tensor, err error) (backend.Tensor, error) {
		if err == nil {
			host, err = d.be.Upload(ctx, host)
		}
		if err != nil {
			return host, fmt.Errorf("attention: %s: %w", name, err)
		}
		uploaded = append(uploaded, host)
		return host, nil
	}
	var t [3]backend.Tensor
	for i, o := range []struct {
		name  string
		data  []float32
		shape backend.Shape
	}{
		{"q", q, backend.Shape{dims.Batch, dims.Heads, dims.SeqQ, dims.Dim}},
		{"k", k, backend.Shape{dims.Batch, dims.KVHeads, dims.SeqK, dims.Dim}},
		{"v", v, backend.Shape{dims.Batch, dims.KVHeads, dims.SeqK, dims.ValueDim}},
	} {
		host, err := backend.HostF32(o.data, o.shape)
		if t[i], err = upload(o.name, host, err); err != nil {
			return nil, err
		}
	}
	for _, o := range []struct {
		name string
		t    *backend.Tensor
	}{{"mask", &opt.Mask}, {"bias", &opt.Bias}, {"relative bias", &opt.RelativeBias}, {"block mask", &opt.BlockMask}} {
		if o.t.IsZero() {
			continue
		}
		var err error
		if *o.t, err = upload(o.name, *o.t, nil); err != nil {
			return nil, err
		}
	}
	r, err := d.Attention(ctx, t[0], t[1], t[2], opt)
	if err != nil {
		return nil, err
	}
	defer r.Release()
	return d.Float32s(ctx, r.O)
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

// FromFloat32 returns data as a contiguous tensor of dtype F32, F16, BF16 or Q8 in device
// memory, rounded to nearest even, for the caller to Release. On a device that computes in
// host memory an F32 tensor is data itself, not a copy.
//
// Errors: ErrShape when data does not have the elements of shape, ErrDType for another
// dtype.
func (d *Device) FromFloat32(ctx context.Context, dtype backend.DType, data []float32, shape backend.Shape) (backend.Tensor, error) {
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
	return d.be.Upload(ctx, host)
}

// quantised returns data as a Q8 tensor in host memory.
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
	cols, stride := shape[backend.Dim], host.Strides()[backend.Seq]
	for ; len(data) > 0; data, rows = data[cols:], rows[stride:] {
		backend.QuantiseQ8(rows, data[:cols])
	}
	return host, nil
}

// Float32s returns the elements of t, of any numeric dtype and any strides, in row-major
// order. It returns ErrDType for a Bool tensor.
func (d *Device) Float32s(ctx context.Context, t backend.Tensor) ([]float32, error) {
	if !t.DType().Float() && t.DType() != backend.Q8 {
		return nil, fmt.Errorf("tensor is %v, it must be f32, f16, bf16 or q8: %w", t.DType(), backend.ErrDType)
	}
	host, err := backend.AllocHost(t.DType(), t.Shape())
	if err != nil {
		return nil, err
	}
	if err := d.be.Download(ctx, host, t); err != nil {
		return nil, err
	}
	switch t.DType() {
	case backend.F32:
		return host.Float32s()
	case backend.Q8:
		rows, err := host.Q8Rows()
		if err != nil {
			return nil, err
		}
		cols, stride := t.Shape()[backend.Dim], host.Strides()[backend.Seq]
		out := make([]float32, t.Shape().Elements())
		for rest := out; len(rest) > 0; rest, rows = rest[cols:], rows[stride:] {
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
