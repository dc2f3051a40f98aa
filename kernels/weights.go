package kernels

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"runtime"
	"slices"
	"sort"
	"sync"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/internal/op"
	"github.com/seed90331342/attn/kernels/internal/region"
)

// Top holds the largest weights of each query row, in host memory.
type Top struct {
	// Keys [B, H, Sq, N] are the keys with the largest weights, the largest first and of
	// equal ones the lower key first; -1 where a row has fewer.
	Keys []int32
	// Weights [B, H, Sq, N] are the weights of these keys, 0 where a row has fewer.
	Weights []float32
}

// weightChunk is the number of weights that are held at a time, 16 MiB of them. Tests lower it.
var weightChunk = 4 << 20

// TopWeights computes, for each query row, the n keys with the largest weights. It serves
// sequences that are too long to store all weights:
//
//	q [B, H, Sq, D]    k [B, Hkv, Sk, D]
//
// The weights are those of Options.Weights. The stages QK and Softmax compute 16 MiB of them at a time (at least one
// row of one head), and the host selects the largest. Memory is therefore O(Sq·n). Weights of 0 are not listed, and NaN
// counts as the largest weight. Errors as for [Device.Attention], and ErrOption when n is less than 1.
func (d *Device) TopWeights(ctx context.Context, q, k Tensor, n int, opt Options) (all Top, err error) {
	defer op.Annotate(&err, "top weights")
	if n < 1 {
		return all, fmt.Errorf("n is %d, it must be at least 1: %w", n, ErrOption)
	}
	s, err := d.weightScan(q, k, &opt)
	if err != nil {
		return all, err
	}
	heads, seq := s.dims.Heads, s.dims.SeqQ
	size := Shape{s.dims.Batch, heads, seq, n}.Elements() // negative when too large
	if err := backend.CheckMemory(8 * int64(size)); err != nil {
		return all, fmt.Errorf("%d weights for each of %d queries: %w", n, s.dims.Batch*heads*seq, err)
	}
	all = Top{Keys: slices.Repeat([]int32{-1}, size), Weights: make([]float32, size)}
	return all, s.scan(ctx, region.WholeRegion(s.dims).Box, func(x region.Region, w []float32, stride int) {
		rows := x.Len(Seq)
		inParallel(x.Len(Heads)*rows, func(r int) {
			h, i := x.Lo[Heads]+r/rows, x.Lo[Seq]+r%rows
			at := ((x.Lo[Batch]*heads+h)*seq + i) * n
			pick(w[r*stride:][:x.Len(region.Key)], x.Lo[region.Key], all.Keys[at:at+n], all.Weights[at:at+n])
		})
	})
}

// pick writes the largest weights of row, which begins with key first, in descending order, as
// many as keys and weights hold. Of equal weights the lower key comes first.
func pick(row []float32, first int, keys []int32, weights []float32) {
	n := 0
	for j, w := range row {
		if w == 0 || n == len(keys) && rank(w) <= rank(weights[n-1]) {
			continue
		}
		at := sort.Search(n, func(i int) bool { return rank(weights[i]) < rank(w) })
		n = min(n+1, len(keys))
		copy(keys[at+1:n], keys[at:])
		copy(weights[at+1:n], weights[at:])
		keys[at], weights[at] = int32(first+j), w
	}
}

// rank returns w for comparison, with NaN as the largest.
func rank(w float32) float32 {
	if w != w {
		return float32(math.Inf(1))
	}
	return w
}

// WeightRange selects weights of one query head: the rows Rows[0] <= i < Rows[1] and the keys Keys[0] <= j < Keys[1].
type WeightRange struct {
	Batch, Head int
	Rows, Keys  [2]int
}

// rangeRows is the number of rows that EachWeightRow computes at a time: enough to fill the
// tiles of QK, and few enough that a sliding window leaves most keys out.
const rangeRows = 256

// EachWeightRow computes a range of the weights of Options.Weights and calls f with each row
// in ascending order. f receives the weights of consecutive keys from first on; all other weights
// of the row in the range are 0. f is not called for rows whose weights are all 0.
//
//	q [B, H, Sq, D]    k [B, Hkv, Sk, D]
//
// The stages QK and Softmax compute the keys that the rows see, at most 256 rows and 16 MiB at a time (at least one
// row). Memory therefore does not grow with the range. f must not keep the slice. Errors as for [Device.Attention], and
// ErrShape for a range that is empty or exceeds the operands.
func (d *Device) EachWeightRow(ctx context.Context, q, k Tensor, r WeightRange, opt Options, f func(row, first int, weights []float32)) (err error) {
	defer op.Annotate(&err, "weights")
	if f == nil {
		return fmt.Errorf("f is nil, give a function that takes the rows: %w", ErrOption)
	}
	s, err := d.weightScan(q, k, &opt)
	if err != nil {
		return err
	}
	s.rows, s.narrow = rangeRows, true
	box := region.Box{Lo: [4]int{r.Batch, r.Head, r.Rows[0], r.Keys[0]}, Hi: [4]int{r.Batch + 1, r.Head + 1, r.Rows[1], r.Keys[1]}}
	for axis, n := range region.WholeRegion(s.dims).Hi {
		if box.Lo[axis] < 0 || box.Lo[axis] >= box.Hi[axis] || box.Hi[axis] > n {
			return fmt.Errorf("range %+v is empty or exceeds %+v: %w", r, s.dims, ErrShape)
		}
	}
	return s.scan(ctx, box, func(x region.Region, w []float32, stride int) {
		for i := range x.Len(Seq) {
			f(x.Lo[Seq]+i, x.Lo[region.Key], slices.Clip(w[i*stride:][:x.Len(region.Key)]))
		}
	})
}

