package kernels

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/seed90331342/attn/kernels/internal/op"
)

// Layout is the order of axes in memory, from the largest stride to the smallest.
type Layout int

const (
	// BHSD is [batch, heads, seq, dim].
	BHSD Layout = iota
	// BSHD is [batch, seq, heads, dim], the order of a linear layer's output.
	BSHD
)

// AttentionFloat32 computes attention of slices in host memory and returns the output. All have
// the same layout, for example [BHSD]:
//
//	q [B, H, Sq, D]    k [B, Hkv, Sk, D]    v [B, Hkv, Sk, Dv]    o [B, H, Sq, Dv]
//
// Zero lengths in dims have defaults: Batch and Heads are 1, KVHeads is Heads, ValueDim is Dim. SeqK is SeqQ, or no
// keys when k and v are empty. Tensors in opt are in host memory here; their shapes do not depend on the layout. LSE
// and Weights are refused, use [Device.Attention] for them. Errors as for Attention, and ErrShape when a slice does not
// have the elements of its shape.
func (d *Device) AttentionFloat32(ctx context.Context, dims Dims, layout Layout, q, k, v []float32, opt Options) (o []float32, err error) {
	defer op.Annotate(&err, "attention")
	dims.Batch, dims.Heads = cmp.Or(dims.Batch, 1), cmp.Or(dims.Heads, 1)
	dims.KVHeads, dims.ValueDim = cmp.Or(dims.KVHeads, dims.Heads), cmp.Or(dims.ValueDim, dims.Dim)
	if len(k)+len(v) > 0 {
		dims.SeqK = cmp.Or(dims.SeqK, dims.SeqQ)
	}
	if err := cmp.Or(op.CheckPath(opt.Set(), op.SlicePath), checkDims(dims, layout)); err != nil {
		return nil, err
	}
	var t [3]Tensor
	for i, o := range [3]struct {
		name            string
		data            []float32
		heads, seq, dim int
	}{{"q", q, dims.Heads, dims.SeqQ, dims.Dim}, {"k", k, dims.KVHeads, dims.SeqK, dims.Dim}, {"v", v, dims.KVHeads, dims.SeqK, dims.ValueDim}} {
		if t[i], err = HostF32(o.data, layout.inMemory(Shape{dims.Batch, o.heads, o.seq, o.dim})); err != nil {
			return nil, fmt.Errorf("%s: %w", o.name, err)
		}
	}
	for _, o := range [7]struct {
		name string
		t    *Tensor
	}{{"q", &t[0]}, {"k", &t[1]}, {"v", &t[2]}, {"mask", &opt.Mask}, {"bias", &opt.Bias}, {"relative bias", &opt.RelativeBias}, {"block mask", &opt.BlockMask}} {
		if o.t.IsZero() {
			continue
		}
		if !o.t.OnHost() {
			return nil, fmt.Errorf("%s: the tensor is not in host memory, which a call with slices takes: call Attention, or give a host tensor: %w", o.name, ErrDevice)
		}
		if *o.t, err = d.Upload(ctx, *o.t); err != nil {
			return nil, fmt.Errorf("%s: %w", o.name, err)
		}
		defer o.t.Release()
	}
	r, err := d.Attention(ctx, layout.view(t[0]), layout.view(t[1]), layout.view(t[2]), opt)
	if err != nil {
		return nil, err
	}
	defer r.Release()
	return d.ToFloat32(ctx, layout.view(r.O))
}

// inMemory returns the shape in memory of a tensor [B, H, S, D].
func (l Layout) inMemory(s Shape) Shape {
	if l == BSHD {
		s[Heads], s[Seq] = s[Seq], s[Heads]
	}
	return s
}

// view returns t, which lies by the layout, as [B, H, S, D], and the reverse.
func (l Layout) view(t Tensor) Tensor {
	if l == BSHD {
		t, _ = t.Swap(Heads, Seq) // valid axes
	}
	return t
}

