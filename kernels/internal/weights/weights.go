// Package weights checks, stores and reads the named weights of a layer.
package weights

import (
	"context"
	"fmt"

	"github.com/seed90331342/attn/kernels"
)

// Weight is one of a layer's weights.
type Weight struct {
	Name   string          // in errors, and in the files that Write writes
	T      *kernels.Tensor // [1, 1, in, out] or, for a Vector, any shape of as many elements
	Shape  kernels.Shape   // zero for a weight that the layer does not have
	Vector bool            // files store one axis, or that of heads too
	F32    bool            // it is not rounded to the type of the others
	Of     string          // what a config without this weight lacks

	// Tensor is the name of the tensor of a file. Weights of equal names are next to each other in
	// one tensor, in this order: whole, or for each of a number of Groups the part that it has of
	// each weight. Columns means that the tensor is [in, out]; otherwise it is [out, in].
	Tensor  string
	Groups  int
	Columns bool
	// Optional means zeros where the file has no such tensor.
	Optional bool
}

// In returns the number of rows of a weight, Out that of its columns.
func (w Weight) In() int  { return w.Shape[kernels.Seq] }
func (w Weight) Out() int { return w.Shape.Elements() / w.In() }

// Has reports whether the layer has the weight.
func (w Weight) Has() bool { return w.Shape != kernels.Shape{} }

// List is the weights that layers of one type may have, always in the same order.
type List []Weight

// Release frees the memory.
func (l List) Release() {
	for _, w := range l {
		w.T.Release()
	}
}

// check returns an error unless all weights are as the layer needs them, F32 in contiguous host memory.
func (l List) check() error {
	for _, w := range l {
		switch {
		case !w.Has() && !w.T.IsZero():
			return fmt.Errorf("%s is present, but the config has no %s: %w", w.Name, w.Of, kernels.ErrShape)
		case !w.Has():
			continue
		}
		if err := w.T.CheckShape(w.Name, w.Shape, "shape for the config", kernels.F32); err != nil {
			return err
		}
		if !w.T.OnHost() {
			return fmt.Errorf("%s is not in host memory: %w", w.Name, kernels.ErrDevice)
		}
		if err := w.contiguous(); err != nil {
			return err
		}
	}
	return nil
}

func (w Weight) contiguous() error {
	if !w.T.IsContiguous() {
		return fmt.Errorf("%s has strides %v, weights must be contiguous: %w", w.Name, w.T.Strides(), kernels.ErrShape)
	}
	return nil
}

// Upload checks the weights and stores those that are present in device memory as dtype. After an
// error none of them is left there.
func (l List) Upload(ctx context.Context, dev *kernels.Device, dtype kernels.DType, to List) error {
	if err := l.check(); err != nil {
		return err
	}
	for i, w := range l {
		if w.T.IsZero() {
			continue
		}
		shape, as := w.T.Shape(), dtype
		if w.F32 {
			as = kernels.F32
		}
		data, err := w.T.Float32s()
		if err == nil {
			*to[i].T, err = dev.FromFloat32(ctx, as, data[:shape.Elements()], shape)
		}
		if err != nil {
			to.Release()
			return fmt.Errorf("%s: %w", w.Name, err)
		}
	}
	return nil
}

// Joined returns matrices in host memory, F32 and contiguous, side by side. Zero tensors have no columns.
func Joined(ts ...kernels.Tensor) (kernels.Tensor, error) {
	shape := ts[0].Shape()
	shape[kernels.Dim] = 0
	for _, t := range ts {
		shape[kernels.Dim] += t.Shape()[kernels.Dim]
	}
	all, err := kernels.AllocHost(kernels.F32, shape)
	if err != nil {
		return all, err
	}
	to, _ := all.Float32s() // F32, as all of them
	for row := range shape[kernels.Seq] {
		for _, t := range ts {
			from, _ := t.Float32s()
			n := t.Shape()[kernels.Dim]
			to = to[copy(to, from[row*n:][:n]):]
		}
	}
	return all, nil
}

// Centred returns t after the mean of each d columns of a row is subtracted: heads of x·t have the mean 0.
func Centred(t kernels.Tensor, d int) (kernels.Tensor, error) {
	from, err := t.Float32s()
	if err != nil || !t.IsContiguous() || t.Shape()[kernels.Dim]%d != 0 {
		return t, nil // there is none, or the check of all weights refuses it
	}
	data, err := kernels.Make[float32](t.Shape().Elements())
	if err != nil {
		return t, err
	}
	for at := 0; at < len(data); at += d {
		mean := 0.0
		for _, x := range from[at : at+d] {
			mean += float64(x) / float64(d)
		}
		for i, x := range from[at : at+d] {
			data[at+i] = float32(float64(x) - mean)
		}
	}
	return kernels.HostF32(data, t.Shape())
}
