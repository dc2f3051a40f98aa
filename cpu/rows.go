package cpu

import (
	"context"
	"fmt"
	"sync"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/pool"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

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
		return be.copy(ctx, operand{name: "host", t: host}, operand{name: "src", t: src})
	})
}

// copyRow copies row s of from, which has the same type and shape, to v.
func (v *view) copyRow(from *view, b, h, s int) {
	i, j := v.index(b, h, s), from.index(b, h, s)
	n, di, dj := v.shape[backend.Dim], v.stride[backend.Dim], from.stride[backend.Dim]
	switch v.dtype {
	case backend.Q8:
		copy(v.q8[i:i+q8Lead+n], from.q8[j:])
	case backend.F32:
		copyElements(v.f32[i:], di, from.f32[j:], dj, n)
	case backend.Bool:
		copyElements(v.bools[i:], di, from.bools[j:], dj, n)
	default:
		copyElements(v.bits[i:], di, from.bits[j:], dj, n)
	}
}

// copyElements copies n elements that lie dj apart to where they lie di apart.
func copyElements[T any](dst []T, di int, src []T, dj, n int) {
	if di == 1 && dj == 1 {
		copy(dst[:n], src)
		return
	}
	for c := range n {
		dst[c*di] = src[c*dj]
	}
}

// Copy implements backend.Copier. Errors as for Attention.
func (be *Backend) Copy(ctx context.Context, dst, src []backend.Tensor) error {
	return be.do(ctx, "copy", func() error {
		for i := range dst {
			if err := be.copy(ctx, operand{name: "dst", t: dst[i]}, operand{name: "src", t: src[i]}); err != nil {
				return err
			}
		}
		return nil
	})
}

// copy writes dst = src, rounded to nearest even where dst's type is the narrower one.
func (be *Backend) copy(ctx context.Context, dst, src operand) error {
	j := copyJobs.Get().(*copyJob)
	defer func() {
		*j = copyJob{} // keeps no memory alive
		copyJobs.Put(j)
	}()
	dst.to, src.to = &j.dst, &j.src
	pinned, err := openOperands([]operand{dst}, []operand{src})
	if err != nil {
		return err
	}
	defer pinned.Unpin()
	shape, threads := dst.t.Shape(), be.threads()
	if shape.Elements() == 0 {
		return nil
	}
	if shape.Elements() < copyAlone {
		threads = 1
	}
	j.kernels, j.cols, j.rowPartition = be.kernels, shape[backend.Dim], newRowPartition(shape, threads)
	return be.run(ctx, j, j.tasks, threads)
}

// copyAlone is the number of elements that one goroutine copies in about the time that
// another one takes to wake up.
const copyAlone = 1 << 14

// copyJobs pools the jobs of calls: appending a token to a cache does not allocate.
var copyJobs = sync.Pool{New: func() any { return new(copyJob) }}

// copyJob is one Copy call.
type copyJob struct {
	rowPartition
	kernels  *vec.Kernels
	dst, src view
	cols     int
}

func (j *copyJob) size() (floats, rows int) {
	return roundUp(j.cols, j.kernels.Lanes), 0
}

func (j *copyJob) task(turn *pool.Turn, w *scratch, t int) error {
	b, h, from, to := j.at(t)
	padded, _ := j.size()
	row := w.floats(padded)
	for i := from; i < to; i++ {
		if i%rowStep == rowStep-1 {
			if err := turn.Pause(); err != nil {
				return err
			}
		}
		switch {
		case j.dst.dtype == j.src.dtype:
			j.dst.copyRow(&j.src, b, h, i)
		case j.dst.dtype == backend.Q8:
			j.src.pack(row, padded, b, h, i, 1, 0, j.cols)
			j.dst.store(row[:j.cols], b, h, i, 0)
		default:
			loadRows(j.kernels, &j.src, row, padded, b, h, i, 1)
			storeRow(j.kernels, &j.dst, row, b, h, i)
		}
	}
	return nil
}

// Rotate implements backend.Rotator, in float32 whatever the types of y and x are:
//
//	y_a = x_a·cos_i - x_b·sin_i    y_b = x_a·sin_i + x_b·cos_i
//
// Errors as for Attention.
func (be *Backend) Rotate(ctx context.Context, y, x, cos, sin backend.Tensor, how backend.Rotation) error {
	return be.do(ctx, "rotate", func() error {
		j := rotateJobs.Get().(*rotateJob)
		defer func() {
			*j = rotateJob{} // keeps no memory alive
			rotateJobs.Put(j)
		}()
		j.dim, j.pairs, j.how, j.inPlace = x.Shape()[backend.Dim], cos.Shape()[backend.Dim], how, y == x
		out := []operand{{"y", y, &j.y}}
		in := []operand{{"cos", cos, &j.cos}, {"sin", sin, &j.sin}, {"x", x, &j.x}}
		if j.inPlace {
			in = in[:2]
		}
		pinned, err := openOperands(out, in)
		if err != nil {
			return err
		}
		defer pinned.Unpin()
		if j.inPlace {
			j.x = j.y
		}
		threads := be.threads()
		if y.Shape().Elements() < copyAlone {
			threads = 1
		}
		j.rowPartition = newRowPartition(y.Shape(), threads)
		return be.run(ctx, j, j.tasks, threads)
	})
}

