package onnx

import (
	"math"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend/oracle"
	"github.com/seed90331342/attn/cmd/attn-onnx/internal/onnxfile"
	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
)

// onnxProblem is a call of the operator with the expected outputs: the formula of the
// specification in float64, element by element.
type onnxProblem struct {
	onnxFiles
	batch, heads, kvHeads, seqQ, seqK, past, dim, valueDim int
	flat, causal                                           bool
	scale, softcap                                         float64
	left, right                                            int // of opset 25; -1 is unbounded
}

// keys returns the number of keys, past and new.
func (p *onnxProblem) keys() int { return p.past + p.seqK }

// row returns the index of element 0 of one (batch, head, position) in a tensor of Q, K or V.
func (p *onnxProblem) row(b, h, s, heads, seq, size int) int {
	if p.flat {
		return ((b*seq+s)*heads + h) * size
	}
	return ((b*heads+h)*seq + s) * size
}

// key returns element e of key j, a past one or a new one; of a value, with inV.
func (p *onnxProblem) key(in, b, h, j, size, e int) oracle.Element {
	if j < p.past {
		return elementOf(p.in[inPastKey+in-inK], ((b*p.kvHeads+h)*p.past+j)*size+e)
	}
	return elementOf(p.in[in], p.row(b, h, j-p.past, p.kvHeads, p.seqK, size)+e)
}

// cache returns all keys of a head, or values.
func (p *onnxProblem) cache(in, b, h, size int) (list []oracle.Element) {
	for j := range p.keys() {
		for e := range size {
			list = append(list, p.key(in, b, h, j, size, e))
		}
	}
	return list
}

// bias returns the term added to a score: the mask, aligned at the last axis, and -Inf for hidden keys.
func (p *onnxProblem) bias(b, h, i, j int) oracle.Element {
	hidden := oracle.Element{Value: math.Inf(-1)}
	at := i + p.past // the position of the query
	if lens := p.in[inNonpad]; lens != nil {
		n := int(lens.Int(b))
		if at = i + n - p.seqQ; j >= n {
			return hidden
		}
	}
	if p.causal && j > at || p.opset >= 25 && (p.left >= 0 && j < at-p.left || p.right >= 0 && j > at+p.right) {
		return hidden
	}
	mask := p.in[inMask]
	if mask == nil {
		return oracle.Element{}
	}
	element, axes := 0, len(mask.Shape)
	for axis, x := range []int{b, h, i, j}[4-axes:] {
		l := mask.Shape[axis]
		if l == 1 && (axis < axes-1 || p.opset == 23) {
			x = 0
		}
		if x >= l {
			return hidden // only along the keys
		}
		element = element*l + x
	}
	switch {
	case mask.Type != onnxfile.Bool:
		return elementOf(mask, element)
	case mask.Int(element) == 0:
		return hidden
	}
	return oracle.Element{}
}

// solve fills want, except outputs that are nil.
func (p *onnxProblem) solve(mode int, wanted [numOutputs]bool) {
	typ := p.in[inQ].Type
	shape := []int{p.batch, p.heads, p.seqQ, p.valueDim}
	if p.flat {
		shape = []int{p.batch, p.seqQ, p.heads * p.valueDim}
	}
	y := make([]oracle.Element, p.batch*p.heads*p.seqQ*p.valueDim)
	var scores, pk, pv []oracle.Element
	for b := range p.batch {
		for h := range p.heads {
			kv := h * p.kvHeads / p.heads
			for i := range p.seqQ {
				row := attendedRow{k: p.cache(inK, b, kv, p.dim), v: p.cache(inV, b, kv, p.valueDim), scale: p.scale, softcap: p.softcap, sink: math.Inf(-1)}
				for e := range p.dim {
					row.q = append(row.q, elementOf(p.in[inQ], p.row(b, h, i, p.heads, p.seqQ, p.dim)+e))
				}
				for j := range p.keys() {
					row.bias = append(row.bias, p.bias(b, h, i, j))
				}
				o, points := row.solve()
				copy(y[p.row(b, h, i, p.heads, p.seqQ, p.valueDim):], o)
				scores = append(scores, points[mode]...)
			}
		}
		for h := range p.kvHeads {
			pk, pv = append(pk, p.cache(inK, b, h, p.dim)...), append(pv, p.cache(inV, b, h, p.valueDim)...)
		}
	}
	for _, list := range [][]oracle.Element{pk, pv} {
		for i := range list {
			list[i].Err = 0 // a copy, of f64 too
		}
	}
	p.want, p.elements = nil, nil
	p.expect(typ, y, shape...)
	p.expect(typ, pk, p.batch, p.kvHeads, p.keys(), p.dim)
	p.expect(p.in[inV].Type, pv, p.batch, p.kvHeads, p.keys(), p.valueDim)
	p.expect(typ, scores, p.batch, p.heads, p.seqQ, p.keys())
	for i, w := range wanted {
		if !w {
			p.want[i] = nil
		}
	}
	for len(p.want) > 1 && p.want[len(p.want)-1] == nil {
		p.want = p.want[:len(p.want)-1]
	}
}

