package gpu

import (
	"cmp"
	"context"
	"fmt"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/queue"
	"github.com/seed90331342/attn/shaders"
)

const (
	// indexThreads is the size of a workgroup of index.wgsl, indexOps the approximate cost of a product, with a memory access,
	// and indexPasses how often a thread passes over its candidates.
	indexThreads, indexOps, indexPasses = 64, 10, 10
	// indexRows is the most rows whose products are computed at a time: enough workgroups for a large GPU.
	indexRows = 128
	// maxTop is the most keys that are chosen. A thread then passes over its candidates for half of the iterations that it has.
	maxTop = cut.MaxLoops / 2 / indexPasses * indexThreads
)

// Index implements backend.Indexer: products of some rows with a block of keys at a time, among which, and the best of the blocks
// before, index.wgsl chooses. The lists are views of the last results, next to their codes. It returns backend.ErrUnsupported for more than maxTop keys.
func (b *Backend) Index(ctx context.Context, c *backend.Index) (keys backend.Tensor, err error) {
	if c.TopK > maxTop {
		return keys, fmt.Errorf("index: %d keys are chosen, GPUs choose up to %d: use the CPU: %w", c.TopK, maxTop, backend.ErrUnsupported)
	}
	x := indexing{b: b, c: c}
	defer func() {
		for _, t := range append(x.best[:], x.products) {
			t.Release()
		}
		if err != nil {
			x.out.Release()
			keys = backend.Tensor{}
		}
	}()
	in := c.Operands()
	err = b.within(ctx, "index", func() error {
		if err := x.alloc(ctx); err != nil {
			return err
		}
		o := operands{in: in[:], out: []backend.Operand{{Name: "keys", Tensor: x.out}}}
		q := c.Q.Shape()
		return b.do(ctx, queue.Work{Name: "index"}, 1, func(int) operands { return o }, q[backend.Batch]*ceil(q[backend.Seq], x.rows), x.ops)
	})
	if err != nil {
		return keys, err
	}
	chosen, err := x.out.Slice(backend.Heads, 1, 2)
	if err != nil {
		return keys, err
	}
	if keys, err = backend.NewTensor(x.out.Memory(), backend.I32, backend.Shape{1, 1, 1, x.out.Shape().Elements()}); err != nil {
		return keys, err
	}
	return keys.View(chosen.Shape(), chosen.Strides(), chosen.Offset())
}

// indexing is a call of Index.
type indexing struct {
	b        *Backend
	c        *backend.Index
	rows, n  int               // of a block
	products backend.Tensor    // [1, Hi, rows, n]
	best     [2]backend.Tensor // [1, 2, rows, TopK] codes and keys, of two blocks in turns; zero for one block
	out      backend.Tensor    // [B, 2, Sq, TopK], of the last one
}

// alloc sets the length of blocks and allocates scratch. What index.wgsl needs of a row is adjacent, and fits a binding.
func (x *indexing) alloc(ctx context.Context) (err error) {
	q, keys := x.c.Q.Shape(), x.c.K.Shape()[backend.Seq]
	heads, seq := q[backend.Heads], q[backend.Seq]
	place := func(batch, heads, rows, dim int) (t backend.Tensor) {
		if err == nil {
			t, err = x.b.place(ctx, backend.F32, backend.Shape{batch, rows, heads, dim})
		}
		if err == nil {
			t, err = t.Swap(backend.Heads, backend.Seq)
		}
		return t
	}
	x.out = place(q[backend.Batch], 2, seq, x.c.TopK)
	l, bytes := x.b.dev.Limits, min(x.b.dev.Memory().Room(), cut.MostRoom)/8 // for products, or more in blocks of indexThreads keys
	row := min(bytes/uint64(min(seq, indexRows)), l.MaxBufferSize, l.MaxStorageBufferBindingSize-uint64(l.MinStorageBufferOffsetAlignment))
	each := float64(indexThreads * indexOps * (heads + indexPasses)) // of indexThreads keys
	x.n = min(keys, max(indexThreads, int(row)/(4*heads)), cut.LongestChunk(indexThreads, 2*(heads+indexPasses), each, x.b.dev.ChunkWork(shaders.Index)))
	x.rows = max(1, min(seq, indexRows, int(bytes)/(4*heads*x.n)))
	x.products = place(1, heads, x.rows, x.n)
	for i := range x.best {
		if x.n < keys {
			x.best[i] = place(1, 2, x.rows, x.c.TopK)
		}
	}
	return err
}

