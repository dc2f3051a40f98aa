package backend

import "context"

// Copier is implemented by backends that copy between tensors in their memory, as a cache of
// keys and values needs.
type Copier interface {
	// Copy writes dst = src, element by element, rounded to dst's dtype:
	//
	//	dst, src [B, H, S, D] of the same shape
	//
	// Both are F32, F16, BF16 or Q8 (see [QuantiseQ8]), each independently. src may be
	// broadcast by strides of zero. dst and src must not overlap.
	Copy(ctx context.Context, dst, src Tensor) error
}

// BatchCopier is implemented by backends whose several copies cost little more than one.
// [CopyBatch] uses it.
type BatchCopier interface {
	// CopyBatch writes dst[i] = src[i] for each i in order, as Copy does: a copy sees
	// the results of the earlier ones. After an error any of them may be complete.
	CopyBatch(ctx context.Context, dst, src []Tensor) error
}

// CopyBatch copies src[i] to dst[i] in order, for as many as dst and src both have.
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
