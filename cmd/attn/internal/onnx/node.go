package onnx

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cmd/attn/internal/onnxfile"
)

// The inputs and outputs of the operator, by position.
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

// Values of the attribute qk_matmul_output_mode: the contents of qk_matmul_output.
const (
	scoresRaw     = iota // scale·q·k
	scoresCapped         // with softcap
	scoresBiased         // with the mask too
	scoresSoftmax        // the weights
)

// attentionOp is an Attention node with decoded attributes. The operator's order is
// that of backend.Problem: scale, softcap, mask, softmax; softcap comes before the
// mask since the correction in ONNX 1.23, and hidden keys stay hidden. The attribute
// softmax_precision has no effect: softmax is float32, for f64 and the half types too.
type attentionOp struct {
	opset           int64
	inputs          [numInputs]string
	outputs         [numOutputs]string
	causal          bool
	qHeads, kvHeads int // 0 when not given
	scale           *float64
	softcap         float64
	scores          int
}

// attentionNode returns the model's one node, an Attention of opset 23 or 24.
func attentionNode(m *onnxfile.Model) (*attentionOp, error) {
	if n := len(m.Nodes); n != 1 {
		return nil, fmt.Errorf("the graph has %d nodes, it must have one, an Attention: %w", n, backend.ErrUnsupported)
	}
	n := m.Nodes[0]
	if n.OpType != "Attention" || n.Domain != "" {
		return nil, fmt.Errorf("the node is %q of domain %q, it must be Attention of the ONNX operators: %w", n.OpType, n.Domain, backend.ErrUnsupported)
	}
	op := &attentionOp{opset: m.Opsets[""]}
	if op.opset != 23 && op.opset != 24 {
		return nil, fmt.Errorf("the model imports opset %d, it must be 23 or 24: %w", op.opset, backend.ErrUnsupported)
	}
	if len(n.Input) > numInputs || len(n.Output) > numOutputs {
		return nil, fmt.Errorf("the node has %d inputs and %d outputs, Attention has up to %d and %d: %w", len(n.Input), len(n.Output), numInputs, numOutputs, backend.ErrUnsupported)
	}
	copy(op.inputs[:], n.Input)
	copy(op.outputs[:], n.Output)
	if op.opset == 23 && op.inputs[inNonpad] != "" {
		return nil, fmt.Errorf("the node has a seventh input in opset 23, nonpad_kv_seqlen came with opset 24: %w", backend.ErrUnsupported)
	}
	for _, a := range n.Attribute {
		if err := op.set(a); err != nil {
			return nil, err
		}
	}
	return op, nil
}

// set sets one attribute.
func (op *attentionOp) set(a *onnxfile.AttributeProto) error {
	want := onnxfile.AttributeProto_INT
	if a.Name == "scale" || a.Name == "softcap" {
		want = onnxfile.AttributeProto_FLOAT
	}
	ok := true
	switch i := a.I; a.Name {
	case "is_causal":
		op.causal, ok = i == 1, i == 0 || i == 1
	case "q_num_heads":
		op.qHeads, ok = int(i), 0 < i && i <= math.MaxInt32
	case "kv_num_heads":
		op.kvHeads, ok = int(i), 0 < i && i <= math.MaxInt32
	case "qk_matmul_output_mode":
		op.scores, ok = int(i), scoresRaw <= i && i <= scoresSoftmax
	case "softmax_precision":
		ok = i == int64(int32(i)) && onnxfile.DataType(i).Float()
	case "scale":
		op.scale = new(float64(a.F))
	case "softcap":
		op.softcap = float64(a.F)
	default:
		return fmt.Errorf("attribute %q is none of Attention in opset %d: %w", a.Name, op.opset, backend.ErrUnsupported)
	}
	if a.Type != want {
		return fmt.Errorf("attribute %s is a %v, it must be a %v: %w", a.Name, kindName(a.Type), kindName(want), backend.ErrOption)
	}
	if !ok {
		return fmt.Errorf("attribute %s is %d, out of its range: %w", a.Name, a.I, backend.ErrOption)
	}
	return nil
}

// kindName returns the name of an attribute's type.
func kindName(t onnxfile.AttributeProto_AttributeType) string { return strings.ToLower(t.String()) }

// attentionCall is a node with its inputs, checked.
type attentionCall struct {
	*attentionOp
	in   [numInputs]*onnxfile.Tensor
	dims backend.Dims // SeqK includes past keys
	past int          // past keys
	flat bool         // 3-D: [batch, sequence, heads·size]
	lens []int        // existing keys of each batch; nil is all
}

// inputNames are the names of the operator's inputs.
var inputNames = [numInputs]string{"Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen"}

