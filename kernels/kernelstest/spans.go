package kernelstest

import (
	"fmt"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kvcache"
	"github.com/seed90331342/attn/kernels/nn"
)

// spanCases are calls with spans whose rows see each other.
func spanCases() (cases []Case) {
	plain, long := dims(2, 6, 3, 37, 41, 24, 20), dims(1, 2, 1, 200, 300, 16, 16)
	f16, q8 := backend.F16, backend.Q8
	for n, c := range []Case{
		{Name: "spans, causal", Dims: plain, Options: kernels.Options{Causal: true, Spans: [][][2]int{{{3, 9}, {9, 20}, {35, 41}}}}},
		{Name: "spans of each batch, lower right, klen", Dims: plain, Options: kernels.Options{Causal: true, Align: kernels.LowerRight, KLen: []int{15, 41},
			Spans: [][][2]int{{{0, 2}, {10, 30}}, nil}}},
		{Name: "spans, window", Dims: plain, DType: f16, Options: kernels.Options{Window: &kernels.Window{Left: 8, Right: 2}, Offset: []int{-6}, Spans: [][][2]int{{{4, 11}, {15, 16}}}}},
		{Name: "spans longer than the window", Dims: long, Options: kernels.Options{Causal: true, Window: &kernels.Window{Left: 20}, Offset: []int{30}, Spans: [][][2]int{{{5, 20}, {33, 180}}}}},
		{Name: "a span longer than the window, in pages, q8", Dims: long, Keys: &q8, PageSize: 16, Options: kernels.Options{Causal: true, Window: &kernels.Window{Left: 20}, Spans: [][][2]int{{{48, 150}}}}},
		{Name: "spans, window without right limit, offsets", Dims: plain, Options: kernels.Options{Window: &kernels.Window{Left: 3, Right: kernels.Unbounded}, Offset: []int{2, -3}, Spans: [][][2]int{{{7, 30}}}}},
		{Name: "spans, segments, blocks", Dims: plain, BlockSize: 5, BlockShape: backend.Shape{1, 6, 8, 9}, Options: kernels.Options{Causal: true, Window: &kernels.Window{Left: 6},
			Spans: [][][2]int{{{10, 30}}}, QSegments: ids(37, 12, 1, 37, 2), KSegments: ids(41, 20, 1, 41, 2)}},
		{Name: "spans, alibi, sinks, short mask", Dims: plain, MaskShape: backend.Shape{2, 1, 37, 29}, Options: kernels.Options{Causal: true, ALiBi: slopes(6), Sinks: []float32{1, 2, 3, 0, 0, 0},
			Spans: [][][2]int{{{20, 35}}}}},
		{Name: "spans, dropout, bias by distance", Dims: plain, RelativeShape: backend.Shape{1, 6, 1, 77}, Options: kernels.Options{Causal: true, Dropout: kernels.Dropout{P: 0.3, Seed: 5}, Spans: [][][2]int{{{6, 25}}}}},
	} {
		c.Seed = uint64(n + 1)
		cases = append(cases, c)
	}
	return cases
}

// testSpans compares calls with spans and their gradients with the oracle, and caches whose sequences get spans in
// several appends, with and without a window that is shorter than some.
func testSpans(t *testing.T, dev *kernels.Device, h Harness) {
	for n, c := range spanCases() {
		if h.hurries() && n%3 > 0 {
			continue
		}
		t.Run(c.Name, func(t *testing.T) {
			needs(t, dev, c)
			testCase(t, dev, c, new(digests))
			if c.PageSize == 0 && implements[backend.Differentiator](dev) {
				if _, err := checkGradients(t, dev, c); err != nil {
					t.Error(err)
				}
			}
		})
	}
	both, spans := []int{0, 1}, [][][2]int{{{2, 9}, {12, 25}}, {{4, 17}}}
	types := []backend.DType{backend.F32, backend.BF16, backend.Q8}
	if h.hurries() {
		types = types[:1]
	}
	for n, kv := range types {
		for _, window := range []int{0, 7} {
			for _, paged := range []bool{false, true} {
				t.Run(fmt.Sprintf("cache, %v, window %d, pages %t", kv, window, paged), func(t *testing.T) {
					needs(t, dev, Case{Keys: &kv})
					s := newHistory(t, dev, 2, backend.F32, kv, nil)
					if n == 0 {
						s.rope = &nn.RoPE{}
					}
					var cache nn.KVCache
					if paged {
						needsAll(t, dev, "pages")
						c := must(kvcache.NewPaged(t.Context(), dev, kvcache.PagedConfig{KVHeads: s.dims.KVHeads, Dim: s.dims.Dim, ValueDim: s.dims.ValueDim, DType: kv, RoPE: s.rope, PageSize: 4, Pages: 20, Window: window}))(t)
						defer c.Release()
						cache = c.Batch(sequence(t, c), sequence(t, c))
					} else {
						c := must(kvcache.New(t.Context(), dev, kvcache.Config{Batch: 2, KVHeads: s.dims.KVHeads, Dim: s.dims.Dim, ValueDim: s.dims.ValueDim, DType: kv, RoPE: s.rope, Capacity: 28, Window: window}))(t)
						defer c.Release()
						cache = c
					}
					opt := kvcache.CallOptions{Options: kernels.Options{Spans: spans}}
					if window > 0 {
						cache, opt.Window = windowed{cache}, &kernels.Window{Left: window - 1}
					}
					for _, opt.Count = range [][]int{{10, 4}, {2, 13}, {13, 1}, {1, 2}} {
						rows := max(opt.Count[0], opt.Count[1])
						k, v, remember := s.next(t, both, rows)
						noError(t, cache.Append(t.Context(), k, v, opt.Count))
						remember(opt.Count)
						s.attend(t, both, rows, cache, opt, 0)
					}
				})
			}
		}
	}
}
