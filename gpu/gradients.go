package gpu

import (
	"context"
	"fmt"
	"strings"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/modtext"
	"github.com/seed90331342/attn/gpu/internal/queue"
	"github.com/seed90331342/attn/gpu/internal/tune"
	"github.com/seed90331342/attn/shaders"
)

// Backward computes the gradients that g requests. A workgroup owns the elements of a result that it writes: up to 128
// keys for DK and DV, or rows for DQ. It computes the scores of its tiles again: all three take 4·D + 3·Dv
// multiply-adds for each visible pair. Scratch is 12 or 16 bytes for each query row and up to 64 MiB of sums.
//
// Errors are those of Attention. It also returns backend.ErrUnsupported for
//   - a mask and a block mask with a bias of any kind, or two biases with a mask, on a device that
//     binds less than 10 storage buffers;
//   - slopes with more than 64 query heads a key head;
//   - more than 3,840,000 rows in one element of DSinks, DSlopes or DBias.
func (b *Backend) Backward(ctx context.Context, g *backend.Gradients) error {
	return b.within(ctx, "backward", func() error {
		x, err := b.newGradients(g, func(dtype backend.DType, shape backend.Shape) (backend.Tensor, error) {
			return b.place(ctx, dtype, shape)
		})
		defer func() {
			x.rows.Release()
			x.sums.Release()
		}()
		if err != nil {
			return err
		}
		o := gradientOperands(g)
		if g.Add {
			o.updated = o.out
		}
		w := queue.Work{Name: "backward", FLOPs: float64(backend.NewGradientsPlan(g).FLOPs)}
		return b.do(ctx, w, 1, func(int) operands { return o }, 1, func(int) ([]*queue.Op, error) { return x.ops, nil })
	})
}

func gradientOperands(g *backend.Gradients) operands {
	out, in := g.Operands()
	return operands{out: out[:], in: in[:]}
}

// WarmupBackward compiles the pipelines that Backward needs for g, by a rehearsal of the call.
// Errors are those of Warmup.
func (b *Backend) WarmupBackward(ctx context.Context, g *backend.Gradients) error {
	return b.within(ctx, "warmup", func() error {
		x, err := b.newGradients(g, backend.Meta)
		if err != nil {
			return err
		}
		return b.dev.Warmup(ctx, x.ops...)
	})
}

// PlanBackward describes how Backward would run g.
func (b *Backend) PlanBackward(ctx context.Context, g *backend.Gradients) (backend.Plan, error) {
	return resultWithin(ctx, b, "plan", func() (p backend.Plan, err error) {
		x, err := b.newGradients(g, backend.Meta)
		if err != nil {
			return p, err
		}
		p = backend.NewGradientsPlan(g)
		p.Backend, p.Limits = b.info.Name, b.info.Limits
		p.Path = "WGSL by key blocks and query blocks"
		why := ""
		if x.onMatrix != "" {
			p.Path, p.Matrices = "matrix units "+p.Path+x.onMatrix, 1
		} else if g.LowPrecision {
			why = "; not on matrix units: " + x.noMatrix
		}
		p.Why = fmt.Sprintf("each workgroup computes the scores of its tiles again, %s storage, float32 sums in a fixed order%s", cut.Storage(&g.Call), why)
		var names []string
		for _, o := range gradientOperands(g).out {
			if !o.Tensor.IsZero() {
				names = append(names, o.Name)
			}
		}
		p.Cut = strings.Join(names, ", ") + "; 8 rows or keys a thread"
		for _, op := range x.ops {
			if _, err := b.count(&p, op); err != nil {
				return p, err
			}
		}
		p.Scratch += x.rows.Bytes() + x.sums.Bytes()
		return p, nil
	})
}

// gradientBuffers is the number of storage buffers of gradient.wgsl.
const gradientBuffers = 8

// gradients is the backward pass of a call as operations that follow one another.
type gradients struct {
	b     *Backend
	g     *backend.Gradients
	d     backend.Dims
	p     backend.Problem // without sinks, which LSE contains
	group int             // query heads that share a key head
	rows  backend.Tensor  // [B, H, Sq, 3] F32: D, LSE and the largest |dO|, see delta.wgsl
	sums  backend.Tensor  // [B, H, Sq, 1] F32: a term of each row, zero if none is needed
	ops   []*queue.Op

	onMatrix, noMatrix string // the products on matrix units, for plans, or why there are none
}

