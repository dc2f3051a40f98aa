// Package onnxfile decodes the two messages of published ONNX test cases: a model
// (ModelProto, model.onnx) and a tensor (TensorProto, input_0.pb).
//
//	m, err := onnxfile.DecodeModel(data)
//	...
//	t, err := onnxfile.DecodeTensor(data)
//
// It decodes the fields that describe one node of the operator Attention and its data,
// by the numbers of the public schema onnx.proto3, and skips the others. A decoded
// tensor has the elements of its shape. Every input yields a value or an error that
// wraps [ErrMalformed] or [ErrUnsupported], never a panic, and takes memory of at most
// a small multiple of its size.
package onnxfile

import (
	"errors"
	"fmt"
)

var (
	// ErrMalformed reports bytes that are not such a message: cut short, or with
	// contradicting fields.
	ErrMalformed = errors.New("malformed ONNX data")
	// ErrUnsupported reports a valid message that this package does not decode.
	ErrUnsupported = errors.New("not decoded here")
)

// Model is the content of a model.onnx file.
type Model struct {
	// Opsets has the versions of the imported operator sets by domain. That of the
	// ONNX operators is "", also where the file calls it "ai.onnx".
	Opsets map[string]int64
	Graph  Graph
}

// Graph is a computation: nodes connected by named tensors.
type Graph struct {
	Nodes []Node
	// Inputs and Outputs are names of tensors, in the order of the numbers of the
	// files of a test case.
	Inputs, Outputs []string
	// Initializers are the tensors in the model.
	Initializers []Tensor
}

// Node is one operation.
type Node struct {
	Name, Domain, OpType string
	// Inputs and Outputs are tensor names in the operator's order; "" is a missing
	// optional one.
	Inputs, Outputs []string
	Attributes      []Attribute
}

// Attribute is a constant of a node. Only the values of numbers are decoded.
type Attribute struct {
	Name  string
	Kind  Kind
	Int   int64   // of KindInt
	Float float32 // of KindFloat
}

// Kind is the type of an attribute, numbered as in the schema.
type Kind int64

// The kinds with decoded values.
const (
	KindFloat Kind = 1
	KindInt   Kind = 2
)

// String returns the schema's name of a kind, in lower case.
func (k Kind) String() string {
	names := [...]string{"undefined", "float", "int", "string", "tensor", "graph", "floats", "ints", "strings", "tensors", "graphs", "sparse tensor", "sparse tensors", "type", "types"}
	if k < 0 || int(k) >= len(names) {
		return fmt.Sprintf("kind %d", int64(k))
	}
	return names[k]
}

// DecodeModel decodes a ModelProto. A message without the required graph or operator
// sets is malformed: a file that was cut between two fields has lost them.
func DecodeModel(data []byte) (*Model, error) {
	m := &Model{Opsets: map[string]int64{}}
	graph := false
	err := fields{
		7: message(func(data []byte) error {
			graph = true
			return m.Graph.decode(data)
		}),
		8: message(m.decodeOpset),
	}.decode("model", data)
	switch {
	case err != nil:
		return nil, err
	case !graph:
		return nil, fmt.Errorf("model: there is no graph in it: %w", ErrMalformed)
	case len(m.Opsets) == 0:
		return nil, fmt.Errorf("model: it imports no operator set: %w", ErrMalformed)
	}
	return m, nil
}

func (m *Model) decodeOpset(data []byte) error {
	domain, version := "", int64(0)
	err := fields{1: text(&domain), 2: integer(&version)}.decode("operator set", data)
	m.Opsets[plainDomain(domain)] = version
	return err
}

// plainDomain returns the shorter name of the ONNX operators' own domain.
func plainDomain(d string) string {
	if d == "ai.onnx" {
		return ""
	}
	return d
}

func (g *Graph) decode(data []byte) error {
	return fields{
		1:  messages(&g.Nodes, (*Node).decode),
		5:  messages(&g.Initializers, (*Tensor).decode),
		11: messages(&g.Inputs, decodeName),
		12: messages(&g.Outputs, decodeName),
		15: func(field) error { return fmt.Errorf("graph: it has a sparse initializer: %w", ErrUnsupported) },
	}.decode("graph", data)
}

// decodeName decodes the name in a ValueInfoProto.
func decodeName(name *string, data []byte) error {
	return fields{1: text(name)}.decode("value", data)
}

func (n *Node) decode(data []byte) error {
	err := fields{
		1: texts(&n.Inputs), 2: texts(&n.Outputs), 3: text(&n.Name), 4: text(&n.OpType),
		5: messages(&n.Attributes, (*Attribute).decode), 7: text(&n.Domain),
	}.decode("node", data)
	n.Domain = plainDomain(n.Domain)
	return err
}

func (a *Attribute) decode(data []byte) error {
	var reference string
	fs := fields{1: text(&a.Name), 2: float(&a.Float), 3: integer(&a.Int), 20: integer(&a.Kind), 21: text(&reference)}
	err := fs.decode("attribute", data)
	if err == nil && reference != "" {
		err = fmt.Errorf("attribute %q: it refers to one of a function: %w", a.Name, ErrUnsupported)
	}
	return err
}
