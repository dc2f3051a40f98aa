//go:build !race

// Under the race detector sync.Pool drops values at random.

package kvcache_test

import (
	"cmp"
	"slices"
	"testing"

	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/kernels/kvcache"
	"github.com/seed90331342/attn/kernels/nn"
)

// TestStepsDoNotAllocate: on the CPU, a step of generation does not allocate once its memory
// is there. A page list grows now and then, and so do the angles of a rotary embedding.
func TestStepsDoNotAllocate(t *testing.T) {
	t.Run("plain", func(t *testing.T) { testStepsDoNotAllocate(t, nil, nil) })
	t.Run("rotary embedding", func(t *testing.T) { testStepsDoNotAllocate(t, &nn.RoPE{}, nil) })
	t.Run("ragged with a rotary embedding", func(t *testing.T) { testStepsDoNotAllocate(t, &nn.RoPE{}, []int{0, 100}) })
}

func testStepsDoNotAllocate(t *testing.T, rope kvcache.Rotary, lengths []int) {
	dev := onCPU(t, cpu.Options{Threads: 1})
	const batch, steps = 2, 200
	host := func(heads int) kernels.Tensor {
		return must.Get(kernels.AllocHost(kernels.F32, kernels.Shape{batch, heads, 1, 16}))(t)
	}
	k, q, out := host(2), host(4), kernels.Result{O: host(4)}
	cache := must.Get(kvcache.New(t.Context(), dev, kvcache.Config{Batch: batch, KVHeads: 2, Dim: 16, Capacity: 2*steps + 100, RoPE: rope}))(t)
	defer cache.Release()
	paged := must.Get(kvcache.NewPaged(t.Context(), dev, kvcache.PagedConfig{KVHeads: 2, Dim: 16, PageSize: 16, Pages: 60, RoPE: rope}))(t)
	defer paged.Release()
	var sequences []*kvcache.Sequence
	for range batch {
		s := must.Get(paged.NewSequence())(t)
		sequences = append(sequences, s)
	}
	pages := paged.Batch(sequences...)
	ctx := t.Context()
	for i := range slices.Max(append(lengths, 0)) {
		count := []int{0, 0}
		for b, n := range lengths {
			count[b] = min(1, max(0, n-i))
		}
		must.Do(t, cmp.Or(cache.Append(ctx, k, k, count), pages.Append(ctx, k, k, count)))
	}
	for name, step := range map[string]func() error{
		"contiguous": func() error {
			if err := cache.Append(ctx, k, k, nil); err != nil {
				return err
			}
			return cache.AttentionInto(ctx, out, q, kvcache.CallOptions{})
		},
		"paged": func() error {
			if err := pages.Append(ctx, k, k, nil); err != nil {
				return err
			}
			return pages.AttentionInto(ctx, out, q, kvcache.CallOptions{})
		},
	} {
		if n := testing.AllocsPerRun(steps, func() {
			must.Do(t, step())
		}); n != 0 {
			t.Errorf("%s: a step makes %v allocations", name, n)
		}
	}
}
