package gomlx

import (
	"context"
	"errors"
	"fmt"
	"unsafe"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/dtypes/bfloat16"
	"github.com/gomlx/compute/dtypes/float16"
	"github.com/gomlx/compute/shapes"
	"github.com/seed90331342/attn/kernels"
)

// The operands of a call. Those from output on belong to the gradient.
const (
	query = iota
	key
	value
	mask
	bias
	queryLengths
	keyLengths
	output
	lse
	dOutput
	operands
)

var operandNames = [operands]string{"query", "key", "value", "mask", "bias", "querySeqLen", "keyValueSeqLen", "output", "lse", "dOutput"}

// call is attention, or its gradient, with the slots of its operands and results: o and lse, or
// dq, dk and dv. A slot of -1 means none.
type call struct {
	backward bool
	causal   bool
	scale    *float64
	layout   compute.AttentionAxesLayout
	values   [operands]compute.Value
	shapes   []shapes.Shape // of the results
	results  []compute.Value
	slots    [operands]int
	out      []int
}

// FusedScaledDotProductAttention adds attention and returns its output and, as the state of its
// gradient, the log-sum-exp of each row, [B, H, Sq] in float32. It returns compute.ErrNotImplemented
// within functions and closures, in graphs with dynamic axes, and for types and combinations that
// attn lacks, and other errors for shapes that do not match.
func (f *function) FusedScaledDotProductAttention(q, k, v compute.Value, layout compute.AttentionAxesLayout,
	options *compute.ScaledDotProductAttentionConfig) (compute.Value, []compute.Value, error) {
	out, err := f.attention(newCall(q, k, v, layout, options))
	if err != nil {
		return nil, nil, err
	}
	return out[0], out[1:], nil
}

// FusedScaledDotProductAttentionVJP adds the gradients of q, k and v. gomlx takes the gradients of a
// bias and of an additive mask for zero, so that those which could have one, because they depend on a
// parameter of floating-point type, are an error.
func (f *function) FusedScaledDotProductAttentionVJP(q, k, v compute.Value, layout compute.AttentionAxesLayout,
	options *compute.ScaledDotProductAttentionConfig, o compute.Value, states []compute.Value, d compute.Value) (dq, dk, dv compute.Value, err error) {
	if len(states) != 1 {
		return nil, nil, nil, fmt.Errorf("gomlx: the gradient of attention has %d states, it must have the one of the forward pass", len(states))
	}
	c := newCall(q, k, v, layout, options)
	for _, i := range []int{mask, bias} {
		if f.learned(c.values[i]) {
			return nil, nil, nil, fmt.Errorf("gomlx: attention: %s may be learned, but gomlx's fused attention has no gradient of it: set DisableFusion, or GOMLX_FUSION=0: %w", operandNames[i], kernels.ErrUnsupported)
		}
	}
	c.backward = true
	c.values[output], c.values[lse], c.values[dOutput] = o, states[0], d
	return three(f.attention(c))
}

func newCall(q, k, v compute.Value, layout compute.AttentionAxesLayout, options *compute.ScaledDotProductAttentionConfig) *call {
	c := &call{layout: layout, values: [operands]compute.Value{query: q, key: k, value: v}}
	if o := options; o != nil {
		c.causal = o.Causal
		c.values[mask], c.values[bias] = o.Mask, o.Bias
		c.values[queryLengths], c.values[keyLengths] = o.QuerySeqLen, o.KeyValueSeqLen
		if o.Scale != 0 {
			c.scale = new(o.Scale)
		}
	}
	return c
}

// notImplemented returns an error on which gomlx decomposes attention.
func notImplemented(format string, args ...any) error {
	return fmt.Errorf("gomlx: attention: "+format+": %w", append(args, compute.ErrNotImplemented)...)
}

