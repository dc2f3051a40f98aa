package gpu

import (
	"context"
	"fmt"
	"math"
	"strings"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/shaders"
)

const (
	softmaxGrain = 256 // what pieces of the softmax kernel are multiples of
	maxSeq       = 1 << 30
	// Storage buffers that kernels have beside a table of pages.
	prefillBuffers = 8
	decodeBuffers  = 6
)

// attention is a fused call in the terms of cutting: plan and run share it.
type attention struct {
	b    *Backend
	c    *backend.Call
	d    backend.Dims
	v    variant
	cut  *cut.Cutter
	each float64 // operations for one row and one key

	path, why string // as in a plan
	rows      int    // query rows of a workgroup
	keys      int    // of a tile
	tiled     bool   // the register-tiled kernel of flash.go, not the plain one
	// kept returns how many bytes of state a box takes, narrowed to the keys that it
	// sees, that comes in pieces of so many keys; and how many of them, at the
	// beginning, are totals of splits.
	kept func(seen cut.Box, piece int) (totals, bytes uint64)

	*cut.Call
	*options
}

// newAttention returns c with the kernel that is known to be the fastest for it.
func (b *Backend) newAttention(c *backend.Call) (*attention, error) {
	return b.newAttentionBy(c, b.choose)
}

// newAttentionBy returns c with the kernel that choose says.
func (b *Backend) newAttentionBy(c *backend.Call, choose chooser) (*attention, error) {
	d := c.Dims()
	if err := checkDims(d); err != nil {
		return nil, err
	}
	if d.ValueDim > cut.MaxValueDim {
		return nil, fmt.Errorf("v has head size %d, the fused kernel takes up to %d: %w", d.ValueDim, cut.MaxValueDim, backend.ErrUnsupported)
	}
	ops, err := cut.CallOf(c)
	if err != nil {
		return nil, err
	}
	a := &attention{
		b: b, c: c, d: d, Call: ops, options: &options{p: &c.Problem, heads: d.Heads, pairs: &ops.Pairs},
		each: 2 * float64(d.Dim+d.ValueDim),
	}
	whyNot, err := a.flash(choose)
	if err != nil {
		return nil, err
	}
	if whyNot != "" {
		a.plain(whyNot)
	}
	return a, nil
}

// plain makes the call one of the plain kernel, because of what keeps it from the
// register-tiled one. That kernel is the oracle of the other, and the last resort.
func (a *attention) plain(because string) {
	a.path, a.why, a.rows, a.keys = "plain WGSL", because, cut.Tile, cut.Tile
	blk := blocks(a.d.ValueDim)
	a.cut = a.newCutter(prefillBuffers)
	a.v = a.kernel(variant{shaders.Attention, map[string]uint32{
		"IN": uint32(a.c.Q.DType()), "KV": uint32(a.c.K.DType()), "DVB": uint32(blk), "ACC": uint32(4 * blk),
	}})
	// A workgroup takes all keys of a piece one after the other, so a piece
	// bounds the shortest submission.
	chunks := (a.d.Dim + cut.Tile - 1) / cut.Tile
	// Each loop of attention.wgsl for one tile, as if none were unrolled: staging
	// and products of a chunk, scores, maxima, exponentials, the blocks of columns.
	const product = 8 * (1 + 4)
	loops := 1 + chunks*(1+4+4+product) + 4 + 4*(1+4+4) + 8 + 4 + blk*(1+4+4+product) + a.rounds(16)
	a.cut.Most[cut.Col] = cut.Longest(cut.Tile, loops, a.each*cut.Tile*cut.Tile, a.b.pieceWork(a.v))
	// A row keeps the output, eight parts of the sum, the maximum, and padding.
	width := uint64(blk*cut.Tile + 16)
	a.cut.State = func(x cut.Box) uint64 {
		return uint64(x.Len(cut.Batch)*x.Len(cut.Head)*x.Len(cut.Row)) * width * 4
	}
	a.kept = func(seen cut.Box, piece int) (_, bytes uint64) {
		if piece < seen.Len(cut.Col) {
			bytes = a.cut.State(seen)
		}
		return 0, bytes
	}
}

// newCutter returns one for a kernel with so many storage buffers beside a table of pages
// and those of the options.
func (a *attention) newCutter(buffers int) *cut.Cutter {
	if a.both() {
		buffers += 2
	}
	cutter := a.b.newCutter(cut.Col, cut.Tile, a.List()...)
	a.limit(cutter)
	a.Collect(buffers < int(a.b.limits.MaxStorageBuffersPerShaderStage))
	return cutter
}

