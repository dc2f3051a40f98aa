package linear

import (
	"math"

	"github.com/seed90331342/attn/cpu/internal/tile"
)

// blockRows is the number of rows that a chunk solves and hides together.
const blockRows = 16

// chunkOf computes tokens [t, t+n). With G the sums of g from the first token of the chunk on, and E = exp(G_i - G_j) for
// j <= i, else 0:
//
//	A = -β·(K·Kᵀ ⊙ E), for j < i                    M, below its diagonal
//	D = β·V - β·exp(G)·K·S + A·D                    row after row; without the delta rule D = V
//	O = exp(G)·Q·S + (Q·Kᵀ ⊙ E)·D                   for each query head, times scale
//	S = exp(G_n)·S + Kᵀ·(exp(G_n - G)·D)
//
// This is the form of Yang et al. (2024) without their W: chunks follow each other here, so S is known when D is solved.
//
// With decays of channels E is exp(G_i - G_ref)·exp(G_ref - G_j), factors of the rows of K and Q and of the columns of
// Kᵀ, see reference.
func (r *room) chunkOf(t, n, ref int) {
	x, lc, lk, lv := r.kernels, r.lc, r.lk, r.lv
	whole := tile.RoundUp(n, x.Lanes)
	columns := r.keys
	switch {
	case r.channels:
		r.channelDecays(n, ref)
		columns = r.p
	default:
		r.tokenDecays(n)
	}
	clear(columns[n*lk : whole*lk])
	r.turn(columns, whole)
	if r.channels || r.decays.IsZero() {
		for i := range n {
			tile.Fill(r.mask[i*lc:][:i+1], 1)
			clear(r.mask[i*lc+i+1 : (i+1)*lc])
		}
	}
	if !r.betas.IsZero() {
		r.solve(n)
	}
	for g := range r.group {
		r.query(r.qs, g, t, n)
		if r.channels {
			multiply(r.qs, r.g[:n*lk])
		}
		r.products(r.qs, n)
		for i := range n {
			multiply(r.m[i*lc:], r.mask[i*lc:][:min(lc, tile.RoundUp(i+1, blockRows))])
		}
		r.decayRows(r.qs, r.qs, n, nil)
		clear(r.out[:n*lv])
		r.mix(r.out, lv, r.s, r.ls, r.dk, r.qs, lk, r.zero, n, lv)
		for i := 0; i < n; i += blockRows {
			end := min(i+blockRows, n)
			r.mix(r.out[i*lv:], lv, r.d, lv, end, r.m[i*lc:], lc, r.one, end-i, lv)
		}
		for i := range n {
			r.o.Store(x, r.out[i*lv:][:r.dv], r.b, r.h*r.group+g, t+i, 0)
		}
	}
	switch {
	case r.channels:
		for c := range r.dk {
			r.times(r.kt[c*lc:][:whole], r.to[c])
			r.alpha[c] = r.from[c] * r.to[c]
		}
	case r.decays.IsZero():
		tile.Fill(r.alpha, 1)
	default:
		for i := range n {
			r.times(r.d[i*lv:][:lv], r.mask[(n-1)*lc+i])
		}
		tile.Fill(r.alpha, r.from[n-1])
	}
	r.mix(r.s, r.ls, r.d, lv, n, r.kt, lc, r.alpha, r.dk, lv)
}

// solve replaces the values by D.
func (r *room) solve(n int) {
	lc, lk, lv := r.lc, r.lk, r.lv
	r.products(r.keys, n)
	for i := range n {
		row := r.m[i*lc:]
		for j, e := range r.mask[i*lc:][:i] {
			row[j] *= -r.beta[i] * e
		}
	}
	r.decayRows(r.p, r.keys, n, r.beta)
	r.mix(r.d, lv, r.s, r.ls, r.dk, r.p, lk, r.beta, n, lv)
	for i := 0; i < n; i += blockRows {
		end := min(i+blockRows, n)
		if i > 0 {
			r.mix(r.d[i*lv:], lv, r.d, lv, i, r.m[i*lc:], lc, r.one, end-i, lv)
		}
		for j := i + 1; j < end; j++ {
			r.mix(r.d[j*lv:], lv, r.d[i*lv:], lv, j-i, r.m[j*lc+i:], lc, r.one, 1, lv)
		}
	}
}

