package gpu

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"strings"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/queue"
	"github.com/seed90331342/attn/gpu/internal/tune"
	"github.com/seed90331342/attn/shaders"
)

// Attention computes each call in one pass over the keys, or one for each 256 columns of V.
// In addition to the operands it uses O(Sq) memory, none when the keys come in one chunk. The
// dispatches of several calls share submissions, so that many short sequences cost a
// dispatch each instead of a round trip. Errors are those of backend.Backend;
// backend.ErrUnsupported names options that the device does not support together.
// Lists are downloaded first where kernels cannot look keys up, which waits for the calls before.
func (b *Backend) Attention(ctx context.Context, calls ...*backend.Call) error {
	calls, looked, err := b.download(ctx, calls)
	if err != nil {
		return fmt.Errorf("attention: %w", err)
	}
	total := func() (flops float64) {
		for _, c := range calls {
			flops += float64(backend.NewPlan(c).FLOPs)
		}
		return flops
	}
	of := func(i int) (operands, error) { return operandsOf(calls[i]), nil }
	return b.do(ctx, "attention", len(calls), of, func(r *queue.Runner, i int) ([]*queue.Op, error) {
		r.Expect(total)
		var way route
		if looked != nil {
			way = looked[i]
		}
		return b.attention(r, calls[i], way, len(calls) == 1)
	})
}

// Warmup compiles the pipelines that Attention needs for c and, with weights, those of QK and
// Softmax, by a rehearsal of the calls. Stages of other shapes may need other pipelines: keys
// that are no multiple of 4, much longer rows, or many more of them. It returns
// backend.ErrUnsupported when the device does not accept a kernel.
func (b *Backend) Warmup(ctx context.Context, c *backend.Call, weights bool) error {
	return b.warmup(ctx, func(r *queue.Runner, _ int) ([]*queue.Op, error) {
		ops, err := b.attention(r, c, route{}, true)
		if err != nil || !weights {
			return ops, err
		}
		w, err := weightsOf(c)
		if err != nil {
			return nil, err
		}
		qk, err := b.qk(w, c.Q, c.K)
		if err != nil {
			return nil, err
		}
		softmax, err := b.softmax(w, backend.Tensor{}, &c.Problem, false)
		return append(ops, qk, softmax), err
	})
}

// weightsOf returns a tensor for the weights of c, without memory.
func weightsOf(c *backend.Call) (backend.Tensor, error) {
	d := c.Dims()
	return backend.Meta(backend.F32, backend.Shape{d.Batch, d.Heads, d.SeqQ, d.SeqK})
}

// Plan describes how Attention would run c.
func (b *Backend) Plan(ctx context.Context, c *backend.Call) (backend.Plan, error) {
	return resultWithin(ctx, b, "plan", func() (backend.Plan, error) {
		p := backend.NewPlan(c)
		p.Backend, p.Limits = b.info.Name, b.info.Limits
		way, err := b.route(c)
		if err != nil {
			return p, err
		}
		for _, x := range way.parts {
			op := way.op(x, true)
			e, err := b.count(&p, op)
			if err != nil {
				return p, err
			}
			x.describe(&p, e)
			if op.Cutter.Room > 0 {
				var names []string
				for _, o := range op.Cutter.Operands {
					if o.OnHost {
						names = append(names, o.Name)
					}
				}
				p.Path = "streamed " + p.Path
				p.Why += fmt.Sprintf("; %s stay in host memory: windows of them are uploaded while the device computes, within %d KiB of device memory",
					strings.Join(names, ", "), op.Cutter.Room>>10)
			}
		}
		if !c.Lists.IsZero() && way.given == nil {
			p.Why += "; the lists of keys are downloaded first, which waits for the device"
		}
		if n := len(way.parts); n > 1 {
			p.Why += fmt.Sprintf("; %d columns of v in %d slices, which compute the scores again", c.V.Shape()[backend.Dim], n)
		}
		return p, nil
	})
}