// blocks is how many blocks of 32 columns the kernel's variant for dv has: a power
// of two, so that there are four variants and not eight.
func blocks(dv int) int {
	n := 1
	for n*cut.Tile < dv {
		n *= 2
	}
	return n
}

// Attention computes c in one pass over the keys, or one for each 256 columns of V;
// memory beside the operands is O(Sq), and none when the keys come in one piece. Errors
// are as backend.Backend says; backend.ErrUnsupported names options that the kernels do
// not take together.
func (b *Backend) Attention(ctx context.Context, c *backend.Call) error {
	if err := b.enter(ctx); err != nil {
		return err
	}
	defer b.leave()
	var pins backend.Pinned
	if err := b.pin(&pins, c); err != nil {
		return fmt.Errorf("attention: %w", err)
	}
	defer pins.Unpin()
	return b.pinned(ctx, "attention", func(r *runner) error { return b.attention(r, c) })
}

// pin pins the operands of c.
func (b *Backend) pin(pins *backend.Pinned, c *backend.Call) error {
	out, in := c.Operands()
	return pins.Pin(b, b.info.Name, out[:], in[:])
}

// whole hands a call that is not sliced to r.
func (b *Backend) whole(r *runner, c *backend.Call) error {
	a, err := b.newAttention(c)
	if err != nil {
		return err
	}
	if x := a.decodes(); x != nil {
		return x.queue(r)
	}
	if s := a.shape(); a.tiled && b.tuner.Claim(s) {
		if err := r.flush(); err != nil { // measuring takes turns with what it has on the device
			return err
		}
		if err := b.tuner.FirstUse(r.ctx, tuneRunner{b}, s); err != nil {
			return err
		}
		if a, err = b.newAttention(c); err != nil {
			return err
		}
	}
	return a.queue(r)
}

// queue hands the call to r.
func (a *attention) queue(r *runner) error {
	if err := r.keep(a.c, a.cut, a.v); err != nil {
		return err
	}
	table, err := a.tableFor(r)
	if err != nil {
		return err
	}
	return a.walk(func(s step, stateBytes uint64, total int, each float64) error {
		if stateBytes > 0 {
			buf, err := r.stateFor(stateBytes)
			if err != nil {
				return err
			}
			s.windows[7] = cut.Window{Buf: buf, Size: stateBytes}
		}
		s.windows = append(s.windows, table...)
		return r.dispatch(s, total, each)
	})
}

// walk calls f for each piece of each box: a step without its range of
// workgroups, the bytes of state that it goes through, how many workgroups, and
// what each of them computes at most.
func (a *attention) walk(f func(s step, stateBytes uint64, total int, each float64) error) error {
	if err := a.checkPages(); err != nil {
		return err
	}
	if err := a.bindable(a.v); err != nil {
		return err
	}
	return a.cut.Boxes(a.all(), func(x cut.Box, piece int) error {
		seen := a.seen(x)
		totals, stateBytes := a.kept(seen, piece)
		return a.cut.Pieces(seen, piece, func(p cut.Box, first, last bool) error {
			s := a.step(p, first, last, totals)
			total := p.Len(cut.Batch) * p.Len(cut.Head) * ((p.Len(cut.Row) + a.rows - 1) / a.rows)
			return f(s, stateBytes, total, a.each*float64(a.rows*p.Len(cut.Col)))
		})
	})
}

// bindable returns an error that names what takes more storage buffers than the device
// binds to a kernel: both of the operands that else share a binding.
func (a *attention) bindable(v variant) error {
	take := strings.Count(v.kernel.Bindings, "r") + strings.Count(v.kernel.Bindings, "w")
	have := int(a.b.limits.MaxStorageBuffersPerShaderStage)
	if take <= have {
		return nil
	}
	return fmt.Errorf("a mask beside a mask of blocks, or a bias beside one by distance, with more than %d query rows a key head: the kernel has %d storage buffers, %s binds %d: %w",
		a.b.decodeRows, take, a.b.info.Name, have, backend.ErrUnsupported)
}

// all is the whole index space.
func (a *attention) all() cut.Box {
	return cut.Space(a.d.Batch, a.d.Heads, a.d.SeqQ, a.d.SeqK, 1)
}

// seen narrows a box to the keys that any of its rows sees, by whole tiles; at
// least one tile stays, as the outputs must be written.
func (a *attention) seen(x cut.Box) cut.Box {
	y := x.Visible(a.c.Visible, a.keys)
	if y.Len(cut.Col) == 0 {
		y.Hi[cut.Col] = min(y.Lo[cut.Col]+a.keys, x.Hi[cut.Col])
	}
	return y
}

