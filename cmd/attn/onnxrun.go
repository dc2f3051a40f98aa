package main

import (
	"context"
	"fmt"
	"math"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cmd/attn/internal/onnx"
	"github.com/seed90331342/attn/kernels"
)

// onnxRun is a call of the operator with its tensors on a device.
type onnxRun struct {
	*attentionCall
	be      backend.Backend
	q, k, v backend.Tensor
	mask    backend.Tensor // the zero Tensor without attn_mask
	held    []backend.Tensor
}

// run computes the node's outputs on be, by name. Keys and values of the past are
// joined with the new ones in host memory, where the files put them, so that what
// present_key and present_value hold is exact for every type.
func (c *attentionCall) run(ctx context.Context, be backend.Backend) (map[string]*onnx.Tensor, error) {
	r := &onnxRun{attentionCall: c, be: be}
	defer r.release()
	d := c.dims
	present := [2]*onnx.Tensor{
		joined(c.in[inPastKey], c.in[inK], d.KVHeads, d.Dim),
		joined(c.in[inPastValue], c.in[inV], d.KVHeads, d.ValueDim),
	}
	if err := r.load(ctx, present); err != nil {
		return nil, err
	}
	got := map[string]*onnx.Tensor{
		c.outputs[outPresentKey]:   present[0],
		c.outputs[outPresentValue]: present[1],
	}
	var o backend.Tensor
	var err error
	if name := c.outputs[outScores]; name == "" {
		o, err = r.fused(ctx)
	} else {
		o, got[name], err = r.staged(ctx)
	}
	if err != nil {
		return nil, err
	}
	shape := []int{d.Batch, d.Heads, d.SeqQ, d.ValueDim}
	if c.flat {
		shape = []int{d.Batch, d.SeqQ, d.Heads * d.ValueDim}
		if o, err = o.Swap(backend.Heads, backend.Seq); err != nil {
			return nil, err
		}
	}
	y, err := kernels.Float32s(ctx, be, o)
	if err != nil {
		return nil, err
	}
	got[c.outputs[outY]] = c.output(shape, y)
	delete(got, "") // outputs that the node leaves out
	return got, nil
}

func (r *onnxRun) release() {
	for _, t := range r.held {
		t.Release()
	}
}

// dtype is the element type on the device. f64 is rounded to f32, and types that
// differ are widened to it, which is exact.
func (c *attentionCall) dtype() backend.DType {
	switch q := c.in[inQ].Type; {
	case q != c.in[inV].Type:
		return backend.F32
	case q == onnx.Float16:
		return backend.F16
	case q == onnx.BFloat16:
		return backend.BF16
	}
	return backend.F32
}

// how says in words how the call is computed.
func (c *attentionCall) how() string {
	path := "fused"
	if c.outputs[outScores] != "" {
		path = "stages"
	}
	text := fmt.Sprintf("%s, %v", path, c.dtype())
	if q := c.in[inQ].Type.String(); q != c.dtype().String() {
		text += " for " + q
	}
	return text
}

