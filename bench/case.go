package bench

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
)

// Variants of a [Case]: what of attention runs. The stages keep scores and weights of
// [B, H, Sq, Sk] in memory and compute every pair, visible or not.
const (
	// Fused is the fused attention call.
	Fused = "fused"
	// Stages is the same call as three stages.
	Stages = "stages"
	// QK, Softmax and PV are each of them alone.
	QK      = "qk"
	Softmax = "softmax"
	PV      = "pv"
)

// Variants are all of them.
var Variants = []string{Fused, Stages, QK, Softmax, PV}

// Case is one thing that is run and timed: an attention call over inputs drawn
// by seed.
type Case struct {
	// Variant names what runs, one of [Variants].
	Variant string
	// DType is the type of Q, K, V and O in memory.
	DType backend.DType
	// Dims are the lengths of the call, in elements; all at least 1.
	Dims backend.Dims
	// Causal hides later keys from a row. The last query stands on the last
	// key, as where queries follow a cache.
	Causal bool
	// Window, when not nil, hides the keys further than that from a row's own,
	// which is counted as for Causal.
	Window *kernels.Window
	// Softcap c > 0 replaces scores s by c·tanh(s/c); 0 is off.
	Softcap float64
	// Mask adds a bias to the scores: F32 [1, 1, Sq, Sk], the same for all
	// heads and batches, of standard normal numbers.
	Mask bool
}

// String returns the case's name in the form of a Go benchmark:
// f32/b1h8s1024d64, with what departs from self-attention after it.
func (c Case) String() string {
	d := c.Dims
	name := fmt.Sprintf("%v/b%dh%ds%dd%d", c.DType, d.Batch, d.Heads, d.SeqK, d.Dim)
	if d.KVHeads != d.Heads {
		name += fmt.Sprintf("/kv%d", d.KVHeads)
	}
	if d.SeqQ != d.SeqK {
		name += fmt.Sprintf("/q%d", d.SeqQ)
	}
	if c.Causal {
		name += "/causal"
	}
	if w := c.Window; w != nil {
		name += fmt.Sprintf("/window%s,%s", side(w.Left), side(w.Right))
	}
	if c.Softcap > 0 {
		name += fmt.Sprintf("/softcap%v", c.Softcap)
	}
	if c.Mask {
		name += "/mask"
	}
	return name
}

// side writes one side of a window.
func side(n int) string {
	if n == kernels.Unbounded {
		return "inf"
	}
	return strconv.Itoa(n)
}

// options returns the call's options; bias is what Mask adds.
func (c Case) options(bias backend.Tensor) kernels.Options {
	return kernels.Options{Causal: c.Causal, Window: c.Window, Align: kernels.LowerRight, Softcap: c.Softcap, Bias: bias}
}

// keys returns how many keys the rows of a head see between them: the last row
// stands on the last key, and the first looks back furthest.
func (c Case) keys() int {
	d := c.Dims
	if c.Window == nil || c.Window.Left >= d.SeqK {
		return d.SeqK
	}
	first := d.SeqK - d.SeqQ
	return d.SeqK - max(0, first-c.Window.Left)
}

// work is what a call must do, whatever does it.
type work struct {
	pairs       int64 // visible
	flops, full int64 // of the visible pairs, and of all
	bytes       int64 // moved at least
}

// work counts. visible is how many pairs are.
func (c Case) work(visible int64) work {
	d := c.Dims
	all := int64(d.Batch) * int64(d.Heads) * int64(d.SeqQ) * int64(d.SeqK)
	size := int64(c.DType.Size())
	q := int64(d.Batch) * int64(d.Heads) * int64(d.SeqQ) * int64(d.Dim) * size
	o := int64(d.Batch) * int64(d.Heads) * int64(d.SeqQ) * int64(d.ValueDim) * size
	kv := int64(d.Batch) * int64(d.KVHeads) * size
	k, v := kv*int64(d.SeqK)*int64(d.Dim), kv*int64(d.SeqK)*int64(d.ValueDim)
	mask, scores := c.maskBytes(), 4*all
	dot, mix := 2*int64(d.Dim), 2*int64(d.ValueDim)
	w := work{pairs: visible}
	switch c.Variant {
	case QK:
		w.flops, w.full, w.bytes = all*dot, all*dot, q+k+scores
	case Softmax:
		w.bytes = 2*scores + mask
	case PV:
		w.flops, w.full, w.bytes = all*mix, all*mix, scores+v+o
	case Stages: // written, read and written, read
		w.flops, w.full, w.bytes = visible*(dot+mix), all*(dot+mix), q+k+v+o+mask+4*scores
	default:
		hidden := kv * int64(d.SeqK-c.keys()) * int64(d.Dim+d.ValueDim)
		w.flops, w.full, w.bytes = visible*(dot+mix), all*(dot+mix), q+k+v+o+mask-hidden
	}
	return w
}

// maskBytes is the memory of what Mask adds.
func (c Case) maskBytes() int64 {
	if !c.Mask {
		return 0
	}
	return 4 * int64(c.Dims.SeqQ) * int64(c.Dims.SeqK)
}

// keeps reports whether the variant keeps scores or weights in memory.
func (c Case) keeps() bool { return c.Variant != Fused }

