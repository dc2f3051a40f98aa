package kvcache_test

import (
	"slices"
	"testing"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kvcache"
	"github.com/seed90331342/attn/kernels/nn"
)

// BenchmarkStep measures the halves of a step of generation on one thread: 64 tokens, 8 heads
// of 64 elements, with and without a rotary embedding. Each turn is 10 calls, and 10 of the
// backend's call that the attention makes. It reports medians in microseconds a call: of the
// step, and of what attention takes in addition to the backend's call.
//
//	go test -run '^$' -bench Step -benchtime 2000x ./kernels/kvcache
func BenchmarkStep(b *testing.B) {
	for _, rope := range []kvcache.Rotary{nil, &nn.RoPE{}} {
		name := "plain"
		if rope != nil {
			name = "rotary"
		}
		b.Run(name, func(b *testing.B) { benchStep(b, rope) })
	}
}

func benchStep(b *testing.B, rope kvcache.Rotary) {
	const heads, dim, tokens = 8, 64, 64
	dev, ctx := kernels.NewDevice(cpu.New(cpu.Options{Threads: 1})), b.Context()
	defer dev.Close()
	check := func(err error) {
		if err != nil {
			b.Fatal(err)
		}
	}
	host := func(seq int) backend.Tensor {
		x, err := backend.AllocHost(backend.F32, backend.Shape{1, heads, seq, dim})
		check(err)
		return x
	}
	k, q, out := host(1), host(1), kernels.Result{O: host(1)}
	own := []*backend.Call{{Q: q, K: host(tokens), V: host(tokens), O: out.O, Problem: backend.Problem{Scale: 0.125, Visible: backend.Everything()}}}
	cache, err := kvcache.New(ctx, dev, kvcache.Config{KVHeads: heads, Dim: dim, Capacity: 2 * tokens, RoPE: rope})
	check(err)
	defer cache.Release()
	paged, err := kvcache.NewPaged(ctx, dev, kvcache.PagedConfig{KVHeads: heads, Dim: dim, Pages: 2, RoPE: rope})
	check(err)
	defer paged.Release()
	sequence, err := paged.NewSequence()
	check(err)
	pages := paged.Batch(sequence)
	for range tokens {
		check(cache.Append(ctx, k, k, nil))
		check(pages.Append(ctx, k, k, nil))
	}
	timed := func(do func() error) float64 {
		start := time.Now()
		for range 10 {
			check(do())
		}
		return time.Since(start).Seconds() * 1e6 / 10
	}
	for _, c := range []struct {
		name string
		do   func() error
		own  []*backend.Call
	}{
		{"attention", func() error { return cache.AttentionInto(ctx, out, q, kvcache.CallOptions{}) }, own},
		{"attention, pages", func() error { return pages.AttentionInto(ctx, out, q, kvcache.CallOptions{}) }, own},
		{"append", func() error {
			if err := cache.Append(ctx, k, k, nil); err != nil {
				return err
			}
			return cache.Rewind(0, tokens)
		}, nil},
	} {
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			var step, over []float64
			for b.Loop() {
				step = append(step, timed(c.do))
				if c.own != nil {
					over = append(over, step[len(step)-1]-timed(func() error { return dev.Backend().Attention(ctx, own...) }))
				}
			}
			slices.Sort(step)
			b.ReportMetric(step[len(step)/2], "µs/step")
			if c.own != nil {
				slices.Sort(over)
				b.ReportMetric(over[len(over)/2], "µs/over")
			}
			b.ReportMetric(0, "ns/op")
		})
	}
}
