package onnx

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/seed90331342/attn/cmd/attn-onnx/internal/onnxfile"
	"github.com/seed90331342/attn/kernels"
)

// operator is an operator with the decoded attributes of a node.
type operator interface {
	// run computes the outputs. in and out are by position, nil for missing ones. how describes the computation.
	run(ctx context.Context, dev *kernels.Device, in []*onnxfile.Tensor) (out []*onnxfile.Tensor, how string, err error)
}

// schema describes an operator.
type schema struct {
	first, last int64 // versions of the operator set
	// inputs are by position, the first required ones must be there. So are outputs.
	inputs   []string
	required int
	outputs  []string
	decode   func(n *node, a *attributes) operator
}

// microsoft is the domain of ONNX Runtime's own operators.
const microsoft = "com.microsoft"

// qualified returns the name of an operator with its domain, as in schemas.
func qualified(domain, operator string) string {
	return strings.TrimPrefix(domain+"."+operator, ".")
}

// schemas are the operators by their qualified names.
var schemas = map[string]*schema{
	"Attention": {
		first: 23, last: 25, required: 3, decode: newAttention,
		inputs:  inputNames,
		outputs: []string{"Y", "present_key", "present_value", "qk_matmul_output"},
	},
	"RotaryEmbedding": {
		first: 23, last: 27, required: 3, decode: newRotaryEmbedding,
		inputs:  []string{"X", "cos_cache", "sin_cache", "position_ids"},
		outputs: []string{"Y"},
	},
	"TensorScatter": {
		first: 24, last: 27, required: 2, decode: newTensorScatter,
		inputs:  []string{"past_cache", "update", "write_indices"},
		outputs: []string{"present_cache"},
	},
	"LinearAttention": {
		first: 27, last: 27, required: 3, decode: newLinear, inputs: linearInputs, outputs: linearOutputs,
	},
	"CausalConvWithState": {
		first: 27, last: 27, required: 2, decode: newCausalConv, inputs: convInputs, outputs: linearOutputs,
	},
	microsoft + ".LinearAttention": {
		first: 1, last: 1, required: 3, decode: newRuntimeLinear, inputs: linearInputs, outputs: linearOutputs,
	},
	microsoft + ".MultiHeadAttention": {
		first: 1, last: 1, required: 1, decode: newMultiHead,
		inputs: []string{"query", "key", "value", "bias", "key_padding_mask", "attention_bias", "past_key", "past_value",
			"past_sequence_length", "cache_indirection"},
		outputs: []string{"output", "present_key", "present_value", "qk"},
	},
	microsoft + ".CausalConvWithState": {
		first: 1, last: 1, required: 2, decode: newRuntimeConv, inputs: convInputs, outputs: linearOutputs,
	},
	microsoft + ".PagedAttention": {
		first: 1, last: 1, required: 1, decode: newPaged, inputs: pagedInputs,
		outputs: []string{"output", "key_cache_out", "value_cache_out"},
	},
	microsoft + ".GroupQueryAttention": {
		first: 1, last: 1, required: 1, decode: newGroupQuery,
		inputs: []string{"query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length", "cos_cache", "sin_cache",
			"position_ids", "attention_bias", "head_sink", "k_scale", "v_scale", "q_norm_weight", "k_norm_weight"},
		outputs: []string{"output", "present_key", "present_value", "output_qk"},
	},
}

// node is the node of a model.
type node struct {
	*schema
	name            string // of the operator
	opset           int64
	inputs, outputs []string // names of tensors
	op              operator
}

// newNode returns the model's one node.
func newNode(m *onnxfile.Model) (*node, error) {
	if n := len(m.Nodes); n != 1 {
		return nil, fmt.Errorf("the graph has %d nodes, it must have one: %w", n, kernels.ErrUnsupported)
	}
	p := m.Nodes[0]
	s := schemas[qualified(p.Domain, p.OpType)]
	if s == nil {
		known := slices.Sorted(maps.Keys(schemas))
		return nil, fmt.Errorf("the node is %q of domain %q, it must be one of %s: %w", p.OpType, p.Domain, strings.Join(known, ", "), kernels.ErrUnsupported)
	}
	n := &node{schema: s, name: p.OpType, opset: m.Opsets[p.Domain], inputs: p.Input, outputs: p.Output}
	if n.opset < s.first || n.opset > s.last {
		return nil, fmt.Errorf("the model imports opset %d, %s is known from %d to %d: %w", n.opset, n.name, s.first, s.last, kernels.ErrUnsupported)
	}
	if len(n.inputs) > len(s.inputs) || len(n.outputs) > len(s.outputs) {
		return nil, fmt.Errorf("the node has %d inputs and %d outputs, %s has up to %d and %d: %w",
			len(n.inputs), len(n.outputs), n.name, len(s.inputs), len(s.outputs), kernels.ErrUnsupported)
	}
	a := &attributes{list: map[string]*onnxfile.AttributeProto{}}
	for _, x := range p.Attribute {
		if a.list[x.Name] != nil {
			a.fail("attribute %q is given twice: %w", x.Name, kernels.ErrOption)
		}
		a.list[x.Name] = x
	}
	n.op = s.decode(n, a)
	for _, x := range p.Attribute {
		if a.list[x.Name] != nil && a.err == nil {
			a.err = fmt.Errorf("attribute %q is none of %s in opset %d: %w", x.Name, n.name, n.opset, kernels.ErrUnsupported)
		}
	}
	return n, a.err
}

