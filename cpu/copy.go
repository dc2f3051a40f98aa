package cpu

import (
	"context"
	"fmt"
	"sync"

	"github.com/seed90331342/attn/backend"
)

var _ backend.Copier = (*Backend)(nil)

// Copy implements backend.Copier: dst = src, rounded to nearest even where dst's
// type is the narrower one. Errors as for Attention, and ErrShape and ErrDType where
// shapes differ or one is Bool.
func (be *Backend) Copy(ctx context.Context, dst, src backend.Tensor) error {
	if err := be.gate.enter(ctx, "copy"); err != nil {
		return err
	}
	defer be.gate.leave()
	if err := be.copy(ctx, dst, src); err != nil {
		return fmt.Errorf("cpu: copy: %w", err)
	}
	return nil
}

func (be *Backend) copy(ctx context.Context, dst, src backend.Tensor) error {
	if dst.Shape() != src.Shape() {
		return fmt.Errorf("dst has shape %v, src %v, they must be equal: %w", dst.Shape(), src.Shape(), backend.ErrShape)
	}
	var pinned backend.Pinned
	if err := pinned.Pin(nil, where, []backend.Operand{{Name: "dst", Tensor: dst}}, []backend.Operand{{Name: "src", Tensor: src}}); err != nil {
		return err
	}
	defer pinned.Unpin()
	if dst.Shape().Elements() == 0 {
		return nil
	}
	j := copyJobs.Get().(*copyJob)
	*j = copyJob{be: be, cols: dst.Shape()[backend.Dim]}
	defer func() {
		*j = copyJob{} // keeps no memory alive
		copyJobs.Put(j)
	}()
	var err error
	if j.dst, err = numberView("dst", dst); err != nil {
		return err
	}
	if j.src, err = numberView("src", src); err != nil {
		return err
	}
	threads := be.threads()
	if dst.Shape().Elements() < copyAlone {
		threads = 1
	}
	j.rowCut = cutRows(dst.Shape(), 1, keyBlock, threads)
	return be.workers.run(ctx, j, j.tasks, threads)
}

// copyAlone is how many elements a goroutine copies in about the time that another
// takes to wake up.
const copyAlone = 1 << 14

// copyJobs keeps the jobs of earlier calls, so that appending a token to a cache does not
// allocate.
var copyJobs = sync.Pool{New: func() any { return new(copyJob) }}

// copyJob is one Copy call.
type copyJob struct {
	rowCut
	be       *Backend
	dst, src view
	cols     int
}

// lanes returns the multiple that rows are padded to for the kernels.
func (j *copyJob) lanes() int {
	if j.be.kernels == nil {
		return 1
	}
	return j.be.kernels.Lanes
}

// size implements job.
func (j *copyJob) size() (floats, rows int) { return ceilDiv(j.cols, j.lanes()) * j.lanes(), 0 }

// task implements job: a stretch of rows of one head.
func (j *copyJob) task(ctx context.Context, w *scratch, t int) error {
	b, h, from, to, _ := j.at(t)
	padded, _ := j.size()
	row := w.floats(padded)
	for i := from; i < to; i++ {
		if i%queryBlock == 0 && ctx.Err() != nil {
			return ctx.Err()
		}
		if j.asItLies(b, h, i) {
			continue
		}
		if x := j.be.kernels; x != nil && j.dst.dtype != backend.Q8 {
			loadRows(x, &j.src, row, padded, b, h, i, 1)
			storeRow(x, &j.dst, row, b, h, i)
			continue
		}
		j.src.pack(row, padded, b, h, i, 1, 0, j.cols)
		j.dst.store(row[:j.cols], b, h, i, 0)
	}
	return nil
}

// asItLies copies row i of a head where both types are the same, and says whether
// they are.
func (j *copyJob) asItLies(b, h, i int) bool {
	if j.dst.dtype != j.src.dtype {
		return false
	}
	to, from := j.dst.index(b, h, i), j.src.index(b, h, i)
	dd, ds := j.dst.stride[backend.Dim], j.src.stride[backend.Dim]
	switch j.dst.dtype {
	case backend.F32:
		copyRow(j.dst.f32[to:], dd, j.src.f32[from:], ds, j.cols)
	case backend.Q8:
		copy(j.dst.q8[to:to+q8Lead+j.cols], j.src.q8[from:])
	default:
		copyRow(j.dst.bits[to:], dd, j.src.bits[from:], ds, j.cols)
	}
	return true
}
