package bench

import (
	"context"
	"fmt"
	"math/rand/v2"

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
	// Causal hides later keys from a row, upper left alignment.
	Causal bool
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
	return name
}

// options returns the call's options.
func (c Case) options() kernels.Options { return kernels.Options{Causal: c.Causal} }

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
	return kernels.Plan(be, t[0], t[1], t[2], c.options())
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
	for _, s := range [4]backend.Shape{q, k, v, o} {
		n := s.Elements()
		if n < 0 || n > 1<<56 {
			return -1
		}
		sum += int64(n) * 8
	}
	return sum
}

// operands are a case's tensors in the memory of the backend under test.
type operands struct{ q, k, v, o backend.Tensor }

func (op *operands) release() {
	op.q.Release()
	op.k.Release()
	op.v.Release()
	op.o.Release()
}

// load draws Q, K and V from the standard normal distribution by seed, puts them
// into be's memory and allocates O. The caller releases the operands.
func (c Case) load(ctx context.Context, be backend.Backend, seed uint64) (op operands, err error) {
	defer func() {
		if err != nil {
			op.release()
		}
	}()
	qs, ks, vs, os := c.shapes()
	for i, in := range []struct {
		t     *backend.Tensor
		shape backend.Shape
	}{{&op.q, qs}, {&op.k, ks}, {&op.v, vs}} {
		// A stream for each operand, so that one keeps its numbers when the
		// size of another changes.
		data, err := normals(ctx, rand.New(rand.NewPCG(seed, uint64(i))), in.shape.Elements())
		if err != nil {
			return op, err
		}
		if *in.t, err = kernels.FromFloat32(ctx, be, c.DType, data, in.shape); err != nil {
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
