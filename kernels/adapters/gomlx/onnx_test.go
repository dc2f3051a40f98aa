package gomlx_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/gomlx/compute"
	. "github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/core/tensors"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/onnx-gomlx/onnx/parser"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
	attngomlx "github.com/seed90331342/attn/kernels/adapters/gomlx"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// message is a protocol buffer as it is written: the fields of ModelProto and of those below it.
type message []byte

func (m message) bytes(field protowire.Number, v []byte) message {
	return protowire.AppendBytes(protowire.AppendTag(m, field, protowire.BytesType), v)
}

func (m message) text(field protowire.Number, v string) message { return m.bytes(field, []byte(v)) }

func (m message) int(field protowire.Number, v int) message {
	return protowire.AppendVarint(protowire.AppendTag(m, field, protowire.VarintType), uint64(v))
}

// tensor returns a TensorProto with raw data.
func tensor(name string, dtype int, data []byte, dims ...int) (t message) {
	for _, d := range dims {
		t = t.int(1, d)
	}
	return t.int(2, dtype).text(8, name).bytes(9, data)
}

// value returns the ValueInfoProto of an input or output.
func value(name string, dtype int, dims ...int) message {
	var shape message
	for _, d := range dims {
		shape = shape.bytes(1, message(nil).int(1, d))
	}
	return message(nil).text(1, name).bytes(2, message(nil).bytes(1, message(nil).int(1, dtype).bytes(2, shape)))
}

// node returns a NodeProto with attributes of type INT.
func node(domain, operator, output string, attributes map[string]int, inputs ...string) (n message) {
	for _, name := range inputs {
		n = n.text(1, name)
	}
	n = n.text(2, output).text(4, operator).text(7, domain)
	for name, i := range attributes {
		n = n.bytes(5, message(nil).text(1, name).int(3, i).int(20, 2))
	}
	return n
}

// onnx writes the attention layers of m as an ONNX model of the types of T. A layer adds to x
// [batch, seq, width] the output of MatMul, GroupQueryAttention (com.microsoft) and MatMul.
func onnx[T float32 | float64](m transformer) []byte {
	dtype, rng := 1, rand.New(rand.NewPCG(1, 2)) // FLOAT
	if _, ok := any(T(0)).(float64); ok {
		dtype = 11 // DOUBLE
	}
	var graph message
	var last []byte
	for range m.batch {
		last = protowire.AppendFixed32(last, uint32(m.seq-1))
	}
	graph = graph.bytes(5, tensor("last", 6, last, m.batch)).bytes(5, tensor("total", 6, protowire.AppendFixed32(nil, uint32(m.seq)))) // INT32
	product := func(x, y string, in, out int) {
		var data []byte
		for range in * out {
			w := float32(rng.NormFloat64() / math.Sqrt(float64(in)))
			if dtype == 1 {
				data = protowire.AppendFixed32(data, math.Float32bits(w))
			} else {
				data = protowire.AppendFixed64(data, math.Float64bits(float64(w)))
			}
		}
		graph = graph.bytes(5, tensor("w"+y, dtype, data, in, out)).bytes(1, node("", "MatMul", y, nil, x, "w"+y))
	}
	x, w, kv := "x0", m.width(), m.kvHeads*m.headDim
	for i := range m.layers {
		name := func(s string) string { return fmt.Sprint(s, i+1) }
		product(x, name("q"), w, w)
		product(x, name("k"), w, kv)
		product(x, name("v"), w, kv)
		graph = graph.bytes(1, node("com.microsoft", "GroupQueryAttention", name("o"), map[string]int{"num_heads": m.heads, "kv_num_heads": m.kvHeads},
			name("q"), name("k"), name("v"), "", "", "last", "total"))
		product(name("o"), name("p"), w, w)
		graph = graph.bytes(1, node("", "Add", name("x"), nil, x, name("p")))
		x = name("x")
	}
	graph = graph.text(2, "layers").bytes(11, value("x0", dtype, m.batch, m.seq, w)).bytes(12, value(x, dtype, m.batch, m.seq, w))
	return message(nil).int(1, 8).bytes(7, graph).bytes(8, message(nil).int(2, 21)).
		bytes(8, message(nil).text(1, "com.microsoft").int(2, 1))
}

// imported returns the layers of m, which onnx-gomlx reads, with an input of random numbers.
func imported[T float32 | float64](t testing.TB, b compute.Backend, m transformer) (*model.Exec, *tensors.Tensor) {
	program, store := must.Get(parser.Parse(onnx[T](m)))(t), model.NewStore()
	must.Do(t, program.VariablesToScope(store.RootScope()))
	x, rng := make([]T, m.batch*m.seq*m.width()), rand.New(rand.NewPCG(3, 4))
	for i := range x {
		x[i] = T(float32(rng.NormFloat64()))
	}
	return model.MustNewExec(b, store, func(scope *model.Scope, x *Node) *Node {
		return program.CallGraph(scope, x.Graph(), map[string]*Node{"x0": x})[0]
	}), tensors.FromFlatDataAndDimensions(x, m.batch, m.seq, m.width())
}

// TestONNX compares an ONNX model of two layers in float32, on gomlx's Go backend and with attn, with
// the same in float64. An output passes four sums a layer, each with at most 32 roundings of u = 2^-24.
// Independent ones add up to sqrt(2·4·32)·u = 2^-20 of the largest element. attn computes both layers.
func TestONNX(t *testing.T) {
	m := transformer{layers: 2, heads: 4, kvHeads: 2, headDim: 8, seq: 24, batch: 2}
	reference, x := imported[float64](t, own(t), m)
	want := numbers(reference.MustCall(x)[0])
	dev := must.Get(kernels.Open("cpu"))(t)
	defer dev.Close()
	count := &counter{Backend: dev.Backend(), Differentiator: dev.Backend().(backend.Differentiator)}
	for name, b := range map[string]compute.Backend{
		"gomlx": own(t), "attn": must.Get(attngomlx.New(kernels.NewDevice(count), sequential))(t),
	} {
		exec, x := imported[float32](t, b, m)
		largest, most := 0.0, 0.0
		for i, got := range numbers(exec.MustCall(x)[0]) {
			largest, most = max(largest, math.Abs(want[i])), max(most, math.Abs(want[i]-got))
		}
		if !(most <= largest*0x1p-20) {
			t.Errorf("%s is off by %g, the largest element is %g", name, most, largest)
		}
	}
	if count.forward != m.layers {
		t.Errorf("attn ran %d calls for %d layers", count.forward, m.layers)
	}
}