// checkDims checks the lengths and the layout of a call with slices.
func checkDims(d Dims, l Layout) error {
	switch {
	case l != BHSD && l != BSHD:
		return fmt.Errorf("layout is %d, it must be BHSD or BSHD: %w", l, ErrOption)
	case d.Dim < 1:
		return fmt.Errorf("Dims.Dim is %d, set it to the head size: %w", d.Dim, ErrShape)
	case min(d.SeqQ, d.SeqK) < 0:
		return fmt.Errorf("Dims has SeqQ %d and SeqK %d: each must be at least 0: %w", d.SeqQ, d.SeqK, ErrShape)
	case min(d.Batch, d.Heads, d.KVHeads, d.ValueDim) < 1:
		return fmt.Errorf("Dims has Batch %d, Heads %d, KVHeads %d and ValueDim %d: each must be at least 1, or 0 for the default: %w", d.Batch, d.Heads, d.KVHeads, d.ValueDim, ErrShape)
	}
	return nil
}

// FromFloat32 returns data as a contiguous tensor of dtype F32, F16, BF16, Q8, Q4 or F8 in device
// memory, rounded to nearest even, for the caller to Release. On a device that computes in
// host memory an F32 tensor is data itself, not a copy.
//
// Errors: ErrShape when data does not have the elements of shape, ErrDType for another dtype, ErrMemory.
func (d *Device) FromFloat32(ctx context.Context, dtype DType, data []float32, shape Shape) (host Tensor, err error) {
	switch n := shape.Elements(); {
	case dtype == F32:
		host, err = HostF32(data, shape)
	case !slices.Contains(numbers, dtype):
		err = fmt.Errorf("numbers cannot be %v, only one of %v: %w", dtype, numbers, ErrDType)
	case n >= 0 && len(data) != n: // AllocHost refuses other shapes
		err = fmt.Errorf("data has %d elements, shape %v needs %d%s: %w", len(data), shape, n, shape.Hint(), ErrShape)
	default:
		if host, err = AllocHost(dtype, shape); err == nil {
			err = encode(host, data)
		}
	}
	if err != nil {
		return Tensor{}, err
	}
	return d.Upload(ctx, host)
}

// encode writes data to a contiguous tensor in host memory, of dtype F16, BF16, Q8, Q4 or F8.
func encode(host Tensor, data []float32) error {
	if dtype := host.DType(); dtype.Quantised() {
		return eachRow(host, data, func(row []float32, stored []byte) { dtype.Quantise(stored, row) })
	}
	bits, err := host.Bits()
	for i := range bits {
		bits[i] = host.DType().Encode(data[i])
	}
	return err
}

// eachRow calls f with the numbers of each row of a Q8, Q4 or F8 tensor in host memory.
func eachRow(host Tensor, all []float32, f func(row []float32, stored []byte)) error {
	rows, err := host.QuantisedRows()
	cols, stride := host.Shape()[Dim], host.Strides()[Seq]
	for ; err == nil && len(all) > 0; all, rows = all[cols:], rows[stride:] {
		f(all[:cols], rows)
	}
	return err
}

// ToInt32 returns the elements of t, I32 of any strides, in row-major order.
func (d *Device) ToInt32(ctx context.Context, t Tensor) ([]int32, error) {
	if err := t.CheckDType("t", I32); err != nil {
		return nil, err
	}
	host, err := AllocHost(I32, t.Shape())
	if err == nil {
		err = d.Download(ctx, host, t)
	}
	if err != nil {
		return nil, err
	}
	return host.Int32s()
}

// ToFloat32 returns the elements of t, of any dtype and any strides, in row-major order. A true
// element of a mask is 1, a false one 0.
func (d *Device) ToFloat32(ctx context.Context, t Tensor) ([]float32, error) {
	host, err := AllocHost(t.DType(), t.Shape())
	if err == nil {
		err = d.Download(ctx, host, t)
	}
	if err != nil {
		return nil, err
	}
	if t.DType() == F32 {
		return host.Float32s()
	}
	out, err := Make[float32](t.Shape().Elements())
	if err != nil {
		return nil, err
	}
	switch t.DType() {
	case I32:
		keys, err := host.Int32s()
		for i, key := range keys {
			out[i] = float32(key)
		}
		return out, err
	case Bool:
		shown, err := host.Bools()
		for i, b := range shown {
			if b {
				out[i] = 1
			}
		}
		return out, err
	case Q8, Q4, F8:
		return out, eachRow(host, out, t.DType().Dequantise)
	}
	bits, err := host.Bits()
	for i, b := range bits {
		out[i] = t.DType().Decode(b)
	}
	return out, err
}
