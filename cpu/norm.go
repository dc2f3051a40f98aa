package cpu

import (
	"context"
	"math"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/tile"
)

// The operands of rows of norms and gates: outputs, the input that the first of them may replace, weights or
// gates, and x of a backward pass.
const (
	rowOut = iota
	rowTerms
	rowIn
	rowWeights
	rowForward
	rowOperands
)

type (
	names   [rowOperands]string
	tensors [rowOperands]backend.Tensor
)

// Normalise implements backend.Normaliser, with sums in float64. Errors as for Attention.
func (be *Backend) Normalise(ctx context.Context, y, x, w backend.Tensor, n backend.Norm) error {
	return be.rowwise(ctx, "normalise", normaliseRow, n, 0, names{"y", "", "x", "w"}, tensors{y, {}, x, w})
}

// NormaliseBackward implements backend.Normaliser, with sums in float64. Errors as for Attention.
func (be *Backend) NormaliseBackward(ctx context.Context, dx, dw, dy, x, w backend.Tensor, n backend.Norm) error {
	return be.rowwise(ctx, "normalise backward", normaliseBackwardRow, n, 0, names{"dx", "dw", "dy", "w", "x"}, tensors{dx, dw, dy, w, x})
}

// Gate implements backend.Gater. Errors as for Attention.
func (be *Backend) Gate(ctx context.Context, y, x, gate backend.Tensor, f backend.Activation) error {
	return be.rowwise(ctx, "gate", gateRow, backend.Norm{}, f, names{"y", "", "x", "gate"}, tensors{y, {}, x, gate})
}

// GateBackward implements backend.Gater. Errors as for Attention.
func (be *Backend) GateBackward(ctx context.Context, dx, dgate, dy, x, gate backend.Tensor, f backend.Activation) error {
	return be.rowwise(ctx, "gate backward", gateBackwardRow, backend.Norm{}, f, names{"dx", "dgate", "dy", "gate", "x"}, tensors{dx, dgate, dy, gate, x})
}

// rowwise calls compute for each row, with memory for three rows of whole vectors and a vector.
func (be *Backend) rowwise(ctx context.Context, name string, compute func(r row), n backend.Norm, f backend.Activation, as names, x tensors) error {
	return be.do(ctx, name, func() error {
		shape, lanes := x[rowOut].Shape(), be.kernels.Lanes
		j := be.newRowJob(shape, 3*tile.RoundUp(shape[backend.Dim], lanes)+lanes, compute)
		j.norm, j.activation = n, f
		x[rowIn] = unlessSame(x[rowIn], x[rowOut])
		var list [rowOperands]backend.Operand
		for i := range list {
			list[i] = backend.Operand{Name: as[i], Tensor: x[i]}
		}
		return j.run(ctx, list[:rowIn], list[rowIn:])
	})
}

// part returns memory i for a row. Its capacity is whole vectors.
func (r *row) part(i int) []float32 {
	ld := tile.RoundUp(r.job.cols, r.job.kernels.Lanes)
	return r.mem[i*ld:][:r.job.cols:ld]
}

// loaded returns the row of operand n in memory i, with zeros up to whole vectors.
func (r *row) loaded(i, n int) []float32 {
	x := r.part(i)
	r.job.x[r.source(n)].Load(r.job.kernels, x[:cap(x)], cap(x), r.b, r.h, r.i, 1, 0, len(x))
	return x
}

// scale multiplies a part by c.
func (r *row) scale(x []float32, c float32) {
	r.job.kernels.ScaleMax(x[:cap(x)], c, r.mem[len(r.mem)-r.job.kernels.Lanes:])
}

// dot returns the sum of the products of loaded rows. Each product is exact in float64.
func dot(x, y []float32) float64 {
	var a, b, c, d float64
	x = x[:cap(x)]
	y = y[:len(x)]
	for i := 3; i < len(x); i += 4 {
		a += float64(x[i-3]) * float64(y[i-3])
		b += float64(x[i-2]) * float64(y[i-2])
		c += float64(x[i-1]) * float64(y[i-1])
		d += float64(x[i]) * float64(y[i])
	}
	return (a + b) + (c + d)
}

// inverse returns r = 1/sqrt(mean x² + ε).
func (r *row) inverse(x []float32) float64 {
	return 1 / math.Sqrt(dot(x, x)/float64(len(x))+r.job.norm.Epsilon)
}

