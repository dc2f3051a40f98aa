package bench

import (
	"context"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
)

// call runs the case's variant once.
func (b *bencher) call(ctx context.Context) error {
	op := &b.op
	switch b.c.Variant {
	case QK:
		return b.be.QK(ctx, op.w, op.q, op.k)
	case Softmax:
		return b.softmax(ctx)
	case PV:
		return b.be.PV(ctx, op.o, op.w, op.v)
	default:
		return kernels.AttentionInto(ctx, b.be, op.result(), op.q, op.k, op.v, b.c.options(op.bias))
	}
}

// softmax runs the second stage in place.
func (b *bencher) softmax(ctx context.Context) error {
	opt := b.c.options(b.op.bias)
	opt.Scale = new(b.c.scale())
	return kernels.Softmax(ctx, b.be, b.op.w, backend.Tensor{}, opt)
}

// before puts in place what the variant's first call takes from the stage before.
func (b *bencher) before(ctx context.Context) error {
	switch b.c.Variant {
	case Softmax:
		return b.be.QK(ctx, b.op.w, b.op.q, b.op.k)
	case PV:
		if err := b.be.QK(ctx, b.op.w, b.op.q, b.op.k); err != nil {
			return err
		}
		return b.softmax(ctx)
	}
	return nil
}

// complete computes of the attention call what the variant's last call does not, so
// that all of it can be checked. A softmax that was repeated in place starts anew.
func (b *bencher) complete(ctx context.Context) error {
	op := &b.op
	switch b.c.Variant {
	case Softmax:
		if err := b.be.QK(ctx, op.w, op.q, op.k); err != nil {
			return err
		}
		if err := b.softmax(ctx); err != nil {
			return err
		}
	case QK:
		if err := b.softmax(ctx); err != nil {
			return err
		}
	default:
		return nil
	}
	return b.be.PV(ctx, op.o, op.w, op.v)
}
