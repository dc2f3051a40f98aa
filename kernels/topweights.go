package kernels

import (
	"container/heap"
	"context"
	"fmt"
	"math"
	"runtime"
	"sort"
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
	s, err := d.weightScan(q, k, opt, chunk)
	if err != nil {
		return top, err
	}
	defer s.release()
	size := backend.Shape{s.dims.Batch, s.dims.Heads, s.dims.SeqQ, n}.Elements()
	if size < 0 {
		return top, fmt.Errorf("%d weights for each of %d queries are too many: %w", n, s.dims.Batch*s.dims.Heads*s.dims.SeqQ, backend.ErrMemory)
	}
	top = Top{make([]int32, size), make([]float32, size)}
	for i := range top.Keys {
		top.Keys[i] = -1
	}
	return top, s.problem.eachRegion(func(x region, _ *backend.Problem) error {
		return s.chunks(x, math.MaxInt, func(x region) error {
			w, _, err := s.weights(ctx, x, x.lo[backend.Dim], x.hi[backend.Dim])
			if err != nil {
				return err
			}
			rows, keys := x.hi[backend.Seq]-x.lo[backend.Seq], x.hi[backend.Dim]-x.lo[backend.Dim]
			inParallel((x.hi[backend.Heads]-x.lo[backend.Heads])*rows, func(r int) {
				h, i := x.lo[backend.Heads]+r/rows, x.lo[backend.Seq]+r%rows
				at := ((x.lo[backend.Batch]*s.dims.Heads+h)*s.dims.SeqQ + i) * n
				pick(w[r*keys:(r+1)*keys], x.lo[backend.Dim], top.Keys[at:at+n], top.Weights[at:at+n])
			})
			return ctx.Err()
		})
	})
}

// pick writes the largest weights of row, which begins with key first, in descending order,
// as many as keys and weights hold.
func pick(row []float32, first int, keys []int32, weights []float32) {
	n, top := 0, topHeap{keys, weights}
	for j, w := range row {
		switch {
		case w == 0:
		case n < len(keys):
			keys[n], weights[n] = int32(first+j), w
			if n++; n == len(keys) {
				heap.Init(top)
			}
		case rank(w) > rank(weights[0]): // equal ones came earlier and have lower keys
			keys[0], weights[0] = int32(first+j), w
			heap.Fix(top, 0)
		}
	}
	sort.Sort(sort.Reverse(topHeap{keys[:n], weights[:n]}))
}

// topHeap is a heap of weights with their keys, the smallest on top; of equal weights the one
// with the highest key. Its size does not change.
type topHeap struct {
	keys    []int32
	weights []float32
}

func (t topHeap) Len() int { return len(t.keys) }

func (t topHeap) Less(i, j int) bool {
	a, b := rank(t.weights[i]), rank(t.weights[j])
	return a < b || a == b && t.keys[i] > t.keys[j]
}

func (t topHeap) Swap(i, j int) {
	t.keys[i], t.keys[j] = t.keys[j], t.keys[i]
	t.weights[i], t.weights[j] = t.weights[j], t.weights[i]
}

func (topHeap) Push(any) {}
func (topHeap) Pop() any { return nil }

// rank returns w for comparison, with NaN as the largest.
func rank(w float32) float32 {
	if w != w {
		return float32(math.Inf(1))
	}
	return w
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
