package onnx

import (
	"context"
	"fmt"
	"math"
	"slices"

	"github.com/seed90331342/attn/cmd/attn-onnx/internal/onnxfile"
	"github.com/seed90331342/attn/kernels"
)

// groupQueryOp is a GroupQueryAttention node of ONNX Runtime: causal attention with a cache, or attention to all of it.
//
//	query [B, S, H·D]    key, value [B, S, Hkv·D]    past_key, past_value [B, Hkv, P, D]
//
// or query [B, S, (H+2·Hkv)·D] without key and value. Keys and values of no new row (sequence 0) read the past alone.
// Batch b has seqlens_k[b]+1 keys, of which the new ones are the last. A call with as many queries as
// total_sequence_length is a prompt: its keys are the first, and seqlens_k counts those that are not padding.
// q_norm_weight and k_norm_weight [D] norm each head of queries and new keys, before the rotation. output_qk [B, H, S,
// total_sequence_length] is the scores with softcap and bias, or the weights.
type groupQueryOp struct {
	heads, kvHeads int
	scale          *float64 // nil means 1/sqrt(D)
	softcap        float64
	window         int // local_window_size, with the current key; -1 means none
	causal         bool
	rotary         bool
	interleaved    bool
	smooth         bool    // one more logit of 0 in the denominator of each softmax
	epsilon        float64 // of the norm of queries and keys
	scores         int     // of output_qk, -1 for none
	kQuant, vQuant string  // kinds of factors of the cache
	sliding        bool    // a cache of a window
}

// The inputs of GroupQueryAttention, by position.
const (
	gqQuery = iota
	gqKey
	gqValue
	gqPastKey
	gqPastValue
	gqLengths
	gqTotal
	gqCos
	gqSin
	gqPositions
	gqBias
	gqSink
	gqKeyScale
	gqValueScale
	gqQueryNorm
	gqKeyNorm
)

func newGroupQuery(n *node, a *attributes) operator {
	op := &groupQueryOp{
		heads: headCount(a, "num_heads"), kvHeads: headCount(a, "kv_num_heads"), scale: scaleOf(a),
		window: windowOf(a), rotary: a.flag("do_rotary"), interleaved: a.flag("rotary_interleaved"),
		smooth: a.integer("smooth_softmax", -1, -1, 1) == 1, causal: a.integer("causal", 1, 0, 1) == 1, epsilon: epsilonOf(a),
		kQuant: quantTypeOf(a, "k_quant_type"), vQuant: quantTypeOf(a, "v_quant_type"),
		sliding: a.flag("sliding_window_cache"),
		scores:  []int{-1, scoresBiased, scoresSoftmax}[a.integer("qk_output", 0, 0, 2)],
	}
	if x := a.number("softcap"); x != nil {
		op.softcap = *x
	}
	if op.heads%op.kvHeads != 0 {
		a.fail("num_heads is %d and kv_num_heads %d: num_heads must be a multiple of it: %w", op.heads, op.kvHeads, kernels.ErrOption)
	}
	if op.window > 0 && !op.causal {
		a.fail("attribute causal is 0 and local_window_size %d: it must be -1 without causality: %w", op.window, kernels.ErrOption)
	}
	if (op.scores >= 0) != n.has(outScores) {
		a.fail("attribute qk_output and the output output_qk need each other: 1 requests scores, 2 weights: %w", kernels.ErrOption)
	}
	if bits := a.integer("kv_cache_bit_width", 8, 0, 8); (op.kQuant == "NONE") != (op.vQuant == "NONE") || op.kQuant != "NONE" && bits != 8 {
		a.fail("attribute k_quant_type is %s, v_quant_type %s and kv_cache_bit_width %d: attn has quantized caches of 8 bits, for keys and values or none: %w", op.kQuant, op.vQuant, bits, kernels.ErrUnsupported)
	}
	if op.kQuant != "NONE" && op.scores >= 0 {
		a.fail("attribute qk_output is given and k_quant_type is %s: attn computes no output_qk from quantized caches: leave it out: %w", op.kQuant, kernels.ErrUnsupported)
	}
	if op.sliding && (op.window < 1 || op.scores >= 0) {
		a.fail("attribute sliding_window_cache is 1, local_window_size %d and qk_output given: %t: a cache of a window needs local_window_size, and has no output_qk here: %w", op.window, op.scores >= 0, kernels.ErrUnsupported)
	}
	return op
}

// windowOf reads the number of keys that a query sees, with its own; -1 means no limit.
func windowOf(a *attributes) int {
	n := a.integer("local_window_size", -1, -1, math.MaxInt32)
	if n == 0 {
		a.fail("attribute local_window_size is 0, it counts the current key: it must be at least 1, or -1 for none: %w", kernels.ErrOption)
	}
	return n
}

