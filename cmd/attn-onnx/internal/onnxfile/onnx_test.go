package onnxfile

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/testing/protocmp"
)

// wireMessage encodes fields without the package's own code.
type wireMessage []byte

func (m wireMessage) int(number protowire.Number, v int64) wireMessage {
	return protowire.AppendVarint(protowire.AppendTag(m, number, protowire.VarintType), uint64(v))
}

func (m wireMessage) bytes(number protowire.Number, v []byte) wireMessage {
	return protowire.AppendBytes(protowire.AppendTag(m, number, protowire.BytesType), v)
}

func (m wireMessage) text(number protowire.Number, v string) wireMessage {
	return m.bytes(number, []byte(v))
}

func (m wireMessage) float(number protowire.Number, v float32) wireMessage {
	return protowire.AppendFixed32(protowire.AppendTag(m, number, protowire.Fixed32Type), math.Float32bits(v))
}

func (m wireMessage) double(number protowire.Number, v float64) wireMessage {
	return protowire.AppendFixed64(protowire.AppendTag(m, number, protowire.Fixed64Type), math.Float64bits(v))
}

// packed returns the varints of a packed field.
func packed(vs ...int64) (b []byte) {
	for _, v := range vs {
		b = protowire.AppendVarint(b, uint64(v))
	}
	return b
}

func TestModel(t *testing.T) {
	scale := wireMessage(nil).text(1, "scale").float(2, 0.25).int(20, 1)
	causal := wireMessage(nil).text(1, "is_causal").int(3, 1).int(20, 2)
	other := wireMessage(nil).text(1, "axes").bytes(8, packed(1, 2)).int(20, 7)
	node := wireMessage(nil).text(1, "Q").text(1, "").text(1, "V").text(2, "Y").text(3, "n0").text(4, "Attention").
		bytes(5, scale).bytes(5, causal).bytes(5, other).text(6, "doc").text(7, "ai.onnx")
	weight := wireMessage(nil).int(1, 2).int(2, 7).int(7, 5).int(7, -5).text(8, "V")
	graph := wireMessage(nil).bytes(1, node).text(2, "g").bytes(5, weight).
		bytes(11, wireMessage(nil).text(1, "Q").text(2, "type")).bytes(12, wireMessage(nil).text(1, "Y"))
	model := wireMessage(nil).int(1, 11).bytes(7, graph).bytes(8, wireMessage(nil).text(1, "ai.onnx").int(2, 24)).
		bytes(8, wireMessage(nil).text(1, "com.example").int(2, 3)).bytes(25, []byte("a function"))
	got := must.Get(DecodeModel(model))(t)
	want := &Model{
		Opsets: map[string]int64{"": 24, "com.example": 3},
		Inputs: []string{"Q"}, Outputs: []string{"Y"},
		Initializers: []*Tensor{{Name: "V", Type: Int64, Shape: []int{2}, Data: binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, 5), ^uint64(4))}},
		Nodes: []*NodeProto{{
			Name: "n0", OpType: "Attention", Input: []string{"Q", "", "V"}, Output: []string{"Y"},
			Attribute: []*AttributeProto{
				{Name: "scale", Type: AttributeProto_FLOAT, F: 0.25}, {Name: "is_causal", Type: AttributeProto_INT, I: 1}, {Name: "axes", Type: AttributeProto_INTS},
			},
		}},
	}
	if d := cmp.Diff(want, got, protocmp.Transform(), protocmp.IgnoreUnknown()); d != "" {
		t.Errorf("(-want +got)\n%s", d)
	}
}

