package kvcache_test

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/kernels/kvcache"
	"github.com/seed90331342/attn/kernels/nn"
)

// parents is a tree of speculated tokens, breadth first:
//
//	0 ┬ 1 ┬ 3
//	  │   └ 4
//	  └ 2 ┬ 5
//	      └ 6
var parents = []int{-1, 0, 0, 1, 1, 2, 2}

// path returns the tokens of the tree from the root to token i, and i.
func path(i int) (rows []int) {
	for ; i >= 0; i = parents[i] {
		rows = append(rows, i)
	}
	slices.Reverse(rows)
	return rows
}

// tree7 returns the ancestors of each token, and itself: [7, 7].
func tree7() []bool {
	see := make([]bool, len(parents)*len(parents))
	for i := range parents {
		for _, j := range path(i) {
			see[i*len(parents)+j] = true
		}
	}
	return see
}

// cache is what both kinds of caches have.
type cache interface {
	Append(ctx context.Context, k, v kernels.Tensor, count []int) error
	AppendAt(ctx context.Context, k, v kernels.Tensor, count []int, positions [][]int) error
	Attention(ctx context.Context, q kernels.Tensor, opt kvcache.CallOptions) (kernels.Result, error)
}

// speculative is a cache with two sequences.
type speculative struct {
	cache
	keep func(b, from int, rows ...int) error
}

// TestTree speculates a tree of tokens after two sequences of different lengths. Each row of its
// attention has the result of decoding the row's path one token after the other. When a path is
// kept, decoding goes on with the bits of a cache that has seen no other tokens.
func TestTree(t *testing.T) {
	dev, ctx := onCPU(t, cpu.Options{}), t.Context()
	contiguous := func(t *testing.T, c kvcache.Config) speculative {
		x := must.Get(kvcache.New(ctx, dev, c))(t)
		t.Cleanup(x.Release)
		return speculative{x, func(b, from int, rows ...int) error { return x.Keep(ctx, b, from, rows) }}
	}
	paged := func(t *testing.T, c kvcache.Config) speculative {
		x := must.Get(kvcache.NewPaged(ctx, dev, kvcache.PagedConfig{KVHeads: c.KVHeads, Dim: c.Dim, DType: c.DType, RoPE: c.RoPE, Hadamard: c.Hadamard, PageSize: 16, Pages: 12}))(t)
		t.Cleanup(x.Release)
		s := [2]*kvcache.Sequence{must.Get(x.NewSequence())(t), must.Get(x.NewSequence())(t)}
		batch := x.Batch(s[:]...)
		return speculative{batch, func(b, from int, rows ...int) error { return s[b].Keep(ctx, from, rows) }}
	}
	for _, c := range []struct {
		dtype     kernels.DType
		rope      kvcache.Rotary
		hadamard  bool
		tolerance float64
	}{
		{kernels.F32, nil, false, 0x1p-16}, {kernels.F32, &nn.RoPE{}, false, 0x1p-16}, {kernels.BF16, &nn.RoPE{}, false, 0x1p-16},
		{kernels.Q8, &nn.RoPE{}, false, 0x1p-16}, {kernels.Q4, &nn.RoPE{}, true, 0x1p-12},
	} {
		config := kvcache.Config{Batch: 2, KVHeads: 2, Dim: 32, Capacity: 64, DType: c.dtype, RoPE: c.rope, Hadamard: c.hadamard}
		for name, open := range map[string]func(*testing.T, kvcache.Config) speculative{"contiguous": contiguous, "paged": paged} {
			t.Run(fmt.Sprintf("%s/%v rope %v", name, c.dtype, c.rope != nil), func(t *testing.T) {
				testTree(t, dev, open(t, config), open(t, config), c.tolerance)
			})
		}
	}
}

