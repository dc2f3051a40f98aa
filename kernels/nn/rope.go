package nn

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/internal/op"
	"github.com/seed90331342/attn/kernels/internal/steps"
)

// RoPE is a rotary position embedding (Su et al. 2021, RoFormer). In a row at position t,
// pair i = (a, b) of its first R elements is rotated by the angle t·θ_i:
//
//	θ_i = Base^(-2i/R)    i = 0 .. R/2-1
//	y_a = x_a·cos(t·θ_i) - x_b·sin(t·θ_i)    y_b = x_a·sin(t·θ_i) + x_b·cos(t·θ_i)
//
// The product of a rotated query and a rotated key depends only on the distance between
// their positions. The zero value is Llama's embedding.
type RoPE struct {
	// Base is the base of the angles; 0 means 10000.
	Base float64
	// Dim is R, the number of elements to rotate: even, at most the head size; 0 means all. The others are unchanged
	// (partial rotary embedding, as in GPT-J, GPT-NeoX and Phi).
	Dim int
	// Interleaved means that pair i is (2i, 2i+1), as in RoFormer and GPT-J. Otherwise it
	// is (i, i+R/2), as in GPT-NeoX and Llama. Weights are trained for one of the two.
	Interleaved bool
	// Scaling, unless nil, changes the frequencies θ_i.
	Scaling *Scaling
	// Sections, unless nil, are the numbers of pairs that take their position from each axis, such as time, height and
	// width of an image (Wang et al. 2024, Qwen2-VL). Their sum is the number of pairs. A token whose positions are
	// equal on all axes, as those of text are, rotates as without Sections.
	Sections []int
	// SectionsInterleaved means that pair i of n axes takes axis i%n while that axis has pairs
	// left, and axis 0 otherwise (Qwen3-VL). Otherwise the pairs of an axis are adjacent.
	SectionsInterleaved bool
}

// Positions returns the positions from, from+1, .. of n rows, the same in each batch, for
// [RoPE.Angles]. It returns ErrOption when n is negative, and ErrMemory.
func Positions(from, n int) ([][]int, error) {
	if n < 0 {
		return nil, fmt.Errorf("positions: n is %d, it must be at least 0: %w", n, kernels.ErrOption)
	}
	positions, err := op.Positions([]int{from}, n)
	if err != nil {
		return nil, fmt.Errorf("positions of %d rows: %w", n, err)
	}
	return positions, nil
}

// Angles returns the rotation angles of rows at positions, for the caller to Release:
//
//	positions [B or 1][S]    Cos, Sin [B or 1, 1, S, R/2]
//
// headDim is the head size of the rotated tensor. The host computes the angles in float64 and rounds their cosines and
// sines to float32, multiplied by the factor of the Scaling. Every backend therefore rotates by the same numbers, at
// position 1,000,000 as exactly as at 1. With Sections the position of a row is the same on each axis.
//
// Errors: ErrOption for a base, Dim, Scaling, Sections or position out of range, ErrShape for
// no positions or lists of different lengths, and the backend's.
func (r *RoPE) Angles(ctx context.Context, dev *kernels.Device, headDim int, positions [][]int) (a kernels.Angles, err error) {
	defer op.Annotate(&err, "rope")
	return r.angles(ctx, dev, headDim, [][][]int{positions})
}

// AnglesOfAxes is Angles for rows with a position on each axis of the Sections:
//
//	positions [axes][B or 1][S]    Cos, Sin [B or 1, 1, S, R/2]
//
// Errors as for Angles, and ErrShape for positions on another number of axes.
func (r *RoPE) AnglesOfAxes(ctx context.Context, dev *kernels.Device, headDim int, positions [][][]int) (a kernels.Angles, err error) {
	defer op.Annotate(&err, "rope")
	if r != nil && (len(r.Sections) == 0 || len(positions) != len(r.Sections)) {
		return a, fmt.Errorf("there are positions of %d axes, Sections has %d: give a list for each section: %w", len(positions), len(r.Sections), kernels.ErrShape)
	}
	return r.angles(ctx, dev, headDim, positions)
}

// anglesOf returns the angles of the queries and keys of a layer: those of opt, or new ones that the
// steps own. Positions that are nil continue those of a cache. A nil r has no angles.
func (r *RoPE) anglesOf(b *steps.Steps, q, k kernels.Tensor, opt *MultiHeadOptions) (angles [2]kernels.Angles) {
	of := func(given kernels.Angles, t kernels.Tensor, opt *MultiHeadOptions) kernels.Angles {
		if given != (kernels.Angles{}) || r == nil || b.Err != nil {
			return given
		}
		positions, err := opt.positions(t.Shape()[kernels.Seq])
		if err == nil {
			given, err = r.Angles(b.Ctx, b.Dev, t.Shape()[kernels.Dim], positions)
		}
		b.Err = err
		b.Own(given.Cos, given.Sin)
		return given
	}
	angles[0] = of(opt.Angles, q, opt)
	if angles[1] = angles[0]; !opt.Memory.IsZero() {
		angles[1] = of(opt.MemoryAngles, k, &MultiHeadOptions{})
	}
	if none := (kernels.Angles{}); b.Err == nil && (angles[0] == none) != (angles[1] == none) {
		b.Err = fmt.Errorf("only one of Angles and MemoryAngles is set: give both or neither: %w", kernels.ErrOption)
	}
	return angles
}

