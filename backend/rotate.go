package backend

import "context"

// Rotator is implemented by backends that rotate pairs of elements, as rotary position
// embedding does (Su et al. 2021, RoFormer), in place or from one tensor to another.
type Rotator interface {
	// Rotate rotates R/2 pairs (a, b) of elements of each row by angles, given as
	// cosines and sines, and copies the elements from R on:
	//
	//	y_a = x_a·cos_i - x_b·sin_i    y_b = x_a·sin_i + x_b·cos_i
	//
	//	y, x [B, H, S, D]    cos, sin [B, H, S, R/2] F32    R even, 2 to D
	//
	// Pair i is (i, i + R/2) or, if interleaved, (2i, 2i+1). y and x are F32, F16 or
	// BF16, each independently. y may be x itself, the same view. cos and sin are
	// usually broadcast over the heads by strides of zero.
	Rotate(ctx context.Context, y, x, cos, sin Tensor, interleaved bool) error
}
