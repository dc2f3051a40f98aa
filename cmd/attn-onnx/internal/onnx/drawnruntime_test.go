package onnx

import (
	"math"
	"math/rand/v2"
	"slices"

	"github.com/seed90331342/attn/backend/oracle"
	"github.com/seed90331342/attn/cmd/attn-onnx/internal/onnxfile"
	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
)

// array is a tensor of the formulas.
type array struct {
	Dims []int
	Data []oracle.Element
}

func (a *array) at(index ...int) oracle.Element {
	n := 0
	for axis, i := range index {
		n = n*a.Dims[axis] + i
	}
	return a.Data[n]
}

// runtimeProblem is a call of one of ONNX Runtime's operators in float32 with the expected outputs: the
// formula in float64, element by element.
type runtimeProblem struct {
	onnxFiles
	rng                                   *rand.Rand
	batch, heads, kvHeads, seq, past, dim int
	recorded                              bool // for ONNX Runtime, which takes fewer calls
}

// newRuntimeProblem returns a call of an operator with that many inputs.
func newRuntimeProblem(operator string, seed, stream uint64, inputs int) *runtimeProblem {
	p := &runtimeProblem{rng: rand.New(rand.NewPCG(seed, stream))}
	p.onnxFiles = onnxFiles{
		operator: microsoft + "." + operator, opset: 1, ints: map[string]int64{}, floats: map[string]float32{}, texts: map[string]string{},
		in: make([]*onnxfile.Tensor, inputs),
	}
	return p
}

func (p *runtimeProblem) flip() bool { return p.rng.IntN(2) == 0 }

// draw returns numbers from -1 to 1 that float32 has.
func (p *runtimeProblem) draw(dims ...int) *array {
	a := zeros(dims...)
	for i := range a.Data {
		a.Data[i].Value = float64(float32(2*p.rng.Float64() - 1))
	}
	return a
}

func zeros(dims ...int) *array {
	return &array{Dims: dims, Data: make([]oracle.Element, clitest.Elements(dims))}
}

// tensor returns the array as a tensor, rounded to the type.
func (a *array) tensor(d onnxfile.DataType) *onnxfile.Tensor {
	data := make([]float64, len(a.Data))
	for i, e := range a.Data {
		data[i] = e.Value
	}
	return filled(d, data, a.Dims...)
}

// flat returns [batch, seq, heads, size] as a tensor with three axes.
func (a *array) flat() *onnxfile.Tensor {
	t := a.tensor(onnxfile.Float)
	t.Shape = []int{a.Dims[0], a.Dims[1], a.Dims[2] * a.Dims[3]}
	return t
}

// setFloat draws an attribute from lo to lo+1.
func (p *runtimeProblem) setFloat(name string, lo float64) float64 {
	p.floats[name] = float32(lo + p.rng.Float64())
	return float64(p.floats[name])
}

// scale draws the attribute scale or leaves it out.
func (p *runtimeProblem) scale() float64 {
	if p.flip() {
		return 1 / math.Sqrt(float64(p.dim))
	}
	return p.setFloat("scale", 0.1)
}

// attentionBias draws the input attention_bias, and returns its term for a score.
func (p *runtimeProblem) attentionBias(input, total int) func(b, h, i, j int) float64 {
	if !p.flip() {
		return func(int, int, int, int) float64 { return 0 }
	}
	bias := p.draw([]int{1, p.batch}[p.rng.IntN(2)], []int{1, p.heads}[p.rng.IntN(2)], p.seq, total)
	p.in[input] = bias.tensor(onnxfile.Float)
	return func(b, h, i, j int) float64 { return bias.at(b%bias.Dims[0], h%bias.Dims[1], i, j).Value }
}

// cache returns n keys or values, [batch, heads, n, size]: those of x, [batch, seq, heads, size], from
// starts on, and past ones before. A past of n rows keeps those after them too.
func (p *runtimeProblem) cache(x, past *array, n int, starts []int) *array {
	heads, size := x.Dims[2], x.Dims[3]
	a := zeros(p.batch, heads, n, size)
	for at := range a.Data {
		e, j, h, b := at%size, at/size%n, at/size/n%heads, at/size/n/heads
		switch s := j - starts[b]; {
		case 0 <= s && s < x.Dims[1]:
			a.Data[at] = x.at(b, s, h, e)
		case s < 0 || n == p.past:
			a.Data[at] = past.at(b, h, j, e)
		}
	}
	return a
}

