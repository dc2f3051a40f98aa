package onnx

import (
	"encoding/json"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
)

// array is a tensor in a file of operator tests; nil is a missing one.
type array struct {
	Type string    `json:"type"`
	Dims []int     `json:"dims"`
	Data []float64 `json:"data"`
}

func (a *array) at(index ...int) float64 {
	n := 0
	for axis, i := range index {
		n = n*a.Dims[axis] + i
	}
	return a.Data[n]
}

// jsoncProblem is a call of one of ONNX Runtime's operators with the expected outputs: the
// formula in float64, element by element.
type jsoncProblem struct {
	rng                                   *rand.Rand
	batch, heads, kvHeads, seq, past, dim int
	recorded                              bool // for ONNX Runtime, which takes fewer calls
	attributes                            []map[string]any
	in, out                               []*array
}

func (p *jsoncProblem) flip() bool { return p.rng.IntN(2) == 0 }

// draw returns numbers from -1 to 1 that float32 has.
func (p *jsoncProblem) draw(dims ...int) *array {
	a := p.zeros(dims...)
	for i := range a.Data {
		a.Data[i] = float64(float32(2*p.rng.Float64() - 1))
	}
	return a
}

func (p *jsoncProblem) zeros(dims ...int) *array {
	return &array{Type: "float32", Dims: dims, Data: make([]float64, clitest.Elements(dims))}
}

func (p *jsoncProblem) integers(kind string, dims []int, data ...int) *array {
	a := &array{Type: kind, Dims: dims}
	for _, n := range data {
		a.Data = append(a.Data, float64(n))
	}
	return a
}

func (p *jsoncProblem) set(kind, name string, x any) {
	p.attributes = append(p.attributes, map[string]any{"name": name, "type": kind, "data": x})
}

// scale draws the attribute scale or leaves it out.
func (p *jsoncProblem) scale() float64 {
	if p.flip() {
		return 1 / math.Sqrt(float64(p.dim))
	}
	x := float32(0.1 + p.rng.Float64())
	p.set("float", "scale", x)
	return float64(x)
}