// TestTensorForms decodes the same elements in all encodings.
func TestTensorForms(t *testing.T) {
	head := func(d DataType, shape ...int64) wireMessage {
		return wireMessage(nil).bytes(1, packed(shape...)).int(2, int64(d))
	}
	le := binary.LittleEndian
	for _, c := range []struct {
		name string
		data wireMessage
		want []float64
	}{
		{"lengths one by one", wireMessage(nil).int(1, 1).int(1, 2).int(2, 9).bytes(9, []byte{0, 1}), []float64{0, 1}},
		{"f32 raw", head(Float, 2).bytes(9, le.AppendUint32(le.AppendUint32(nil, math.Float32bits(1.5)), math.Float32bits(-2))), []float64{1.5, -2}},
		{"f32 packed", head(Float, 2).bytes(4, le.AppendUint32(le.AppendUint32(nil, math.Float32bits(1.5)), math.Float32bits(-2))), []float64{1.5, -2}},
		{"f32 one by one", head(Float, 2).float(4, 1.5).float(4, -2), []float64{1.5, -2}},
		{"f64 one by one", head(Double, 1).double(10, 1e300), []float64{1e300}},
		{"f64 packed", head(Double, 1).bytes(10, le.AppendUint64(nil, math.Float64bits(1e300))), []float64{1e300}},
		{"f16 in int32_data", head(Float16, 2).bytes(5, packed(0x3c00, 0xfc00)), []float64{1, math.Inf(-1)}},
		{"f16 raw", head(Float16, 2).bytes(9, []byte{0, 0x3c, 0, 0xfc}), []float64{1, math.Inf(-1)}},
		{"bf16 in int32_data", head(BFloat16, 1).int(5, 0x4049), []float64{3.140625}},
		{"bool", head(Bool, 2, 1).bytes(5, packed(0, 1)), []float64{0, 1}},
		{"bool raw", head(Bool, 2).bytes(9, []byte{1, 0}), []float64{1, 0}},
		{"int8", head(Int8, 2).bytes(5, packed(-128, 127)), []float64{-128, 127}},
		{"int8 raw", head(Int8, 2).bytes(9, []byte{0xff, 1}), []float64{-1, 1}},
		{"int64", head(Int64, 1).bytes(7, packed(-9)), []float64{-9}},
		{"int32", head(Int32, 2).bytes(5, packed(-9, 1<<31-1)), []float64{-9, 1<<31 - 1}},
		{"int32 raw", head(Int32, 1).bytes(9, []byte{0xfe, 0xff, 0xff, 0xff}), []float64{-2}},
		{"a scalar", wireMessage(nil).int(2, int64(Float)).float(4, 3), []float64{3}},
		{"nothing in it", head(Float, 3, 0), nil},
		{"fields from the future", head(Float, 1).float(4, 3).text(99, "x").double(98, 1), []float64{3}},
	} {
		x, err := DecodeTensor(c.data)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		var got []float64
		for i := range x.Elements() {
			got = append(got, x.At(i))
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: elements are %v, should be %v", c.name, got, c.want)
		}
	}
}

func TestRefused(t *testing.T) {
	f32 := func(shape ...int64) wireMessage { return wireMessage(nil).bytes(1, packed(shape...)).int(2, 1) }
	tensor := func(b wireMessage) error { _, err := DecodeTensor(b); return err }
	model := func(b wireMessage) error { _, err := DecodeModel(b); return err }
	graph := func(g wireMessage) error {
		return model(wireMessage(nil).bytes(7, g).bytes(8, wireMessage(nil).int(2, 24)))
	}
	for _, c := range []struct {
		name string
		err  error
		want error
		says string
	}{
		{"nothing", tensor(nil), ErrMalformed, "no element type"},
		{"no data", tensor(f32(2)), ErrMalformed, "needs 8 bytes, there are 0"},
		{"too much data", tensor(f32(1).bytes(9, make([]byte, 8))), ErrMalformed, "needs 4 bytes, there are 8"},
		{"a negative length", tensor(f32(-1)), ErrMalformed, "axis 0 is -1"},
		{"a huge shape", tensor(f32(1<<30, 1<<30, 1<<30)), ErrMalformed, "too large"},
		{"more than 8 bits", tensor(wireMessage(nil).bytes(1, packed(1)).int(2, 3).int(5, 128)), ErrMalformed, "element 0 is 128, not a int8"},
		{"integers of 16 bits", tensor(wireMessage(nil).int(2, 5).int(5, 1)), ErrUnsupported, "data type 5"},
		{"strings", tensor(wireMessage(nil).int(2, 8).text(6, "x")), ErrUnsupported, "data type 8"},
		{"complex numbers", tensor(wireMessage(nil).int(2, 14).bytes(9, make([]byte, 8))), ErrUnsupported, "data type 14"},
		{"elements in the wrong field", tensor(f32(1).int(7, 1)), ErrMalformed, "f32 cannot lie in int64_data"},
		{"elements twice", tensor(f32(1).float(4, 1).bytes(9, make([]byte, 4))), ErrMalformed, "float_data and raw_data"},
		{"half a number", tensor(f32(1).bytes(4, make([]byte, 3))), ErrMalformed, "tensor: its bytes do not parse"},
		{"a bool of 2", tensor(wireMessage(nil).int(1, 1).int(2, 9).int(5, 2)), ErrMalformed, "element 0 is 2, not a bool"},
		{"an f16 of 17 bits", tensor(wireMessage(nil).int(1, 1).int(2, 10).int(5, 1<<16)), ErrMalformed, "not a f16"},
		{"data elsewhere", tensor(f32(1).text(8, "w").int(14, 1)), ErrUnsupported, `"w": its data lies in another file`},
		{"a name that is a number", tensor(f32(1).int(8, 1)), ErrMalformed, "field 8 (name) has wire type 0"},
		{"no model", model(nil), ErrMalformed, "no graph"},
		{"no operator sets", model(wireMessage(nil).bytes(7, nil)), ErrMalformed, "no operator set"},
		{"not protocol buffers", model(wireMessage("\x93NUMPY\x01\x00")), ErrMalformed, "model: its bytes do not parse"},
		{"a graph that is a number", model(wireMessage(nil).int(7, 1)), ErrMalformed, "field 7 (graph) has wire type 0"},
		{"a sparse initializer", graph(wireMessage(nil).bytes(15, nil)), ErrUnsupported, "sparse"},
		{"a broken initializer", graph(wireMessage(nil).bytes(5, f32(2))), ErrMalformed, "needs 8 bytes"},
		{"an attribute of a function", graph(wireMessage(nil).bytes(1, wireMessage(nil).bytes(5, wireMessage(nil).text(1, "scale").text(21, "s")))), ErrUnsupported, `"scale": it refers`},
		{"a float attribute that is a varint", graph(wireMessage(nil).bytes(1, wireMessage(nil).bytes(5, wireMessage(nil).int(2, 1)))), ErrMalformed, "AttributeProto: field 2"},
	} {
		must.Fail(t, c.name, c.err, c.want, c.says)
	}
}