// groupQueryCall is a node with its inputs, checked.
type groupQueryCall struct {
	*groupQueryOp
	q, k, v            *onnxfile.Tensor // flat
	pastKey, pastValue *onnxfile.Tensor
	batch, seq, size   int
	added, past        int // rows of key, and of past_key
	prompt             bool
	lens, starts       []int // keys of each batch, and the position of its first query
	visible            []int // keys of each batch but for padding
	present, total     int   // rows of present_key, or of the keys if they are those of a window; total_sequence_length
	first, tokens      []int // with a cache of a window, the position of the first key of each batch, and the tokens so far
	bias               *onnxfile.Tensor
}

func (op *groupQueryOp) run(ctx context.Context, dev *kernels.Device, in []*onnxfile.Tensor) ([]*onnxfile.Tensor, string, error) {
	c := &groupQueryCall{groupQueryOp: op, pastKey: in[gqPastKey], pastValue: in[gqPastValue], bias: in[gqBias]}
	for _, check := range []func([]*onnxfile.Tensor) error{c.checkTypes, c.checkOperands, c.checkLengths} {
		if err := check(in); err != nil {
			return nil, "", err
		}
	}
	sinks, err := sinksOf(in[gqSink], op.heads, op.smooth)
	if err != nil {
		return nil, "", err
	}
	if c.q, c.k, err = normedHeads(ctx, dev, c.q, c.k, in[gqQueryNorm], in[gqKeyNorm], op.heads, op.kvHeads, op.epsilon); err != nil {
		return nil, "", err
	}
	if op.rotary {
		if err := c.rotate(ctx, dev, in); err != nil {
			return nil, "", err
		}
	}
	kFactors, err := factorsOf("k_scale", op.kQuant, in[gqKeyScale], op.kvHeads, c.size)
	if err != nil {
		return nil, "", err
	}
	vFactors, err := factorsOf("v_scale", op.vQuant, in[gqValueScale], op.kvHeads, c.size)
	if err != nil {
		return nil, "", err
	}
	if kFactors != nil {
		if c.k, err = kFactors.quantise("key", c.k); err != nil {
			return nil, "", err
		}
		if c.v, err = vFactors.quantise("value", c.v); err != nil {
			return nil, "", err
		}
	}
	keys, err := c.cached(c.pastKey, c.k)
	if err != nil {
		return nil, "", err
	}
	values, err := c.cached(c.pastValue, c.v)
	if err != nil {
		return nil, "", err
	}
	offsets, presentKey, presentValue := c.starts, keys, values
	if op.sliding {
		offsets = nil
		for b, start := range c.starts {
			offsets = append(offsets, start-c.first[b])
		}
		if presentKey, err = c.compacted(keys); err != nil {
			return nil, "", err
		}
		if presentValue, err = c.compacted(values); err != nil {
			return nil, "", err
		}
		if c.bias != nil {
			if c.bias, err = c.windowBias(); err != nil {
				return nil, "", err
			}
		}
	}
	call := fused{q: c.q, heads: op.heads, keys: keys, values: values, mask: c.bias, scores: op.scores, keyFactors: kFactors, valueFactors: vFactors, opt: kernels.Options{
		Scale: op.scale, Softcap: op.softcap, Causal: op.causal, Offset: offsets, KLen: c.visible, Sinks: sinks, Weights: op.scores >= 0,
	}}
	if op.window > 0 {
		call.opt.Window = &kernels.Window{Left: op.window - 1}
	}
	y, scores, err := call.run(ctx, dev)
	if err == nil && scores != nil {
		scores, err = c.outputQK(scores)
	}
	return []*onnxfile.Tensor{y, presentKey, presentValue, scores}, call.how(), err
}

