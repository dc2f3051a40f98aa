package gpu

import (
	"context"
	"fmt"
	"strings"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/queue"
	"github.com/seed90331342/attn/shaders"
)

// Backward computes the gradients that g requests. A workgroup owns the elements of a result
// that it writes: 32 keys for DK and DV, 32 rows for DQ. It computes the scores of its tiles
// again: all three take 5·D + 3·Dv multiply-adds for each visible pair. Scratch is 8
// or 12 bytes for each query row and up to 64 MiB of sums. Errors are those of Attention;
// backend.ErrUnsupported where a mask meets a block mask, or a bias a relative bias, on a device
// that binds less than 10 storage buffers, where slopes meet more than 64 query heads a key
// head, and for more than 3,840,000 rows in the sum of a DSinks, a DSlopes or a DBias of one
// element a head.
func (b *Backend) Backward(ctx context.Context, g *backend.Gradients) error {
	out, in := g.Operands()
	o := operands{out: out[:], in: in[:]}
	if g.Add {
		o.inPlace = len(out)
	}
	var x *gradients
	defer func() {
		if x != nil {
			x.rows.Release()
			x.sums.Release()
		}
	}()
	return b.call(ctx, "backward", o, func(r *queue.Runner) (err error) {
		r.Expect(func() float64 { return float64(backend.NewGradientsPlan(g).FLOPs) })
		if x == nil { // a rehearsal has built it
			place := func(dtype backend.DType, shape backend.Shape) (backend.Tensor, error) {
				return b.place(ctx, dtype, shape)
			}
			if x, err = b.newGradients(g, place); err != nil {
				return err
			}
		}
		return x.run(r)
	})
}

// run queues the operations.
func (x *gradients) run(r *queue.Runner) error {
	for i, op := range x.ops {
		if i > 0 {
			if err := r.Separate(); err != nil {
				return err
			}
		}
		if err := r.Run(op); err != nil {
			return err
		}
	}
	return nil
}

// WarmupBackward compiles the pipelines that Backward needs for g, by a rehearsal of the call.
// Errors are those of Warmup.
func (b *Backend) WarmupBackward(ctx context.Context, g *backend.Gradients) error {
	return b.within(ctx, "warmup", func() error {
		x, err := b.newGradients(g, backend.Meta)
		if err != nil {
			return err
		}
		return b.dev.Warmup(ctx, x.run)
	})
}

// PlanBackward describes how Backward would run g.
func (b *Backend) PlanBackward(ctx context.Context, g *backend.Gradients) (p backend.Plan, err error) {
	err = b.within(ctx, "plan", func() error {
		out, in := g.Operands()
		if err := tooLong(operands{out: out[:], in: in[:]}); err != nil {
			return err
		}
		x, err := b.newGradients(g, backend.Meta)
		if err != nil {
			return err
		}
		p = backend.NewGradientsPlan(g)
		p.Backend, p.Limits = b.info.Name, b.info.Limits
		p.Path = "WGSL by key blocks and query blocks"
		p.Why = fmt.Sprintf("each workgroup computes the scores of its tiles again, %s storage, float32 sums in a fixed order", cut.Storage(&g.Call))
		p.Cut = fmt.Sprintf("%s; tiles of %d rows and %d keys", strings.Join(x.names, ", "), cut.Tile, cut.Tile)
		for _, op := range x.ops {
			e, err := b.dev.Count(op)
			if err != nil {
				return err
			}
			moved, memory, err := b.dev.Streamed(op)
			if err != nil {
				return err
			}
			p.Chunks += e.Dispatches
			p.Streamed += int64(moved)
			p.Scratch = max(p.Scratch, int64(e.State)+int64(memory))
		}
		p.Scratch += x.rows.Bytes() + x.sums.Bytes()
		return nil
	})
	return p, err
}

// Results of gradient.wgsl.
const (
	ofV = iota
	ofK
	ofQ
	ofScores
)

// Kinds of reduce.wgsl.
const (
	reducePairs = iota
	reduceKeys
	reduceRows
	reduceDiagonals
	reduceTotals
	reduceZeros
)

