package kernels

import (
	"context"
	"fmt"
	"math"

	"github.com/seed90331342/attn/backend"
)

// RoPE is a rotary position embedding (Su et al. 2021, RoFormer). A row at position
// t has its first R elements turned in pairs (a, b), pair i by the angle t·θ_i:
//
//	θ_i = Base^(-2i/R)    i = 0 .. R/2-1
//	y_a = x_a·cos(t·θ_i) - x_b·sin(t·θ_i)    y_b = x_a·sin(t·θ_i) + x_b·cos(t·θ_i)
//
// so that a product of a turned query and a turned key depends on the distance of
// their positions alone. The zero value is Llama's.
type RoPE struct {
	// Base is that of the angles; 0 means 10000.
	Base float64
	// Dim is R, how many elements of a row turn: even, at most the head size; 0 means
	// all of them. The others stay as they are (partial rotary embedding, as in
	// GPT-J, GPT-NeoX and Phi).
	Dim int
	// Interleaved says that pair i is (2i, 2i+1), as in RoFormer and GPT-J. Otherwise
	// it is (i, i + R/2), as in GPT-NeoX and Llama. Weights are trained for one of
	// the two.
	Interleaved bool
}

// Angles are the cosines and sines by which [Rotate] turns pairs, in a backend's
// memory. One may serve the queries and keys of every layer that sees the same
// positions. Those of another embedding than [RoPE] can be put together by hand.
type Angles struct {
	// Cos and Sin are [B, H, S, R/2] F32, the first three lengths those of what is
	// turned or 1.
	Cos, Sin backend.Tensor
	// Interleaved is as in RoPE.
	Interleaved bool
}

// Release gives the memory of a back.
func (a Angles) Release() {
	a.Cos.Release()
	a.Sin.Release()
}

// Positions returns the positions from, from+1, .. of n rows, the same in each
// batch: what [RoPE.Angles] takes.
func Positions(from, n int) [][]int {
	ids := make([]int, max(n, 0))
	for i := range ids {
		ids[i] = from + i
	}
	return [][]int{ids}
}

// Angles returns the angles of rows at positions, for the caller to Release:
//
//	positions [B or 1][S]    Cos, Sin [B or 1, 1, S, R/2]
//
// headDim is the head size of what is turned. The angles are made in float64 on the
// host and rounded to float32 as cosines and sines, so that every backend turns by the
// same numbers, and as exactly at position 1,000,000 as at 1.
//
// Errors: ErrOption for a base, Dim or position out of range, ErrShape for positions
// that are none or of different counts, and the backend's.
func (r RoPE) Angles(ctx context.Context, be backend.Backend, headDim int, positions [][]int) (Angles, error) {
	a, err := r.angles(ctx, be, headDim, positions)
	if err != nil {
		return Angles{}, fmt.Errorf("rope: %w", err)
	}
	return a, nil
}

func (r RoPE) angles(ctx context.Context, be backend.Backend, headDim int, positions [][]int) (Angles, error) {
	theta, err := r.frequencies(headDim)
	if err != nil {
		return Angles{}, err
	}
	if len(positions) == 0 || len(positions[0]) == 0 {
		return Angles{}, fmt.Errorf("there are no positions, give one for each row: %w", backend.ErrShape)
	}
	seq, pairs := len(positions[0]), len(theta)
	shape := backend.Shape{len(positions), 1, seq, pairs}
	if shape.Elements() < 0 {
		return Angles{}, fmt.Errorf("%d batches of %d positions for %d pairs are too many: %w", len(positions), seq, pairs, backend.ErrShape)
	}
	cos, sin := make([]float32, shape.Elements()), make([]float32, shape.Elements())
	at := 0
	for b, ids := range positions {
		if len(ids) != seq {
			return Angles{}, fmt.Errorf("batch %d has %d positions, batch 0 has %d: they must be as many: %w", b, len(ids), seq, backend.ErrShape)
		}
		if err := ctx.Err(); err != nil {
			return Angles{}, err
		}
		for i, t := range ids {
			if t < -maxOffset || t > maxOffset {
				return Angles{}, fmt.Errorf("position %d of batch %d is %d, it must lie within ±%d: %w", i, b, t, maxOffset, backend.ErrOption)
			}
			for _, f := range theta {
				s, c := math.Sincos(float64(t) * f)
				cos[at], sin[at] = float32(c), float32(s)
				at++
			}
		}
	}
	a := Angles{Interleaved: r.Interleaved}
	if a.Cos, err = FromFloat32(ctx, be, backend.F32, cos, shape); err != nil {
		return Angles{}, err
	}
	if a.Sin, err = FromFloat32(ctx, be, backend.F32, sin, shape); err != nil {
		a.Release()
		return Angles{}, err
	}
	return a, nil
}