// rotateJobs pools the jobs of calls, as copyJobs does.
var rotateJobs = sync.Pool{New: func() any { return new(rotateJob) }}

// rotateJob is one Rotate call.
type rotateJob struct {
	rowPartition
	y, x, cos, sin view
	dim, pairs     int
	how            backend.Rotation
	inPlace        bool
}

func (j *rotateJob) size() (floats, rows int) { return j.dim + 2*j.pairs, 0 }

func (j *rotateJob) task(_ *pool.Turn, w *scratch, t int) error {
	b, h, from, to := j.at(t)
	row, cos, sin := w.floats(j.dim), w.floats(j.pairs), w.floats(j.pairs)
	n := j.dim
	if j.inPlace {
		n = 2 * j.pairs // the rest does not change
	}
	for i := from; i < to; i++ {
		j.x.pack(row, j.dim, b, h, i, 1, 0, n)
		j.cos.pack(cos, j.pairs, b, h, i, 1, 0, j.pairs)
		j.sin.pack(sin, j.pairs, b, h, i, 1, 0, j.pairs)
		if j.how.Inverse {
			for i := range sin {
				sin[i] = -sin[i]
			}
		}
		if j.how.Interleaved {
			rotateInterleaved(row[:2*j.pairs], cos, sin)
		} else {
			rotateHalves(row[:j.pairs], row[j.pairs:2*j.pairs], cos, sin)
		}
		j.y.store(row[:n], b, h, i, 0)
	}
	return nil
}

// rotateHalves rotates the pairs (lo[i], hi[i]). The conversions keep the compiler
// from fusing products and sums, so every machine computes the same bits.
func rotateHalves(lo, hi, cos, sin []float32) {
	hi, cos, sin = hi[:len(lo)], cos[:len(lo)], sin[:len(lo)]
	for i, a := range lo {
		b, c, s := hi[i], cos[i], sin[i]
		lo[i] = float32(a*c) - float32(b*s)
		hi[i] = float32(a*s) + float32(b*c)
	}
}

// rotateInterleaved rotates the pairs (row[2i], row[2i+1]).
func rotateInterleaved(row, cos, sin []float32) {
	sin = sin[:len(cos)]
	for i, c := range cos {
		a, b, s := row[2*i], row[2*i+1], sin[i]
		row[2*i] = float32(a*c) - float32(b*s)
		row[2*i+1] = float32(a*s) + float32(b*c)
	}
}

// Merge implements backend.Merger:
//
//	m = max(lse, plse)    a = exp(lse-m)    b = exp(plse-m)
//	o = (a·o + b·po)/(a+b)    lse = m + log(a+b)
//
// in place of o and lse, with weights in float64. When the lse of one side is -Inf,
// the result has the bits of the other side. Errors as for Attention.
func (be *Backend) Merge(ctx context.Context, o, lse, po, plse backend.Tensor) error {
	return be.do(ctx, "merge", func() error {
		j := mergeJob{dim: o.Shape()[backend.Dim], rowPartition: newRowPartition(o.Shape(), be.threads())}
		pinned, err := openOperands(
			[]operand{{"o", o, &j.o}, {"lse", lse, &j.lse}},
			[]operand{{"the part's o", po, &j.po}, {"the part's lse", plse, &j.plse}})
		if err != nil {
			return err
		}
		defer pinned.Unpin()
		return be.run(ctx, &j, j.tasks, be.threads())
	})
}

// mergeJob is one Merge call.
type mergeJob struct {
	rowPartition
	o, lse, po, plse view
	dim              int
}

func (j *mergeJob) size() (floats, rows int) { return 2 * j.dim, 0 }

func (j *mergeJob) task(_ *pool.Turn, w *scratch, t int) error {
	b, h, from, to := j.at(t)
	o, po := w.floats(j.dim), w.floats(j.dim)
	for i := from; i < to; i++ {
		at := j.lse.index(b, h, i)
		lse, plse := j.lse.f32[at], j.plse.at(b, h, i, 0)
		if plse == negInf {
			continue
		}
		j.po.pack(po, j.dim, b, h, i, 1, 0, j.dim)
		if lse == negInf {
			j.o.store(po, b, h, i, 0)
			j.lse.f32[at] = plse
			continue
		}
		x, y, sum := mergeLSE(lse, plse)
		j.o.pack(o, j.dim, b, h, i, 1, 0, j.dim)
		for c := range o {
			o[c] = float32(x*o[c]) + float32(y*po[c]) + 0 // no zero is negative
		}
		j.o.store(o, b, h, i, 0)
		j.lse.f32[at] = sum
	}
	return nil
}
