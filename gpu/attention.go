package gpu

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/join"
	"github.com/seed90331342/attn/gpu/internal/queue"
	"github.com/seed90331342/attn/shaders"
)

// Attention computes each call in one pass over the keys, or one for each 256 columns of V. In addition to the operands
// prefill keeps a state of O(Sq) once rows see more than one split of some 256 keys, and another when the keys come in
// chunks; decoding keeps one for each row and split. The dispatches of several calls share submissions, so that many
// short sequences cost a dispatch each instead of a round trip. Errors are those of backend.Backend;
// backend.ErrUnsupported names options that the device does not support together. Lists are downloaded where kernels
// cannot look keys up, which waits for the calls before.
func (b *Backend) Attention(ctx context.Context, calls ...*backend.Call) error {
	return b.within(ctx, "attention", func() error {
		w := queue.Work{Name: "attention"}
		if backend.TraceOf(ctx).Progress != nil {
			for _, c := range calls {
				w.FLOPs += float64(backend.NewPlan(c).FLOPs)
			}
		}
		of := func(i int) operands { return operandsOf(calls[i]) }
		units := b.units(calls)
		return b.do(ctx, w, len(calls), of, len(units), func(i int) ([]*queue.Op, error) {
			c := units[i].Call
			x, err := b.route(units[i])
			if err == nil && x.lookedUp == nil && !c.Lists.IsZero() {
				x, err = b.withHostLists(ctx, c)
			}
			if err != nil {
				return nil, err
			}
			return b.ops(ctx, x, len(calls) == 1)
		})
	})
}

// unit is a call, or several that run as one, on a path if their batches are packed.
type unit struct {
	join.Unit
	path path
}

// units returns the calls, or what runs several of them as one. Packed batches run so only on the path that the first of them
// takes alone: on another one its bits might differ.
func (b *Backend) units(calls []*backend.Call) (all []unit) {
	if len(calls) == 1 {
		return []unit{{Unit: join.Unit{Calls: calls, Call: calls[0]}}}
	}
	for _, x := range join.Units(calls, b.decodes, func(c *backend.Call) bool { return b.prefills(c).tiled }) {
		if x.Packed == nil {
			all = append(all, unit{Unit: x})
			continue
		}
		if p := b.packed(x); p != nil {
			all = append(all, unit{x, p})
			continue
		}
		for _, one := range join.Alone(x.Calls) {
			all = append(all, unit{Unit: one})
		}
	}
	return all
}

// route is how the device computes a call.
type route struct {
	c     *backend.Call // if only the device knows its lists, Listed are as long as these can be
	parts []path        // of c, or of each slice of V's columns
	// lookedUp is the call whose lists kernels look up, or nil. ranges is what these kernels need to know of the lists.
	lookedUp *backend.Call
	ranges   []byte
}

// route returns the route of a call, or of several that run as one. It has no lookedUp where kernels cannot look keys up.
func (b *Backend) route(u unit) (x route, err error) {
	c := u.Call
	if x.c = c; u.path != nil {
		x.parts = []path{u.path}
		return x, nil
	}
	if !c.Lists.IsZero() {
		if x.c, err = c.FillLists(); err == nil {
			err = b.headsAsRows(x.c)
		}
		if err != nil {
			return x, err
		}
		x.lookedUp, x.ranges = c, ranges(c)
	}
	if uint64(len(x.ranges)) <= queue.MaxWindow(b.dev.Limits) {
		if x.parts, err = b.paths(x.c); !errors.Is(err, errCollected) {
			return x, err
		}
	}
	x.c.Lists, x.lookedUp, x.ranges = backend.Tensor{}, nil, nil
	x.parts, err = b.paths(x.c)
	return x, err
}

// errCollected means that the keys of a call cannot be looked up, so that the host must know its lists.
var errCollected = errors.New("keys are collected")

// headsAsRows makes the heads that share a key head the rows of c, a call of one row that has Listed, if they are too many to
// decode: a tile of the prefill kernel then looks a key up once for all of them, as for the 128 heads of latent attention.
// What depends on a head forbids it.
func (b *Backend) headsAsRows(c *backend.Call) error {
	d := c.Dims()
	if b.decodes(c) || c.Slopes != nil || c.Sinks != nil {
		return nil
	}
	for _, t := range [3]*backend.Tensor{&c.Q, &c.O, &c.LSE} {
		if t.IsZero() {
			continue
		}
		shape, strides, rows := t.Shape(), t.Strides(), d.Heads/d.KVHeads
		shape[backend.Heads], shape[backend.Seq] = d.KVHeads, rows
		strides[backend.Seq] = strides[backend.Heads]
		strides[backend.Heads] *= rows
		var err error
		if *t, err = t.View(shape, strides, 0); err != nil {
			return err
		}
	}
	return nil
}