// frequencies returns θ for each pair.
func (r RoPE) frequencies(headDim int) ([]float64, error) {
	base, dim := r.Base, r.Dim
	if base == 0 {
		base = 10000
	}
	if !(base > 0) || !finite(base) {
		return nil, fmt.Errorf("base is %v, it must be a positive number: %w", r.Base, backend.ErrOption)
	}
	if dim == 0 {
		dim = headDim
	}
	if dim < 2 || dim%2 != 0 || dim > headDim {
		return nil, fmt.Errorf("%d of %d elements of a head turn, the number must be even, 2 to the head size (set RoPE.Dim): %w", dim, headDim, backend.ErrOption)
	}
	theta := make([]float64, dim/2)
	for i := range theta {
		theta[i] = math.Pow(base, -2*float64(i)/float64(dim))
		if !finite(theta[i] * maxOffset) {
			return nil, fmt.Errorf("base is %v, with which angles overflow: %w", r.Base, backend.ErrOption)
		}
	}
	return theta, nil
}

// Rotate turns the pairs of x's rows by a into y, and takes the other elements as
// they are:
//
//	y, x [B, H, S, D] F32, F16 or BF16 each on its own    R <= D, see [RoPE]
//
// y may be x itself, the same view; no other overlap. Any strides.
//
// Errors: ErrShape and ErrDType name the operand, ErrUnsupported when the backend is
// no [backend.Rotator], and the backend's.
func Rotate(ctx context.Context, be backend.Backend, y, x backend.Tensor, a Angles) error {
	if err := rotate(ctx, be, y, x, a); err != nil {
		return fmt.Errorf("rotate: %w", err)
	}
	return nil
}

func rotate(ctx context.Context, be backend.Backend, y, x backend.Tensor, a Angles) error {
	r, ok := be.(backend.Rotator)
	if !ok {
		return fmt.Errorf("%s: %w", be.Info().Name, backend.ErrUnsupported)
	}
	if err := floats(backend.Operand{Name: "x", Tensor: x}, backend.Operand{Name: "cos", Tensor: a.Cos}); err != nil {
		return err
	}
	shape := x.Shape()
	if err := expect("y", y, shape, "shape of x", backend.F32, backend.F16, backend.BF16); err != nil {
		return err
	}
	angles := shape
	angles[backend.Dim] = a.Cos.Shape()[backend.Dim]
	if 2*angles[backend.Dim] > shape[backend.Dim] {
		return fmt.Errorf("cos %v turns %d elements, rows of x %v have %d: %w", a.Cos.Shape(), 2*angles[backend.Dim], shape, shape[backend.Dim], backend.ErrShape)
	}
	var parts [2]backend.Tensor
	for i, o := range []backend.Operand{{Name: "cos", Tensor: a.Cos}, {Name: "sin", Tensor: a.Sin}} {
		if o.Tensor.DType() != backend.F32 {
			return fmt.Errorf("%s is %v, angles are f32: %w", o.Name, o.Tensor.DType(), backend.ErrDType)
		}
		// A pair's own angle is never broadcast.
		if got := o.Tensor.Shape()[backend.Dim]; got != angles[backend.Dim] {
			return fmt.Errorf("%s has %d angles a row, cos has %d: %w", o.Name, got, angles[backend.Dim], backend.ErrShape)
		}
		var err error
		if parts[i], err = o.Tensor.Broadcast(angles); err != nil {
			return fmt.Errorf("%s: %w", o.Name, err)
		}
	}
	return r.Rotate(ctx, y, x, parts[0], parts[1], a.Interleaved)
}
