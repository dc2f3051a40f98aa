package onnxfile

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/x448/float16"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// DataType is the element type of a tensor, numbered as in the schema.
type DataType int32

// The decoded element types: those of the operators of attention.
const (
	Float    DataType = 1
	Int8     DataType = 3
	Int32    DataType = 6
	Int64    DataType = 7
	Bool     DataType = 9
	Float16  DataType = 10
	Double   DataType = 11
	BFloat16 DataType = 16
)

// types has the name, the size in bytes, and the field of TensorProto for elements that are not raw.
var types = map[DataType]struct {
	name  string
	size  int
	field protoreflect.Name
}{
	Float: {"f32", 4, "float_data"}, Double: {"f64", 8, "double_data"}, Float16: {"f16", 2, "int32_data"}, BFloat16: {"bf16", 2, "int32_data"},
	Bool: {"bool", 1, "int32_data"}, Int8: {"int8", 1, "int32_data"}, Int32: {"int32", 4, "int32_data"}, Int64: {"int64", 8, "int64_data"},
}

// elementFields are the fields of TensorProto with elements.
var elementFields = []protoreflect.Name{"float_data", "int32_data", "string_data", "int64_data", "raw_data", "double_data", "uint64_data"}

// String returns a short name: f32, f16, bf16, f64, bool, int8, int32, int64.
func (d DataType) String() string {
	if t, ok := types[d]; ok {
		return t.name
	}
	return fmt.Sprintf("data type %d", int32(d))
}

// Float reports whether d is one of the floating point types f16, bf16, f32, f64.
func (d DataType) Float() bool {
	return d == Float || d == Float16 || d == BFloat16 || d == Double
}

// Size returns the bytes of an element; 0 for a type that is not decoded.
func (d DataType) Size() int { return types[d].size }

// Tensor is an array. Data has the elements row by row, little endian, from any field
// of the message. Its length is that of the shape.
type Tensor struct {
	Name  string
	Type  DataType
	Shape []int
	Data  []byte
}

// DecodeTensor decodes a TensorProto.
func DecodeTensor(data []byte) (*Tensor, error) {
	var p TensorProto
	if err := decode("tensor", data, &p); err != nil {
		return nil, err
	}
	return newTensor(&p)
}

// NewTensor returns a tensor of elements in data, little endian.
func NewTensor(d DataType, shape []int64, data []byte) (*Tensor, error) {
	return newTensor(&TensorProto{DataType: int32(d), Dims: shape, RawData: data})
}

func newTensor(p *TensorProto) (*Tensor, error) {
	t := &Tensor{Name: p.Name, Type: DataType(p.DataType)}
	err := t.fill(p)
	if err != nil {
		err = fmt.Errorf("tensor %q: %w", t.Name, err)
	}
	return t, err
}

// maxAxes is more than the operators of attention have, and few for an error that names the shape.
const maxAxes = 8

// fill sets Shape and Data.
func (t *Tensor) fill(p *TensorProto) error {
	kind, ok := types[t.Type]
	switch {
	case p.DataLocation != 0:
		return fmt.Errorf("its data lies in another file: %w", ErrUnsupported)
	case t.Type == 0:
		return fmt.Errorf("it has no element type: %w", ErrMalformed)
	case !ok:
		return fmt.Errorf("elements of %v: %w", t.Type, ErrUnsupported)
	case len(p.Dims) > maxAxes:
		return fmt.Errorf("it has %d axes, at most %d are read: %w", len(p.Dims), maxAxes, ErrUnsupported)
	}
	var used protoreflect.Name
	for _, name := range elementFields {
		m := p.ProtoReflect()
		switch {
		case !m.Has(m.Descriptor().Fields().ByName(name)):
		case used != "":
			return fmt.Errorf("it has elements in %s and %s: %w", used, name, ErrMalformed)
		case name != "raw_data" && name != kind.field:
			return fmt.Errorf("elements of %v cannot lie in %s: %w", t.Type, name, ErrMalformed)
		default:
			used = name
		}
	}
	t.Data = p.RawData
	for _, numbers := range []any{p.FloatData, p.DoubleData, p.Int64Data} { // one of them at most has elements
		t.Data, _ = binary.Append(t.Data, binary.LittleEndian, numbers) // cannot fail for these types
	}
	limits := map[DataType][2]int32{Bool: {0, 1}, Int8: {math.MinInt8, math.MaxInt8}, Int32: {math.MinInt32, math.MaxInt32}}
	limit, ok := limits[t.Type]
	if !ok { // the bits of f16 and bf16
		limit[1] = math.MaxUint16
	}
	for i, v := range p.Int32Data {
		if v < limit[0] || v > limit[1] {
			return fmt.Errorf("element %d is %d, not a %v: %w", i, v, t.Type, ErrMalformed)
		}
		t.Data = append(t.Data, binary.LittleEndian.AppendUint32(nil, uint32(v))[:kind.size]...)
	}
	want := uint64(kind.size)
	t.Shape = make([]int, 0, len(p.Dims))
	for axis, l := range p.Dims {
		if l < 0 || l > math.MaxInt32 {
			return fmt.Errorf("its length along axis %d is %d: %w", axis, l, ErrMalformed)
		}
		t.Shape = append(t.Shape, int(l))
		if l > 0 && want > math.MaxInt64/uint64(l) {
			return fmt.Errorf("shape %v is too large: %w", p.Dims, ErrMalformed)
		}
		want *= uint64(l)
	}
	if uint64(len(t.Data)) != want {
		return fmt.Errorf("shape %v of %v needs %d bytes, there are %d (cut short?): %w", t.Shape, t.Type, want, len(t.Data), ErrMalformed)
	}
	return nil
}

// Elements returns the number of elements.
func (t *Tensor) Elements() int { return len(t.Data) / t.Type.Size() }

// At returns element i as the nearest float64; true is 1.
func (t *Tensor) At(i int) float64 {
	switch t.Type {
	case Float:
		return float64(math.Float32frombits(binary.LittleEndian.Uint32(t.Data[4*i:])))
	case Double:
		return math.Float64frombits(binary.LittleEndian.Uint64(t.Data[8*i:]))
	case Float16:
		return float64(float16.Frombits(t.Bits(i)).Float32())
	case BFloat16:
		return float64(math.Float32frombits(uint32(t.Bits(i)) << 16))
	}
	return float64(t.Int(i))
}

// Int returns element i of a tensor of integers or bools.
func (t *Tensor) Int(i int) int64 {
	switch t.Type {
	case Bool:
		return int64(t.Data[i])
	case Int8:
		return int64(int8(t.Data[i]))
	case Int32:
		return int64(int32(binary.LittleEndian.Uint32(t.Data[4*i:])))
	}
	return int64(binary.LittleEndian.Uint64(t.Data[8*i:]))
}

// Bits returns the bits of element i of a half type.
func (t *Tensor) Bits(i int) uint16 { return binary.LittleEndian.Uint16(t.Data[2*i:]) }
