package cpu

import (
	"context"
	"fmt"
	"math"
	"sync"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/pool"
	"github.com/seed90331342/attn/cpu/internal/strided"
	"github.com/seed90331342/attn/cpu/internal/tile"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// rowJob is a call that computes the rows of a tensor [B, H, S, N] one at a time. Calls are
// pooled, so that appending a token to a cache does not allocate.
type rowJob struct {
	compute func(r row)
	floats  int // of row.mem
	kernels *vec.Kernels

	heads, seq int
	taskRows   int
	headTasks  int
	tasks      int
	threads    int

	x          [6]strided.Tensor // the operands, see run
	cols       int               // of a row
	rotation   backend.Rotation
	norm       backend.Norm
	activation backend.Activation
	problem    *backend.Problem // of scores, else nil
	scores     *tile.Scores
}

// row is row i of head (b, h) of a call, and the memory to compute it in.
type row struct {
	job     *rowJob
	space   *tile.Space
	mem     []float32
	b, h, i int
}

var rowJobs = sync.Pool{New: func() any { return new(rowJob) }}

// newRowJob returns a call with rows of the given shape, for one run.
func (be *Backend) newRowJob(shape backend.Shape, floats int, compute func(r row)) *rowJob {
	j := rowJobs.Get().(*rowJob)
	j.compute, j.floats, j.kernels, j.cols = compute, floats, be.kernels, shape[backend.Dim]
	j.heads, j.seq, j.threads = shape[backend.Heads], shape[backend.Seq], be.threads()
	if shape.Elements() < copyAlone {
		j.threads = 1
	}
	// Tasks are up to tile.MaxRows rows of one head.
	steps, heads := tile.CeilDiv(j.seq, rowStep), shape[backend.Batch]*j.heads
	j.taskRows = rowStep * max(1, min(heads*steps/max(1, tasksPerThread*j.threads), tile.MaxRows/rowStep))
	j.headTasks = tile.CeilDiv(j.seq, j.taskRows)
	j.tasks = heads * j.headTasks
	return j
}

// copyAlone is the number of elements that one goroutine copies in about the time that another one takes to wake up.
const copyAlone = 1 << 14

// rowStep is the multiple of which tasks have rows.
const rowStep = 64

// run pins the operands, sets x to their views, the outputs first, computes the rows, and forgets the operands.
func (j *rowJob) run(ctx context.Context, out, in []backend.Operand) error {
	defer func() {
		*j = rowJob{}
		rowJobs.Put(j)
	}()
	var pinned backend.Pinned
	if err := pinned.Pin(nil, where, out, in); err != nil {
		return err
	}
	defer pinned.Unpin()
	x := j.x[:0]
	for _, list := range [2][]backend.Operand{out, in} {
		for i := range list {
			x = append(x, strided.Of(&list[i].Tensor))
		}
	}
	return sharedPool.Run(ctx, j, j.floats, j.tasks, j.threads)
}

// Task implements pool.Job.
func (j *rowJob) Task(turn *pool.Turn, w *pool.Scratch, t int) error {
	s, mem := tile.SpaceOf(w), w.Floats(j.floats)
	lookMask := rowStep - 1 // one row in rowStep looks at the context
	if j.problem != nil {
		lookMask = 0 // rows of scores may be long
		if j.scores.Drops {
			j.scores.Seed(&s.Draw)
		}
	}
	head, from := t/j.headTasks, t%j.headTasks*j.taskRows
	b, h := head/j.heads, head%j.heads
	for i := from; i < min(j.seq, from+j.taskRows); i++ {
		if i&lookMask == 0 {
			if err := turn.Pause(); err != nil {
				return err
			}
		}
		j.compute(row{j, s, mem, b, h, i})
	}
	return nil
}

// load reads the first elements of the row of operand n, as many as dst has.
func (r *row) load(n int, dst []float32) {
	r.job.x[n].Load(r.job.kernels, dst, len(dst), r.b, r.h, r.i, 1, 0, len(dst))
}

// unlessSame returns x, or no operand if it is the same view as the output y: the call is in place.
func unlessSame(x, y backend.Tensor) backend.Tensor {
	if x == y {
		return backend.Tensor{}
	}
	return x
}

// source returns n, or in place of an absent operand the index of the output.
func (r *row) source(n int) int {
	if r.job.x[n].IsZero() {
		return 0
	}
	return n
}

// store writes the first elements of the row of the output.
func (r *row) store(row []float32) { r.job.x[0].Store(r.job.kernels, row, r.b, r.h, r.i, 0) }

// Download implements backend.Backend: host = src, element by element.
//
//	host, src [B, H, S, D] of the same type, any strides
//
// Errors: ErrShape, ErrDType, and those of Attention.
func (be *Backend) Download(ctx context.Context, host, src backend.Tensor) error {
	return be.do(ctx, "download", func() error {
		if host.Shape() != src.Shape() {
			return fmt.Errorf("host has shape %v, src %v, they must be equal: %w", host.Shape(), src.Shape(), backend.ErrShape)
		}
		if host.DType() != src.DType() {
			return fmt.Errorf("host is %v, src %v, they must be equal: %w", host.DType(), src.DType(), backend.ErrDType)
		}
		return be.copy(ctx, backend.Operand{Name: "host", Tensor: host}, backend.Operand{Name: "src", Tensor: src})
	})
}

// Copy implements backend.Copier. Errors as for Attention.
func (be *Backend) Copy(ctx context.Context, dst, src []backend.Tensor) error {
	return be.do(ctx, "copy", func() error {
		for i := range dst {
			if err := be.copy(ctx, backend.Operand{Name: "dst", Tensor: dst[i]}, backend.Operand{Name: "src", Tensor: src[i]}); err != nil {
				return err
			}
		}
		return nil
	})
}

// copy writes dst = src, rounded to nearest even where dst's type is the narrower one.
func (be *Backend) copy(ctx context.Context, dst, src backend.Operand) error {
	shape := dst.Tensor.Shape()
	j := be.newRowJob(shape, shape[backend.Dim], copyRow)
	if shape.Elements() == 0 {
		j.tasks = 0
	}
	return j.run(ctx, []backend.Operand{dst}, []backend.Operand{src})
}

func copyRow(r row) {
	dst, src := &r.job.x[0], &r.job.x[1]
	to, from := dst.Index(r.b, r.h, r.i), src.Index(r.b, r.h, r.i)
	n, step, steps := r.job.cols, dst.Stride[backend.Dim], src.Stride[backend.Dim]
	switch {
	case dst.DType != src.DType:
		src.LoadRows(r.job.kernels, r.mem, n, r.b, r.h, r.i, 1)
		dst.Store(r.job.kernels, r.mem, r.b, r.h, r.i, 0)
	case dst.DType.Quantised():
		copy(dst.Bytes[to:to+dst.DType.Row(n)], src.Bytes[from:])
	case dst.DType == backend.F32:
		strided.CopyElements(dst.F32[to:], step, src.F32[from:], steps, n)
	case dst.DType == backend.I32:
		strided.CopyElements(dst.Ints[to:], step, src.Ints[from:], steps, n)
	case dst.DType == backend.Bool:
		strided.CopyElements(dst.Bools[to:], step, src.Bools[from:], steps, n)
	default:
		strided.CopyElements(dst.Bits[to:], step, src.Bits[from:], steps, n)
	}
}

// Rotate implements backend.Rotator, in float32 whatever the types of y and x are:
//
//	y_a = x_a·cos_i - x_b·sin_i    y_b = x_a·sin_i + x_b·cos_i
//
// Errors as for Attention.
func (be *Backend) Rotate(ctx context.Context, y, x, cos, sin backend.Tensor, how backend.Rotation) error {
	return be.do(ctx, "rotate", func() error {
		shape, pairs := y.Shape(), cos.Shape()[backend.Dim]
		j := be.newRowJob(shape, shape[backend.Dim]+2*pairs, rotateRow)
		j.rotation = how
		if y == x { // the elements after the pairs do not change
			j.cols = 2 * pairs
		}
		return j.run(ctx, []backend.Operand{{Name: "y", Tensor: y}}, []backend.Operand{{Name: "cos", Tensor: cos}, {Name: "sin", Tensor: sin}, {Name: "x", Tensor: unlessSame(x, y)}})
	})
}

func rotateRow(r row) {
	n := r.job.x[1].Shape[backend.Dim]
	cos, sin, row := r.mem[:n], r.mem[n:2*n], r.mem[2*n:][:r.job.cols]
	r.load(r.source(3), row)
	r.load(1, cos)
	r.load(2, sin)
	if r.job.rotation.Inverse {
		for i := range sin {
			sin[i] = -sin[i]
		}
	}
	second, step := n, 1 // of the pairs
	if r.job.rotation.Interleaved {
		second, step = 1, 2
	}
	rotate(row, row[second:], step, cos, sin)
	r.store(row)
}

// rotate rotates the pairs (x[step·i], y[step·i]). The conversions keep the compiler
// from fusing products and sums, so every machine computes the same bits.
func rotate(x, y []float32, step int, cos, sin []float32) {
	sin = sin[:len(cos)]
	at := 0
	for i, c := range cos {
		a, b, s := x[at], y[at], sin[i]
		x[at] = float32(a*c) - float32(b*s)
		y[at] = float32(a*s) + float32(b*c)
		at += step
	}
}

// Merge implements backend.Merger:
//
//	m = max(lse, plse)    a = exp(lse-m)    b = exp(plse-m)
//	o = (a·o + b·po)/(a+b)    lse = m + log(a+b)
//
// in place of o and lse, with weights in float64. When the lse of one side is infinite,
// the result has the bits of the other side. Errors as for Attention.
func (be *Backend) Merge(ctx context.Context, o, lse, po, plse backend.Tensor) error {
	return be.do(ctx, "merge", func() error {
		j := be.newRowJob(o.Shape(), 2*o.Shape()[backend.Dim], mergeRow)
		return j.run(ctx,
			[]backend.Operand{{Name: "o", Tensor: o}, {Name: "lse", Tensor: lse}},
			[]backend.Operand{{Name: "the part's o", Tensor: po}, {Name: "the part's lse", Tensor: plse}})
	})
}

func mergeRow(r row) {
	o, other := r.mem[:r.job.cols], r.mem[r.job.cols:]
	lse, otherLSE := &r.job.x[1].F32[r.job.x[1].Index(r.b, r.h, r.i)], r.job.x[3].At(r.b, r.h, r.i, 0)
	if math.IsInf(float64(otherLSE), 0) {
		return
	}
	r.load(2, other)
	if math.IsInf(float64(*lse), 0) {
		r.store(other)
		*lse = otherLSE
		return
	}
	x, y, sum := vec.MergeLSE(*lse, otherLSE)
	r.load(0, o)
	for c := range o {
		o[c] = float32(x*o[c]) + float32(y*other[c]) + 0 // no zero is negative
	}
	r.store(o)
	*lse = sum
}
