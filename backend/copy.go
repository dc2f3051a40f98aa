package backend

import "context"

// Copier is implemented by backends that copy between tensors in their own memory,
// as a cache of keys and values does when some are appended.
type Copier interface {
	// Copy writes dst = src, element by element, rounded to dst's type:
	//
	//	dst, src [B, H, S, D] of the same shape
	//
	// Both are F32, F16, BF16 or Q8 (see [QuantiseQ8]), each on its own. src is
	// often broadcast by strides of zero. dst and src must not overlap.
	Copy(ctx context.Context, dst, src Tensor) error
}