// withHostLists returns the route of c with Listed in place of Lists, because kernels cannot look its keys up.
func (b *Backend) withHostLists(ctx context.Context, c *backend.Call) (x route, err error) {
	host, err := backend.AllocHost(backend.I32, c.Lists.Shape())
	if err == nil {
		err = b.read(ctx, host, c.Lists)
	}
	if err != nil {
		return x, fmt.Errorf("key indices: %w", err)
	}
	keys, err := host.Int32s()
	if err == nil {
		c, err = c.ListKeys(keys)
	}
	if err == nil {
		err = b.headsAsRows(c)
	}
	if err != nil {
		return x, err
	}
	return b.route(unit{Unit: join.Unit{Call: c}})
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
	base() *attention // what both paths share, see problem.go
}

// path returns the path for c: decode for few query rows, else prefill, on matrix units where they take c.
func (b *Backend) path(c *backend.Call) (path, error) {
	if b.decodes(c) {
		if x, err := b.newDecode(c); err == nil { // else prefill returns the error that both share
			return x, nil
		}
	}
	return b.prefillOf(c, nil)
}

// decodes reports whether c has few enough query rows for the decode path.
func (b *Backend) decodes(c *backend.Call) bool {
	d := c.Dims()
	return d.Heads/d.KVHeads*d.SeqQ <= b.decodeRows
}

// prefillOf returns the prefill path for c, on matrix units where they take it. Its batches may be packed.
func (b *Backend) prefillOf(c *backend.Call, p *join.Packed) (*prefill, error) {
	a, err := b.newAttention(c)
	if err != nil {
		return nil, err
	}
	if p != nil {
		if err := a.pack(p); err != nil {
			return nil, err
		}
	}
	x, whyNot, err := a.matrixPrefill(b.matrices.Kernel)
	if err != nil || whyNot == "" {
		return x, err
	}
	if x, err = a.prefill(b.choose); err == nil {
		x.noMatrix = whyNot
	}
	return x, err
}

// ops returns the operations of a route: one, or one for each slice of V's columns. It measures the variants of the kernel first
// where the tuner wants that. Those of resumable calls may continue from Call.Resume and be interrupted.
func (b *Backend) ops(ctx context.Context, x route, resumable bool) ([]*queue.Op, error) {
	ops := make([]*queue.Op, len(x.parts))
	for i, part := range x.parts {
		part, err := b.tuned(ctx, part)
		if err != nil {
			return nil, err
		}
		ops[i] = x.op(part, resumable)
	}
	return ops, nil
}

// tuned returns x. If the call is the first of its class, it measures the variants and returns the path with the fastest.
func (b *Backend) tuned(ctx context.Context, x path) (path, error) {
	a, ok := x.(*prefill)
	if !ok || !a.tiled || !b.tuner.Claim(a.shape()) {
		return x, nil
	}
	if err := b.dev.Idle(ctx); err != nil { // trials use the device alone
		return nil, err
	}
	if err := b.tuner.FirstUse(ctx, tuneRunner{b.dev, b}, a.shape()); err != nil {
		return nil, err
	}
	return b.prefillOf(a.c, a.packed)
}

// listOps is the approximate cost of a key of a list, with its memory accesses.
const listOps = 40

// op returns the operation of a part. It writes its table on the device, from the lists if there are any. That of a call of one
// part may be resumable.
func (x route) op(part path, resumable bool) *queue.Op {
	op, a, c := part.op(), part.base(), x.lookedUp
	if resumable && len(x.parts) == 1 {
		op.Call = x.c
	}
	if c == nil {
		return op
	}
	k, v, top := a.K.T.Strides(), a.V.T.Strides(), c.Lists.Shape()[backend.Dim]
	p := shaders.ListsParams{
		Top: top, CountsAt: a.Pages.At(a.d.Batch),
		KB: k[backend.Batch], KS: k[backend.Seq], VB: v[backend.Batch], VS: v[backend.Seq],
	}
	if c.Pages != nil {
		p.Page = c.K.Shape()[backend.Seq]
	}
	keys := []*cut.Operand{cut.Reads("key indices", c.Lists, [4]int{cut.Batch, cut.Whole, cut.Whole, cut.Whole}, 1)}
	op.Filled = a.tableBytes()
	op.Fill = func(table cut.Window) *queue.Op {
		lists := a.b.rowOp(backend.Shape{a.d.Batch, 1, 1, 1}, keys, func(x cut.Box, v []cut.View) queue.Step {
			p := p
			p.List0, p.Keys = x.Lo[cut.Batch], strides(v[0])
			return queue.Step{Kernel: shaders.Lists, Params: &p, Groups: rows(x), OpsPerGroup: float64(listOps * top)}
		})
		step := lists.Step
		lists.Table = x.ranges
		lists.Step = func(x queue.Chunk) queue.Step {
			s := step(x)
			s.Windows = append(s.Windows, x.Table, table)
			return s
		}
		return lists
	}
	return op
}