const (
	// gradientBuffers is the number of storage buffers of gradient.wgsl.
	gradientBuffers = 8
	// reduceThreads is the size of a workgroup of reduce.wgsl.
	reduceThreads = 64
	// reduceOps is the approximate cost of a term of a reduction.
	reduceOps = 10
	// The most rows and keys of which a thread of reduce.wgsl sums one or every 64th.
	mostReduceRows = 8 << 10
	mostReduceKeys = 1 << 20
)

// gradients is the backward pass of a call as operations that follow one another.
type gradients struct {
	b     *Backend
	g     *backend.Gradients
	d     backend.Dims
	p     backend.Problem // without sinks, which LSE contains
	group int             // query heads that share a key head
	rows  backend.Tensor  // [B, H, Sq, 2] F32: D and LSE, see delta.wgsl
	sums  backend.Tensor  // [B, H, Sq, 1] F32: a term of each row, zero if none is needed
	ops   []*queue.Op
	names []string // of the results
}

// newGradients returns the operations of g, with scratch from alloc.
func (b *Backend) newGradients(g *backend.Gradients, alloc func(backend.DType, backend.Shape) (backend.Tensor, error)) (*gradients, error) {
	d := g.Dims()
	x := &gradients{b: b, g: g, d: d, p: g.Problem, group: d.Heads / d.KVHeads}
	x.p.Sinks = nil
	if err := x.check(); err != nil {
		return nil, err
	}
	var err error
	if x.rows, err = alloc(backend.F32, backend.Shape{d.Batch, d.Heads, d.SeqQ, 2}); err != nil {
		return nil, err
	}
	if !g.DSinks.IsZero() || !g.DSlopes.IsZero() || one(g.DBias) {
		if x.sums, err = alloc(backend.F32, backend.Shape{d.Batch, d.Heads, d.SeqQ, 1}); err != nil {
			x.rows.Release()
			return nil, err
		}
	}
	if err := x.build(); err != nil {
		x.rows.Release()
		x.sums.Release()
		return nil, err
	}
	return x, nil
}

// one reports whether t has one element for each batch and head.
func one(t backend.Tensor) bool {
	return !t.IsZero() && t.Shape()[backend.Seq] == 1 && t.Shape()[backend.Dim] == 1
}

// check returns the reason why the device cannot compute the gradients.
func (x *gradients) check() error {
	both := (&options{p: &x.p}).both()
	if have := int(x.b.dev.Limits.MaxStorageBuffersPerShaderStage); have < gradientBuffers+2*when(both, 1) {
		return fmt.Errorf("a mask next to a block mask, or a bias next to a relative bias: the kernel of their gradients has %d storage buffers, %s binds %d: %w",
			gradientBuffers+2, x.b.info.Name, have, backend.ErrUnsupported)
	}
	if x.p.Slopes != nil && x.group > tableHeads {
		return fmt.Errorf("%d query heads share a key head, the gradients with slopes take up to %d: %w", x.group, tableHeads, backend.ErrUnsupported)
	}
	for _, o := range []backend.Operand{{Name: "dbias", Tensor: x.g.DBias}, {Name: "dslopes", Tensor: x.g.DSlopes}, {Name: "dsinks", Tensor: x.g.DSinks}} {
		if !one(o.Tensor) {
			continue
		}
		s := o.Tensor.Shape()
		terms := x.d.SeqQ * (x.d.Batch / s[backend.Batch]) * (x.d.Heads / s[backend.Heads])
		if terms > cut.MaxLoops*reduceThreads {
			return fmt.Errorf("%s of shape %v sums %d rows an element, up to %d are supported: %w", o.Name, s, terms, cut.MaxLoops*reduceThreads, backend.ErrUnsupported)
		}
	}
	return nil
}

// build appends the operations.
func (x *gradients) build() error {
	g := x.g
	x.ops = append(x.ops, x.delta())
	if !g.DSinks.IsZero() {
		x.clear("dsinks", g.DSinks)
		x.totals("dsinks", g.DSinks)
	}
	for _, r := range []struct {
		of   int
		name string
		t    backend.Tensor
	}{{ofV, "dv", g.DV}, {ofK, "dk", g.DK}, {ofQ, "dq", g.DQ}} {
		if r.t.IsZero() {
			continue
		}
		if err := x.sum(r.of, r.name, r.t); err != nil {
			return err
		}
	}
	if !g.DBias.IsZero() {
		kind := reducePairs
		switch s := g.DBias.Shape(); {
		case s[backend.Dim] == 1:
			kind = reduceRows
		case s[backend.Seq] == 1:
			kind = reduceKeys
		}
		if err := x.scores(kind, "dbias", g.DBias, false); err != nil {
			return err
		}
	}
	if !g.DRelative.IsZero() {
		if err := x.scores(reduceDiagonals, "drelative", g.DRelative, false); err != nil {
			return err
		}
	}
	if !g.DSlopes.IsZero() {
		return x.scores(reduceRows, "dslopes", g.DSlopes, true)
	}
	return nil
}

