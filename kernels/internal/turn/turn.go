// Package turn rotates the rows of a cache of keys and values.
package turn

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/internal/op"
	"github.com/seed90331342/attn/kernels/internal/region"
)

// Turner turns rows for a cache: by the angles of their positions, and into another basis.
type Turner struct {
	Dev *kernels.Device
	// RoPE, unless nil, returns the angles of rows of keys, which have Dim elements.
	RoPE interface {
		Angles(ctx context.Context, dev *kernels.Device, headDim int, positions [][]int) (kernels.Angles, error)
	}
	Dim int

	angles   angleTable
	matrices [2]kernels.Tensor // of keys, and of values
	factors  [2]Factors
}

// Release frees the memory.
func (t *Turner) Release() {
	t.angles.Release()
	for i := range t.matrices {
		t.matrices[i].Release()
		t.factors[i].release()
	}
	t.angles, t.matrices = angleTable{}, [2]kernels.Tensor{}
}

const (
	// tableTokens is the number of positions of an angleTable: for heads of 128 elements
	// 32 KiB, which take as long to compute as some steps of generation.
	tableTokens = 64
	// stepTokens is the most tokens that a step of generation appends to a sequence. What
	// steps need is kept for the next one.
	stepTokens = 16
)

// angleTable holds the angles of tableTokens positions of each sequence, if any, for
// sequences that grow by steps.
type angleTable struct {
	kernels.Angles
	from []int // first position of each sequence, or that of all
	end  []int // positions after the last append
}

// row returns the row of t with the angles of position at of sequence b; negative for a
// position before them.
func (t *angleTable) row(b, at int) int {
	return at - t.from[min(b, len(t.from)-1)]
}

// has reports whether t has the angles of n positions of each sequence, from from[b] on.
func (t *angleTable) has(from []int, n int) bool {
	if len(t.from) != 1 && len(t.from) != len(from) {
		return false
	}
	for b, first := range from {
		if row := t.row(b, first); row < 0 || row+n > tableTokens {
			return false
		}
	}
	return true
}

// continues reports whether an append at from continues the last one, of which tokens may
// be taken back, and notes where it ends.
func (t *angleTable) continues(from []int, n int) bool {
	continues := len(t.end) == len(from)
	for b, first := range from {
		continues = continues && first <= t.end[b] && first >= t.end[b]-stepTokens
	}
	t.end = t.end[:0]
	for _, first := range from {
		t.end = append(t.end, first+n)
	}
	return continues
}

// extendAngles makes a new angleTable before an append of n tokens that continues the
// append before it and exceeds the old table. Its only error is ErrMemory: positions to come
// may be too large, while Keys needs those of the tokens only.
func (t *Turner) extendAngles(ctx context.Context, from []int, n int) error {
	table := &t.angles
	if t.RoPE == nil || !table.continues(from, n) || n > stepTokens || table.has(from, n) {
		return nil
	}
	if !slices.ContainsFunc(from, func(first int) bool { return first != from[0] }) {
		from = from[:1]
	}
	first := make([]int, len(from))
	for b := range from {
		first[b] = max(0, from[b]-stepTokens)
	}
	positions, err := op.Positions(first, tableTokens)
	if err != nil {
		return err
	}
	a, err := t.RoPE.Angles(ctx, t.Dev, t.Dim, positions)
	cos, sin := a.Cos.Shape(), a.Sin.Shape()
	if err != nil || cos != sin || cos[kernels.Seq] != tableTokens || cos[kernels.Batch] != len(first) {
		a.Release()
		if errors.Is(err, kernels.ErrMemory) {
			return err
		}
		return nil
	}
	table.Release()
	table.Angles, table.from = a, first
	return nil
}

// Memory is where a step has rows while they are turned, kept for the next step: keys or queries, rotated and then
// multiplied, values, and outputs. Its owner frees it.
type Memory struct{ rotated, multiplied, values, out kernels.Tensor }

// Free releases the memory, unless it is that of a step in host memory: a step is kept in a sync.Pool, from
// which only host memory may vanish.
func (m *Memory) Free() {
	for _, t := range [...]*kernels.Tensor{&m.rotated, &m.multiplied, &m.values, &m.out} {
		if !t.OnHost() || t.Shape()[kernels.Seq] > stepTokens {
			t.Release()
			*t = kernels.Tensor{}
		}
	}
}

// fit replaces memory unless it has that type and shape.
func (t *Turner) fit(ctx context.Context, memory *kernels.Tensor, dtype kernels.DType, shape kernels.Shape) (err error) {
	if memory.IsZero() || memory.Shape() != shape || memory.DType() != dtype {
		memory.Release()
		*memory, err = t.Dev.Alloc(ctx, dtype, shape)
	}
	return err
}

// Keys returns keys as they are stored as dtype: rotated, times their Hadamard matrix, and divided by their
// factors. Row i of batch b is at position from[b]+i, or at positions[b or 0][i] unless that is nil. The result
// is x if nothing turns it, or in m.
func (t *Turner) Keys(ctx context.Context, x kernels.Tensor, dtype kernels.DType, from []int, positions [][]int, m *Memory) (kernels.Tensor, error) {
	if positions == nil {
		if err := t.extendAngles(ctx, from, x.Shape()[kernels.Seq]); err != nil {
			return x, err
		}
	}
	if dtype.Quantised() || !t.matrices[0].IsZero() || t.factors[0].host != nil {
		dtype = kernels.F32
	}
	x, err := t.rotate(ctx, "k", x, dtype, from, positions, &m.rotated)
	if err != nil {
		return x, err
	}
	return t.stored(ctx, 0, x, &m.multiplied)
}