// ranges returns the words of the same name of lists.wgsl. Batches may have the same pages, which are there once.
func ranges(c *backend.Call) []byte {
	keys, batch := c.Positions(), c.Lists.Shape()[backend.Batch]
	words, at := make([]int32, 3*batch), 0
	for b := range batch {
		if lo, hi := c.Visible.Range(b, 0, keys); lo < hi {
			words[3*b], words[3*b+1] = int32(lo), int32(hi)
		}
		if c.Pages == nil {
			continue
		}
		pages := c.Pages.Table[b]
		if b == 0 || len(pages) > 0 && (len(c.Pages.Table[b-1]) != len(pages) || &c.Pages.Table[b-1][0] != &pages[0]) {
			at = len(words)
			words = append(words, pages...)
		}
		words[3*b+2] = int32(at)
	}
	data, _ := binary.Append(nil, binary.LittleEndian, words) // words have a size
	return data
}

// Warmup compiles the pipelines that Attention needs for calls and, with weights, those of QK and Softmax, by a
// rehearsal of the calls. Stages of other shapes may need other pipelines: keys that are no multiple of 4, much longer
// rows, or many more of them. It returns backend.ErrUnsupported when the device does not accept a kernel.
func (b *Backend) Warmup(ctx context.Context, weights bool, calls ...*backend.Call) error {
	return b.within(ctx, "warmup", func() error {
		var all []*queue.Op
		for _, u := range b.units(calls) {
			x, err := b.route(u)
			if err != nil {
				return err
			}
			ops, err := b.ops(ctx, x, true)
			if err != nil {
				return err
			}
			all = append(all, ops...)
		}
		for _, c := range calls[:when(weights, len(calls))] {
			w, err := weightsOf(c)
			if err != nil {
				return err
			}
			qk, err := b.qk(w, c.Q, c.K)
			if err != nil {
				return err
			}
			softmax, err := b.softmax(w, backend.Tensor{}, &c.Problem, false)
			if err != nil {
				return err
			}
			all = append(all, qk, softmax)
		}
		return b.dev.Warmup(ctx, all...)
	})
}

// weightsOf returns a tensor for the weights of c, without memory.
func weightsOf(c *backend.Call) (backend.Tensor, error) {
	d := c.Dims()
	return backend.Meta(backend.F32, backend.Shape{d.Batch, d.Heads, d.SeqQ, d.SeqK})
}

// Plan describes how Attention would run calls.
func (b *Backend) Plan(ctx context.Context, calls ...*backend.Call) (backend.Plan, error) {
	return resultWithin(ctx, b, "plan", func() (backend.Plan, error) { return backend.PlanEach(b.units(calls), b.plan) })
}

// plan returns the plan of calls that run as one.
func (b *Backend) plan(u unit) (backend.Plan, error) {
	p, err := backend.PlanEach(u.Calls, func(c *backend.Call) (backend.Plan, error) { return backend.NewPlan(c), nil }) // their counts
	if err != nil {
		return p, err
	}
	p.Backend, p.Limits = b.info.Name, b.info.Limits
	way, err := b.route(u)
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
	if !u.Call.Lists.IsZero() && way.lookedUp == nil {
		p.Why += "; the lists of keys are downloaded first, which waits for the device"
	}
	if n := len(way.parts); n > 1 {
		p.Why += fmt.Sprintf("; %d columns of v in %d slices, which compute the scores again", u.Call.V.Shape()[backend.Dim], n)
	}
	if n := len(u.Calls); n > 1 {
		p.Why += fmt.Sprintf("; %d sequences, or segments, run as one call", n)
	}
	return p, nil
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