// shrink multiplies x by the inverse of a row. One below 2^-126 would have few bits in float32.
func (r *row) shrink(x []float32, inverse float64) {
	if inverse < 0x1p-126 {
		r.scale(x, 0x1p-8)
		inverse *= 0x1p8
	}
	r.scale(x, float32(inverse))
}

// weigh multiplies x by the factors of the row, which it loads into memory i.
func (r *row) weigh(x []float32, i int) {
	if r.job.x[rowWeights].IsZero() {
		return
	}
	one := float32(0)
	if r.job.norm.PlusOne {
		one = 1
	}
	for c, w := range r.loaded(i, rowWeights) {
		x[c] *= w + one
	}
}

func normaliseRow(r row) {
	x := r.loaded(0, rowIn)
	r.shrink(x, r.inverse(x))
	r.weigh(x, 1)
	r.store(x)
}

func normaliseBackwardRow(r row) {
	dy, x := r.loaded(0, rowIn), r.loaded(1, rowForward)
	inverse := r.inverse(x)
	r.shrink(x, inverse)
	if terms := &r.job.x[rowTerms]; !terms.IsZero() {
		dw := r.part(2)
		for c := range dw {
			dw[c] = dy[c] * x[c]
		}
		terms.Store(r.job.kernels, dw, r.b, r.h, r.i, 0)
	}
	r.weigh(dy, 2)
	mean := float32(dot(dy, x) / float64(len(x)))
	for c := range dy {
		dy[c] -= float32(x[c] * mean)
	}
	r.shrink(dy, inverse)
	r.store(dy)
}

// logistic returns σ(g) and 1 - σ(g) from e = exp(-g). Neither cancels:
//
//	σ = 1/(1+e), or 0 where that is below 2^-125    1 - σ = e·σ
func logistic(e float32) (s, rest float32) {
	s = 1 / (1 + e)
	rest = e * s
	if e > 0x1p125 {
		s = 0
	}
	return s, rest
}

// activate returns f(g) and f'(g) of the gates in memory 1 and 2, without products of 0 and infinity. Softplus is
//
//	max(g, 0) + log(1 + exp -|g|) = max(g, 0) + 2·artanh(z) = max(g, 0) + 2·(z + z³/3 + z⁵/5 + ..)
//
// with z = a/(1+b) <= 1/3, where a is the lesser of σ and 1 - σ, and b the other. The first term left out is below 2^-26 of it.
func (r *row) activate() (f, slope []float32) {
	f, slope = r.loaded(1, rowWeights), r.part(2)
	for c, g := range f {
		slope[c] = max(g, -87) // an e of 2^125.5, and not an infinite one
	}
	r.scale(slope, -math.Log2E)
	r.job.kernels.Exp2(slope[:cap(slope)], 0)
	switch r.job.activation {
	case backend.Sigmoid:
		for c, e := range slope {
			s, rest := logistic(e)
			f[c], slope[c] = s, s*rest
		}
	case backend.SiLU:
		for c, e := range slope {
			s, rest := logistic(e)
			y := max(f[c], -math.MaxFloat32) * s
			f[c], slope[c] = y, s+float32(min(y, math.MaxFloat32)*rest)
		}
	case backend.Softplus:
		for c, e := range slope {
			s, rest := logistic(e)
			z := min(s, rest) / (1 + max(s, rest))
			t := z * z
			f[c] = max(f[c], 0) + 2*z*(1+t*(1./3+t*(1./5+t*(1./7+t*(1./9+t*(1./11+t*(1./13)))))))
			slope[c] = s
		}
	default:
		for c := range slope {
			slope[c] = 1
		}
	}
	return f, slope
}

func gateRow(r row) {
	x := r.loaded(0, rowIn)
	f, _ := r.activate()
	for c := range x {
		x[c] *= f[c]
	}
	r.store(x)
}

func gateBackwardRow(r row) {
	dy := r.loaded(0, rowIn)
	f, slope := r.activate()
	for c, v := range dy {
		dy[c] *= f[c]
		slope[c] *= v
	}
	x := r.loaded(1, rowForward)
	for c := range x {
		x[c] *= slope[c]
	}
	r.store(dy)
	r.job.x[rowTerms].Store(r.job.kernels, x, r.b, r.h, r.i, 0)
}
