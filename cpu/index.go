package cpu

import (
	"context"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/index"
)

// Index implements backend.Indexer: a task computes some rows of a batch, a block of keys at a time, and keeps the best
// keys of each row in a heap. Errors as for Attention.
func (be *Backend) Index(ctx context.Context, keys []int32, c *backend.Index) error {
	in := c.Operands()
	return be.doPinned(ctx, "index", nil, in[:], func() error {
		var j index.Job
		threads := be.threads()
		tasks, floats := j.Set(be.kernels, keys, c, threads)
		return workers.Run(ctx, &j, floats, tasks, threads)
	})
}