// step is the dispatch for a piece, of whose state so many bytes are totals.
func (a *attention) step(x cut.Box, first, last bool, totals uint64) step {
	align := a.cut.Align
	q, k, v := a.Q.View(x, align), a.K.View(x, align), a.V.View(x, align)
	pairs := a.views(x, align)
	mask, bias, more := a.windows(pairs)
	o, lse := a.O.View(x, align), a.LSE.View(x, align)
	if a.tiled {
		q, k, v = q.Granules(), k.Granules(), v.Granules()
	}
	p := &shaders.AttentionParams{
		Blocks: (x.Len(cut.Row) + a.rows - 1) / a.rows, Heads: x.Len(cut.Head), Head0: x.Lo[cut.Head], Group: max(a.K.Group, 1),
		Rows: x.Len(cut.Row), Row0: x.Lo[cut.Row], Keys: x.Len(cut.Col), Key0: x.Lo[cut.Col], AllKeys: a.d.SeqK, Dim: a.d.Dim, VDim: a.d.ValueDim,
		Flags:   when(!first, shaders.GoOn) | when(!last, shaders.Leave) | when(!a.c.LSE.IsZero(), shaders.WantLSE),
		OutType: int(a.c.O.DType()), Running: int(totals / 16), // in vec4
		Q: strides(q), K: strides(k), V: strides(v), O: strides(o), LSE: strides(lse),
	}
	sinks := 1.0 // unit
	if a.tiled {
		sinks = math.Log2E
	}
	a.params(p, x, pairs, sinks)
	a.pageParams(p, x)
	return step{
		variant: a.v, params: p,
		windows: append([]cut.Window{q.Window, k.Window, v.Window, mask, bias, o.Window, lse.Window, {}}, more...),
	}
}

// checkDims rejects what package kernels would have: lengths of zero, heads that
// do not divide, lengths beyond 32-bit positions.
func checkDims(d backend.Dims) error {
	for _, n := range []int{d.Batch, d.Heads, d.KVHeads, d.SeqQ, d.SeqK, d.Dim, d.ValueDim} {
		if n < 1 || n >= maxSeq {
			return fmt.Errorf("lengths %+v: each must be from 1 to %d: %w", d, maxSeq-1, backend.ErrShape)
		}
	}
	if d.Heads%d.KVHeads != 0 {
		return fmt.Errorf("k has %d heads, q has %d: the kv heads must divide the query heads: %w", d.KVHeads, d.Heads, backend.ErrShape)
	}
	return nil
}

// when returns bits if is, else 0.
func when(is bool, bits int) int {
	if is {
		return bits
	}
	return 0
}

// biasType is how shaders are told of a bias: 0 for none, else 1 + its type.
func biasType(t backend.Tensor) int {
	if t.IsZero() {
		return 0
	}
	return 1 + int(t.DType())
}

// planWhole adds to p how a call that is not sliced would run.
func (b *Backend) planWhole(c *backend.Call, p *backend.Plan) error {
	a, err := b.newAttention(c)
	if err != nil {
		return err
	}
	if x := a.decodes(); x != nil {
		err = x.plan(p)
	} else {
		err = b.planPrefill(a, p)
	}
	if err != nil {
		return err
	}
	return b.planStream(c, p)
}

// storage names the types of a call's operands.
func storage(c *backend.Call) string {
	if c.K.DType() == c.Q.DType() {
		return c.Q.DType().String()
	}
	return fmt.Sprintf("%s, keys and values %s", c.Q.DType(), c.K.DType())
}

// planPrefill says in p how the call would run.
func (b *Backend) planPrefill(a *attention, p *backend.Plan) error {
	p.Path = a.path
	pieces, keys := 0, 0
	scratch := uint64(0)
	err := a.walk(func(s step, stateBytes uint64, total int, each float64) error {
		pieces++
		keys = max(keys, s.params.(*shaders.AttentionParams).Keys)
		scratch = max(scratch, stateBytes)
		atOnce := func() int { return b.atOnce(s.variant, each) }
		return split(total, atOnce, int(b.limits.MaxComputeWorkgroupsPerDimension), func(_, _, _, _ int) error {
			p.Chunks++
			return nil
		})
	})
	p.Scratch = int64(scratch)
	p.Why = fmt.Sprintf("%s; one pass over the keys for %d rows a workgroup, %s storage, float32 arithmetic; %s",
		a.why, a.rows, a.storage(), b.pacing(a.v))
	p.Cut = fmt.Sprintf("%d batches x %d heads x %d query blocks of %d; %d pieces of up to %d keys, key tiles of %d",
		a.d.Batch, a.d.Heads, (a.d.SeqQ+a.rows-1)/a.rows, a.rows, pieces, keys, a.keys)
	return err
}
