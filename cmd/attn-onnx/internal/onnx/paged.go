package onnx

import (
	"context"
	"fmt"
	"math"
	"slices"

	"github.com/seed90331342/attn/cmd/attn-onnx/internal/onnxfile"
	"github.com/seed90331342/attn/kernels"
)

// pagedOp is a PagedAttention node of ONNX Runtime: attention of packed sequences, whose keys and values are in blocks
// of a pool.
//
//	query [N, H·D]    key, value [N, Hkv·D]    output [N, H·D]    key_cache, value_cache [P, size, Hkv, D]
//	cumulative_sequence_length [B+1]    past_seqlens [B]    block_table [B, blocks]    slot_mapping [N]
//
// or query [N, (H+2·Hkv)·D] without key and value. Row i of sequence b is at position past_seqlens[b]+i. Its key and
// value are written to row slot_mapping of the pool, to none for -1, and without slot_mapping to the row that
// block_table gives to the position. Then it sees the keys of its sequence, up to its own when causal.
//
// In the layout LATENT there is one key head, and values are the first v_head_size elements of keys.
type pagedOp struct {
	heads, kvHeads, vHeadSize int // vHeadSize is 0 for D
	scale                     *float64
	softcap, epsilon          float64
	window                    int // with the current key; -1 means none
	causal, latent, smooth    bool
	rotary, interleaved       bool
	rotaryOffset              int
	kQuant, vQuant            string // kinds of factors of the caches
	kType, vType              string // element types of the caches, or ""
}

// The inputs of PagedAttention, by position.
const (
	paQuery = iota
	paKey
	paValue
	paKeyCache
	paValueCache
	paCumulative
	paPast
	paTable
	paCos
	paSin
	paSlots
	paSink
	paQueryNorm
	paKeyNorm
	paKeyScale
	paValueScale
	paMetadata
)

var pagedInputs = []string{"query", "key", "value", "key_cache", "value_cache", "cumulative_sequence_length", "past_seqlens", "block_table",
	"cos_cache", "sin_cache", "slot_mapping", "head_sink", "q_norm_weight", "k_norm_weight", "k_scale", "v_scale", "attention_metadata"}

func newPaged(_ *node, a *attributes) operator {
	op := &pagedOp{
		heads: headCount(a, "num_heads"), kvHeads: headCount(a, "kv_num_heads"), vHeadSize: a.integer("v_head_size", 0, 0, math.MaxInt32),
		scale: scaleOf(a), epsilon: epsilonOf(a), window: windowOf(a), causal: a.integer("is_causal", 1, 0, 1) == 1,
		latent: a.word("kv_cache_layout", "SEPARATE", "LATENT") == "LATENT", smooth: a.flag("smooth_softmax"),
		rotary: a.flag("do_rotary"), interleaved: a.flag("rotary_interleaved"), rotaryOffset: a.integer("rotary_offset", 0, 0, math.MaxInt32),
		kType: a.word("k_cache_dtype", "", "float16", "bfloat16", "int8"), vType: a.word("v_cache_dtype", "", "float16", "bfloat16", "int8"),
		kQuant: quantTypeOf(a, "k_quant_type"), vQuant: quantTypeOf(a, "v_quant_type"),
	}
	if x := a.number("softcap"); x != nil {
		op.softcap = *x
	}
	if op.latent {
		op.vQuant = op.kQuant
	}
	if (op.kQuant == "NONE") != (op.vQuant == "NONE") {
		a.fail("attribute k_quant_type is %s and v_quant_type %s: attn has quantized caches for keys and values or for none: %w", op.kQuant, op.vQuant, kernels.ErrUnsupported)
	}
	if op.heads%op.kvHeads != 0 || op.latent && op.kvHeads != 1 {
		a.fail("num_heads is %d and kv_num_heads %d: num_heads must be a multiple of it, and kv_num_heads 1 in the layout LATENT: %w", op.heads, op.kvHeads, kernels.ErrOption)
	}
	if op.vHeadSize > 0 && !op.latent {
		a.fail("attribute v_head_size is %d, only the layout LATENT has values of another size: leave it out: %w", op.vHeadSize, kernels.ErrOption)
	}
	return op
}

// pagedCall is a node with its inputs, checked.
type pagedCall struct {
	*pagedOp
	in                     []*onnxfile.Tensor
	q, k, v                *onnxfile.Tensor // [1, N, heads·size]; v is nil in the layout LATENT
	rows, size, valueSize  int              // N, D and the size of values
	blocks, block          int              // P and the rows of a block
	cumulative, past, lens []int            // lens are the keys of each sequence, past and new
	positions, slots       []int            // of each row of query
	table                  [][]int32
}