// newGradients returns the operations of g, with scratch from alloc, for the caller to release also after an error.
func (b *Backend) newGradients(g *backend.Gradients, alloc func(backend.DType, backend.Shape) (backend.Tensor, error)) (*gradients, error) {
	d := g.Dims()
	x := &gradients{b: b, g: g, d: d, p: g.Problem, group: d.Heads / d.KVHeads}
	x.p.Sinks = nil
	err := tooLong(gradientOperands(g))
	if err == nil {
		err = x.check()
	}
	if err == nil {
		x.rows, err = alloc(backend.F32, backend.Shape{d.Batch, d.Heads, d.SeqQ, 3})
	}
	if err == nil && (!g.DSinks.IsZero() || !g.DSlopes.IsZero() || one(g.DBias)) {
		x.sums, err = alloc(backend.F32, backend.Shape{d.Batch, d.Heads, d.SeqQ, 1})
	}
	if err == nil {
		x.build()
	}
	return x, err
}

// one reports whether t has one element for each batch and head.
func one(t backend.Tensor) bool {
	return !t.IsZero() && t.Shape()[backend.Seq] == 1 && t.Shape()[backend.Dim] == 1
}

// check returns the reason why the device cannot compute the gradients.
func (x *gradients) check() error {
	if x.g.Listed != nil {
		return fmt.Errorf("key indices: no GPU kernel computes their gradients: use the CPU: %w", backend.ErrUnsupported)
	}
	o := newScoreOptions(&x.p, x.d.Heads, nil)
	need := gradientBuffers + when(o.both == shaders.Apart, 2) + when(o.values == shaders.InTable, 1)
	if have := int(x.b.dev.Limits.MaxStorageBuffersPerShaderStage); have < need {
		return fmt.Errorf("two masks with a bias, two biases with a mask, or values of a score mod with both: the kernel of their gradients has %d storage buffers, %s binds %d: %w",
			need, x.b.info.Name, have, backend.ErrUnsupported)
	}
	if m := x.p.ScoreMod; m != nil {
		if err := modtext.Check("the score mod's WGSLDerivative", m.WGSLDerivative); err != nil {
			return err
		}
	}
	if _, err := x.pairs(); err != nil {
		return err
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

// pairs returns the operands of scores.
func (x *gradients) pairs() (cut.Pairs, error) {
	return cut.PairsOf(&x.p, backend.Shape{x.d.Batch, x.d.Heads, x.d.SeqQ, x.d.SeqK})
}

// build appends the operations.
func (x *gradients) build() {
	g := x.g
	x.delta()
	if !g.DSinks.IsZero() {
		x.totals("dsinks", g.DSinks)
	}
	x.sum(shaders.DKV, max(x.d.Dim, x.d.ValueDim), backend.Operand{Name: "dv", Tensor: g.DV}, backend.Operand{Name: "dk", Tensor: g.DK})
	x.sum(shaders.DQ, x.d.Dim, backend.Operand{Name: "dq", Tensor: g.DQ})
	kind := reducePairs
	switch s := g.DBias.Shape(); {
	case s[backend.Dim] == 1:
		kind = reduceRows
	case s[backend.Seq] == 1:
		kind = reduceKeys
	}
	x.scores(kind, "dbias", g.DBias, false)
	x.scores(reduceDiagonals, "drelative", g.DRelative, false)
	x.scores(reduceRows, "dslopes", g.DSlopes, true)
}

// delta appends the operation that fills rows, and sums for the sinks.
func (x *gradients) delta() {
	g, d := x.g, x.d
	sums := backend.Tensor{}
	if !g.DSinks.IsZero() {
		sums = x.sums
	}
	ops := []*cut.Operand{
		cut.Reads("do", g.DO, cut.RowAxes, 1), cut.Reads("o", g.O, cut.RowAxes, 1), cut.Reads("lse", g.LSE, cut.RowAxes, 1),
		cut.Reads("dlse", g.DLSE, cut.RowAxes, 1), cut.Writes("scratch", x.rows, cut.RowAxes), cut.Writes("scratch", sums, cut.RowAxes),
	}
	op := x.b.rowOp(backend.Shape{d.Batch, d.Heads, d.SeqQ, 1}, ops, func(box cut.Box, v []cut.View) queue.Step {
		w := &shaders.DeltaParams{
			Heads: box.Len(cut.Head), Rows: box.Len(cut.Row), VDim: d.ValueDim, GType: int(g.DO.DType()), OType: int(g.O.DType()),
			Shifted: when(!g.DLSE.IsZero(), 1), Sunk: when(!sums.IsZero(), 1),
			G: strides(v[0]), O: strides(v[1]), LSE: strides(v[2]), DLSE: strides(v[3]), Out: strides(v[4]), Sums: strides(v[5]),
		}
		if !sums.IsZero() {
			for h := range w.Heads {
				w.Sinks[h] = g.Problem.Sink(box.Lo[cut.Head] + h)
			}
		}
		return queue.Step{Kernel: shaders.Delta, Params: w, Groups: rows(box), OpsPerGroup: reduceOps * float64(d.ValueDim)}
	})
	op.Cutter.AtMost(cut.Head, len(shaders.DeltaParams{}.Sinks))
	x.ops = append(x.ops, op)
}

// tiling is how gradient.wgsl divides its tiles among the threads of a workgroup: lanes for the
// columns of each result, and ty for what is owned.
type tiling struct {
	results, lanes, ty int
	matrix             shaders.MatrixGradient // unless M is 0
}

// gradientDepths are the vec4 of depths that gradient.wgsl stages at once.
const gradientDepths = 4

// tilingOf returns the tiling for results with so many columns. Wider ones take several parts.
func tilingOf(of shaders.Result, columns int) tiling {
	t := tiling{results: 1 + when(of == shaders.DKV, 1), lanes: tune.TilingOf(columns, columns).Lanes}
	t.ty = tune.RowThreads(t.tx())
	return t
}

// tilingOf returns the tiling for results of so many columns, on matrix units where they take the call.
func (x *gradients) tilingOf(of shaders.Result, columns int) tiling {
	g, l := x.g, &x.b.dev.Limits
	t := g.Q.DType()
	if x.noMatrix = "no LowPrecision with q, k, v and do all of f16 or bf16"; g.LowPrecision && (t == backend.F16 || t == backend.BF16) && g.K.DType() == t && g.V.DType() == t && g.DO.DType() == t {
		k, whyNot := x.b.matrices.Gradient(of, shaders.Type(t), x.d.Dim, x.d.ValueDim, tune.Limits{Threads: int(l.MaxComputeInvocationsPerWorkgroup), Memory: int(l.MaxComputeWorkgroupStorageSize)})
		if x.noMatrix = whyNot; whyNot == "" {
			x.onMatrix = fmt.Sprintf(", products of f16 matrices of %dx%dx%d", k.M, k.N, k.K)
			return tiling{matrix: k}
		}
	}
	return tilingOf(of, columns)
}

func (t tiling) tx() int      { return t.results * t.lanes }
func (t tiling) owned() int   { return 8*t.ty + t.matrix.TY*t.matrix.M }
func (t tiling) others() int  { return 4*t.tx() + t.matrix.Others }
func (t tiling) columns() int { return max(8*t.lanes, t.matrix.Depth, t.matrix.Columns) }

// loops bounds the loop iterations of a thread for one tile, with the loops of @unroll(deep).
func (t tiling) loops(dim, valueDim int) int {
	if k := t.matrix; k.M > 0 {
		turns := ceil(k.Depth+k.Columns, k.Others) // of results, of M·Others/4 vec4 a subgroup
		return 16 + ceil(k.Others*turns*k.Others, 4*k.TY*k.Lanes) + 2*turns*(1+ceil(k.M*k.Others, 4*k.Lanes))
	}
	stages := ceil(dim, 4*gradientDepths) + ceil(valueDim, 4*gradientDepths)
	return 4 + stages*(1+gradientDepths) + t.others()*9/8 + 33 // steps of 8 others or more
}

// apartLoops bounds the loop iterations of a thread for a tile whose products lanes take.
func (t tiling) apartLoops() int {
	k := t.matrix
	if k.In != shaders.BF16 {
		return 0
	}
	fours := ceil(k.M*k.Others, 4*k.Lanes)
	return fours*(k.Depth+k.Columns)/4 + (ceil(k.Depth, k.Others)+ceil(k.Columns, k.Others))*(1+fours*(1+k.Others))
}

// pass is an operation of gradient.wgsl: workgroups compute the scores of their tiles again and
// leave sums in the state of a box. Another kernel then reads them.
type pass struct {
	x                 *gradients
	options           scoreOptions
	q, k, v, do, info *cut.Operand
	cutter            *cut.Cutter
	tile              tiling
	kernel            shaders.Variant
}

// newPass returns the pass for results of so many columns, which are added to operands. Workgroups
// need so many query heads together.
func (x *gradients) newPass(of shaders.Result, tile tiling, columns, inner, granule, heads int, to ...*cut.Operand) *pass {
	d, g := x.d, x.g
	pairs, _ := x.pairs() // without the error that check returns
	s := &pass{
		x: x, options: newScoreOptions(&x.p, d.Heads, &pairs), tile: tile,
		q: cut.Reads("q", g.Q, cut.RowAxes, 1), k: cut.Reads("k", g.K, cut.KeyAxes, x.group), v: cut.Reads("v", g.V, cut.KeyAxes, x.group),
		do: cut.Reads("do", g.DO, cut.RowAxes, 1), info: cut.Reads("scratch", x.rows, cut.RowAxes, 1),
	}
	list := append(pairs.List(), s.q, s.do, s.info)
	for _, o := range list {
		o.Heads = heads
	}
	s.cutter = x.b.dev.NewCutter(inner, granule, append(append(list, s.k, s.v), to...)...)
	s.options.limit(s.cutter)
	s.cutter.AlignGranules()
	s.cutter.StateAbove = -1

	expand, wide := shaders.Full, true
	for _, o := range []backend.Tensor{g.Q, g.K, g.V, g.DO} {
		wide = wide && cut.AlignedRows(o, 4)
	}
	if x.b.info.Type == backend.CPU { // compiles in less time
		expand = shaders.Registers
	}
	if k := tile.matrix; k.M > 0 {
		k.Expand = expand
		k.Vec, k.Full, k.Both, k.Paired = wide, wide && k.Depth == d.Dim && k.Columns == d.ValueDim, s.options.both, s.options.kinds != tune.Pairs{}
		s.kernel = s.options.modded(k, true)
		return s
	}
	wide = wide && expand == shaders.Full
	s.kernel = s.options.modded(shaders.Gradient{
		Expand: expand, In: shaders.Type(g.Q.DType()), KV: shaders.Type(g.K.DType()), DO: shaders.Type(g.DO.DType()), Vec: wide,
		Full: wide && d.Dim%(4*gradientDepths) == 0 && d.ValueDim%(4*gradientDepths) == 0 && (of == shaders.DS || columns%s.tile.columns() == 0 && (of == shaders.DQ || d.Dim == d.ValueDim)),
		Both: s.options.both, Paired: s.options.kinds != tune.Pairs{}, Of: of, TX: s.tile.tx(), TY: s.tile.ty, QD: gradientDepths,
	}, true)
	return s
}

// add appends the operation. narrow leaves the part of a box that is computed. dispatch sets the
// parameters of a step that depend on the result, and the step's Groups and Each. last returns the
// steps, so many in their order, that read the sums.
func (s *pass) add(chained bool, steps int, narrow func(box cut.Box) cut.Box, dispatch func(p queue.Chunk, w *shaders.AttentionParams, step *queue.Step), last func(p queue.Chunk) queue.Step) {
	d, c := s.x.d, s.cutter
	s.x.ops = append(s.x.ops, &queue.Op{
		Cutter: c, Space: cut.Space(d.Batch, d.Heads, d.SeqQ, d.SeqK, 1), Chained: chained, Table: s.options.table(nil),
		Sweep: func(box cut.Box, chunk int) queue.Sweep {
			seen := narrow(box)
			return queue.Sweep{Box: seen, Chunk: chunk, Passes: 1, After: steps, State: c.State(seen)}
		},
		Step: func(p queue.Chunk) queue.Step {
			if p.Pass >= p.Of.Passes {
				return last(p)
			}
			view := func(o *cut.Operand) cut.View { return o.View(p.Box, c.Align).Granules() }
			q, k, v, do, info := view(s.q), view(s.k), view(s.v), view(s.do), s.info.View(p.Box, c.Align)
			w := &shaders.AttentionParams{
				KVHeads: ceil(p.Len(cut.Head), s.x.group), Group: s.x.group, AllKeys: d.SeqK, Dim: d.Dim, VDim: d.ValueDim,
				Flags: when(!p.First, shaders.GoOn) | when(!p.Last, shaders.Leave), Q: strides(q), K: strides(k), V: strides(v), O: strides(do), S: strides(info),
			}
			mask, bias, more := s.options.bind(w, p, c.Align, 1)
			windows := append([]cut.Window{q.Window, k.Window, v.Window, do.Window, info.Window, mask, bias, p.State}, more...)
			step := queue.Step{Kernel: s.kernel, Params: w, Windows: windows}
			dispatch(p, w, &step)
			return step
		},
	})
}

// sum appends the operation that computes results: DV and DK, or DQ, of at most so many columns. A result may be missing.
func (x *gradients) sum(of shaders.Result, columns int, results ...backend.Operand) {
	heads, inner, axes, use := 1, cut.Col, cut.RowAxes, cut.Writes
	if of == shaders.DKV {
		heads, inner, axes = x.group, cut.Row, cut.KeyAxes
	}
	if x.g.Add {
		use = cut.Updates
	}
	var to []*cut.Operand
	var kinds []int // the numbers of the results in the state
	for i, r := range results {
		if !r.Tensor.IsZero() {
			o := use(r.Name, r.Tensor, axes)
			o.Group = heads
			to, kinds = append(to, o), append(kinds, i)
		}
	}
	if to == nil {
		return
	}
	tile := x.tilingOf(of, columns)
	parts := ceil(columns, tile.columns())
	pitch := parts*tile.columns() + when(tile.matrix.M > 0, 4)
	// owned returns the heads that workgroups own, and the rows or keys of each.
	owned := func(box cut.Box) (owners, length int) {
		if of == shaders.DQ {
			return box.Len(cut.Head), box.Len(cut.Row)
		}
		return box.Len(cut.Head) / heads, box.Len(cut.Col)
	}
	// The order of sums over several heads is that of whole tiles, unless a binding cannot hold
	// a tile of all heads that share a key head.
	granule := tile.others()
	for granule > 1 && uint64(4*heads*granule*max(x.d.Dim, x.d.ValueDim)) > queue.MaxWindow(x.b.dev.Limits)/2 {
		granule /= 2
	}
	s := x.newPass(of, tile, columns, inner, granule, heads, to...)
	c := s.cutter
	// sums returns the elements of a result in the state.
	sums := func(box cut.Box) int {
		owners, length := owned(box)
		return box.Len(cut.Batch) * owners * length * pitch
	}
	inState := len(results)
	if tile.matrix.In == shaders.BF16 {
		inState *= 2 // those of lanes too
	}
	c.State = func(box cut.Box) uint64 { return uint64(4 * inState * sums(box)) }
	loops := tile.loops(x.d.Dim, x.d.ValueDim) + s.options.rounds(17)
	if x.b.info.Type == backend.CPU { // others have no bound, see cut.MaxLoops
		loops += tile.apartLoops()
	}
	each := 2 * float64(heads*(x.d.Dim+x.d.ValueDim+len(results)*tile.columns())*tile.owned()) // for a row, or a key, of the tiles
	c.Most[inner] = cut.LongestChunk(tile.others(), heads*loops, each*float64(tile.others()), x.b.dev.ChunkWork(s.kernel))
	s.add(false, len(to), func(box cut.Box) cut.Box {
		seen := box.VisibleRows(x.p.Visible, tile.others())
		if of == shaders.DQ {
			seen = box.Visible(x.p.Visible, tile.others())
		}
		if seen.Len(inner) == 0 { // results without terms are zeros
			seen.Hi[inner] = min(seen.Lo[inner]+tile.others(), box.Hi[inner])
		}
		return seen
	}, func(p queue.Chunk, w *shaders.AttentionParams, step *queue.Step) {
		owners, length := owned(p.Box)
		w.Blocks, w.Parts, w.Splits, w.BatchHeads = ceil(length, tile.owned()), parts, pitch/4, p.Len(cut.Batch)*owners
		step.Groups, step.OpsPerGroup = w.BatchHeads*w.Blocks*parts, each*float64(p.Len(inner))
	}, func(p queue.Chunk) queue.Step {
		owners, length := owned(p.Box)
		o := to[p.Pass-p.Of.Passes]
		view := o.View(p.Box, c.Align)
		// The sums are rows of pitch elements in the state.
		step := conversion(shaders.ConvertParams{
			Heads: owners, Rows: length, InType: int(backend.F32), OutType: int(o.T.DType()), Adds: when(x.g.Add, 1),
			Src: shaders.Strides{Base: kinds[p.Pass-p.Of.Passes] * sums(p.Box), B: owners * length * pitch, H: length * pitch, S: pitch, D: 1},
		}, p.Len(cut.Batch)*owners*length, o.T.Shape()[backend.Dim], view)
		step.Windows = []cut.Window{p.State, view.Window}
		return step
	})
}