// ops returns the operations of block n of rows, of all batches.
func (x *indexing) ops(n int) (ops []*queue.Op, err error) {
	q, keys := x.c.Q.Shape(), x.c.K.Shape()[backend.Seq]
	part := func(t backend.Tensor, axis, lo, hi int) backend.Tensor {
		if err == nil {
			t, err = t.Slice(axis, lo, hi)
		}
		return t
	}
	blocks := ceil(q[backend.Seq], x.rows)
	b, i := n/blocks, n%blocks*x.rows
	end := min(i+x.rows, q[backend.Seq])
	ofRows := func(t backend.Tensor) backend.Tensor {
		return part(part(t, backend.Batch, b, b+1), backend.Seq, i, end)
	}
	qs, ks, w, out := ofRows(x.c.Q), part(x.c.K, backend.Batch, b, b+1), ofRows(x.c.W), ofRows(x.out)
	seen := cut.Box{Lo: [...]int{b, 0, i, 0, 0}, Hi: [...]int{b + 1, 1, end, keys, 1}}.Visible(x.c.Visible, 1)
	from, to := seen.Lo[cut.Col], max(seen.Hi[cut.Col], 1) // one key, which is hidden, if the rows see none
	var past backend.Tensor
	for j := from; j < to; j += x.n {
		n := min(x.n, to-j)
		best := out
		if j+n < to {
			best = part(x.best[(j-from)/x.n%2], backend.Seq, 0, end-i)
		}
		products := part(part(x.products, backend.Seq, 0, end-i), backend.Dim, 0, n)
		product, more := x.b.qk(products, qs, part(ks, backend.Seq, j, j+n))
		if err = cmp.Or(err, more); err != nil {
			return nil, err
		}
		ops = append(ops, product, x.choose(products, w, past, best, b, i, j))
		past = best
	}
	return ops, err
}

// choose returns the operation that writes the best keys of products, from key on, and of past.
func (x *indexing) choose(products, w, past, best backend.Tensor, b, row, key int) *queue.Op {
	s, visible := products.Shape(), x.c.Visible
	visible.Offset = visible.OffsetOf(b)
	p := shaders.IndexParams{Heads: s[backend.Heads], Keys: s[backend.Dim], Key0: key, Top: x.c.TopK, Held: when(!past.IsZero(), x.c.TopK), WType: int(w.DType()),
		Limit: x.c.K.Shape()[backend.Seq]}
	if p.Lo, p.Hi = cut.Bounds(visible); visible.KLen != nil {
		p.Limit = visible.KLen[b]
	}
	axes := [4]int{cut.Batch, cut.Whole, cut.Row, cut.Whole}
	ops := []*cut.Operand{cut.Updates("products", products, axes), cut.Reads("w", w, axes, 1), cut.Reads("past keys", past, axes, 1), cut.Writes("keys", best, axes)}
	return x.b.rowOp(backend.Shape{1, 1, s[backend.Seq], 1}, ops, func(box cut.Box, v []cut.View) queue.Step {
		p := p
		p.Row0, p.X, p.W, p.Past, p.O = row+box.Lo[cut.Row], strides(v[0]), strides(v[1]), strides(v[2]), strides(v[3])
		return queue.Step{Kernel: shaders.Index, Params: &p, Groups: rows(box), OpsPerGroup: float64(indexOps * (p.Keys*p.Heads + indexPasses*(p.Keys+p.Held)))}
	})
}
