package onnx

import (
	"math"
	"math/rand/v2"
	"slices"
)

// drawGroupQuery draws a GroupQueryAttention call. A recorded one is a call that ONNX Runtime takes, of which its document
// specifies all elements of the outputs: without padding, and with zeros in rows of the past that are no tokens.
func drawGroupQuery(seed uint64, recorded bool) string {
	p := &jsoncProblem{rng: rand.New(rand.NewPCG(seed, 31)), recorded: recorded}
	p.batch, p.kvHeads, p.seq, p.past, p.dim = 1+p.rng.IntN(3), 1+p.rng.IntN(2), 1+p.rng.IntN(4), p.rng.IntN(6), 16
	if recorded && p.past > 0 && p.batch > 1 {
		p.seq = 1
	}
	p.heads = p.kvHeads * (1 + p.rng.IntN(3))
	p.set("int", "num_heads", p.heads)
	p.set("int", "kv_num_heads", p.kvHeads)
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
	if p.past > 0 || p.flip() || recorded {
		p.in[gqPastKey], p.in[gqPastValue] = p.draw(p.batch, p.kvHeads, p.past, p.dim), p.draw(p.batch, p.kvHeads, p.past, p.dim)
	}
	for i := range p.batch * p.kvHeads * p.past * p.dim {
		if recorded && i/p.dim%p.past >= starts[i/(p.kvHeads*p.past*p.dim)] {
			p.in[gqPastKey].Data[i], p.in[gqPastValue].Data[i] = 0, 0
		}
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
		p.set("int", "kv_cache_bit_width", 8)
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
	if quantised || recorded && !even {
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
	if p.flip() && !p.recorded || p.recorded && p.heads%2 == 0 {
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
		for i, x := range a.Data {
			if x != 0 {
				a.Data[i] = float64(p.rng.IntN(256) - 128)
			}
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
	pairs := 8
	if !p.recorded {
		pairs = 1 + p.rng.IntN(8)
	}
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

// drawWindowCache draws a GroupQueryAttention call whose cache has the rows of a window. The expected outputs are those of
// attention to all tokens so far, of which the cache has lost some.
func drawWindowCache(seed uint64, recorded bool) string {
	p := &jsoncProblem{rng: rand.New(rand.NewPCG(seed, 47)), recorded: recorded}
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
	p.set("int", "num_heads", p.heads)
	p.set("int", "kv_num_heads", p.kvHeads)
	p.set("int", "local_window_size", window)
	p.set("int", "sliding_window_cache", 1)
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
	p.in = make([]*array, 12)
	p.in[gqQuery], p.in[gqKey], p.in[gqValue] = flat(q), flat(k), flat(v)
	p.in[gqLengths], p.in[gqTotal] = p.integers("int32", []int{p.batch}, lens...), p.integers("int32", []int{1}, total)
	if p.flip() {
		p.rotate(q, k, starts, total, prompt)
	}
	if p.flip() {
		p.in[gqBias] = p.draw([]int{1, p.batch}[p.rng.IntN(2)], []int{1, p.heads}[p.rng.IntN(2)], p.seq, total)
	}
	keys, values := p.cache(k, pastKey, total, starts), p.cache(v, pastValue, total, starts)
	// cached returns the rows of x that the cache has after the tokens of each batch, and others of rest.
	cached := func(x, rest *array, tokens func(b int) int) *array {
		a := &array{Type: "float32", Dims: rest.Dims, Data: slices.Clone(rest.Data)}
		for i := range p.batch * p.kvHeads {
			n := tokens(i / p.kvHeads)
			copy(a.Data[i*capacity*p.dim:], x.Data[(i*total+n-kept(n))*p.dim:(i*total+n)*p.dim])
		}
		return a
	}
	before, after := func(b int) int { return starts[b] }, func(b int) int { return lens[b] + 1 }
	p.in[gqPastKey] = cached(pastKey, p.draw(p.batch, p.kvHeads, capacity, p.dim), before)
	p.in[gqPastValue] = cached(pastValue, p.draw(p.batch, p.kvHeads, capacity, p.dim), before)
	y := p.attend(q, keys, values, slices.Repeat([]float64{math.Inf(-1)}, p.heads), func(x float64, b, h, i, j int) float64 {
		if at := starts[b] + i; j > at || j <= at-window {
			return math.Inf(-1)
		}
		x /= math.Sqrt(float64(p.dim))
		if bias := p.in[gqBias]; bias != nil {
			x += bias.at(b%bias.Dims[0], h%bias.Dims[1], i, j)
		}
		return x
	})
	none := p.zeros(p.batch, p.kvHeads, capacity, p.dim)
	p.out = []*array{y, cached(keys, none, after), cached(values, none, after)}
	return p.text("GroupQueryAttention")
}
