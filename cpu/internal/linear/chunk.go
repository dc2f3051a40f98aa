package linear

import (
	"math"

	"github.com/seed90331342/attn/cpu/internal/tile"
)

// chunkOf computes tokens [t, t+n). With G the sums of g from the first token of the chunk on, and E = exp(G_i - G_j) for
// j <= i, else 0:
//
//	A = β·(K·Kᵀ ⊙ E), for j < i
//	D = β·V - β·exp(G)·K·S - A·D                    without the delta rule D = V
//	O = exp(G)·Q·S + (Q·Kᵀ ⊙ E)·D                   for each query head, times scale
//	S = exp(G_n)·S + (exp(G_n - G)·K)ᵀ·D
//
// This is the form of Yang et al. (2024) without their W: chunks follow each other here, so S is known when D is solved.
// S and D lie below each other in strips of columns, those of a tile, so a row [-β·exp(G)·K | -A] or [exp(G)·Q | Q·Kᵀ ⊙ E]
// of left times a strip is a row of D or O.
//
// With decays of channels E is exp(G_i - G_ref)·exp(G_ref - G_j), factors of the rows of K and Q and of the columns of
// Kᵀ, see reference.
func (r *room) chunkOf(t, n, ref int) {
	lk, w, columns := r.lk, r.columns.Width, r.keys
	if !r.inStrips { // the first chunk
		r.toStrips(0, r.dk, r.s, r.ls)
		r.inStrips = true
		tile.Fill(r.mask, 1)
	}
	if r.channels {
		r.channelDecays(n, ref)
		columns = r.p
	} else if !r.decays.IsZero() {
		r.tokenDecays(n)
	}
	clear(columns[n*lk : tile.RoundUp(n, r.tokens.Width)*lk])
	r.turn(columns, n)
	if r.delta() {
		r.scaleRows(r.d, r.lv, n, r.lv, r.beta) // β·V
	}
	r.toStrips(r.dk, n, r.d, r.lv)
	if r.delta() {
		r.solve(n)
	}
	for g := range r.group {
		r.query(r.qs, g, t, n)
		if r.channels {
			r.multiply(r.qs[:n*lk], r.qs, r.g)
		}
		r.products(r.qs, n, r.one)
		for s := range r.strips {
			x := r.strip(s)
			r.scores(r.columns, r.tmp, r.left, r.ll, n, x, r.dk+n)
			for i := range n {
				r.o.Store(r.kernels, r.tmp[i*w:][:min(w, r.dv-s*w)], r.b, r.h*r.group+g, t+i, s*w)
			}
		}
	}
	r.update(n)
}

// delta reports whether the rule is a delta rule.
func (r *room) delta() bool { return !r.betas.IsZero() }

// strip returns strip s: [K + lc, Width], S and D.
func (r *room) strip(s int) []float32 {
	size := (r.dk + r.lc) * r.columns.Width
	return r.x[s*size:][:size]
}

// eachStrip calls do with row i of each strip, and the elements of row that it has, at least one.
func (r *room) eachStrip(i int, row []float32, do func(strip, row []float32)) {
	w := r.columns.Width
	for s := range r.strips {
		do(r.strip(s)[i*w:][:w], row[s*w:min((s+1)*w, len(row))])
	}
}

// toStrips copies n rows of lv elements, ld apart, to the strips from row to on.
func (r *room) toStrips(to, n int, rows []float32, ld int) {
	for i := range n {
		r.eachStrip(to+i, rows[i*ld:][:r.lv], func(strip, row []float32) { clear(strip[copy(strip, row):]) })
	}
}

// toRows moves the state back.
func (r *room) toRows() {
	for i := 0; i < r.dk && r.inStrips; i++ {
		r.eachStrip(i, r.s[i*r.ls:][:r.lv], func(strip, row []float32) { copy(row, strip) })
	}
	r.inStrips = false
}

// solve solves (I + A)·D = β·V - β·exp(G)·K·S in the strips, with the inverse of I + A.
func (r *room) solve(n int) {
	w, ll := r.columns.Width, r.ll
	for i, beta := range r.beta[:n] {
		r.alpha[i] = -beta
	}
	r.products(r.keys, n, r.alpha)
	clear(r.inverse[:n*maxChunk])
	for i := range n {
		row := r.inverse[i*maxChunk:]
		if row[i] = 1; i > 0 {
			r.mix(row, maxChunk, r.inverse, maxChunk, i, r.left[i*ll+r.dk:], ll, r.one, 1, maxChunk)
		}
	}
	for s := range r.strips {
		x := r.strip(s)
		d := x[r.dk*w:][:n*w]
		r.scores(r.columns, r.tmp, r.left, ll, n, x, r.dk)
		r.columns.Fold(r.tmp, d, n, r.one, r.one)
		r.scores(r.columns, d, r.inverse, maxChunk, n, r.tmp, n)
	}
}

