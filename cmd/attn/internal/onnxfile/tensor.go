package onnxfile

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/x448/float16"
	"google.golang.org/protobuf/encoding/protowire"
)

// DataType is the element type of a tensor, numbered as in the schema.
type DataType int32

// The decoded element types: those of the operator Attention.
const (
	Float    DataType = 1
	Int64    DataType = 7
	Bool     DataType = 9
	Float16  DataType = 10
	Double   DataType = 11
	BFloat16 DataType = 16
)

// types has the name, the size in bytes and the field of the message for elements
// that are not raw.
var types = map[DataType]struct {
	name  string
	size  int
	field protowire.Number
}{
	Float: {"f32", 4, floatData}, Double: {"f64", 8, doubleData}, Float16: {"f16", 2, int32Data}, BFloat16: {"bf16", 2, int32Data},
	Bool: {"bool", 1, int32Data}, Int64: {"int64", 8, int64Data},
}

// The fields of a TensorProto with elements.
const (
	floatData  protowire.Number = 4
	int32Data  protowire.Number = 5
	stringData protowire.Number = 6
	int64Data  protowire.Number = 7
	rawData    protowire.Number = 9
	doubleData protowire.Number = 10
	uint64Data protowire.Number = 11
)

// String returns a short name: f32, f16, bf16, f64, bool, int64.
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

// DecodeTensor decodes a TensorProto. Data may alias the argument.
func DecodeTensor(data []byte) (*Tensor, error) {
	t := &Tensor{}
	return t, t.decode(data)
}

func (t *Tensor) decode(data []byte) error {
	var location int64
	var elements []field
	fs := fields{
		1: func(f field) error {
			return f.varints(func(v uint64) error {
				if v > math.MaxInt32 {
					return fmt.Errorf("tensor: its length along axis %d is %d: %w", len(t.Shape), int64(v), ErrMalformed)
				}
				t.Shape = append(t.Shape, int(v))
				return nil
			})
		},
		2: integer(&t.Type), 8: text(&t.Name), 14: integer(&location),
	}
	for _, n := range []protowire.Number{floatData, int32Data, stringData, int64Data, rawData, doubleData, uint64Data} {
		fs[n] = func(f field) error {
			if len(elements) > 0 && elements[0].number != n {
				return fmt.Errorf("tensor: it has elements in fields %d and %d: %w", elements[0].number, n, ErrMalformed)
			}
			elements = append(elements, f)
			return nil
		}
	}
	if err := fs.decode("tensor", data); err != nil {
		return err
	}
	if location != 0 {
		return fmt.Errorf("tensor %q: its data lies in another file: %w", t.Name, ErrUnsupported)
	}
	if err := t.fill(elements); err != nil {
		return fmt.Errorf("tensor %q: %w", t.Name, err)
	}
	return nil
}

// fill sets Data from the fields with elements.
func (t *Tensor) fill(elements []field) error {
	kind, ok := types[t.Type]
	switch {
	case t.Type == 0:
		return fmt.Errorf("it has no element type: %w", ErrMalformed)
	case !ok:
		return fmt.Errorf("elements of %v: %w", t.Type, ErrUnsupported)
	}
	for _, f := range elements {
		var err error
		switch {
		case f.number == rawData:
			t.Data = f.bytes // the last field counts, as for any field that is not repeated
			err = f.must(protowire.BytesType)
		case f.number != kind.field:
			err = fmt.Errorf("elements of %v cannot lie in field %d: %w", t.Type, f.number, ErrMalformed)
		case f.number == floatData || f.number == doubleData:
			t.Data, err = f.fixed(t.Data, kind.size)
		default:
			err = f.varints(t.appendInt)
		}
		if err != nil {
			return err
		}
	}
	want := uint64(kind.size)
	for _, l := range t.Shape {
		if l > 0 && want > math.MaxInt64/uint64(l) {
			return fmt.Errorf("shape %v is too large: %w", t.Shape, ErrMalformed)
		}
		want *= uint64(l)
	}
	if uint64(len(t.Data)) != want {
		return fmt.Errorf("shape %v of %v needs %d bytes, there are %d (cut short?): %w", t.Shape, t.Type, want, len(t.Data), ErrMalformed)
	}
	return nil
}

// appendInt appends an element of an integer field, which has the bits of f16 and bf16.
func (t *Tensor) appendInt(v uint64) error {
	size := t.Type.Size()
	if limit := map[int]uint64{1: 1, 2: math.MaxUint16, 8: math.MaxUint64}[size]; v > limit {
		return fmt.Errorf("element %d is %d, not a %v: %w", len(t.Data)/size, int64(v), t.Type, ErrMalformed)
	}
	t.Data = append(t.Data, binary.LittleEndian.AppendUint64(nil, v)[:size]...)
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
	if t.Type == Bool {
		return int64(t.Data[i])
	}
	return int64(binary.LittleEndian.Uint64(t.Data[8*i:]))
}

// Bits returns the bits of element i of a half type.
func (t *Tensor) Bits(i int) uint16 { return binary.LittleEndian.Uint16(t.Data[2*i:]) }
