package onnxfile

import (
	"fmt"

	"google.golang.org/protobuf/encoding/protowire"
)

const fixed32 = protowire.Fixed32Type

// field is one field of a message, as it lies on the wire.
type field struct {
	in     string // the message, for errors
	number protowire.Number
	wire   protowire.Type
	bits   uint64 // of a varint or of a number of 32 or 64 bits
	bytes  []byte // of what has a length; it aliases the input
}

// each hands the fields of a message to f, in their order. message names it in
// errors.
func each(message string, b []byte, f func(field) error) error {
	for at := 0; at < len(b); {
		number, wire, n := protowire.ConsumeTag(b[at:])
		if n < 0 {
			return cut(message, at, len(b), n)
		}
		at += n
		fd := field{in: message, number: number, wire: wire}
		rest := b[at:]
		switch wire {
		case protowire.VarintType:
			fd.bits, n = protowire.ConsumeVarint(rest)
		case protowire.Fixed32Type:
			var v uint32
			v, n = protowire.ConsumeFixed32(rest)
			fd.bits = uint64(v)
		case protowire.Fixed64Type:
			fd.bits, n = protowire.ConsumeFixed64(rest)
		case protowire.BytesType:
			fd.bytes, n = protowire.ConsumeBytes(rest)
		default: // a group, which the schema has none of
			n = protowire.ConsumeFieldValue(number, wire, rest)
		}
		if n < 0 {
			return cut(message, at, len(b), n)
		}
		at += n
		if err := f(fd); err != nil {
			return err
		}
	}
	return nil
}

// cut reports a message that ends in a field, or where no field can start.
func cut(message string, at, length, n int) error {
	return fmt.Errorf("%s: byte %d of %d: %w: %w", message, at, length, protowire.ParseError(n), ErrMalformed)
}

func (f field) wrongWire() error {
	return fmt.Errorf("%s: field %d has wire type %d: %w", f.in, f.number, f.wire, ErrMalformed)
}

func (f field) text() (string, error) {
	if f.wire != protowire.BytesType {
		return "", f.wrongWire()
	}
	return string(f.bytes), nil
}

func (f field) int() (int64, error) {
	if f.wire != protowire.VarintType {
		return 0, f.wrongWire()
	}
	return int64(f.bits), nil
}

// message hands an embedded message to its decoder.
func (f field) message(decode func([]byte) error) error {
	if f.wire != protowire.BytesType {
		return f.wrongWire()
	}
	return decode(f.bytes)
}

// varints hands the numbers of a repeated field to f: one, or many where they are
// packed.
func (f field) varints(each func(v uint64) error) error {
	switch f.wire {
	case protowire.VarintType:
		return each(f.bits)
	case protowire.BytesType:
		for b := f.bytes; len(b) > 0; {
			v, n := protowire.ConsumeVarint(b)
			if n < 0 {
				return cut(fmt.Sprintf("%s: field %d", f.in, f.number), len(f.bytes)-len(b), len(f.bytes), n)
			}
			if err := each(v); err != nil {
				return err
			}
			b = b[n:]
		}
		return nil
	}
	return f.wrongWire()
}

// fixed appends the little-endian bytes of the numbers of a repeated field of size
// bytes each: one, or many where they are packed.
func (f field) fixed(data []byte, size int) ([]byte, error) {
	one := map[int]protowire.Type{4: protowire.Fixed32Type, 8: protowire.Fixed64Type}[size]
	switch {
	case f.wire == one && size == 4:
		return protowire.AppendFixed32(data, uint32(f.bits)), nil
	case f.wire == one:
		return protowire.AppendFixed64(data, f.bits), nil
	case f.wire != protowire.BytesType:
		return data, f.wrongWire()
	case len(f.bytes)%size != 0:
		return data, fmt.Errorf("%s: field %d has %d bytes of numbers of %d bytes: %w", f.in, f.number, len(f.bytes), size, ErrMalformed)
	}
	return append(data, f.bytes...), nil
}
