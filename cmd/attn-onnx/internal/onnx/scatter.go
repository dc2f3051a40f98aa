package onnx

import (
	"context"
	"fmt"
	"math"
	"slices"

	"github.com/seed90331342/attn/cmd/attn-onnx/internal/onnxfile"
	"github.com/seed90331342/attn/kernels"
)

// scatterOp is a TensorScatter node, which writes new keys or values into a cache: row s of batch b of the update
// becomes row write_indices[b]+s of the cache along axis, which wraps around in the mode circular.
type scatterOp struct {
	axis     int
	circular bool
}

func newTensorScatter(_ *node, a *attributes) operator {
	return &scatterOp{axis: a.integer("axis", -2, math.MinInt32, math.MaxInt32), circular: a.word("mode", "linear", "circular") == "circular"}
}

func (op *scatterOp) run(ctx context.Context, dev *kernels.Device, in []*onnxfile.Tensor) ([]*onnxfile.Tensor, string, error) {
	cache, update, indices := in[0], in[1], in[2]
	shape, axis := cache.Shape, op.axis
	if axis < 0 {
		axis += len(shape)
	}
	if axis < 1 || axis >= len(shape) {
		return nil, "", fmt.Errorf("axis is %d, past_cache has shape %v: it must be one of its axes and not 0, which is the batch: %w", op.axis, shape, kernels.ErrOption)
	}
	if cache.Type != update.Type || !cache.Type.Float() || cache.Type == onnxfile.Double {
		return nil, "", fmt.Errorf("past_cache is %v and update %v: attn has caches of f32, f16 and bf16, for both: %w", cache.Type, update.Type, kernels.ErrDType)
	}
	want := slices.Clone(shape)
	if len(update.Shape) == len(shape) {
		want[axis] = min(update.Shape[axis], shape[axis])
	}
	if !slices.Equal(update.Shape, want) {
		return nil, "", fmt.Errorf("update has shape %v, past_cache %v: they must be equal but for axis %d, where the update must not be longer: %w", update.Shape, shape, axis, kernels.ErrShape)
	}
	if cache.Elements() == 0 {
		return nil, "", fmt.Errorf("past_cache has shape %v, every length must be at least 1: %w", shape, kernels.ErrShape)
	}
	batch, rows, added := shape[0], shape[axis], update.Shape[axis]
	starts := make([]int, batch)
	if indices != nil {
		if !slices.Equal(indices.Shape, []int{batch}) || indices.Type != onnxfile.Int64 {
			return nil, "", fmt.Errorf("write_indices has shape %v of %v, it must be [%d] of int64, one for each batch: %w", indices.Shape, indices.Type, batch, kernels.ErrShape)
		}
		for b := range starts {
			last := rows - added
			if op.circular {
				last = rows - 1
			}
			n := indices.Int(b)
			if n < 0 || n > int64(last) {
				return nil, "", fmt.Errorf("write_indices[%d] is %d, it must be 0 to %d for %d rows in a cache of %d: %w", b, n, last, added, rows, kernels.ErrOption)
			}
			starts[b] = int(n)
		}
	}
	inner := 1
	for _, l := range shape[axis+1:] {
		inner *= l
	}
	outer := cache.Elements() / (batch * rows * inner)
	up := uploader{ctx: ctx, dev: dev}
	defer up.release()
	to := up.upload("past_cache", cache, dtypeOf(cache.Type), kernels.Shape{batch, outer, rows, inner})
	from := up.upload("update", update, dtypeOf(cache.Type), kernels.Shape{batch, outer, added, inner})
	if up.err != nil {
		return nil, "", up.err
	}
	var dst, src []kernels.Tensor
	for b, start := range starts {
		// The rows up to the end of the cache, and those after it.
		first := min(added, rows-start)
		for _, part := range [][3]int{{start, 0, first}, {0, first, added - first}} {
			d, err := window(to, b, part[0], part[2])
			if err != nil {
				return nil, "", err
			}
			s, err := window(from, b, part[1], part[2])
			if err != nil {
				return nil, "", err
			}
			dst, src = append(dst, d), append(src, s)
		}
	}
	if err := dev.Copy(ctx, dst, src); err != nil {
		return nil, "", err
	}
	y, err := download(ctx, dev, to, cache.Type, shape)
	return []*onnxfile.Tensor{y}, "copies, " + cache.Type.String(), err
}

// window returns n rows of batch b.
func window(t kernels.Tensor, b, row, n int) (kernels.Tensor, error) {
	t, err := t.Slice(kernels.Batch, b, b+1)
	if err != nil {
		return t, err
	}
	return t.Slice(kernels.Seq, row, row+n)
}
