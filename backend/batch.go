package backend

import "context"

// Batcher is implemented by backends that run several attention calls side by side:
// packed sequences of many lengths, documents in one batch. Ask [AttentionBatch],
// which falls back on one call after the other.
type Batcher interface {
	// AttentionBatch computes all calls, with the bits that each gives alone, and
	// returns when all outputs are there. Calls may read the same memory and
	// write to different parts of one, rows of it that lie between those of others
	// included; that no call writes what another one reads or writes is for the
	// caller to see to (package kernels does). After an error the contents of all
	// outputs are unspecified, and there is no Interrupted to go on from. Resume is
	// not looked at.
	AttentionBatch(ctx context.Context, calls []*Call) error
}

// AttentionBatch runs calls on be side by side where it can, one after the other
// where it cannot, as [Batcher] says.
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