// filled returns a tensor of data, rounded to the type.
func filled(d onnxfile.DataType, data []float64, shape ...int) *onnxfile.Tensor {
	x := &onnxfile.Tensor{Type: d, Shape: shape}
	for _, v := range data {
		x.Data = appendNumber(x.Data, d, v)
	}
	return x
}

// uniform draws numbers from lo to 1.
func uniform(rng *rand.Rand, d onnxfile.DataType, lo float64, shape ...int) *onnxfile.Tensor {
	data := make([]float64, clitest.Elements(shape))
	for i := range data {
		data[i] = lo + (1-lo)*rng.Float64()
	}
	return filled(d, data, shape...)
}

// drawMask draws a mask of 1 to 4 axes, each broadcast or not, that may be short.
func (p *onnxProblem) drawMask(rng *rand.Rand) *onnxfile.Tensor {
	full := []int{p.batch, p.heads, p.seqQ, p.keys()}
	shape := slices.Clone(full[rng.IntN(4):])
	for i := range shape {
		if last := i == len(shape)-1; rng.IntN(3) == 0 && (!last || p.opset == 23) {
			shape[i] = 1
		} else if last && p.opset >= 24 && rng.IntN(2) == 0 {
			shape[i] = 1 + rng.IntN(shape[i])
		}
	}
	x := uniform(rng, []onnxfile.DataType{p.in[inQ].Type, p.in[inQ].Type, onnxfile.Bool, onnxfile.Bool, onnxfile.Float}[rng.IntN(5)], -1, shape...)
	size := x.Type.Size()
	for i := range x.Elements() {
		if rng.IntN(3) == 0 { // hidden
			copy(x.Data[i*size:], appendNumber(nil, x.Type, math.Inf(-1)))
		}
	}
	return x
}

// drawONNX draws a problem with any combination of options.
func drawONNX(seed uint64) *onnxFiles {
	rng := rand.New(rand.NewPCG(seed, 23))
	flip := func() bool { return rng.IntN(2) == 0 }
	p := &onnxProblem{
		batch: 1 + rng.IntN(3), kvHeads: 1 + rng.IntN(3), seqQ: 1 + rng.IntN(5), seqK: 1 + rng.IntN(7), dim: 8, valueDim: 8 + 2*rng.IntN(2),
		flat: flip(), causal: flip(),
	}
	p.opset = 23 + rng.Int64N(3)
	p.heads = p.kvHeads * (1 + rng.IntN(3))
	p.ints, p.floats = map[string]int64{}, map[string]float32{}
	q := []onnxfile.DataType{onnxfile.Float, onnxfile.Float, onnxfile.Float16, onnxfile.BFloat16, onnxfile.Double}[rng.IntN(5)]
	v := q
	if rng.IntN(6) == 0 {
		v = onnxfile.Float
	}
	shape := func(heads, seq, size int) []int {
		if p.flat {
			return []int{p.batch, seq, heads * size}
		}
		return []int{p.batch, heads, seq, size}
	}
	p.in = make([]*onnxfile.Tensor, numInputs)
	p.in[inQ] = uniform(rng, q, -1, shape(p.heads, p.seqQ, p.dim)...)
	p.in[inK] = uniform(rng, q, -1, shape(p.kvHeads, p.seqK, p.dim)...)
	p.in[inV] = uniform(rng, v, -1, shape(p.kvHeads, p.seqK, p.valueDim)...)
	switch cache := rng.IntN(4); {
	case cache == 0: // none
	case cache == 1 && p.opset >= 24:
		lens := make([]float64, p.batch)
		for b := range lens {
			lens[b] = float64(rng.IntN(p.seqK + 1))
		}
		p.in[inNonpad] = &onnxfile.Tensor{Type: onnxfile.Int64, Shape: []int{p.batch}}
		for _, l := range lens {
			p.in[inNonpad].Data = append(p.in[inNonpad].Data, byte(l), 0, 0, 0, 0, 0, 0, 0)
		}
	default:
		p.past = rng.IntN(6)
		p.in[inPastKey] = uniform(rng, q, -1, p.batch, p.kvHeads, p.past, p.dim)
		p.in[inPastValue] = uniform(rng, v, -1, p.batch, p.kvHeads, p.past, p.valueDim)
	}
	if rng.IntN(3) > 0 {
		p.in[inMask] = p.drawMask(rng)
		p.constant = inMask * rng.IntN(2)
	}
	if p.flat || flip() {
		p.ints["q_num_heads"], p.ints["kv_num_heads"] = int64(p.heads), int64(p.kvHeads)
	}
	if p.causal {
		p.ints["is_causal"] = 1
	}
	if p.opset == 25 {
		p.left, p.right = rng.IntN(5)-1, rng.IntN(5)-1
		p.ints["left_window_size"], p.ints["right_window_size"] = int64(p.left), int64(p.right)
	}
	p.scale = 1 / math.Sqrt(float64(p.dim))
	if flip() {
		p.floats["scale"] = float32(0.01 + rng.Float64())
		p.scale = float64(p.floats["scale"])
	}
	if flip() {
		p.floats["softcap"] = float32(0.5 + 3*rng.Float64())
		p.softcap = float64(p.floats["softcap"])
	}
	if rng.IntN(4) == 0 {
		p.ints["softmax_precision"] = int64(onnxfile.Float)
	}
	mode := rng.IntN(4)
	if mode > 0 || flip() {
		p.ints["qk_matmul_output_mode"] = int64(mode)
	}
	p.solve(mode, [numOutputs]bool{true, flip(), flip(), flip()})
	return &p.onnxFiles
}