// joined returns past keys or values and then the new ones, [batch, heads,
// past+new, size]; past may be nil, and own may have 3 axes.
func joined(past, own *onnx.Tensor, heads, size int) *onnx.Tensor {
	flat := len(own.Shape) == 3
	if past == nil && !flat {
		return own
	}
	batch, seq, before := own.Shape[0], own.Shape[len(own.Shape)-2], 0
	if flat {
		seq = own.Shape[1]
	}
	if past != nil {
		before = past.Shape[2]
	}
	row := size * own.Type.Size()
	t := &onnx.Tensor{Type: own.Type, Shape: []int{batch, heads, before + seq, size}}
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

// load uploads what the call reads.
func (r *onnxRun) load(ctx context.Context, present [2]*onnx.Tensor) error {
	d, dtype := r.dims, r.dtype()
	q := backend.Shape{d.Batch, d.Heads, d.SeqQ, d.Dim}
	if r.flat {
		q[backend.Heads], q[backend.Seq] = d.SeqQ, d.Heads
	}
	var err error
	if r.q, err = r.upload(ctx, "Q", r.in[inQ], dtype, q); err != nil {
		return err
	}
	if r.flat {
		if r.q, err = r.q.Swap(backend.Heads, backend.Seq); err != nil {
			return err
		}
	}
	if r.k, err = r.upload(ctx, "K", present[0], dtype, backend.Shape(present[0].Shape)); err != nil {
		return err
	}
	if r.v, err = r.upload(ctx, "V", present[1], dtype, backend.Shape(present[1].Shape)); err != nil {
		return err
	}
	if t := r.in[inMask]; t != nil {
		r.mask, err = r.loadMask(ctx, t)
	}
	return err
}

// upload puts a tensor on the device as dtype: the file's own, or F32.
func (r *onnxRun) upload(ctx context.Context, name string, t *onnx.Tensor, dtype backend.DType, shape backend.Shape) (backend.Tensor, error) {
	n := t.Elements()
	var up backend.Tensor
	var err error
	switch dtype {
	case backend.Bool:
		data := make([]bool, n)
		for i := range data {
			data[i] = t.Int(i) != 0
		}
		up, err = backend.HostBool(data, shape)
	case backend.F16, backend.BF16:
		data := make([]uint16, n)
		for i := range data {
			data[i] = t.Bits(i)
		}
		up, err = backend.HostBits(data, dtype, shape)
	default:
		data := make([]float32, n)
		for i := range data {
			x := t.At(i)
			if data[i] = float32(x); math.IsInf(float64(data[i]), 0) && !math.IsInf(x, 0) {
				return up, fmt.Errorf("%s holds %v, beyond the float32 in which f64 is computed: %w", name, x, backend.ErrDType)
			}
		}
		up, err = backend.HostF32(data, shape)
	}
	if err == nil {
		up, err = r.be.Upload(ctx, up)
	}
	if err != nil {
		return up, fmt.Errorf("%s: %w", name, err)
	}
	r.held = append(r.held, up)
	return up, nil
}

// spans cuts the batches into those that one call takes: a causal diagonal starts at
// one key for all batches of a call (backend.Visibility), while the operator's ends
// at each batch's own last key when nonpad_kv_seqlen says where that is.
func (c *attentionCall) spans() [][2]int {
	if !c.causal || c.lens == nil {
		return [][2]int{{0, c.dims.Batch}}
	}
	var spans [][2]int
	for lo := 0; lo < c.dims.Batch; {
		hi := lo + 1
		for hi < c.dims.Batch && c.lens[hi] == c.lens[lo] {
			hi++
		}
		spans = append(spans, [2]int{lo, hi})
		lo = hi
	}
	return spans
}

// offset is the key that query 0 of batch b stands at.
func (c *attentionCall) offset(b int) int {
	if c.lens != nil {
		return c.lens[b] - c.dims.SeqQ
	}
	return c.past
}

func (c *attentionCall) scaleOrDefault() float64 {
	if c.scale != nil {
		return *c.scale
	}
	return 1 / math.Sqrt(float64(c.dims.Dim))
}

// options are those of the batches in a span.
func (r *onnxRun) options(span [2]int) (kernels.Options, error) {
	opt := kernels.Options{Scale: new(r.scaleOrDefault()), Softcap: r.softcap, Causal: r.causal, Offset: r.offset(span[0])}
	if r.lens != nil {
		opt.KLen = r.lens[span[0]:span[1]]
	}
	m := r.mask
	if m.IsZero() {
		return opt, nil
	}
	if m.Shape()[backend.Batch] > 1 {
		var err error
		if m, err = m.Slice(backend.Batch, span[0], span[1]); err != nil {
			return opt, err
		}
	}
	setMask(&opt, m)
	return opt, nil
}

// fused computes the output alone, in memory O(S).
func (r *onnxRun) fused(ctx context.Context) (backend.Tensor, error) {
	d := r.dims
	o, err := r.be.Alloc(ctx, r.dtype(), backend.Shape{d.Batch, d.Heads, d.SeqQ, d.ValueDim})
	if err != nil {
		return o, err
	}
	r.held = append(r.held, o)
	for _, span := range r.spans() {
		opt, err := r.options(span)
		if err != nil {
			return o, err
		}
		var part [4]backend.Tensor
		for i, t := range []backend.Tensor{r.q, r.k, r.v, o} {
			if part[i], err = t.Slice(backend.Batch, span[0], span[1]); err != nil {
				return o, err
			}
		}
		if err := kernels.AttentionInto(ctx, r.be, kernels.Result{O: part[3]}, part[0], part[1], part[2], opt); err != nil {
			return o, err
		}
	}
	return o, nil
}

// staged computes the output by the three stages, and what the operator calls
// qk_matmul_output: the weights, or the scores at a point before them.
func (r *onnxRun) staged(ctx context.Context) (o backend.Tensor, scores *onnx.Tensor, err error) {
	s, err := kernels.QK(ctx, r.be, r.q, r.k)
	if err != nil {
		return o, nil, err
	}
	r.held = append(r.held, s)
	var data []float32
	for _, span := range r.spans() {
		opt, err := r.options(span)
		if err != nil {
			return o, nil, err
		}
		part, err := s.Slice(backend.Batch, span[0], span[1])
		if err == nil {
			err = kernels.Softmax(ctx, r.be, part, backend.Tensor{}, opt)
		}
		if err == nil && r.scores != scoresSoftmax {
			part, err = r.between(ctx, span, opt)
		}
		if err != nil {
			return o, nil, err
		}
		some, err := kernels.Float32s(ctx, r.be, part)
		if err != nil {
			return o, nil, err
		}
		data = append(data, some...)
	}
	if o, err = kernels.PV(ctx, r.be, s, r.v); err == nil {
		r.held = append(r.held, o)
	}
	sh := s.Shape()
	return o, r.output(sh[:], data), err
}

// between returns the scores of the batches in a span before softmax.
func (r *onnxRun) between(ctx context.Context, span [2]int, opt kernels.Options) (backend.Tensor, error) {
	q, err := r.q.Slice(backend.Batch, span[0], span[1])
	if err != nil {
		return q, err
	}
	k, err := r.k.Slice(backend.Batch, span[0], span[1])
	if err != nil {
		return k, err
	}
	at := map[int]backend.ScorePoint{scoresRaw: backend.Scaled, scoresCapped: backend.Capped, scoresBiased: backend.Biased}[r.scores]
	s, err := kernels.Scores(ctx, r.be, q, k, at, opt)
	if err == nil {
		r.held = append(r.held, s)
	}
	return s, err
}

// output makes a tensor of Q's type.
func (c *attentionCall) output(shape []int, data []float32) *onnx.Tensor {
	t := &onnx.Tensor{Type: c.in[inQ].Type, Shape: shape}
	for _, x := range data {
		t.Data = appendNumber(t.Data, t.Type, float64(x))
	}
	return t
}