// has reports whether the node has an output.
func (n *node) has(output int) bool { return output < len(n.outputs) && n.outputs[output] != "" }

// run computes the node's outputs, by name.
func (n *node) run(ctx context.Context, dev *kernels.Device, tensors map[string]*onnxfile.Tensor) (map[string]*onnxfile.Tensor, string, error) {
	in := make([]*onnxfile.Tensor, len(n.schema.inputs))
	for i, what := range n.schema.inputs {
		name := ""
		if i < len(n.inputs) {
			name = n.inputs[i]
		}
		switch t := tensors[name]; {
		case name == "" && i < n.required:
			return nil, "", fmt.Errorf("input %s is missing: %w", what, kernels.ErrShape)
		case name == "":
		case t == nil:
			return nil, "", fmt.Errorf("%s is %q, which the graph does not have: %w", what, name, kernels.ErrShape)
		default:
			in[i] = t
		}
	}
	out, how, err := n.op.run(ctx, dev, in)
	if err != nil {
		return nil, "", err
	}
	got := map[string]*onnxfile.Tensor{}
	for i, name := range n.outputs {
		if name != "" && i < len(out) {
			got[name] = out[i]
		}
	}
	return got, how, nil
}

// check runs the node on tensors, compares its results with the wanted values of the
// graph's outputs, and describes both.
func (n *node) check(ctx context.Context, dev *kernels.Device, tensors map[string]*onnxfile.Tensor, outputs []string, want []*onnxfile.Tensor, tol tolerance) (string, error) {
	got, how, err := n.run(ctx, dev, tensors)
	if err != nil {
		return "", err
	}
	var shares []string
	for i, name := range outputs {
		if want[i] == nil {
			continue
		}
		t := got[name]
		if t == nil {
			return "", fmt.Errorf("graph output %q is not an output of the %s node", name, n.name)
		}
		off, err := tol.compare(name, t, want[i])
		if err != nil {
			return "", err
		}
		shares = append(shares, fmt.Sprintf("%s %.2g%%", name, 100*off))
	}
	if shares == nil {
		return "", errors.New("the graph has no outputs: nothing to compare")
	}
	return fmt.Sprintf("%s; %s of the tolerance", how, strings.Join(shares, ", ")), nil
}

// attributes are the attributes of a node that have not been read. err is the first error.
type attributes struct {
	list map[string]*onnxfile.AttributeProto
	err  error
}

// take returns an attribute of a type; nil when the node does not have it.
func (a *attributes) take(name string, want onnxfile.AttributeProto_AttributeType) *onnxfile.AttributeProto {
	x := a.list[name]
	delete(a.list, name)
	if x != nil && x.Type != want {
		a.fail("attribute %s is a %v, it must be a %v: %w", name, kindName(x.Type), kindName(want), kernels.ErrOption)
		return nil
	}
	return x
}

// kindName returns the name of an attribute's type.
func kindName(t onnxfile.AttributeProto_AttributeType) string { return strings.ToLower(t.String()) }

func (a *attributes) fail(format string, args ...any) {
	if a.err == nil {
		a.err = fmt.Errorf(format, args...)
	}
}

// integer returns an attribute from low to high; missing when it is absent or out of
// range: decoders compute with valid numbers.
func (a *attributes) integer(name string, missing, low, high int64) int {
	x := a.take(name, onnxfile.AttributeProto_INT)
	if x == nil {
		return int(missing)
	}
	if x.I < low || x.I > high {
		a.fail("attribute %s is %d, it must be %d to %d: %w", name, x.I, low, high, kernels.ErrOption)
		return int(missing)
	}
	return int(x.I)
}

// flag returns an attribute of 0 or 1.
func (a *attributes) flag(name string) bool { return a.integer(name, 0, 0, 1) == 1 }

// number returns an attribute; nil when it is missing.
func (a *attributes) number(name string) *float64 {
	x := a.take(name, onnxfile.AttributeProto_FLOAT)
	if x == nil {
		return nil
	}
	return new(float64(x.F))
}

// word returns an attribute that is one of words; the first is that of a missing one.
func (a *attributes) word(name string, words ...string) string {
	x := a.take(name, onnxfile.AttributeProto_STRING)
	if x == nil {
		return words[0]
	}
	if !slices.Contains(words, string(x.S)) {
		a.fail("attribute %s is %q, it must be one of %s: %w", name, x.S, strings.TrimPrefix(strings.Join(words, ", "), ", "), kernels.ErrOption)
	}
	return string(x.S)
}