// small returns the call that the tests below change: one batch, two heads, 4-D, f32, no options.
func small() *onnxProblem {
	rng := rand.New(rand.NewPCG(1, 24))
	p := &onnxProblem{batch: 1, heads: 2, kvHeads: 2, seqQ: 3, seqK: 4, dim: 8, valueDim: 8, scale: 1 / math.Sqrt(8)}
	p.opset, p.ints, p.floats = 24, map[string]int64{}, map[string]float32{}
	p.in = make([]*onnxfile.Tensor, numInputs)
	p.in[inQ] = uniform(rng, onnxfile.Float, -1, 1, 2, 3, 8)
	p.in[inK] = uniform(rng, onnxfile.Float, -1, 1, 2, 4, 8)
	p.in[inV] = uniform(rng, onnxfile.Float, -1, 1, 2, 4, 8)
	return p
}

// TestONNXEdges runs calls that drawONNX does not draw.
func TestONNXEdges(t *testing.T) {
	constant := func(d onnxfile.DataType, x float64, shape ...int) *onnxfile.Tensor {
		data := make([]float64, clitest.Elements(shape))
		for i := range data {
			data[i] = x
		}
		return filled(d, data, shape...)
	}
	edges := map[string]func(p *onnxProblem){
		"the lowest f32 everywhere hides nothing": func(p *onnxProblem) {
			p.in[inMask] = constant(onnxfile.Float, -math.MaxFloat32, 3, 4)
		},
		"the lowest f64 in a row hides nothing": func(p *onnxProblem) {
			for i := range inMask {
				d := p.in[i]
				x := &onnxfile.Tensor{Type: onnxfile.Double, Shape: d.Shape}
				for n := range d.Elements() {
					x.Data = appendNumber(x.Data, onnxfile.Double, d.At(n))
				}
				p.in[i] = x
			}
			p.in[inMask] = constant(onnxfile.Double, 0, 3, 4)
			copy(p.in[inMask].Data, constant(onnxfile.Double, -math.MaxFloat64, 4).Data)
		},
		"the lowest bf16 in a row hides nothing": func(p *onnxProblem) {
			p.in[inMask] = constant(onnxfile.BFloat16, -0x1.fep127, 3, 4)
		},
		"-1e9 on some keys": func(p *onnxProblem) {
			p.in[inMask] = filled(onnxfile.Float, []float64{0, -1e9, 0, -1e9}, 4)
		},
		"no key at all, the weights out": func(p *onnxProblem) {
			p.in[inMask] = constant(onnxfile.Bool, 0, 3, 4)
			p.ints["qk_matmul_output_mode"] = 3
		},
		"a batch without a key": func(p *onnxProblem) {
			p.in[inNonpad] = &onnxfile.Tensor{Type: onnxfile.Int64, Shape: []int{1}, Data: make([]byte, 8)}
		},
		"scale zero": func(p *onnxProblem) { p.floats["scale"], p.scale = 0, 0 },
		"a past of no keys": func(p *onnxProblem) {
			p.in[inPastKey], p.in[inPastValue] = constant(onnxfile.Float, 0, 1, 2, 0, 8), constant(onnxfile.Float, 0, 1, 2, 0, 8)
			p.causal, p.ints["is_causal"] = true, 1
		},
	}
	run := func(t *testing.T, device string) {
		var dirs []string
		for name, change := range edges {
			p := small()
			change(p)
			mode := int(p.ints["qk_matmul_output_mode"])
			p.solve(mode, [numOutputs]bool{true, false, false, mode > 0})
			dirs = append(dirs, p.write(t, filepath.Join(t.TempDir(), strings.ReplaceAll(name, " ", "-"))))
		}
		wantPassed(t, device, dirs)
	}
	t.Run("cpu", func(t *testing.T) { run(t, "cpu") })
	t.Run("gpu", func(t *testing.T) {
		clitest.NeedBackend(t, "gpu")
		if testing.Short() {
			t.Skip("the drawn cases run on the GPU without -short: the driver compiles kernels for each")
		}
		run(t, "gpu")
	})
}

