package onnx

import (
	"math"
	"slices"

	"github.com/seed90331342/attn/backend/oracle"
	"github.com/seed90331342/attn/cmd/attn-onnx/internal/onnxfile"
)

// drawGroupQuery draws a GroupQueryAttention call. A recorded one is a call that ONNX Runtime takes, of which its document
// specifies all elements of the outputs: without padding, and with zeros in rows of the past that are no tokens.
func drawGroupQuery(seed uint64, recorded bool) *onnxFiles {
	p := newRuntimeProblem("GroupQueryAttention", seed, 31, 16)
	p.recorded = recorded
	p.batch, p.kvHeads, p.seq, p.past, p.dim = 1+p.rng.IntN(3), 1+p.rng.IntN(2), 1+p.rng.IntN(4), p.rng.IntN(6), 16
	if recorded && p.past > 0 && p.batch > 1 {
		p.seq = 1
	}
	p.heads = p.kvHeads * (1 + p.rng.IntN(3))
	p.ints["num_heads"] = int64(p.heads)
	p.ints["kv_num_heads"] = int64(p.kvHeads)
	prompt := p.past == 0 || p.rng.IntN(4) == 0 && !recorded
	total, even := p.seq, recorded && p.flip()
	if even {
		total += p.past
	} else if !prompt {
		total += 1 + p.rng.IntN(p.past) // the past may have room for new rows
	}
	starts, lens := make([]int, p.batch), make([]int, p.batch)
	for b := range starts {
		lens[b] = p.rng.IntN(p.seq) // padding or not
		if recorded {
			lens[b] = p.seq - 1
		}
		if !prompt {
			starts[b] = p.rng.IntN(total - p.seq + 1)
			if even || recorded && b == 0 {
				starts[b] = total - p.seq
			}
			lens[b] = starts[b] + p.seq - 1
		}
	}
	present := max(total, p.past)
	q, k, v := p.draw(p.batch, p.seq, p.heads, p.dim), p.draw(p.batch, p.seq, p.kvHeads, p.dim), p.draw(p.batch, p.seq, p.kvHeads, p.dim)
	width, kvWidth := p.heads*p.dim, p.kvHeads*p.dim
	if p.rng.IntN(3) == 0 {
		all := &array{Dims: []int{p.batch, p.seq, width + 2*kvWidth}}
		for i := range p.batch * p.seq {
			all.Data = append(append(append(all.Data, q.Data[i*width:][:width]...), k.Data[i*kvWidth:][:kvWidth]...), v.Data[i*kvWidth:][:kvWidth]...)
		}
		p.in[gqQuery] = all.tensor(onnxfile.Float)
	} else {
		p.in[gqQuery], p.in[gqKey], p.in[gqValue] = q.flat(), k.flat(), v.flat()
	}
	var pastKey, pastValue *array
	if p.past > 0 || p.flip() || recorded {
		pastKey, pastValue = p.draw(p.batch, p.kvHeads, p.past, p.dim), p.draw(p.batch, p.kvHeads, p.past, p.dim)
	}
	for i := range p.batch * p.kvHeads * p.past * p.dim {
		if recorded && i/p.dim%p.past >= starts[i/(p.kvHeads*p.past*p.dim)] {
			pastKey.Data[i], pastValue.Data[i] = oracle.Element{}, oracle.Element{}
		}
	}
	p.in[gqLengths] = int32s(lens, p.batch)
	p.in[gqTotal] = int32s([]int{total}, [][]int{{1}, {}}[p.rng.IntN(2)]...)
	// Keys that the device has normed or rotated may be at the other side of a tie of int8.
	quantised := p.rng.IntN(3) == 0
	if !quantised && p.rng.IntN(3) == 0 {
		p.norm(q, k)
	}
	if !quantised && p.flip() {
		p.rotate(q, k, starts, total, prompt)
	}
	var kFactors, vFactors factorsOfRow
	if quantised {
		p.ints["kv_cache_bit_width"] = 8
		kFactors, vFactors = p.quantise(k, pastKey, gqKeyScale), p.quantise(v, pastValue, gqValueScale)
	}
	if pastKey != nil {
		p.in[gqPastKey], p.in[gqPastValue] = pastKey.tensor(onnxfile.Float), pastValue.tensor(onnxfile.Float)
		if quantised {
			p.in[gqPastKey], p.in[gqPastValue] = int8s(pastKey.Data, pastKey.Dims...), int8s(pastValue.Data, pastValue.Dims...)
		}
	}
	row, window, sinks := attendedRow{scale: p.scale()}, total, noSinks(p.heads)
	if p.flip() {
		row.softcap = p.setFloat("softcap", 0.5)
	}
	causal := p.rng.IntN(4) > 0
	if !causal {
		p.ints["causal"] = 0
	} else if p.flip() {
		window = 1 + p.rng.IntN(4)
		p.ints["local_window_size"] = int64(window)
	}
	if p.rng.IntN(3) == 0 {
		p.ints["smooth_softmax"] = 1
		sinks = make([]float64, p.heads)
	}
	if p.rng.IntN(3) == 0 {
		drawn := p.draw(p.heads)
		p.in[gqSink] = drawn.tensor(onnxfile.Float)
		for h, e := range drawn.Data {
			sinks[h] = e.Value
		}
	}
	bias := p.attentionBias(gqBias, total)
	keys, values := p.cache(k, pastKey, present, starts), p.cache(v, pastValue, present, starts)
	mode := p.rng.IntN(3)
	if quantised || recorded && !even {
		mode = 0
	}
	if mode > 0 {
		p.ints["qk_output"] = int64(mode)
	}
	queries := q
	if quantised {
		// The factors of keys multiply queries, which rounds. Those of values multiply the output.
		queries = kFactors.times(q, p.kvHeads)
	}
	y, points := p.attend(row, queries, keys, values, sinks, func(b, h, i, j int) oracle.Element {
		at := starts[b] + i
		if causal && (j > at || j <= at-window) || !causal && j > lens[b] {
			return hidden
		}
		return oracle.Element{Value: bias(b, h, i, j)}
	})
	cached := onnxfile.Float
	if quantised {
		cached, y.Dims = onnxfile.Int8, []int{p.batch, p.seq, p.heads, p.dim}
		y = vFactors.times(y, p.kvHeads)
	}
	p.expect(onnxfile.Float, y.Data, p.batch, p.seq, width)
	p.expect(cached, keys.Data, keys.Dims...)
	p.expect(cached, values.Data, values.Dims...)
	if mode > 0 {
		var qk []oracle.Element // total of present columns, with 0 for hidden keys
		for n, e := range points[mode+1] {
			if n%present < total {
				if math.IsInf(e.Value, -1) {
					e = oracle.Element{}
				}
				qk = append(qk, e)
			}
		}
		p.expect(onnxfile.Float, qk, p.batch, p.heads, p.seq, total)
	}
	return &p.onnxFiles
}

