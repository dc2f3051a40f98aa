// Package onnxfile decodes the two messages of published ONNX test cases: a model
// (ModelProto, model.onnx) and a tensor (TensorProto, input_0.pb).
//
//	m, err := onnxfile.DecodeModel(data)
//	...
//	t, err := onnxfile.DecodeTensor(data)
//
// It decodes the fields that describe one node of an attention operator and its data (onnx.proto) and skips the others.
// A decoded tensor has the elements of its shape. Every input yields a value or an error that wraps [ErrMalformed],
// [ErrUnsupported] or kernels.ErrMemory, never a panic.
package onnxfile

import (
	"errors"
	"fmt"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/seed90331342/attn/kernels"
)

//go:generate protoc --go_out=. --go_opt=paths=source_relative onnx.proto

var (
	// ErrMalformed reports bytes that are not such a message: cut short, or with contradicting fields.
	ErrMalformed = errors.New("malformed ONNX data")
	// ErrUnsupported reports a valid message that this package does not decode.
	ErrUnsupported = errors.New("not decoded here")
)

// Model is the content of a model.onnx file: nodes connected by named tensors.
type Model struct {
	// Opsets has the versions of the imported operator sets by domain. That of the
	// ONNX operators is "", also where the file calls it "ai.onnx".
	Opsets map[string]int64
	// Nodes are the operations. An input or output named "" is missing.
	Nodes []*NodeProto
	// Inputs and Outputs are names of tensors, in the order of the numbers of the files of a test case.
	Inputs, Outputs []string
	// Initializers are the tensors in the model.
	Initializers []*Tensor
}

// DecodeModel decodes a ModelProto. A message without the required graph or operator
// sets is malformed: a file that was cut between two fields has lost them.
func DecodeModel(data []byte) (*Model, error) {
	var p ModelProto
	if err := decode("model", data, &p); err != nil {
		return nil, err
	}
	switch {
	case p.Graph == nil:
		return nil, fmt.Errorf("model: there is no graph in it: %w", ErrMalformed)
	case len(p.OpsetImport) == 0:
		return nil, fmt.Errorf("model: it imports no operator set: %w", ErrMalformed)
	case len(p.Graph.SparseInitializer) > 0:
		return nil, fmt.Errorf("graph: it has a sparse initializer: %w", ErrUnsupported)
	}
	m := &Model{Opsets: map[string]int64{}, Nodes: p.Graph.Node}
	for _, o := range p.OpsetImport {
		m.Opsets[plainDomain(o.Domain)] = o.Version
	}
	for _, n := range m.Nodes {
		n.Domain = plainDomain(n.Domain)
		for _, a := range n.Attribute {
			if a.RefAttrName != "" {
				return nil, fmt.Errorf("attribute %q: it refers to one of a function: %w", a.Name, ErrUnsupported)
			}
		}
	}
	for _, v := range p.Graph.Input {
		m.Inputs = append(m.Inputs, v.Name)
	}
	for _, v := range p.Graph.Output {
		m.Outputs = append(m.Outputs, v.Name)
	}
	for _, x := range p.Graph.Initializer {
		t, err := newTensor(x)
		if err != nil {
			return nil, err
		}
		m.Initializers = append(m.Initializers, t)
	}
	return m, nil
}

// plainDomain returns the shorter name of the ONNX operators' own domain.
func plainDomain(d string) string {
	if d == "ai.onnx" {
		return ""
	}
	return d
}

// maxMessages bounds the parts of a message: an empty one takes 2 bytes of a file and hundreds of bytes of memory.
const maxMessages = 10_000

// measure counts the messages and texts in data, to just above maxMessages and up to the
// first malformed field. bytes is the most memory that the numbers and bytes take.
func measure(data []byte, d protoreflect.MessageDescriptor) (parts int, bytes int64) {
	for len(data) > 0 && parts <= maxMessages {
		number, kind, size := protowire.ConsumeTag(data)
		if size < 0 {
			break
		}
		length := protowire.ConsumeFieldValue(number, kind, data[size:])
		if length < 0 {
			break
		}
		value := data[size : size+length]
		data = data[size+length:]
		switch field := d.Fields().ByNumber(number); {
		case field == nil || field.Kind() == protoreflect.BytesKind && !field.IsList(): // a copy
			bytes += int64(size + length)
		case field.Message() != nil && kind == protowire.BytesType:
			inside, _ := protowire.ConsumeBytes(value)
			n, b := measure(inside, field.Message())
			parts, bytes = parts+n+1, bytes+b
		case field.Kind() == protoreflect.StringKind || field.Kind() == protoreflect.BytesKind:
			parts, bytes = parts+1, bytes+int64(length)
		default:
			// A number has at least a byte, with its tag two, and becomes 8 in a list
			// that grows by a quarter at a time and is copied once.
			bytes += 24 * int64(size+length)
		}
	}
	return parts, bytes
}

// decode decodes a message. name is for errors.
func decode(name string, data []byte, m proto.Message) error {
	parts, bytes := measure(data, m.ProtoReflect().Descriptor())
	if parts > maxMessages {
		return fmt.Errorf("%s: it has more than %d parts (nodes, tensors, attributes), a case of one node has fewer: %w", name, maxMessages, ErrUnsupported)
	}
	if err := kernels.CheckMemory(bytes); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if proto.Unmarshal(data, m) != nil { // the text of the error is not stable
		return fmt.Errorf("%s: its bytes do not parse (cut short?): %w", name, ErrMalformed)
	}
	return checkTypes(m.ProtoReflect())
}

// checkTypes returns an error for a field with a wire type that it cannot have.
// Unmarshal puts these fields among the unknown ones.
func checkTypes(m protoreflect.Message) (err error) {
	for b := m.GetUnknown(); len(b) > 0; {
		number, kind, n := protowire.ConsumeField(b)
		if f := m.Descriptor().Fields().ByNumber(number); f != nil {
			return fmt.Errorf("%s: field %d (%s) has wire type %d: %w", m.Descriptor().Name(), number, f.Name(), kind, ErrMalformed)
		}
		b = b[n:]
	}
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case f.Message() == nil:
		case f.IsList():
			for i := 0; i < v.List().Len() && err == nil; i++ {
				err = checkTypes(v.List().Get(i).Message())
			}
		default:
			err = checkTypes(v.Message())
		}
		return err == nil
	})
	return err
}
