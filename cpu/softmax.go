package cpu

import (
	"context"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/tile"
	"github.com/seed90331342/attn/cpu/internal/vec"
	"github.com/seed90331342/attn/cpu/internal/view"
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
		return be.runScores(ctx, s, lse, p, 2*tile.BlockKeys+2*be.kernels.Lanes, softmaxOfRow)
	})
}

// Scores implements backend.Scorer: the first half of Softmax, in float32. The
// bits are the same on every tier. Errors as for Attention.
func (be *Backend) Scores(ctx context.Context, s backend.Tensor, p *backend.Problem, at backend.ScorePoint) error {
	return be.do(ctx, "scores", func() error {
		until := p.Until(at)
		return be.runScores(ctx, s, backend.Tensor{}, &until, 2*tile.BlockKeys, scoresOfRow)
	})
}

// runScores calls row for the rows of s [B, H, Sq, Sk], with floats floats.
func (be *Backend) runScores(ctx context.Context, s, lse backend.Tensor, p *backend.Problem, floats int,
	row func(j *rowJob, s *tile.Space, mem []float32, b, h, i int)) error {
	j := be.newRowJob(s.Shape(), floats, 1, row)
	defer j.release()
	j.problem, j.scores = p, new(tile.Scores)
	layout := tile.Layout{Kernels: be.kernels, Dims: backend.Dims{Heads: j.heads, SeqQ: j.seq, SeqK: j.cols}}
	j.scores.Open(&layout, p)
	in := p.Operands()
	return j.run(ctx, []backend.Operand{{Name: "s", Tensor: s}, {Name: "lse", Tensor: lse}}, in[:])
}

// softmaxRow is row i of head (b, h) of a Softmax call, and the memory to compute it in.
type softmaxRow struct {
	j       *rowJob
	space   *tile.Space
	s       *view.View
	mem     []float32 // a block of scores, one of biases, and the lanes of maxima and sums
	b, h, i int
}

func softmaxOfRow(j *rowJob, s *tile.Space, mem []float32, b, h, i int) {
	r := softmaxRow{j, s, &j.x[0], mem, b, h, i}
	if lse := r.softmax(); !j.x[1].IsZero() {
		j.x[1].F32[j.x[1].Index(b, h, i)] = lse
	}
}

// softmax computes the row and returns its LSE.
func (r *softmaxRow) softmax() float32 {
	j, k := r.j, r.j.kernels
	lo, hi := j.problem.Visible.Range(r.b, r.i, j.cols)
	lanes, sums := r.lanes(), r.mem[2*tile.BlockKeys+k.Lanes:]
	m := vec.NegInf
	r.each(lo, hi, func(x []float32, key, n int) {
		if y := r.score(x, key, n); y > m {
			m = y
		}
	})
	if m == vec.NegInf { // all hidden, or NaN
		m = 0
	}
	clear(sums)
	r.each(lo, hi, func(x []float32, _, n int) {
		tile.Fill(x[n:], vec.NegInf)
		k.Exp2Sum(x, m, sums)
	})
	sum := 0.0
	for _, y := range sums {
		sum += float64(y)
	}
	lse, inv := vec.RowLSE(m, sum, j.problem.Sink(r.h))
	r.each(lo, hi, func(x []float32, key, n int) {
		k.ScaleMax(x, inv, lanes)
		if sum != sum { // NaN, except for hidden keys
			for c := range n {
				if j.scores.Hides(r.b, r.h, r.i, key+c) {
					x[c] = 0
				}
			}
		}
		if j.scores.Drops() {
			j.scores.DropRow(&r.space.Draw, x, r.b, r.h, r.i, key)
		}
	})
	r.zero(0, lo)
	r.zero(hi, j.cols)
	return lse
}

// lanes returns memory for a vector.
func (r *softmaxRow) lanes() []float32 { return r.mem[2*tile.BlockKeys:][:r.j.kernels.Lanes] }

