package onnx

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"

	"github.com/seed90331342/attn/cmd/attn-onnx/internal/onnxfile"
	"github.com/seed90331342/attn/kernels"
)

// fused is a call of the fused kernel whose operands are in host memory.
type fused struct {
	q            *onnxfile.Tensor // [batch, heads, sequence, size] or flat, [batch, sequence, heads·size]
	keys, values *onnxfile.Tensor // [batch, kv heads, keys, size]
	heads        int
	mask         *onnxfile.Tensor // bools that hide keys or numbers to add, 4 axes; nil means none
	// opt.Weights requests the scores at a point of the computation, or the weights.
	opt    kernels.Options
	scores int
	// keyFactors and valueFactors are those of keys and values of int8, next to a flat q.
	keyFactors, valueFactors factors
}

// Values of [fused].scores.
const (
	scoresRaw     = iota // scale·q·k
	scoresCapped         // with softcap
	scoresBiased         // with the mask too
	scoresSoftmax        // the weights
)

// run returns the output in the layout of q, and the scores when requested.
func (c *fused) run(ctx context.Context, dev *kernels.Device) (y, scores *onnxfile.Tensor, err error) {
	up := uploader{ctx: ctx, dev: dev}
	defer up.release()
	host, as, kvHeads := c.q, c.q, c.keys.Shape[kernels.Heads]
	if c.keyFactors != nil {
		host = c.keyFactors.scale(c.q, onnxfile.Float, c.heads, kvHeads)
		as = host
	}
	q := up.rows("Q", host, c.dtype(), c.heads)
	k := up.cache("K", c.keys, c.dtype())
	v := up.cache("V", c.values, c.dtype())
	opt := c.opt
	if c.mask != nil {
		shape := kernels.Shape(c.mask.Shape)
		if c.mask.Type == onnxfile.Bool {
			opt.Mask = up.upload("attn_mask", c.mask, kernels.Bool, shape)
		} else {
			opt.Bias = up.upload("attn_mask", c.mask, dtypeOf(c.mask.Type), shape)
		}
	}
	if up.err != nil {
		return nil, nil, up.err
	}
	r, err := dev.Attention(ctx, q, k, v, opt)
	if err != nil {
		return nil, nil, err
	}
	defer r.Release()
	if opt.Weights {
		s := r.Weights
		if opt.Weights = false; c.scores != scoresSoftmax {
			at := map[int]kernels.ScorePoint{scoresRaw: kernels.Scaled, scoresCapped: kernels.Capped, scoresBiased: kernels.Biased}[c.scores]
			if s, err = dev.Scores(ctx, q, k, at, opt); err != nil {
				return nil, nil, err
			}
			defer s.Release()
		}
		shape := s.Shape()
		if scores, err = download(ctx, dev, s, c.q.Type, shape[:]); err != nil {
			return nil, nil, err
		}
	}
	if y, err = unrows(ctx, dev, r.O, as); err == nil && c.valueFactors != nil {
		y = c.valueFactors.scale(y, c.q.Type, c.heads, kvHeads)
	}
	return y, scores, err
}

// dtype returns the element type on the device, of q next to a cache of int8. f64 is
// rounded to f32, and types that differ are widened to it, which is exact.
func (c *fused) dtype() kernels.DType {
	if c.q.Type == c.values.Type {
		return dtypeOf(c.q.Type)
	}
	return kernels.F32
}

// dtypeOf returns the element type on the device of a tensor of floating point numbers.
func dtypeOf(t onnxfile.DataType) kernels.DType {
	return map[onnxfile.DataType]kernels.DType{onnxfile.Float16: kernels.F16, onnxfile.BFloat16: kernels.BF16}[t] // else F32
}

// how describes the computation.
func (c *fused) how() string {
	path := "fused"
	if c.opt.Weights {
		path = "fused and stages"
	}
	if c.keyFactors != nil {
		path += ", q8"
	}
	return fmt.Sprintf("%s, %s", path, typeText(c.q.Type, c.dtype()))
}

// typeText describes the type of an operand and the type that it has on the device.
func typeText(t onnxfile.DataType, d kernels.DType) string {
	if t.String() == d.String() {
		return d.String()
	}
	return d.String() + " for " + t.String()
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
		return binary.LittleEndian.AppendUint16(b, kernels.F16.Encode(float32(x)))
	case onnxfile.BFloat16:
		return binary.LittleEndian.AppendUint16(b, kernels.BF16.Encode(float32(x)))
	case onnxfile.Double:
		return binary.LittleEndian.AppendUint64(b, math.Float64bits(x))
	}
	return binary.LittleEndian.AppendUint32(b, math.Float32bits(float32(x)))
}

