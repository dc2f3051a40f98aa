package cpu

import (
	"context"
	"math"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/tile"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// writesContext counts the elements of data that change between two looks at the context.
type writesContext struct {
	context.Context
	data, before []float32
	most         int
}

func (c *writesContext) Err() error {
	changed := 0
	for i, x := range c.data {
		if math.Float32bits(x) != math.Float32bits(c.before[i]) {
			changed++
		}
	}
	c.most = max(c.most, changed)
	copy(c.before, c.data)
	return nil
}

// TestStagesLookAtTheContext shows how much a stage that writes weights does after its
// context is canceled: a block of keys for the tiles of a task, or one row.
func TestStagesLookAtTheContext(t *testing.T) { eachTier(t, testStagesLookAtTheContext) }

func testStagesLookAtTheContext(t *testing.T, tier string) {
	be := open(t, Options{Tier: tier, Threads: 1})
	const rows, keys, dim = 130, 300, 8
	q, k, s := random(t, 1, backend.Shape{1, 1, rows, dim}), random(t, 2, backend.Shape{1, 1, keys, dim}), alloc(t, backend.Shape{1, 1, rows, keys})
	data := floats(t, s)
	p := &backend.Problem{Scale: 2, Visible: backend.Everything()}
	for _, stage := range []struct {
		name string
		most int
		do   func(ctx context.Context) error
	}{
		{"qk", tile.MaxRows * tile.BlockKeys, func(ctx context.Context) error { return be.QK(ctx, s, q, k) }},
		{"scores", keys, func(ctx context.Context) error { return be.Scores(ctx, s, p, backend.Biased) }},
		{"softmax", keys, func(ctx context.Context) error { return be.Softmax(ctx, s, backend.Tensor{}, p) }},
	} {
		ctx := &writesContext{Context: t.Context(), data: data, before: append([]float32(nil), data...)}
		must.Do(t, stage.do(ctx))
		if ctx.most > stage.most || ctx.most == 0 {
			t.Errorf("%s: %d elements change between two looks at the context, at most %d should", stage.name, ctx.most, stage.most)
		}
	}
}