// norm draws weights, and replaces the heads of queries and keys by their root-mean-square norms.
func (p *runtimeProblem) norm(q, k *array) {
	epsilon := 1e-6
	if p.flip() {
		epsilon = p.setFloat("qk_norm_epsilon", 0.001)
	}
	p.in[gqQueryNorm], p.in[gqKeyNorm] = p.draw(p.dim).tensor(onnxfile.Float), p.draw(p.dim).tensor(onnxfile.Float)
	norm(q.Data, p.in[gqQueryNorm], epsilon)
	norm(k.Data, p.in[gqKeyNorm], epsilon)
}

// factorsOfRow are the factors of the elements of a row of a quantised cache, [kv heads·size].
type factorsOfRow []float64

// quantise draws a quantised cache: it replaces x, [batch, seq, kv heads, dim], by integers and the past by others, and
// returns the factors. Some integers are beyond int8.
func (p *runtimeProblem) quantise(x, past *array, scale int) factorsOfRow {
	kind, dims := "PER_CHANNEL", []int{1, p.kvHeads, 1, p.dim}
	if p.flip() && !p.recorded || p.recorded && p.heads%2 == 0 {
		kind, dims = "PER_TENSOR", []int{1}
	}
	p.texts[map[int]string{gqKeyScale: "k_quant_type", gqValueScale: "v_quant_type"}[scale]] = kind
	drawn := zeros(dims...)
	for i := range drawn.Data {
		drawn.Data[i].Value = float64(float32(0.006 + 0.02*p.rng.Float64()))
	}
	p.in[scale] = drawn.tensor(onnxfile.Float)
	f := make(factorsOfRow, p.kvHeads*p.dim)
	for i := range f {
		f[i] = drawn.Data[i%len(drawn.Data)].Value
	}
	f.quantise(x.Data)
	if past != nil {
		for i, e := range past.Data {
			if e.Value != 0 {
				past.Data[i].Value = float64(p.rng.IntN(256) - 128)
			}
		}
	}
	return f
}

// quantise replaces rows by integers.
func (f factorsOfRow) quantise(rows []oracle.Element) {
	for i := range rows {
		rows[i].Value = min(max(math.RoundToEven(rows[i].Value/f[i%len(f)]), -128), 127)
	}
}

// times returns x, [..., heads, size], whose groups of heads share a kv head, times the factors.
func (f factorsOfRow) times(x *array, kvHeads int) *array {
	y, heads, size := zeros(x.Dims...), x.Dims[len(x.Dims)-2], x.Dims[len(x.Dims)-1]
	for i, e := range x.Data {
		y.Data[i] = scaled(e, f[i/size%heads*kvHeads/heads*size+i%size])
	}
	return y
}

