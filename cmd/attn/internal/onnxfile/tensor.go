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

// The element types that are decoded.
const (
	Float    DataType = 1
	Uint8    DataType = 2
	Int8     DataType = 3
	Uint16   DataType = 4
	Int16    DataType = 5
	Int32    DataType = 6
	Int64    DataType = 7
	Bool     DataType = 9
	Float16  DataType = 10
	Double   DataType = 11
	Uint32   DataType = 12
	Uint64   DataType = 13
	BFloat16 DataType = 16
)

// types says of each decoded type how it is called, how many bytes an element takes
// and in which field of the message numbers lie that are not raw.
var types = map[DataType]struct {
	name  string
	size  int
	field protowire.Number
}{
	Float: {"f32", 4, floatData}, Double: {"f64", 8, doubleData},
	Float16: {"f16", 2, int32Data}, BFloat16: {"bf16", 2, int32Data}, Bool: {"bool", 1, int32Data},
	Int8: {"int8", 1, int32Data}, Int16: {"int16", 2, int32Data}, Int32: {"int32", 4, int32Data}, Int64: {"int64", 8, int64Data},
	Uint8: {"uint8", 1, int32Data}, Uint16: {"uint16", 2, int32Data}, Uint32: {"uint32", 4, uint64Data}, Uint64: {"uint64", 8, uint64Data},
}

// The fields of a TensorProto that hold elements.
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

// Size returns the bytes that one element takes; 0 for a type that is not decoded.
func (d DataType) Size() int { return types[d].size }

// Tensor is an array. Data holds the elements row by row, little endian, whichever
// field of the message they came in; its length is that of the shape.
type Tensor struct {
	Name  string
	Type  DataType
	Shape []int
	Data  []byte
}

// DecodeTensor decodes a TensorProto. Data may alias the argument.
func DecodeTensor(data []byte) (*Tensor, error) {
	t := &Tensor{}
	external := false
	var from protowire.Number // the field that elements came in
	var elements []field
	err := each("tensor", data, func(f field) (err error) {
		switch f.number {
		case 1:
			return f.varints(func(v uint64) error {
				if v > math.MaxInt32 {
					return fmt.Errorf("tensor: its length along axis %d is %d: %w", len(t.Shape), int64(v), ErrMalformed)
				}
				t.Shape = append(t.Shape, int(v))
				return nil
			})
		case 2:
			var d int64
			d, err = f.int()
			t.Type = DataType(d)
		case 8:
			t.Name, err = f.text()
		case 14:
			var where int64
			where, err = f.int()
			external = where != 0
		case floatData, int32Data, stringData, int64Data, rawData, doubleData, uint64Data:
			if from != 0 && from != f.number {
				return fmt.Errorf("tensor: it has elements in fields %d and %d: %w", from, f.number, ErrMalformed)
			}
			from = f.number
			elements = append(elements, f)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	if external {
		return nil, fmt.Errorf("tensor %q: its data lies in another file: %w", t.Name, ErrUnsupported)
	}
	if err := t.fill(from, elements); err != nil {
		return nil, fmt.Errorf("tensor %q: %w", t.Name, err)
	}
	return t, nil
}

// fill sets Data from the fields that hold elements.
func (t *Tensor) fill(from protowire.Number, elements []field) error {
	kind, ok := types[t.Type]
	switch {
	case t.Type == 0:
		return fmt.Errorf("it has no element type: %w", ErrMalformed)
	case !ok:
		return fmt.Errorf("elements of %v: %w", t.Type, ErrUnsupported)
	case from != 0 && from != rawData && from != kind.field:
		return fmt.Errorf("elements of %v cannot lie in field %d: %w", t.Type, from, ErrMalformed)
	}
	for _, f := range elements {
		var err error
		switch {
		case from == rawData:
			err = f.message(func(b []byte) error { t.Data = b; return nil }) // as for any field that may occur once, the last one counts
		case from == floatData || from == doubleData:
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

// appendInt appends an element that lies in an integer field, where a number of 16
// bits lies as its bits.
func (t *Tensor) appendInt(v uint64) error {
	fits := true
	switch t.Type {
	case Bool:
		fits = v <= 1
	case Uint8:
		fits = v <= math.MaxUint8
	case Uint16, Float16, BFloat16:
		fits = v <= math.MaxUint16
	case Uint32:
		fits = v <= math.MaxUint32
	case Int8:
		fits = int64(v) == int64(int8(v))
	case Int16:
		fits = int64(v) == int64(int16(v))
	case Int32:
		fits = int64(v) == int64(int32(v))
	}
	if !fits {
		return fmt.Errorf("element %d is %d, no %v: %w", len(t.Data)/t.Type.Size(), int64(v), t.Type, ErrMalformed)
	}
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], v)
	t.Data = append(t.Data, b[:t.Type.Size()]...)
	return nil
}

// Elements returns how many there are.
func (t *Tensor) Elements() int { return len(t.Data) / t.Type.Size() }

// At returns element i as the nearest float64, for any type; true is 1. (Only
// integers beyond 2^53 are not exact.)
func (t *Tensor) At(i int) float64 {
	size := t.Type.Size()
	b := t.Data[i*size:][:size]
	switch t.Type {
	case Float:
		return float64(math.Float32frombits(binary.LittleEndian.Uint32(b)))
	case Double:
		return math.Float64frombits(binary.LittleEndian.Uint64(b))
	case Float16:
		return float64(float16.Frombits(binary.LittleEndian.Uint16(b)).Float32())
	case BFloat16:
		return float64(math.Float32frombits(uint32(binary.LittleEndian.Uint16(b)) << 16))
	case Uint64:
		return float64(binary.LittleEndian.Uint64(b))
	}
	return float64(t.Int(i))
}

// Int returns element i of a tensor of integers (below 2^63) or bools.
func (t *Tensor) Int(i int) int64 {
	size := t.Type.Size()
	b := t.Data[i*size:][:size]
	switch t.Type {
	case Bool, Uint8:
		return int64(b[0])
	case Int8:
		return int64(int8(b[0]))
	case Int16:
		return int64(int16(binary.LittleEndian.Uint16(b)))
	case Uint16:
		return int64(binary.LittleEndian.Uint16(b))
	case Int32:
		return int64(int32(binary.LittleEndian.Uint32(b)))
	case Uint32:
		return int64(binary.LittleEndian.Uint32(b))
	}
	return int64(binary.LittleEndian.Uint64(b))
}

// Bits returns element i of a tensor of two-byte elements as it lies in memory.
func (t *Tensor) Bits(i int) uint16 { return binary.LittleEndian.Uint16(t.Data[2*i:]) }
