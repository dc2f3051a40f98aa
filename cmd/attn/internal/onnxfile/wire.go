package onnxfile

import (
	"fmt"
	"math"

	"google.golang.org/protobuf/encoding/protowire"
)

// field is one field of a message on the wire.
type field struct {
	in     string // the message, for errors
	number protowire.Number
	wire   protowire.Type
	bits   uint64 // of a number
	bytes  []byte // of a field with a length; aliases the input
}

// fields decode the fields of a message by number. Other fields are skipped.
type fields map[protowire.Number]func(f field) error

// decode decodes a message. name is for errors.
func (fs fields) decode(name string, b []byte) error {
	for at := 0; at < len(b); {
		number, wire, n := protowire.ConsumeTag(b[at:])
		if n < 0 {
			return parseError(name, at, len(b), n)
		}
		at += n
		f := field{in: name, number: number, wire: wire}
		rest := b[at:]
		switch wire {
		case protowire.VarintType:
			f.bits, n = protowire.ConsumeVarint(rest)
		case protowire.Fixed32Type:
			var v uint32
			v, n = protowire.ConsumeFixed32(rest)
			f.bits = uint64(v)
		case protowire.Fixed64Type:
			f.bits, n = protowire.ConsumeFixed64(rest)
		case protowire.BytesType:
			f.bytes, n = protowire.ConsumeBytes(rest)
		default: // a group, which the schema does not have
			n = protowire.ConsumeFieldValue(number, wire, rest)
		}
		if n < 0 {
			return parseError(name, at, len(b), n)
		}
		at += n
		if set := fs[number]; set != nil {
			if err := set(f); err != nil {
				return err
			}
		}
	}
	return nil
}

// parseError reports a message that ends inside a field, or bytes that are no field.
func parseError(message string, at, length, n int) error {
	return fmt.Errorf("%s: byte %d of %d: %w: %w", message, at, length, protowire.ParseError(n), ErrMalformed)
}

// must returns an error unless the field has the given wire type.
func (f field) must(wire protowire.Type) error {
	if f.wire != wire {
		return fmt.Errorf("%s: field %d has wire type %d: %w", f.in, f.number, f.wire, ErrMalformed)
	}
	return nil
}

// The functions below return decoders of a field.

func text(to *string) func(field) error {
	return func(f field) error {
		*to = string(f.bytes)
		return f.must(protowire.BytesType)
	}
}

func texts(to *[]string) func(field) error {
	return func(f field) error {
		*to = append(*to, string(f.bytes))
		return f.must(protowire.BytesType)
	}
}

func integer[T ~int32 | ~int64](to *T) func(field) error {
	return func(f field) error {
		*to = T(f.bits)
		return f.must(protowire.VarintType)
	}
}

func float(to *float32) func(field) error {
	return func(f field) error {
		*to = math.Float32frombits(uint32(f.bits))
		return f.must(protowire.Fixed32Type)
	}
}

func message(decode func([]byte) error) func(field) error {
	return func(f field) error {
		if err := f.must(protowire.BytesType); err != nil {
			return err
		}
		return decode(f.bytes)
	}
}

func messages[T any](to *[]T, decode func(*T, []byte) error) func(field) error {
	return message(func(data []byte) error {
		var x T
		err := decode(&x, data)
		*to = append(*to, x)
		return err
	})
}

// varints calls each with the numbers of a repeated field: one, or many if it is packed.
func (f field) varints(each func(v uint64) error) error {
	if f.wire == protowire.VarintType {
		return each(f.bits)
	}
	for b := f.bytes; len(b) > 0; {
		v, n := protowire.ConsumeVarint(b)
		if n < 0 {
			return parseError(fmt.Sprintf("%s: field %d", f.in, f.number), len(f.bytes)-len(b), len(f.bytes), n)
		}
		if err := each(v); err != nil {
			return err
		}
		b = b[n:]
	}
	return f.must(protowire.BytesType)
}

// fixed appends the little-endian bytes of the numbers of a repeated field: one, or
// many if it is packed.
func (f field) fixed(data []byte, size int) ([]byte, error) {
	one := map[int]protowire.Type{4: protowire.Fixed32Type, 8: protowire.Fixed64Type}[size]
	switch {
	case f.wire == one && size == 4:
		return protowire.AppendFixed32(data, uint32(f.bits)), nil
	case f.wire == one:
		return protowire.AppendFixed64(data, f.bits), nil
	case len(f.bytes)%size != 0:
		return data, fmt.Errorf("%s: field %d has %d bytes of numbers of %d bytes: %w", f.in, f.number, len(f.bytes), size, ErrMalformed)
	}
	return append(data, f.bytes...), f.must(protowire.BytesType)
}