func (c *groupQueryCall) checkTypes(in []*onnxfile.Tensor) error {
	query := in[gqQuery].Type
	if !query.Float() {
		return fmt.Errorf("query is %v, it must be f32, f16, bf16 or f64: %w", query, kernels.ErrDType)
	}
	for i, name := range schemas[microsoft+".GroupQueryAttention"].inputs {
		t := in[i]
		switch {
		case t == nil:
			if i == gqLengths || i == gqTotal {
				return fmt.Errorf("input %s is missing: %w", name, kernels.ErrShape)
			}
		case i == gqKeyScale || i == gqValueScale: // factorsOf checks them
		case (i == gqPastKey || i == gqPastValue) && c.kQuant != "NONE":
			if t.Type != onnxfile.Int8 {
				return fmt.Errorf("%s is %v, it must be int8 for k_quant_type %s and v_quant_type %s: %w", name, t.Type, c.kQuant, c.vQuant, kernels.ErrDType)
			}
		case (i == gqLengths || i == gqTotal) && t.Type != onnxfile.Int32:
			return fmt.Errorf("%s is %v, it must be int32: %w", name, t.Type, kernels.ErrDType)
		case i == gqPositions && t.Type != onnxfile.Int64:
			return fmt.Errorf("%s is %v, it must be int64: %w", name, t.Type, kernels.ErrDType)
		case i != gqLengths && i != gqTotal && i != gqPositions && t.Type != query:
			return fmt.Errorf("%s is %v and query %v: they must have the same type: %w", name, t.Type, query, kernels.ErrDType)
		}
	}
	return nil
}

// checkOperands splits a packed query, and derives the lengths from query, key, value and past.
func (c *groupQueryCall) checkOperands(in []*onnxfile.Tensor) error {
	c.q, c.k, c.v = in[gqQuery], in[gqKey], in[gqValue]
	packed := c.k == nil && c.v == nil
	heads := c.heads
	if packed {
		heads += 2 * c.kvHeads
	}
	s := c.q.Shape
	if len(s) != 3 || c.q.Elements() == 0 || s[2]%heads != 0 {
		return fmt.Errorf("query has shape %v, it must be [batch sequence %d·size] for num_heads %d and kv_num_heads %d (with key and value packed into it when both are missing), without a length of 0: %w", s, heads, c.heads, c.kvHeads, kernels.ErrShape)
	}
	c.batch, c.seq, c.size, c.added = s[0], s[1], s[2]/heads, s[1]
	hidden, kvHidden := c.heads*c.size, c.kvHeads*c.size
	if packed {
		q, row := c.q, heads*c.size
		c.q = columns(q, row, 0, hidden, []int{c.batch, c.seq, hidden})
		c.k = columns(q, row, hidden, hidden+kvHidden, []int{c.batch, c.seq, kvHidden})
		c.v = columns(q, row, hidden+kvHidden, row, []int{c.batch, c.seq, kvHidden})
	}
	if c.k == nil || c.v == nil {
		return fmt.Errorf("key has shape %v and value %v: they need each other, or pack both into query: %w", shapeOf(c.k), shapeOf(c.v), kernels.ErrShape)
	}
	if len(c.k.Shape) == 3 && c.k.Shape[1] == 0 {
		c.added = 0
	}
	for i, t := range []*onnxfile.Tensor{c.k, c.v} {
		if want := []int{c.batch, c.added, kvHidden}; !slices.Equal(t.Shape, want) {
			return fmt.Errorf("%s has shape %v, it must be %v, [batch sequence kv_num_heads·size] with the sequence of query or 0 for key and value: %w", []string{"key", "value"}[i], t.Shape, want, kernels.ErrShape)
		}
	}
	if err := checkPasts(c.pastKey, c.pastValue, c.batch, c.kvHeads, c.size, c.size); err != nil {
		return err
	}
	if c.pastKey != nil {
		c.past = c.pastKey.Shape[2]
	}
	return nil
}

// checkLengths reads seqlens_k and total_sequence_length.
func (c *groupQueryCall) checkLengths(in []*onnxfile.Tensor) error {
	t := in[gqTotal]
	if len(t.Shape) > 1 || t.Elements() != 1 {
		return fmt.Errorf("total_sequence_length has shape %v, it must be one number: %w", t.Shape, kernels.ErrShape)
	}
	n := t.Int(0)
	if n < 1 || n > int64(c.past+c.added) && !c.sliding {
		return fmt.Errorf("total_sequence_length is %d, it must be positive and at most %d: past_key has %d rows and key %d: %w", n, c.past+c.added, c.past, c.added, kernels.ErrOption)
	}
	total := int(n)
	c.total, c.prompt = total, c.seq == total
	c.present = max(c.past, total)
	lens := in[gqLengths]
	if s := lens.Shape; len(s) < 1 || len(s) > 2 || lens.Elements() != c.batch || len(s) == 2 && s[0] != 1 && s[1] != 1 {
		return fmt.Errorf("seqlens_k has shape %v, it must be [%d], [%d 1] or [1 %d], one number for each batch: %w", s, c.batch, c.batch, c.batch, kernels.ErrShape)
	}
	if c.sliding {
		c.present = 0
		return c.checkWindow(lens)
	}
	most := c.present - 1
	if c.prompt {
		most = total // padding or not, the keys of a prompt are those of its rows
	}
	for b := range c.batch {
		n := lens.Int(b)
		if n < 0 || n > int64(most) {
			return fmt.Errorf("seqlens_k[%d] is %d, it must be 0 to %d: one less than the keys of the batch, of which present_key has %d: %w", b, n, most, c.present, kernels.ErrOption)
		}
		keys, visible, start := int(n)+1, int(n)+1, int(n)+1-c.seq
		if c.prompt {
			keys, visible, start = total, min(visible, total), 0
		}
		if c.causal {
			visible = keys // padding is after all rows that count
		}
		if start < 0 {
			return fmt.Errorf("seqlens_k[%d] is %d, which is too small for a query sequence of %d: it must be at least %d unless total_sequence_length is %d: %w", b, n, c.seq, c.seq-1, c.seq, kernels.ErrOption)
		}
		if keys-c.added > c.past {
			return fmt.Errorf("seqlens_k[%d] is %d, past_key has %d rows and key %d: it must be at most %d: %w", b, n, c.past, c.added, c.past+c.added-1, kernels.ErrOption)
		}
		c.lens, c.visible, c.starts = append(c.lens, keys), append(c.visible, visible), append(c.starts, start)
	}
	return checkBias(c.bias, c.batch, c.heads, c.seq, total)
}

