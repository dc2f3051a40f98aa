package kernels

import (
	"context"
	"fmt"
	"math"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/seed90331342/attn/backend"
)

// Top are the largest weights of each query, in host memory, row by row.
type Top struct {
	// Keys is [B, H, Sq, N]: which keys have them, the largest weight first, of equal
	// ones the lower key; -1 where there are fewer.
	Keys []int32
	// Weights is [B, H, Sq, N]: the weights themselves, 0 where there are fewer.
	Weights []float32
}

// topChunk is how many bytes of weights [TopWeights] holds at a time: 16 MiB.
const topChunk = 16 << 20

// TopWeights computes which n keys each query attends to most, and how much: what one
// looks at in sequences that are too long for their weights to be kept.
//
//	q [B, H, Sq, D]    k [B, Hkv, Sk, D]
//
// The weights are those of Options.Weights, with all options; rows of them are made by
// the stages QK and Softmax, 16 MiB at a time (a row of one head at least), and looked
// through on the host. So the memory is O(Sq·n). A weight of 0 is not listed, be the
// key hidden, dropped or too far below the others; NaN counts as the largest. Errors as
// for [Attention], and ErrOption when n is less than 1.
func TopWeights(ctx context.Context, be backend.Backend, q, k backend.Tensor, n int, opt Options) (Top, error) {
	t, err := topWeights(ctx, be, q, k, n, &opt, topChunk)
	if err != nil {
		return Top{}, fmt.Errorf("top weights: %w", err)
	}
	return t, nil
}

func topWeights(ctx context.Context, be backend.Backend, q, k backend.Tensor, n int, opt *Options, chunk int) (top Top, err error) {
	if n < 1 {
		return top, fmt.Errorf("n is %d, it must be at least 1: %w", n, backend.ErrOption)
	}
	if opt.Pages != nil {
		return top, fmt.Errorf("weights are wanted of keys that are paged, which the stages do not take: %w", backend.ErrUnsupported)
	}
	if err := floats(backend.Operand{Name: "k", Tensor: k}); err != nil {
		return top, err
	}
	d, err := dims(q, k, k)
	if err != nil {
		return top, err
	}
	p, err := opt.problem(d)
	if err != nil {
		return top, err
	}
	d.SeqK = p.keys
	size := backend.Shape{d.Batch, d.Heads, d.SeqQ, n}.Elements()
	if size < 0 {
		return top, fmt.Errorf("%d weights for each of %d queries are too many: %w", n, d.Batch*d.Heads*d.SeqQ, backend.ErrMemory)
	}
	s := topSearch{be: be, d: d, n: n, most: chunk / 4, call: backend.Call{Q: q, K: k, V: k, Problem: p.Problem}, top: Top{make([]int32, size), make([]float32, size)}}
	for i := range s.top.Keys {
		s.top.Keys[i] = -1
	}
	defer func() { s.room.Release() }()
	for _, x := range p.partsOf(d) {
		if err := s.part(ctx, x); err != nil {
			return Top{}, err
		}
	}
	return s.top, nil
}

// topSearch is a TopWeights call.
type topSearch struct {
	be   backend.Backend
	d    Dims
	n    int
	most int // weights at a time
	call backend.Call
	top  Top
	room backend.Tensor // for weights, where they are computed
}

// part goes over part x chunk by chunk.
func (s *topSearch) part(ctx context.Context, x part) error {
	heads, rows := s.chunk(x)
	for b := x.lo[backend.Batch]; b < x.hi[backend.Batch]; b++ {
		for h := 0; h < s.d.Heads; h += heads {
			for i := x.lo[backend.Seq]; i < x.hi[backend.Seq]; {
				y := x
				y.lo[backend.Batch], y.hi[backend.Batch] = b, b+1
				y.lo[backend.Heads], y.hi[backend.Heads] = h, min(h+heads, s.d.Heads)
				y.lo[backend.Seq], y.hi[backend.Seq] = i, min(i+rows, x.hi[backend.Seq])
				if block := s.call.BlockQ; !s.call.Blocks.IsZero() {
					// A view of a mask of blocks begins with a block or lies inside one.
					if end := y.hi[backend.Seq]; end < x.hi[backend.Seq] && i%block == 0 && rows >= block {
						y.hi[backend.Seq] = end / block * block
					} else if i%block != 0 || rows < block {
						y.hi[backend.Seq] = min(end, (i/block+1)*block)
					}
				}
				if err := s.rows(ctx, y); err != nil {
					return err
				}
				i = y.hi[backend.Seq]
			}
		}
	}
	return nil
}

