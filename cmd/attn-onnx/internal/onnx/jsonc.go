package onnx

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/tidwall/jsonc"

	"github.com/seed90331342/attn/bench/plain"
	"github.com/seed90331342/attn/cmd/attn-onnx/internal/onnxfile"
	"github.com/seed90331342/attn/cmd/internal/files"
	"github.com/seed90331342/attn/kernels"
)

// jsoncTest is an element of a file of ONNX Runtime's operator tests: a node, and cases of its inputs and outputs.
type jsoncTest struct {
	Name, Operator string
	Opset          struct {
		Domain  string
		Version int64
	}
	Attributes json.RawMessage // a list of jsoncAttribute
	Cases      json.RawMessage // a list of jsoncCase
}

type jsoncAttribute struct {
	Name, Type string
	Data       json.RawMessage
}

type jsoncCase struct {
	Name            string
	Inputs, Outputs json.RawMessage // lists of jsoncTensor
}

// jsoncTensor is a tensor. Data that is null or missing means that there is none.
type jsoncTensor struct {
	Data json.RawMessage
	Dims []int64
	Type string
}

// jsoncTests returns the elements of a file: JSON with comments and trailing commas.
func jsoncTests(text []byte) ([]json.RawMessage, error) {
	// Decoded, dims take the most memory for their bytes: two become eight, in a list that
	// grows. Lists of objects are bounded by maxElements.
	if err := kernels.CheckMemory(24 * int64(len(text))); err != nil {
		return nil, err
	}
	text = jsonc.ToJSONInPlace(text)
	if first := bytes.TrimLeft(text, " \t\r\n"); len(first) == 0 || first[0] != '[' {
		return nil, fmt.Errorf("not a list of tests: the file must begin with [, after comments: %w", onnxfile.ErrMalformed)
	}
	if err := files.DecodeJSON(text, new(anything)); err != nil {
		return nil, fmt.Errorf("%w: %w", err, onnxfile.ErrMalformed)
	}
	tests, err := elements(text)
	if err == nil && len(tests) == 0 {
		err = fmt.Errorf("there are no tests in it: %w", onnxfile.ErrMalformed)
	}
	return tests, err
}

// anything accepts every JSON value.
type anything struct{}

// UnmarshalJSON implements json.Unmarshaler.
func (anything) UnmarshalJSON([]byte) error { return nil }

// maxElements bounds lists of objects: an empty one takes 3 bytes of a file and many times as much memory.
const maxElements = 10_000

// elements returns the elements of a list, none of a missing one.
func elements(text json.RawMessage) ([]json.RawMessage, error) {
	var list []json.RawMessage
	d := json.NewDecoder(bytes.NewReader(text))
	first, err := d.Token()
	if len(text) == 0 || err == nil && first == nil {
		return nil, nil
	}
	if first != json.Delim('[') {
		return nil, fmt.Errorf("not a list: %w", onnxfile.ErrMalformed)
	}
	for d.More() {
		var x json.RawMessage
		if err := d.Decode(&x); err != nil {
			return nil, fmt.Errorf("%w: %w", err, onnxfile.ErrMalformed)
		}
		if list = append(list, x); len(list) > maxElements {
			return nil, fmt.Errorf("it has more than %d elements: %w", maxElements, onnxfile.ErrUnsupported)
		}
	}
	return list, nil
}

// decodeJSONC decodes a part of a file.
func decodeJSONC(text []byte, into any) error {
	err := json.Unmarshal(text, into)
	if kind := new(json.UnmarshalTypeError); errors.As(err, &kind) {
		return fmt.Errorf("%s is a %s, which it cannot be: %w", cmp.Or(strings.ToLower(kind.Field), "the element"), kind.Value, onnxfile.ErrMalformed)
	}
	if err != nil {
		return fmt.Errorf("%w: %w", err, onnxfile.ErrMalformed)
	}
	return nil
}