// products computes M = rows·kt, as far as j <= i needs it.
func (r *room) products(rows []float32, n int) {
	for i := 0; i < n; i += blockRows {
		end := min(i+blockRows, n)
		cols := tile.RoundUp(end, r.kernels.Lanes)
		for j := i; j < end; j++ {
			clear(r.m[j*r.lc:][:cols])
		}
		r.mix(r.m[i*r.lc:], r.lc, r.kt, r.lc, r.dk, rows[i*r.lk:], r.lk, r.zero, end-i, cols)
	}
}

// decayRows writes rows times exp(G), and times -beta unless it is nil.
func (r *room) decayRows(dst, rows []float32, n int, beta []float32) {
	for i := range n {
		to, row, factor := dst[i*r.lk:][:r.lk], rows[i*r.lk:][:r.lk], float32(1)
		if beta != nil {
			factor = -beta[i]
		}
		if r.channels {
			for c, y := range row {
				to[c] = y * factor * r.from[c]
			}
			continue
		}
		if !r.decays.IsZero() {
			factor *= r.from[i]
		}
		copy(to, row)
		r.times(to, factor)
	}
}

// tokenDecays sets from to exp(G) and mask to E, with sums in float64.
func (r *room) tokenDecays(n int) {
	if r.decays.IsZero() {
		return
	}
	var sums [maxChunk]float64
	sum := 0.0
	for i := range r.lc {
		if i < n {
			sum += float64(r.g[i])
		}
		sums[i] = sum * math.Log2E
		r.from[i] = float32(sums[i])
	}
	r.kernels.Exp2(r.from[:r.lc], 0)
	for i := range n {
		row := r.mask[i*r.lc:][:r.lc]
		for j := range row {
			row[j] = float32(sums[i] - sums[j])
		}
		r.kernels.Exp2(row[:tile.RoundUp(i+1, r.kernels.Lanes)], 0)
		clear(row[i+1:])
	}
}

// reach is the largest sum of magnitudes of g between a token and the reference. exp(-44) times an element of q, and
// exp(44) times one of k, are normal numbers unless the element is extreme.
const reach = 44

// reference returns the token of a chunk of n with decays of channels whose G is the reference, and the number of
// tokens within reach.
func (r *room) reference(n int) (ref, tokens int) {
	sum := 0.0
	for i := 1; i < n; i++ {
		top := float32(0)
		for _, g := range r.g[i*r.lk:][:r.dk] {
			top = max(top, g, -g)
		}
		if sum += float64(top); sum > reach {
			return ref, i
		}
		if i <= channelChunk/2 {
			ref = i
			if i == channelChunk/2 {
				sum = 0
			}
		}
	}
	return ref, n
}

// channelDecays replaces g by exp(G - G_ref), with sums in float64, and sets from to exp(G_ref) and to to
// exp(G_n - G_ref). Keys are multiplied by g in keys, and divided by it in p.
func (r *room) channelDecays(n, ref int) {
	lk := r.lk
	for c := range lk {
		sum, at := 0.0, 0.0 // G, and G of the reference
		for i := range ref + 1 {
			at += float64(r.g[i*lk+c])
		}
		r.from[c] = float32(at * math.Log2E)
		for i := range n {
			sum += float64(r.g[i*lk+c])
			r.g[i*lk+c] = float32((sum - at) * math.Log2E)
		}
	}
	r.kernels.Exp2(r.from[:lk], 0)
	r.kernels.Exp2(r.g[:n*lk], 0)
	copy(r.to, r.g[(n-1)*lk:][:lk])
	for i, e := range r.g[:n*lk] {
		r.p[i] = r.keys[i] / e
		r.keys[i] *= e
	}
}

// turn sets kt to the transpose of rows, n of them.
func (r *room) turn(rows []float32, n int) {
	if r.kernels.KeyLanes { // which lacks Transpose
		for i := range n {
			for c, y := range rows[i*r.lk:][:r.dk] {
				r.kt[c*r.lc+i] = y
			}
		}
		return
	}
	for i := 0; i < n; i += r.kernels.Lanes {
		tile.Turn(r.kernels, r.kt[i:], r.lc, r.lc, rows[i*r.lk:], r.lk, 1, r.lk, r.one)
	}
}

// multiply multiplies x by y.
func multiply(x, y []float32) {
	x = x[:len(y)]
	for i, z := range y {
		x[i] *= z
	}
}