func (op *pagedOp) run(ctx context.Context, dev *kernels.Device, in []*onnxfile.Tensor) ([]*onnxfile.Tensor, string, error) {
	c := &pagedCall{pagedOp: op, in: in}
	for _, check := range []func() error{c.checkTypes, c.checkOperands, c.checkSequences, c.checkSlots} {
		if err := check(); err != nil {
			return nil, "", err
		}
	}
	sinks, err := sinksOf(in[paSink], op.heads, op.smooth)
	if err != nil {
		return nil, "", err
	}
	if c.q, c.k, err = normedHeads(ctx, dev, c.q, c.k, in[paQueryNorm], in[paKeyNorm], op.heads, op.kvHeads, op.epsilon); err != nil {
		return nil, "", err
	}
	if op.rotary {
		if err := checkAngles(in[paCos], in[paSin], c.size-op.rotaryOffset); err != nil {
			return nil, "", err
		}
		r := rotation{x: c.q, heads: op.heads, cos: in[paCos], sin: in[paSin], positions: c.positions, offset: op.rotaryOffset, interleaved: op.interleaved}
		if c.q, err = r.run(ctx, dev); err != nil {
			return nil, "", err
		}
		r.x, r.heads = c.k, op.kvHeads
		if c.k, err = r.run(ctx, dev); err != nil {
			return nil, "", err
		}
	}
	typ := c.q.Type
	kFactors, vFactors, err := c.quantise()
	if err != nil {
		return nil, "", err
	}
	how := "fused, pages, " + typ.String()
	if kFactors != nil {
		c.q = kFactors.scale(c.q, onnxfile.Float, op.heads, op.kvHeads)
		how = "fused, pages, q8, " + typeText(typ, kernels.F32)
	}
	keys, values := c.written(in[paKeyCache], c.k), (*onnxfile.Tensor)(nil)
	if !op.latent {
		values = c.written(in[paValueCache], c.v)
	}
	dtype := dtypeOf(c.q.Type)
	up := uploader{ctx: ctx, dev: dev}
	defer up.release()
	q := up.rows("query", c.q, dtype, op.heads)
	pool := func(name string, t *onnxfile.Tensor) kernels.Tensor {
		return up.view(up.cache(name, t, dtype).Swap(kernels.Heads, kernels.Seq))
	}
	k := pool("key_cache", keys)
	v := k
	switch {
	case !op.latent:
		v = pool("value_cache", values)
	case kFactors == nil: // else a row of int8 is whole, and the output is cut
		v = up.view(k.Slice(kernels.Dim, 0, c.valueSize))
	}
	if up.err != nil {
		return nil, "", up.err
	}
	opt := kernels.Options{
		Scale: op.scale, Softcap: op.softcap, Causal: op.causal, Offset: c.past, KLen: c.lens, Sinks: sinks,
		CuQ: c.cumulative, Pages: &kernels.Pages{Table: c.table, Keys: slices.Max(c.lens)},
	}
	if op.window > 0 {
		opt.Window = &kernels.Window{Left: op.window - 1, Right: kernels.Unbounded}
	}
	r, err := dev.Attention(ctx, q, k, v, opt)
	if err != nil {
		return nil, "", err
	}
	defer r.Release()
	o, err := r.O.Slice(kernels.Dim, 0, c.valueSize)
	if err != nil {
		return nil, "", err
	}
	y, err := unrows(ctx, dev, o, c.q)
	if err != nil {
		return nil, "", err
	}
	if vFactors != nil {
		y = vFactors.scale(y, typ, op.heads, op.kvHeads)
	}
	y.Shape = y.Shape[1:]
	return []*onnxfile.Tensor{y, keys, values}, how, nil
}

