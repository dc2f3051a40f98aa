package onnxfile

import (
	"bytes"
	"errors"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
)

// TestManyNodes: empty nodes take 2 bytes of a file each, and hundreds of bytes of memory.
func TestManyNodes(t *testing.T) {
	nodes := bytes.Repeat([]byte{1<<3 | 2, 0}, maxMessages+1)
	model := protowire.AppendBytes(protowire.AppendTag(nil, 7, protowire.BytesType), nodes)
	if _, err := DecodeModel(model); !errors.Is(err, ErrUnsupported) {
		t.Errorf("%d nodes: %v", maxMessages+1, err)
	}
}
