package kernelstest

import (
	"fmt"
	"slices"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kvcache"
	"github.com/seed90331342/attn/kernels/nn"
)

// testTrees attends from trees of speculated tokens with masks of the last tokens. The prompts before them differ in length
// or are in shared pages, and roll through a window. A row sees the tokens within the window of its position, which siblings
// share. After each tree a path of it is kept.
func testTrees(t *testing.T, dev *kernels.Device, h Harness) {
	parents := []int{-1, 0, 0, 1, 1, 2, 2} // of a tree, or of its first nodes
	types := []backend.DType{backend.F32, backend.BF16, backend.Q8}
	if h.hurries() {
		types = types[:1]
	}
	for _, kv := range types {
		for _, x := range []struct {
			name          string
			window        int
			paged, shared bool
		}{
			{"full", 0, false, false}, {"pages", 0, true, false}, {"shared prefix", 0, true, true},
			{"window", 9, false, false}, {"window in pages", 9, true, false}, {"window with a shared prefix", 9, true, true},
		} {
			t.Run(fmt.Sprintf("%s, %v", x.name, kv), func(t *testing.T) {
				needs(t, dev, Case{Keys: &kv})
				needsAll(t, dev, "mask")
				if x.paged || x.window > 0 { // rows then see a contiguous cache as pages
					needsAll(t, dev, "pages")
				}
				s, both := newHistory(t, dev, 2, backend.F32, kv, nil), []int{0, 1}
				var cache nn.KVCache
				var keep func(b, from int, rows []int) error
				add := func(to nn.KVCache, of []int, n int, count []int, positions [][]int) {
					k, v, remember := s.next(t, of, n)
					noError(t, to.AppendAt(t.Context(), k, v, count, positions))
					remember(count)
				}
				if x.paged {
					c := must(kvcache.NewPaged(t.Context(), dev, kvcache.PagedConfig{KVHeads: s.dims.KVHeads, Dim: s.dims.Dim, ValueDim: s.dims.ValueDim, DType: kv, PageSize: 4, Pages: 48, Window: x.window}))(t)
					defer c.Release()
					of := []*kvcache.Sequence{sequence(t, c), nil}
					if x.shared {
						add(c.Batch(of[0]), both[:1], 21, nil, nil)
						s.k[1], s.v[1] = slices.Clone(s.k[0]), slices.Clone(s.v[0])
						of[1] = must(of[0].Fork())(t)
					} else {
						of[1] = sequence(t, c)
					}
					cache = c.Batch(of...)
					keep = func(b, from int, rows []int) error { return of[b].Keep(t.Context(), from, rows) }
				} else {
					c := must(kvcache.New(t.Context(), dev, kvcache.Config{Batch: 2, KVHeads: s.dims.KVHeads, Dim: s.dims.Dim, ValueDim: s.dims.ValueDim, DType: kv, Capacity: 26 + 40/(1+x.window), Window: x.window}))(t)
					defer c.Release()
					cache, keep = c, func(b, from int, rows []int) error { return c.Keep(t.Context(), b, from, rows) }
				}
				for round, prompt := range [][]int{{10, 3}, {1, 9}, {2, 1}, {1, 8}} {
					add(cache, both, slices.Max(prompt), prompt, nil)
					nodes := [][]int{{7, 5}, {3, 7}, {5, 7}, {7, 4}}[round]
					const last = 7
					positions, mask, depth, ancestor := make([][]int, 2), make([]bool, 2*last*last), make([]int, last), [last][last]bool{}
					for i, parent := range parents {
						if parent >= 0 {
							depth[i], ancestor[i] = depth[parent]+1, ancestor[parent]
						}
						ancestor[i][i] = true
						for b, n := range nodes { // columns before the tree are tokens that all rows see
							positions[b] = append(positions[b], s.len(b)+depth[i])
							row := mask[(b*last+i)*last:][:last]
							for j := range row {
								row[j] = j < last-n || ancestor[i][j-(last-n)]
							}
						}
					}
					from := []int{s.len(0), s.len(1)}
					add(cache, both, last, nodes, positions)
					opt := kvcache.CallOptions{Count: nodes, Positions: positions, MaskLast: true, SharePrefix: x.shared && x.window == 0}
					opt.Mask = must(dev.Upload(t.Context(), must(backend.Host(mask, backend.Bool, backend.Shape{2, 1, last, last}))(t)))(t)
					s.held = append(s.held, opt.Mask)
					if !lacking(dev, "sinks") {
						opt.Sinks = []float32{1, -1, 2, 0}
					}
					s.visible = func(b, i, j int) bool {
						if j -= from[b]; j < 0 {
							return x.window == 0 || -j+depth[i] < x.window
						}
						return ancestor[i][j]
					}
					s.attend(t, both, last, cache, opt, 2)
					s.visible = nil
					for b, rows := range [][]int{{0, 2}, {0, 1, 3}} {
						rows = rows[:min(len(rows), nodes[b]-1)]
						noError(t, keep(b, from[b], rows))
						s.keep(b, from[b], rows)
					}
				}
			})
		}
	}
}
