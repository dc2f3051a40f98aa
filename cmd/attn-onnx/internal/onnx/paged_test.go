package onnx

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"testing"

	"github.com/seed90331342/attn/backend/oracle"
	"github.com/seed90331342/attn/cmd/attn-onnx/internal/onnxfile"
)

// int32s returns a tensor of integers.
func int32s(data []int, shape ...int) *onnxfile.Tensor {
	t := &onnxfile.Tensor{Type: onnxfile.Int32, Shape: shape}
	for _, n := range data {
		t.Data = binary.LittleEndian.AppendUint32(t.Data, uint32(int32(n)))
	}
	return t
}

// drawPaged draws a PagedAttention call with the expected outputs: the formula in float64, a key after the other. Half
// types, which round rows that are normed or rotated, are drawn without that.
func drawPaged(seed uint64) *onnxFiles {
	rng := rand.New(rand.NewPCG(seed, 43))
	flip := func() bool { return rng.IntN(2) == 0 }
	c := &onnxFiles{operator: microsoft + ".PagedAttention", opset: 1, ints: map[string]int64{}, floats: map[string]float32{}, texts: map[string]string{}}
	d := []onnxfile.DataType{onnxfile.Float, onnxfile.Float, onnxfile.Float16, onnxfile.BFloat16}[rng.IntN(4)]
	const dim = 16
	batch, block, width, kvHeads, valueSize := 1+rng.IntN(3), 1+rng.IntN(4), 1+rng.IntN(3), 1+rng.IntN(2), dim
	latent := rng.IntN(4) == 0
	if latent {
		kvHeads, c.texts["kv_cache_layout"] = 1, "LATENT"
		if flip() {
			valueSize = 8
			c.ints["v_head_size"] = 8
		}
	}
	heads := kvHeads * (1 + rng.IntN(3))
	c.ints["num_heads"], c.ints["kv_num_heads"] = int64(heads), int64(kvHeads)

	// Sequences, the last block of the pool belongs to none of them.
	blocks := batch*width + 1
	pages := rng.Perm(blocks)
	var past, table, slots, sequence, position []int
	cumulative := []int{0}
	for b := range batch {
		n := rng.IntN(block * width)
		added := rng.IntN(block*width - n + 1)
		if b == 0 {
			added = max(1, added)
		}
		past, cumulative = append(past, n), append(cumulative, cumulative[b]+added)
		for i := range width {
			page := pages[b*width+i]
			if i*block >= n+added && flip() {
				page = -1
			}
			table = append(table, page)
		}
		for at := n; at < n+added; at++ {
			sequence, position = append(sequence, b), append(position, at)
			slots = append(slots, pages[b*width+at/block]*block+at%block)
		}
	}
	tokens := len(slots)
	c.in = make([]*onnxfile.Tensor, len(pagedInputs))
	c.in[paCumulative], c.in[paPast], c.in[paTable] = int32s(cumulative, batch+1), int32s(past, batch), int32s(table, batch, width)
	if flip() {
		for i := range slots {
			if rng.IntN(4) == 0 {
				slots[i] = []int{-1, pages[blocks-1]*block + i%block}[rng.IntN(2)]
			}
		}
		c.in[paSlots] = int32s(slots, tokens)
	}
	if flip() {
		c.in[paMetadata] = int32s([]int{0, 0}, 2)
	}
	q, k, v := uniform(rng, d, -1, tokens, heads*dim), uniform(rng, d, -1, tokens, kvHeads*dim), uniform(rng, d, -1, tokens, kvHeads*dim)
	c.in[paQuery], c.in[paKey], c.in[paValue] = q, k, v
	c.in[paKeyCache], c.in[paValueCache] = uniform(rng, d, -1, blocks, block, kvHeads, dim), uniform(rng, d, -1, blocks, block, kvHeads, dim)
	if latent {
		c.in[paValue], c.in[paValueCache] = nil, nil
	} else if rng.IntN(3) == 0 {
		all := &onnxfile.Tensor{Type: d, Shape: []int{tokens, (heads + 2*kvHeads) * dim}}
		for i := range tokens {
			for _, t := range []*onnxfile.Tensor{q, k, v} {
				n := len(t.Data) / tokens
				all.Data = append(all.Data, t.Data[i*n:][:n]...)
			}
		}
		c.in[paQuery], c.in[paKey], c.in[paValue] = all, nil, nil
	}
	queries, keys, newValues := elementsOf(q), elementsOf(k), elementsOf(v)
	quantised := rng.IntN(3) == 0 // without norm and rotation, after which keys may be at the other side of a tie
	if !quantised && d == onnxfile.Float && flip() {
		epsilon := float32(0.001 + rng.Float64())
		c.floats["qk_norm_epsilon"] = epsilon
		c.in[paQueryNorm], c.in[paKeyNorm] = uniform(rng, d, -1, dim), uniform(rng, d, -1, dim)
		norm(queries, c.in[paQueryNorm], float64(epsilon))
		norm(keys, c.in[paKeyNorm], float64(epsilon))
	}
	if !quantised && d == onnxfile.Float && flip() {
		pairs, offset, step, apart := []int{2, 4}[rng.IntN(2)], 8*rng.IntN(2), 1, 0
		c.ints["do_rotary"], c.ints["rotary_offset"] = 1, int64(offset)
		if apart = pairs; flip() {
			c.ints["rotary_interleaved"] = 1
			step, apart = 2, 1
		}
		cos, sin := uniform(rng, d, -1, block*width, pairs), uniform(rng, d, -1, block*width, pairs)
		c.in[paCos], c.in[paSin] = cos, sin
		for _, rows := range [][]oracle.Element{queries, keys} {
			for at := 0; at < len(rows); at += dim {
				token := at / (len(rows) / tokens)
				for i := range pairs {
					first := at + offset + i*step
					angle := position[token]*pairs + i
					rotate(&rows[first], &rows[first+apart], cos.At(angle), sin.At(angle))
				}
			}
		}
	}
	row := kvHeads * dim
	var vFactors factorsOfRow
	if quantised {
		kFactors := c.quantise(rng, "k_quant_type", paKeyScale, paKeyCache, row, keys)
		if vFactors = kFactors; !latent {
			vFactors = c.quantise(rng, "v_quant_type", paValueScale, paValueCache, row, newValues)
		}
		// The factors of keys multiply queries, which rounds to f32. Those of values multiply the output.
		queries = kFactors.times(&array{Dims: []int{tokens, heads, dim}, Data: queries}, kvHeads).Data
	}
	keyCache, valueCache := elementsOf(c.in[paKeyCache]), []oracle.Element(nil)
	if !latent {
		valueCache = elementsOf(c.in[paValueCache])
	}
	for i, slot := range slots {
		if slot >= 0 {
			copy(keyCache[slot*row:], keys[i*row:][:row])
			if !latent {
				copy(valueCache[slot*row:], newValues[i*row:][:row])
			}
		}
	}
	attended, window, causal := attendedRow{scale: 0.25}, math.MaxInt32, rng.IntN(4) > 0
	if flip() || valueSize < dim {
		c.floats["scale"] = float32(0.1 + rng.Float64())
		attended.scale = float64(c.floats["scale"])
	}
	if flip() {
		c.floats["softcap"] = float32(0.5 + rng.Float64())
		attended.softcap = float64(c.floats["softcap"])
	}
	if flip() {
		window = 1 + rng.IntN(5)
		c.ints["local_window_size"] = int64(window)
	}
	if !causal {
		c.ints["is_causal"] = 0
	}
	sinks := noSinks(heads)
	if rng.IntN(3) == 0 {
		c.in[paSink] = uniform(rng, d, -1, heads)
		for h, e := range elementsOf(c.in[paSink]) {
			sinks[h] = e.Value
		}
	}
	values := valueCache
	if latent {
		values = keyCache
	}
	var y []oracle.Element
	for n := range tokens * heads {
		token, h := n/heads, n%heads
		b := sequence[token]
		attended.q, attended.k, attended.v, attended.bias, attended.sink = queries[n*dim:][:dim], nil, nil, nil, sinks[h]
		for j := range past[b] + cumulative[b+1] - cumulative[b] {
			at := ((table[b*width+j/block]*block+j%block)*kvHeads + h*kvHeads/heads) * dim
			attended.k, attended.v = append(attended.k, keyCache[at:at+dim]...), append(attended.v, values[at:at+valueSize]...)
			term := oracle.Element{}
			if causal && j > position[token] || j <= position[token]-window {
				term = hidden
			}
			attended.bias = append(attended.bias, term)
		}
		o, _ := attended.solve()
		for i, e := range o {
			if quantised {
				e = scaled(e, vFactors[h*kvHeads/heads*dim+i])
			}
			y = append(y, e)
		}
	}
	cached := d
	if quantised {
		cached = onnxfile.Int8
	}
	c.expect(d, y, tokens, heads*valueSize)
	c.expect(cached, keyCache, blocks, block, kvHeads, dim)
	if !latent {
		c.expect(cached, valueCache, blocks, block, kvHeads, dim)
	}
	return c
}

