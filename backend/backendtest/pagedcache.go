package backendtest

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kvcache"
	"github.com/seed90331342/attn/kernels/nn"
)

// testPagedCache tests sequences that share pages.
func testPagedCache(t *testing.T, dev *kernels.Device) {
	needsAll(t, dev, "pages")
	for _, kv := range []backend.DType{backend.F32, backend.F16, backend.Q8} {
		t.Run(fmt.Sprintf("%v", kv), func(t *testing.T) {
			needs(t, dev, Case{DType: kv})
			s := newHistory(t, dev, 4, backend.F32, kv, nil)
			if kv == backend.F32 {
				s.rope = &nn.RoPE{}
			}
			testForks(t, s)
		})
	}
	t.Run("window", func(t *testing.T) {
		s := newHistory(t, dev, 2, backend.F32, backend.F32, nil)
		const w = 9
		c := must(kvcache.NewPaged(t.Context(), s.dev, kvcache.PagedConfig{KVHeads: 2, Dim: 16, ValueDim: 8, PageSize: 4, Pages: 14, Window: w}))(t)
		defer c.Release()
		a, b := sequence(t, c), sequence(t, c)
		for i := range 12 {
			n := 1 + i*5%7
			k, v, remember := s.next(t, []int{0, 1}, n)
			count := []int{n, n - n/3}
			noError(t, c.Batch(a, b).Append(t.Context(), k, v, count))
			remember(count)
			s.attendWindow(t, []int{0, 1}, n, c.Batch(a, b), kvcache.CallOptions{}, count, w)
		}
		a.Free()
		b.Free()
		if n := c.FreePages(); n != 14 {
			t.Errorf("%d pages are free in the end, should be 14", n)
		}
	})
}

func sequence(t *testing.T, c *kvcache.Paged) *kvcache.Sequence {
	t.Helper()
	s := must(c.NewSequence())(t)
	return s
}

// testForks forks a sequence in the middle of a page, lets the forks diverge, and reads
// their common prefix once.
func testForks(t *testing.T, s *history) {
	c := must(kvcache.NewPaged(t.Context(), s.dev, kvcache.PagedConfig{KVHeads: 2, Dim: 16, ValueDim: 8, DType: s.kv, PageSize: 16, Pages: 9, RoPE: s.rope}))(t)
	defer c.Release()
	add := func(of []int, n int, count []int, b *kvcache.Batch) {
		t.Helper()
		k, v, remember := s.next(t, of, n)
		noError(t, b.Append(t.Context(), k, v, count))
		remember(count)
	}
	free := func(want int) {
		t.Helper()
		if n := c.FreePages(); n != want {
			t.Errorf("%d pages are free, should be %d", n, want)
		}
	}
	seqs := []*kvcache.Sequence{sequence(t, c)}
	add([]int{0}, 37, nil, c.Batch(seqs[0]))
	s.attend(t, []int{0}, 37, c.Batch(seqs[0]), kvcache.CallOptions{}, 0)
	free(6)
	for i := 1; i < 3; i++ {
		fork := must(seqs[0].Fork())(t)
		seqs = append(seqs, fork)
		s.k[i], s.v[i] = slices.Clone(s.k[0]), slices.Clone(s.v[0])
	}
	free(6)
	all := []int{0, 1, 2}
	batch := c.Batch(seqs...)
	add(all, 1, nil, batch) // two copies of the last page
	free(4)
	s.attend(t, all, 1, batch, kvcache.CallOptions{}, 0)
	s.attend(t, all, 1, batch, kvcache.CallOptions{SharePrefix: true}, 1)
	add(all, 12, []int{12, 0, 5}, batch) // one more page for the first
	free(3)
	s.attend(t, all, 12, batch, kvcache.CallOptions{Count: []int{12, 0, 5}}, 0)
	s.attend(t, all, 3, batch, kvcache.CallOptions{SharePrefix: true}, 1)
	seqs[0].Free()
	seqs[0].Free()
	free(5) // the last two of its pages
	s.attend(t, []int{2, 1}, 1, c.Batch(seqs[2], seqs[1]), kvcache.CallOptions{}, 0)
	k, v, _ := s.next(t, []int{1, 2}, 60)
	for _, bad := range []struct {
		name  string
		batch *kvcache.Batch
		want  error
		text  string
	}{
		{"too few pages", c.Batch(seqs[1:]...), backend.ErrCapacity, "5 of 9 pages of 16 tokens are free"},
		{"freed", c.Batch(seqs[0], seqs[1]), backend.ErrReleased, "sequence 0: the sequence was freed"},
		{"twice", c.Batch(seqs[1], seqs[1]), backend.ErrOption, "Fork it"},
		{"none", c.Batch(), backend.ErrShape, "no sequences"},
		{"nil", c.Batch(seqs[1], nil), backend.ErrOption, "sequence 1 is nil"},
	} {
		if err := bad.batch.Append(t.Context(), k, v, nil); !errors.Is(err, bad.want) || !strings.Contains(err.Error(), bad.text) {
			t.Errorf("%s: error is %v, should be %v and contain %q", bad.name, err, bad.want, bad.text)
		}
		free(5)
	}
	s.attend(t, []int{1, 2}, 2, c.Batch(seqs[1:]...), kvcache.CallOptions{}, 0)
	for _, x := range seqs {
		x.Free()
	}
	free(9)
}
