package kvcache

import (
	"context"
	"errors"
	"fmt"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/budget"
	"github.com/seed90331342/attn/kernels"
)

// Rotary is a rotary position embedding, such as nn.RoPE.
type Rotary interface {
	// Angles returns the rotation angles of rows of headDim elements at positions,
	// [B or 1][S], for the caller to Release. They depend on the position alone: a cache
	// keeps angles for the tokens to come.
	Angles(ctx context.Context, dev *kernels.Device, headDim int, positions [][]int) (kernels.Angles, error)
}

const (
	// tableTokens is the number of positions of an angleTable: for heads of 128 elements
	// 32 KiB, which take as long to compute as some steps of generation.
	tableTokens = 64
	// stepTokens is the most tokens that a step of generation appends to a sequence. What
	// steps need is kept for the next one.
	stepTokens = 16
)

// angleTable holds the angles of the positions [from, from+tableTokens), if any, for
// sequences that grow by steps.
type angleTable struct {
	kernels.Angles
	from int
	end  int // position after the last append
}

// has reports whether t has the angles of n positions from first on.
func (t *angleTable) has(first, n int) bool {
	return !t.Cos.IsZero() && first >= t.from && first+n <= t.from+tableTokens
}

// allEqual reports whether the sequences continue at the same position.
func allEqual(from []int) bool {
	for _, first := range from {
		if first != from[0] {
			return false
		}
	}
	return true
}

// extendAngles makes a new angleTable before an append of n tokens that continues the
// append before it and exceeds the old table. Its only error is ErrMemory: positions to come
// may be too large, while rotate needs those of the tokens only.
func (p *pool) extendAngles(ctx context.Context, from []int, n int) error {
	t := &p.angles
	if p.config.RoPE == nil || !allEqual(from) {
		return nil
	}
	first := from[0]
	continues := first <= t.end && first >= t.end-stepTokens // tokens may be taken back
	t.end = first + n
	if !continues || n > stepTokens || t.has(first, n) {
		return nil
	}
	first = max(0, first-stepTokens)
	positions := make([]int, tableTokens)
	for i := range positions {
		positions[i] = first + i
	}
	a, err := p.config.RoPE.Angles(ctx, p.dev, p.config.Dim, [][]int{positions})
	if err != nil || a.Cos.Shape()[backend.Seq] != tableTokens || a.Sin.Shape()[backend.Seq] != tableTokens {
		a.Release()
		if errors.Is(err, backend.ErrMemory) {
			return err
		}
		return nil
	}
	t.Release()
	t.Angles, t.from = a, first
	return nil
}

// anglesOf returns the angles of n rows of each batch; those of batch b begin at position
// from[b]. The caller releases owned.
func (p *pool) anglesOf(ctx context.Context, from []int, n int) (a, owned kernels.Angles, err error) {
	if t := &p.angles; allEqual(from) && t.has(from[0], n) {
		a, lo := t.Angles, from[0]-t.from
		if a.Cos, err = t.Cos.Slice(backend.Seq, lo, lo+n); err == nil {
			a.Sin, err = t.Sin.Slice(backend.Seq, lo, lo+n)
		}
		return a, owned, err
	}
	positions := make([][]int, len(from))
	for b, first := range from {
		if positions[b], err = budget.Make[int](n); err != nil {
			return a, owned, err
		}
		for i := range positions[b] {
			positions[b][i] = first + i
		}
	}
	owned, err = p.config.RoPE.Angles(ctx, p.dev, p.config.Dim, positions)
	return owned, owned, err
}

// rotate returns x rotated, as dtype; row i of batch b is at position from[b]+i. The result
// is in memory, which rotate replaces where it does not fit, for the caller to release.
// Without an embedding rotate returns x.
func (p *pool) rotate(ctx context.Context, name string, x backend.Tensor, dtype backend.DType, from []int, memory *backend.Tensor) (backend.Tensor, error) {
	if p.config.RoPE == nil {
		return x, nil
	}
	angles, owned, err := p.anglesOf(ctx, from, x.Shape()[backend.Seq])
	defer owned.Release()
	if err != nil {
		return x, err
	}
	if memory.IsZero() || memory.Shape() != x.Shape() || memory.DType() != dtype {
		memory.Release()
		if *memory, err = p.dev.Alloc(ctx, dtype, x.Shape()); err != nil {
			return x, err
		}
	}
	if err := p.dev.Rotate(ctx, *memory, x, angles); err != nil {
		return x, fmt.Errorf("%s: %w", name, err)
	}
	return *memory, nil
}

// releaseRotated releases memory of rotate, unless it is that of a step in host memory: a
// step is kept in a sync.Pool, from which only host memory may vanish.
func releaseRotated(memory *backend.Tensor) {
	if !memory.OnHost() || memory.Shape()[backend.Seq] > stepTokens {
		memory.Release()
		*memory = backend.Tensor{}
	}
}
