package cpu

import (
	"context"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/pool"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// QK implements backend.Backend: s = q·kᵀ. Errors as for Attention.
func (be *Backend) QK(ctx context.Context, s, q, k backend.Tensor) error {
	return be.do(ctx, "qk", func() error {
		j := qkJob{}
		pinned, err := openOperands(
			[]operand{{"s", s, &j.s}},
			[]operand{{"q", q, &j.q}, {"k", k, &j.k}})
		if err != nil {
			return err
		}
		defer pinned.Unpin()
		j.partition = newPartition(be.kernels, &backend.Call{Q: q, K: k, V: k}, be.threads())
		j.cutKeys(1) // each chunk of keys is a task: nothing is summed over keys
		j.scale = 1
		return be.run(ctx, &j, j.tasks, be.threads())
	})
}

// qkJob is one QK call.
type qkJob struct {
	engine
	s view
}

func (j *qkJob) size() (floats, rows int) {
	return j.workspaceFloats() + j.taskTiles*j.queryFloats(), 0
}

func (j *qkJob) task(turn *pool.Turn, w *scratch, n int) error {
	p, b := j.at(n), j.cutWorkspace(w)
	tiles := j.cutTiles(w, &p)
	for n := range tiles {
		j.packQueries(w, &p, &tiles[n])
		tiles[n].keys = span{0, j.d.SeqK}
	}
	clear(b.bias)
	for j0 := p.keys.lo; j0 < p.keys.hi; j0 += keyBlock {
		if err := turn.Pause(); err != nil {
			return err
		}
		r := keyRange{span: span{j0, min(j0+keyBlock, p.keys.hi)}, end: p.keys.hi}
		n := r.hi - r.lo
		for i := range tiles {
			t := &tiles[i]
			if !j.keyLanes {
				fill(b.mx, 0)
				runs, ldk := j.keys(&r, b, &p, r.lo, n)
				j.kernels.Scores(b.s, runs, ldk, t.q, j.d.Dim, b.mx)
				j.writeTransposed(b, &j.s, &p, t, r.lo, n)
				continue
			}
			j.scoreKeyLanes(b, &p, t, &r, r.span)
			for row := range t.n {
				h, i := j.row(t.h, t.i, row)
				s := b.s[row*keyBlock : row*keyBlock+roundUp(n, j.kernels.Lanes)]
				j.kernels.Bias(s, b.bias) // adding 0 turns -0 into 0, as in Kernels.Transpose
				j.s.store(s[:n], p.b, h, i, r.lo)
			}
		}
	}
	return nil
}

// PV implements backend.Backend: o = w·v, in float32, summed from zero over each
// 128 keys. A weight of exactly 0 hides NaN and Inf in its value. Errors as for
// Attention.
func (be *Backend) PV(ctx context.Context, o, w, v backend.Tensor) error {
	return be.do(ctx, "pv", func() error {
		j := pvJob{zeroHides: true}
		pinned, err := openOperands(
			[]operand{{"o", o, &j.o}},
			[]operand{{"w", w, &j.w}, {"v", v, &j.v}})
		if err != nil {
			return err
		}
		defer pinned.Unpin()
		return j.run(ctx, be, o, v)
	})
}

// pvJob is one PV call, or some columns of a Project call.
type pvJob struct {
	engine
	w         view
	zeroHides bool
	bias      view // [1, 1, 1, N] where the sums begin, from column c0 on; may be zero
	c0        int
}

// run computes the call, whose shape is that of o and v.
func (j *pvJob) run(ctx context.Context, be *Backend, o, v backend.Tensor) error {
	j.partition = newPartition(be.kernels, &backend.Call{Q: o, K: v, V: v}, be.threads())
	j.cutKeys(j.chunks) // otherwise the parts' sums would have to be added
	// The rows of a weight matrix lie so far apart that those of a block share few
	// sets of the caches: several tiles read a copy.
	j.loadV = j.loadV || !j.zeroHides && j.tiles > 1
	return be.run(ctx, j, j.tasks, be.threads())
}

func (j *pvJob) size() (floats, rows int) {
	return j.workspaceFloats() + j.taskTiles*j.outputFloats(), 0
}

// begin sets the outputs of t to the bias, or to 0.
func (j *pvJob) begin(p *taskRange, t *tile) {
	o, rows := t.cur.o, j.kernels.Width
	rowStep, dimStep := 1, rows
	if j.rowOutputs {
		rows, rowStep, dimStep = t.n, j.dimV, 1
	}
	clear(o)
	if j.bias.isZero() {
		return
	}
	for c := range j.d.ValueDim {
		x := j.bias.at(0, 0, 0, j.c0+p.hk*j.d.ValueDim+c)
		for r := range rows {
			o[r*rowStep+c*dimStep] = x + 0 // no zero is negative, and then none of the sums is
		}
	}
}

func (j *pvJob) task(turn *pool.Turn, w *scratch, n int) error {
	p, b, x := j.at(n), j.cutWorkspace(w), j.kernels
	fill(b.alpha, 1)
	tiles := j.cutTiles(w, &p)
	for n := range tiles {
		tiles[n].cur.o = w.floats(j.outputFloats())
		j.begin(&p, &tiles[n])
	}
	for j0 := 0; j0 < j.d.SeqK; j0 += keyBlock {
		if err := turn.Pause(); err != nil {
			return err
		}
		r := keyRange{span: span{j0, min(j0+keyBlock, j.d.SeqK)}, end: j.d.SeqK}
		n := r.hi - r.lo
		for i := range tiles {
			t := &tiles[i]
			runs, ldv, replaced := j.values(&r, b, &p, []span{r.span}, j.zeroHides || x.KeyLanes)
			if j.keyLanes {
				j.rowsOf(t, 0, t.n, func(row, h, i, rows int) {
					j.w.pack(b.s[row*keyBlock:], keyBlock, p.b, h, i, rows, r.lo, n)
				})
				x.Mix(vec.F32, t.cur.o, j.dimV, runs, ldv, b.s, keyBlock, b.alpha, t.n, j.dimV)
			} else {
				j.packTransposed(b, b.s, &j.w, &p, t, r.lo, n)
				x.Values(t.cur.o, runs, ldv, b.s, j.d.ValueDim, b.alpha)
			}
			if replaced {
				j.addNonFinite(&p, t, r.lo, r.hi, t.cur.o, b.s, func(_, _, _, _ int, weight float32) bool {
					return weight != 0 || !j.zeroHides
				})
			}
		}
	}
	factors := b.alpha
	if j.rowOutputs {
		factors = nil
	}
	for n := range tiles {
		j.writeOutputs(b, &p, &tiles[n], tiles[n].cur.o, factors)
	}
	return nil
}

// Project implements backend.Projector: y = x·w + bias, in float32 whatever the
// operands' types are, summed over each 128 elements from zero. Errors as for
// Attention.
//
// It is PV with columns as heads, but a zero in x hides nothing, and sums begin at
// the bias.
func (be *Backend) Project(ctx context.Context, y, x, w, bias backend.Tensor) error {
	return be.do(ctx, "project", func() error {
		var yView, xView, wView, biasView view
		pinned, err := openOperands(
			[]operand{{"y", y, &yView}},
			[]operand{{"x", x, &xView}, {"w", w, &wView}, {"bias", bias, &biasView}})
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
			if err := be.projectHead(ctx, part[0], part[1], part[2], biasView); err != nil {
				return err
			}
		}
		return nil
	})
}