// published returns the files of the published cases, models and tensors.
func published(tb testing.TB) (models, tensors [][]byte) {
	const dir = "../../testdata/onnx"
	for pattern, list := range map[string]*[][]byte{"*/model.onnx": &models, "*/test_data_set_*/*.pb": &tensors} {
		paths, err := filepath.Glob(filepath.Join(dir, pattern))
		if err != nil || len(paths) < 38 {
			tb.Fatalf("%s: %d files, %v", pattern, len(paths), err)
		}
		for _, p := range paths {
			data := must.Get(os.ReadFile(p))(tb)
			*list = append(*list, data)
		}
	}
	return models, tensors
}

// TestCutShort cuts the published files at every byte: none decodes.
func TestCutShort(t *testing.T) {
	models, tensors := published(t)
	for _, data := range models {
		for n := range data {
			if m, err := DecodeModel(data[:n]); err == nil {
				t.Fatalf("a model of %d bytes, cut to %d, is %+v", len(data), n, m)
			}
		}
		if _, err := DecodeModel(data); err != nil {
			t.Error(err)
		}
	}
	for _, data := range tensors {
		for n := range data {
			if x, err := DecodeTensor(data[:n]); err == nil {
				t.Fatalf("a tensor of %d bytes, cut to %d, is %v", len(data), n, x.Shape)
			}
		}
		if _, err := DecodeTensor(data); err != nil {
			t.Error(err)
		}
	}
}

// known fails the test unless an error is one of the package's own.
func known(t *testing.T, err error) {
	if !errors.Is(err, ErrMalformed) && !errors.Is(err, ErrUnsupported) {
		t.Errorf("error is %v, neither malformed nor unsupported", err)
	}
}

func FuzzDecodeModel(f *testing.F) {
	models, _ := published(f)
	for _, data := range models {
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := DecodeModel(data)
		if err != nil {
			known(t, err)
			return
		}
		for _, x := range m.Initializers {
			whole(t, x)
		}
	})
}

func FuzzDecodeTensor(f *testing.F) {
	_, tensors := published(f)
	for _, data := range tensors {
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		x, err := DecodeTensor(data)
		if err != nil {
			known(t, err)
			return
		}
		whole(t, x)
	})
}