// memory counts what the case takes, with the scratch memory that a plan says. own says
// that the device has memory of its own.
func (c Case) memory(scratch int64, own bool) Memory {
	m := Memory{Scratch: scratch, Square: c.maskBytes()}
	q, k, v, o := c.shapes()
	for _, s := range [...]backend.Shape{q, k, v, o} {
		m.Operands += int64(s.Elements()) * int64(c.DType.Size())
	}
	if c.keeps() {
		m.Square += 4 * int64(c.weightsShape().Elements())
	}
	if own {
		m.Device = m.Counted()
	}
	return m
}

// scale is what scores are multiplied by.
func (c Case) scale() float64 { return 1 / math.Sqrt(float64(c.Dims.Dim)) }

// maskShape is the shape of what Mask adds.
func (c Case) maskShape() backend.Shape { return backend.Shape{1, 1, c.Dims.SeqQ, c.Dims.SeqK} }

// shapes returns the shapes of Q, K, V and O.
func (c Case) shapes() (q, k, v, o backend.Shape) {
	d := c.Dims
	return backend.Shape{d.Batch, d.Heads, d.SeqQ, d.Dim},
		backend.Shape{d.Batch, d.KVHeads, d.SeqK, d.Dim},
		backend.Shape{d.Batch, d.KVHeads, d.SeqK, d.ValueDim},
		backend.Shape{d.Batch, d.Heads, d.SeqQ, d.ValueDim}
}

// plan returns what be would do for the case, without memory or work.
func (c Case) plan(be backend.Backend) (backend.Plan, error) {
	qs, ks, vs, _ := c.shapes()
	var t [3]backend.Tensor
	for i, s := range [3]backend.Shape{qs, ks, vs} {
		var err error
		if t[i], err = backend.Meta(c.DType, s); err != nil {
			return backend.Plan{}, err
		}
	}
	var bias backend.Tensor
	if c.Mask {
		var err error
		if bias, err = backend.Meta(backend.F32, c.maskShape()); err != nil {
			return backend.Plan{}, err
		}
	}
	return kernels.Plan(be, t[0], t[1], t[2], c.plannedOptions(bias))
}

// plannedOptions returns the options by which the plan is that of the variant.
func (c Case) plannedOptions(bias backend.Tensor) kernels.Options {
	opt := c.options(bias)
	opt.Weights = c.keeps()
	return opt
}

// weightsShape is the shape of the weights that the three stages keep.
func (c Case) weightsShape() backend.Shape {
	d := c.Dims
	return backend.Shape{d.Batch, d.Heads, d.SeqQ, d.SeqK}
}

// bytes returns the memory of the case's operands on the host at most: each as
// float32 when it is drawn and again in its own type when it is uploaded or
// checked. -1 when a shape is too large for an int.
func (c Case) bytes() int64 {
	var sum int64
	q, k, v, o := c.shapes()
	all := []backend.Shape{q, k, v, o}
	if c.Mask {
		all = append(all, c.maskShape())
	}
	if c.keeps() {
		all = append(all, c.weightsShape())
	}
	for _, s := range all {
		n := s.Elements()
		if n < 0 || n > 1<<56 {
			return -1
		}
		sum += int64(n) * 8
	}
	return sum
}

// operands are a case's tensors in the memory of the backend under test; bias is
// none without a mask, and w (scores, then weights) where the variant keeps none.
type operands struct{ q, k, v, o, bias, w backend.Tensor }

// result is where a call writes.
func (op *operands) result() kernels.Result { return kernels.Result{O: op.o, Weights: op.w} }

func (op *operands) release() {
	op.q.Release()
	op.k.Release()
	op.v.Release()
	op.o.Release()
	op.bias.Release()
	op.w.Release()
}

// load draws Q, K, V and the mask from the standard normal distribution by seed, puts them
// into be's memory and allocates the outputs. The caller releases the operands.
func (c Case) load(ctx context.Context, be backend.Backend, seed uint64) (op operands, err error) {
	defer func() {
		if err != nil {
			op.release()
		}
	}()
	qs, ks, vs, os := c.shapes()
	type input struct {
		t     *backend.Tensor
		shape backend.Shape
		dtype backend.DType
	}
	inputs := []input{{&op.q, qs, c.DType}, {&op.k, ks, c.DType}, {&op.v, vs, c.DType}}
	if c.Mask {
		inputs = append(inputs, input{&op.bias, c.maskShape(), backend.F32})
	}
	for i, in := range inputs {
		// A stream for each operand, so that one keeps its numbers when the
		// size of another changes.
		data, err := normals(ctx, rand.New(rand.NewPCG(seed, uint64(i))), in.shape.Elements())
		if err != nil {
			return op, err
		}
		if *in.t, err = kernels.FromFloat32(ctx, be, in.dtype, data, in.shape); err != nil {
			return op, err
		}
	}
	if c.keeps() {
		if op.w, err = be.Alloc(ctx, backend.F32, c.weightsShape()); err != nil {
			return op, err
		}
	}
	op.o, err = be.Alloc(ctx, c.DType, os)
	return op, err
}

// normals draws n standard normal numbers.
func normals(ctx context.Context, r *rand.Rand, n int) ([]float32, error) {
	data := make([]float32, n)
	const stride = 1 << 20 // some 10 ms of drawing between looks at the context
	for lo := 0; lo < n; lo += stride {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		for i := lo; i < min(lo+stride, n); i++ {
			data[i] = float32(r.NormFloat64())
		}
	}
	return data, nil
}