// rotate draws angles and rotates queries and keys.
func (p *runtimeProblem) rotate(q, k *array, starts []int, total int, prompt bool) {
	p.ints["do_rotary"] = 1
	pairs := 8
	if !p.recorded {
		pairs = 1 + p.rng.IntN(8)
	}
	cos, sin := p.draw(total+2, pairs), p.draw(total+2, pairs)
	p.in[gqCos], p.in[gqSin] = cos.tensor(onnxfile.Float), sin.tensor(onnxfile.Float)
	step, apart := 1, pairs
	if p.flip() {
		p.ints["rotary_interleaved"] = 1
		step, apart = 2, 1
	}
	position := func(b, s int) int { return starts[b] + s }
	if p.rng.IntN(3) == 0 {
		ids := make([]int, p.batch*p.seq)
		for i := range ids {
			ids[i] = p.rng.IntN(3)
		}
		p.in[gqPositions] = int64s(ids...)
		p.in[gqPositions].Shape = []int{p.batch, p.seq}
		position = func(b, s int) int { return ids[b*p.seq+s] }
		if prompt {
			position = func(_, s int) int { return ids[0] + s }
		}
	}
	for _, x := range []*array{q, k} {
		for n := range len(x.Data) / p.dim {
			at := position(n/x.Dims[2]/p.seq, n/x.Dims[2]%p.seq)
			for i := range pairs {
				first := n*p.dim + i*step
				rotate(&x.Data[first], &x.Data[first+apart], cos.at(at, i).Value, sin.at(at, i).Value)
			}
		}
	}
}

// drawWindowCache draws a GroupQueryAttention call whose cache has the rows of a window. The expected outputs are those of
// attention to all tokens so far, of which the cache has lost some.
func drawWindowCache(seed uint64, recorded bool) *onnxFiles {
	p := newRuntimeProblem("GroupQueryAttention", seed, 47, 12)
	p.recorded = recorded
	p.batch, p.kvHeads, p.seq, p.dim = 1+p.rng.IntN(3), 1+p.rng.IntN(2), 1+p.rng.IntN(6), 16
	p.heads = p.kvHeads * (1 + p.rng.IntN(3))
	window := 1 + p.rng.IntN(4)
	capacity := window + p.rng.IntN(4)
	// kept returns the rows of the cache after so many tokens, one after the other.
	kept := func(tokens int) (rows int) {
		for range tokens {
			if rows == capacity {
				rows = window - 1
			}
			rows++
		}
		return rows
	}
	p.ints["num_heads"] = int64(p.heads)
	p.ints["kv_num_heads"] = int64(p.kvHeads)
	p.ints["local_window_size"] = int64(window)
	p.ints["sliding_window_cache"] = 1
	prompt := p.rng.IntN(3) == 0
	if recorded && !prompt && p.seq > 1 {
		p.batch = 1
	}
	starts, lens, total := make([]int, p.batch), make([]int, p.batch), p.seq
	for b := range starts {
		if lens[b] = p.rng.IntN(p.seq); recorded {
			lens[b] = p.seq - 1
		}
		if !prompt {
			starts[b] = 1 + p.rng.IntN(12)
			lens[b] = starts[b] + p.seq - 1
			total = max(total, lens[b]+1)
		}
	}
	p.past = total // of all tokens, not of the cache
	pastKey, pastValue := p.draw(p.batch, p.kvHeads, total, p.dim), p.draw(p.batch, p.kvHeads, total, p.dim)
	q, k, v := p.draw(p.batch, p.seq, p.heads, p.dim), p.draw(p.batch, p.seq, p.kvHeads, p.dim), p.draw(p.batch, p.seq, p.kvHeads, p.dim)
	p.in[gqQuery], p.in[gqKey], p.in[gqValue] = q.flat(), k.flat(), v.flat()
	p.in[gqLengths], p.in[gqTotal] = int32s(lens, p.batch), int32s([]int{total}, 1)
	if p.flip() {
		p.rotate(q, k, starts, total, prompt)
	}
	bias := p.attentionBias(gqBias, total)
	keys, values := p.cache(k, pastKey, total, starts), p.cache(v, pastValue, total, starts)
	// cached returns the rows of x that the cache has after the tokens of each batch, and others of rest.
	cached := func(x, rest *array, tokens func(b int) int) *array {
		a := &array{Dims: rest.Dims, Data: slices.Clone(rest.Data)}
		for i := range p.batch * p.kvHeads {
			n := tokens(i / p.kvHeads)
			copy(a.Data[i*capacity*p.dim:], x.Data[(i*total+n-kept(n))*p.dim:(i*total+n)*p.dim])
		}
		return a
	}
	before, after := func(b int) int { return starts[b] }, func(b int) int { return lens[b] + 1 }
	p.in[gqPastKey] = cached(pastKey, p.draw(p.batch, p.kvHeads, capacity, p.dim), before).tensor(onnxfile.Float)
	p.in[gqPastValue] = cached(pastValue, p.draw(p.batch, p.kvHeads, capacity, p.dim), before).tensor(onnxfile.Float)
	y, _ := p.attend(attendedRow{scale: 1 / math.Sqrt(float64(p.dim))}, q, keys, values, noSinks(p.heads), func(b, h, i, j int) oracle.Element {
		if at := starts[b] + i; j > at || j <= at-window {
			return hidden
		}
		return oracle.Element{Value: bias(b, h, i, j)}
	})
	none := zeros(p.batch, p.kvHeads, capacity, p.dim)
	p.expect(onnxfile.Float, y.Data, y.Dims...)
	for _, x := range []*array{keys, values} {
		p.expect(onnxfile.Float, cached(x, none, after).Data, none.Dims...)
	}
	return &p.onnxFiles
}