// whole checks that a tensor has the elements of its shape, and reads each.
func whole(t *testing.T, x *Tensor) {
	n := 1
	for _, l := range x.Shape {
		n *= l
	}
	if x.Elements() != n || len(x.Data) != n*x.Type.Size() {
		t.Fatalf("shape %v of %v with %d bytes", x.Shape, x.Type, len(x.Data))
	}
	for i := range n {
		if at := x.At(i); !x.Type.Float() && at != float64(x.Int(i)) {
			t.Fatalf("element %d is %v and %d", i, at, x.Int(i))
		}
	}
}

// field returns a field of bytes.
func field(number protowire.Number, content []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(nil, number, protowire.BytesType), content)
}

// TestManyNodes: empty nodes take 2 bytes of a file each, and hundreds of bytes of memory.
func TestManyNodes(t *testing.T) {
	must.Fail(t, fmt.Sprintf("%d nodes", maxMessages+1), must.Err(DecodeModel(field(7, bytes.Repeat(field(1, nil), maxMessages+1)))), ErrUnsupported)
	must.Fail(t, fmt.Sprintf("%d texts", maxMessages+1), must.Err(DecodeTensor(bytes.Repeat(field(6, nil), maxMessages+1))), ErrUnsupported)
}

// TestDecodeAsksForMemory decodes the forms of numbers that take the most memory for their
// bytes: no more than what was asked for.
func TestDecodeAsksForMemory(t *testing.T) {
	const n = 1 << 20
	number := func(field protowire.Number) []byte {
		return append(protowire.AppendTag(nil, field, protowire.VarintType), 1)
	}
	for _, c := range []struct {
		name string
		data []byte
	}{
		{"raw data", field(9, make([]byte, n))},
		{"packed int32", field(5, make([]byte, n))},
		{"int32, each with its tag", bytes.Repeat(number(5), n)},
		{"packed int64", field(7, make([]byte, n))},
		{"int64, each with its tag", bytes.Repeat(number(7), n)},
		{"packed f32", field(4, make([]byte, n))},
		{"lengths", field(1, make([]byte, n))},
		{"an unknown field", field(1000, make([]byte, n))},
	} {
		stop := backend.FailMemory(1)
		must.Fail(t, fmt.Sprintf("%s: without memory", c.name), must.Err(DecodeTensor(c.data)), kernels.ErrMemory)
		stop()
		head := append(append(protowire.AppendTag(nil, 2, protowire.VarintType), 7), c.data...) // int64
		_, most := measure(head, (&TensorProto{}).ProtoReflect().Descriptor())
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, err := DecodeTensor(head)
		runtime.ReadMemStats(&after)
		if got := int64(after.TotalAlloc - before.TotalAlloc); got > most+1<<16 {
			t.Errorf("%s: %d bytes were allocated, %d were asked for (%v)", c.name, got, most, err)
		}
	}
}

// TestGenerated compares the messages and fields of onnx.pb.go with those of onnx.proto, so
// that it fails when one was changed without the other.
func TestGenerated(t *testing.T) {
	schema := must.Get(os.ReadFile("onnx.proto"))(t)
	var want []string
	message := ""
	messageLine := regexp.MustCompile(`^message (\w+) {`)
	fieldLine := regexp.MustCompile(`^  (?:(repeated|optional) )?(\w+) (\w+) = (\d+);`)
	for line := range strings.Lines(string(schema)) {
		if m := messageLine.FindStringSubmatch(line); m != nil {
			message = m[1]
			want = append(want, message)
		}
		if f := fieldLine.FindStringSubmatch(line); f != nil {
			want = append(want, fmt.Sprintf("%s.%s: %t %s = %s", message, f[3], f[1] == "repeated", f[2], f[4]))
		}
	}
	var got []string
	for _, m := range all(File_onnx_proto.Messages()) {
		got = append(got, string(m.Name()))
		for _, f := range all(m.Fields()) {
			kind := f.Kind().String()
			switch f.Kind() {
			case protoreflect.MessageKind:
				kind = string(f.Message().Name())
			case protoreflect.EnumKind:
				kind = string(f.Enum().Name())
			}
			got = append(got, fmt.Sprintf("%s.%s: %t %s = %d", m.Name(), f.Name(), f.IsList(), kind, f.Number()))
		}
	}
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("onnx.pb.go has\n%s\nonnx.proto has\n%s\nrun go generate", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// all returns the elements of a descriptor's list.
func all[T any](list interface {
	Len() int
	Get(int) T
}) []T {
	var elements []T
	for i := range list.Len() {
		elements = append(elements, list.Get(i))
	}
	return elements
}