// attribute decodes an attribute.
func (a *jsoncAttribute) attribute() (*onnxfile.AttributeProto, error) {
	x := &onnxfile.AttributeProto{Name: a.Name}
	var err error
	switch a.Type {
	case "int":
		x.Type, err = onnxfile.AttributeProto_INT, decodeJSONC(a.Data, &x.I)
	case "float":
		x.Type, err = onnxfile.AttributeProto_FLOAT, decodeJSONC(a.Data, &x.F)
	case "string":
		var s string
		err = decodeJSONC(a.Data, &s)
		x.Type, x.S = onnxfile.AttributeProto_STRING, []byte(s)
	default: // lists and tensors: no operator here has one, the node refuses it by its name
		x.Type = onnxfile.AttributeProto_UNDEFINED
	}
	if err != nil {
		return nil, fmt.Errorf("attribute %q: %w", a.Name, err)
	}
	return x, nil
}

// list decodes the elements of a list.
func list[T any](what string, text json.RawMessage) ([]T, error) {
	raw, err := elements(text)
	all := make([]T, len(raw))
	for i := 0; i < len(raw) && err == nil; i++ {
		err = decodeJSONC(raw[i], &all[i])
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	return all, nil
}

// node returns the node of the test with the inputs and outputs of a case, which have the
// names that the operator gives them.
func (test *jsoncTest) node(c *jsoncCase) (n *node, in map[string]*onnxfile.Tensor, want []*onnxfile.Tensor, err error) {
	p := &onnxfile.NodeProto{OpType: test.Operator, Domain: test.Opset.Domain}
	if p.Domain == "ai.onnx" {
		p.Domain = ""
	}
	attributes, err := list[jsoncAttribute]("attributes", test.Attributes)
	if err != nil {
		return nil, nil, nil, err
	}
	for _, a := range attributes {
		x, err := a.attribute()
		if err != nil {
			return nil, nil, nil, err
		}
		p.Attribute = append(p.Attribute, x)
	}
	var inputs, outputs []string
	if s := schemas[qualified(p.Domain, p.OpType)]; s != nil {
		inputs, outputs = s.inputs, s.outputs
	}
	var have []*onnxfile.Tensor
	if p.Input, have, err = tensors("input", c.Inputs, inputs); err != nil {
		return nil, nil, nil, err
	}
	if p.Output, want, err = tensors("output", c.Outputs, outputs); err != nil {
		return nil, nil, nil, err
	}
	n, err = newNode(&onnxfile.Model{Opsets: map[string]int64{p.Domain: test.Opset.Version}, Nodes: []*onnxfile.NodeProto{p}})
	in = map[string]*onnxfile.Tensor{}
	for i, t := range have {
		in[p.Input[i]] = t
	}
	return n, in, want, err
}

// tensors decodes a list of tensors and returns their names, the known ones by position: "" and nil for missing ones.
func tensors(kind string, text json.RawMessage, known []string) (names []string, all []*onnxfile.Tensor, err error) {
	raw, err := list[jsoncTensor](kind+"s", text)
	if err != nil {
		return nil, nil, err
	}
	names, all = make([]string, len(raw)), make([]*onnxfile.Tensor, len(raw))
	for i, t := range raw {
		if t.missing() {
			continue
		}
		if names[i] = strconv.Itoa(i); i < len(known) {
			names[i] = known[i]
		}
		if all[i], err = t.tensor(); err != nil {
			return nil, nil, fmt.Errorf("%s %d, %s: %w", kind, i, names[i], err)
		}
	}
	return names, all, nil
}

func (t *jsoncTensor) missing() bool { return len(t.Data) == 0 || string(t.Data) == "null" }

// jsoncTypes are the element types by their names in the files.
var jsoncTypes = map[string]onnxfile.DataType{
	"float16": onnxfile.Float16, "float32": onnxfile.Float, "float64": onnxfile.Double, "int8": onnxfile.Int8, "int32": onnxfile.Int32, "int64": onnxfile.Int64, "bool": onnxfile.Bool,
}

// tensor decodes t.
func (t *jsoncTensor) tensor() (*onnxfile.Tensor, error) {
	kind, ok := jsoncTypes[t.Type]
	if !ok {
		return nil, fmt.Errorf("its type is %q: %w", t.Type, onnxfile.ErrUnsupported)
	}
	if t.Dims == nil {
		return nil, fmt.Errorf("it has no dims: %w", onnxfile.ErrMalformed)
	}
	d := json.NewDecoder(bytes.NewReader(t.Data))
	d.UseNumber()
	if first, err := d.Token(); err != nil || first != json.Delim('[') {
		return nil, fmt.Errorf("its data is not a list: %w", onnxfile.ErrMalformed)
	}
	var data []byte
	for i := 0; d.More(); i++ {
		x, err := d.Token()
		if err == nil {
			data, err = appendElement(data, kind, x)
		}
		if err != nil {
			return nil, fmt.Errorf("element %d is %.40v, not a %v: %w", i, x, kind, onnxfile.ErrMalformed)
		}
	}
	return onnxfile.NewTensor(kind, t.Dims, data)
}

// appendElement appends a number, a bool, or a number in quotes: NaN, Infinity and integers
// that JavaScript cannot represent.
func appendElement(b []byte, d onnxfile.DataType, x json.Token) ([]byte, error) {
	text := fmt.Sprint(x)
	switch v := x.(type) {
	case bool:
		if d != onnxfile.Bool {
			return nil, strconv.ErrSyntax
		}
		text = map[bool]string{true: "1", false: "0"}[v]
	case json.Delim, nil:
		return nil, strconv.ErrSyntax
	}
	if d.Float() {
		bits := 64
		if d == onnxfile.Float {
			bits = 32
		}
		f, err := strconv.ParseFloat(text, bits)
		return appendNumber(b, d, f), err
	}
	n, err := strconv.ParseInt(text, 10, 64)
	switch {
	case err != nil:
		return nil, err
	case d == onnxfile.Bool && (n == 0 || n == 1):
		return append(b, byte(n)), nil
	case d == onnxfile.Int8 && n == int64(int8(n)):
		return append(b, byte(n)), nil
	case d == onnxfile.Int32 && n == int64(int32(n)):
		return binary.LittleEndian.AppendUint32(b, uint32(n)), nil
	case d == onnxfile.Int64:
		return binary.LittleEndian.AppendUint64(b, uint64(n)), nil
	}
	return nil, strconv.ErrRange
}

// runFile runs the cases of a file of ONNX Runtime's operator tests.
func (r *report) runFile(ctx context.Context, dev *kernels.Device, path string) error {
	text, err := files.Read(ctx, path, files.MaxText)
	var tests []json.RawMessage
	if err == nil {
		tests, err = jsoncTests(text)
	}
	if err != nil {
		return r.line(ctx, path, "", err)
	}
	for i, test := range tests {
		if err := r.runTest(ctx, dev, fmt.Sprintf("%s[%d]", path, i), test); err != nil {
			return err
		}
	}
	return nil
}

// runTest runs the cases of an element of a file and reports each. name is that of the element.
func (r *report) runTest(ctx context.Context, dev *kernels.Device, name string, text []byte) error {
	var test jsoncTest
	if err := decodeJSONC(text, &test); err != nil {
		return r.line(ctx, name, "", err)
	}
	name = fmt.Sprintf("%s %s", name, plain.Line(test.Name))
	cases, err := elements(test.Cases)
	if err == nil && len(cases) == 0 {
		err = errors.New("it has no cases: nothing to run")
	}
	if err != nil {
		return r.line(ctx, name, "", err)
	}
	for i, text := range cases {
		label, how, err := test.run(ctx, dev, text)
		if err := r.line(ctx, fmt.Sprintf("%s, %s", name, cmp.Or(plain.Line(label), fmt.Sprint("case ", i))), how, err); err != nil {
			return err
		}
	}
	return nil
}

// run runs a case of the test. label is its name.
func (test *jsoncTest) run(ctx context.Context, dev *kernels.Device, text []byte) (label, how string, err error) {
	var c jsoncCase
	if err := decodeJSONC(text, &c); err != nil {
		return "", "", err
	}
	n, in, want, err := test.node(&c)
	if err != nil {
		return c.Name, "", err
	}
	how, err = n.check(ctx, dev, in, n.outputs, want, printed)
	return c.Name, how, err
}
