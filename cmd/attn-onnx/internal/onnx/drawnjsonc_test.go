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

// drawGroupQuery draws a GroupQueryAttention call.
func drawGroupQuery(seed uint64) string {
	p := &jsoncProblem{rng: rand.New(rand.NewPCG(seed, 31))}
	p.batch, p.kvHeads, p.seq, p.past, p.dim = 1+p.rng.IntN(3), 1+p.rng.IntN(2), 1+p.rng.IntN(4), p.rng.IntN(6), 8
	p.heads = p.kvHeads * (1 + p.rng.IntN(3))
	p.set("int", "num_heads", p.heads)
	p.set("int", "kv_num_heads", p.kvHeads)
	prompt := p.past == 0 || p.rng.IntN(4) == 0
	total := p.seq
	if !prompt {
		total += 1 + p.rng.IntN(p.past) // the past may have room for new rows
	}
	starts, lens := make([]int, p.batch), make([]int, p.batch)
	for b := range starts {
		lens[b] = p.rng.IntN(p.seq) // padding or not
		if !prompt {
			starts[b] = p.rng.IntN(total - p.seq + 1)
			lens[b] = starts[b] + p.seq - 1
		}
	}
	present := max(total, p.past)
	q, k, v := p.draw(p.batch, p.seq, p.heads, p.dim), p.draw(p.batch, p.seq, p.kvHeads, p.dim), p.draw(p.batch, p.seq, p.kvHeads, p.dim)
	hidden, kvHidden := p.heads*p.dim, p.kvHeads*p.dim
	p.in = make([]*array, 16)
	if p.rng.IntN(3) == 0 {
		all := p.zeros(p.batch, p.seq, hidden+2*kvHidden)
		all.Data = nil
		for i := range p.batch * p.seq {
			all.Data = append(append(append(all.Data, q.Data[i*hidden:][:hidden]...), k.Data[i*kvHidden:][:kvHidden]...), v.Data[i*kvHidden:][:kvHidden]...)
		}
		p.in[gqQuery] = all
	} else {
		p.in[gqQuery], p.in[gqKey], p.in[gqValue] = flat(q), flat(k), flat(v)
	}
	if p.past > 0 || p.flip() {
		p.in[gqPastKey], p.in[gqPastValue] = p.draw(p.batch, p.kvHeads, p.past, p.dim), p.draw(p.batch, p.kvHeads, p.past, p.dim)
	}
	p.in[gqLengths] = p.integers("int32", []int{p.batch}, lens...)
	p.in[gqTotal] = p.integers("int32", [][]int{{1}, {}}[p.rng.IntN(2)], total)
	// Keys that the device has normed or rotated may be at the other side of a tie of int8.
	quantised := p.rng.IntN(3) == 0
	if !quantised && p.rng.IntN(3) == 0 {
		p.in[gqQueryNorm], p.in[gqKeyNorm] = p.norm(q, k)
	}
	if !quantised && p.flip() {
		p.rotate(q, k, starts, total, prompt)
	}
	var kFactors, vFactors *array
	if quantised {
		kFactors, vFactors = p.quantise(k, gqPastKey, gqKeyScale), p.quantise(v, gqPastValue, gqValueScale)
	}
	scale, softcap, window, sinks := p.scale(), 0.0, total, p.zeros(p.heads)
	for h := range sinks.Data {
		sinks.Data[h] = math.Inf(-1)
	}
	if p.flip() {
		x := float32(0.5 + p.rng.Float64())
		softcap = float64(x)
		p.set("float", "softcap", x)
	}
	causal := p.rng.IntN(4) > 0
	if !causal {
		p.set("int", "causal", 0)
	} else if p.flip() {
		window = 1 + p.rng.IntN(4)
		p.set("int", "local_window_size", window)
	}
	if p.rng.IntN(3) == 0 {
		p.set("int", "smooth_softmax", 1)
		sinks = p.zeros(p.heads)
	}
	if p.rng.IntN(3) == 0 {
		sinks = p.draw(p.heads)
		p.in[gqSink] = sinks
	}
	if p.flip() {
		p.in[gqBias] = p.draw([]int{1, p.batch}[p.rng.IntN(2)], []int{1, p.heads}[p.rng.IntN(2)], p.seq, total)
	}
	keys, values := p.cache(k, p.in[gqPastKey], present, starts), p.cache(v, p.in[gqPastValue], present, starts)
	p.out = []*array{nil, keys, values}
	if quantised {
		keys.Type, values.Type = "int8", "int8"
		keys, values = kFactors.times(keys), vFactors.times(values)
	}
	mode := p.rng.IntN(3)
	if quantised {
		mode = 0
	}
	if mode > 0 {
		p.set("int", "qk_output", mode)
	}
	qk := p.zeros(p.batch, p.heads, p.seq, total)
	for i := range qk.Data {
		qk.Data[i] = math.Inf(-1)
	}
	y := p.attend(q, keys, values, sinks.Data, func(x float64, b, h, i, j int) float64 {
		at := starts[b] + i
		if causal && (j > at || j <= at-window) || !causal && j > lens[b] {
			return math.Inf(-1)
		}
		if x *= scale; softcap > 0 {
			x = softcap * math.Tanh(x/softcap)
		}
		if bias := p.in[gqBias]; bias != nil {
			x += bias.at(b%bias.Dims[0], h%bias.Dims[1], i, j)
		}
		qk.Data[((b*p.heads+h)*p.seq+i)*total+j] = x
		return x
	})
	p.out[0] = y
	for row := range p.batch * p.heads * p.seq {
		for j, w := range softmax(qk.Data[row*total:][:total], sinks.Data[row/p.seq%p.heads]) {
			if n := row*total + j; mode == 2 || math.IsInf(qk.Data[n], -1) {
				qk.Data[n] = w // 0 for a hidden key
			}
		}
	}
	if mode > 0 {
		p.out = append(p.out, qk)
	}
	return p.text("GroupQueryAttention")
}

