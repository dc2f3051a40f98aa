// Package steps runs the operations of a pass of a layer one after the other.
package steps

import (
	"context"
	"fmt"

	"github.com/seed90331342/attn/kernels"
)

// Steps runs the operations of a pass one after the other. After the first error they do nothing.
type Steps struct {
	Ctx   context.Context
	Dev   *kernels.Device
	DType kernels.DType // of new tensors
	// Conv is Dev, or a cache that keeps the states, and so is Linear.
	Conv interface {
		CausalConv(ctx context.Context, c kernels.CausalConv) error
	}
	Linear interface {
		LinearAttention(ctx context.Context, c kernels.LinearAttention) error
	}
	Err       error            // the first one
	temporary []kernels.Tensor // released at the end
}

// Do runs f unless there was an error.
func (b *Steps) Do(f func() error) {
	if b.Err == nil {
		b.Err = f()
	}
}

// Own makes the release at the end that of t too.
func (b *Steps) Own(t ...kernels.Tensor) { b.temporary = append(b.temporary, t...) }

// Release frees the tensors of Alloc and Own.
func (b *Steps) Release() {
	for _, t := range b.temporary {
		t.Release()
	}
}

// Result releases what Release does, and returns y, or after an error nothing.
func (b *Steps) Result(y kernels.Tensor) (kernels.Tensor, error) {
	b.Release()
	if b.Err != nil {
		y.Release()
		return kernels.Tensor{}, b.Err
	}
	return y, nil
}

// Must returns t and notes err.
func (b *Steps) Must(t kernels.Tensor, err error) kernels.Tensor {
	if b.Err == nil {
		b.Err = err
	}
	return t
}

// Alloc returns a new tensor that is released at the end.
func (b *Steps) Alloc(shape kernels.Shape) kernels.Tensor { return b.AllocAs(b.DType, shape) }

// AllocAs is Alloc of another type.
func (b *Steps) AllocAs(dtype kernels.DType, shape kernels.Shape) (t kernels.Tensor) {
	if b.Err == nil {
		t = b.Must(b.Dev.Alloc(b.Ctx, dtype, shape))
		b.Own(t)
	}
	return t
}

// Keep returns a new tensor that the caller of the pass gets.
func (b *Steps) Keep(to *kernels.Tensor, shape kernels.Shape) kernels.Tensor {
	if b.Err == nil {
		*to = b.Must(b.Dev.Alloc(b.Ctx, b.DType, shape))
	}
	return *to
}

// Project computes y = x·w.
func (b *Steps) Project(y, x, w kernels.Tensor) { b.Affine(y, x, w, kernels.Tensor{}) }

// Affine computes y = x·w + bias.
func (b *Steps) Affine(y, x, w, bias kernels.Tensor) {
	b.Do(func() error { return b.Dev.Project(b.Ctx, y, x, w, bias) })
}

// Copy copies src to dst.
func (b *Steps) Copy(dst, src kernels.Tensor) {
	b.Do(func() error { return b.Dev.Copy(b.Ctx, []kernels.Tensor{dst}, []kernels.Tensor{src}) })
}

// Transposed returns t with rows as columns.
func (b *Steps) Transposed(t kernels.Tensor) kernels.Tensor {
	return b.Must(t.Swap(kernels.Seq, kernels.Dim))
}

// Columns returns elements lo to hi of each row of t.
func (b *Steps) Columns(t kernels.Tensor, lo, hi int) kernels.Tensor {
	return b.Must(t.Slice(kernels.Dim, lo, hi))
}

// Normalise computes y, the norms of the rows of x.
func (b *Steps) Normalise(y, x, w kernels.Tensor, n kernels.Norm) {
	b.Do(func() error { return b.Dev.Normalise(b.Ctx, y, x, w, n) })
}

// Rotate rotates the rows of q and k in place, unless there are no angles, or with back rotates them back.
func (b *Steps) Rotate(q, k kernels.Tensor, angles [2]kernels.Angles, back bool) {
	for i, x := range []kernels.Tensor{q, k} {
		a := angles[i]
		if b.Err != nil || a == (kernels.Angles{}) {
			return
		}
		a.Inverse = a.Inverse != back
		if err := b.Dev.Rotate(b.Ctx, x, x, a); err != nil {
			b.Err = fmt.Errorf("%c: %w", "qk"[i], err)
		}
	}
}

// Gate computes y = x·f(gate).
func (b *Steps) Gate(y, x, gate kernels.Tensor, f kernels.Activation) {
	b.Do(func() error { return b.Dev.Gate(b.Ctx, y, x, gate, f) })
}