// attend returns the output of queries q, [batch, seq, heads, dim], and the scores at each point, [batch, heads, seq, n]. row
// has what all rows share, and bias the terms of the scores.
func (p *runtimeProblem) attend(row attendedRow, q, keys, values *array, sinks []float64, bias func(b, h, i, j int) oracle.Element) (y *array, points [4][]oracle.Element) {
	n, size := keys.Dims[2], values.Dims[3]
	y = zeros(p.batch, p.seq, p.heads*size)
	for at := range p.batch * p.heads * p.seq {
		i, h, b := at%p.seq, at/p.seq%p.heads, at/p.seq/p.heads
		kv := (b*keys.Dims[1] + h*keys.Dims[1]/p.heads) * n
		row.q = q.Data[((b*p.seq+i)*p.heads+h)*p.dim:][:p.dim]
		row.k, row.v = keys.Data[kv*p.dim:][:n*p.dim], values.Data[kv*size:][:n*size]
		row.bias, row.sink = nil, sinks[h]
		for j := range n {
			row.bias = append(row.bias, bias(b, h, i, j))
		}
		o, scores := row.solve()
		copy(y.Data[((b*p.seq+i)*p.heads+h)*size:], o)
		for k := range points {
			points[k] = append(points[k], scores[k]...)
		}
	}
	return y, points
}

// hidden is the term of a hidden key.
var hidden = oracle.Element{Value: math.Inf(-1)}

// noSinks are sinks of heads without one.
func noSinks(heads int) []float64 { return slices.Repeat([]float64{math.Inf(-1)}, heads) }

