package onnx

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cmd/attn/internal/onnxfile"
	"github.com/seed90331342/attn/kernels"
)

// run computes the node's outputs, by name. Past and new keys and values are joined
// in host memory: present_key and present_value are exact for every type.
func (c *attentionCall) run(ctx context.Context, dev *kernels.Device) (map[string]*onnxfile.Tensor, error) {
	d, dtype := c.dims, c.dtype()
	keys := joined(c.in[inPastKey], c.in[inK], d.KVHeads, d.Dim)
	values := joined(c.in[inPastValue], c.in[inV], d.KVHeads, d.ValueDim)
	up := uploader{ctx: ctx, dev: dev}
	defer up.release()
	q := up.upload("Q", c.in[inQ], dtype, c.stored(backend.Shape{d.Batch, d.Heads, d.SeqQ, d.Dim}))
	k := up.upload("K", keys, dtype, backend.Shape(keys.Shape))
	v := up.upload("V", values, dtype, backend.Shape(values.Shape))
	opt := c.options()
	if mask := c.in[inMask]; mask != nil {
		mask, shape, err := c.fullMask(mask)
		if err != nil {
			return nil, err
		}
		if mask.Type == onnxfile.Bool {
			opt.Mask = up.upload("attn_mask", mask, backend.Bool, shape)
		} else {
			opt.Bias = up.upload("attn_mask", mask, dtypeOf(mask.Type), shape)
		}
	}
	if up.err != nil {
		return nil, up.err
	}
	var err error
	if c.flat {
		if q, err = q.Swap(backend.Heads, backend.Seq); err != nil {
			return nil, err
		}
	}
	r, err := dev.Attention(ctx, q, k, v, opt)
	if err != nil {
		return nil, err
	}
	defer r.Release()
	got := map[string]*onnxfile.Tensor{c.outputs[outPresentKey]: keys, c.outputs[outPresentValue]: values}
	if name := c.outputs[outScores]; name != "" {
		scores := r.Weights
		if opt.Weights = false; c.scores != scoresSoftmax {
			at := map[int]backend.ScorePoint{scoresRaw: backend.Scaled, scoresCapped: backend.Capped, scoresBiased: backend.Biased}[c.scores]
			if scores, err = dev.Scores(ctx, q, k, at, opt); err != nil {
				return nil, err
			}
			defer scores.Release()
		}
		if got[name], err = c.output(ctx, dev, scores, []int{d.Batch, d.Heads, d.SeqQ, d.SeqK}); err != nil {
			return nil, err
		}
	}
	o, shape := r.O, []int{d.Batch, d.Heads, d.SeqQ, d.ValueDim}
	if c.flat {
		shape = []int{d.Batch, d.SeqQ, d.Heads * d.ValueDim}
		if o, err = o.Swap(backend.Heads, backend.Seq); err != nil {
			return nil, err
		}
	}
	got[c.outputs[outY]], err = c.output(ctx, dev, o, shape)
	delete(got, "") // outputs that the node leaves out
	return got, err
}

// options returns the options of the call, without its mask. With nonpad_kv_seqlen
// the last query of each batch is at its last existing key.
func (c *attentionCall) options() kernels.Options {
	opt := kernels.Options{
		Scale: c.scale, Softcap: c.softcap, Causal: c.causal, Offset: c.past, KLen: c.lens,
		Weights: c.outputs[outScores] != "",
	}
	for _, n := range c.lens {
		opt.Offsets = append(opt.Offsets, n-c.dims.SeqQ)
	}
	return opt
}

// dtype returns the element type on the device. f64 is rounded to f32, and types that
// differ are widened to it, which is exact.
func (c *attentionCall) dtype() backend.DType {
	if q := c.in[inQ].Type; q == c.in[inV].Type {
		return dtypeOf(q)
	}
	return backend.F32
}

// dtypeOf returns the element type on the device of a tensor of floating point numbers.
func dtypeOf(t onnxfile.DataType) backend.DType {
	return map[onnxfile.DataType]backend.DType{onnxfile.Float16: backend.F16, onnxfile.BFloat16: backend.BF16}[t] // else F32
}

// how describes the computation.
func (c *attentionCall) how() string {
	path := "fused"
	if c.outputs[outScores] != "" {
		path = "fused and stages"
	}
	text := fmt.Sprintf("%s, %v", path, c.dtype())
	if q := c.in[inQ].Type.String(); q != c.dtype().String() {
		text += " for " + q
	}
	return text
}

// stored returns the shape of Q in its file, with four axes.
func (c *attentionCall) stored(s backend.Shape) backend.Shape {
	if c.flat {
		s[backend.Heads], s[backend.Seq] = s[backend.Seq], s[backend.Heads]
	}
	return s
}

