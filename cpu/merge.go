package cpu

import (
	"context"
	"fmt"
	"math"

	"github.com/seed90331342/attn/backend"
)

// Merge implements backend.Merger:
//
//	m = max(lse, plse)    a = exp(lse-m)    b = exp(plse-m)
//	o = (a·o + b·po)/(a+b)    lse = m + log(a+b)
//
// in place of o and lse, weights in float64. A side whose lse is -Inf leaves the
// other's bits as they are. Errors as for Attention.
func (be *Backend) Merge(ctx context.Context, o, lse, po, plse backend.Tensor) error {
	if err := be.gate.enter(ctx, "merge"); err != nil {
		return err
	}
	defer be.gate.leave()
	if err := be.merge(ctx, o, lse, po, plse); err != nil {
		return fmt.Errorf("cpu: merge: %w", err)
	}
	return nil
}

func (be *Backend) merge(ctx context.Context, o, lse, po, plse backend.Tensor) error {
	var pinned backend.Pinned
	err := pinned.Pin(nil, where, []backend.Operand{{Name: "o", Tensor: o}, {Name: "lse", Tensor: lse}},
		[]backend.Operand{{Name: "the part's o", Tensor: po}, {Name: "the part's lse", Tensor: plse}})
	if err != nil {
		return err
	}
	defer pinned.Unpin()
	j := mergeJob{dim: o.Shape()[backend.Dim], rowCut: cutRows(o.Shape(), 1, keyBlock, be.threads())}
	for _, x := range [...]struct {
		to   *view
		name string
		t    backend.Tensor
	}{{&j.o, "o", o}, {&j.lse, "lse", lse}, {&j.po, "the part's o", po}, {&j.plse, "the part's lse", plse}} {
		if *x.to, err = f32View(x.name, x.t); err != nil {
			return err
		}
	}
	return be.workers.run(ctx, &j, j.tasks, be.threads())
}

// mergeJob is one Merge call.
type mergeJob struct {
	rowCut
	o, lse, po, plse view
	dim              int
}

// size implements job.
func (j *mergeJob) size() (floats, rows int) { return 2 * j.dim, 0 }

// task implements job: a stretch of rows of one head.
func (j *mergeJob) task(ctx context.Context, w *scratch, t int) error {
	b, h, from, to, _ := j.at(t)
	o, po := w.floats(j.dim), w.floats(j.dim)
	for i := from; i < to; i++ {
		at := j.lse.index(b, h, i)
		mine, part := j.lse.f32[at], j.plse.at(b, h, i, 0)
		if part == negInf {
			continue
		}
		j.po.pack(po, j.dim, b, h, i, 1, 0, j.dim)
		if mine == negInf {
			j.o.store(po, b, h, i, 0)
			j.lse.f32[at] = part
			continue
		}
		m := float64(max(mine, part)) // NaN when either is
		x, y := math.Exp(float64(mine)-m), math.Exp(float64(part)-m)
		sum := x + y
		j.o.pack(o, j.dim, b, h, i, 1, 0, j.dim)
		wx, wy := float32(x/sum), float32(y/sum)
		for c := range o {
			o[c] = wx*o[c] + wy*po[c]
		}
		j.o.store(o, b, h, i, 0)
		j.lse.f32[at] = float32(m + math.Log(sum))
	}
	return nil
}
