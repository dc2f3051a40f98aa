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

// BatchCopier is implemented by backends that make several copies for little more than
// what one takes. Ask [CopyBatch], which falls back on one after the other.
type BatchCopier interface {
	// CopyBatch writes dst[i] = src[i] for each i in order, as Copy does: a copy sees
	// what those before it wrote. After an error any of them may have been made.
	CopyBatch(ctx context.Context, dst, src []Tensor) error
}

// CopyBatch makes copies in order, as many as dst and src both have, at once where c
// can.
func CopyBatch(ctx context.Context, c Copier, dst, src []Tensor) error {
	n := min(len(dst), len(src))
	if b, ok := c.(BatchCopier); ok && n > 1 {
		return b.CopyBatch(ctx, dst[:n], src[:n])
	}
	for i := range n {
		if err := c.Copy(ctx, dst[i], src[i]); err != nil {
			return err
		}
	}
	return nil
}
