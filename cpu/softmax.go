package cpu

import (
	"context"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/pool"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// Softmax implements backend.Backend: it replaces each row of s by
//
//	exp(x_j - m)/l    x = scores of the row    m = max x    l = Σ exp(x_j - m)
//
// and writes m + log l to lse unless that is the zero Tensor. Scores are scaled,
// capped, biased and hidden as in [Backend.Scores]. Hidden keys give exactly 0 and
// their elements of s are not read; a row without a score above -Inf becomes zeros
// with LSE -Inf, or its sink. Errors as for Attention.
//
// It makes three passes over the keys that a row sees: scores and their maximum,
// powers and their sum, the division. The sum is kept lane by lane, from the first
// key that the row sees on, so the bits of a row depend on the row alone.
func (be *Backend) Softmax(ctx context.Context, s, lse backend.Tensor, p *backend.Problem) error {
	return be.do(ctx, "softmax", func() error {
		j := softmaxJob{k: be.kernels}
		j.scale, j.cap = scaleAndCap(p)
		return be.runRows(ctx, &j, &j.rowJob, s, lse, p)
	})
}

// Scores implements backend.Scorer: the first half of Softmax, in float32. The
// bits are the same on every tier. Errors as for Attention.
func (be *Backend) Scores(ctx context.Context, s backend.Tensor, p *backend.Problem, at backend.ScorePoint) error {
	return be.do(ctx, "scores", func() error {
		j := scoreJob{k: be.kernels}
		until := p.Until(at)
		return be.runRows(ctx, &j, &j.rowJob, s, backend.Tensor{}, &until)
	})
}

// rowJob is a call on the rows of s [B, H, Sq, Sk].
type rowJob struct {
	rowPartition
	scoring
	s, lse view
}

// runRows opens the operands of a call into r and runs j, of which r is a part.
func (be *Backend) runRows(ctx context.Context, j job, r *rowJob, s, lse backend.Tensor, p *backend.Problem) error {
	var pinned backend.Pinned
	in := p.Operands()
	if err := pinned.Pin(nil, where, []backend.Operand{{Name: "s", Tensor: s}, {Name: "lse", Tensor: lse}}, in[:]); err != nil {
		return err
	}
	defer pinned.Unpin()
	if err := r.scoring.open(p, s.Shape()[backend.Heads], s.Shape()[backend.Seq]); err != nil {
		return err
	}
	if err := openViews([]operand{{"s", s, &r.s}, {"lse", lse, &r.lse}}); err != nil {
		return err
	}
	r.rowPartition = newRowPartition(s.Shape(), be.threads())
	return be.run(ctx, j, r.tasks, be.threads())
}

// softmaxJob is one Softmax call.
type softmaxJob struct {
	rowJob
	k          *vec.Kernels
	scale, cap float32 // as in attention
}

func (j *softmaxJob) size() (floats, rows int) { return 2*keyBlock + 2*j.k.Lanes, 0 }

func (j *softmaxJob) task(turn *pool.Turn, w *scratch, t int) error {
	b, h, from, to := j.at(t)
	j.seedDropout(&w.workspace.draw)
	x := softmaxRow{j, w.floats(keyBlock), w.floats(keyBlock), w.floats(j.k.Lanes), w.floats(j.k.Lanes), &w.workspace.draw, &w.workspace.ramp, b, h, 0}
	for x.i = from; x.i < to; x.i++ {
		if err := turn.Pause(); err != nil {
			return err
		}
		lse := x.softmax()
		if !j.lse.isZero() {
			j.lse.f32[j.lse.index(b, h, x.i)] = lse
		}
	}
	return nil
}

// softmaxRow is row i of head (b, h), and the memory to compute it in.
type softmaxRow struct {
	*softmaxJob
	row, bias, lanes, sums []float32
	draw                   *vec.Draw
	ramp                   *ramp
	b, h, i                int
}

// softmax computes the row and returns its LSE.
func (r *softmaxRow) softmax() float32 {
	seqK := r.s.shape[backend.Dim]
	lo, hi := r.problem.Visible.Range(r.b, r.i, seqK)
	m := negInf
	r.pieces(lo, hi, func(x []float32, key, n int) {
		if y := r.score(x, key, n); y > m {
			m = y
		}
	})
	if m == negInf { // all hidden, or NaN
		m = 0
	}
	clear(r.sums)
	r.pieces(lo, hi, func(x []float32, _, n int) {
		fill(x[n:], negInf)
		r.k.Exp2Sum(x, m, r.sums)
	})
	sum := 0.0
	for _, y := range r.sums {
		sum += float64(y)
	}
	lse, inv := rowLSE(m, sum, r.problem.Sink(r.h))
	r.pieces(lo, hi, func(x []float32, key, n int) {
		r.k.ScaleMax(x, inv, r.lanes)
		if sum != sum { // NaN, except for hidden keys
			for c := range n {
				if r.hides(r.b, r.h, r.i, key+c) {
					x[c] = 0
				}
			}
		}
		if r.problem.Dropout.P > 0 {
			r.dropRow(r.k, r.draw, x, r.b, r.h, r.i, key)
		}
	})
	r.zero(0, lo)
	r.zero(hi, seqK)
	return lse
}

// score turns n dot products, with the keys from key on, into scores in units of
// log2 e, and the elements of x after them into -Inf. It returns the largest.
func (r *softmaxRow) score(x []float32, key, n int) float32 {
	m := r.k.ScaleMax(x, r.scale, r.lanes)
	plain := true
	if r.cap > 0 {
		plain = false
		r.k.Softcap(x, r.cap)
	}
	if r.masked || r.added {
		plain = false
		for c := 0; c < n; c += keyBlock {
			some := min(keyBlock, n-c)
			lanes := roundUp(some, r.k.Lanes)
			if r.added {
				r.addedRow(r.k, r.ramp, r.bias[:some], r.b, r.h, r.i, key+c)
				clear(r.bias[some:lanes])
				r.k.Bias(x[c:c+lanes], r.bias)
			}
			if r.masked {
				r.maskRow(r.k, x[c:c+some], r.b, r.h, r.i, key+c)
			}
		}
	}
	if plain && n == len(x) {
		return m
	}
	fill(x[n:], negInf)
	return r.k.ScaleMax(x, 1, r.lanes)
}

// pieceKeys is the most keys that one kernel call takes: some microseconds.
const pieceKeys = 4096

// pieces calls f with elements [lo, hi) of the row, piece by piece, in memory whose
// length is a multiple of Lanes: n elements from key on, followed by unspecified
// ones. The n elements that f leaves are written back to the row.
func (r *softmaxRow) pieces(lo, hi int, f func(x []float32, key, n int)) {
	at, inPlace := r.s.index(r.b, r.h, r.i), r.s.stride[backend.Dim] == 1
	for key := lo; key < hi; {
		n := min(hi-key, pieceKeys)
		if n >= r.k.Lanes && inPlace {
			n = n / r.k.Lanes * r.k.Lanes
			f(r.s.f32[at+key:at+key+n], key, n)
			key += n
			continue
		}
		n = min(n, keyBlock)
		x := r.row[:roundUp(n, r.k.Lanes)]
		r.s.pack(x, n, r.b, r.h, r.i, 1, key, n)
		f(x, key, n)
		r.s.store(x[:n], r.b, r.h, r.i, key)
		key += n
	}
}

// zero writes zeros to elements [lo, hi) of the row.
func (r *softmaxRow) zero(lo, hi int) {
	step := r.s.stride[backend.Dim]
	at := r.s.index(r.b, r.h, r.i) + lo*step
	for range hi - lo {
		r.s.f32[at] = 0
		at += step
	}
}

// scoreJob is one Scores call.
type scoreJob struct {
	rowJob
	k *vec.Kernels
}

func (j *scoreJob) size() (floats, rows int) { return 2 * keyBlock, 0 }

func (j *scoreJob) task(turn *pool.Turn, w *scratch, t int) error {
	b, h, from, to := j.at(t)
	row, bias := w.floats(keyBlock), w.floats(keyBlock)
	keys := j.s.shape[backend.Dim]
	for i := from; i < to; i++ {
		if err := turn.Pause(); err != nil {
			return err
		}
		lo, hi := j.problem.Visible.Range(b, i, keys)
		for j0 := 0; j0 < keys; j0 += keyBlock {
			x := row[:min(keyBlock, keys-j0)]
			fill(x, negInf)
			if first, end := max(lo-j0, 0), min(hi-j0, len(x)); first < end {
				x := x[first:end]
				j.s.pack(x, len(x), b, h, i, 1, j0+first, len(x))
				j.adjustRow(j.k, &w.workspace.ramp, x, b, h, i, j0+first, bias)
			}
			j.s.store(x, b, h, i, j0)
		}
	}
	return nil
}