// score turns n dot products, with the keys from key on, into scores in units of
// log2 e, and the elements of x after them into -Inf. It returns the largest.
func (r *softmaxRow) score(x []float32, key, n int) float32 {
	k, sc := r.j.kernels, r.j.scores
	lanes, bias := r.lanes(), r.mem[tile.BlockKeys:2*tile.BlockKeys]
	m := k.ScaleMax(x, sc.Scale, lanes)
	if sc.Cap > 0 {
		k.Softcap(x, sc.Cap)
	}
	if sc.Masked || sc.Added {
		for c := 0; c < n; c += tile.BlockKeys {
			some := min(tile.BlockKeys, n-c)
			padded := tile.RoundUp(some, k.Lanes)
			if sc.Added {
				sc.AddedRow(r.space, bias[:some], r.b, r.h, r.i, key+c)
				clear(bias[some:padded])
				k.Bias(x[c:c+padded], bias)
			}
			if sc.Masked {
				sc.MaskRow(r.space, x[c:c+some], r.b, r.h, r.i, key+c)
			}
		}
	}
	if sc.Cap == 0 && !sc.Masked && !sc.Added && n == len(x) {
		return m
	}
	tile.Fill(x[n:], vec.NegInf)
	return k.ScaleMax(x, 1, lanes)
}

// kernelKeys is the most keys that one kernel call takes: some microseconds.
const kernelKeys = 4096

// each calls f with elements [lo, hi) of the row, some at a time, in memory whose
// length is a multiple of Lanes: n elements from key on, followed by unspecified
// ones. The n elements that f leaves are written back to the row.
func (r *softmaxRow) each(lo, hi int, f func(x []float32, key, n int)) {
	at, inPlace, lanes := r.s.Index(r.b, r.h, r.i), r.s.Stride[backend.Dim] == 1, r.j.kernels.Lanes
	for key := lo; key < hi; {
		n := min(hi-key, kernelKeys)
		if n >= lanes && inPlace {
			n = n / lanes * lanes
			f(r.s.F32[at+key:at+key+n], key, n)
			key += n
			continue
		}
		n = min(n, tile.BlockKeys)
		x := r.mem[:tile.RoundUp(n, lanes)]
		r.s.Load(r.j.kernels, x, n, r.b, r.h, r.i, 1, key, n)
		f(x, key, n)
		r.s.Store(r.j.kernels, x[:n], r.b, r.h, r.i, key)
		key += n
	}
}

// zero writes zeros to elements [lo, hi) of the row.
func (r *softmaxRow) zero(lo, hi int) {
	step := r.s.Stride[backend.Dim]
	at := r.s.Index(r.b, r.h, r.i) + lo*step
	for range hi - lo {
		r.s.F32[at] = 0
		at += step
	}
}

// scoresOfRow computes a row of a Scores call.
func scoresOfRow(j *rowJob, s *tile.Space, mem []float32, b, h, i int) {
	row, bias := mem[:tile.BlockKeys], mem[tile.BlockKeys:]
	lo, hi := j.problem.Visible.Range(b, i, j.cols)
	for j0 := 0; j0 < j.cols; j0 += tile.BlockKeys {
		x := row[:min(tile.BlockKeys, j.cols-j0)]
		tile.Fill(x, vec.NegInf)
		if first, end := max(lo-j0, 0), min(hi-j0, len(x)); first < end {
			x := x[first:end]
			j.x[0].Load(j.kernels, x, len(x), b, h, i, 1, j0+first, len(x))
			scoreRow(j, s, x, b, h, i, j0+first, bias)
		}
		j.x[0].Store(j.kernels, x, b, h, i, j0)
	}
}

// scoreRow turns dot products of query row i with the keys from key on into scores, in place:
//
//	x = scale·x    x = softcap·tanh(x/softcap)    x = x + bias    hidden: -Inf
//
// x and bias have room for whole vectors.
func scoreRow(j *rowJob, s *tile.Space, x []float32, b, h, i, key int, bias []float32) {
	for n := range x {
		x[n] *= j.problem.Scale
	}
	if c := j.problem.Softcap; c > 0 {
		for n, y := range x {
			x[n] = c * vec.Tanh(y/c)
		}
	}
	if j.scores.Added {
		bias = bias[:len(x)]
		j.scores.AddedRow(s, bias, b, h, i, key)
		for n, y := range bias {
			if y == vec.NegInf {
				x[n] = vec.NegInf // not x+y: x may be NaN or +Inf
			} else {
				x[n] += backend.Bound(y, backend.MaxBias)
			}
		}
	}
	if j.scores.Masked {
		j.scores.MaskRow(s, x, b, h, i, key)
	}
}
