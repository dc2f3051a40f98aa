package cpu

import (
	"context"
	"sync"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/linear"
)

// linearJobs and convJobs hold calls, so that a step of decoding does not allocate.
var (
	linearJobs = sync.Pool{New: func() any { return new(linear.Job) }}
	convJobs   = sync.Pool{New: func() any { return new(linear.Conv) }}
)

// LinearAttention implements backend.LinearAttender: a task computes one state head of one sequence, several tokens as
// products of matrices. Errors as for Attention.
func (be *Backend) LinearAttention(ctx context.Context, c *backend.LinearAttention) error {
	out, in := c.Operands()
	return be.doPinned(ctx, "linear attention", out[:], in[:], func() error {
		j := linearJobs.Get().(*linear.Job)
		defer func() {
			*j = linear.Job{}
			linearJobs.Put(j)
		}()
		threads := be.threads()
		tasks, floats := j.Set(be.kernels, c, threads)
		return sharedPool.Run(ctx, j, floats, tasks, threads)
	})
}

// CausalConv implements backend.Convolver: a task computes some channels of one sequence. Errors as for Attention.
func (be *Backend) CausalConv(ctx context.Context, c *backend.CausalConv) error {
	out, in := c.Operands()
	return be.doPinned(ctx, "causal convolution", out[:], in[:], func() error {
		j := convJobs.Get().(*linear.Conv)
		defer func() {
			*j = linear.Conv{}
			convJobs.Put(j)
		}()
		tasks, floats := j.Set(be.kernels, c)
		threads := be.threads()
		if c.Y.Shape().Elements() < copyAlone {
			threads = 1
		}
		return sharedPool.Run(ctx, j, floats, tasks, threads)
	})
}