// norm draws weights, and replaces the heads of queries and keys by their root-mean-square norms.
func (p *jsoncProblem) norm(q, k *array) (wq, wk *array) {
	epsilon := 1e-6
	if p.flip() {
		x := float32(0.001 + p.rng.Float64())
		p.set("float", "qk_norm_epsilon", x)
		epsilon = float64(x)
	}
	wq, wk = p.draw(p.dim), p.draw(p.dim)
	for x, w := range map[*array]*array{q: wq, k: wk} {
		for row := 0; row < len(x.Data); row += p.dim {
			sum := 0.0
			for _, e := range x.Data[row:][:p.dim] {
				sum += e * e
			}
			for i := range p.dim {
				x.Data[row+i] *= w.Data[i] / math.Sqrt(sum/float64(p.dim)+epsilon)
			}
		}
	}
	return wq, wk
}

// quantise draws a quantised cache: it replaces x, [batch, seq, kv heads, dim], by integers and the past by others, and
// returns the factors [1, kv heads, 1, dim]. Some integers are beyond int8.
func (p *jsoncProblem) quantise(x *array, past, scale int) *array {
	kind, dims := "PER_CHANNEL", []int{1, p.kvHeads, 1, p.dim}
	if p.flip() {
		kind, dims = "PER_TENSOR", []int{1}
	}
	p.set("string", map[int]string{gqKeyScale: "k_quant_type", gqValueScale: "v_quant_type"}[scale], kind)
	p.in[scale] = p.zeros(dims...)
	for i := range p.in[scale].Data {
		p.in[scale].Data[i] = float64(float32(0.006 + 0.02*p.rng.Float64()))
	}
	f := p.zeros(1, p.kvHeads, 1, p.dim)
	for i := range f.Data {
		f.Data[i] = p.in[scale].Data[i%len(p.in[scale].Data)]
	}
	for i := range x.Data {
		x.Data[i] = min(max(math.RoundToEven(x.Data[i]/f.Data[i%len(f.Data)]), -128), 127)
	}
	if a := p.in[past]; a != nil {
		a.Type = "int8"
		for i := range a.Data {
			a.Data[i] = float64(p.rng.IntN(256) - 128)
		}
	}
	return f
}

// times returns the integers of a cache [batch, kv heads, n, dim] times the factors.
func (a *array) times(x *array) *array {
	y := &array{Type: "float32", Dims: x.Dims}
	for i, n := range x.Data {
		h := i / (x.Dims[2] * x.Dims[3]) % x.Dims[1]
		y.Data = append(y.Data, n*a.at(0, h, 0, i%x.Dims[3]))
	}
	return y
}

// rotate draws angles and rotates queries and keys.
func (p *jsoncProblem) rotate(q, k *array, starts []int, total int, prompt bool) {
	p.set("int", "do_rotary", 1)
	pairs := []int{2, 4}[p.rng.IntN(2)]
	p.in[gqCos], p.in[gqSin] = p.draw(total+2, pairs), p.draw(total+2, pairs)
	interleaved := p.flip()
	if interleaved {
		p.set("int", "rotary_interleaved", 1)
	}
	position := func(b, s int) int { return starts[b] + s }
	if p.rng.IntN(3) == 0 {
		ids := make([]int, p.batch*p.seq)
		for i := range ids {
			ids[i] = p.rng.IntN(3)
		}
		p.in[gqPositions] = p.integers("int64", []int{p.batch, p.seq}, ids...)
		position = func(b, s int) int { return ids[b*p.seq+s] }
		if prompt {
			position = func(_, s int) int { return ids[0] + s }
		}
	}
	for _, x := range []*array{q, k} {
		for n := range len(x.Data) / p.dim {
			s, b := n/x.Dims[2]%p.seq, n/x.Dims[2]/p.seq
			row := x.Data[n*p.dim:][:p.dim]
			for i := range pairs {
				first, second := i, i+pairs
				if interleaved {
					first, second = 2*i, 2*i+1
				}
				cos, sin := p.in[gqCos].at(position(b, s), i), p.in[gqSin].at(position(b, s), i)
				row[first], row[second] = row[first]*cos-row[second]*sin, row[first]*sin+row[second]*cos
			}
		}
	}
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
			text += drawGroupQuery(seed) + ",\n/* and */" + drawMultiHead(seed) + ",\n"
		}
		wantJSONC(t, device, 2*draws, clitest.WriteFile(t, t.TempDir(), "drawn.jsonc", []byte(text+"]")))
	})
}