// Values returns values as they are stored, as Keys does.
func (t *Turner) Values(ctx context.Context, x kernels.Tensor, m *Memory) (kernels.Tensor, error) {
	return t.stored(ctx, 1, x, &m.values)
}

// Queries returns queries rotated, times the Hadamard matrix and the factors of keys, as Keys does.
func (t *Turner) Queries(ctx context.Context, q kernels.Tensor, from []int, positions [][]int, m *Memory) (kernels.Tensor, error) {
	q, err := t.rotate(ctx, "q", q, q.DType(), from, positions, &m.rotated)
	if err == nil {
		q, err = t.spread(ctx, 0, q, q.DType(), &m.multiplied)
	}
	if err != nil || t.factors[0].host == nil {
		return q, err
	}
	f, err := t.factors[0].of(ctx, t.Dev, q.Shape()[kernels.Heads])
	if err != nil {
		return q, err
	}
	return t.times(ctx, q, f, q.DType(), &m.multiplied)
}

// Outputs returns memory for outputs of n elements for queries q, which Back writes to out; or out if nothing
// turns values.
func (t *Turner) Outputs(ctx context.Context, out, q kernels.Tensor, n int, m *Memory) (kernels.Tensor, error) {
	if t.matrices[1].IsZero() && t.factors[1].host == nil {
		return out, nil
	}
	shape := q.Shape()
	shape[kernels.Dim] = n
	err := t.fit(ctx, &m.out, kernels.F32, shape)
	return m.out, err
}

func (t *Turner) stored(ctx context.Context, i int, x kernels.Tensor, memory *kernels.Tensor) (kernels.Tensor, error) {
	x, err := t.spread(ctx, i, x, kernels.F32, memory)
	if err != nil {
		return x, err
	}
	return t.times(ctx, x, t.factors[i].inverse, kernels.F32, memory)
}

// spread returns x times the Hadamard matrix of keys (i = 0) or values, as dtype. Next to attention
// the D² operations a row are few, and the fast transform would need a kernel of its own on each backend.
func (t *Turner) spread(ctx context.Context, i int, x kernels.Tensor, dtype kernels.DType, memory *kernels.Tensor) (kernels.Tensor, error) {
	if t.matrices[i].IsZero() {
		return x, nil
	}
	if err := t.fit(ctx, memory, dtype, x.Shape()); err != nil {
		return x, err
	}
	return *memory, t.Dev.Project(ctx, *memory, x, t.matrices[i], kernels.Tensor{})
}

// Back writes x, the memory of Outputs, which it may replace, to y: times the factors of values, and times their
// matrix again, which undoes it. It does nothing if x is y.
func (t *Turner) Back(ctx context.Context, y, x kernels.Tensor) error {
	if x == y {
		return nil
	}
	to := x
	if t.matrices[1].IsZero() {
		to = y
	}
	if t.factors[1].host != nil {
		f, err := t.factors[1].of(ctx, t.Dev, x.Shape()[kernels.Heads])
		if err == nil {
			err = t.multiply(ctx, to, x, f)
		}
		if err != nil || to == y {
			return err
		}
	}
	return t.Dev.Project(ctx, y, x, t.matrices[1], kernels.Tensor{})
}

// rotate returns x rotated, as dtype, in memory. Without an embedding it returns x.
func (t *Turner) rotate(ctx context.Context, name string, x kernels.Tensor, dtype kernels.DType, from []int, positions [][]int, memory *kernels.Tensor) (_ kernels.Tensor, err error) {
	if t.RoPE == nil {
		return x, nil
	}
	if err := t.fit(ctx, memory, dtype, x.Shape()); err != nil {
		return x, err
	}
	if n := x.Shape()[kernels.Seq]; positions == nil && t.angles.has(from, n) {
		err = t.rotateByTable(ctx, *memory, x, from)
	} else {
		var angles kernels.Angles
		if positions == nil {
			positions, err = op.Positions(from, n)
		}
		if err != nil {
			return x, err
		}
		if angles, err = t.RoPE.Angles(ctx, t.Dev, t.Dim, positions); err != nil {
			return x, err
		}
		defer angles.Release()
		err = t.Dev.Rotate(ctx, *memory, x, angles)
	}
	if err != nil {
		return x, fmt.Errorf("%s: %w", name, err)
	}
	return *memory, nil
}

// rotateByTable rotates x by the angles of the table, sequences with the same rows of it
// together.
func (t *Turner) rotateByTable(ctx context.Context, y, x kernels.Tensor, from []int) error {
	table, n := &t.angles, x.Shape()[kernels.Seq]
	for b, end := 0, 0; b < len(from); b = end {
		row := table.row(b, from[b])
		for end = b + 1; end < len(from) && table.row(end, from[end]) == row; end++ {
		}
		a := table.Angles
		first, last := min(b, len(table.from)-1), min(end, len(table.from))
		a.Cos, a.Sin = region.Rows(a.Cos, first, last-first, row, n), region.Rows(a.Sin, first, last-first, row, n)
		if err := t.Dev.Rotate(ctx, region.Slice(y, kernels.Batch, b, end), region.Slice(x, kernels.Batch, b, end), a); err != nil {
			return err
		}
	}
	return nil
}