// CausalConv computes a causal convolution.
func (b *Steps) CausalConv(c kernels.CausalConv) {
	b.Do(func() error { return b.Conv.CausalConv(b.Ctx, c) })
}

// LinearAttention computes linear attention.
func (b *Steps) LinearAttention(c kernels.LinearAttention) {
	b.Do(func() error { return b.Linear.LinearAttention(b.Ctx, c) })
}

// Attend computes attention into out.
func (b *Steps) Attend(out kernels.Result, q, k, v kernels.Tensor, opt kernels.Options) {
	if b.Err != nil {
		return
	}
	call, err := b.Dev.Prepare(q, k, v, opt)
	if b.Err = err; err == nil {
		b.Err = call.RunInto(b.Ctx, out)
	}
}

// Partial returns a new result for Merge, with an output of shape and an LSE in F32.
func (b *Steps) Partial(shape kernels.Shape) (r kernels.Result) {
	r.O = b.AllocAs(kernels.F32, shape)
	shape[kernels.Dim] = 1
	r.LSE = b.AllocAs(kernels.F32, shape)
	return r
}

// Merge merges part into whole, see [kernels.Device.Merge].
func (b *Steps) Merge(whole, part kernels.Result) {
	b.Do(func() error { return b.Dev.Merge(b.Ctx, whole, part) })
}

// flat returns t [B, 1, S, N] as the rows of all batches, [1, 1, B·S, N].
func (b *Steps) flat(t kernels.Tensor) kernels.Tensor {
	rows, ok := t.Rows()
	if !ok {
		c := b.Alloc(t.Shape())
		b.Copy(c, t)
		rows, _ = c.Rows() // contiguous
	}
	return rows
}

// LinearBackward computes the gradients of the weight and the bias of y = x·w + bias.
func (b *Steps) LinearBackward(dw, dbias *kernels.Tensor, x, dy kernels.Tensor, bias bool) {
	x, dy = b.flat(x), b.flat(dy)
	n := dy.Shape()[kernels.Dim]
	b.Project(b.Keep(dw, kernels.Shape{1, 1, x.Shape()[kernels.Dim], n}), b.Transposed(x), dy)
	if bias {
		b.Sum(dbias, dy)
	}
}

// Sum computes the sum of the rows of t [1, 1, S, N].
func (b *Steps) Sum(to *kernels.Tensor, t kernels.Tensor) {
	s := t.Shape()
	b.Project(b.Keep(to, kernels.Shape{1, 1, 1, s[kernels.Dim]}), b.Ones(kernels.Shape{1, 1, 1, s[kernels.Seq]}), t)
}

// Ones returns a tensor of ones.
func (b *Steps) Ones(shape kernels.Shape) kernels.Tensor {
	one := b.Must(b.Dev.FromFloat32(b.Ctx, kernels.F32, []float32{1}, kernels.Shape{1, 1, 1, 1}))
	b.Own(one)
	return b.Must(one.Broadcast(shape))
}

// Rows returns contiguous memory as rows of n elements.
func (b *Steps) Rows(t kernels.Tensor, n int) kernels.Tensor {
	rows := t.Shape().Elements() / n
	return b.Must(t.View(kernels.Shape{1, 1, rows, n}, kernels.Strides{rows * n, rows * n, n, 1}, 0))
}

// Concat returns tensors next to each other along an axis.
func (b *Steps) Concat(axis int, ts ...kernels.Tensor) kernels.Tensor {
	if len(ts) == 1 {
		return ts[0]
	}
	s, at := ts[0].Shape(), 0
	for _, t := range ts[1:] {
		s[axis] += t.Shape()[axis]
	}
	all := b.Alloc(s)
	for _, t := range ts {
		n := t.Shape()[axis]
		b.Copy(b.Must(all.Slice(axis, at, at+n)), t)
		at += n
	}
	return all
}

// InputBackward computes dx = Σ dy·wᵀ over the layers that read x: one product of the gradients of all
// outputs, side by side, and the transposed weights below each other.
func (b *Steps) InputBackward(dx *kernels.Tensor, dy, weights []kernels.Tensor) {
	below := make([]kernels.Tensor, len(weights))
	for i, w := range weights {
		below[i] = b.Transposed(w)
	}
	shape := dy[0].Shape()
	shape[kernels.Dim] = weights[0].Shape()[kernels.Seq]
	b.Project(b.Keep(dx, shape), b.Concat(kernels.Dim, dy...), b.Concat(kernels.Seq, below...))
}