// count adds what op takes to a plan, and returns its extent.
func (b *Backend) count(p *backend.Plan, op *queue.Op) (queue.Extent, error) {
	e, err := b.dev.Count(op)
	if err != nil {
		return e, err
	}
	if op.Fill != nil {
		first, err := b.dev.Count(op.Fill(cut.Window{Size: op.Filled}))
		if err != nil {
			return e, err
		}
		p.Chunks += first.Dispatches
	}
	moved, memory, err := b.dev.Streamed(op)
	p.Chunks += e.Dispatches
	p.Streamed += int64(moved)
	p.Scratch = max(p.Scratch, int64(e.State)+int64(memory))
	return e, err
}

// attention returns the operations of c: one, or one for each slice of V's columns. It measures
// the variants of the kernel first where the tuner wants that. way is the route of c, or zero.
// resumable calls may continue from c.Resume and be interrupted.
func (b *Backend) attention(r *queue.Runner, c *backend.Call, way route, resumable bool) (ops []*queue.Op, err error) {
	if way.c == nil {
		if way, err = b.route(c); err != nil {
			return nil, err
		}
	}
	ops = make([]*queue.Op, len(way.parts))
	for i, x := range way.parts {
		if x, err = b.tuned(r, x); err != nil {
			return nil, err
		}
		way.parts[i] = x // a call that a rehearsal precedes is queued twice
		ops[i] = way.op(x, resumable)
	}
	return ops, nil
}

// errCollected means that the keys of a call cannot be looked up, so that the host must know its lists.
var errCollected = errors.New("keys are collected")

// route is how the device computes a call.
type route struct {
	c     *backend.Call // if only the device knows its lists, Listed are as long as these can be
	parts []path        // of c, or of each slice of V's columns
	// given is the call whose lists kernels look up, or nil. ranges is what these kernels need to know of the lists.
	given  *backend.Call
	ranges []byte
}

// route returns the route of c. Without Lists in its call, kernels cannot look keys up.
func (b *Backend) route(c *backend.Call) (x route, err error) {
	x.c = c
	if !c.Lists.IsZero() {
		if x.c, err = c.FillLists(); err == nil {
			err = b.headsAsRows(x.c)
		}
		if err != nil {
			return x, err
		}
		x.given, x.ranges = c, ranges(c)
	}
	if uint64(len(x.ranges)) <= queue.MaxWindow(b.dev.Limits) {
		if x.parts, err = b.paths(x.c); !errors.Is(err, errCollected) {
			return x, err
		}
	}
	x.c.Lists, x.given, x.ranges = backend.Tensor{}, nil, nil
	x.parts, err = b.paths(x.c)
	return x, err
}

// paths returns the path of c, or of each slice of V's columns.
func (b *Backend) paths(c *backend.Call) ([]path, error) {
	parts, err := cut.Slices(c)
	all := make([]path, len(parts))
	for i, part := range parts {
		if all[i], err = b.path(part); err != nil {
			return nil, err
		}
	}
	return all, err
}

// path is a way to compute an attention call.
type path interface {
	op() *queue.Op
	// describe sets Path, Why and Cut of a plan.
	describe(p *backend.Plan, e queue.Extent)
	base() *attention
}

// decodes reports whether c has few enough query rows for the decode path.
func (b *Backend) decodes(c *backend.Call) bool {
	d := c.Dims()
	return d.Heads/d.KVHeads*d.SeqQ <= b.decodeRows
}

// path returns the path for c: decode for few query rows, else prefill, on matrix units where they take c.
func (b *Backend) path(c *backend.Call) (path, error) {
	if b.decodes(c) {
		if x, err := b.newDecode(c); err == nil {
			return x, nil
		}
	}
	x, whyNot, err := b.newMatrix(c, b.matrices.Kernel)
	if err != nil || whyNot == "" {
		return x, err
	}
	if x, err = b.newPrefill(c, b.choose); err == nil { // its error covers what all paths lack
		x.noMatrix = whyNot
	}
	return x, err
}

