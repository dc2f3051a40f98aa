package onnxfile

import (
	"bytes"
	"fmt"
	"runtime"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

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
