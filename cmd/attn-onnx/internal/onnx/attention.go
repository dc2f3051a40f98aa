package onnx

import (
	"context"
	"fmt"
	"math"
	"slices"

	"github.com/seed90331342/attn/cmd/attn-onnx/internal/onnxfile"
	"github.com/seed90331342/attn/kernels"
)

// The inputs and outputs of Attention, by position.
const (
	inQ = iota
	inK
	inV
	inMask
	inPastKey
	inPastValue
	inNonpad // opset 24
	numInputs
)

const (
	outY = iota
	outPresentKey
	outPresentValue
	outScores
	numOutputs
)

// attentionOp is an Attention node with decoded attributes. The operator's order is that of backend.Problem: scale,
// softcap, mask, softmax; softcap comes before the mask since the correction in ONNX 1.23, and hidden keys stay hidden.
// The attribute softmax_precision has no effect: softmax is float32, for f64 and the half types too.
type attentionOp struct {
	opset           int64
	causal          bool
	window          *kernels.Window // opset 25
	qHeads, kvHeads int             // 0 when not given
	scale           *float64
	softcap         float64
	scores          int  // the attribute qk_matmul_output_mode
	wantScores      bool // whether the node has the output
}

func newAttention(n *node, a *attributes) operator {
	op := &attentionOp{
		opset: n.opset, causal: a.flag("is_causal"), scale: a.number("scale"), wantScores: n.has(outScores),
		qHeads: a.integer("q_num_heads", 0, 1, math.MaxInt32), kvHeads: a.integer("kv_num_heads", 0, 1, math.MaxInt32),
		scores: a.integer("qk_matmul_output_mode", scoresRaw, scoresRaw, scoresSoftmax),
	}
	if x := a.number("softcap"); x != nil {
		op.softcap = *x
	}
	if d := onnxfile.DataType(a.integer("softmax_precision", int64(onnxfile.Float), 0, math.MaxInt32)); !d.Float() {
		a.fail("attribute softmax_precision is %d (%v), it must be the number of a floating point type: %w", int32(d), d, kernels.ErrOption)
	}
	if n.opset >= 25 {
		side := func(name string) int {
			if size := a.integer(name, -1, -1, math.MaxInt32); size >= 0 {
				return size
			}
			return kernels.Unbounded
		}
		op.window = &kernels.Window{Left: side("left_window_size"), Right: side("right_window_size")}
	}
	return op
}

// attentionCall is a node with its inputs, checked.
type attentionCall struct {
	*attentionOp
	in   [numInputs]*onnxfile.Tensor
	dims kernels.Dims // SeqK includes past keys
	past int          // past keys
	flat bool         // 3-D: [batch, sequence, heads·size]
	lens []int        // existing keys of each batch; nil is all
}

// inputNames are the names of the operator's inputs.
var inputNames = []string{"Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen"}

// run implements operator. Past and new keys and values are joined in host memory:
// present_key and present_value are exact for every type.
func (op *attentionOp) run(ctx context.Context, dev *kernels.Device, in []*onnxfile.Tensor) ([]*onnxfile.Tensor, string, error) {
	c := &attentionCall{attentionOp: op, in: [numInputs]*onnxfile.Tensor(in)}
	for _, check := range []func() error{c.checkTypes, c.checkShapes, c.checkLengths} {
		if err := check(); err != nil {
			return nil, "", err
		}
	}
	d := c.dims
	call := fused{
		q: c.in[inQ], heads: d.Heads, opt: c.options(), scores: op.scores,
		keys:   joined(c.in[inPastKey], c.in[inK], d.KVHeads, d.Dim),
		values: joined(c.in[inPastValue], c.in[inV], d.KVHeads, d.ValueDim),
	}
	if mask := c.in[inMask]; mask != nil {
		var err error
		if call.mask, err = c.fullMask(mask); err != nil {
			return nil, "", err
		}
	}
	y, scores, err := call.run(ctx, dev)
	return []*onnxfile.Tensor{y, call.keys, call.values, scores}, call.how(), err
}

