package cpu

import (
	"context"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/tile"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

// Softmax implements backend.Backend: it replaces each row of s by
//
//	exp(x_j - m)/l    x = scores of the row    m = max x    l = Σ exp(x_j - m)
//
// and writes m + log l to lse unless that is the zero Tensor. Scores are scaled, capped, biased and hidden as in
// [Backend.Scores]. Hidden keys give exactly 0 and their elements of s are not read; a row without a score above -Inf
// becomes zeros with LSE -Inf, or its sink. Errors as for Attention.
//
// It makes three passes over the keys that a row sees: scores and their maximum, powers and their sum, the
// division. The sum is kept lane by lane from the first of these keys on: the bits of a row depend on it alone.
func (be *Backend) Softmax(ctx context.Context, s, lse backend.Tensor, p *backend.Problem) error {
	return be.do(ctx, "softmax", func() error {
		return be.runScores(ctx, s, lse, p, 2*tile.BlockKeys+2*be.kernels.Lanes, softmaxRow)
	})
}

// Scores implements backend.Scorer: the first half of Softmax, in float32. The
// bits are the same on every tier. Errors as for Attention.
func (be *Backend) Scores(ctx context.Context, s backend.Tensor, p *backend.Problem, at backend.ScorePoint) error {
	return be.do(ctx, "scores", func() error {
		until := p.Until(at)
		return be.runScores(ctx, s, backend.Tensor{}, &until, 2*tile.BlockKeys, scoresRow)
	})
}

// kernelKeys is the most keys that one kernel call takes: some microseconds.
const kernelKeys = 4096

// runScores calls compute for the rows of s [B, H, Sq, Sk], with floats floats.
func (be *Backend) runScores(ctx context.Context, s, lse backend.Tensor, p *backend.Problem, floats int, compute func(r row)) error {
	if err := p.GoMod(false); err != nil {
		return err
	}
	j := be.newRowJob(s.Shape(), floats, compute)
	j.problem, j.scores = p, new(tile.Scores)
	layout := tile.Layout{Kernels: be.kernels, Dims: backend.Dims{Heads: j.heads, SeqQ: j.seq, SeqK: j.cols}}
	j.scores.Open(&layout, p)
	in := p.Operands()
	return j.run(ctx, []backend.Operand{{Name: "s", Tensor: s}, {Name: "lse", Tensor: lse}}, in[:])
}

// softmaxRow computes a row of a Softmax call. Its memory is that of each, a block of biases, and
// the lanes of maxima and sums.
func softmaxRow(r row) {
	k := r.job.kernels
	lo, hi := r.job.problem.Visible.Range(r.b, r.i, r.job.cols)
	lanes, sums := r.lanes(), r.mem[2*tile.BlockKeys+k.Lanes:]
	m := vec.NegInf
	r.each(lo, hi, kernelKeys, func(x []float32, key, n int) {
		m = max(m, r.score(x, key, n))
	})
	if m == vec.NegInf { // all hidden, or NaN
		m = 0
	}
	clear(sums)
	r.each(lo, hi, kernelKeys, func(x []float32, _, n int) {
		tile.Fill(x[n:], vec.NegInf)
		k.Exp2Sum(x, m, sums)
	})
	sum := 0.0
	for _, y := range sums {
		sum += float64(y)
	}
	lse, inv := vec.RowLSE(m, sum, r.job.problem.Sink(r.h))
	r.each(lo, hi, kernelKeys, func(x []float32, key, n int) {
		k.ScaleMax(x, inv, lanes)
		if sum != sum { // NaN, except for hidden keys
			for c := range n {
				if r.job.scores.Hides(r.b, r.h, r.i, key+c) {
					x[c] = 0
				}
			}
		}
		if r.job.scores.Drops {
			r.job.scores.DropRow(&r.space.Draw, x, r.b, r.h, r.i, key)
		}
	})
	r.fill(0, lo, 0)
	r.fill(hi, r.job.cols, 0)
	if out := &r.job.x[1]; !out.IsZero() {
		out.F32[out.Index(r.b, r.h, r.i)] = lse
	}
}

// lanes returns memory for a vector.
func (r *row) lanes() []float32 { return r.mem[2*tile.BlockKeys:][:r.job.kernels.Lanes] }

// score turns n dot products, with the keys from key on, into scores in units of
// log2 e, and the elements of x after them into -Inf. It returns the largest.
func (r *row) score(x []float32, key, n int) float32 {
	k, sc := r.job.kernels, r.job.scores
	lanes, bias := r.lanes(), r.mem[tile.BlockKeys:2*tile.BlockKeys]
	m := k.ScaleMax(x, sc.Scale, lanes)
	mod := r.job.problem.ScoreMod
	if mod != nil {
		r.job.problem.Modify(mod.Go, x[:n], r.b, r.h, r.i, key)
		k.ScaleMax(x, sc.After, lanes)
	}
	if sc.Cap > 0 {
		sc.Softcap(r.space, x)
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
	if mod == nil && sc.Cap == 0 && !sc.Masked && !sc.Added && n == len(x) {
		return m
	}
	tile.Fill(x[n:], vec.NegInf)
	return k.ScaleMax(x, 1, lanes)
}

// each calls f with elements [lo, hi) of the row of scores, at most some at a time: n elements from key on, then
// unspecified ones up to a multiple of Lanes. The n elements that f leaves are written back to the row.
func (r *row) each(lo, hi, some int, f func(x []float32, key, n int)) {
	s, k := &r.job.x[0], r.job.kernels
	at, inPlace := s.Index(r.b, r.h, r.i), s.Stride[backend.Dim] == 1
	for key := lo; key < hi; {
		n := min(hi-key, some)
		if n >= k.Lanes && inPlace {
			n = n / k.Lanes * k.Lanes
			f(s.F32[at+key:at+key+n], key, n)
			key += n
			continue
		}
		n = min(n, tile.BlockKeys)
		x := r.mem[:tile.RoundUp(n, k.Lanes)]
		s.Load(k, x, n, r.b, r.h, r.i, 1, key, n)
		f(x, key, n)
		s.Store(k, x[:n], r.b, r.h, r.i, key)
		key += n
	}
}

// fill writes y to elements [lo, hi) of the row of scores.
func (r *row) fill(lo, hi int, y float32) {
	s := &r.job.x[0]
	for at := s.Index(r.b, r.h, r.i); lo < hi; lo++ {
		s.F32[at+lo*s.Stride[backend.Dim]] = y
	}
}

// scoresRow computes a row of a Scores call:
//
//	x = scale·x    x = f(x)    x = softcap·tanh(x/softcap)    x = x + bias    hidden: -Inf
func scoresRow(r row) {
	p, sc := r.job.problem, r.job.scores
	lo, hi := p.Visible.Range(r.b, r.i, r.job.cols)
	r.each(lo, hi, tile.BlockKeys, func(x []float32, key, n int) {
		x = x[:n]
		for c := range x {
			x[c] *= p.Scale
		}
		if p.ScoreMod != nil {
			p.Modify(p.ScoreMod.Go, x, r.b, r.h, r.i, key)
		}
		if p.Softcap > 0 {
			for c, y := range x {
				if y == vec.NegInf && p.ScoreMod != nil {
					continue
				}
				x[c] = p.Softcap * vec.Tanh(y/p.Softcap)
			}
		}
		if sc.Added {
			bias := r.mem[tile.BlockKeys:][:n]
			sc.AddedRow(r.space, bias, r.b, r.h, r.i, key)
			for c, y := range bias {
				if y == vec.NegInf {
					x[c] = vec.NegInf // not x+y: x may be NaN or +Inf
				} else {
					x[c] += backend.Bound(y, backend.MaxBias)
				}
			}
		}
		if sc.Masked {
			sc.MaskRow(r.space, x, r.b, r.h, r.i, key)
		}
	})
	r.fill(0, lo, vec.NegInf)
	r.fill(hi, r.job.cols, vec.NegInf)
}