// tuned returns x. If the call is the first of its class, it measures the variants and returns the path with the fastest.
func (b *Backend) tuned(r *queue.Runner, x path) (path, error) {
	a, ok := x.(*prefill)
	if !ok || !a.tiled || !b.tuner.Claim(a.shape()) {
		return x, nil
	}
	if err := r.Flush(); err != nil {
		return nil, err
	}
	if err := b.dev.Idle(r.Context()); err != nil { // trials use the device alone
		return nil, err
	}
	if err := b.tuner.FirstUse(r.Context(), tuneRunner{b.dev, b}, a.shape()); err != nil {
		return nil, err
	}
	return b.newPrefill(a.c, b.choose)
}

// attention is the part of a call that both paths share.
type attention struct {
	b *Backend
	c *backend.Call
	d backend.Dims
	*cut.Call
	scoreOptions
	cutter *cut.Cutter
	each   float64 // operations for one row and one key
	table  []byte  // of pages, nil when kernels do not look pages up
}

// base implements path.
func (a *attention) base() *attention { return a }

func (b *Backend) newAttention(c *backend.Call) (*attention, error) {
	if err := tooLong(operandsOf(c)); err != nil {
		return nil, err
	}
	d := c.Dims()
	if d.ValueDim > cut.MaxValueDim {
		return nil, fmt.Errorf("v has head size %d, the fused kernel takes up to %d: %w", d.ValueDim, cut.MaxValueDim, backend.ErrUnsupported)
	}
	ops, err := cut.CallOf(c)
	if err != nil {
		return nil, err
	}
	return &attention{
		b: b, c: c, d: d, Call: ops, scoreOptions: newScoreOptions(&c.Problem, d.Heads, &ops.Pairs),
		each: 2 * float64(d.Dim+d.ValueDim),
	}, nil
}

// newCutter sets the Cutter for a kernel with so many storage buffers in addition to
// the page table and the options, and decides whether kernels look pages up.
func (a *attention) newCutter(buffers int) error {
	if a.both == shaders.Apart {
		buffers += 2
	}
	a.cutter = a.b.dev.NewCutter(cut.Col, cut.Tile, a.List()...)
	a.limit(a.cutter)
	most := queue.MaxWindow(a.b.dev.Limits)
	for bound := buffers < int(a.b.dev.Limits.MaxStorageBuffersPerShaderStage); ; bound = false {
		a.Collect(bound)
		if !a.c.Lists.IsZero() {
			if !a.HasTable() || a.tableBytes() > most {
				return errCollected
			}
			return nil
		}
		var pages []byte
		if a.HasTable() || a.listed() {
			pages = a.Pages.Bytes(a.K.T.Strides(), a.V.T.Strides())
		}
		a.table = a.scoreOptions.table(pages)
		switch {
		case uint64(len(a.table)) <= most:
			return nil
		case !a.HasTable():
			return fmt.Errorf("the table of listed keys and of the score mod's values takes %d bytes, a binding holds %d: use fewer of them: %w", len(a.table), most, backend.ErrUnsupported)
		}
	}
}

// listed reports whether kernels look up listed keys: their rows, or their positions, on which these options depend.
func (a *attention) listed() bool {
	const placed = shaders.HasMask | shaders.HasBlocks | shaders.HasBias | shaders.HasSlopes | shaders.HasDropout
	return a.Pages.Listed() && (a.HasTable() || a.p.ScoreMod != nil || a.flags&placed != 0)
}

