package linear

import (
	"math"

	"github.com/seed90331342/attn/cpu/internal/tile"
	"github.com/seed90331342/attn/cpu/internal/vec"
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
		var sums [4]float32 // as many as hide the latency of an addition
		for c := 0; c < len(q); c += 4 {
			x, y := q[c:c+4:c+4], k[c:c+4:c+4]
			sums[0], sums[1], sums[2], sums[3] = sums[0]+x[0]*y[0], sums[1]+x[1]*y[1], sums[2]+x[2]*y[2], sums[3]+x[3]*y[3]
		}
		r.dots[g] = (sums[0] + sums[1]) + (sums[2] + sums[3])
		r.multiply(q, q, a)
	}
	first := 1 // row of r.rows
	clear(r.rows)
	if !r.betas.IsZero() {
		first = 0
		r.alpha[0] = r.beta[i]
		copy(r.alpha[1:], r.zero[:r.group])
		copy(r.rows, d)
		r.multiply(r.few[:r.lk], k, a)
		r.times(r.few[:r.lk], -r.beta[i])
	}
	runs := r.space.Rows(r.s, r.ls, r.dk, r.lv)
	if r.ahead > 0 { // prefetch the next state here as well as in RankOne: neither pass has time for all of it
		vec.Ahead(&runs[0], r.s[r.ahead:], r.ls, r.dk, r.lv)
	}
	r.kernels.Mix(vec.F32, r.rows[first*r.lv:], r.lv, runs, r.ls, r.few[first*r.lk:], r.lk, r.alpha[first:], 1-first+r.group, r.lv)
	if first == 0 {
		copy(d, r.rows)
	}
	r.kernels.RankOne(r.rows[r.lv:], r.lv, d, r.dots, r.one, r.group, r.lv, 0)
	for g := range r.group {
		r.o.Store(r.kernels, r.rows[(1+g)*r.lv:][:r.dv], r.b, r.h*r.group+g, t+i, 0)
	}
	r.kernels.RankOne(r.s, r.ls, d, k, a, r.dk, r.lv, r.ahead)
}

// exp replaces whole vectors by their exponentials.
func (r *room) exp(x []float32) {
	r.times(x, math.Log2E)
	r.kernels.Exp2(x, 0)
}