// int8s returns a tensor of integers.
func int8s(data []oracle.Element, shape ...int) *onnxfile.Tensor {
	t := &onnxfile.Tensor{Type: onnxfile.Int8, Shape: shape}
	for _, e := range data {
		t.Data = append(t.Data, byte(int8(e.Value)))
	}
	return t
}

// quantise draws a quantised cache and its scale, replaces new rows by integers, some of which are beyond int8, and returns the
// factor of each element of a row.
func (c *onnxFiles) quantise(rng *rand.Rand, attribute string, scale, cache, row int, rows []oracle.Element) factorsOfRow {
	shape := c.in[cache].Shape
	size := []int{shape[2], 1, shape[3]}
	if c.texts[attribute] = "PER_CHANNEL"; rng.IntN(2) == 0 {
		c.texts[attribute], size = "PER_TENSOR", []int{1}
	}
	c.in[scale] = times(uniform(rng, onnxfile.Float, 0.3, size...), 0.02)
	f := make(factorsOfRow, row)
	for i := range f {
		f[i] = c.in[scale].At(i % c.in[scale].Elements())
	}
	f.quantise(rows)
	old := zeros(shape...)
	for i := range old.Data {
		old.Data[i].Value = float64(rng.IntN(256) - 128)
	}
	c.in[cache] = int8s(old.Data, shape...)
	return f
}