// delta returns the operation that fills rows, and sums for the sinks.
func (x *gradients) delta() *queue.Op {
	g, d := x.g, x.d
	sums := backend.Tensor{}
	if !g.DSinks.IsZero() {
		sums = x.sums
	}
	ops := []*cut.Operand{
		cut.Reads("do", g.DO, cut.RowAxes, 1), cut.Reads("o", g.O, cut.RowAxes, 1), cut.Reads("lse", g.LSE, cut.RowAxes, 1),
		cut.Reads("dlse", g.DLSE, cut.RowAxes, 1), cut.Writes("scratch", x.rows, cut.RowAxes), cut.Writes("scratch", sums, cut.RowAxes),
	}
	op := x.b.rowOp(backend.Shape{d.Batch, d.Heads, d.SeqQ, 1}, ops, func(part cut.Box, v []cut.View) queue.Step {
		w := &shaders.DeltaParams{
			Heads: part.Len(cut.Head), Rows: part.Len(cut.Row), VDim: d.ValueDim, GType: int(g.DO.DType()), OType: int(g.O.DType()),
			Shifted: when(!g.DLSE.IsZero(), 1), Sunk: when(!sums.IsZero(), 1),
			G: strides(v[0]), O: strides(v[1]), LSE: strides(v[2]), DLSE: strides(v[3]), Out: strides(v[4]), Sums: strides(v[5]),
		}
		if !sums.IsZero() {
			for h := range w.Heads {
				w.Sinks[h] = g.Problem.Sink(part.Lo[cut.Head] + h)
			}
		}
		return queue.Step{Kernel: queue.Kernel{Shader: shaders.Delta}, Params: w, Groups: rows(part), Each: reduceOps * float64(d.ValueDim)}
	})
	op.Cutter.AtMost(cut.Head, len(shaders.DeltaParams{}.Sinks))
	return op
}

// inputs are the operands of gradient.wgsl.
type inputs struct {
	q, k, v, do, rows *cut.Operand
	options
	list []*cut.Operand
}

// inputs returns the operands for workgroups that need so many query heads together.
func (x *gradients) inputs(heads int) (*inputs, error) {
	d, g := x.d, x.g
	pairs, err := cut.PairsOf(&x.p, backend.Shape{d.Batch, d.Heads, d.SeqQ, d.SeqK})
	if err != nil {
		return nil, err
	}
	in := &inputs{
		q: cut.Reads("q", g.Q, cut.RowAxes, 1), k: cut.Reads("k", g.K, cut.KeyAxes, x.group), v: cut.Reads("v", g.V, cut.KeyAxes, x.group),
		do: cut.Reads("do", g.DO, cut.RowAxes, 1), rows: cut.Reads("scratch", x.rows, cut.RowAxes, 1),
		options: options{p: &x.p, heads: d.Heads, pairs: &pairs},
	}
	in.list = append(pairs.List(), in.q, in.do, in.rows)
	for _, o := range in.list {
		o.Heads = heads
	}
	in.list = append(in.list, in.k, in.v)
	return in, nil
}

// kernel returns gradient.wgsl for a result with so many blocks of columns a workgroup.
func (x *gradients) kernel(in *inputs, of, blocks int) queue.Kernel {
	expand := int(shaders.Full)
	if x.b.info.Type == backend.CPU {
		expand = shaders.Looped // compiles in less time
	}
	return in.withBindings(queue.NewKernel(shaders.Gradient, map[string]int{
		"EXPAND": expand, "IN": int(x.g.Q.DType()), "KV": int(x.g.K.DType()), "DO": int(x.g.DO.DType()), "OF": of, "BLOCKS": blocks, "ACC": 4 * blocks,
	}))
}