// products sets the rows of left to [exp(G)·rows | rows·kt ⊙ E], times factors [n].
func (r *room) products(rows []float32, n int, factors []float32) {
	w, scales := r.tokens.Width, factors
	if !r.channels && !r.decays.IsZero() {
		scales = r.to
		r.kernels.ProductSum(scales[:r.lc], r.from, factors, r.zero)
	}
	for i := range n {
		to, row := r.left[i*r.ll:][:r.ll], rows[i*r.lk:][:r.lk] // whole vectors: what is to the right follows
		if r.channels {
			r.multiply(to[:r.lk], row, r.from)
		} else {
			copy(to, row)
		}
	}
	r.scaleRows(r.left, r.ll, n, r.lk, scales)
	for j := 0; j < n; j += w {
		r.scores(r.tokens, r.tmp, rows[j*r.lk:], r.lk, n-j, r.kt[j*r.lk:], r.dk)
		for i := j; i < n; i++ {
			cols := min(w, i+1-j)
			to, from, e := r.left[i*r.ll+r.dk+j:][:r.lc-j], r.tmp[(i-j)*w:][:cols], r.mask[i*r.lc+j:][:cols]
			for c, y := range from {
				to[c] = y * e[c] * factors[i]
			}
			clear(to[cols:])
		}
	}
}

// update computes the state after a chunk.
func (r *room) update(n int) {
	w, rows := r.columns.Width, r.keys
	tile.Fill(r.alpha[:w], 1)
	switch {
	case r.channels:
		rows = r.p
		for i := 0; i < n*r.lk; i += r.lk {
			r.multiply(rows[i:][:r.lk], rows[i:], r.to)
		}
		r.multiply(r.few[:r.lk], r.from, r.to)
	case !r.decays.IsZero():
		r.scaleRows(rows, r.lk, n, r.lk, r.mask[(n-1)*r.lc:])
		tile.Fill(r.alpha[:w], r.from[n-1])
	}
	for s := range r.strips {
		x := r.strip(s)
		if r.channels { // while the strip is in the first-level cache
			r.columns.RankOne(x, w, r.zero, r.zero, r.few, r.dk, w, 0)
		}
		r.addOuter(x, x[r.dk*w:], rows, n)
	}
}

// tokenDecays sets from to exp(G) and mask to E, with sums in float64.
func (r *room) tokenDecays(n int) {
	var sums [maxChunk]float64
	sum := 0.0
	clear(r.from[:r.lc])
	for i, g := range r.g[:n] {
		sum += float64(g)
		sums[i] = sum * math.Log2E
		r.from[i] = float32(sums[i])
	}
	r.kernels.Exp2(r.from[:r.lc], 0)
	for i := range n {
		row := r.mask[i*r.lc:][:tile.RoundUp(i+1, r.kernels.Lanes)]
		clear(row[i+1:])
		for j, before := range sums[:i+1] {
			row[j] = float32(sums[i] - before)
		}
		r.kernels.Exp2(row, 0)
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
		least, most := r.extremes(r.g[i*r.lk:][:r.lk])
		if sum += float64(max(-least, most)); sum > reach {
			return ref, i
		}
		if i <= maxChunk/2 {
			ref = i
			if i == maxChunk/2 {
				sum = 0
			}
		}
	}
	return ref, n
}

// channelDecays replaces g by exp(G - G_ref), with sums in float64, and sets from to exp(G_ref) and to to
// exp(G_n - G_ref). It multiplies the keys by g in keys, and by 1/g in p.
func (r *room) channelDecays(n, ref int) {
	lk := r.lk
	r.kernels.SumsFrom(r.g, r.p, n, ref, r.from[:lk])
	r.kernels.Exp2(r.from[:lk], 0)
	r.kernels.Exp2(r.p[:n*lk], 0)
	r.kernels.Exp2(r.g[:n*lk], 0)
	copy(r.to, r.g[(n-1)*lk:][:lk])
	r.multiply(r.p[:n*lk], r.p, r.keys)
	r.multiply(r.keys[:n*lk], r.keys, r.g)
}