// TestPagedRefused has bad inputs of PagedAttention: two sequences with 1 and 2 past keys and 2 and 1 new rows, two heads of
// size 8, one key head, and 4 blocks of 2 rows.
func TestPagedRefused(t *testing.T) {
	ones := func(shape ...int) *onnxfile.Tensor { return repeated(onnxfile.Float, 1, shape...) }
	latent := func(c *onnxFiles) {
		c.texts["kv_cache_layout"] = "LATENT"
		c.in[paValue], c.in[paValueCache], c.want[2] = nil, nil, nil
	}
	input := func(i int, x *onnxfile.Tensor) func(c *onnxFiles) { return func(c *onnxFiles) { c.in[i] = x } }
	attribute := func(name string, x int64) func(c *onnxFiles) { return func(c *onnxFiles) { c.ints[name] = x } }
	for _, c := range []struct {
		name   string
		change func(c *onnxFiles)
		says   string // "" when the case is valid
	}{
		{"nothing", func(*onnxFiles) {}, ""},
		{"the latent layout", latent, ""},
		{"no cache", input(paKeyCache, nil), "input key_cache is missing"},
		{"no values", input(paValueCache, nil), "input value_cache has shape missing: the layout LATENT has no values"},
		{"values of the latent layout", func(c *onnxFiles) { c.texts["kv_cache_layout"] = "LATENT" }, "input value has shape [3 8]: the layout LATENT has no values"},
		{"two latent heads", func(c *onnxFiles) { latent(c); c.ints["kv_num_heads"] = 2 }, "kv_num_heads 2: num_heads must be a multiple of it, and kv_num_heads 1 in the layout LATENT"},
		{"a small value without a scale", func(c *onnxFiles) { latent(c); c.ints["v_head_size"] = 4 }, "v_head_size is 4: it must be at most the head size 8, and needs the attribute scale"},
		{"a large value", func(c *onnxFiles) { latent(c); c.ints["v_head_size"] = 9 }, "v_head_size is 9: it must be at most the head size 8"},
		{"values of another size", attribute("v_head_size", 4), "attribute v_head_size is 4, only the layout LATENT"},
		{"heads that do not divide", attribute("kv_num_heads", 3), "num_heads is 2 and kv_num_heads 3"},
		{"a window of 0", attribute("local_window_size", 0), "local_window_size is 0"},
		{"another layout", func(c *onnxFiles) { c.texts["kv_cache_layout"] = "RING" }, `kv_cache_layout is "RING"`},
		{"int8 keys alone", func(c *onnxFiles) { c.texts["k_quant_type"] = "PER_TENSOR" }, "k_quant_type is PER_TENSOR and v_quant_type NONE"},
		{"4 bits", func(c *onnxFiles) { c.texts["k_cache_dtype"] = "int4" }, `k_cache_dtype is "int4", it must be one of float16, bfloat16, int8`},
		{"int8 without a kind", func(c *onnxFiles) { c.texts["v_cache_dtype"] = "int8" }, "v_cache_dtype is int8 and value_cache f32"},
		{"f16 caches by name", func(c *onnxFiles) { c.texts["k_cache_dtype"] = "float16" }, "k_cache_dtype is float16 and key_cache f32"},
		{"scales", input(paKeyScale, ones(1)), "k_scale has shape [1] for a cache of the kind NONE"},
		{"int8 latent", func(c *onnxFiles) {
			latent(c)
			c.texts["k_quant_type"], c.in[paKeyScale], c.in[paKeyCache] = "PER_TENSOR", ones(1), int8s(slices.Repeat([]oracle.Element{{Value: 1}}, 64), 4, 2, 1, 8)
			c.want[1] = c.in[paKeyCache]
		}, ""},
		{"latent values with a scale", func(c *onnxFiles) { latent(c); c.in[paValueScale] = ones(1) }, "v_scale has shape [1], the layout LATENT has only that of keys"},
		{"a quantized cache of floats", func(c *onnxFiles) { latent(c); c.texts["k_quant_type"], c.in[paKeyScale] = "PER_TENSOR", ones(1) }, "key_cache is f32, it must be int8"},
		{"a query of 3 axes", input(paQuery, ones(1, 3, 16)), "query has shape [1 3 16], it must be [tokens 2·size]"},
		{"no rows", input(paQuery, ones(0, 16)), "query has shape [0 16]"},
		{"no key", input(paKey, nil), "key has shape missing, it must be [3 8]"},
		{"a key of another size", input(paKey, ones(3, 16)), "key has shape [3 16], it must be [3 8]"},
		{"values of f16", input(paValue, repeated(onnxfile.Float16, 1, 3, 8)), "value is f16 and query f32"},
		{"f64", input(paQuery, repeated(onnxfile.Double, 1, 3, 16)), "query is f64"},
		{"blocks of other heads", input(paKeyCache, ones(4, 2, 2, 8)), "key_cache has shape [4 2 2 8], it must be [blocks rows 1 8]"},
		{"fewer blocks of values", input(paValueCache, ones(3, 2, 1, 8)), "value_cache has shape [3 2 1 8] and key_cache [4 2 1 8]"},
		{"lengths of int64", input(paPast, int64s(1, 2)), "past_seqlens is int64, it must be int32"},
		{"lengths of another batch", input(paPast, int32s([]int{1}, 1)), "cumulative_sequence_length has shape [3], past_seqlens [1] and block_table [2 2]"},
		{"rows that are missing", input(paCumulative, int32s([]int{0, 2, 4}, 3)), "cumulative_sequence_length is [0 2 4]: it must begin with 0, never fall, and end with 3"},
		{"rows that fall", input(paCumulative, int32s([]int{0, 3, 2}, 3)), "cumulative_sequence_length is [0 3 2]"},
		{"a past below 0", input(paPast, int32s([]int{1, -1}, 2)), "past_seqlens[1] is -1"},
		{"a past that is too long", input(paPast, int32s([]int{3, 2}, 2)), "past_seqlens[0] is 3, the sequence has 2 new rows: there must be room for both in the 2 blocks of 2 rows"},
		{"a block that does not exist", input(paTable, int32s([]int{0, 4, 2, 3}, 2, 2)), "block_table[0][1] is 4, it must be 0 to 3"},
		{"no block", input(paTable, int32s([]int{0, 1, 2, -1}, 2, 2)), "block_table[1][1] is -1, it must be 0 to 3"},
		{"slots of other rows", input(paSlots, int32s([]int{0}, 1)), "slot_mapping has shape [1], it must be [3]"},
		{"a slot beyond the pool", input(paSlots, int32s([]int{0, 8, -1}, 3)), "slot_mapping[1] is 8, it must be 0 to 7, or -1"},
		{"rotary without angles", attribute("do_rotary", 1), "do_rotary needs both as [positions pairs] with at most 4 pairs"},
		{"rotary beyond the head", func(c *onnxFiles) {
			c.ints["do_rotary"], c.ints["rotary_offset"] = 1, 8
			c.in[paCos], c.in[paSin] = ones(4, 2), ones(4, 2)
		}, "with at most 0 pairs"},
		{"an odd offset", attribute("rotary_offset", 4), "rotary_offset is 4, it must be a multiple of 8"},
		{"a position without angles", func(c *onnxFiles) {
			c.ints["do_rotary"] = 1
			c.in[paCos], c.in[paSin] = ones(2, 2), ones(2, 2)
		}, "position 2 (element 1) has no row in cos_cache, it must be 0 to 1"},
		{"sinks of other heads", input(paSink, ones(1)), "head_sink has shape [1], it must be [2]"},
		{"a norm of queries alone", input(paQueryNorm, ones(8)), "q_norm_weight has shape [8] and k_norm_weight missing"},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := &onnxFiles{operator: microsoft + ".PagedAttention", opset: 1, ints: map[string]int64{"num_heads": 2, "kv_num_heads": 1}, texts: map[string]string{}}
			p.in = make([]*onnxfile.Tensor, len(pagedInputs))
			p.in[paQuery], p.in[paKey], p.in[paValue] = ones(3, 16), ones(3, 8), ones(3, 8)
			p.in[paKeyCache], p.in[paValueCache] = ones(4, 2, 1, 8), ones(4, 2, 1, 8)
			p.in[paCumulative], p.in[paPast], p.in[paTable] = int32s([]int{0, 2, 3}, 3), int32s([]int{1, 2}, 2), int32s([]int{0, 1, 2, 3}, 2, 2)
			p.want = []*onnxfile.Tensor{ones(3, 16), ones(4, 2, 1, 8), ones(4, 2, 1, 8)} // keys and values of ones give ones
			c.change(p)
			dir := p.write(t, filepath.Join(t.TempDir(), "case"))
			wantOutcome(t, dir, c.says)
		})
	}
}