// step returns the step of gradient.wgsl for a piece. The caller sets Groups and Each, and in the
// parameters what depends on the result.
func (x *gradients) step(in *inputs, c *cut.Cutter, k queue.Kernel, p queue.Piece) (queue.Step, *shaders.AttentionParams) {
	q, kv, v, do, info := in.q.View(p.Box, c.Align), in.k.View(p.Box, c.Align), in.v.View(p.Box, c.Align), in.do.View(p.Box, c.Align), in.rows.View(p.Box, c.Align)
	pairs := in.views(p.Box, c.Align)
	w := &shaders.AttentionParams{
		Heads: p.Len(cut.Head), KVHeads: ceil(p.Len(cut.Head), x.group), Head0: p.Lo[cut.Head], Group: x.group,
		Rows: p.Len(cut.Row), Row0: p.Lo[cut.Row], Keys: p.Len(cut.Col), Key0: p.Lo[cut.Col], AllKeys: x.d.SeqK, Dim: x.d.Dim, VDim: x.d.ValueDim,
		Flags: when(!p.First, shaders.GoOn), Q: strides(q), K: strides(kv), V: strides(v), O: strides(do), S: strides(info),
	}
	in.params(w, p.Box, pairs, 1)
	mask, bias, more := in.windows(pairs)
	windows := append([]cut.Window{q.Window, kv.Window, v.Window, do.Window, info.Window, mask, bias, p.State}, more...)
	return queue.Step{Kernel: k, Params: w, Windows: windows}, w
}

// sum appends the operation of DV, DK or DQ.
func (x *gradients) sum(of int, name string, t backend.Tensor) error {
	heads, inner, axes, group := 1, cut.Col, cut.RowAxes, 1
	if of != ofQ {
		heads, inner, axes, group = x.group, cut.Row, cut.KeyAxes, x.group
	}
	in, err := x.inputs(heads)
	if err != nil {
		return err
	}
	to := cut.Writes(name, t, axes)
	if x.g.Add {
		to = cut.Updates(name, t, axes)
	}
	to.Group = group
	dim := t.Shape()[backend.Dim]
	blocks := 1 // of columns of a workgroup
	for blocks < 4 && blocks*cut.Tile < dim {
		blocks *= 2
	}
	parts := ceil(dim, blocks*cut.Tile)
	pitch := parts * blocks * cut.Tile
	kernel := x.kernel(in, of, blocks)
	// owned returns the heads that workgroups own, and the rows or keys of each.
	owned := func(box cut.Box) (heads, length int) {
		if of == ofQ {
			return box.Len(cut.Head), box.Len(cut.Row)
		}
		return box.Len(cut.Head) / group, box.Len(cut.Col)
	}
	// The order of sums over several heads is that of whole tiles, unless a binding cannot hold
	// a tile of all heads that share a key head.
	granule := cut.Tile
	for granule > 1 && uint64(4*heads*granule*max(x.d.Dim, x.d.ValueDim)) > queue.MaxWindow(x.b.dev.Limits)/2 {
		granule /= 2
	}
	c := x.b.dev.NewCutter(inner, granule, append(in.list, to)...)
	in.limit(c)
	c.StateAbove = -1
	c.State = func(box cut.Box) uint64 {
		heads, length := owned(box)
		return uint64(box.Len(cut.Batch)*heads*length) * uint64(4*pitch)
	}
	// Loop iterations of gradient.wgsl for a tile, if marked loops stay: staging and products of
	// a chunk or block, scores, and weights.
	const product = 1 + 4 + 4 + 8*(1+4)
	loops := 3 + product*(ceil(x.d.Dim, cut.Tile)+ceil(x.d.ValueDim, cut.Tile)+blocks) + 4 + 8 + 4*(1+4*4) + 4 + in.rounds(16)
	each := 2 * float64(heads*(x.d.Dim+x.d.ValueDim+blocks*cut.Tile)) // for a row, or a key, of the tiles and one that is owned
	c.Most[inner] = cut.LongestPiece(cut.Tile, heads*loops, each*cut.Tile*cut.Tile, x.b.dev.PieceWork(kernel))
	x.names = append(x.names, name)
	x.ops = append(x.ops, &queue.Op{
		Cutter: c, Space: cut.Space(x.d.Batch, x.d.Heads, x.d.SeqQ, x.d.SeqK, 1),
		Sweep: func(box cut.Box, piece int) queue.Sweep {
			seen := box.VisibleRows(x.p.Visible, cut.Tile)
			if of == ofQ {
				seen = box.Visible(x.p.Visible, cut.Tile)
			}
			if seen.Len(inner) == 0 { // results without terms are zeros
				seen.Hi[inner] = min(seen.Lo[inner]+cut.Tile, box.Hi[inner])
			}
			return queue.Sweep{Box: seen, Piece: piece, Passes: 1, Last: true, State: c.State(seen)}
		},
		Step: func(p queue.Piece) queue.Step {
			heads, length := owned(p.Box)
			if p.Pass == p.Of.Passes {
				return x.finish(t, to.View(p.Box, c.Align), p, heads, length, pitch)
			}
			s, w := x.step(in, c, kernel, p)
			w.Blocks, w.Parts, w.Splits = ceil(length, cut.Tile), parts, pitch/4
			s.Groups = p.Len(cut.Batch) * heads * w.Blocks * parts
			s.Each = each * cut.Tile * float64(p.Len(inner))
			return s
		},
	})
	return nil
}

