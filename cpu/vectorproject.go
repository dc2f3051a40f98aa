package cpu

import (
	"context"

	"github.com/seed90331342/attn/backend"
)

// projectCols is how many columns of w the vector kernels take at a time. With 128 of
// them a block of w and six tiles of rows share half of a core's second cache, and
// each number that is transposed on its way in is used 128 times.
const projectCols = 128

// vectorProject is Project on the vector kernels: it is PV, y = x·w, with pieces of
// columns as heads, but that nothing is hidden and sums begin at the bias.
func (be *Backend) vectorProject(ctx context.Context, y, x, w, bias backend.Tensor) error {
	var pinned backend.Pinned
	err := pinned.Pin(nil, where, []backend.Operand{{Name: "y", Tensor: y}},
		[]backend.Operand{{Name: "x", Tensor: x}, {Name: "w", Tensor: w}, {Name: "bias", Tensor: bias}})
	if err != nil {
		return err
	}
	defer pinned.Unpin()
	for h := range y.Shape()[backend.Heads] {
		var part [3]backend.Tensor
		for i, t := range [3]backend.Tensor{y, x, w} {
			if part[i], err = t.Slice(backend.Heads, h, h+1); err != nil {
				return err
			}
		}
		if err := be.projectHead(ctx, part[0], part[1], part[2], bias); err != nil {
			return err
		}
	}
	return nil
}

// projectHead is vectorProject for one head.
func (be *Backend) projectHead(ctx context.Context, y, x, w, bias backend.Tensor) (err error) {
	if y, x, w, err = joinBatches(y, x, w); err != nil {
		return err
	}
	cols := y.Shape()[backend.Dim]
	whole := cols / projectCols * projectCols
	if whole > 0 {
		err = be.projectPieces(ctx, y, x, w, bias, 0, whole/projectCols, projectCols)
	}
	if err == nil && whole < cols {
		err = be.projectPieces(ctx, y, x, w, bias, whole, 1, cols-whole)
	}
	return err
}

// joinBatches returns the operands as one batch of many rows where w is the same for
// all batches and the rows of each follow those of the one before.
func joinBatches(y, x, w backend.Tensor) (_, _, _ backend.Tensor, err error) {
	n, s := y.Shape()[backend.Batch], y.Shape()[backend.Seq]
	follows := func(t backend.Tensor) bool {
		return t.Strides()[backend.Batch] == s*t.Strides()[backend.Seq]
	}
	if n == 1 || w.Strides()[backend.Batch] != 0 || !follows(y) || !follows(x) {
		return y, x, w, nil
	}
	rows := func(t backend.Tensor) backend.Tensor {
		if err == nil {
			t, err = t.View(backend.Shape{1, 1, n * s, t.Shape()[backend.Dim]}, t.Strides(), 0)
		}
		return t
	}
	y, x = rows(y), rows(x)
	if err == nil {
		w, err = w.Slice(backend.Batch, 0, 1)
	}
	return y, x, w, err
}

// projectPieces computes n pieces of so many columns, from column c0 on.
func (be *Backend) projectPieces(ctx context.Context, y, x, w, bias backend.Tensor, c0, n, cols int) error {
	pieces := func(t backend.Tensor) (backend.Tensor, error) {
		shape, st := t.Shape(), t.Strides()
		at := c0 * st[backend.Dim]
		st[backend.Heads] = cols * st[backend.Dim]
		return t.View(backend.Shape{shape[backend.Batch], n, shape[backend.Seq], cols}, st, at)
	}
	yp, err := pieces(y)
	if err != nil {
		return err
	}
	wp, err := pieces(w)
	if err != nil {
		return err
	}
	shape := x.Shape()
	shape[backend.Heads] = n
	xp, err := x.Broadcast(shape)
	if err != nil {
		return err
	}
	j := pvVector{project: true, c0: c0}
	if j.o, err = floatView("y", yp); err != nil {
		return err
	}
	if j.w, err = floatView("x", xp); err != nil {
		return err
	}
	if j.v, err = floatView("w", wp); err != nil {
		return err
	}
	if j.bias, err = floatView("bias", bias); err != nil {
		return err
	}
	return j.run(ctx, be, yp, wp)
}
