package bench

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strconv"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
)

// Fused is the variant of a [Case] that runs the fused attention call.
const Fused = "fused"

// Case is one thing that is run and timed: an attention call over inputs drawn
// by seed.
type Case struct {
	// Variant names what runs; [Fused] is the only one so far.
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

// moved returns the bytes that a call must move at least: each operand and output
// once, less the keys and values that no row sees.
func (c Case) moved(plan backend.Plan) int64 {
	d := c.Dims
	hidden := int64(d.SeqK-c.keys()) * int64(d.Batch*d.KVHeads*(d.Dim+d.ValueDim))
	return plan.Bytes - hidden*int64(c.DType.Size())
}

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
	return kernels.Plan(be, t[0], t[1], t[2], c.options(bias))
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
// none without a mask.
type operands struct{ q, k, v, o, bias backend.Tensor }

// result is where the fused call writes.
func (op *operands) result() kernels.Result { return kernels.Result{O: op.o} }

func (op *operands) release() {
	op.q.Release()
	op.k.Release()
	op.v.Release()
	op.o.Release()
	op.bias.Release()
}

// load draws Q, K, V and the mask from the standard normal distribution by seed, puts them
// into be's memory and allocates O. The caller releases the operands.
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
