package cpu

import (
	"context"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/pool"
	"github.com/seed90331342/attn/cpu/internal/strided"
	"github.com/seed90331342/attn/cpu/internal/tile"
)

// QK implements backend.Backend: s = q·kᵀ. Errors as for Attention.
func (be *Backend) QK(ctx context.Context, s, q, k backend.Tensor) error {
	out, in := []backend.Operand{{Name: "s", Tensor: s}}, []backend.Operand{{Name: "q", Tensor: q}, {Name: "k", Tensor: k}}
	return be.doPinned(ctx, "qk", out, in, func() error {
		j := stageJob{scores: strided.Of(&s), products: tile.Products{Q: strided.Of(&q), K: strided.Of(&k), Scale: 1}}
		j.divide(be, q, k)
		j.partition.shareKeys(1) // nothing is summed over keys
		return j.run(ctx, be, j.partition.layout.QueryFloats)
	})
}

// PV implements backend.Backend: o = w·v, in float32, summed from zero over each 128 keys. A weight of exactly 0 hides
// NaN and Inf in its value. Errors as for Attention.
func (be *Backend) PV(ctx context.Context, o, w, v backend.Tensor) error {
	out, in := []backend.Operand{{Name: "o", Tensor: o}}, []backend.Operand{{Name: "w", Tensor: w}, {Name: "v", Tensor: v}}
	return be.doPinned(ctx, "pv", out, in, func() error {
		j := stageJob{w: strided.Of(&w), zeroHides: true, products: tile.Products{V: strided.Of(&v), O: strided.Of(&o)}}
		return j.runValues(ctx, be, o, v)
	})
}

// stageJob is one QK call, one PV call, or some columns of a Project call.
type stageJob struct {
	partition partition
	products  tile.Products
	scores    strided.Tensor // that QK writes; zero in the other calls
	w         strided.Tensor // the weights that values are multiplied by
	zeroHides bool
	bias      strided.Tensor // [1, 1, 1, N] where the sums begin, from column c0 on; may be zero
	c0        int
}

// divide divides a product of rows of q and k among the threads. Tiles have keys as lanes.
func (j *stageJob) divide(be *Backend, q, k backend.Tensor) {
	j.partition = divide(tile.NewLayout(be.kernels, true, &backend.Call{Q: q, K: k, V: k}), false, q.Shape()[backend.Batch], be.threads())
}

// run computes the call; a tile needs some floats of its own.
func (j *stageJob) run(ctx context.Context, be *Backend, floats int) error {
	j.products.Layout = &j.partition.layout
	return sharedPool.Run(ctx, j, j.partition.layout.SpaceFloats()+j.partition.chunkTiles*floats, j.partition.tasks, be.threads())
}

// runValues computes a call with values, whose shape is that of o and v.
func (j *stageJob) runValues(ctx context.Context, be *Backend, o, v backend.Tensor) error {
	j.divide(be, o, v)
	l := &j.partition.layout
	j.partition.shareKeys(l.Sums) // otherwise the sums of chunks would have to be added
	// The rows of a weight matrix lie so far apart that those of a block share few
	// sets of the caches: several tiles read a copy.
	l.ReadV = l.ReadV && (j.zeroHides || l.Tiles == 1)
	return j.run(ctx, be, l.OutputFloats)
}

// Task implements pool.Job.
func (j *stageJob) Task(turn *pool.Turn, w *pool.Scratch, n int) error {
	c, s, qk := j.partition.chunk(n), j.products.Open(w), !j.scores.IsZero()
	tiles := j.partition.layout.TilesOf(s, &c)
	for n := range tiles {
		if qk {
			j.products.BeginScores(w, s, &tiles[n])
		} else {
			j.products.BeginSums(w, s, &tiles[n], &j.bias, j.c0)
		}
	}
	for j0 := c.Keys.Lo; j0 < c.Keys.Hi; j0 += tile.BlockKeys {
		if err := turn.Pause(); err != nil {
			return err
		}
		if qk {
			j.products.WriteScores(s, &c, tiles, j0, &j.scores)
		} else {
			j.products.AddValues(s, tiles, j0, &j.w, j.zeroHides)
		}
	}
	for n := 0; !qk && n < len(tiles); n++ {
		j.products.WriteSums(s, &tiles[n])
	}
	return nil
}

// Project implements backend.Projector: y = x·w + bias, in float32 whatever the operands' types are, summed over each
// 128 elements from zero. Errors as for Attention.
//
// It is PV with columns as heads, but a zero in x hides nothing, and sums begin at the bias.
func (be *Backend) Project(ctx context.Context, y, x, w, bias backend.Tensor) error {
	out, in := []backend.Operand{{Name: "y", Tensor: y}}, []backend.Operand{{Name: "x", Tensor: x}, {Name: "w", Tensor: w}, {Name: "bias", Tensor: bias}}
	return be.doPinned(ctx, "project", out, in, func() error {
		all := y.Shape()[backend.Dim]
		for h := range y.Shape()[backend.Heads] {
			for c0 := 0; c0 < all; {
				cols := min(projectCols, all-c0)
				n := (all - c0) / cols
				if err := be.projectColumns(ctx, y, x, w, strided.Of(&bias), h, c0, n, cols); err != nil {
					return err
				}
				c0 += n * cols
			}
		}
		return nil
	})
}

// projectCols is the number of columns of w that form a head. With 128 of them
// a block of w and six tiles of rows share half of a core's second-level cache, and
// each number that is transposed on its way in is used 128 times.
const projectCols = 128

// projectColumns computes columns [c0, c0+n·cols) of head h of y, with cols of them as a head.
func (be *Backend) projectColumns(ctx context.Context, y, x, w backend.Tensor, bias strided.Tensor, h, c0, n, cols int) (err error) {
	batches, rows := y.Shape()[backend.Batch], y.Shape()[backend.Seq]
	if ys, ok := y.Rows(); ok && w.Strides()[backend.Batch] == 0 {
		if xs, ok := x.Rows(); ok {
			y, x, batches, rows = ys, xs, 1, batches*rows
		}
	}
	// part returns n heads of t, each of cols columns: the first from c0 on, the others step after the one before.
	part := func(t backend.Tensor, rows, cols, c0, step int) backend.Tensor {
		strides := t.Strides()
		at := h*strides[backend.Heads] + c0*strides[backend.Dim]
		strides[backend.Heads] = step * strides[backend.Dim]
		if err == nil {
			t, err = t.View(backend.Shape{batches, n, rows, cols}, strides, at)
		}
		return t
	}
	y, w = part(y, rows, cols, c0, cols), part(w, w.Shape()[backend.Seq], cols, c0, cols)
	if x = part(x, rows, x.Shape()[backend.Dim], 0, 0); err != nil {
		return err
	}
	j := stageJob{w: strided.Of(&x), bias: bias, c0: c0, products: tile.Products{V: strided.Of(&w), O: strided.Of(&y)}}
	return j.runValues(ctx, be, y, w)
}