// finish returns the step that rounds the sums in the state, rows of pitch elements, to t.
func (x *gradients) finish(t backend.Tensor, to cut.View, p queue.Piece, heads, length, pitch int) queue.Step {
	dim := t.Shape()[backend.Dim]
	pairs := t.DType().Size() == 2 && inPairs(to, dim)
	units := dim
	if pairs {
		units = dim / 2
	}
	n := p.Len(cut.Batch) * heads * length * units
	return queue.Step{
		Kernel: queue.NewKernel(shaders.Convert, map[string]int{"Q8": 0}), Windows: []cut.Window{p.State, to.Window},
		Groups: ceil(n, convertUnits), Each: convertOps * convertUnits,
		Params: &shaders.ConvertParams{
			Heads: heads, Rows: length, Units: units, All: n, InType: int(backend.F32), OutType: int(t.DType()),
			Pairs: when(pairs, 1), Adds: when(x.g.Add, 1),
			Src: shaders.Strides{B: heads * length * pitch, H: length * pitch, S: pitch, D: 1}, O: strides(to),
		},
	}
}

// scores appends the operations that add the gradients of scores to t by a kind of
// reduction, one head at a time, in ascending order.
func (x *gradients) scores(kind int, name string, t backend.Tensor, sloped bool) error {
	x.clear(name, t)
	to, scratch := t, one(t) && kind == reduceRows
	if scratch {
		to = x.sums
		x.zeros(name, to)
	}
	in, err := x.inputs(1)
	if err != nil {
		return err
	}
	out := cut.Updates(name, to, cut.PairAxes)
	for i, n := range to.Shape() {
		if n == 1 {
			out.Axes[i] = cut.Whole
		}
	}
	if kind == reduceDiagonals {
		out.Axes[backend.Seq], out.Axes[backend.Dim], out.Diagonal = cut.Whole, cut.Col, x.d.SeqQ
	}
	kernel := x.kernel(in, ofScores, 1)
	c := x.b.dev.NewCutter(cut.Sum, 1, append(in.list, out)...)
	in.limit(c)
	c.AtMost(cut.Batch, 1)
	c.AtMost(cut.Head, 1)
	c.AtMost(cut.Row, mostReduceRows)
	c.AtMost(cut.Col, mostReduceKeys)
	pitch := func(box cut.Box) int { return 4 * ceil(box.Len(cut.Col), 4) }
	c.StateAbove = -1
	c.State = func(box cut.Box) uint64 { return uint64(box.Len(cut.Row)) * uint64(4*pitch(box)) }
	if !scratch {
		x.names = append(x.names, name)
	}
	x.ops = append(x.ops, &queue.Op{
		Cutter: c, Space: cut.Space(x.d.Batch, x.d.Heads, x.d.SeqQ, x.d.SeqK, 1), Chained: true,
		Sweep: func(box cut.Box, piece int) queue.Sweep {
			return queue.Sweep{Box: box, Piece: piece, Passes: 1, Last: true, State: c.State(box)}
		},
		Step: func(p queue.Piece) queue.Step {
			rows, keys := p.Len(cut.Row), p.Len(cut.Col)
			if p.Pass < p.Of.Passes {
				s, w := x.step(in, c, kernel, p)
				w.Blocks, w.Parts, w.Splits = ceil(rows, cut.Tile), ceil(keys, cut.Tile), pitch(p.Box)/4
				s.Groups = w.Blocks * w.Parts
				s.Each = 2 * float64(x.d.Dim+x.d.ValueDim) * cut.Tile * cut.Tile
				return s
			}
			view := out.View(p.Box, c.Align)
			w := &shaders.ReduceParams{
				Kind: kind, Rows: rows, Keys: keys, Pitch: pitch(p.Box), Sloped: when(sloped, 1), Chained: when(!x.g.Add, 1),
				Away: p.Lo[cut.Row] + x.p.Visible.Offset - p.Lo[cut.Col], O: strides(view),
			}
			s := queue.Step{Kernel: queue.Kernel{Shader: shaders.Reduce}, Params: w, Windows: []cut.Window{p.State, view.Window}}
			switch kind {
			case reducePairs:
				w.All, s.Each = rows*keys, reduceOps*reduceThreads
			case reduceKeys:
				w.All, s.Each = keys, reduceOps*reduceThreads*float64(rows)
			case reduceDiagonals:
				w.All, s.Each = rows+keys-1, reduceOps*reduceThreads*float64(min(rows, keys))
			case reduceRows:
				w.All, s.Each = rows, reduceOps*float64(keys)
			}
			s.Groups = ceil(w.All, reduceThreads)
			if kind == reduceRows {
				s.Groups = rows
			}
			return s
		},
	})
	if scratch {
		x.totals(name, t)
	}
	return nil
}