// testTree speculates in tree and decodes paths in plain, which have the same config.
//
// In the tree the same keys are summed in another order. Scores are sums of 32 products whose
// absolute values sum to at most √32/4, so that each result has weights within 56u of theirs,
// and then two sums of 40 to 44 terms of at most 1/2. Both results together are within 202u,
// less than 2^-16. With Hadamard matrices, terms are up to √32 as large, and so is the sum of
// their errors.
func testTree(t *testing.T, dev *kernels.Device, tree, plain speculative, tolerance float64) {
	const heads, kvHeads, dim = 4, 2, 32
	rng, ctx, lens, nodes := rand.New(rand.NewPCG(3, 7)), t.Context(), []int{37, 21}, len(parents)
	draw := func(heads, n int) kernels.Tensor { // elements within ±1/2
		data := make([]float32, 2*heads*n*dim)
		for i := range data {
			data[i] = rng.Float32() - 0.5
		}
		return must.Get(kernels.HostF32(data, kernels.Shape{2, heads, n, dim}))(t)
	}
	row := func(x kernels.Tensor, i int) kernels.Tensor { return must.Get(x.Slice(kernels.Seq, i, i+1))(t) }
	attend := func(c speculative, q kernels.Tensor, opt kvcache.CallOptions) []float32 {
		return hostFloats(t, must.Get(c.Attention(ctx, q, opt))(t))
	}
	k, v := draw(kvHeads, lens[0]), draw(kvHeads, lens[0])
	must.Do(t, tree.Append(ctx, k, v, lens))
	must.Do(t, plain.Append(ctx, k, v, lens))

	keys := lens[0] + nodes
	visible, positions := make([]bool, 2*nodes*keys), make([][]int, 2)
	for b, n := range lens {
		for i := range parents {
			see := visible[(b*nodes+i)*keys:]
			for j := range n {
				see[j] = true
			}
			for _, j := range path(i) {
				see[n+j] = true
			}
			positions[b] = append(positions[b], n+len(path(i))-1)
		}
	}
	opt := kvcache.CallOptions{Positions: positions}
	opt.Mask = must.Get(kernels.HostBool(visible, kernels.Shape{2, 1, nodes, keys}))(t)
	q, k, v := draw(heads, nodes), draw(kvHeads, nodes), draw(kvHeads, nodes)
	must.Do(t, tree.AppendAt(ctx, k, v, nil, positions))
	got := attend(tree, q, opt)
	ancestors := kvcache.CallOptions{Positions: positions, MaskLast: true}
	ancestors.Mask = must.Get(kernels.HostBool(tree7(), kernels.Shape{1, 1, nodes, nodes}))(t)
	for at, x := range attend(tree, q, ancestors) {
		// Both parts and the factors that merge them are within the bound of a result.
		if math.Abs(float64(x-got[at])) > 2*tolerance {
			t.Fatalf("element %d of a mask of the last tokens is %v, of all tokens %v", at, x, got[at])
		}
	}
	for leaf := 3; leaf < nodes; leaf++ {
		for _, i := range path(leaf) {
			must.Do(t, plain.Append(ctx, row(k, i), row(v, i), nil))
			for at, want := range attend(plain, row(q, i), kvcache.CallOptions{}) {
				if x := got[(at/dim*nodes+i)*dim+at%dim]; math.Abs(float64(x-want)) > tolerance {
					t.Fatalf("token %d of the path to %d, element %d: %v in the tree, %v decoded", i, leaf, at, x, want)
				}
			}
		}
		for b, n := range lens {
			must.Do(t, plain.keep(b, n))
		}
	}
	// Each sequence accepts another path.
	accepted := [][]int{path(5), path(4)}
	for b, rows := range accepted {
		must.Do(t, tree.keep(b, lens[b], rows...))
	}
	for i := range accepted[0] {
		for b, rows := range accepted {
			count := []int{0, 0}
			count[b] = 1
			must.Do(t, plain.Append(ctx, row(k, rows[i]), row(v, rows[i]), count))
		}
	}
	for range 3 {
		q, k, v := draw(heads, 1), draw(kvHeads, 1), draw(kvHeads, 1)
		must.Do(t, tree.Append(ctx, k, v, nil))
		must.Do(t, plain.Append(ctx, k, v, nil))
		if got, want := attend(tree, q, kvcache.CallOptions{}), attend(plain, q, kvcache.CallOptions{}); !slices.Equal(got, want) {
			t.Fatalf("after the kept tokens %v, should be %v", got[:4], want[:4])
		}
	}
}

