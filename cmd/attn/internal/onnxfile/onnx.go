// Package onnx decodes the two messages that a published ONNX test case is made
// of: a model (ModelProto, model.onnx) and a tensor (TensorProto, input_0.pb).
//
//	m, err := onnx.DecodeModel(data)
//	...
//	t, err := onnx.DecodeTensor(data)
//
// It knows the fields that describe one node and its data, by the numbers of the
// public schema onnx.proto3, and passes over the others, as protocol buffers mean
// it. What it returns is consistent: a tensor has the elements of its shape. Any
// input gives a value or an error that wraps [ErrMalformed] or [ErrUnsupported],
// never a panic, and takes memory of at most a small multiple of the input.
//
// It does not check that a graph makes sense, and runs nothing.
package onnxfile

import (
	"errors"
	"fmt"
	"math"
)

var (
	// ErrMalformed reports bytes that are no such message: cut short, or with
	// fields that contradict each other.
	ErrMalformed = errors.New("malformed ONNX data")
	// ErrUnsupported reports a valid message with something that this package
	// does not decode.
	ErrUnsupported = errors.New("not decoded here")
)

// Model is what a model.onnx file holds.
type Model struct {
	// Opsets are the versions of the operator sets that the model imports, by
	// domain; the ONNX operators' own domain is "", also where the file calls it
	// "ai.onnx".
	Opsets map[string]int64
	Graph  Graph
}

// Graph is a computation: nodes that pass named tensors on.
type Graph struct {
	Nodes []Node
	// Inputs and Outputs are the names of what is fed and fetched, in the order
	// in which the files of a test case are numbered.
	Inputs, Outputs []string
	// Initializers are tensors that the model brings itself.
	Initializers []Tensor
}

// Node is one operation.
type Node struct {
	Name, Domain, OpType string
	// Inputs and Outputs are tensor names in the operator's order; "" is an
	// optional one that is left out.
	Inputs, Outputs []string
	Attributes      []Attribute
}

// Attribute is a constant of a node. Only numbers have their value decoded.
type Attribute struct {
	Name  string
	Kind  Kind
	Int   int64   // of KindInt
	Float float32 // of KindFloat
}

// Kind is the type of an attribute, numbered as in the schema.
type Kind int64

// The kinds whose values are decoded.
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

// DecodeModel decodes a ModelProto. A message without a graph or without operator
// sets is malformed, as both are required: a file that was cut between two fields
// has lost them.
func DecodeModel(data []byte) (*Model, error) {
	m := &Model{Opsets: map[string]int64{}}
	graph := false
	err := each("model", data, func(f field) error {
		switch f.number {
		case 7:
			graph = true
			return f.message(m.Graph.decode)
		case 8:
			return f.message(m.decodeOpset)
		}
		return nil
	})
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
	err := each("operator set", data, func(f field) (err error) {
		switch f.number {
		case 1:
			domain, err = f.text()
		case 2:
			version, err = f.int()
		}
		return err
	})
	m.Opsets[plainDomain(domain)] = version
	return err
}

// plainDomain gives the ONNX operators' own domain its shorter name.
func plainDomain(d string) string {
	if d == "ai.onnx" {
		return ""
	}
	return d
}

func (g *Graph) decode(data []byte) error {
	return each("graph", data, func(f field) error {
		switch f.number {
		case 1:
			var n Node
			if err := f.message(n.decode); err != nil {
				return err
			}
			g.Nodes = append(g.Nodes, n)
		case 5:
			return f.message(func(data []byte) error {
				t, err := DecodeTensor(data)
				if err != nil {
					return err
				}
				g.Initializers = append(g.Initializers, *t)
				return nil
			})
		case 11:
			return f.message(func(data []byte) error { return appendName(&g.Inputs, "input", data) })
		case 12:
			return f.message(func(data []byte) error { return appendName(&g.Outputs, "output", data) })
		case 15:
			return fmt.Errorf("graph: it has a sparse initializer: %w", ErrUnsupported)
		}
		return nil
	})
}

// appendName appends the name in a ValueInfoProto.
func appendName(names *[]string, message string, data []byte) error {
	name := ""
	err := each(message, data, func(f field) (err error) {
		if f.number == 1 {
			name, err = f.text()
		}
		return err
	})
	*names = append(*names, name)
	return err
}

func (n *Node) decode(data []byte) error {
	err := each("node", data, func(f field) (err error) {
		switch f.number {
		case 1, 2:
			name, err := f.text()
			if err != nil {
				return err
			}
			if f.number == 1 {
				n.Inputs = append(n.Inputs, name)
			} else {
				n.Outputs = append(n.Outputs, name)
			}
		case 3:
			n.Name, err = f.text()
		case 4:
			n.OpType, err = f.text()
		case 5:
			var a Attribute
			err = f.message(a.decode)
			n.Attributes = append(n.Attributes, a)
		case 7:
			n.Domain, err = f.text()
			n.Domain = plainDomain(n.Domain)
		}
		return err
	})
	return err
}

func (a *Attribute) decode(data []byte) error {
	reference := false
	err := each("attribute", data, func(f field) (err error) {
		switch f.number {
		case 1:
			a.Name, err = f.text()
		case 2:
			if f.wire != fixed32 {
				return f.wrongWire()
			}
			a.Float = math.Float32frombits(uint32(f.bits))
		case 3:
			a.Int, err = f.int()
		case 20:
			var k int64
			k, err = f.int()
			a.Kind = Kind(k)
		case 21:
			reference = true
		}
		return err
	})
	if err == nil && reference {
		err = fmt.Errorf("attribute %q: it refers to one of a function: %w", a.Name, ErrUnsupported)
	}
	return err
}
