package backend

import "context"

// Batcher is implemented by backends that run several attention calls together: packed
// sequences of different lengths, documents in one batch. [AttentionBatch] uses it.
type Batcher interface {
	// AttentionBatch computes all calls, each with the bits of a call alone, and returns
	// when all outputs are complete. Calls may read the same memory and may write to
	// different elements of one memory, also interleaved ones. The caller ensures that
	// no call writes elements that another call reads or writes. After an error the
	// contents of all outputs are unspecified, and the error is no Interrupted. Resume
	// is ignored.
	AttentionBatch(ctx context.Context, calls []*Call) error
}

// AttentionBatch runs calls on be: together if it is a [Batcher], otherwise one after the
// other.
func AttentionBatch(ctx context.Context, be Backend, calls []*Call) error {
	if b, ok := be.(Batcher); ok && len(calls) > 1 {
		return b.AttentionBatch(ctx, calls)
	}
	for _, c := range calls {
		if err := be.Attention(ctx, c); err != nil {
			return err
		}
	}
	return nil
}