// TestONNXRefused checks the errors of calls that the operator does not allow or attn does not support.
func TestONNXRefused(t *testing.T) {
	zeros := func(d onnxfile.DataType, shape ...int) *onnxfile.Tensor {
		return &onnxfile.Tensor{Type: d, Shape: shape, Data: make([]byte, clitest.Elements(shape)*d.Size())}
	}
	nonpad := func(n byte) *onnxfile.Tensor {
		return &onnxfile.Tensor{Type: onnxfile.Int64, Shape: []int{1}, Data: []byte{n, 0, 0, 0, 0, 0, 0, 0}}
	}
	for _, c := range []struct {
		name   string
		change func(p *onnxProblem)
		says   string
	}{
		{"opset 22", func(p *onnxProblem) { p.opset = 22 }, "opset 22"},
		{"opset 26", func(p *onnxProblem) { p.opset = 26 }, "opset 26"},
		{"an attribute of opset 25", func(p *onnxProblem) { p.ints["left_window_size"] = 2 }, `"left_window_size"`},
		{"a window below -1", func(p *onnxProblem) { p.opset, p.ints["left_window_size"] = 25, -2 }, "left_window_size is -2"},
		{"scale as an integer", func(p *onnxProblem) { p.ints["scale"] = 1 }, "attribute scale is a int, it must be a float"},
		{"mode 4", func(p *onnxProblem) { p.ints["qk_matmul_output_mode"] = 4 }, "qk_matmul_output_mode is 4"},
		{"no heads", func(p *onnxProblem) { p.ints["q_num_heads"] = 0 }, "q_num_heads is 0"},
		{"other heads", func(p *onnxProblem) { p.ints["kv_num_heads"] = 3 }, "kv_num_heads says 3"},
		{"softmax in integers", func(p *onnxProblem) { p.ints["softmax_precision"] = 7 }, "softmax_precision is 7"},
		{"softcap below 0", func(p *onnxProblem) { p.floats["softcap"] = -1 }, "softcap is -1"},
		{"no V", func(p *onnxProblem) { p.in[inV] = nil }, "input V is missing"},
		{"integers", func(p *onnxProblem) { p.in[inQ] = zeros(onnxfile.Int64, 1, 2, 3, 8) }, "Q is int64"},
		{"K of another type", func(p *onnxProblem) { p.in[inK] = zeros(onnxfile.Float16, 1, 2, 4, 8) }, "K is f16"},
		{"an integer mask", func(p *onnxProblem) { p.in[inMask] = zeros(onnxfile.Int64, 3, 4) }, "attn_mask is int64"},
		{"a mask without axes", func(p *onnxProblem) { p.in[inMask] = zeros(onnxfile.Bool) }, "attn_mask has shape []"},
		{"a mask of 5 axes", func(p *onnxProblem) { p.in[inMask] = zeros(onnxfile.Bool, 1, 1, 1, 3, 4) }, "1 to 4 axes"},
		{"a mask that is too long", func(p *onnxProblem) { p.in[inMask] = zeros(onnxfile.Bool, 3, 5) }, "mask: shape [1 1 3 5] does not broadcast"},
		{"Q of 2 axes", func(p *onnxProblem) { p.in[inQ] = zeros(onnxfile.Float, 3, 8) }, "must all have 3 axes or all 4"},
		{"3 axes without heads", func(p *onnxProblem) {
			for i := range inMask {
				p.in[i] = zeros(onnxfile.Float, 1, 4, 16)
			}
		}, "q_num_heads is 0"},
		{"heads that do not divide", func(p *onnxProblem) {
			p.in[inK], p.in[inV] = zeros(onnxfile.Float, 1, 3, 4, 8), zeros(onnxfile.Float, 1, 3, 4, 8)
		}, "the kv heads must divide"},
		{"batches that differ", func(p *onnxProblem) { p.in[inK] = zeros(onnxfile.Float, 2, 2, 4, 8) }, "K is [2 2 4 8], [batch heads sequence size], it must be [1 2 4 8]"},
		{"values of other batches", func(p *onnxProblem) { p.in[inV] = zeros(onnxfile.Float, 2, 2, 4, 8) }, "V is [2 2 4 8], [batch heads sequence size], it must be [1 2 4 8]"},
		{"keys of another size", func(p *onnxProblem) { p.in[inK] = zeros(onnxfile.Float, 1, 2, 4, 6) }, "K is [1 2 4 6], [batch heads sequence size], it must be [1 2 4 8]"},
		{"keys of another size with 3 axes", func(p *onnxProblem) {
			p.ints["q_num_heads"], p.ints["kv_num_heads"] = 2, 2
			p.in[inQ], p.in[inK], p.in[inV] = zeros(onnxfile.Float, 1, 3, 16), zeros(onnxfile.Float, 1, 4, 12), zeros(onnxfile.Float, 1, 4, 16)
		}, "K is [1 2 4 6], [batch heads sequence size], it must be [1 2 4 8]: shapes Q [1 3 16], K [1 4 12] and V [1 4 16]"},
		{"values of other heads and a past", func(p *onnxProblem) {
			p.in[inV], p.in[inPastKey], p.in[inPastValue] = zeros(onnxfile.Float, 1, 1, 4, 8), zeros(onnxfile.Float, 1, 2, 3, 8), zeros(onnxfile.Float, 1, 1, 3, 8)
		}, "V is [1 1 4 8], [batch heads sequence size], it must be [1 2 4 8]"},
		{"fewer values than keys", func(p *onnxProblem) { p.in[inV] = zeros(onnxfile.Float, 1, 2, 3, 8) }, "V is [1 2 3 8], [batch heads sequence size], it must be [1 2 4 8]"},
		{"no queries", func(p *onnxProblem) { p.in[inQ] = zeros(onnxfile.Float, 1, 2, 0, 8) }, "every length must be at least 1"},
		{"a past key alone", func(p *onnxProblem) { p.in[inPastKey] = zeros(onnxfile.Float, 1, 2, 3, 8) }, "need each other"},
		{"pasts of two lengths", func(p *onnxProblem) {
			p.in[inPastKey], p.in[inPastValue] = zeros(onnxfile.Float, 1, 2, 3, 8), zeros(onnxfile.Float, 1, 2, 2, 8)
		}, "past_value has shape [1 2 2 8]"},
		{"a past and nonpad_kv_seqlen", func(p *onnxProblem) {
			p.in[inPastKey], p.in[inPastValue], p.in[inNonpad] = zeros(onnxfile.Float, 1, 2, 3, 8), zeros(onnxfile.Float, 1, 2, 3, 8), nonpad(2)
		}, "exclude each other"},
		{"more keys than there are", func(p *onnxProblem) { p.in[inNonpad] = nonpad(5) }, "nonpad_kv_seqlen[0] is 5, there are 4"},
		{"nonpad_kv_seqlen of another length", func(p *onnxProblem) { p.in[inNonpad] = zeros(onnxfile.Int64, 2) }, "nonpad_kv_seqlen has shape [2]"},
		{"nonpad_kv_seqlen in opset 23", func(p *onnxProblem) { p.opset, p.in[inNonpad] = 23, nonpad(2) }, "came with opset 24"},
		{"f64 beyond f32", func(p *onnxProblem) {
			for i := range inMask {
				p.in[i] = &onnxfile.Tensor{Type: onnxfile.Double, Shape: p.in[i].Shape, Data: make([]byte, 2*len(p.in[i].Data))}
			}
			copy(p.in[inV].Data, appendNumber(nil, onnxfile.Double, 1e300))
		}, "V: 1e+300 is beyond"},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := small()
			p.solve(0, [numOutputs]bool{true})
			c.change(p)
			dir := p.write(t, filepath.Join(t.TempDir(), "case"))
			wantOutcome(t, dir, c.says)
		})
	}
}
