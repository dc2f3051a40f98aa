package cpu

import (
	"context"
	"math"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// vectorSoftmax is a softmaxJob on the vector kernels, with keys as lanes. It goes
// over what a row sees three times: scores and their maximum, powers and their
// sum, the division. The sum is kept lane by lane, from the first key that the
// row sees on, so that a row's bits depend on nothing but the row.
type vectorSoftmax struct {
	*softmaxJob
	k          *vec.Kernels
	scale, cap float32 // as in fused
	inPlace    bool
}

func newVectorSoftmax(j *softmaxJob, k *vec.Kernels) *vectorSoftmax {
	v := &vectorSoftmax{softmaxJob: j, k: k, scale: float32(float64(j.p.Scale) * math.Log2E), inPlace: j.s.stride[backend.Dim] == 1}
	if c := float64(j.p.Softcap); c > 0 {
		v.scale, v.cap = float32(float64(j.p.Scale)/c), float32(c*math.Log2E)
	}
	return v
}

// pieceKeys is the most keys that one kernel call takes: some microseconds.
const pieceKeys = 4096

// size implements job.
func (j *vectorSoftmax) size() (floats, rows int) { return 2*keyBlock + 2*j.k.Lanes, 0 }

// task implements job: a stretch of rows of one head.
func (j *vectorSoftmax) task(ctx context.Context, w *scratch, t int) error {
	b, h, from, to, _ := j.at(t)
	j.seedDropout(&w.workspace.draw)
	buf := softmaxRoom{w.floats(keyBlock), w.floats(keyBlock), w.floats(j.k.Lanes), w.floats(j.k.Lanes), &w.workspace.draw}
	for i := from; i < to; i++ {
		if err := ctx.Err(); err != nil {
			return err
		}
		lse := j.row(&buf, b, h, i)
		if !j.lse.isZero() {
			j.lse.f32[j.lse.index(b, h, i)] = lse
		}
	}
	return nil
}

// softmaxRoom is what a row is worked on in.
type softmaxRoom struct {
	row, bias, lanes, sums []float32
	draw                   *vec.Draw
}

// row does row i of head (b, h) and returns its LSE.
func (j *vectorSoftmax) row(w *softmaxRoom, b, h, i int) float32 {
	seqK := j.s.shape[backend.Dim]
	lo, hi := j.p.Visible.Range(b, i, seqK)
	m := negInf
	j.pieces(w, b, h, i, lo, hi, func(x []float32, key, n int) {
		if y := j.score(w, x, b, h, i, key, n); y > m {
			m = y
		}
	})
	if m == negInf { // all hidden, or NaN
		m = 0
	}
	clear(w.sums)
	j.pieces(w, b, h, i, lo, hi, func(x []float32, _, n int) {
		fill(x[n:], negInf)
		j.k.Exp2Sum(x, m, w.sums)
	})
	sum := 0.0
	for _, y := range w.sums {
		sum += float64(y)
	}
	lse, inv := rowLSE(m, sum, j.p.Sink(h))
	j.pieces(w, b, h, i, lo, hi, func(x []float32, key, n int) {
		j.k.ScaleMax(x, inv, w.lanes)
		if sum != sum { // NaN, but not for what is hidden
			for c := range n {
				if j.hides(b, h, i, key+c) {
					x[c] = 0
				}
			}
		}
		if j.p.Dropout.P > 0 {
			j.dropRow(j.k, w.draw, x, b, h, i, key)
		}
	})
	j.zero(b, h, i, 0, lo)
	j.zero(b, h, i, hi, seqK)
	return lse
}

// score turns n dot products, with the keys from key on, into scores in units of
// log2 e, and what x holds beyond n into -Inf. It returns the largest.
func (j *vectorSoftmax) score(w *softmaxRoom, x []float32, b, h, i, key, n int) float32 {
	m := j.k.ScaleMax(x, j.scale, w.lanes)
	plain := true
	if j.cap > 0 {
		plain = false
		j.k.Softcap(x, j.cap)
	}
	if j.masked || j.added {
		plain = false
		for c := 0; c < n; c += keyBlock {
			some := min(keyBlock, n-c)
			lanes := ceilDiv(some, j.k.Lanes) * j.k.Lanes
			j.biasRow(j.k, w.bias, b, h, i, key+c, some)
			clear(w.bias[some:lanes])
			j.k.Bias(x[c:c+lanes], w.bias)
		}
	}
	if plain && n == len(x) {
		return m
	}
	fill(x[n:], negInf)
	return j.k.ScaleMax(x, 1, w.lanes)
}

// pieces calls f with elements [lo, hi) of a row, some at a time, in memory whose
// length is a multiple of Lanes: n elements from key on, and unspecified ones
// behind. What f writes to the n goes back to the row.
func (j *vectorSoftmax) pieces(w *softmaxRoom, b, h, i, lo, hi int, f func(x []float32, key, n int)) {
	at := j.s.index(b, h, i)
	for key := lo; key < hi; {
		n := min(hi-key, pieceKeys)
		if n >= j.k.Lanes && j.inPlace {
			n = n / j.k.Lanes * j.k.Lanes
			f(j.s.f32[at+key:at+key+n], key, n)
			key += n
			continue
		}
		n = min(n, keyBlock)
		x := w.row[:ceilDiv(n, j.k.Lanes)*j.k.Lanes]
		j.s.pack(x, n, b, h, i, 1, key, n)
		f(x, key, n)
		j.s.store(x[:n], b, h, i, key)
		key += n
	}
}