func (c *pagedCall) checkTypes() error {
	floats := slices.Clone(c.in)
	for n, name := range []string{c.kType, c.vType} {
		i := paKeyCache + n
		typ := map[string]onnxfile.DataType{"float16": onnxfile.Float16, "bfloat16": onnxfile.BFloat16, "int8": onnxfile.Int8}[name]
		if t := c.in[i]; t != nil && name != "" && t.Type != typ {
			return fmt.Errorf("attribute %c_cache_dtype is %s and %s %v: they must agree: %w", pagedInputs[i][0], name, pagedInputs[i], t.Type, kernels.ErrDType)
		}
	}
	for i, name := range pagedInputs {
		t := c.in[i]
		if t == nil && slices.Contains([]int{paKeyCache, paCumulative, paPast, paTable}, i) {
			return fmt.Errorf("input %s is missing: %w", name, kernels.ErrShape)
		}
		switch i {
		case paKeyScale, paValueScale:
			floats[i] = nil // factorsOf checks them
		case paCumulative, paPast, paTable, paSlots, paMetadata:
			if floats[i] = nil; t != nil && t.Type != onnxfile.Int32 {
				return fmt.Errorf("%s is %v, it must be int32: %w", name, t.Type, kernels.ErrDType)
			}
		case paValueCache, paValue:
			if c.latent && t != nil || !c.latent && i == paValueCache && t == nil {
				return fmt.Errorf("input %s has shape %v: the layout LATENT has no values, SEPARATE needs value_cache: %w", name, shapeOf(t), kernels.ErrOption)
			}
		}
		if t != nil && c.kQuant != "NONE" && (i == paKeyCache || i == paValueCache) {
			if floats[i] = nil; t.Type != onnxfile.Int8 {
				return fmt.Errorf("%s is %v, it must be int8 for k_quant_type %s and v_quant_type %s: %w", name, t.Type, c.kQuant, c.vQuant, kernels.ErrDType)
			}
		}
	}
	return checkHalves(pagedInputs, floats, -1)
}

// checkOperands splits a packed query, and derives the lengths from query, key, value and caches.
func (c *pagedCall) checkOperands() error {
	q, k, v, cache := c.in[paQuery], c.in[paKey], c.in[paValue], c.in[paKeyCache]
	packed, heads := k == nil && v == nil && !c.latent, c.heads
	if packed {
		heads += 2 * c.kvHeads
	}
	if s := q.Shape; len(s) != 2 || q.Elements() == 0 || s[1]%heads != 0 {
		return fmt.Errorf("query has shape %v, it must be [tokens %d·size] for num_heads %d and kv_num_heads %d (with key and value packed into it when both are missing), without a length of 0: %w", s, heads, c.heads, c.kvHeads, kernels.ErrShape)
	}
	c.rows, c.size = q.Shape[0], q.Shape[1]/heads
	hidden, kvHidden := c.heads*c.size, c.kvHeads*c.size
	if packed {
		row := heads * c.size
		k = columns(q, row, hidden, hidden+kvHidden, []int{c.rows, kvHidden})
		v = columns(q, row, hidden+kvHidden, row, []int{c.rows, kvHidden})
		q = columns(q, row, 0, hidden, []int{c.rows, hidden})
	}
	for i, t := range []*onnxfile.Tensor{k, v} {
		if want := []int{c.rows, kvHidden}; (i == 0 || !c.latent) && (t == nil || !slices.Equal(t.Shape, want)) {
			return fmt.Errorf("%s has shape %v, it must be %v for query %v: %w", []string{"key", "value"}[i], shapeOf(t), want, c.in[paQuery].Shape, kernels.ErrShape)
		}
	}
	if s := cache.Shape; len(s) != 4 || s[2] != c.kvHeads || s[3] != c.size || cache.Elements() == 0 {
		return fmt.Errorf("key_cache has shape %v, it must be [blocks rows %d %d], without a length of 0: %w", s, c.kvHeads, c.size, kernels.ErrShape)
	}
	if values := c.in[paValueCache]; values != nil && !slices.Equal(values.Shape, cache.Shape) {
		return fmt.Errorf("value_cache has shape %v and key_cache %v: they must be equal: %w", values.Shape, cache.Shape, kernels.ErrShape)
	}
	c.blocks, c.block = cache.Shape[0], cache.Shape[1]
	if c.valueSize = c.vHeadSize; c.valueSize == 0 {
		c.valueSize = c.size
	}
	if c.valueSize > c.size || c.valueSize < c.size && c.scale == nil {
		return fmt.Errorf("attribute v_head_size is %d: it must be at most the head size %d, and needs the attribute scale unless it is equal: %w", c.valueSize, c.size, kernels.ErrOption)
	}
	if c.rotaryOffset%8 != 0 || c.rotaryOffset > c.size {
		return fmt.Errorf("attribute rotary_offset is %d, it must be a multiple of 8 and at most the head size %d: %w", c.rotaryOffset, c.size, kernels.ErrOption)
	}
	batched := func(t *onnxfile.Tensor) *onnxfile.Tensor {
		return &onnxfile.Tensor{Type: t.Type, Shape: append([]int{1}, t.Shape...), Data: t.Data}
	}
	if c.q, c.k = batched(q), batched(k); !c.latent {
		c.v = batched(v)
	}
	return nil
}