// angles returns the angles of positions on each axis, or on all of them.
func (r *RoPE) angles(ctx context.Context, dev *kernels.Device, headDim int, axes [][][]int) (a kernels.Angles, err error) {
	theta, axisOf, err := r.frequencies(headDim)
	if err != nil {
		return a, err
	}
	batches := len(axes[0])
	if batches == 0 {
		return a, fmt.Errorf("there are no positions, give the list of all batches or one for each: %w", kernels.ErrShape)
	}
	seq, pairs := len(axes[0][0]), len(theta)
	for axis, positions := range axes {
		if len(positions) != batches {
			return a, fmt.Errorf("axis %d has positions of %d batches, axis 0 has %d: they must be equally many: %w", axis, len(positions), batches, kernels.ErrShape)
		}
		for b, ids := range positions {
			if len(ids) != seq {
				return a, fmt.Errorf("batch %d has %d positions, batch 0 has %d: they must be equally many, on each axis too: %w", b, len(ids), seq, kernels.ErrShape)
			}
			for i, t := range ids {
				if t < -op.MaxLength || t > op.MaxLength {
					return a, fmt.Errorf("position %d of batch %d is %d, it must lie within ±%d: %w", i, b, t, op.MaxLength, kernels.ErrOption)
				}
			}
		}
	}
	shape := kernels.Shape{batches, 1, seq, pairs}
	if shape.Elements() < 0 {
		return a, fmt.Errorf("%d batches of %d positions for %d pairs are too many: %w", batches, seq, pairs, kernels.ErrShape)
	}
	if err := kernels.CheckMemory(8 * int64(shape.Elements())); err != nil {
		return a, err
	}
	cos, sin := make([]float32, shape.Elements()), make([]float32, shape.Elements())
	factor, at := r.Scaling.attentionFactor(), 0
	for b := range batches {
		if ctx != nil && ctx.Err() != nil { // FromFloat32 refuses nil
			return a, ctx.Err()
		}
		for i := range seq {
			for pair, f := range theta {
				s, c := math.Sincos(float64(axes[min(axisOf[pair], len(axes)-1)][b][i]) * f)
				cos[at], sin[at] = float32(factor*c), float32(factor*s)
				at++
			}
		}
	}
	a.Interleaved = r.Interleaved
	if a.Cos, err = dev.FromFloat32(ctx, kernels.F32, cos, shape); err == nil {
		a.Sin, err = dev.FromFloat32(ctx, kernels.F32, sin, shape)
	}
	if err != nil {
		a.Release()
		return kernels.Angles{}, err
	}
	return a, nil
}

// axes returns the axis of each pair.
func (r *RoPE) axes(pairs int) ([]int, error) {
	axes, left := make([]int, pairs), slices.Clone(r.Sections)
	for i := range axes {
		if len(left) == 0 {
			break
		}
		axis := i % len(left)
		if !r.SectionsInterleaved {
			axis = max(0, slices.IndexFunc(left, func(n int) bool { return n > 0 }))
		}
		if left[axis] <= 0 {
			axis = 0
		}
		axes[i] = axis
		left[axis]--
	}
	if r.SectionsInterleaved && len(left) == 0 || slices.ContainsFunc(left, func(n int) bool { return n != 0 }) {
		return nil, fmt.Errorf("sections are %v (interleaved: %v), their sum must be the %d pairs: %w", r.Sections, r.SectionsInterleaved, pairs, kernels.ErrOption)
	}
	return axes, nil
}

// frequencies returns the frequency and the axis of each pair.
func (r *RoPE) frequencies(headDim int) (theta []float64, axes []int, err error) {
	if r == nil {
		return nil, nil, fmt.Errorf("the *RoPE is nil: %w", kernels.ErrOption)
	}
	base, dim := cmp.Or(r.Base, 10000), cmp.Or(r.Dim, headDim)
	if !(base > 0) || !finite(base) {
		return nil, nil, fmt.Errorf("base is %v, it must be a positive number: %w", r.Base, kernels.ErrOption)
	}
	if dim < 2 || dim%2 != 0 || dim > headDim {
		return nil, nil, fmt.Errorf("dim is %d, it must be even and 2 to the head size %d: %w", dim, headDim, kernels.ErrOption)
	}
	rotated := dim / 2
	if r.Scaling != nil && r.Scaling.Kind == ScalingProportional {
		if dim = headDim; dim%2 != 0 {
			return nil, nil, fmt.Errorf("head size is %d, proportional scaling needs an even one: %w", dim, kernels.ErrOption)
		}
	}
	theta = make([]float64, dim/2)
	for i := range rotated {
		theta[i] = math.Pow(base, -2*float64(i)/float64(dim))
	}
	if r.Scaling != nil {
		if err := r.Scaling.scale(theta, base); err != nil {
			return nil, nil, err
		}
	}
	if slices.ContainsFunc(theta, func(f float64) bool { return !finite(f * op.MaxLength) }) {
		return nil, nil, fmt.Errorf("base is %v, at which angles overflow: %w", r.Base, kernels.ErrOption)
	}
	axes, err = r.axes(len(theta))
	return theta, axes, err
}

func finite(x float64) bool { return !math.IsNaN(x) && !math.IsInf(x, 0) }
