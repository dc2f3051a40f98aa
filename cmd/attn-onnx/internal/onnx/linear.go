package onnx

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/seed90331342/attn/cmd/attn-onnx/internal/onnxfile"
	"github.com/seed90331342/attn/kernels"
)

// linearOp is a LinearAttention node: linear attention by an update rule, with a state in place of a cache.
//
//	query [B, T, Hq·K]    key [B, T, Hk·K]    value [B, T, Hkv·V]    output [B, T, max(Hq, Hkv)·V]
//	decay [B, T, Hkv or Hkv·K]    beta [B, T, Hkv or 1]    past_state, present_state [B, Hkv, K, V]
//
// Hk is Hkv, and Hq a multiple of it. In ONNX Runtime's node of that name Hk may also divide Hkv, and Hq divide it.
// There state_window W > 0 adds an axis: present_state [W, B, Hkv, K, V] has the states after the last W tokens, zeros
// before the first one, and of past_state only the last is read.
type linearOp struct {
	heads, kvHeads int
	rule           string
	scale          float32 // 0 means K^-0.5
	chunk          int
	runtime        bool // of ONNX Runtime
	window         int
}

// The inputs of LinearAttention, by position.
const (
	linQuery = iota
	linKey
	linValue
	linPast
	linDecay
	linBeta
)

var (
	linearInputs  = []string{"query", "key", "value", "past_state", "decay", "beta"}
	linearOutputs = []string{"output", "present_state"}
)

func newLinear(_ *node, a *attributes) operator {
	op := linearAttributes(a)
	if op.heads%op.kvHeads != 0 {
		a.fail("q_num_heads is %d and kv_num_heads %d: q_num_heads must be a multiple of it: %w", op.heads, op.kvHeads, kernels.ErrOption)
	}
	return op
}

// newRuntimeLinear returns a node of ONNX Runtime.
func newRuntimeLinear(_ *node, a *attributes) operator {
	op := linearAttributes(a)
	op.runtime, op.window = true, a.integer("state_window", 0, 0, 8)
	if op.heads%op.kvHeads != 0 && op.kvHeads%op.heads != 0 {
		a.fail("q_num_heads is %d and kv_num_heads %d: one must be a multiple of the other: %w", op.heads, op.kvHeads, kernels.ErrOption)
	}
	return op
}

func linearAttributes(a *attributes) *linearOp {
	op := &linearOp{
		heads: headCount(a, "q_num_heads"), kvHeads: headCount(a, "kv_num_heads"), chunk: a.integer("chunk_size", 64, 1, math.MaxInt32),
		rule: a.word("update_rule", "gated_delta", "linear", "gated", "delta"),
	}
	if scale := scaleOf(a); scale != nil {
		op.scale = float32(*scale)
	}
	return op
}

func (op *linearOp) run(ctx context.Context, dev *kernels.Device, in []*onnxfile.Tensor) ([]*onnxfile.Tensor, string, error) {
	if err := op.check(in); err != nil {
		return nil, "", err
	}
	q, past, decay, beta := in[linQuery], in[linPast], in[linDecay], in[linBeta]
	batch, tokens, dtype := q.Shape[0], q.Shape[1], dtypeOf(q.Type)
	size, valueSize := q.Shape[2]/op.heads, in[linValue].Shape[2]/op.kvHeads
	slots := max(op.window, 1)
	states, err := newTensor(onnxfile.Float, []int{slots * batch, op.kvHeads, size, valueSize})
	if err != nil {
		return nil, "", err
	}
	states.Data = states.Data[:cap(states.Data)]
	up := uploader{ctx: ctx, dev: dev}
	defer up.release()
	c := kernels.LinearAttention{
		Scale: op.scale, ChunkSize: op.chunk, O: up.alloc("output", dtype, kernels.Shape{batch, tokens, max(op.heads, op.kvHeads), valueSize}),
		Q: up.rows("query", q, dtype, op.heads), K: up.rows("key", in[linKey], dtype, in[linKey].Shape[2]/size), V: up.rows("value", in[linValue], dtype, op.kvHeads),
	}
	present := up.upload("present_state", states, kernels.F32, kernels.Shape(states.Shape))
	if decay != nil {
		c.Decay = up.rows("decay", decay, dtype, op.kvHeads)
	}
	if beta != nil {
		c.Beta = up.rows("beta", beta, dtype, beta.Shape[2])
	}
	slot := func(t kernels.Tensor, n int) kernels.Tensor {
		return up.view(t.Slice(kernels.Batch, n*batch, (n+1)*batch))
	}
	if past != nil {
		c.PastState = slot(up.upload("past_state", past, kernels.F32, kernels.Shape(states.Shape)), slots-1)
	}
	c.O = up.view(c.O.Swap(kernels.Heads, kernels.Seq))
	err = lastStates(tokens, slots, func(lo, hi, n int) error {
		part := c
		for _, t := range []*kernels.Tensor{&part.O, &part.Q, &part.K, &part.V, &part.Decay, &part.Beta} {
			if !t.IsZero() {
				*t = up.view(t.Slice(kernels.Seq, lo, hi))
			}
		}
		part.PresentState = slot(present, n)
		c.PastState = part.PresentState
		if up.err != nil {
			return up.err
		}
		return dev.LinearAttention(ctx, part)
	})
	if err != nil {
		return nil, "", err
	}
	y, err := unrows(ctx, dev, c.O, q)
	if err != nil {
		return nil, "", err
	}
	stateType := q.Type
	if past != nil {
		stateType = past.Type
	}
	state, err := download(ctx, dev, present, stateType, op.stateShape(batch, size, valueSize))
	return []*onnxfile.Tensor{y, state}, "linear attention, " + op.rule + ", " + q.Type.String(), err
}

