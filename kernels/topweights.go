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

// Top holds the largest weights of each query row, in host memory.
type Top struct {
	// Keys [B, H, Sq, N] are the keys with the largest weights, the largest first and of
	// equal ones the lower key first; -1 where a row has fewer.
	Keys []int32
	// Weights [B, H, Sq, N] are the weights of these keys, 0 where a row has fewer.
	Weights []float32
}

// topChunk is the number of bytes of weights that TopWeights holds at a time, 16 MiB.
const topChunk = 16 << 20

// TopWeights computes the n keys that each query row attends to most and their weights, for
// sequences that are too long to keep all weights:
//
//	q [B, H, Sq, D]    k [B, Hkv, Sk, D]
//
// The weights are those of Options.Weights. The stages QK and Softmax compute 16 MiB of them
// at a time (at least one row of one head), and the host selects the largest, so that memory
// is O(Sq·n). A weight of 0, of a key that is hidden, dropped or far below the others, is
// not listed; NaN counts as the largest. Errors as for [Device.Attention], and ErrOption
// when n is less than 1.
func (d *Device) TopWeights(ctx context.Context, q, k backend.Tensor, n int, opt Options) (Top, error) {
	t, err := d.topWeights(ctx, q, k, n, &opt, topChunk)
	if err != nil {
		return Top{}, fmt.Errorf("top weights: %w", err)
	}
	return t, nil
}

func (d *Device) topWeights(ctx context.Context, q, k backend.Tensor, n int, opt *Options, chunk int) (top Top, err error) {
	if n < 1 {
		return top, fmt.Errorf("n is %d, it must be at least 1: %w", n, backend.ErrOption)
	}
	dims, err := scoreDims(q, k)
	if err != nil {
		return top, err
	}
	p, err := opt.stage(dims)
	if err != nil {
		return top, err
	}
	size := backend.Shape{dims.Batch, dims.Heads, dims.SeqQ, n}.Elements()
	if size < 0 {
		return top, fmt.Errorf("%d weights for each of %d queries are too many: %w", n, dims.Batch*dims.Heads*dims.SeqQ, backend.ErrMemory)
	}
	s := topSearch{be: d.be, d: dims, n: n, most: chunk / 4, q: q, k: k, problem: p, top: Top{make([]int32, size), make([]float32, size)}}
	for i := range s.top.Keys {
		s.top.Keys[i] = -1
	}
	defer func() { s.buffer.Release() }()
	if err := p.eachRegion(func(x region, _ *backend.Problem) error { return s.search(ctx, x) }); err != nil {
		return Top{}, err
	}
	return s.top, nil
}

// topSearch is the state of a TopWeights call.
type topSearch struct {
	be      backend.Backend
	d       Dims
	n       int
	most    int // weights at a time
	q, k    backend.Tensor
	problem problem
	top     Top
	buffer  backend.Tensor // of the weights at a time
}

// search selects the largest weights of x, chunk by chunk.
func (s *topSearch) search(ctx context.Context, x region) error {
	heads, rows := s.chunk(x)
	for b := x.lo[backend.Batch]; b < x.hi[backend.Batch]; b++ {
		for h := 0; h < s.d.Heads; h += heads {
			for i := x.lo[backend.Seq]; i < x.hi[backend.Seq]; {
				y := x
				y.lo[backend.Batch], y.hi[backend.Batch] = b, b+1
				y.lo[backend.Heads], y.hi[backend.Heads] = h, min(h+heads, s.d.Heads)
				y.lo[backend.Seq], y.hi[backend.Seq] = i, min(i+rows, x.hi[backend.Seq])
				if block := s.problem.BlockQ; !s.problem.Blocks.IsZero() {
					// A slice of a block mask begins with a block or lies inside one.
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
// that share their keys, or one head when a row of a group is too large.
func (s *topSearch) chunk(x region) (heads, rows int) {
	share := s.d.Heads / s.d.KVHeads
	most := s.most / (x.hi[backend.Dim] - x.lo[backend.Dim]) // rows of a head
	if heads = min(s.d.Heads, most/share*share); heads == 0 {
		heads = 1
	}
	return heads, max(1, most/heads)
}

// rows computes the weights of x and selects the largest of each row.
func (s *topSearch) rows(ctx context.Context, x region) error {
	shape := backend.Shape{1, x.hi[backend.Heads] - x.lo[backend.Heads], x.hi[backend.Seq] - x.lo[backend.Seq], x.hi[backend.Dim] - x.lo[backend.Dim]}
	w, err := s.weights(ctx, x, shape)
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

// weights returns the weights of x, of the given shape, in host memory.
func (s *topSearch) weights(ctx context.Context, x region, shape backend.Shape) ([]float32, error) {
	if have := s.buffer.Shape().Elements(); have < shape.Elements() {
		s.buffer.Release()
		var err error
		if s.buffer, err = s.be.Alloc(ctx, backend.F32, backend.Shape{1, 1, 1, shape.Elements()}); err != nil {
			return nil, err
		}
	}
	w, err := s.buffer.View(shape, shape.Contiguous(), 0)
	if err != nil {
		return nil, err
	}
	var cut slicer
	q, k := cut.rows(s.q, &x), cut.keys(s.k, s.d, &x, false)
	if cut.err != nil {
		return nil, cut.err
	}
	p, err := s.problem.cut(x)
	if err != nil {
		return nil, err
	}
	if err := s.be.QK(ctx, w, q, k); err != nil {
		return nil, err
	}
	if err := s.be.Softmax(ctx, w, backend.Tensor{}, &p); err != nil {
		return nil, err
	}
	if w.OnHost() {
		return w.Float32s()
	}
	return float32s(ctx, s.be, w)
}

// pick writes the largest weights of row, which begins with key first, in descending order,
// as many as keys and weights hold. It collects them in a heap with the least one on top.
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
		case rank(w) > rank(weights[0]): // equal ones came earlier and have lower keys
			keys[0], weights[0] = int32(first+j), w
			sink(keys, weights)
		}
	}
	for n--; n > 0; n-- {
		exchange(keys, weights, 0, n)
		sink(keys[:n], weights[:n])
	}
}

// sink restores the order of a heap whose first element may be out of place.
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

// before reports whether weight i ranks before weight j.
func before(keys []int32, weights []float32, i, j int) bool {
	a, b := rank(weights[i]), rank(weights[j])
	return a > b || a == b && keys[i] < keys[j]
}

// rank returns w for comparison, with NaN as the largest.
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

// inParallel calls f once for each of 0 to n-1, on GOMAXPROCS goroutines.
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
