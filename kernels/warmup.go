package kernels

import (
	"context"
	"fmt"

	"github.com/seed90331342/attn/backend"
)

// Warmup compiles what [Attention] with the same arguments needs on be, without
// running it, so that the first call takes no longer than the next. q, k and v need
// no memory ([backend.Meta]); their head sizes, types and strides and the options
// count, while other lengths usually need the same code. On backends that compile
// nothing ([backend.Warmer] says which do) it only validates. It returns the
// validation errors of Attention, ErrUnsupported, ErrDeviceLost and context errors.
func Warmup(ctx context.Context, be backend.Backend, q, k, v backend.Tensor, opt Options) error {
	_, calls, _, err := planned(q, k, v, &opt)
	if err != nil {
		return fmt.Errorf("warmup: %w", err)
	}
	return warmUp(ctx, be, calls, opt.Weights)
}

// warmUp compiles what calls need.
func warmUp(ctx context.Context, be backend.Backend, calls []*backend.Call, staged bool) error {
	w, ok := be.(backend.Warmer)
	if !ok {
		return ctx.Err()
	}
	for _, c := range calls {
		if err := w.Warmup(ctx, c, staged); err != nil {
			return fmt.Errorf("warmup: %w", err)
		}
	}
	return nil
}