// options returns the options of the call, without its mask. With nonpad_kv_seqlen
// the last query of each batch is at its last existing key.
func (c *attentionCall) options() kernels.Options {
	opt := kernels.Options{
		Scale: c.scale, Softcap: c.softcap, Causal: c.causal, Window: c.window, Offset: []int{c.past}, KLen: c.lens,
		Weights: c.wantScores,
	}
	if c.lens != nil {
		opt.Offset = nil
	}
	for _, n := range c.lens {
		opt.Offset = append(opt.Offset, c.past+n-c.dims.SeqQ)
	}
	return opt
}

// fullMask returns the mask with the four axes of the scores: missing ones at the front have length 1. Since opset 24 a
// last axis of length 1 is shorter than the keys like any other, and hides the missing keys; before, it broadcasts.
// With a hidden second key, package kernels does not broadcast it.
func (c *attentionCall) fullMask(t *onnxfile.Tensor) (*onnxfile.Tensor, error) {
	n := len(t.Shape)
	if n < 1 || n > 4 {
		return nil, fmt.Errorf("attn_mask has shape %v, it must have 1 to 4 axes: %w", t.Shape, kernels.ErrShape)
	}
	shape := []int{1, 1, 1, 1}
	copy(shape[4-n:], t.Shape)
	full := &onnxfile.Tensor{Type: t.Type, Shape: shape, Data: t.Data}
	if c.opset == 23 || shape[kernels.Dim] != 1 || c.dims.SeqK == 1 {
		return full, nil
	}
	shape[kernels.Dim], full.Data = 2, nil
	for i := range t.Elements() {
		full.Data = appendNumber(full.Data, t.Type, t.At(i))
		full.Data = appendNumber(full.Data, t.Type, math.Inf(-1))
	}
	return full, nil
}

func (c *attentionCall) checkTypes() error {
	for i, t := range c.in {
		ok := true
		switch {
		case t == nil:
		case i == inNonpad:
			ok = t.Type == onnxfile.Int64
		case i == inMask:
			ok = t.Type == onnxfile.Bool || t.Type.Float()
		case i == inK, i == inPastKey:
			ok = t.Type == c.in[inQ].Type
		case i == inPastValue:
			ok = t.Type == c.in[inV].Type
		default:
			ok = t.Type.Float()
		}
		if !ok {
			return fmt.Errorf("%s is %v, Q is %v, V is %v: Q and V must be f32, f16, bf16 or f64, K as Q, past as present, attn_mask one of these or bool, nonpad_kv_seqlen int64: %w",
				inputNames[i], t.Type, c.in[inQ].Type, c.in[inV].Type, kernels.ErrDType)
		}
	}
	return nil
}

func (c *attentionCall) checkShapes() error {
	q, k, v := c.in[inQ].Shape, c.in[inK].Shape, c.in[inV].Shape
	if len(q) != len(k) || len(q) != len(v) || len(q) != 3 && len(q) != 4 {
		return fmt.Errorf("shapes Q %v, K %v and V %v must all have 3 axes or all 4: %w", q, k, v, kernels.ErrShape)
	}
	c.flat = len(q) == 3
	var err error
	if q, err = c.headed("Q", q, "q_num_heads", c.qHeads); err == nil {
		if k, err = c.headed("K", k, "kv_num_heads", c.kvHeads); err == nil {
			v, err = c.headed("V", v, "kv_num_heads", c.kvHeads)
		}
	}
	if err != nil {
		return err
	}
	for _, t := range []struct {
		name       string
		have, want []int
	}{{"K", k, []int{q[0], k[1], k[2], q[3]}}, {"V", v, []int{q[0], k[1], k[2], v[3]}}} {
		if !slices.Equal(t.have, t.want) {
			return fmt.Errorf("%s is %v, [batch heads sequence size], it must be %v: shapes Q %v, K %v and V %v must have the same batch, Q and K the same size, K and V the same heads and sequence: %w",
				t.name, t.have, t.want, c.in[inQ].Shape, c.in[inK].Shape, c.in[inV].Shape, kernels.ErrShape)
		}
	}
	c.dims = kernels.Dims{Batch: q[0], Heads: q[1], KVHeads: k[1], SeqQ: q[2], SeqK: k[2], Dim: q[3], ValueDim: v[3]}
	if err := c.checkPast(k, v); err != nil {
		return err
	}
	if d := c.dims; min(d.Batch, d.Heads, d.KVHeads, d.SeqQ, d.SeqK, d.Dim, d.ValueDim) < 1 {
		return fmt.Errorf("shapes Q %v, K %v and V %v with a past of %d: every length must be at least 1: %w", c.in[inQ].Shape, c.in[inK].Shape, c.in[inV].Shape, c.past, kernels.ErrShape)
	}
	return nil
}