// check returns backend.ErrUnsupported when k has more storage buffers than the device
// binds.
func (a *attention) check(k shaders.Variant) error {
	need := len(shaders.Describe(k).Bindings) - 1 // without the uniform
	have := int(a.b.dev.Limits.MaxStorageBuffersPerShaderStage)
	if need > have {
		return fmt.Errorf("two masks with a bias, two biases with a mask, or values of a score mod or lists of keys with both, and more than %d query rows a key head: the kernel has %d storage buffers, %s binds %d (maxStorageBuffersPerShaderStage): combine the two masks, or the two biases: %w",
			a.b.decodeRows, need, a.b.info.Name, have, backend.ErrUnsupported)
	}
	return nil
}

// bind sets the options of a chunk in w, and returns the windows of masks and biases. When kernels look pages up, it also
// sets where the pages of the chunk's batches are, and returns the window of their table.
func (a *attention) bind(w *shaders.AttentionParams, p queue.Chunk) (mask, bias cut.Window, more []cut.Window) {
	mask, bias, more = a.scoreOptions.bind(w, p, a.cutter.Align, math.Log2E)
	if !a.HasTable() && !a.listed() {
		return mask, bias, more
	}
	size, width := a.Pages.Size, a.Pages.Width
	w.Page, w.Pages, w.TableAt, w.PageBits = size, width, a.Pages.At(p.Lo[cut.Batch]), 32
	if size&(size-1) == 0 {
		w.PageBits = bits.TrailingZeros(uint(size))
	}
	if !a.c.Lists.IsZero() {
		w.Flags |= shaders.HasCounts
		w.CountsAt = a.Pages.At(a.d.Batch) + p.Lo[cut.Batch]
	}
	if a.values != shaders.InTable {
		more = append(more, p.Table)
	}
	return mask, bias, more
}

// products describes float32 products of weights in 16 bits; "" in full precision.
func (a *attention) products() string {
	if t := a.c.WeightType(); t != backend.F32 {
		return ", float32 products of weights in " + t.String()
	}
	return ""
}

// storage describes how operands are stored and pages are found.
func (a *attention) storage() string {
	text := cut.Storage(a.c)
	switch {
	case a.Pages.Listed() && a.HasTable():
		text += ", listed keys looked up"
	case a.Pages.Listed():
		text += ", listed keys, which are collected before each step"
	case a.HasTable():
		text += fmt.Sprintf(" in pages of %d, looked up", a.Pages.Size)
	case a.Pages != nil:
		text += fmt.Sprintf(" in pages of %d, which are collected before each step", a.Pages.Size)
	}
	return text
}

// all returns the index space.
func (a *attention) all() cut.Box { return cut.Space(a.d.Batch, a.d.Heads, a.d.SeqQ, a.d.SeqK, 1) }

// shape returns what the choice of a variant depends on. Pages are not part of it: they
// change only where rows are loaded from.
func (a *attention) shape() tune.Shape {
	d, c, l := a.d, a.c, &a.b.dev.Limits
	tiling := tune.TilingOf(d.Dim, d.ValueDim)
	return tune.Shape{
		Tiling: tiling, ValueDim: d.ValueDim, Partial: d.Dim < tiling.Width || d.ValueDim%(4*tiling.Lanes) != 0, Heads: d.Batch * d.Heads, SeqQ: d.SeqQ,
		In: c.Q.DType(), KV: c.K.DType(),
		Pairs:    a.kinds,
		Wide:     cut.AlignedRows(c.Q, 4) && (c.K.DType().Quantised() || cut.AlignedRows(c.K, 4) && cut.AlignedRows(c.V, 4)),
		Eights:   cut.AlignedRows(c.Q, 8) && cut.AlignedRows(c.K, 8) && cut.AlignedRows(c.V, 8),
		Half:     c.O.DType() != backend.F32,
		Software: a.b.info.Type == backend.CPU, OwnExp2: a.b.dev.Pipelines.OwnExp2,
		Limits: tune.Limits{
			Threads: int(l.MaxComputeInvocationsPerWorkgroup), Memory: int(l.MaxComputeWorkgroupStorageSize), Binding: queue.MaxWindow(*l),
		},
	}
}
