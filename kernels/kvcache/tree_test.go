package kvcache_test

import (
	"context"
	"slices"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/kernels/kvcache"
)

// cache is what both kinds of caches have.
type cache interface {
	Append(ctx context.Context, k, v kernels.Tensor, count []int) error
	AppendAt(ctx context.Context, k, v kernels.Tensor, count []int, positions [][]int) error
	Attention(ctx context.Context, q kernels.Tensor, opt kvcache.CallOptions) (kernels.Result, error)
}

// TestMaskLastRefuses lists masks of the last tokens that caches refuse. The conformance suite compares others with the oracle.
func TestMaskLastRefuses(t *testing.T) {
	dev, ctx := onCPU(t, cpu.Options{}), t.Context()
	const prompt, last = 13, 7
	host := func(batch, n int) kernels.Tensor {
		return must.Get(kernels.AllocHost(kernels.F32, kernels.Shape{batch, 1, n, 8}))(t)
	}
	mask := func(n int) kernels.Tensor {
		return must.Get(kernels.AllocHost(kernels.Bool, kernels.Shape{1, 1, 1, n}))(t)
	}
	c := must.Get(kvcache.NewPaged(ctx, dev, kvcache.PagedConfig{Dim: 8, PageSize: 4, Pages: 16}))(t)
	defer c.Release()
	s := must.Get(c.NewSequence())(t)
	must.Do(t, c.Batch(s).Append(ctx, host(1, prompt), host(1, prompt), nil))
	batch := c.Batch(s, must.Get(s.Fork())(t))
	must.Do(t, batch.Append(ctx, host(2, last), host(2, last), []int{7, 5}))
	windowed := must.Get(kvcache.NewPaged(ctx, dev, kvcache.PagedConfig{Dim: 8, PageSize: 4, Pages: 16, Window: 5}))(t)
	defer windowed.Release()
	w := windowed.Batch(must.Get(windowed.NewSequence())(t))
	for _, n := range []int{prompt, 3} {
		must.Do(t, w.Append(ctx, host(1, n), host(1, n), nil))
	}
	slopes := kernels.Options{ALiBi: []float32{1}}
	for _, x := range []struct {
		name  string
		cache cache
		q     kernels.Tensor
		last  int // tokens of the mask
		opt   kvcache.CallOptions
		want  error
		text  string
	}{
		{"no mask", batch, host(2, last), 0, kvcache.CallOptions{}, kernels.ErrOption, "MaskLast is set without a Mask"},
		{"rows before it", batch, host(2, last), 6, kvcache.CallOptions{}, kernels.ErrShape,
			"mask covers the last 6 tokens, it must cover the 7 rows of q for sequence 0 and at most its 20 tokens"},
		{"too few tokens", batch, host(2, last), 19, kvcache.CallOptions{}, kernels.ErrShape, "for sequence 1 and at most its 18 tokens"},
		{"distances", batch, host(2, last), 19, kvcache.CallOptions{Options: slopes}, kernels.ErrOption, "ALiBi is set, but with it a shared prefix"},
		{"more than the window", w, host(1, 3), 6, kvcache.CallOptions{}, kernels.ErrOption,
			"mask covers the last 6 tokens, it must cover at most the 5 of the cache's window"},
		{"before the mask", w, host(1, 3), 3, kvcache.CallOptions{Positions: [][]int{{13, 12, 14}}}, kernels.ErrOption,
			"row 1 of sequence 0 has position 12, with a mask of the last tokens and a window it must be 13 to 15"},
		{"after all tokens", w, host(1, 3), 3, kvcache.CallOptions{Positions: [][]int{{13, 14, 16}}}, kernels.ErrOption, "row 2 of sequence 0 has position 16"},
		{"a window that is dropped", w, host(1, 3), 5, kvcache.CallOptions{Positions: [][]int{{11, 12, 13}}}, kernels.ErrOption,
			"row 0 of sequence 0 has position 11, with a mask of the last tokens and a window it must be 12 to 15"},
		{"shared prefix", w, host(1, 3), 3, kvcache.CallOptions{SharePrefix: true}, kernels.ErrOption, "SharePrefix is set, but the cache has a window"},
		{"distances and a window", w, host(1, 3), 3, kvcache.CallOptions{Options: slopes}, kernels.ErrOption, "ALiBi is set, but with it a shared prefix"},
	} {
		if x.opt.MaskLast = true; x.last > 0 {
			x.opt.Mask = mask(x.last)
		}
		must.Fail(t, x.name, must.Err(x.cache.Attention(ctx, x.q, x.opt)), x.want, x.text)
	}
}

// reading is a backend that records the lengths of the keys that calls attend to, and of their batches.
type reading struct {
	*cpu.Backend
	keys [][2]int
}

