package kvcache_test

import (
	"testing"

	"github.com/seed90331342/attn/backend/backendtest/must"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kvcache"
)

// TestRewindWithWindow: both kinds of caches go back as far as they have what the window shows
// the next token, and refuse to go further.
func TestRewindWithWindow(t *testing.T) {
	dev, ctx := onCPU(t, cpu.Options{}), t.Context()
	const window, n = 3, 9
	cache := must.Get(kvcache.New(ctx, dev, kvcache.Config{Dim: 8, Capacity: 6, Window: window}))(t)
	defer cache.Release()
	paged := must.Get(kvcache.NewPaged(ctx, dev, kvcache.PagedConfig{Dim: 8, PageSize: 2, Pages: 4, Window: window}))(t)
	defer paged.Release()
	s := must.Get(paged.NewSequence())(t)
	x := must.Get(kernels.AllocHost(kernels.F32, kernels.Shape{1, 1, 1, 8}))(t)
	for range n {
		must.Do(t, cache.Append(ctx, x, x, nil))
		must.Do(t, paged.Batch(s).Append(ctx, x, x, nil))
	}
	// The cache moved tokens 4 and 5 to its start before token 6, and the sequence dropped the
	// pages of tokens 0 to 5 before token 8.
	for _, c := range []struct {
		name   string
		rewind func(n int) error
		len    func() int
		least  int
		pages  int
	}{
		{"contiguous", func(n int) error { return cache.Rewind(0, n) }, func() int { return cache.Lens()[0] }, 6, 2},
		{"paged", s.Rewind, s.Len, 8, 3},
	} {
		must.Fail(t, c.name+": before the window", c.rewind(c.least-1), kernels.ErrOption, "the window needs older ones at length")
		must.Fail(t, c.name+": longer", c.rewind(n+1), kernels.ErrOption, "length is 10, it must be 0 to the 9 tokens")
		must.Fail(t, c.name+": negative", c.rewind(-1), kernels.ErrOption, "length is -1")
		must.Do(t, c.rewind(c.least))
		if got, free := c.len(), paged.FreePages(); got != c.least || free != c.pages {
			t.Errorf("%s: %d tokens and %d free pages after a rewind, should be %d and %d", c.name, got, free, c.least, c.pages)
		}
	}
	s.Free()
	must.Fail(t, "freed", s.Rewind(0), kernels.ErrReleased)
	must.Fail(t, "zero value", new(kvcache.Sequence).Rewind(0), kernels.ErrOption)
}