// outputQK returns the columns of scores [B, H, S, present] that are keys of the call. Like ONNX Runtime, it has 0 for
// hidden keys, also before the softmax.
func (c *groupQueryCall) outputQK(scores *onnxfile.Tensor) (*onnxfile.Tensor, error) {
	y, err := newTensor(scores.Type, []int{c.batch, c.heads, c.seq, c.total})
	if err != nil {
		return nil, err
	}
	size := y.Type.Size()
	y.Data = y.Data[:cap(y.Data)]
	for row := range c.batch * c.heads * c.seq {
		b, at := row/(c.heads*c.seq), c.starts[row/(c.heads*c.seq)]+row%c.seq
		first, last := 0, c.visible[b]
		if c.causal {
			last = min(last, at+1)
		}
		if c.window > 0 {
			first = max(0, at+1-c.window)
		}
		if first < last {
			copy(y.Data[(row*c.total+first)*size:], scores.Data[(row*c.present+first)*size:(row*c.present+last)*size])
		}
	}
	return y, nil
}

// rotate rotates the queries and the new keys. A row's position is that of its key, or from position_ids. Like ONNX
// Runtime, it takes only the first id of a prompt, as the position of the first row of every batch.
func (c *groupQueryCall) rotate(ctx context.Context, dev *kernels.Device, in []*onnxfile.Tensor) error {
	cos, sin := in[gqCos], in[gqSin]
	if err := checkAngles(cos, sin, c.size); err != nil {
		return err
	}
	var at []int
	for _, start := range c.starts {
		for i := range c.seq {
			at = append(at, start+i)
		}
	}
	if t := in[gqPositions]; t != nil {
		ids, err := positions(t, c.batch, c.seq)
		if err != nil {
			return err
		}
		for i := range at {
			if c.prompt {
				at[i] += ids[0]
			} else {
				at[i] = ids[i]
			}
		}
	}
	r := rotation{x: c.q, heads: c.heads, cos: cos, sin: sin, positions: at, interleaved: c.interleaved}
	var err error
	if c.q, err = r.run(ctx, dev); err != nil || c.added == 0 {
		return err
	}
	r.x, r.heads = c.k, c.kvHeads
	c.k, err = r.run(ctx, dev)
	return err
}

// cached returns past with the new rows of each batch where they belong, [batch, kv heads, present, size]. Rows that no
// batch has written are those of the past, or 0 when the past is shorter.
func (c *groupQueryCall) cached(past, own *onnxfile.Tensor) (*onnxfile.Tensor, error) {
	x, err := newTensor(own.Type, []int{c.batch, c.kvHeads, c.present, c.size})
	if err != nil {
		return nil, err
	}
	row := c.size * own.Type.Size()
	x.Data = x.Data[:cap(x.Data)]
	for b := range c.batch {
		for h := range c.kvHeads {
			to := x.Data[(b*c.kvHeads+h)*c.present*row:][:c.present*row]
			kept := c.past
			if c.present > c.past || c.sliding {
				kept = c.lens[b] - c.added
			}
			if past != nil {
				copy(to, past.Data[(b*c.kvHeads+h)*c.past*row:][:kept*row])
			}
			for s := range c.added {
				at := ((b*c.added+s)*c.kvHeads + h) * row
				copy(to[(c.lens[b]-c.added+s)*row:], own.Data[at:at+row])
			}
		}
	}
	return x, nil
}