// clear appends the operation that sets t to zeros, unless gradients are added to it.
func (x *gradients) clear(name string, t backend.Tensor) {
	if !x.g.Add {
		x.zeros(name, t)
	}
}

func (x *gradients) zeros(name string, t backend.Tensor) {
	dim := t.Shape()[backend.Dim]
	ops := []*cut.Operand{new(cut.Operand), cut.Writes(name, t, cut.RowAxes)}
	x.ops = append(x.ops, x.b.rowOp(t.Shape(), ops, func(part cut.Box, v []cut.View) queue.Step {
		w := &shaders.ReduceParams{
			Kind: reduceZeros, All: rows(part) * dim, Batches: part.Len(cut.Batch), Heads: part.Len(cut.Head), Rows: part.Len(cut.Row), Keys: dim,
			O: strides(v[1]),
		}
		return queue.Step{Kernel: queue.Kernel{Shader: shaders.Reduce}, Params: w, Groups: ceil(w.All, reduceThreads), Each: reduceOps * reduceThreads}
	}))
}

// totals appends the operation that adds the sums of rows to t [B or 1, H or 1, 1, 1].
func (x *gradients) totals(name string, t backend.Tensor) {
	whole := [4]int{cut.Whole, cut.Whole, cut.Whole, cut.Whole}
	from, to := cut.Reads("scratch", x.sums, whole, 1), cut.Updates(name, t, whole)
	c := x.b.dev.NewCutter(cut.Sum, 1, from, to)
	s := t.Shape()
	all := cut.Space(1, 1, 1, 1, 1)
	x.names = append(x.names, name)
	x.ops = append(x.ops, &queue.Op{
		Cutter: c, Space: all,
		Step: func(p queue.Piece) queue.Step {
			v, o := from.View(p.Box, c.Align), to.View(p.Box, c.Align)
			w := &shaders.ReduceParams{
				Kind: reduceTotals, All: s[0] * s[1], Batches: x.d.Batch / s[0], Heads: x.d.Heads / s[1], Rows: x.d.SeqQ,
				Base: v.Base, SBatch: v.Strides[backend.Batch], SHead: v.Strides[backend.Heads], OHeads: s[1], O: strides(o),
			}
			return queue.Step{
				Kernel: queue.Kernel{Shader: shaders.Reduce}, Params: w, Windows: []cut.Window{v.Window, o.Window},
				Groups: w.All, Each: reduceOps * float64(w.Batches*w.Heads*w.Rows),
			}
		},
	})
}
