package cpu

import (
	"context"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/index"
)

// Index implements backend.Indexer: a task computes some rows of a batch, a block of keys at a time, and keeps the best
// keys of each row in a heap. Errors as for Attention.
func (be *Backend) Index(ctx context.Context, c *backend.Index) (lists backend.Tensor, err error) {
	in, shape := c.Operands(), c.Q.Shape()
	err = be.doPinned(ctx, "index", nil, in[:], func() error {
		lists, err = backend.AllocHost(backend.I32, backend.Shape{shape[backend.Batch], 1, shape[backend.Seq], c.TopK})
		if err != nil {
			return err
		}
		keys, err := lists.Int32s()
		if err != nil {
			return err
		}
		var j index.Job
		threads := be.threads()
		tasks, floats := j.Set(be.kernels, keys, c, threads)
		return sharedPool.Run(ctx, &j, floats, tasks, threads)
	})
	if err != nil {
		return backend.Tensor{}, err
	}
	return lists, nil
}
