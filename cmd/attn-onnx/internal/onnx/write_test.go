package onnx

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/seed90331342/attn/backend/oracle"
	"github.com/seed90331342/attn/cmd/attn-onnx/internal/onnxfile"
	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// onnxFiles is a case to write: an operator with values of its inputs and outputs;
// nil for missing ones.
type onnxFiles struct {
	operator string // qualified; "" is Attention
	producer string // the name of the program that wrote the model
	opset    int64
	ints     map[string]int64
	floats   map[string]float32
	texts    map[string]string
	in, want []*onnxfile.Tensor
	elements [][]oracle.Element // of want, with error bounds; nil in published and damaged cases
	constant int                // this input, when not 0, comes with the model
}

// name returns the domain and the name of the operator.
func (c *onnxFiles) name() (domain, operator string) {
	if name, ok := strings.CutPrefix(c.operator, microsoft+"."); ok {
		return microsoft, name
	}
	return "", cmp.Or(c.operator, "Attention")
}

// write writes the folder of a case.
func (c *onnxFiles) write(t *testing.T, dir string) string {
	t.Helper()
	set := filepath.Join(dir, "test_data_set_0")
	must.Do(t, os.MkdirAll(set, 0o755))
	var node, graph []byte
	put := func(b *[]byte, number protowire.Number, v []byte) {
		*b = protowire.AppendBytes(protowire.AppendTag(*b, number, protowire.BytesType), v)
	}
	varint := func(b *[]byte, number protowire.Number, v int64) {
		*b = protowire.AppendVarint(protowire.AppendTag(*b, number, protowire.VarintType), uint64(v))
	}
	tensors := func(kind string, number, graphNumber protowire.Number, names []string, list []*onnxfile.Tensor) {
		files := 0
		for i, x := range list {
			if x == nil {
				put(&node, number, nil)
				continue
			}
			put(&node, number, []byte(names[i]))
			named := *x
			named.Name = names[i]
			if kind == "input" && i == c.constant && i > 0 {
				put(&graph, 5, tensorFile(&named))
				continue
			}
			var value []byte
			put(&value, 1, []byte(names[i]))
			put(&graph, graphNumber, value)
			clitest.WriteFile(t, set, fmt.Sprintf("%s_%d.pb", kind, files), tensorFile(&named))
			files++
		}
	}
	domain, operator := c.name()
	schema := schemas[qualified(domain, operator)]
	tensors("input", 1, 11, schema.inputs, c.in)
	tensors("output", 2, 12, schema.outputs, c.want)
	put(&node, 4, []byte(operator))
	for _, name := range slices.Sorted(maps.Keys(c.ints)) {
		var a []byte
		put(&a, 1, []byte(name))
		varint(&a, 3, c.ints[name])
		varint(&a, 20, 2)
		put(&node, 5, a)
	}
	for _, name := range slices.Sorted(maps.Keys(c.floats)) {
		var a []byte
		put(&a, 1, []byte(name))
		a = protowire.AppendFixed32(protowire.AppendTag(a, 2, protowire.Fixed32Type), math.Float32bits(c.floats[name]))
		varint(&a, 20, 1)
		put(&node, 5, a)
	}
	for _, name := range slices.Sorted(maps.Keys(c.texts)) {
		var a []byte
		put(&a, 1, []byte(name))
		put(&a, 4, []byte(c.texts[name]))
		varint(&a, 20, 3)
		put(&node, 5, a)
	}
	var model, opset []byte
	if domain != "" {
		put(&node, 7, []byte(domain))
		put(&opset, 1, []byte(domain))
	}
	put(&graph, 1, node)
	if c.producer != "" {
		put(&model, 2, []byte(c.producer))
	}
	put(&model, 7, graph)
	varint(&opset, 2, c.opset)
	put(&model, 8, opset)
	clitest.WriteFile(t, dir, "model.onnx", model)
	return dir
}

// tensorFile encodes a tensor with raw data.
func tensorFile(x *onnxfile.Tensor) []byte {
	var b []byte
	for _, l := range x.Shape {
		b = protowire.AppendVarint(protowire.AppendTag(b, 1, protowire.VarintType), uint64(l))
	}
	b = protowire.AppendVarint(protowire.AppendTag(b, 2, protowire.VarintType), uint64(x.Type))
	b = protowire.AppendBytes(protowire.AppendTag(b, 8, protowire.BytesType), []byte(x.Name))
	return protowire.AppendBytes(protowire.AppendTag(b, 9, protowire.BytesType), x.Data)
}
