package onnx

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"runtime/debug"
	"slices"
	"testing"

	"github.com/seed90331342/attn/cmd/attn-onnx/internal/onnxfile"
	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// damaged is a call of an operator with damage.
type damaged struct {
	*rand.Rand
	*onnxfile.NodeProto
	opset int64
	in    []*onnxfile.Tensor // by position
}

// drawDamaged draws a valid call of each operator in turn and damages it.
func drawDamaged(t *testing.T, seed uint64) *damaged {
	d := &damaged{Rand: rand.New(rand.NewPCG(seed, 41)), NodeProto: &onnxfile.NodeProto{}, opset: 1}
	switch seed % 10 {
	case 0:
		d.files(drawONNX(seed))
	case 1:
		if seed%20 == 1 {
			d.files(drawGroupQuery(seed, false))
		} else {
			d.files(drawWindowCache(seed, false))
		}
	case 2:
		d.files(drawMultiHead(seed))
	case 3:
		d.files(drawnCase(d.Rand, rotaryCases()))
	case 4:
		d.files(drawnCase(d.Rand, scatterCases()))
	case 5:
		d.files(drawnCase(d.Rand, linearCases()))
	case 6:
		d.files(drawnCase(d.Rand, convCases()))
	case 7:
		d.files(drawLinear(seed, true))
	case 8:
		d.files(drawPaged(seed))
	case 9:
		d.files(drawConv(seed, true))
	}
	s := schemas[qualified(d.Domain, d.OpType)]
	d.Output = s.outputs[:1+d.IntN(len(s.outputs))]
	for len(d.in) < len(s.inputs) {
		d.in = append(d.in, nil)
	}
	for range 1 + d.IntN(2) {
		if i := d.IntN(len(d.in) + 2); i >= len(d.in) {
			d.attribute()
		} else if d.in[i] != nil || d.IntN(8) == 0 {
			d.tensor(i)
		}
	}
	return d
}

// drawnCase returns one of the cases.
func drawnCase(rng *rand.Rand, cases map[string]*onnxFiles) *onnxFiles {
	return cases[slices.Sorted(maps.Keys(cases))[rng.IntN(len(cases))]]
}

// files takes a call from a case of the ONNX project.
func (d *damaged) files(c *onnxFiles) {
	d.Domain, d.OpType = c.name()
	d.opset, d.in = c.opset, slices.Clone(c.in)
	for name, x := range c.ints {
		d.Attribute = append(d.Attribute, &onnxfile.AttributeProto{Name: name, Type: onnxfile.AttributeProto_INT, I: x})
	}
	for name, x := range c.floats {
		d.Attribute = append(d.Attribute, &onnxfile.AttributeProto{Name: name, Type: onnxfile.AttributeProto_FLOAT, F: x})
	}
	for name, x := range c.texts {
		d.Attribute = append(d.Attribute, &onnxfile.AttributeProto{Name: name, Type: onnxfile.AttributeProto_STRING, S: []byte(x)})
	}
	slices.SortFunc(d.Attribute, func(a, b *onnxfile.AttributeProto) int { return cmp.Compare(a.Name, b.Name) })
}

// integer draws a number that is near to or far from those that a call may have.
func (d *damaged) integer() int64 {
	if d.IntN(2) == 0 {
		return d.Int64N(10) - 2
	}
	far := []int64{8, 16, 24, 1 << 16, math.MaxInt32, math.MaxInt32 + 1, math.MinInt32, math.MaxInt64, math.MaxInt64 - 1, math.MinInt64}
	return far[d.IntN(len(far))]
}

// float draws a number that a file can have.
func (d *damaged) float() float32 {
	list := []float32{0, -1, 1e-45, 1e-30, math.MaxFloat32, -math.MaxFloat32, float32(math.Inf(1)), float32(math.Inf(-1)), float32(math.NaN())}
	return list[d.IntN(len(list))]
}

// attribute adds, changes or removes an attribute.
func (d *damaged) attribute() {
	i := d.IntN(len(d.Attribute) + 1)
	if i == len(d.Attribute) {
		names := map[string][]string{
			"CausalConvWithState": {"activation"},
			"LinearAttention":     {"q_num_heads", "kv_num_heads", "chunk_size", "state_window"},
			"Attention":           {"q_num_heads", "kv_num_heads", "is_causal", "qk_matmul_output_mode", "left_window_size", "right_window_size"},
			"GroupQueryAttention": {"num_heads", "kv_num_heads", "local_window_size", "do_rotary", "rotary_interleaved", "smooth_softmax", "causal", "qk_output", "sliding_window_cache"},
			"MultiHeadAttention":  {"num_heads", "unidirectional"},
			"PagedAttention":      {"num_heads", "kv_num_heads", "local_window_size", "do_rotary", "rotary_offset", "v_head_size", "is_causal"},
			"RotaryEmbedding":     {"num_heads", "interleaved", "rotary_embedding_dim"},
			"TensorScatter":       {"axis"},
		}[d.OpType]
		name := names[d.IntN(len(names))]
		d.Attribute = slices.DeleteFunc(d.Attribute, func(x *onnxfile.AttributeProto) bool { return x.Name == name })
		d.Attribute = append(d.Attribute, &onnxfile.AttributeProto{Name: name, Type: onnxfile.AttributeProto_INT, I: d.integer()})
		return
	}
	x := d.Attribute[i]
	switch d.IntN(6) {
	case 0:
		d.Attribute = slices.Delete(d.Attribute, i, i+1)
	case 1:
		x.Type = onnxfile.AttributeProto_AttributeType(d.IntN(4))
	default:
		x.I, x.F = d.integer(), d.float()
	}
}

