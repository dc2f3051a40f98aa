package backend

import "context"

// Rotator is implemented by backends that turn pairs of elements by an angle, as
// rotary position embedding does (Su et al. 2021, RoFormer), in place or from one
// tensor to another.
type Rotator interface {
	// Rotate turns R/2 pairs (a, b) of elements of each row by angles that are given
	// as their cosines and sines, and takes the elements from R on as they are:
	//
	//	y_a = x_a·cos_i - x_b·sin_i    y_b = x_a·sin_i + x_b·cos_i
	//
	//	y, x [B, H, S, D]    cos, sin [B, H, S, R/2] F32    R even, 2 to D
	//
	// Pair i is (i, i + R/2), or with interleaved (2i, 2i+1). y and x are F32, F16
	// or BF16 each on its own. y may be x, the same view: then it is done in place.
	// cos and sin are usually broadcast over the heads by strides of zero.
	Rotate(ctx context.Context, y, x, cos, sin Tensor, interleaved bool) error
}
