// Package index chooses the keys of query rows by index scores, see backend.Index.
package index

import (
	"math"
	"slices"
	"unsafe"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/pool"
	"github.com/seed90331342/attn/cpu/internal/strided"
	"github.com/seed90331342/attn/cpu/internal/tile"
	"github.com/seed90331342/attn/cpu/internal/vec"
)

const (
	// maxRows is the most rows of a task, which share the conversion of a block of keys. Their queries have at most
	// tile.CacheFloats, unless one row has more.
	maxRows = 16
	// tasksPerThread divides the rows among threads, as the rows of a causal call differ in length.
	tasksPerThread = 4
)

// Job is one call. A task computes some rows of a batch, a block of keys at a time. It implements pool.Job.
type Job struct {
	kernels                *vec.Kernels
	q, k, w                strided.Tensor
	keys                   []int32
	topK                   int
	visible                backend.Visibility
	heads, seqQ, seqK, dim int // dim is padded to whole vectors
	rows, batchTasks       int
}

// Set makes j the call c, whose operands are pinned, and returns the number of tasks and the floats of scratch of each.
func (j *Job) Set(x *vec.Kernels, keys []int32, c *backend.Index, threads int) (tasks, floats int) {
	*j = Job{kernels: x, q: strided.Of(&c.Q), k: strided.Of(&c.K), w: strided.Of(&c.W), keys: keys, topK: c.TopK, visible: c.Visible}
	shape := c.Q.Shape()
	j.heads, j.seqQ, j.seqK, j.dim = shape[backend.Heads], shape[backend.Seq], c.K.Shape()[backend.Seq], tile.RoundUp(shape[backend.Dim], x.Lanes)
	j.rows = max(1, min(tile.CeilDiv(shape[backend.Batch]*j.seqQ, tasksPerThread*threads), maxRows, tile.CacheFloats/(j.heads*j.dim)))
	j.batchTasks = tile.CeilDiv(j.seqQ, j.rows)
	return shape[backend.Batch] * j.batchTasks, j.rows*(j.heads*(j.dim+1)+2*j.topK) + tile.BlockKeys*(j.dim+j.heads+1)
}

// row is a row of a task: the keys that it sees, and the best of them so far as a heap, whose first one is the least.
type row struct {
	lo, hi int
	best   []uint64
}

// Task implements pool.Job.
func (j *Job) Task(turn *pool.Turn, w *pool.Scratch, t int) error {
	b, first := t/j.batchTasks, t%j.batchTasks*j.rows
	var memory [maxRows]row
	rows := memory[:min(j.rows, j.seqQ-first)]
	q, weights := w.Floats(j.rows*j.heads*j.dim), w.Floats(j.rows*j.heads)
	keys, s, sums := w.Floats(tile.BlockKeys*j.dim), w.Floats(tile.BlockKeys*j.heads), w.Floats(tile.BlockKeys)
	best := w.Floats(2 * j.rows * j.topK) // on a boundary of 64 bytes
	heaps := unsafe.Slice((*uint64)(unsafe.Pointer(unsafe.SliceData(best))), len(best)/2)
	j.w.LoadRows(j.kernels, weights, j.heads, b, 0, first, len(rows))
	from, to := j.seqK, 0
	for r := range rows {
		x := &rows[r]
		x.lo, x.hi = j.visible.Range(b, first+r, j.seqK)
		x.best = heaps[r*j.topK:][:0:j.topK]
		if x.hi-x.lo <= j.topK { // all of them
			for key := x.lo; key < x.hi; key++ {
				x.best = append(x.best, uint64(^uint32(key)))
			}
			continue
		}
		from, to = min(from, x.lo), max(to, x.hi)
		for h := range j.heads {
			j.q.LoadRows(j.kernels, q[(r*j.heads+h)*j.dim:], j.dim, b, h, first+r, 1)
		}
	}
	for j0 := from / tile.BlockKeys * tile.BlockKeys; j0 < to; j0 += tile.BlockKeys {
		n := min(tile.BlockKeys, to-j0)
		j.k.LoadRows(j.kernels, keys, j.dim, b, 0, j0, n)
		runs := tile.SpaceOf(w).Rows(keys, j.dim, tile.RoundUp(n, j.kernels.Lanes), j.dim)
		for r := range rows {
			x := &rows[r]
			lo, hi := max(x.lo-j0, 0), min(x.hi-j0, n)
			if lo >= hi || x.hi-x.lo <= j.topK {
				continue
			}
			if err := turn.Pause(); err != nil {
				return err
			}
			j.kernels.Dots(vec.F32, s, tile.BlockKeys, runs, j.dim, q[r*j.heads*j.dim:], j.dim, j.heads, j.dim)
			clear(sums)
			for h, weight := range weights[r*j.heads:][:j.heads] {
				products := s[h*tile.BlockKeys:][lo:hi]
				to := sums[:len(products)]
				for i, y := range products {
					to[i] += weight * max(y, 0)
				}
			}
			for i, y := range sums[:hi-lo] {
				x.best = keep(x.best, uint64(order(y))<<32|uint64(^uint32(j0+lo+i)))
			}
		}
	}
	for r := range rows {
		list := j.keys[(b*j.seqQ+first+r)*j.topK:][:j.topK]
		for i := range list {
			if list[i] = -1; i < len(rows[r].best) {
				list[i] = int32(^uint32(rows[r].best[i]))
			}
		}
		slices.Sort(list[:len(rows[r].best)])
	}
	return nil
}

// order returns a number that grows with x. NaN is -Inf.
func order(x float32) uint32 {
	if x != x {
		x = vec.NegInf
	}
	bits := math.Float32bits(x + 0) // no zero is negative
	return bits ^ (uint32(int32(bits)>>31) | 1<<31)
}

// keep adds c to a heap, in place of the least where it is full.
func keep(heap []uint64, c uint64) []uint64 {
	if n := len(heap); n < cap(heap) {
		heap = append(heap, c)
		for parent := (n - 1) / 2; n > 0 && c < heap[parent]; parent = (n - 1) / 2 {
			heap[n], n = heap[parent], parent
		}
		heap[n] = c
		return heap
	}
	if c < heap[0] {
		return heap
	}
	i := 0
	for child := 1; child < len(heap); child = 2*i + 1 {
		if child+1 < len(heap) && heap[child+1] < heap[child] {
			child++
		}
		if c <= heap[child] {
			break
		}
		heap[i], i = heap[child], child
	}
	heap[i] = c
	return heap
}