// tensor removes or replaces an input.
func (d *damaged) tensor(i int) {
	x := onnxfile.Tensor{Type: onnxfile.Float, Shape: []int{d.IntN(4)}}
	if d.in[i] != nil {
		x = *d.in[i]
	}
	shape := slices.Clone(x.Shape)
	axis := d.IntN(len(shape) + 1)
	switch what := d.IntN(12); {
	case what == 0:
		d.in[i] = nil
		return
	case what == 1: // that of another input
		if d.in[i] = d.in[d.IntN(len(d.in))]; d.in[i] == nil {
			return
		}
		x, shape = *d.in[i], d.in[i].Shape
	case what == 2:
		x.Type = []onnxfile.DataType{onnxfile.Float, onnxfile.Double, onnxfile.Float16, onnxfile.BFloat16, onnxfile.Bool, onnxfile.Int8, onnxfile.Int32, onnxfile.Int64}[d.IntN(8)]
	case what == 3 || axis == len(shape):
		shape = slices.Insert(shape, axis, d.IntN(3))
	case what == 4:
		shape = slices.Delete(shape, axis, axis+1)
	case what == 5 && axis > 0: // two axes become one
		shape[axis-1] *= shape[axis]
		shape = slices.Delete(shape, axis, axis+1)
	case what < 10:
		shape[axis] = []int{0, 1, shape[axis] + 1, 2 * shape[axis], shape[axis] / 2, d.IntN(9)}[d.IntN(6)]
	}
	// The elements are those of the input, as far as it has some, and one other.
	n := clitest.Elements(shape)
	if n > 1<<14 {
		return
	}
	data := make([]byte, n*x.Type.Size())
	copy(data, x.Data)
	if x.Type == onnxfile.Bool {
		for i := range data {
			data[i] &= 1
		}
	}
	if n > 0 && d.IntN(2) == 0 {
		other := appendNumber(nil, x.Type, float64(d.float()))
		if !x.Type.Float() && x.Type != onnxfile.Bool {
			other = binary.LittleEndian.AppendUint64(nil, uint64(d.integer()))[:x.Type.Size()]
		}
		copy(data[d.IntN(n)*x.Type.Size():], other)
	}
	d.in[i] = &onnxfile.Tensor{Name: x.Name, Type: x.Type, Shape: shape, Data: data}
}

// TestDamaged runs calls of every operator with one or two changes to an input or an
// attribute: each has outputs, with the elements of their shapes, or an error that wraps a
// sentinel. The fuzz targets seldom change a shape together with its elements.
func TestDamaged(t *testing.T) {
	dev := must.Get(kernels.Open("cpu"))(t)
	defer dev.Close()
	run := func(d *damaged) (out map[string]*onnxfile.Tensor, err error) {
		defer func() {
			if x := recover(); x != nil {
				err = fmt.Errorf("panic: %v\n%s", x, debug.Stack())
			}
		}()
		named := map[string]*onnxfile.Tensor{}
		for i, name := range schemas[qualified(d.Domain, d.OpType)].inputs {
			d.Input = append(d.Input, "")
			if d.in[i] != nil {
				d.Input[i], named[name] = name, d.in[i]
			}
		}
		n, err := newNode(&onnxfile.Model{Opsets: map[string]int64{d.Domain: d.opset}, Nodes: []*onnxfile.NodeProto{d.NodeProto}})
		if err == nil {
			out, _, err = n.run(t.Context(), dev, named)
		}
		return out, err
	}
	draws := 20_000
	if testing.Short() {
		draws = 2000
	}
	refused, ran := map[string]int{}, map[string]int{}
	for seed := range uint64(draws) {
		d := drawDamaged(t, seed)
		out, err := run(d)
		if wantKnown(t, err); t.Failed() {
			t.Fatalf("seed %d, %s %v", seed, d.OpType, d.Attribute)
		}
		if err != nil {
			refused[qualified(d.Domain, d.OpType)]++
			continue
		}
		ran[qualified(d.Domain, d.OpType)]++
		for name, x := range out {
			if x != nil && len(x.Data) != clitest.Elements(x.Shape)*x.Type.Size() {
				t.Fatalf("seed %d, %s: %s has shape %v of %v and %d bytes", seed, d.OpType, name, x.Shape, x.Type, len(x.Data))
			}
		}
	}
	for name := range schemas {
		if min(refused[name], ran[name]) < draws/100 {
			t.Errorf("%s: %d calls were refused and %d ran: too few of one kind", name, refused[name], ran[name])
		}
	}
}