// stateShape returns the shape of past_state and present_state.
func (op *linearOp) stateShape(batch, size, valueSize int) []int {
	shape := []int{batch, op.kvHeads, size, valueSize}
	if op.window > 0 {
		return append([]int{op.window}, shape...)
	}
	return shape
}

// check checks the inputs.
func (op *linearOp) check(in []*onnxfile.Tensor) error {
	if err := checkHalves(linearInputs, in, linPast); err != nil {
		return err
	}
	q, k, v := in[linQuery], in[linKey], in[linValue]
	if decay, beta := in[linDecay], in[linBeta]; (decay != nil) != strings.HasPrefix(op.rule, "gated") || (beta != nil) != strings.HasSuffix(op.rule, "delta") {
		return fmt.Errorf("update_rule is %s, decay has shape %v and beta %v: gated and gated_delta need decay, delta and gated_delta beta, and the other rules must not have them: %w", op.rule, shapeOf(decay), shapeOf(beta), kernels.ErrOption)
	}
	if s := q.Shape; len(s) != 3 || q.Elements() == 0 || s[2]%op.heads != 0 {
		return fmt.Errorf("query has shape %v, it must be [batch sequence %d·size] for q_num_heads %d, without a length of 0: %w", s, op.heads, op.heads, kernels.ErrShape)
	}
	if s := v.Shape; len(s) != 3 || s[2] == 0 || s[2]%op.kvHeads != 0 {
		return fmt.Errorf("value has shape %v, it must be [batch sequence %d·size] for kv_num_heads %d, without a length of 0: %w", s, op.kvHeads, op.kvHeads, kernels.ErrShape)
	}
	batch, tokens, size := q.Shape[0], q.Shape[1], q.Shape[2]/op.heads
	keyHeads := op.kvHeads
	if s := k.Shape; op.runtime && len(s) == 3 && s[2] >= size && op.kvHeads%(s[2]/size) == 0 {
		keyHeads = s[2] / size
	}
	rows := func(width int) []int { return []int{batch, tokens, width} }
	for _, x := range []struct {
		input   int
		allowed [][]int
	}{
		{linKey, [][]int{rows(keyHeads * size)}},
		{linValue, [][]int{rows(v.Shape[2])}},
		{linPast, [][]int{op.stateShape(batch, size, v.Shape[2]/op.kvHeads)}},
		{linDecay, [][]int{rows(op.kvHeads), rows(op.kvHeads * size)}},
		{linBeta, [][]int{rows(op.kvHeads), rows(1)}},
	} {
		t := in[x.input]
		if t != nil && !slices.ContainsFunc(x.allowed, func(s []int) bool { return slices.Equal(s, t.Shape) }) {
			return fmt.Errorf("%s has shape %v, it must be one of %v for query %v, value %v, q_num_heads %d and kv_num_heads %d: %w",
				linearInputs[x.input], t.Shape, x.allowed, q.Shape, v.Shape, op.heads, op.kvHeads, kernels.ErrShape)
		}
	}
	return nil
}

// checkHalves returns an error unless all inputs are f32, f16 or bf16 and have the type of the first one, which input
// other does not need to have.
func checkHalves(names []string, in []*onnxfile.Tensor, other int) error {
	for i, t := range in {
		if t != nil && (!t.Type.Float() || t.Type == onnxfile.Double || i != other && t.Type != in[0].Type) {
			return fmt.Errorf("%s is %v and %s %v: all must be f32, f16 or bf16, and have one type: %w", names[i], t.Type, names[0], in[0].Type, kernels.ErrDType)
		}
	}
	return nil
}