// attention validates c with tensors without memory and records it.
func (f *function) attention(c *call) ([]compute.Value, error) {
	switch {
	case f != f.builder.main:
		return nil, notImplemented("it is in a function or closure, between whose operations nothing can run")
	case f.dynamic:
		return nil, notImplemented("the graph has axes of unknown length")
	case f.builder.compiled:
		return nil, fmt.Errorf("gomlx: attention: the builder has been compiled")
	}
	var t [operands]kernels.Tensor
	var lengths [2][]int32
	var in []compute.Value
	for i, v := range c.values {
		if v == nil {
			continue
		}
		in = append(in, v)
		shape, err := f.Shape(v)
		if err != nil {
			return nil, err
		}
		if i == queryLengths || i == keyLengths {
			if shape.DType != dtypes.Int32 || shape.Rank() != 1 {
				return nil, fmt.Errorf("gomlx: attention: %s is %s, it must be int32 [batch]", operandNames[i], shape)
			}
			lengths[i-queryLengths] = make([]int32, shape.Dimensions[0])
			continue
		}
		dtype, ok := map[dtypes.DType]kernels.DType{dtypes.Float32: kernels.F32, dtypes.Float16: kernels.F16, dtypes.BFloat16: kernels.BF16, dtypes.Bool: kernels.Bool}[shape.DType]
		if !ok {
			return nil, notImplemented("%s is %s", operandNames[i], shape.DType)
		}
		if t[i], err = c.tensor(i, shape, func(s kernels.Shape) (kernels.Tensor, error) { return kernels.Meta(dtype, s) }); err != nil {
			return nil, err
		}
	}
	p, err := c.prepare(f.builder.b.dev, t, lengths)
	if errors.Is(err, kernels.ErrUnsupported) || errors.Is(err, kernels.ErrDType) {
		return nil, notImplemented("%v", err)
	}
	if err != nil {
		return nil, fmt.Errorf("gomlx: %w", err)
	}

	d := p.Dims()
	dtype := func(i int) shapes.Shape { s, _ := f.Shape(c.values[i]); return s.Clone() } // a valid value
	if c.shapes = []shapes.Shape{dtype(query), dtype(key), dtype(value)}; !c.backward {
		c.shapes = []shapes.Shape{dtype(query), shapes.Make(dtypes.Float32, d.Batch, d.Heads, d.SeqQ)}
		c.shapes[0].Dimensions[3] = d.ValueDim
	}
	o := &op{in: in, param: -1, call: c}
	for i, shape := range c.shapes {
		v, err := f.Function.Parameter(fmt.Sprintf("attention %d of operation %d", i, len(f.ops)), shape, nil)
		if err != nil {
			return nil, err
		}
		o.out = append(o.out, v)
	}
	f.record(o)
	return o.out, nil
}

// tensor returns operand i, whose memory has the shape, as [B, H, S, D] or, for masks and biases,
// [B, H, Sq, Sk]. memory returns the tensor of that memory.
func (c *call) tensor(i int, shape shapes.Shape, memory func(kernels.Shape) (kernels.Tensor, error)) (kernels.Tensor, error) {
	s, rank := kernels.Shape{1, 1, 1, 1}, shape.Rank()
	swapped := c.layout == compute.AttentionAxesLayoutBSHD
	switch n := shape.Dimensions; {
	case i == lse && rank == 3:
		s, swapped = kernels.Shape{n[0], n[1], n[2], 1}, false
	case rank == 4:
		copy(s[:], n)
		// In gomlx, the heads of a mask lie as those of the query, and those of a bias come first.
		swapped = swapped && i != bias
	case i == mask && rank == 3: // [batch, query, key]
		s, swapped = kernels.Shape{n[0], 1, n[1], n[2]}, false
	case (i == mask || i == bias) && rank == 2:
		s[2], s[3], swapped = n[0], n[1], false
	case i == mask || i == bias:
		return kernels.Tensor{}, notImplemented("%s has shape %s", operandNames[i], shape)
	default:
		return kernels.Tensor{}, fmt.Errorf("gomlx: attention: %s has shape %s, it must have four axes: %w", operandNames[i], shape, kernels.ErrShape)
	}
	t, err := memory(s)
	if err == nil && swapped {
		t, err = t.Swap(kernels.Heads, kernels.Seq)
	}
	if err != nil {
		err = fmt.Errorf("gomlx: attention: %s: %w", operandNames[i], err)
	}
	return t, err
}