// drawMultiHead draws a MultiHeadAttention call.
func drawMultiHead(seed uint64) *onnxFiles {
	p := newRuntimeProblem("MultiHeadAttention", seed, 37, 8)
	p.batch, p.heads, p.seq, p.past, p.dim = 1+p.rng.IntN(3), 1+p.rng.IntN(3), 1+p.rng.IntN(4), p.rng.IntN(4), 8
	length, valueDim := 1+p.rng.IntN(5), 8+2*p.rng.IntN(2)
	form := p.rng.IntN(4) // operands: 3 axes, keys and values of 4 axes, packed pairs, all packed
	if form >= 2 {
		valueDim = p.dim
	}
	if form == 3 {
		length = p.seq
	}
	p.ints["num_heads"] = int64(p.heads)
	scale, filter := p.scale(), -10000.0
	if p.flip() {
		filter = -2.5
		p.floats["mask_filter_value"] = float32(filter)
	}
	causal := p.rng.IntN(3) == 0
	if causal {
		p.ints["unidirectional"] = 1
	}
	total := p.past + length
	q, k, v := p.draw(p.batch, p.seq, p.heads, p.dim), p.draw(p.batch, length, p.heads, p.dim), p.draw(p.batch, length, p.heads, valueDim)
	width := p.heads * p.dim
	// pack returns tensors of [batch, seq, heads, size] row by row.
	pack := func(dims []int, list ...*array) *onnxfile.Tensor {
		x := &array{Dims: dims}
		for at := 0; at < len(list[0].Data); at += p.dim {
			for _, t := range list {
				x.Data = append(x.Data, t.Data[at:at+p.dim]...)
			}
		}
		return x.tensor(onnxfile.Float)
	}
	swapped := func(a *array) *onnxfile.Tensor {
		x := zeros(a.Dims[0], a.Dims[2], a.Dims[1], a.Dims[3])
		for n := range x.Data {
			e, s, h, b := n%a.Dims[3], n/a.Dims[3]%a.Dims[1], n/a.Dims[3]/a.Dims[1]%a.Dims[2], n/a.Dims[3]/a.Dims[1]/a.Dims[2]
			x.Data[n] = a.at(b, s, h, e)
		}
		return x.tensor(onnxfile.Float)
	}
	switch form {
	case 0:
		p.in[mhQuery], p.in[mhKey], p.in[mhValue] = q.flat(), k.flat(), v.flat()
	case 1:
		p.in[mhQuery], p.in[mhKey], p.in[mhValue] = q.flat(), swapped(k), swapped(v)
	case 2:
		p.in[mhQuery], p.in[mhKey] = q.flat(), pack([]int{p.batch, length, p.heads, 2, p.dim}, k, v)
	case 3:
		p.in[mhQuery] = pack([]int{p.batch, p.seq, p.heads, 3, p.dim}, q, k, v)
	}
	if p.flip() {
		bias, at := p.draw(2*width+p.heads*valueDim), 0
		p.in[mhBias] = bias.tensor(onnxfile.Float)
		for i, x := range []*array{q, k, v} {
			n := x.Dims[2] * x.Dims[3]
			for j := range x.Data {
				if i == 0 || form != 1 {
					x.Data[j].Value = float64(float32(x.Data[j].Value + bias.Data[at+j%n].Value)) // one rounding, as the operator
				}
			}
			at += n
		}
	}
	var pastKey, pastValue *array
	if p.past > 0 {
		pastKey, pastValue = p.draw(p.batch, p.heads, p.past, p.dim), p.draw(p.batch, p.heads, p.past, valueDim)
		p.in[mhPastKey], p.in[mhPastValue] = pastKey.tensor(onnxfile.Float), pastValue.tensor(onnxfile.Float)
	}
	bias := p.attentionBias(mhAttentionBias, total)
	masked := p.paddingMask(total, filter < -1000)
	starts := slices.Repeat([]int{p.past}, p.batch)
	keys, values := p.cache(k, pastKey, total, starts), p.cache(v, pastValue, total, starts)
	y, _ := p.attend(attendedRow{scale: scale}, q, keys, values, noSinks(p.heads), func(b, h, i, j int) oracle.Element {
		x := bias(b, h, i, j)
		switch {
		case causal && j > i+p.past:
			return hidden
		case !masked(b, i, j):
			return oracle.Element{Value: x}
		case filter < -1000: // no row has this term for all keys, and its exponential is 0 in float64 too
			return hidden
		}
		x += filter // rounded, as the operator adds both before the scores
		return oracle.Element{Value: x, Err: u * math.Abs(x)}
	})
	p.expect(onnxfile.Float, y.Data, y.Dims...)
	p.expect(onnxfile.Float, keys.Data, keys.Dims...)
	p.expect(onnxfile.Float, values.Data, values.Dims...)
	return &p.onnxFiles
}

// paddingMask draws a key_padding_mask of one of the published shapes or none, and reports which keys it hides. With
// first, never the first one: a row whose scores all have a large term has no digits left.
func (p *runtimeProblem) paddingMask(total int, first bool) func(b, i, j int) bool {
	var dims []int
	most := 2
	switch p.rng.IntN(6) {
	case 0:
		dims, most = []int{p.batch}, total+1
	case 1:
		dims, most = []int{3*p.batch + 2}, total+1
	case 2:
		dims = []int{p.batch, total}
	case 3:
		dims = []int{p.batch, total - p.past}
	case 4:
		dims = []int{p.batch, p.seq, total}
	default:
		return func(int, int, int) bool { return false }
	}
	var data []int
	for i := range clitest.Elements(dims) {
		n := p.rng.IntN(most)
		if first && (len(dims) == 1 || i%dims[len(dims)-1] == 0) {
			n = max(n, 1)
		}
		data = append(data, n)
	}
	p.in[mhPaddingMask] = int32s(data, dims...)
	return func(b, i, j int) bool {
		switch {
		case len(dims) == 1:
			return j >= data[b]
		case len(dims) == 3:
			return data[(b*p.seq+i)*total+j] == 0
		case dims[1] == total:
			return data[b*total+j] == 0
		}
		return j >= p.past && data[b*(total-p.past)+j-p.past] == 0
	}
}
