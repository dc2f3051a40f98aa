package cpu

import (
	"context"
	"fmt"

	"github.com/seed90331342/attn/backend"
)

var _ backend.Rotator = (*Backend)(nil)

// Rotate implements backend.Rotator, in float32 whatever y's and x's types are:
//
//	y_a = x_a·cos_i - x_b·sin_i    y_b = x_a·sin_i + x_b·cos_i
//
// Errors as for Attention.
func (be *Backend) Rotate(ctx context.Context, y, x, cos, sin backend.Tensor, interleaved bool) error {
	if err := be.gate.enter(ctx, "rotate"); err != nil {
		return err
	}
	defer be.gate.leave()
	if err := be.rotate(ctx, y, x, cos, sin, interleaved); err != nil {
		return fmt.Errorf("cpu: rotate: %w", err)
	}
	return nil
}

func (be *Backend) rotate(ctx context.Context, y, x, cos, sin backend.Tensor, interleaved bool) error {
	in := []backend.Operand{{Name: "cos", Tensor: cos}, {Name: "sin", Tensor: sin}, {Name: "x", Tensor: x}}
	if y == x {
		in = in[:2]
	}
	var pinned backend.Pinned
	if err := pinned.Pin(nil, where, []backend.Operand{{Name: "y", Tensor: y}}, in); err != nil {
		return err
	}
	defer pinned.Unpin()
	j := rotateJob{dim: x.Shape()[backend.Dim], pairs: cos.Shape()[backend.Dim], interleaved: interleaved, inPlace: y == x}
	var err error
	if j.y, err = floatView("y", y); err != nil {
		return err
	}
	if j.x, err = floatView("x", x); err != nil {
		return err
	}
	if j.cos, err = f32View("cos", cos); err != nil {
		return err
	}
	if j.sin, err = f32View("sin", sin); err != nil {
		return err
	}
	j.rowCut = cutRows(y.Shape(), 1, keyBlock, be.threads())
	return be.workers.run(ctx, &j, j.tasks, be.threads())
}

// rotateJob is one Rotate call.
type rotateJob struct {
	rowCut
	y, x, cos, sin view
	dim, pairs     int
	interleaved    bool
	inPlace        bool
}

// size implements job.
func (j *rotateJob) size() (floats, rows int) { return j.dim + 2*j.pairs, 0 }

// task implements job: a stretch of rows of one head.
func (j *rotateJob) task(_ context.Context, w *scratch, t int) error {
	b, h, from, to, _ := j.at(t)
	row, cos, sin := w.floats(j.dim), w.floats(j.pairs), w.floats(j.pairs)
	n := j.dim
	if j.inPlace {
		n = 2 * j.pairs // the rest stays where it is
	}
	for i := from; i < to; i++ {
		j.x.pack(row, j.dim, b, h, i, 1, 0, n)
		j.cos.pack(cos, j.pairs, b, h, i, 1, 0, j.pairs)
		j.sin.pack(sin, j.pairs, b, h, i, 1, 0, j.pairs)
		if j.interleaved {
			turnNeighbours(row[:2*j.pairs], cos, sin)
		} else {
			turnHalves(row[:j.pairs], row[j.pairs:2*j.pairs], cos, sin)
		}
		j.y.store(row[:n], b, h, i, 0)
	}
	return nil
}

// turnHalves turns the pairs (lo[i], hi[i]). The conversions keep a compiler from
// fusing products and sums, so that every machine gives the same bits.
func turnHalves(lo, hi, cos, sin []float32) {
	hi, cos, sin = hi[:len(lo)], cos[:len(lo)], sin[:len(lo)]
	for i, a := range lo {
		b, c, s := hi[i], cos[i], sin[i]
		lo[i] = float32(a*c) - float32(b*s)
		hi[i] = float32(a*s) + float32(b*c)
	}
}

// turnNeighbours turns the pairs (row[2i], row[2i+1]).
func turnNeighbours(row, cos, sin []float32) {
	sin = sin[:len(cos)]
	for i, c := range cos {
		a, b, s := row[2*i], row[2*i+1], sin[i]
		row[2*i] = float32(a*c) - float32(b*s)
		row[2*i+1] = float32(a*s) + float32(b*c)
	}
}
