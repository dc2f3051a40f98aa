package kernels

import (
	"context"
	"fmt"
	"math"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/internal/op"
	"github.com/seed90331342/attn/kernels/internal/top"
	"github.com/seed90331342/attn/kernels/internal/view"
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

// TopWeights computes, for each query row, the n keys with the largest weights. It serves
// sequences that are too long to store all weights:
//
//	q [B, H, Sq, D]    k [B, Hkv, Sk, D]
//
// The weights are those of Options.Weights. The stages QK and Softmax compute 16 MiB of them
// at a time (at least one row of one head), and the host selects the largest. Memory is
// therefore O(Sq·n). Weights of 0 are not listed, and NaN counts as the largest weight. Errors as for [Device.Attention], and ErrOption
// when n is less than 1.
func (d *Device) TopWeights(ctx context.Context, q, k Tensor, n int, opt Options) (all Top, err error) {
	defer op.Annotate(&err, "top weights")
	return d.topWeights(ctx, q, k, n, &opt, topChunk)
}

func (d *Device) topWeights(ctx context.Context, q, k Tensor, n int, opt *Options, chunk int) (all Top, err error) {
	if n < 1 {
		return all, fmt.Errorf("n is %d, it must be at least 1: %w", n, ErrOption)
	}
	s, err := d.weightScan(q, k, opt, chunk)
	if err != nil {
		return all, err
	}
	defer s.release()
	size := Shape{s.dims.Batch, s.dims.Heads, s.dims.SeqQ, n}.Elements() // negative when too large
	if all.Keys, err = backend.Make[int32](size); err == nil {
		all.Weights, err = backend.Make[float32](size)
	}
	if err != nil {
		return Top{}, fmt.Errorf("%d weights for each of %d queries: %w", n, s.dims.Batch*s.dims.Heads*s.dims.SeqQ, err)
	}
	for i := range all.Keys {
		all.Keys[i] = -1
	}
	return all, s.problem.eachRegion(func(x region, _ backend.Problem) error {
		return s.chunks(x, math.MaxInt, func(x region) error {
			w, _, err := s.weights(ctx, x, x.Lo[Dim], x.Hi[Dim])
			if err != nil {
				return err
			}
			rows, keys := x.Hi[Seq]-x.Lo[Seq], x.Hi[Dim]-x.Lo[Dim]
			inParallel((x.Hi[Heads]-x.Lo[Heads])*rows, func(r int) {
				h, i := x.Lo[Heads]+r/rows, x.Lo[Seq]+r%rows
				at := ((x.Lo[Batch]*s.dims.Heads+h)*s.dims.SeqQ + i) * n
				top.Pick(w[r*keys:(r+1)*keys], x.Lo[Dim], all.Keys[at:at+n], all.Weights[at:at+n])
			})
			return ctx.Err()
		})
	})
}

// WeightRange selects weights of one query head: the rows Rows[0] <= i < Rows[1] and the
// keys Keys[0] <= j < Keys[1].
type WeightRange struct {
	Batch, Head int
	Rows, Keys  [2]int
}

// rangeChunk is the number of bytes of weights that EachWeightRow holds at a time, 64 MiB.
const rangeChunk = 64 << 20

// rangeRows is the number of rows that EachWeightRow computes at a time: enough to fill the
// tiles of QK, and few enough that a sliding window leaves most keys out.
const rangeRows = 256

// EachWeightRow computes a range of the weights of Options.Weights and calls f with each row
// in ascending order. f receives the weights of consecutive keys from first on; all other weights
// of the row in the range are 0. f is not called for rows whose weights are all 0.
//
//	q [B, H, Sq, D]    k [B, Hkv, Sk, D]
//
// The stages QK and Softmax compute the keys that the rows see, at most 256 rows and 64 MiB
// at a time (at least one row). Memory therefore does not grow with the range. f must not keep
// the slice. Errors as for [Device.Attention], and ErrShape for a range that is empty or
// exceeds the operands.
func (d *Device) EachWeightRow(ctx context.Context, q, k Tensor, r WeightRange, opt Options, f func(row, first int, weights []float32)) (err error) {
	defer op.Annotate(&err, "weights")
	if f == nil {
		return fmt.Errorf("f is nil, give a function that takes the rows: %w", ErrOption)
	}
	s, err := d.weightScan(q, k, &opt, rangeChunk)
	if err != nil {
		return err
	}
	defer s.release()
	lo := [4]int{r.Batch, r.Head, r.Rows[0], r.Keys[0]}
	hi := [4]int{r.Batch + 1, r.Head + 1, r.Rows[1], r.Keys[1]}
	for axis, n := range [4]int{s.dims.Batch, s.dims.Heads, s.dims.SeqQ, s.dims.SeqK} {
		if lo[axis] < 0 || lo[axis] >= hi[axis] || hi[axis] > n {
			return fmt.Errorf("range %+v is empty or exceeds %+v: %w", r, s.dims, ErrShape)
		}
	}
	return s.problem.eachRegion(func(x region, _ backend.Problem) error {
		for axis := Batch; axis <= Seq; axis++ {
			x.Lo[axis], x.Hi[axis] = max(x.Lo[axis], lo[axis]), min(x.Hi[axis], hi[axis])
			if x.Lo[axis] >= x.Hi[axis] {
				return nil
			}
		}
		return s.chunks(x, rangeRows, func(x region) error {
			x, err := s.visible(x)
			first, end := max(x.Lo[Dim], lo[Dim]), min(x.Hi[Dim], hi[Dim])
			if err != nil || first >= end {
				return err
			}
			w, stride, err := s.weights(ctx, x, first, end)
			if err != nil {
				return err
			}
			for i := x.Lo[Seq]; i < x.Hi[Seq]; i++ {
				f(i, first, w[(i-x.Lo[Seq])*stride:][:end-first])
			}
			return ctx.Err()
		})
	})
}

// weightScan computes weights a chunk of rows at a time.
type weightScan struct {
	dev     *Device
	dims    Dims
	most    int // weights of a chunk
	q, k    Tensor
	problem problem
	buffer  Tensor // of a chunk
}

// weightScan checks the operands. bytes bounds the weights of a chunk.
func (d *Device) weightScan(q, k Tensor, opt *Options, bytes int) (*weightScan, error) {
	dims, err := scoreDims(q, k)
	if err != nil {
		return nil, err
	}
	p, err := opt.stage(dims)
	return &weightScan{dev: d, dims: dims, most: bytes / 4, q: q, k: k, problem: p}, err
}

func (s *weightScan) release() { s.buffer.Release() }

// chunks calls f with the chunks of x: whole groups of query heads that share their keys, or
// one head where a row of a group is too large, and at most maxRows rows.
func (s *weightScan) chunks(x region, maxRows int, f func(x region) error) error {
	share := s.dims.Heads / s.dims.KVHeads
	most := s.most / x.Len(Dim) // rows of a head
	heads := max(1, min(x.Len(Heads), most/share*share))
	rows := min(max(1, most/heads), maxRows)
	for b := x.Lo[Batch]; b < x.Hi[Batch]; b++ {
		for h := x.Lo[Heads]; h < x.Hi[Heads]; h += heads {
			y := x
			y.Lo[Batch], y.Hi[Batch] = b, b+1
			y.Lo[Heads], y.Hi[Heads] = h, min(h+heads, x.Hi[Heads])
			for y.Lo[Seq] < x.Hi[Seq] {
				y.Hi[Seq] = s.endOfRows(y.Lo[Seq], rows, x.Hi[Seq])
				if err := f(y); err != nil {
					return err
				}
				y.Lo[Seq] = y.Hi[Seq]
			}
		}
	}
	return nil
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

// visible returns x, a part of one batch, with the keys that its rows see by the visibility
// rule; none when they see no key.
func (s *weightScan) visible(x region) (region, error) {
	p, err := s.problem.cut(x)
	if err != nil {
		return x, err
	}
	first, keys := x.Lo[Dim], x.Hi[Dim]-x.Lo[Dim]
	from, to := keys, 0
	for i := range x.Hi[Seq] - x.Lo[Seq] {
		if lo, hi := p.Visible.Range(0, i, keys); lo < hi {
			from, to = min(from, lo), max(to, hi)
		}
	}
	if !p.Blocks.IsZero() { // a slice of a block mask begins with a block
		from = from / p.BlockK * p.BlockK
	}
	x.Lo[Dim], x.Hi[Dim] = first+from, first+to
	return x, nil
}

// weights computes the weights of x and returns those of the keys first <= j < end, in host
// memory. Rows begin stride elements apart.
func (s *weightScan) weights(ctx context.Context, x region, first, end int) (data []float32, stride int, err error) {
	shape := Shape{1, x.Hi[Heads] - x.Lo[Heads], x.Hi[Seq] - x.Lo[Seq], x.Hi[Dim] - x.Lo[Dim]}
	if have := s.buffer.Shape().Elements(); have < shape.Elements() {
		s.buffer.Release()
		if s.buffer, err = s.dev.on(ctx).Alloc(ctx, F32, Shape{1, 1, 1, shape.Elements()}); err != nil {
			return nil, 0, err
		}
	}
	w, err := s.buffer.View(shape, shape.Contiguous(), 0)
	if err != nil {
		return nil, 0, err
	}
	p, err := s.problem.cut(x)
	if err != nil {
		return nil, 0, err
	}
	var parts view.Slicer
	q, k := parts.Rows(s.q, &x.Box), parts.Keys(s.k, s.dims, &x.Box, false)
	part := parts.Slice(w, Dim, first-x.Lo[Dim], end-x.Lo[Dim])
	if parts.Err != nil {
		return nil, 0, parts.Err
	}
	if err := s.dev.on(ctx).QK(ctx, w, q, k); err != nil {
		return nil, 0, err
	}
	if err := s.dev.on(ctx).Softmax(ctx, w, Tensor{}, &p); err != nil {
		return nil, 0, err
	}
	if part.OnHost() {
		data, err = part.Float32s()
		return data, shape[Dim], err
	}
	data, err = s.dev.ToFloat32(ctx, part)
	return data, end - first, err
}

// KeepMask returns the weights that dropout keeps in a call of lengths d, as a Bool tensor
// [B, H, Sq, Sk] in host memory: element (b, h, i, j) is drop.Keeps(b, h, i, j). Zero
// lengths mean Batch 1, Heads 1 and SeqK as SeqQ; head sizes do not matter.
//
// Errors: ErrOption as for Options.Dropout, ErrShape for lengths that are negative, missing
// or too large, ErrMemory.
func KeepMask(drop Dropout, d Dims) (Tensor, error) {
	d = fillDims(d)
	shape := Shape{d.Batch, d.Heads, d.SeqQ, d.SeqK}
	if err := drop.Check(); err != nil {
		return Tensor{}, fmt.Errorf("keep mask: %w", err)
	}
	if shape.Elements() < 1 {
		return Tensor{}, fmt.Errorf("keep mask: shape %v: every length must be at least 1, and the product must fit: %w", shape, ErrShape)
	}
	keep, err := backend.Make[bool](shape.Elements())
	if err != nil {
		return Tensor{}, fmt.Errorf("keep mask: %w", err)
	}
	least := drop.Threshold()
	key := [2]uint32{uint32(drop.Seed), uint32(drop.Seed >> 32)}
	inParallel(d.Batch*d.Heads, func(n int) {
		b, h := drop.First[Batch]+n/d.Heads, drop.First[Heads]+n%d.Heads
		head := keep[n*d.SeqQ*d.SeqK:]
		for i := 0; i < d.SeqQ; {
			// The generator returns the words of four rows.
			row := drop.First[Seq] + i
			rows := min(4-row%4, d.SeqQ-i)
			for j := range d.SeqK {
				x := backend.Philox([4]uint32{uint32(row) / 4, uint32(drop.First[Dim] + j), uint32(h), uint32(b)}, key)
				for r := range rows {
					head[(i+r)*d.SeqK+j] = x[(row+r)%4] >= least
				}
			}
			i += rows
		}
	})
	return HostBool(keep, shape)
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