// checkPast counts the past keys. k and v are the lengths [batch, heads, sequence, size] of the new ones.
func (c *attentionCall) checkPast(k, v []int) error {
	pk, pv := c.in[inPastKey], c.in[inPastValue]
	if (pk == nil) != (pv == nil) {
		return fmt.Errorf("past_key and past_value need each other: %w", kernels.ErrShape)
	}
	if pk == nil {
		return nil
	}
	for _, p := range []struct {
		name      string
		past, own []int
	}{{"past_key", pk.Shape, k}, {"past_value", pv.Shape, v}} {
		if len(p.past) != 4 || p.past[0] != p.own[0] || p.past[1] != p.own[1] || p.past[3] != p.own[3] || p.past[2] != pk.Shape[2] {
			return fmt.Errorf("%s has shape %v, it must be [%d %d past %d] with one past for keys and values: %w", p.name, p.past, p.own[0], p.own[1], p.own[3], kernels.ErrShape)
		}
	}
	c.past = pk.Shape[2]
	c.dims.SeqK += c.past
	return nil
}

// headed returns the lengths [batch, heads, sequence, size] of a tensor of 3 or 4 axes.
func (c *attentionCall) headed(name string, shape []int, attribute string, heads int) ([]int, error) {
	if !c.flat {
		if heads != 0 && heads != shape[1] {
			return nil, fmt.Errorf("%s %v has %d heads, %s says %d: %w", name, shape, shape[1], attribute, heads, kernels.ErrShape)
		}
		return shape, nil
	}
	if heads == 0 || shape[2]%heads != 0 {
		return nil, fmt.Errorf("%s has shape %v and %s is %d: with 3 axes the last must be a multiple of it: %w", name, shape, attribute, heads, kernels.ErrShape)
	}
	return []int{shape[0], heads, shape[1], shape[2] / heads}, nil
}

// checkLengths reads nonpad_kv_seqlen.
func (c *attentionCall) checkLengths() error {
	t := c.in[inNonpad]
	if t == nil {
		return nil
	}
	if c.opset == 23 {
		return fmt.Errorf("nonpad_kv_seqlen is given in opset 23, it came with opset 24: %w", kernels.ErrUnsupported)
	}
	if !slices.Equal(t.Shape, []int{c.dims.Batch}) {
		return fmt.Errorf("nonpad_kv_seqlen has shape %v, it must be [%d], one number a batch: %w", t.Shape, c.dims.Batch, kernels.ErrShape)
	}
	if c.in[inPastKey] != nil {
		return fmt.Errorf("nonpad_kv_seqlen and past_key exclude each other: %w", kernels.ErrOption)
	}
	for b := range c.dims.Batch {
		n := t.Int(b)
		if n < 0 || n > int64(c.dims.SeqK) {
			return fmt.Errorf("nonpad_kv_seqlen[%d] is %d, there are %d keys: %w", b, n, c.dims.SeqK, kernels.ErrOption)
		}
		c.lens = append(c.lens, int(n))
	}
	return nil
}