// weightScan computes weights a chunk of rows at a time.
type weightScan struct {
	dev     *Device
	dims    backend.Dims
	q, k    Tensor
	problem region.Problem
	rows    int  // of a head in a chunk, at most
	narrow  bool // compute only the keys between the first and the last that rows of the chunk see
}

// weightScan checks the operands.
func (d *Device) weightScan(q, k Tensor, opt *Options) (*weightScan, error) {
	dims, err := scoreDims(q, k)
	p, bad := opt.stage(dims)
	return &weightScan{dev: d, dims: dims, q: q, k: k, problem: p, rows: math.MaxInt}, cmp.Or(err, bad)
}

// scan calls f with the weights of box, a chunk x of consecutive rows of one batch at a time: w has
// a row of keys for each head and row of x, and rows begin stride elements apart. A chunk has whole
// groups of query heads that share their keys, or one head where a row of a group is too large.
func (s *weightScan) scan(ctx context.Context, box region.Box, f func(x region.Region, w []float32, stride int)) error {
	return s.problem.Each(func(x region.Region, _ backend.Problem, _ [][]int32) error {
		for axis := Batch; axis <= Seq; axis++ {
			x.Lo[axis], x.Hi[axis] = max(x.Lo[axis], box.Lo[axis]), min(x.Hi[axis], box.Hi[axis])
		}
		share := s.dims.Heads / s.dims.KVHeads
		most := weightChunk / x.Len(region.Key) // rows of a head
		heads := max(1, min(x.Len(Heads), most/share*share))
		rows := min(max(1, most/heads), s.rows)
		for b := x.Lo[Batch]; b < x.Hi[Batch]; b++ {
			for h := x.Lo[Heads]; h < x.Hi[Heads]; h += heads {
				y := x
				y.Lo[Batch], y.Hi[Batch] = b, b+1
				y.Lo[Heads], y.Hi[Heads] = h, min(h+heads, x.Hi[Heads])
				for y.Lo[Seq] < x.Hi[Seq] {
					y.Hi[Seq] = s.endOfRows(y.Lo[Seq], rows, x.Hi[Seq])
					if err := s.chunk(ctx, y, box.Lo[region.Key], box.Hi[region.Key], f); err != nil {
						return err
					}
					y.Lo[Seq] = y.Hi[Seq]
				}
			}
		}
		return nil
	})
}

// endOfRows returns the end of a chunk of rows from i on, at most last. With a mask of blocks a
// chunk is whole blocks or lies inside one.
func (s *weightScan) endOfRows(i, rows, last int) int {
	end, block := min(i+rows, last), s.problem.BlockQ
	switch {
	case s.problem.Blocks.IsZero():
	case i%block != 0 || rows < block:
		end = min(end, (i/block+1)*block)
	case end < last:
		end -= end % block
	}
	return end
}

// chunk computes the weights of x and calls f with those of the keys from lo to hi.
func (s *weightScan) chunk(ctx context.Context, x region.Region, lo, hi int, f func(x region.Region, w []float32, stride int)) error {
	if s.narrow {
		x = s.seen(x)
	}
	if lo, hi = max(x.Lo[region.Key], lo), min(x.Hi[region.Key], hi); lo >= hi {
		return nil
	}
	p := s.problem.Cut(x)
	stride := x.Len(region.Key)
	w, err := s.dev.Alloc(ctx, F32, Shape{1, x.Len(Heads), x.Len(Seq), stride})
	if err != nil {
		return err
	}
	defer w.Release()
	if err := s.dev.be.QK(ctx, w, x.Rows(s.q), x.Keys(s.k, s.dims, false)); err != nil {
		return err
	}
	if err := s.dev.be.Softmax(ctx, w, Tensor{}, &p); err != nil {
		return err
	}
	part := region.Slice(w, Dim, lo-x.Lo[region.Key], hi-x.Lo[region.Key])
	x.Lo[region.Key], x.Hi[region.Key] = lo, hi
	var data []float32
	if part.OnHost() {
		data, err = part.Float32s()
	} else {
		stride = hi - lo
		data, err = s.dev.ToFloat32(ctx, part)
	}
	if err != nil {
		return err
	}
	f(x, data, stride)
	return ctx.Err()
}

// seen returns x, rows of one batch, with the keys that they see by the visibility rule; none when they see no key.
func (s *weightScan) seen(x region.Region) region.Region {
	p := s.problem.Cut(x)
	first, keys := x.Lo[region.Key], x.Len(region.Key)
	from, to := keys, 0
	for i := range x.Len(Seq) {
		if lo, hi := p.Visible.Range(0, i, keys); lo < hi {
			from, to = min(from, lo), max(to, hi)
		}
	}
	if !p.Blocks.IsZero() { // a slice of a block mask begins with a block
		from = from / p.BlockK * p.BlockK
	}
	x.Lo[region.Key], x.Hi[region.Key] = first+from, first+to
	return x
}

// inParallel calls f once for each of 0 to n-1, on GOMAXPROCS goroutines.
func inParallel(n int, f func(i int)) {
	var wg sync.WaitGroup
	workers := min(n, runtime.GOMAXPROCS(0))
	for first := range workers {
		wg.Go(func() {
			for i := first; i < n; i += workers {
				f(i)
			}
		})
	}
	wg.Wait()
}
