package cpu

import (
	"context"
	"fmt"

	"github.com/seed90331342/attn/backend"
)

// PV implements backend.Backend: o = w·v, in float32, on the vector kernels or by
// blas32.Gemm, summed from zero over each 128 keys. A weight of exactly 0 hides NaN and Inf in its value. Errors as for
// Attention.
func (be *Backend) PV(ctx context.Context, o, w, v backend.Tensor) error {
	if err := be.gate.enter(ctx, "pv"); err != nil {
		return err
	}
	defer be.gate.leave()
	if be.stageTakes(v.Shape()[backend.Dim]) {
		if err := be.vectorPV(ctx, o, w, v); err != nil {
			return fmt.Errorf("cpu: pv: %w", err)
		}
		return nil
	}
	j := linearJob{zeroHides: true, share: w.Shape()[backend.Heads] / v.Shape()[backend.Heads]}
	if err := be.linear(ctx, &j, [4]string{"o", "w", "v", ""}, o, w, v, backend.Tensor{}); err != nil {
		return fmt.Errorf("cpu: pv: %w", err)
	}
	return nil
}

// Project implements backend.Projector: y = x·w + bias, in float32 whatever the
// operands' types are, on the vector kernels or by blas32.Gemm, summed from zero over
// each 128 elements. Errors as for Attention.
func (be *Backend) Project(ctx context.Context, y, x, w, bias backend.Tensor) error {
	if err := be.gate.enter(ctx, "project"); err != nil {
		return err
	}
	defer be.gate.leave()
	if be.kernels != nil {
		if err := be.vectorProject(ctx, y, x, w, bias); err != nil {
			return fmt.Errorf("cpu: project: %w", err)
		}
		return nil
	}
	j := linearJob{share: 1}
	if err := be.linear(ctx, &j, [4]string{"y", "x", "w", "bias"}, y, x, w, bias); err != nil {
		return fmt.Errorf("cpu: project: %w", err)
	}
	return nil
}

func (be *Backend) linear(ctx context.Context, j *linearJob, names [4]string, y, x, w, bias backend.Tensor) error {
	var pinned backend.Pinned
	err := pinned.Pin(nil, where, []backend.Operand{{Name: names[0], Tensor: y}},
		[]backend.Operand{{Name: names[1], Tensor: x}, {Name: names[2], Tensor: w}, {Name: names[3], Tensor: bias}})
	if err != nil {
		return err
	}
	defer pinned.Unpin()
	for n, o := range [...]struct {
		to *view
		t  backend.Tensor
	}{{&j.y, y}, {&j.x, x}, {&j.w, w}, {&j.bias, bias}} {
		if *o.to, err = floatView(names[n], o.t); err != nil {
			return err
		}
	}
	j.inner, j.cols, j.xInPlace = x.Shape()[backend.Dim], y.Shape()[backend.Dim], rowsInPlace(x)
	j.wide = min(j.cols, colBlock)
	j.rowCut = cutRows(y.Shape(), ceilDiv(j.cols, colBlock), j.wide, be.threads())
	return be.workers.run(ctx, j, j.tasks, be.threads())
}

// linearJob is one product with a right operand that is transposed block by
// block:
//
//	y [B, H, S, N] = x [B, H, S, M] · w [B, H/share, M, N] + bias [1, 1, 1, N]
//
// Sums over M go by blocks of keyBlock from 0 on, each from zero.
type linearJob struct {
	rowCut
	y, x, w, bias view
	share         int  // heads of x for each head of w
	zeroHides     bool // a zero in x hides NaN and Inf in w
	xInPlace      bool
	inner         int // M
	cols          int // N
	wide          int // columns of a full piece
}

// size implements job.
func (j *linearJob) size() (floats, rows int) {
	return j.wide*keyBlock + queryBlock*keyBlock + 4*j.wide + queryBlock*j.wide + j.taskRows()*j.wide, 0
}

// task implements job: a stretch of rows of one head, and at most colBlock
// columns.
func (j *linearJob) task(ctx context.Context, s *scratch, t int) error {
	b, h, from, to, piece := j.at(t)
	hw, c0 := h/j.share, piece*colBlock
	cols := min(colBlock, j.cols-c0)
	wt, xbuf := s.floats(j.wide*keyBlock), s.floats(queryBlock*keyBlock)
	tmp, acc := s.floats(4*j.wide), s.floats(queryBlock*j.wide)
	y := s.floats(j.taskRows() * j.wide)
	clear(y)
	for k0 := 0; k0 < j.inner; k0 += keyBlock {
		if err := ctx.Err(); err != nil {
			return err
		}
		n := min(keyBlock, j.inner-k0)
		_, depth := sumSpan(0, n)
		if n < keyBlock {
			clear(wt)
		}
		careful := !j.w.packT(wt, keyBlock, b, hw, k0, n, c0, cols, tmp) && j.zeroHides
		if careful {
			dropNonFinite(wt)
		}
		for i := from; i < to; i += queryBlock {
			m := min(queryBlock, to-i)
			x, ldx := j.left(xbuf, b, h, i, m, k0, n)
			if j.zeroHides && allZero(x, ldx, m, n) {
				continue
			}
			mulNT(m, cols, depth, x, ldx, wt, keyBlock, acc, cols)
			if careful {
				j.addNonFinite(acc, x, ldx, b, hw, m, k0, n, c0, cols)
			}
			add(y[(i-from)*cols:(i-from+m)*cols], acc)
		}
	}
	for i := from; i < to; i++ {
		row := y[(i-from)*cols : (i-from+1)*cols]
		if !j.bias.isZero() {
			j.bias.pack(tmp, cols, 0, 0, 0, 1, c0, cols)
			add(row, tmp)
		}
		j.y.store(row, b, h, i, c0)
	}
	return nil
}

// left returns rows [i, i+m) of x from element k0 on, as rows ldx apart with
// keyBlock elements: as they lie where a whole block is there, else packed and
// padded with zeros.
func (j *linearJob) left(buf []float32, b, h, i, m, k0, n int) (x []float32, ldx int) {
	if j.xInPlace && n == keyBlock {
		x, ldx = j.x.rowsAt(b, h, i)
		return x[k0:], ldx
	}
	j.x.pack(buf, keyBlock, b, h, i, m, k0, n)
	for r := range m {
		clear(buf[r*keyBlock+n : (r+1)*keyBlock])
	}
	return buf, keyBlock
}

// allZero reports whether the first n elements of each of m rows are zeros.
func allZero(x []float32, ld, m, n int) bool {
	for r := range m {
		for _, p := range x[r*ld : r*ld+n] {
			if p != 0 {
				return false
			}
		}
	}
	return true
}

// addNonFinite adds the terms of NaN and Inf in w, which wt has as zeros, where
// x is not zero.
func (j *linearJob) addNonFinite(acc, x []float32, ldx, b, hw, m, k0, n, c0, cols int) {
	for k := range n {
		for c := range cols {
			w := j.w.at(b, hw, k0+k, c0+c)
			if finite(w) {
				continue
			}
			for r := range m {
				if p := x[r*ldx+k]; p != 0 {
					acc[r*cols+c] += p * w
				}
			}
		}
	}
}