// call finds the node's inputs among tensors and checks the rules of the operator.
// Package kernels checks how the other lengths fit each other.
func (op *attentionOp) call(tensors map[string]*onnxfile.Tensor) (*attentionCall, error) {
	c := &attentionCall{attentionOp: op}
	for i, name := range op.inputs {
		switch t := tensors[name]; {
		case name == "" && i <= inV:
			return nil, fmt.Errorf("input %s is missing: %w", inputNames[i], backend.ErrShape)
		case name == "":
		case t == nil:
			return nil, fmt.Errorf("%s is %q, which the graph does not have: %w", inputNames[i], name, backend.ErrShape)
		default:
			c.in[i] = t
		}
	}
	for _, check := range []func() error{c.checkTypes, c.checkShapes, c.checkLengths} {
		if err := check(); err != nil {
			return nil, err
		}
	}
	return c, nil
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
				inputNames[i], t.Type, c.in[inQ].Type, c.in[inV].Type, backend.ErrDType)
		}
	}
	return nil
}

func (c *attentionCall) checkShapes() error {
	q, k, v := c.in[inQ].Shape, c.in[inK].Shape, c.in[inV].Shape
	if len(q) != len(k) || len(q) != len(v) || len(q) != 3 && len(q) != 4 {
		return fmt.Errorf("shapes Q %v, K %v and V %v must all have 3 axes or all 4: %w", q, k, v, backend.ErrShape)
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
	c.dims = backend.Dims{Batch: q[0], Heads: q[1], KVHeads: k[1], SeqQ: q[2], SeqK: k[2], Dim: q[3], ValueDim: v[3]}
	if k[0] != q[0] || v[0] != q[0] {
		return fmt.Errorf("shapes Q %v, K %v and V %v must have the same number of batches: %w", c.in[inQ].Shape, c.in[inK].Shape, c.in[inV].Shape, backend.ErrShape)
	}
	if err := c.checkPast(k, v); err != nil {
		return err
	}
	if d := c.dims; min(d.Batch, d.Heads, d.KVHeads, d.SeqQ, d.SeqK, d.Dim, d.ValueDim) < 1 {
		return fmt.Errorf("shapes Q %v, K %v and V %v with a past of %d: every length must be at least 1: %w", c.in[inQ].Shape, c.in[inK].Shape, c.in[inV].Shape, c.past, backend.ErrShape)
	}
	return nil
}

// checkPast counts the past keys. k and v are the lengths [batch, heads, sequence,
// size] of the new ones.
func (c *attentionCall) checkPast(k, v []int) error {
	pk, pv := c.in[inPastKey], c.in[inPastValue]
	if (pk == nil) != (pv == nil) {
		return fmt.Errorf("past_key and past_value need each other: %w", backend.ErrShape)
	}
	if pk == nil {
		return nil
	}
	for _, p := range []struct {
		name      string
		past, own []int
	}{{"past_key", pk.Shape, k}, {"past_value", pv.Shape, v}} {
		if len(p.past) != 4 || p.past[0] != p.own[0] || p.past[1] != p.own[1] || p.past[3] != p.own[3] || p.past[2] != pk.Shape[2] {
			return fmt.Errorf("%s has shape %v, it must be [%d %d past %d] with one past for keys and values: %w", p.name, p.past, p.own[0], p.own[1], p.own[3], backend.ErrShape)
		}
	}
	c.past = pk.Shape[2]
	c.dims.SeqK += c.past
	return nil
}

// headed returns the lengths [batch, heads, sequence, size] of a tensor of 3 or 4
// axes.
func (c *attentionCall) headed(name string, shape []int, attribute string, heads int) ([]int, error) {
	if !c.flat {
		if heads != 0 && heads != shape[1] {
			return nil, fmt.Errorf("%s %v has %d heads, %s says %d: %w", name, shape, shape[1], attribute, heads, backend.ErrShape)
		}
		return shape, nil
	}
	if heads == 0 || shape[2]%heads != 0 {
		return nil, fmt.Errorf("%s has shape %v and %s is %d: with 3 axes the last must be a multiple of it: %w", name, shape, attribute, heads, backend.ErrShape)
	}
	return []int{shape[0], heads, shape[1], shape[2] / heads}, nil
}

// checkLengths reads nonpad_kv_seqlen.
func (c *attentionCall) checkLengths() error {
	t := c.in[inNonpad]
	if t == nil {
		return nil
	}
	if !slices.Equal(t.Shape, []int{c.dims.Batch}) {
		return fmt.Errorf("nonpad_kv_seqlen has shape %v, it must be [%d], one number a batch: %w", t.Shape, c.dims.Batch, backend.ErrShape)
	}
	if c.in[inPastKey] != nil {
		return fmt.Errorf("nonpad_kv_seqlen and past_key exclude each other: %w", backend.ErrOption)
	}
	for b := range c.dims.Batch {
		n := t.Int(b)
		if n < 0 || n > int64(c.dims.SeqK) {
			return fmt.Errorf("nonpad_kv_seqlen[%d] is %d, there are %d keys: %w", b, n, c.dims.SeqK, backend.ErrOption)
		}
		c.lens = append(c.lens, int(n))
	}
	return nil
}
