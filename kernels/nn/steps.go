package nn

import (
	"context"

	"github.com/seed90331342/attn/kernels"
)

// steps runs the operations of a pass one after the other. After the first error they do nothing.
type steps struct {
	ctx       context.Context
	dev       *kernels.Device
	dtype     kernels.DType    // of new tensors
	temporary []kernels.Tensor // released at the end
	err       error
}

func (b *steps) release() {
	for _, t := range b.temporary {
		t.Release()
	}
}

func (b *steps) must(t kernels.Tensor, err error) kernels.Tensor {
	if b.err == nil {
		b.err = err
	}
	return t
}

// alloc returns a new tensor that is released at the end.
func (b *steps) alloc(shape kernels.Shape) (t kernels.Tensor) {
	b.temporary = append(b.temporary, b.kept(&t, shape))
	return t
}

// kept returns a new tensor that the caller of the pass gets.
func (b *steps) kept(to *kernels.Tensor, shape kernels.Shape) kernels.Tensor {
	if b.err == nil {
		*to = b.must(b.dev.Alloc(b.ctx, b.dtype, shape))
	}
	return *to
}

// project computes y = x·w.
func (b *steps) project(y, x, w kernels.Tensor) {
	if b.err == nil {
		b.err = b.dev.Project(b.ctx, y, x, w, kernels.Tensor{})
	}
}

func (b *steps) copy(dst, src kernels.Tensor) {
	if b.err == nil {
		b.err = b.dev.Copy(b.ctx, []kernels.Tensor{dst}, []kernels.Tensor{src})
	}
}

func (b *steps) transposed(t kernels.Tensor) kernels.Tensor {
	return b.must(t.Swap(kernels.Seq, kernels.Dim))
}

// columns returns elements lo to hi of each row of t.
func (b *steps) columns(t kernels.Tensor, lo, hi int) kernels.Tensor {
	return b.must(t.Slice(kernels.Dim, lo, hi))
}
