package cpu

import (
	"math"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/pool"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// Small problems are groups of few query rows and few keys, for which the tiles, states
// and tasks of the engine cost more than the arithmetic. The functions in this file call
// the same kernels on the same numbers in the same order, without tiles and states, and
// for several groups in one task.

const (
	// smallTaskWork is the work of a task of small problems, in multiply-adds: 10 to 50
	// microseconds.
	smallTaskWork = 1 << 16
	// smallGroupWork is what a small problem costs in addition to its multiply-adds, and
	// smallRowWork what a row costs.
	smallGroupWork, smallRowWork = 64, 64
)

// gatherSmall makes tasks of several groups if the groups of c are small problems.
func (a *attention) gatherSmall(c *backend.Call) {
	p, d := &c.Problem, &a.d
	plain := p.Mask.IsZero() && p.Blocks.IsZero() && p.Bias.IsZero() && p.Relative.IsZero() &&
		p.Slopes == nil && p.Softcap == 0 && p.Dropout.P == 0
	if c.Pages != nil && c.K.Shape()[backend.Seq]%a.kernels.Lanes != 0 { // groups of keys lie in one page
		return
	}
	if !plain || !a.keyLanes || a.kernels.KeyLanes || a.tiles > 1 || d.SeqK > keyBlock {
		return
	}
	for _, t := range [4]*backend.Tensor{&c.Q, &c.K, &c.V, &c.O} {
		if !rowsInPlace(t) {
			return
		}
	}
	groups := d.Batch * d.KVHeads
	most := smallTaskWork / (smallGroupWork + a.rows*(smallRowWork+d.SeqK*(d.Dim+d.ValueDim)))
	a.taskGroups = max(1, min(most, groups/max(1, decodeTasks*a.threads)))
	a.tasks = ceilDiv(groups, a.taskGroups)
	a.threads = max(1, min(a.threads, a.tasks))
}

// smallSpace is the memory of a task of small problems.
type smallSpace struct {
	q      []float32 // [rows, dimK], times scale; the padding is 0
	k, v   []float32 // rows that the kernels cannot read in place
	s      []float32 // [rows, ld]
	ld     int
	o      []float32 // [rows, dimV]
	m, l   []float32 // of a row, as in state
	alpha  []float32 // factors of sums over no keys
	lanes  []float32
	memory *workspace
}

// cutSmall cuts the memory of a task from scratch.
func (a *attention) cutSmall(w *scratch) smallSpace {
	w.used = 0
	ld := roundUp(a.d.SeqK, a.kernels.Lanes)
	x := smallSpace{q: w.floats(a.rows * a.dimK), k: w.floats(ld * a.dimK), v: w.floats(a.d.SeqK * a.dimV),
		s: w.floats(a.rows * ld), ld: ld, o: w.floats(a.rows * a.dimV), m: w.floats(a.rows), l: w.floats(a.rows),
		alpha: w.floats(a.rows), lanes: w.floats(a.kernels.Lanes), memory: &w.workspace}
	clear(x.q)
	return x
}

// smallTask computes the groups of task n.
func (a *attention) smallTask(turn *pool.Turn, w *scratch, n int) error {
	x := a.cutSmall(w)
	one := a.d.SeqK == 1 && a.lse.isZero() && a.problem.Sinks == nil
	for g := n * a.taskGroups; g < min((n+1)*a.taskGroups, a.d.Batch*a.d.KVHeads); g++ {
		b, hk := g/a.d.KVHeads, g%a.d.KVHeads
		if one && a.copyValue(b, hk) || a.small(&x, b, hk) {
			continue
		}
		w.used = 0
		if err := a.tilesTask(turn, w, g); err != nil {
			return err
		}
		x = a.cutSmall(w)
	}
	return nil
}

// copyValue writes the outputs of a group of one key: its value, because the key's weight
// is 2^0. It returns false if a row does not see the key, or if it cannot rule out that a
// score is not finite.
func (a *attention) copyValue(b, hk int) bool {
	for r := range a.rows { // without a visible key the table of b may have no page
		_, i := a.row(hk*a.share, 0, r)
		if _, hi := a.problem.Visible.Range(b, i, 1); hi == 0 {
			return false
		}
	}
	k := a.k.f32[a.k.rowIndex(b, hk, 0):][:a.d.Dim]
	v := a.v.f32[a.v.rowIndex(b, hk, 0):][:a.d.ValueDim]
	for r := range a.rows {
		h, i := a.row(hk*a.share, 0, r)
		bound := float32(0)
		for c, y := range a.q.f32[a.q.index(b, h, i):][:a.d.Dim] {
			bound += max(y*a.scale*k[c], -(y * a.scale * k[c])) // NaN if either is
		}
		if !(bound < math.MaxFloat32/2) {
			return false
		}
		o := a.o.f32[a.o.index(b, h, i):][:a.d.ValueDim]
		for c, y := range v {
			o[c] = y + 0 // no zero is negative
		}
	}
	return true
}

// small computes a group. It returns false, and writes nothing, for a group that the
// engine must compute: one without visible keys, or with keys that some row does not see
// and whose values are not finite, or lie in pages.
func (a *attention) small(x *smallSpace, b, hk int) bool {
	kernels, h0 := a.kernels, hk*a.share
	n, least, first := 0, a.d.SeqK, 0 // the largest and the smallest end of a row's keys
	for r := range a.rows {
		_, i := a.row(h0, 0, r)
		lo, hi := a.problem.Visible.Range(b, i, a.d.SeqK)
		n, least, first = max(n, hi), min(least, hi), max(first, lo)
	}
	every := least == n && first == 0 // all rows see the first n keys
	if n == 0 || !every && !a.finiteValues(b, hk, n) {
		return false
	}
	p := taskRange{b: b, hk: hk}
	for r := range a.rows {
		h, i := a.row(h0, 0, r)
		copy(x.q[r*a.dimK:], a.q.f32[a.q.index(b, h, i):][:a.d.Dim])
	}
	kernels.ScaleMax(x.q, a.scale, x.lanes)
	lanes, done := roundUp(n, kernels.Lanes), 0
	if a.d.Dim == a.dimK {
		if done = n / kernels.Lanes * kernels.Lanes; done > 0 {
			kernels.Dots(vec.F32, x.s, x.ld, a.runsOf(x.memory, &a.k, &p, 0, done, n), a.k.stride[backend.Seq], x.q, a.dimK, a.rows, a.dimK)
		}
	}
	if done < n {
		// The rows of x.k after these have unspecified scores, which are hidden below.
		loadRows(kernels, &a.k, x.k, a.dimK, b, hk, done, n-done)
		kernels.Dots(vec.F32, x.s[done:], x.ld, x.memory.run(x.k, a.dimK, lanes-done, a.dimK), a.dimK, x.q, a.dimK, a.rows, a.dimK)
	}
	for r := range a.rows {
		s, lo, hi := x.s[r*x.ld:r*x.ld+lanes], 0, n
		if !every {
			_, i := a.row(h0, 0, r)
			lo, hi = a.problem.Visible.Range(b, i, a.d.SeqK)
		}
		fill(s[:lo], negInf)
		fill(s[hi:], negInf)
		x.m[r], x.l[r] = noScore, 0
	}
	kernels.RowWeights(x.s, x.ld, lanes, a.rows, x.m, x.l, x.alpha)
	runs, ldv := []vec.Run(nil), a.v.stride[backend.Seq]
	if a.d.ValueDim == a.dimV {
		runs = a.runsOf(x.memory, &a.v, &p, 0, n, n)
	} else {
		loadRows(kernels, &a.v, x.v, a.dimV, b, hk, 0, n)
		runs, ldv = x.memory.run(x.v, a.dimV, n, a.dimV), a.dimV
	}
	clear(x.o)
	kernels.Mix(vec.F32, x.o, a.dimV, runs, ldv, x.s, x.ld, x.alpha, a.rows, a.dimV)
	for r := range a.rows {
		h, i := a.row(h0, 0, r)
		lse, inv := float32(0), float32(0)
		if sink := a.problem.Sink(h); !a.lse.isZero() || sink != negInf {
			lse, inv = rowLSE(x.m[r], float64(x.l[r]), sink)
		} else if x.l[r] != 0 {
			inv = float32(1 / float64(x.l[r]))
		}
		if !a.lse.isZero() {
			a.lse.f32[a.lse.index(b, h, i)] = lse
		}
		o := a.o.f32[a.o.index(b, h, i):][:a.d.ValueDim]
		for c, y := range x.o[r*a.dimV:][:len(o)] {
			o[c] = float32(y*inv) + 0 // no zero is negative
		}
	}
	return true
}

// finiteValues reports that the first n values of a head are finite. It does not look into
// pages.
func (a *attention) finiteValues(b, hk, n int) bool {
	if a.v.pages != nil {
		return false
	}
	v, ldv := a.v.rowsAt(b, hk, 0)
	return !a.kernels.NonFinite(v, ldv, n, a.d.ValueDim)
}