// chunk returns how many query heads and rows of x are computed at a time: whole groups
// that share their keys, or one head where a row of a group is too much.
func (s *topSearch) chunk(x part) (heads, rows int) {
	share := s.d.Heads / s.d.KVHeads
	most := s.most / (x.hi[backend.Dim] - x.lo[backend.Dim]) // rows of a head
	if heads = min(s.d.Heads, most/share*share); heads == 0 {
		heads = 1
	}
	return heads, max(1, most/heads)
}

// rows computes the weights of x and picks the largest of each row.
func (s *topSearch) rows(ctx context.Context, x part) error {
	var cut slicer
	c := cut.call(&s.call, x)
	if cut.err != nil {
		return cut.err
	}
	shape := backend.Shape{1, x.hi[backend.Heads] - x.lo[backend.Heads], x.hi[backend.Seq] - x.lo[backend.Seq], x.hi[backend.Dim] - x.lo[backend.Dim]}
	w, err := s.weights(ctx, c, shape)
	if err != nil {
		return err
	}
	inParallel(shape[1]*shape[2], func(r int) {
		h, i := x.lo[backend.Heads]+r/shape[2], x.lo[backend.Seq]+r%shape[2]
		at := ((x.lo[backend.Batch]*s.d.Heads+h)*s.d.SeqQ + i) * s.n
		pick(w[r*shape[3]:(r+1)*shape[3]], x.lo[backend.Dim], s.top.Keys[at:at+s.n], s.top.Weights[at:at+s.n])
	})
	return ctx.Err()
}

// weights returns the weights of a call on the host.
func (s *topSearch) weights(ctx context.Context, c *backend.Call, shape backend.Shape) ([]float32, error) {
	if have := s.room.Shape().Elements(); have < shape.Elements() {
		s.room.Release()
		var err error
		if s.room, err = s.be.Alloc(ctx, backend.F32, backend.Shape{1, 1, 1, shape.Elements()}); err != nil {
			return nil, err
		}
	}
	w, err := s.room.View(shape, shape.Contiguous(), 0)
	if err != nil {
		return nil, err
	}
	if err := s.be.QK(ctx, w, c.Q, c.K); err != nil {
		return nil, err
	}
	if err := s.be.Softmax(ctx, w, backend.Tensor{}, &c.Problem); err != nil {
		return nil, err
	}
	if w.OnHost() {
		return w.Float32s()
	}
	return Float32s(ctx, s.be, w)
}

// pick writes the largest of row, whose first weight is key first's, in descending
// order, as many as keys and weights hold. Until they are sorted in the end they are a
// heap with the least one on top.
func pick(row []float32, first int, keys []int32, weights []float32) {
	n := 0
	for j, w := range row {
		switch {
		case w == 0:
		case n < len(keys):
			keys[n], weights[n] = int32(first+j), w
			n++
			for i := n - 1; i > 0 && before(keys, weights, (i-1)/2, i); i = (i - 1) / 2 {
				exchange(keys, weights, i, (i-1)/2)
			}
		case rank(w) > rank(weights[0]): // equal ones came earlier: they are of lower keys
			keys[0], weights[0] = int32(first+j), w
			sink(keys, weights)
		}
	}
	for n--; n > 0; n-- {
		exchange(keys, weights, 0, n)
		sink(keys[:n], weights[:n])
	}
}

// sink moves the first of a heap down to its place.
func sink(keys []int32, weights []float32) {
	for i := 0; ; {
		least := i
		for c := 2*i + 1; c <= 2*i+2 && c < len(keys); c++ {
			if before(keys, weights, least, c) {
				least = c
			}
		}
		if least == i {
			return
		}
		exchange(keys, weights, i, least)
		i = least
	}
}

// before reports whether weight i comes before weight j.
func before(keys []int32, weights []float32, i, j int) bool {
	a, b := rank(weights[i]), rank(weights[j])
	return a > b || a == b && keys[i] < keys[j]
}

// rank orders weights: NaN is the largest.
func rank(w float32) float32 {
	if w != w {
		return float32(math.Inf(1))
	}
	return w
}

func exchange(keys []int32, weights []float32, i, j int) {
	keys[i], keys[j] = keys[j], keys[i]
	weights[i], weights[j] = weights[j], weights[i]
}

// inParallel calls f for 0 to n-1, each once, on all threads.
func inParallel(n int, f func(i int)) {
	var next atomic.Int64
	var wg sync.WaitGroup
	for range min(n, runtime.GOMAXPROCS(0)) {
		wg.Go(func() {
			for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
				f(i)
			}
		})
	}
	wg.Wait()
}