// projectCols is the number of columns of w that form a head. With 128 of them
// a block of w and six tiles of rows share half of a core's second-level cache, and
// each number that is transposed on its way in is used 128 times.
const projectCols = 128

// projectHead is Project for one head.
func (be *Backend) projectHead(ctx context.Context, y, x, w backend.Tensor, bias view) (err error) {
	if y, x, w, err = joinBatches(y, x, w); err != nil {
		return err
	}
	cols := y.Shape()[backend.Dim]
	whole := cols / projectCols * projectCols
	if whole > 0 {
		err = be.projectColumns(ctx, y, x, w, bias, 0, whole/projectCols, projectCols)
	}
	if err == nil && whole < cols {
		err = be.projectColumns(ctx, y, x, w, bias, whole, 1, cols-whole)
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

// projectColumns computes columns [c0, c0+n·cols), with cols of them as a head.
func (be *Backend) projectColumns(ctx context.Context, y, x, w backend.Tensor, bias view, c0, n, cols int) error {
	j := pvJob{bias: bias, c0: c0}
	heads := func(name string, t *backend.Tensor, to *view) error {
		shape, st := t.Shape(), t.Strides()
		at := c0 * st[backend.Dim]
		st[backend.Heads] = cols * st[backend.Dim]
		var err error
		if *t, err = t.View(backend.Shape{shape[backend.Batch], n, shape[backend.Seq], cols}, st, at); err != nil {
			return err
		}
		*to, err = openView(name, *t)
		return err
	}
	if err := heads("y", &y, &j.o); err != nil {
		return err
	}
	if err := heads("w", &w, &j.v); err != nil {
		return err
	}
	shape := x.Shape()
	shape[backend.Heads] = n
	x, err := x.Broadcast(shape)
	if err != nil {
		return err
	}
	if j.w, err = openView("x", x); err != nil {
		return err
	}
	return j.run(ctx, be, y, w)
}
