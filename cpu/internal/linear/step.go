package linear

import (
	"math"

	"github.com/seed90331342/attn/cpu/internal/tile"
)

// step computes token t+i, row i of what advance has loaded. It reads the state once for d and the outputs of its group,
// and once more to update it:
//
//	d = β·v - β·(a·k)·S    o = scale·((a·q)·S + (q·k)·d)    S = a·S + kᵀd    a = exp g
func (r *room) step(t, i int) {
	k, d := r.keys[i*r.lk:][:r.lk], r.d[i*r.lv:][:r.lv]
	a := r.from[:r.lk] // of channels
	switch {
	case r.channels:
		copy(a, r.g[i*r.lk:][:r.lk])
		r.exp(a)
	case r.decays.IsZero():
		tile.Fill(a, 1)
	default:
		tile.Fill(a[:r.kernels.Lanes], r.g[i])
		r.exp(a[:r.kernels.Lanes])
		tile.Fill(a, a[0])
	}
	for g := range r.group {
		q := r.few[(1+g)*r.lk:][:r.lk]
		r.query(q, g, t+i, 1)
		r.dots[g] = 0
		for c, y := range q {
			r.dots[g] += y * k[c]
			q[c] = y * a[c]
		}
	}
	first := 1 // row of r.rows
	clear(r.rows)
	if !r.betas.IsZero() {
		first = 0
		r.alpha[0] = r.beta[i]
		copy(r.alpha[1:], r.zero[:r.group])
		copy(r.rows, d)
		for c, y := range k {
			r.few[c] = -r.beta[i] * y * a[c]
		}
	}
	r.mix(r.rows[first*r.lv:], r.lv, r.s, r.ls, r.dk, r.few[first*r.lk:], r.lk, r.alpha[first:], 1-first+r.group, r.lv)
	if first == 0 {
		copy(d, r.rows)
	}
	r.mix(r.rows[r.lv:], r.lv, d, r.lv, 1, r.dots, 1, r.one, r.group, r.lv)
	for g := range r.group {
		r.o.Store(r.kernels, r.rows[(1+g)*r.lv:][:r.dv], r.b, r.h*r.group+g, t+i, 0)
	}
	r.mix(r.s, r.ls, d, r.lv, 1, k, 1, a, r.dk, r.lv)
}

// exp replaces whole vectors by their exponentials.
func (r *room) exp(x []float32) {
	r.times(x, math.Log2E)
	r.kernels.Exp2(x, 0)
}