// joined returns past keys or values followed by the new ones, [batch, heads,
// past+new, size]. past may be nil, and own may have 3 axes.
func joined(past, own *onnxfile.Tensor, heads, size int) *onnxfile.Tensor {
	flat := len(own.Shape) == 3
	if past == nil && !flat {
		return own
	}
	batch, seq, before := own.Shape[0], own.Shape[len(own.Shape)-2], 0
	if past != nil {
		before = past.Shape[2]
	}
	row := size * own.Type.Size()
	t := &onnxfile.Tensor{Type: own.Type, Shape: []int{batch, heads, before + seq, size}}
	for b := range batch {
		for h := range heads {
			if past != nil {
				at := (b*heads + h) * before * row
				t.Data = append(t.Data, past.Data[at:at+before*row]...)
			}
			for s := range seq {
				at := ((b*heads+h)*seq + s) * row
				if flat {
					at = ((b*seq+s)*heads + h) * row
				}
				t.Data = append(t.Data, own.Data[at:at+row]...)
			}
		}
	}
	return t
}

// fullMask returns the mask with the four axes of the scores: missing ones at the
// front have length 1. Since opset 24 a last axis of length 1 is shorter than the
// keys like any other, and hides the missing keys; before, it broadcasts. With a
// hidden second key, package kernels does not broadcast it.
func (c *attentionCall) fullMask(t *onnxfile.Tensor) (*onnxfile.Tensor, backend.Shape, error) {
	n := len(t.Shape)
	shape := backend.Shape{1, 1, 1, 1}
	if n < 1 || n > 4 {
		return nil, shape, fmt.Errorf("attn_mask has shape %v, it must have 1 to 4 axes: %w", t.Shape, backend.ErrShape)
	}
	copy(shape[4-n:], t.Shape)
	if c.opset == 23 || shape[backend.Dim] != 1 || c.dims.SeqK == 1 {
		return t, shape, nil
	}
	shape[backend.Dim] = 2
	padded := &onnxfile.Tensor{Type: t.Type, Shape: shape[:]}
	for i := range t.Elements() {
		padded.Data = appendNumber(padded.Data, t.Type, t.At(i))
		padded.Data = appendNumber(padded.Data, t.Type, math.Inf(-1))
	}
	return padded, shape, nil
}

// appendNumber appends x, rounded to the type d, little endian. For a bool it appends
// whether x is above 0: -Inf hides a key in masks of all types.
func appendNumber(b []byte, d onnxfile.DataType, x float64) []byte {
	switch d {
	case onnxfile.Bool:
		if x > 0 {
			return append(b, 1)
		}
		return append(b, 0)
	case onnxfile.Float16:
		return binary.LittleEndian.AppendUint16(b, backend.F16.Encode(float32(x)))
	case onnxfile.BFloat16:
		return binary.LittleEndian.AppendUint16(b, backend.BF16.Encode(float32(x)))
	case onnxfile.Double:
		return binary.LittleEndian.AppendUint64(b, math.Float64bits(x))
	}
	return binary.LittleEndian.AppendUint32(b, math.Float32bits(float32(x)))
}

// uploader uploads tensors until one fails.
type uploader struct {
	ctx  context.Context
	dev  *kernels.Device
	held []backend.Tensor
	err  error
}

func (u *uploader) release() {
	for _, t := range u.held {
		t.Release()
	}
}

// upload returns a tensor as dtype, its own type or F32, in the device's memory.
func (u *uploader) upload(name string, t *onnxfile.Tensor, dtype backend.DType, shape backend.Shape) (up backend.Tensor) {
	if u.err != nil {
		return up
	}
	var err error
	if dtype == backend.Bool {
		data := make([]bool, t.Elements())
		for i := range data {
			data[i] = t.Int(i) != 0
		}
		if up, err = backend.HostBool(data, shape); err == nil {
			up, err = u.dev.Upload(u.ctx, up)
		}
	} else {
		data := make([]float32, t.Elements())
		for i := range data {
			x := t.At(i)
			if name == "attn_mask" && !math.IsInf(x, 0) {
				// Backends clamp biases, too. An infinite one would hide the key.
				x = min(max(x, -backend.MaxBias), backend.MaxBias)
			}
			if data[i] = float32(x); err == nil && math.IsInf(float64(data[i]), 0) && !math.IsInf(x, 0) {
				err = fmt.Errorf("%v is beyond the range of float32, in which f64 is computed: %w", x, backend.ErrDType)
			}
		}
		if err == nil {
			up, err = u.dev.FromFloat32(u.ctx, dtype, data, shape)
		}
	}
	if err != nil {
		u.err = fmt.Errorf("%s: %w", name, err)
		return backend.Tensor{}
	}
	u.held = append(u.held, up)
	return up
}

// output downloads a tensor as one of Q's type.
func (c *attentionCall) output(ctx context.Context, dev *kernels.Device, x backend.Tensor, shape []int) (*onnxfile.Tensor, error) {
	data, err := dev.Float32s(ctx, x)
	if err != nil {
		return nil, err
	}
	t := &onnxfile.Tensor{Type: c.in[inQ].Type, Shape: shape}
	for _, x := range data {
		t.Data = appendNumber(t.Data, t.Type, float64(x))
	}
	return t, nil
}