// uploader uploads tensors until one fails.
type uploader struct {
	ctx  context.Context
	dev  *kernels.Device
	held []kernels.Tensor
	err  error
}

func (u *uploader) release() {
	for _, t := range u.held {
		t.Release()
	}
}

// upload returns a tensor as dtype, its own type or F32, in the device's memory.
func (u *uploader) upload(name string, t *onnxfile.Tensor, dtype kernels.DType, shape kernels.Shape) (up kernels.Tensor) {
	if u.err != nil {
		return up
	}
	var err error
	if dtype == kernels.Bool {
		data := make([]bool, t.Elements())
		for i := range data {
			data[i] = t.Int(i) != 0
		}
		if up, err = kernels.HostBool(data, shape); err == nil {
			up, err = u.dev.Upload(u.ctx, up)
		}
	} else {
		data := make([]float32, t.Elements())
		for i := range data {
			x := t.At(i)
			if name == "attn_mask" && !math.IsInf(x, 0) {
				// Backends clamp biases, too. An infinite one would hide the key.
				x = min(max(x, -0x1p127), 0x1p127)
			}
			if data[i] = float32(x); err == nil && math.IsInf(float64(data[i]), 0) && !math.IsInf(x, 0) {
				err = fmt.Errorf("%v is beyond the range of float32, in which f64 is computed: %w", x, kernels.ErrDType)
			}
		}
		if err == nil {
			up, err = u.dev.FromFloat32(u.ctx, dtype, data, shape)
		}
	}
	if err != nil {
		u.err = fmt.Errorf("%s: %w", name, err)
		return kernels.Tensor{}
	}
	u.held = append(u.held, up)
	return up
}

// alloc returns a tensor with unspecified contents in the device's memory.
func (u *uploader) alloc(name string, dtype kernels.DType, shape kernels.Shape) (t kernels.Tensor) {
	if u.err == nil {
		if t, u.err = u.dev.Alloc(u.ctx, dtype, shape); u.err == nil {
			u.held = append(u.held, t)
		} else {
			u.err = fmt.Errorf("%s: %w", name, u.err)
		}
	}
	return t
}

// view returns t, a view of a tensor. Its error is kept unless there is an earlier one.
func (u *uploader) view(t kernels.Tensor, err error) kernels.Tensor {
	if u.err == nil {
		u.err = err
	}
	return t
}

// rows is upload for a tensor of 4 axes or of the 3 axes [batch, sequence, heads·size].
// It returns [batch, heads, sequence, size].
func (u *uploader) rows(name string, t *onnxfile.Tensor, dtype kernels.DType, heads int) kernels.Tensor {
	s := t.Shape
	if len(s) == 4 {
		return u.upload(name, t, dtype, kernels.Shape(s))
	}
	return u.view(u.upload(name, t, dtype, kernels.Shape{s[0], s[1], heads, s[2] / heads}).Swap(kernels.Heads, kernels.Seq))
}

// unrows downloads x [batch, heads, sequence, size] in the type and the layout of a tensor that rows accepts.
func unrows(ctx context.Context, dev *kernels.Device, x kernels.Tensor, as *onnxfile.Tensor) (*onnxfile.Tensor, error) {
	s := x.Shape()
	shape := s[:]
	if len(as.Shape) == 3 {
		shape = []int{s[0], s[2], s[1] * s[3]}
		var err error
		if x, err = x.Swap(kernels.Heads, kernels.Seq); err != nil {
			return nil, err
		}
	}
	return download(ctx, dev, x, as.Type, shape)
}

// download downloads a tensor as one of type d.
func download(ctx context.Context, dev *kernels.Device, x kernels.Tensor, d onnxfile.DataType, shape []int) (*onnxfile.Tensor, error) {
	data, err := dev.ToFloat32(ctx, x)
	if err != nil {
		return nil, err
	}
	t, err := newTensor(d, shape)
	if err != nil {
		return nil, err
	}
	for _, x := range data {
		t.Data = appendNumber(t.Data, d, float64(x))
	}
	return t, nil
}

// newTensor returns a tensor without elements and with the memory for them.
func newTensor(d onnxfile.DataType, shape []int) (*onnxfile.Tensor, error) {
	n := d.Size()
	for _, l := range shape {
		if l > 0 && n > math.MaxInt/l {
			return nil, fmt.Errorf("shape %v is too large: %w", shape, kernels.ErrShape)
		}
		n *= l
	}
	data, err := kernels.Make[byte](n)
	return &onnxfile.Tensor{Type: d, Shape: shape, Data: data[:0]}, err
}