func (r *reading) Attention(ctx context.Context, calls ...*backend.Call) error {
	for _, c := range calls {
		r.keys = append(r.keys, [2]int{len(c.Pages.Table), c.Pages.Keys})
	}
	return r.Backend.Attention(ctx, calls...)
}

// TestPrefixes: each page that adjacent sequences share is read once.
func TestPrefixes(t *testing.T) {
	be, ctx := &reading{Backend: cpu.New(cpu.Options{})}, t.Context()
	defer be.Close()
	c := must.Get(kvcache.NewPaged(ctx, kernels.NewDevice(be), kvcache.PagedConfig{Dim: 8, PageSize: 4, Pages: 30}))(t)
	defer c.Release()
	host := func(batch, n int) kernels.Tensor {
		return must.Get(kernels.AllocHost(kernels.F32, kernels.Shape{batch, 1, n, 8}))(t)
	}
	grow := func(s *kvcache.Sequence, n int) *kvcache.Sequence {
		must.Do(t, c.Batch(s).Append(ctx, host(1, n), host(1, n), nil))
		return s
	}
	fork := func(s *kvcache.Sequence) *kvcache.Sequence { return must.Get(s.Fork())(t) }
	root := grow(must.Get(c.NewSequence())(t), 8)
	a, b := grow(fork(root), 4), grow(fork(root), 12)
	a2, a3 := grow(fork(a), 4), grow(fork(a), 7)
	a4, short := fork(a3), fork(a2)
	must.Do(t, short.Rewind(14))
	for name, x := range map[string]struct {
		batch []*kvcache.Sequence
		rows  int      // of each sequence
		want  [][2]int // batches and keys of each call
	}{
		"one level, and two":   {[]*kvcache.Sequence{a2, a4, b}, 1, [][2]int{{3, 13}, {1, 8}, {1, 4}}},
		"one level":            {[]*kvcache.Sequence{a2, b}, 1, [][2]int{{2, 13}, {1, 8}}},
		"three levels":         {[]*kvcache.Sequence{b, a2, a3, a4}, 1, [][2]int{{4, 13}, {1, 8}, {1, 4}, {1, 4}}},
		"nothing in common":    {[]*kvcache.Sequence{grow(must.Get(c.NewSequence())(t), 2), a2}, 1, [][2]int{{2, 17}}},
		"groups of two":        {[]*kvcache.Sequence{a3, a4, grow(must.Get(c.NewSequence())(t), 2), root, b}, 1, [][2]int{{5, 13}, {1, 16}, {1, 8}}},
		"the others not next":  {[]*kvcache.Sequence{a2, b, a3}, 1, [][2]int{{3, 13}, {1, 8}}},
		"rows of shared pages": {[]*kvcache.Sequence{a2, short}, 5, [][2]int{{2, 9}, {1, 8}}},
	} {
		for i, s := range x.batch {
			x.batch[i] = fork(s)
		}
		own := c.Batch(x.batch...)
		must.Do(t, own.Append(ctx, host(len(x.batch), 1), host(len(x.batch), 1), nil))
		be.keys = nil
		q := must.Get(kernels.AllocHost(kernels.F32, kernels.Shape{len(x.batch), 2, x.rows, 8}))(t)
		r := must.Get(own.Attention(ctx, q, kvcache.CallOptions{SharePrefix: true}))(t)
		r.Release()
		if !slices.Equal(be.keys, x.want) {
			t.Errorf("%s: calls read %v, should read %v", name, be.keys, x.want)
		}
		for _, s := range x.batch {
			s.Free()
		}
	}
}

// TestLastPageOfForks: when two forks are appended to in one call, the first gets a copy of
// the page that they share, and the second keeps that page.
func TestLastPageOfForks(t *testing.T) {
	c := must.Get(kvcache.NewPaged(t.Context(), onCPU(t, cpu.Options{}), kvcache.PagedConfig{KVHeads: 1, Dim: 4, PageSize: 16, Pages: 2}))(t)
	defer c.Release()
	a := must.Get(c.NewSequence())(t)
	x := must.Get(kernels.AllocHost(kernels.F32, kernels.Shape{2, 1, 3, 4}))(t)
	one := must.Get(x.Slice(kernels.Batch, 0, 1))(t)
	must.Do(t, c.Batch(a).Append(t.Context(), one, one, nil))
	b := must.Get(a.Fork())(t)
	if err := c.Batch(a, b).Append(t.Context(), x, x, nil); err != nil || c.FreePages() != 0 {
		t.Errorf("%d pages are free, %v: two sequences of 6 tokens take the two that there are", c.FreePages(), err)
	}
}
