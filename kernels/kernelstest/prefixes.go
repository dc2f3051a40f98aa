package kernelstest

import (
	"slices"
	"testing"

	"github.com/seed90331342/attn/kernels/kvcache"
)

// testPrefixes forks forks, so that sequences share pages on three levels.
func testPrefixes(t *testing.T, s *history) {
	c := must(kvcache.NewPaged(t.Context(), s.dev, kvcache.PagedConfig{KVHeads: 2, Dim: s.dims.Dim, ValueDim: s.dims.ValueDim, DType: s.kv, PageSize: 4, Pages: 30}))(t)
	defer c.Release()
	seqs := []*kvcache.Sequence{sequence(t, c), nil, nil, nil, nil, nil}
	add := func(of []int, n int, count []int, b *kvcache.Batch) {
		t.Helper()
		k, v, remember := s.next(t, of, n)
		noError(t, b.Append(t.Context(), k, v, count))
		remember(count)
	}
	for _, x := range []struct {
		b, tokens int
		forks     []int
	}{{0, 9, []int{3, 4}}, {0, 8, []int{1}}, {1, 6, []int{2}}, {4, 5, []int{5}}} {
		add([]int{x.b}, x.tokens, nil, c.Batch(seqs[x.b]))
		for _, to := range x.forks {
			seqs[to] = must(seqs[x.b].Fork())(t)
			s.k[to], s.v[to] = slices.Clone(s.k[x.b]), slices.Clone(s.v[x.b])
		}
	}
	all, count := []int{0, 1, 2, 3, 4, 5}, []int{3, 1, 3, 2, 3, 0}
	add(all, 3, count, c.Batch(seqs...))
	opt := kvcache.CallOptions{Count: count, SharePrefix: true}
	s.attend(t, all, 3, c.Batch(seqs...), opt, 3)
	if opt.Count = nil; !lacking(s.dev, "sinks") {
		opt.Sinks = []float32{1, -1, 2, 0}
	}
	s.attend(t, all, 1, c.Batch(seqs...), opt, 3)
	slices.Reverse(all)
	slices.Reverse(seqs)
	s.attend(t, all, 1, c.Batch(seqs...), opt, 3)
}