// cache returns n keys or values, [batch, heads, n, size]: those of x, [batch, seq, heads, size], from
// starts on, and past ones before. A past of n rows keeps those after them too.
func (p *jsoncProblem) cache(x, past *array, n int, starts []int) *array {
	heads, size := x.Dims[2], x.Dims[3]
	a := p.zeros(p.batch, heads, n, size)
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

// attend returns the output of queries q, [batch, seq, heads, dim]: sums of values weighted by the softmax
// of the scores, which score makes of the products with the keys.
func (p *jsoncProblem) attend(q, keys, values *array, sinks []float64, score func(product float64, b, h, i, j int) float64) *array {
	size := values.Dims[3]
	y := p.zeros(p.batch, p.seq, p.heads*size)
	for n := range p.batch * p.seq * p.heads {
		h, i, b := n%p.heads, n/p.heads%p.seq, n/p.heads/p.seq
		kv := h * keys.Dims[1] / p.heads
		var scores []float64
		for j := range keys.Dims[2] {
			x := 0.0
			for e := range p.dim {
				x += q.at(b, i, h, e) * keys.at(b, kv, j, e)
			}
			scores = append(scores, score(x, b, h, i, j))
		}
		for j, w := range softmax(scores, sinks[h]) {
			for e := range size {
				if w > 0 {
					y.Data[n*size+e] += w * values.at(b, kv, j, e)
				}
			}
		}
	}
	return y
}

// flat returns [batch, seq, heads, size] with three axes.
func flat(a *array) *array {
	return &array{Type: a.Type, Dims: []int{a.Dims[0], a.Dims[1], a.Dims[2] * a.Dims[3]}, Data: slices.Clone(a.Data)}
}

// text returns the problem as a test of a file.
func (p *jsoncProblem) text(operator string) string {
	test, err := json.Marshal(map[string]any{
		"name": "drawn", "operator": operator, "opset": map[string]any{"domain": "com.microsoft", "version": 1},
		"attributes": p.attributes, "cases": []any{map[string]any{"name": "T[0]", "inputs": p.in, "outputs": p.out}},
	})
	if err != nil {
		panic(err)
	}
	return string(test)
}

// MarshalJSON writes a missing tensor as the files do.
func (a *array) MarshalJSON() ([]byte, error) {
	type plain array
	if a == nil {
		return []byte(`{"data": null, "type": "float32"}`), nil
	}
	return json.Marshal((*plain)(a))
}

// drawMultiHead draws a MultiHeadAttention call.
func drawMultiHead(seed uint64) string {
	p := &jsoncProblem{rng: rand.New(rand.NewPCG(seed, 37))}
	p.batch, p.heads, p.seq, p.past, p.dim = 1+p.rng.IntN(3), 1+p.rng.IntN(3), 1+p.rng.IntN(4), p.rng.IntN(4), 8
	length, valueDim := 1+p.rng.IntN(5), 8+2*p.rng.IntN(2)
	form := p.rng.IntN(4) // operands: 3 axes, keys and values of 4 axes, packed pairs, all packed
	if form >= 2 {
		valueDim = p.dim
	}
	if form == 3 {
		length = p.seq
	}
	p.set("int", "num_heads", p.heads)
	scale, filter := p.scale(), -10000.0
	if p.flip() {
		filter = -2.5
		p.set("float", "mask_filter_value", filter)
	}
	causal := p.rng.IntN(3) == 0
	if causal {
		p.set("int", "unidirectional", 1)
	}
	total := p.past + length
	q, k, v := p.draw(p.batch, p.seq, p.heads, p.dim), p.draw(p.batch, length, p.heads, p.dim), p.draw(p.batch, length, p.heads, valueDim)
	p.in = make([]*array, 8)
	hidden := p.heads * p.dim
	// pack returns tensors of [batch, seq, heads, size] row by row.
	pack := func(dims []int, list ...*array) *array {
		x := &array{Type: "float32", Dims: dims}
		for at := 0; at < len(list[0].Data); at += p.dim {
			for _, t := range list {
				x.Data = append(x.Data, t.Data[at:at+p.dim]...)
			}
		}
		return x
	}
	swapped := func(a *array) *array {
		x := p.zeros(a.Dims[0], a.Dims[2], a.Dims[1], a.Dims[3])
		for n := range x.Data {
			e, s, h, b := n%a.Dims[3], n/a.Dims[3]%a.Dims[1], n/a.Dims[3]/a.Dims[1]%a.Dims[2], n/a.Dims[3]/a.Dims[1]/a.Dims[2]
			x.Data[n] = a.at(b, s, h, e)
		}
		return x
	}
	switch form {
	case 0:
		p.in[mhQuery], p.in[mhKey], p.in[mhValue] = flat(q), flat(k), flat(v)
	case 1:
		p.in[mhQuery], p.in[mhKey], p.in[mhValue] = flat(q), swapped(k), swapped(v)
	case 2:
		p.in[mhQuery], p.in[mhKey] = flat(q), pack([]int{p.batch, length, p.heads, 2, p.dim}, k, v)
	case 3:
		p.in[mhQuery] = pack([]int{p.batch, p.seq, p.heads, 3, p.dim}, q, k, v)
	}
	if p.flip() {
		bias, at := p.draw(2*hidden+p.heads*valueDim), 0
		p.in[mhBias] = bias
		for i, x := range []*array{q, k, v} {
			n := x.Dims[2] * x.Dims[3]
			for j := range x.Data {
				if i == 0 || form != 1 {
					x.Data[j] = float64(float32(x.Data[j] + bias.Data[at+j%n]))
				}
			}
			at += n
		}
	}
	if p.past > 0 {
		p.in[mhPastKey], p.in[mhPastValue] = p.draw(p.batch, p.heads, p.past, p.dim), p.draw(p.batch, p.heads, p.past, valueDim)
	}
	if p.flip() {
		p.in[mhAttentionBias] = p.draw([]int{1, p.batch}[p.rng.IntN(2)], []int{1, p.heads}[p.rng.IntN(2)], p.seq, total)
	}
	masked := p.paddingMask(total, filter < -1000)
	starts, noSinks := slices.Repeat([]int{p.past}, p.batch), slices.Repeat([]float64{math.Inf(-1)}, p.heads)
	keys, values := p.cache(k, p.in[mhPastKey], total, starts), p.cache(v, p.in[mhPastValue], total, starts)
	y := p.attend(q, keys, values, noSinks, func(x float64, b, h, i, j int) float64 {
		if causal && j > i+p.past {
			return math.Inf(-1)
		}
		x *= scale
		if bias := p.in[mhAttentionBias]; bias != nil {
			x += bias.at(b%bias.Dims[0], h%bias.Dims[1], i, j)
		}
		if masked(b, i, j) {
			x += filter
		}
		return x
	})
	p.out = []*array{y, keys, values}
	return p.text("MultiHeadAttention")
}

// paddingMask draws a key_padding_mask of one of the published shapes or none, and reports
// which keys it hides. With first, never the first one: a row whose scores all have a large
// term has no digits left.
func (p *jsoncProblem) paddingMask(total int, first bool) func(b, i, j int) bool {
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
	mask := p.integers("int32", dims, data...)
	p.in[mhPaddingMask] = mask
	return func(b, i, j int) bool {
		switch {
		case len(dims) == 1:
			return j >= data[b]
		case len(dims) == 3:
			return mask.at(b, i, j) == 0
		case dims[1] == total:
			return mask.at(b, j) == 0
		}
		return j >= p.past && mask.at(b, j-p.past) == 0
	}
}

// TestJSONCDrawn compares random calls of ONNX Runtime's operators with their formula in
// float64.
func TestJSONCDrawn(t *testing.T) {
	runDrawn(t, 8, func(t *testing.T, device string, draws int) {
		text := "// drawn\n["
		for seed := range uint64(draws) {
			text += drawGroupQuery(seed, false) + ",\n/* and */" + drawMultiHead(seed) + "," + drawWindowCache(seed, false) + ",\n"
		}
		wantJSONC(t, device, 3*draws, clitest.WriteFile(t, t.TempDir(), "drawn.jsonc", []byte(text+"]")))
	})
}