// checkSequences reads cumulative_sequence_length, past_seqlens and block_table.
func (c *pagedCall) checkSequences() error {
	cumulative, past, table := c.in[paCumulative], c.in[paPast], c.in[paTable]
	batch := firstLength(past)
	if len(past.Shape) != 1 || batch < 1 || !slices.Equal(cumulative.Shape, []int{batch + 1}) || len(table.Shape) != 2 || table.Shape[0] != batch {
		return fmt.Errorf("cumulative_sequence_length has shape %v, past_seqlens %v and block_table %v: they must be [batch+1], [batch] and [batch blocks]: %w", cumulative.Shape, past.Shape, table.Shape, kernels.ErrShape)
	}
	width := table.Shape[1]
	c.cumulative = integers(cumulative)
	for b, n := range integers(past) {
		lo, hi := c.cumulative[b], c.cumulative[b+1]
		if lo < 0 || hi < lo || hi > c.rows || b == 0 && lo != 0 || b == batch-1 && hi != c.rows {
			return fmt.Errorf("cumulative_sequence_length is %v: it must begin with 0, never fall, and end with %d, the rows of query: %w", c.cumulative, c.rows, kernels.ErrOption)
		}
		if n < 0 || n+hi-lo > width*c.block {
			return fmt.Errorf("past_seqlens[%d] is %d, the sequence has %d new rows: there must be room for both in the %d blocks of %d rows of block_table: %w", b, n, hi-lo, width, c.block, kernels.ErrOption)
		}
		c.past, c.lens = append(c.past, n), append(c.lens, n+hi-lo)
		row := make([]int32, width)
		for i := range row {
			row[i] = int32(table.Int(b*width + i))
			if i*c.block < n+hi-lo && (row[i] < 0 || int(row[i]) >= c.blocks) {
				return fmt.Errorf("block_table[%d][%d] is %d, it must be 0 to %d, a block of key_cache, for %d keys: %w", b, i, row[i], c.blocks-1, n+hi-lo, kernels.ErrOption)
			}
		}
		c.table = append(c.table, row)
		for position := n; position < n+hi-lo; position++ {
			c.positions = append(c.positions, position)
			c.slots = append(c.slots, int(row[position/c.block])*c.block+position%c.block)
		}
	}
	return nil
}

// checkSlots reads slot_mapping.
func (c *pagedCall) checkSlots() error {
	t := c.in[paSlots]
	if t == nil {
		return nil
	}
	if !slices.Equal(t.Shape, []int{c.rows}) {
		return fmt.Errorf("slot_mapping has shape %v, it must be [%d], a row of the cache for each row of query: %w", t.Shape, c.rows, kernels.ErrShape)
	}
	c.slots = integers(t)
	for i, slot := range c.slots {
		if slot < -1 || slot >= c.blocks*c.block {
			return fmt.Errorf("slot_mapping[%d] is %d, it must be 0 to %d, or -1 for none: %w", i, slot, c.blocks*c.block-1, kernels.ErrOption)
		}
	}
	return nil
}

// quantise replaces the new keys and values by int8 if the caches have that, and returns the factors of both.
func (c *pagedCall) quantise() (kFactors, vFactors factors, err error) {
	if kFactors, err = factorsOf("k_scale", c.kQuant, c.in[paKeyScale], c.kvHeads, c.size); err != nil {
		return nil, nil, err
	}
	if c.latent {
		if c.in[paValueScale] != nil {
			return nil, nil, fmt.Errorf("v_scale has shape %v, the layout LATENT has only that of keys: leave it out: %w", c.in[paValueScale].Shape, kernels.ErrOption)
		}
		vFactors = kFactors[:min(len(kFactors), c.valueSize)]
	} else if vFactors, err = factorsOf("v_scale", c.vQuant, c.in[paValueScale], c.kvHeads, c.size); err != nil {
		return nil, nil, err
	}
	if kFactors == nil {
		return nil, nil, nil
	}
	if c.k, err = kFactors.quantise("key", c.k); err == nil && !c.latent {
		c.v, err = vFactors.quantise("value", c.v)
	}
	return kFactors, vFactors, err
}

// written returns a cache with the new rows in their slots.
func (c *pagedCall) written(cache, rows *onnxfile.Tensor) *onnxfile.Tensor {
	t := &onnxfile.Tensor{Type: cache.Type, Shape: cache.Shape, Data: slices.Clone(cache.Data)}
	size := c.kvHeads * c.size * cache.Type.Size()
	for i, slot := range c.slots {
		if slot >= 0 {
			copy(t.Data[slot*size:], rows.Data[i*size:][:size])
		}
	}
	return t
}

// integers returns the elements of a tensor of integers.
func integers(t *onnxfile.Tensor) []int {
	list := make([]int, t.Elements())
	for i := range list {
		list[i] = int(t.Int(i))
	}
	return list
}