// TestMaskLast compares calls with a mask of the last tokens with those whose mask has all
// tokens, where forks share a prefix and one sequence has fewer rows than the other.
func TestMaskLast(t *testing.T) {
	dev, ctx, rng := onCPU(t, cpu.Options{}), t.Context(), rand.New(rand.NewPCG(5, 1))
	const heads, dim, prompt, last = 2, 8, 13, 7
	draw := func(batch, heads, n int) kernels.Tensor { // elements within ±1/2
		data := make([]float32, batch*heads*n*dim)
		for i := range data {
			data[i] = rng.Float32() - 0.5
		}
		return must.Get(kernels.HostF32(data, kernels.Shape{batch, heads, n, dim}))(t)
	}
	c := must.Get(kvcache.NewPaged(ctx, dev, kvcache.PagedConfig{Dim: dim, PageSize: 4, Pages: 16}))(t)
	defer c.Release()
	s := must.Get(c.NewSequence())(t)
	must.Do(t, c.Batch(s).Append(ctx, draw(1, 1, prompt), draw(1, 1, prompt), nil))
	batch, count := c.Batch(s, must.Get(s.Fork())(t)), []int{7, 5}
	must.Do(t, batch.Append(ctx, draw(2, 1, last), draw(2, 1, last), count))
	const keys = prompt + last
	q, open := draw(2, heads, last), slices.Repeat([]bool{true}, last*last)
	for _, o := range []struct {
		name string
		mask []bool // [7, 7]
		set  func(o *kvcache.CallOptions)
	}{
		{"causal", open, func(o *kvcache.CallOptions) {}},
		{"tree", tree7(), func(o *kvcache.CallOptions) {}},
		{"lse and sinks", tree7(), func(o *kvcache.CallOptions) { o.LSE, o.Sinks = true, []float32{1, -1} }},
		{"shared prefix", tree7(), func(o *kvcache.CallOptions) { o.SharePrefix, o.LSE, o.Sinks = true, true, []float32{1, -1} }},
		{"bidirectional", open, func(o *kvcache.CallOptions) { o.Bidirectional, o.Softcap = true, 2 }},
	} {
		want, got := kvcache.CallOptions{Count: count}, kvcache.CallOptions{Count: count, MaskLast: true}
		o.set(&want)
		o.set(&got)
		want.SharePrefix = false
		all := make([]bool, 2*last*keys)
		for b := range count {
			for i := range last {
				begin, see := prompt+count[b]-last, all[(b*last+i)*keys:]
				copy(see[:begin], slices.Repeat([]bool{true}, begin))
				copy(see[begin:keys], o.mask[i*last:(i+1)*last])
			}
		}
		want.Mask = must.Get(kernels.HostBool(all, kernels.Shape{2, 1, last, keys}))(t)
		got.Mask = must.Get(kernels.HostBool(o.mask, kernels.Shape{1, 1, last, last}))(t)
		w, g := must.Get(batch.Attention(ctx, q, want))(t), must.Get(batch.Attention(ctx, q, got))(t)
		for name, pair := range map[string][2]kernels.Tensor{"o": {w.O, g.O}, "lse": {w.LSE, g.LSE}} {
			if pair[0].IsZero() != pair[1].IsZero() {
				t.Fatalf("%s: one call has an %s", o.name, name)
			} else if pair[0].IsZero() {
				continue
			}
			w, g := must.Get(pair[0].Float32s())(t), must.Get(pair[1].Float32s())(t)
			each := len(w) / 2 / heads / last
			for at := range w {
				// As in testTree, of up to three parts. An LSE is at most 4, with a rounding of 4u.
				if b, i := at/(len(w)/2), at/each%last; i < count[b] && math.Abs(float64(w[at]-g[at])) > 0x1p-15 {
					t.Fatalf("%s: element %d of %s is %v, should be %v", o.name, at, name, g[at], w[at])
				}
			}
		}
	}
	opt := kvcache.CallOptions{MaskLast: true}
	must.Fail(t, "no mask", must.Err(batch.Attention(ctx, q, opt)), kernels.ErrOption, "MaskLast is set without a Mask")
	opt.Mask = must.Get(kernels.HostBool(make([]bool, 6), kernels.Shape{1, 1, 1, 6}))(t)
	must.Fail(t, "rows before it", must.Err(batch.Attention(ctx, q, opt)), kernels.ErrShape, "mask covers the last 6 tokens, it must cover the 7 rows of q for sequence 0 and at most its 20 tokens")
	opt.Mask = must.Get(kernels.HostBool(make([]bool, 19), kernels.Shape{1, 1, 1, 19}))(t)
	must.Fail(t, "too few tokens", must.Err(batch.Attention(ctx, q, opt)), kernels.ErrShape, "for sequence 1 and at most its 18 tokens")
	opt.ALiBi = []float32{1, 1}
	must.Fail(t, "distances", must.Err(batch.Attention(ctx, q, opt)), kernels.ErrOption, "ALiBi is set, but with it a shared prefix")
	// Caches with windows are in the conformance suite, with the oracle.
	paged := must.Get(kvcache.NewPaged(ctx, dev, kvcache.PagedConfig{Dim: dim, PageSize: 4, Pages: 16, Window: 5}))(t)
	defer paged.Release()
	w := paged.Batch(must.Get(paged.NewSequence())(t))
	for _, n := range []int{prompt, 3} {
		must.Do(t, w.Append(ctx, draw(1, 1, n), draw(1, 1, n), nil))
	}
	for _, x := range []struct {
		name string
		last int
		opt  kvcache.CallOptions
		text string
	}{
		{"more than the window", 6, kvcache.CallOptions{}, "mask covers the last 6 tokens, it must cover at most the 5 of the cache's window"},
		{"before the mask", 3, kvcache.CallOptions{Positions: [][]int{{13, 12, 14}}}, "row 1 of sequence 0 has position 12, with a mask of the last tokens and a window it must be 13 to 15"},
		{"after all tokens", 3, kvcache.CallOptions{Positions: [][]int{{13, 14, 16}}}, "row 2 of sequence 0 has position 16"},
		{"a window that is dropped", 5, kvcache.CallOptions{Positions: [][]int{{11, 12, 13}}}, "row 0 of sequence 0 has position 11, with a mask of the last tokens and a window it must be 12 to 15"},
		{"shared prefix", 3, kvcache.CallOptions{SharePrefix: true}, "SharePrefix is set, but the cache has a window"},
		{"distances", 3, kvcache.CallOptions{Options: kernels.Options{ALiBi: []float32{1}}}, "ALiBi is set, but with it a shared prefix"},
	} {
		x.opt.MaskLast, x.opt.Mask = true, must.Get(kernels.HostBool(make([]bool, x.last), kernels.Shape{1, 1, 1, x.last}))(t)
		must.Fail(t, x.name, must.Err(w.Attention(ctx, draw(1, 1, 3), x.opt)), kernels.ErrOption, x.text)
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
	a4 := fork(a3)
	for name, x := range map[string]struct {
		batch []*kvcache.Sequence
		want  [][2]int // batches and keys of each call
	}{
		"one level, and two":  {[]*kvcache.Sequence{a2, a4, b}, [][2]int{{3, 13}, {1, 8}, {1, 4}}},
		"one level":           {[]*kvcache.Sequence{a2, b}, [][2]int{{2, 13}, {1, 8}}},
		"three levels":        {[]*kvcache.Sequence{b, a2, a3, a4}, [][2]int{{4, 13}, {1, 8}, {1, 4}, {1, 4}}},
		"nothing in common":   {[]*kvcache.Sequence{grow(must.Get(c.NewSequence())(t), 2), a2}, [][2]int{{2, 17}}},
		"groups of two":       {[]*kvcache.Sequence{a3, a4, grow(must.Get(c.NewSequence())(t), 2), root, b}, [][2]int{{5, 13}, {1, 16}, {1, 8}}},
		"the others not next": {[]*kvcache.Sequence{a2, b, a3}, [][2]int{{3, 13}, {1, 8}}},
	} {
		for i, s := range x.batch {
			x.batch[i] = fork(s)
		}
		own := c.Batch(x.batch...)
		must.Do(t, own.Append(ctx, host(len(x.batch), 1), host(len(x.batch), 1), nil))
		be.keys = nil
		r := must.Get(own.Attention(ctx, host(len(x.batch), 1), kvcache.CallOptions{SharePrefix: true}))(t)
		r.Release()
		if !slices.Equal(be.keys, x.want) {
			t.Errorf("%s: calls read %v, should read %v", name, be.keys, x.want)
		}
		for _, s := range x.batch {
			s.Free()
		}
	}
}
