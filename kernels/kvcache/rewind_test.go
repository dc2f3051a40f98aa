package kvcache_test

import (
	"context"
	"math"
	"testing"

	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
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
	for name, keep := range map[string]func(from int, rows ...int) error{
		"contiguous": func(from int, rows ...int) error { return cache.Keep(ctx, 0, from, rows) },
		"paged":      func(from int, rows ...int) error { return s.Keep(ctx, from, rows) },
	} {
		must.Fail(t, name+": before the window", keep(5), kernels.ErrOption, "the window needs older ones at length 5")
		must.Fail(t, name+": longer", keep(10), kernels.ErrOption, "from is 10, it must be 0 to the")
	}
	must.Do(t, cache.Append(ctx, x, x, nil))
	must.Do(t, cache.Append(ctx, x, x, nil)) // of 8 tokens
	for _, rows := range [][]int{{1, 1}, {1, 0}, {-1}, {0, 2}} {
		must.Fail(t, "rows", cache.Keep(ctx, 0, 6, rows), kernels.ErrOption, "rows must ascend and be 0 to 1, of the 2 tokens from 6 on")
	}
	must.Fail(t, "a sequence that does not exist", cache.Keep(ctx, 1, 0, nil), kernels.ErrOption)
	s.Free()
	must.Fail(t, "freed", s.Keep(ctx, 0, nil), kernels.ErrReleased)
	must.Fail(t, "zero value", new(kvcache.Sequence).Keep(ctx, 0, nil), kernels.ErrOption)
	must.Fail(t, "freed", s.Rewind(0), kernels.ErrReleased)
	must.Fail(t, "zero value", new(kvcache.Sequence).Rewind(0), kernels.ErrOption)
}

// TestKeepWithoutFreePages: a Keep that needs a copy of a shared page and has no page for it
// changes nothing, also where other pages could go.
func TestKeepWithoutFreePages(t *testing.T) {
	ctx := t.Context()
	c := must.Get(kvcache.NewPaged(ctx, onCPU(t, cpu.Options{}), kvcache.PagedConfig{Dim: 4, PageSize: 2, Pages: 3}))(t)
	defer c.Release()
	x := must.Get(kernels.AllocHost(kernels.F32, kernels.Shape{1, 1, 4, 4}))(t)
	s := must.Get(c.NewSequence())(t)
	must.Do(t, c.Batch(s).Append(ctx, x, x, nil))
	fork := must.Get(s.Fork())(t)
	must.Do(t, c.Batch(s).Append(ctx, x, x, []int{1}))
	keep := func() error { return s.Keep(ctx, 1, []int{1, 2, 3}) } // two pages, of which one is shared
	must.Fail(t, "no free page", keep(), kernels.ErrCapacity, "keep: without the tokens from 1 on, 1 of 3 pages of 2 tokens are free, sequence 0 needs 2 for its 1 tokens and 3 new ones")
	if c.FreePages() != 0 || s.Len() != 5 {
		t.Errorf("%d pages are free and %d tokens left, should be 0 and 5", c.FreePages(), s.Len())
	}
	fork.Free()
	must.Do(t, keep())
	if c.FreePages() != 1 || s.Len() != 4 {
		t.Errorf("%d pages are free and %d tokens left, should be 1 and 4", c.FreePages(), s.Len())
	}
}

// TestReadKeys: the keys of a cache that rounds, from any token on and across pages, also those of forks. Rows of tokens
// that a sequence does not have, or that a window has dropped, stay.
func TestReadKeys(t *testing.T) {
	dev, ctx := onCPU(t, cpu.Options{}), t.Context()
	numbers := make([]float32, 2*7*4)
	for i := range numbers {
		numbers[i] = float32(i) + 1
	}
	k := must.Get(kernels.HostF32(numbers, kernels.Shape{1, 2, 7, 4}))(t)
	cache := must.Get(kvcache.New(ctx, dev, kvcache.Config{KVHeads: 2, Dim: 4, DType: kernels.BF16, Capacity: 7}))(t)
	defer cache.Release()
	must.Do(t, cache.Append(ctx, k, k, nil))
	paged := must.Get(kvcache.NewPaged(ctx, dev, kvcache.PagedConfig{KVHeads: 2, Dim: 4, PageSize: 3, Pages: 8}))(t)
	defer paged.Release()
	s := must.Get(paged.NewSequence())(t)
	must.Do(t, paged.Batch(s).Append(ctx, k, k, nil))
	fork := must.Get(s.Fork())(t)
	must.Do(t, fork.Rewind(4))
	window := must.Get(kvcache.New(ctx, dev, kvcache.Config{KVHeads: 2, Dim: 4, Capacity: 6, Window: 2}))(t)
	defer window.Release()
	for i := range 7 { // token 5 moves to the start before token 6
		row := must.Get(k.Slice(kernels.Seq, i, i+1))(t)
		must.Do(t, window.Append(ctx, row, row, nil))
	}
	type reader interface {
		ReadKeys(ctx context.Context, k kernels.Tensor, from int) error
	}
	for _, c := range []struct {
		name    string
		cache   reader
		from, n int
		has     [][2]int // tokens of each sequence that are read
	}{
		{"contiguous", cache, 0, 7, [][2]int{{0, 7}}},
		{"from a token on, past the last", cache, 5, 4, [][2]int{{5, 7}}},
		{"pages of forks", paged.Batch(s, fork), 1, 6, [][2]int{{1, 7}, {1, 4}}},
		{"past one sequence", paged.Batch(s, fork), 4, 3, [][2]int{{4, 7}, {4, 4}}},
		{"window", window, 3, 5, [][2]int{{5, 7}}},
		{"far past", window, math.MaxInt - 1, 2, [][2]int{{0, 0}}},
	} {
		got := must.Get(kernels.AllocHost(kernels.F32, kernels.Shape{len(c.has), 2, c.n, 4}))(t)
		must.Do(t, c.cache.ReadKeys(ctx, got, c.from))
		x := must.Get(dev.ToFloat32(ctx, got))(t)
		for i := range x {
			b, h, row, e := i/(8*c.n), i/(4*c.n)%2, i/4%c.n, i%4
			want := float32(0)
			if at := c.from + row; at >= c.has[b][0] && at < c.has[b][1] {
				want = numbers[(h*7+at)*4+e]
			}
			if x[i] != want {
				t.Fatalf("%s: element %d of token %d, head %d, sequence %d is %v, should be %v", c.name, e, c.from+row, h, b, x[i], want)
			}
		}
	}
	must.Fail(t, "heads", cache.ReadKeys(ctx, must.Get(k.Slice(kernels.Heads, 0, 1))(t), 0), kernels.ErrShape, "read keys: k has shape [1 1 7 4], it must be [1 2 7 4]")
	must.Fail(t, "a negative token", cache.ReadKeys(ctx, k, -1), kernels.ErrOption, "from is -1")
	must.Fail(t, "zero value", new(kvcache.Cache).ReadKeys(ctx, k, 0), kernels.ErrOption)
}