// prepare returns the call of the operands. Rows and keys beyond a length are segments that see
// nothing and that nothing sees: such rows yield zeros, also as gradients.
func (c *call) prepare(dev *kernels.Device, t [operands]kernels.Tensor, lengths [2][]int32) (*kernels.Call, error) {
	opt := kernels.Options{Causal: c.causal, Scale: c.scale, LSE: true, Bias: t[bias]}
	switch {
	case t[mask].IsZero():
	case t[mask].DType() == kernels.Bool:
		opt.Mask = t[mask]
	case t[bias].IsZero():
		opt.Bias = t[mask]
	default:
		return nil, fmt.Errorf("an additive mask next to a bias: %w", kernels.ErrUnsupported)
	}
	if (lengths[0] == nil) != (lengths[1] == nil) {
		return nil, fmt.Errorf("attention: lengths of queries and of keys must both be set: %w", kernels.ErrOption)
	}
	if lengths[0] != nil {
		opt.QSegments = segments(lengths[0], t[query].Shape()[kernels.Seq], 1)
		opt.KSegments = segments(lengths[1], t[key].Shape()[kernels.Seq], 2)
	}
	return dev.Prepare(t[query], t[key], t[value], opt)
}

// segments returns n ids for each length: 0 up to it, then padding.
func segments(lengths []int32, n int, padding int32) [][]int32 {
	ids := make([][]int32, len(lengths))
	for b, length := range lengths {
		ids[b] = make([]int32, n)
		for i := max(0, min(int(length), n)); i < n; i++ {
			ids[b][i] = padding
		}
	}
	return ids
}

// run computes c from buffers of the Go backend into new ones.
func (c *call) run(b *backend, slots []compute.Buffer) error {
	ctx := context.Background()
	var t [operands]kernels.Tensor
	var lengths [2][]int32
	for i, slot := range c.slots {
		if slot < 0 {
			continue
		}
		flat, err := slots[slot].Data()
		if err != nil {
			return err
		}
		if i == queryLengths || i == keyLengths {
			lengths[i-queryLengths] = flat.([]int32)
			continue
		}
		shape, err := slots[slot].Shape()
		if err != nil {
			return err
		}
		t[i], err = c.tensor(i, shape, func(s kernels.Shape) (kernels.Tensor, error) {
			host, err := hostTensor(flat, s)
			if err != nil {
				return host, err
			}
			return b.dev.Upload(ctx, host)
		})
		if err != nil {
			return err
		}
		defer t[i].Release()
	}
	p, err := c.prepare(b.dev, t, lengths)
	if err != nil {
		return err
	}

	var results [3]kernels.Tensor
	var downloads []func() error
	for i, slot := range c.out {
		if slot < 0 && (c.backward || i > 0) {
			continue // nothing uses it; attention always has o
		}
		buf, flat, err := b.Backend.NewSharedBuffer(0, c.shapes[i])
		if err != nil {
			return err
		}
		if slot >= 0 {
			slots[slot] = buf
		}
		like := query + i // dq, dk, dv
		if !c.backward {
			like = output + i // o, lse
		}
		results[i], err = c.tensor(like, c.shapes[i], func(s kernels.Shape) (kernels.Tensor, error) {
			host, err := hostTensor(flat, s)
			if err != nil || t[query].OnHost() { // the device computes in host memory
				return host, err
			}
			r, err := b.dev.Alloc(ctx, host.DType(), s)
			downloads = append(downloads, func() error { return b.dev.Download(ctx, host, r) })
			return r, err
		})
		if err != nil {
			return err
		}
		defer results[i].Release()
	}
	if c.backward {
		err = p.Backward(ctx, kernels.Gradients{Q: results[0], K: results[1], V: results[2]}, kernels.Result{O: t[dOutput]}, kernels.Result{O: t[output], LSE: t[lse]})
	} else {
		err = p.RunInto(ctx, kernels.Result{O: results[0], LSE: results[1]})
	}
	for _, download := range downloads {
		if err == nil {
			err = download()
		}
	}
	if err != nil {
		return fmt.Errorf("gomlx: %w", err)
	}
	return nil
}

// hostTensor returns the numbers of a buffer as a tensor, without a copy.
func hostTensor(flat any, shape kernels.Shape) (kernels.Tensor, error) {
	switch x := flat.(type) {
	case []float32:
		return kernels.HostF32(x, shape)
	case []bool:
		return kernels.HostBool(x, shape)
	case []float16.Float16:
		return kernels.Host(unsafe.Slice((*uint16)(unsafe.Pointer(unsafe.SliceData(x))), len(x)), kernels.F16, shape)
	case []bfloat16.BFloat16:
		return kernels.Host(unsafe.Slice((*uint16)(unsafe.Pointer(unsafe.SliceData(x))), len(x)), kernels.BF16, shape)
	}
	return kernels.Tensor{}, fmt.Errorf("numbers are %T: %w", flat, kernels.ErrDType)
}
