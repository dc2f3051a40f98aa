package cpu

import (
	"context"
	"fmt"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/pool"
)

// do runs f, a call named what, unless the backend is closed or the context has ended. It adds the name to errors.
func (be *Backend) do(ctx context.Context, what string, f func() error) (err error) {
	if be.err != nil {
		return be.err
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("cpu: %s: %w", what, err)
		}
	}()
	if err := ctx.Err(); err != nil {
		return err
	}
	if !be.running.TryRLock() {
		return backend.ErrClosed
	}
	defer be.running.RUnlock()
	defer backend.Recover(&err)
	return f()
}

// result is do for a call with a result.
func result[T any](ctx context.Context, be *Backend, what string, f func() (T, error)) (x T, err error) {
	err = be.do(ctx, what, func() (err error) {
		x, err = f()
		return err
	})
	return x, err
}

// doPinned is do for a call with operands, which it pins.
func (be *Backend) doPinned(ctx context.Context, what string, out, in []backend.Operand, f func() error) error {
	return be.do(ctx, what, func() error {
		var pinned backend.Pinned
		if err := pinned.Pin(nil, where, out, in); err != nil {
			return err
		}
		defer pinned.Unpin()
		return f()
	})
}

// sharedPool computes the calls of all backends of the process. Each open backend is one of its users.
var sharedPool = pool.New()
