package gpu

import (
	"context"
	"fmt"
	"math"
	"strings"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/shaders"
)

const (
	tile         = 32  // rows and columns of a workgroup's tile
	maxValueDim  = 256 // what a workgroup's registers hold of an output row
	klenBatches  = 64  // batches that a kernel's klen table holds
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
	cut  *cutter
	each float64 // operations for one row and one key

	path, why string // as in a plan
	rows      int    // query rows of a workgroup
	keys      int    // of a tile
	tiled     bool   // the register-tiled kernel of flash.go, not the plain one
	// kept returns how many bytes of state a box takes, narrowed to the keys that it
	// sees, that comes in pieces of so many keys; and how many of them, at the
	// beginning, are totals of splits.
	kept func(seen box, piece int) (totals, bytes uint64)

	q, k, val, o, lse *operand
	pages             *pages
	*options          // with mask and bias
}

// sharing maps a [B, H, Sq, x] tensor, and keys a [B, Hkv, Sk, x] one.
var (
	rowAxes  = [4]int{axB, axH, axM, whole}
	keyAxes  = [4]int{axB, axH, axN, whole}
	pairAxes = [4]int{axB, axH, axM, axN}
)

// keyOperands returns k and v.
func keyOperands(c *backend.Call, p *pages) (ops [2]*operand, err error) {
	d := c.Dims()
	for i, t := range []backend.Operand{{Name: "k", Tensor: c.K}, {Name: "v", Tensor: c.V}} {
		x, err := words(t.Tensor)
		if err != nil {
			return ops, fmt.Errorf("%s: %w", t.Name, err)
		}
		ops[i] = reads(t.Name, x, keyAxes, d.Heads/d.KVHeads)
		if p != nil {
			ops[i].name, ops[i].pages = t.Name+"'s pool of pages", p
		}
	}
	return ops, nil
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
	if d.ValueDim > maxValueDim {
		return nil, fmt.Errorf("v has head size %d, the fused kernel takes up to %d: %w", d.ValueDim, maxValueDim, backend.ErrUnsupported)
	}
	opts, err := newOptions(&c.Problem, backend.Shape{d.Batch, d.Heads, d.SeqQ, d.SeqK})
	if err != nil {
		return nil, err
	}
	p := pagesOf(c)
	keys, err := keyOperands(c, p)
	if err != nil {
		return nil, err
	}
	a := &attention{
		b: b, c: c, d: d, pages: p,
		q:    reads("q", c.Q, rowAxes, 1),
		k:    keys[0],
		val:  keys[1],
		o:    writes("o", c.O, rowAxes, 1),
		lse:  writes("lse", c.LSE, rowAxes, 1),
		each: 2 * float64(d.Dim+d.ValueDim),

		options: opts,
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
	a.path, a.why, a.rows, a.keys = "plain WGSL", because, tile, tile
	blk := blocks(a.d.ValueDim)
	a.cut = a.newCutter(prefillBuffers)
	a.v = a.kernel(variant{shaders.Attention, map[string]uint32{
		"IN": uint32(a.c.Q.DType()), "KV": uint32(a.c.K.DType()), "DVB": uint32(blk), "ACC": uint32(4 * blk),
	}})
	// A workgroup takes all keys of a piece one after the other, so a piece
	// bounds the shortest submission.
	chunks := (a.d.Dim + tile - 1) / tile
	// Each loop of attention.wgsl for one tile, as if none were unrolled: staging
	// and products of a chunk, scores, maxima, exponentials, the blocks of columns.
	const product = 8 * (1 + 4)
	loops := 1 + chunks*(1+4+4+product) + 4 + 4*(1+4+4) + 8 + 4 + blk*(1+4+4+product) + a.rounds(16)
	a.cut.most[axN] = longest(tile, loops, a.each*tile*tile, a.b.pieceWork(a.v))
	// A row keeps the output, eight parts of the sum, the maximum, and padding.
	width := uint64(blk*tile + 16)
	a.cut.state = func(x box) uint64 {
		return uint64(x.len(axB)*x.len(axH)*x.len(axM)) * width * 4
	}
	a.kept = func(seen box, piece int) (_, bytes uint64) {
		if piece < seen.len(axN) {
			bytes = a.cut.state(seen)
		}
		return 0, bytes
	}
}

// newCutter returns one for a kernel with so many storage buffers beside a table of pages
// and those of the options.
func (a *attention) newCutter(buffers int) *cutter {
	if a.both() {
		buffers += 2
	}
	cut := a.b.newCutter(axN, tile, append(a.operands(), a.q, a.k, a.val, a.o, a.lse)...)
	a.limit(cut)
	a.placePages(buffers < int(a.b.limits.MaxStorageBuffersPerShaderStage))
	return cut
}

// blocks is how many blocks of 32 columns the kernel's variant for dv has: a power
// of two, so that there are four variants and not eight.
func blocks(dv int) int {
	n := 1
	for n*tile < dv {
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
	if s := a.shape(); a.tiled && b.tuner.claim(s) {
		if err := r.flush(); err != nil { // measuring takes turns with what it has on the device
			return err
		}
		if err := b.tuneFirst(r.ctx, s); err != nil {
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
			s.windows[7] = window{buf, 0, stateBytes}
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
	return a.cut.boxes(a.all(), func(x box, piece int) error {
		seen := a.seen(x)
		totals, stateBytes := a.kept(seen, piece)
		return a.cut.pieces(seen, piece, func(p box, first, last bool) error {
			s := a.step(p, first, last, totals)
			total := p.len(axB) * p.len(axH) * ((p.len(axM) + a.rows - 1) / a.rows)
			return f(s, stateBytes, total, a.each*float64(a.rows*p.len(axN)))
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
func (a *attention) all() box {
	return box{hi: [nAxes]int{axB: a.d.Batch, axH: a.d.Heads, axM: a.d.SeqQ, axN: a.d.SeqK, axX: 1}}
}

// seen narrows a box to the keys that any of its rows sees, by whole tiles; at
// least one tile stays, as the outputs must be written.
func (a *attention) seen(x box) box {
	first, last := a.visible(x)
	if first >= last {
		x.hi[axN] = min(x.lo[axN]+a.keys, x.hi[axN])
		return x
	}
	x.lo[axN] = first / a.keys * a.keys
	x.hi[axN] = min((last+a.keys-1)/a.keys*a.keys, x.hi[axN])
	return x
}

// visible returns the first of a box's keys that any of its rows sees, and the end of
// them, by position; first >= last when there is none.
func (a *attention) visible(x box) (first, last int) {
	lo, hi := bounds(a.c.Visible)
	first = max(x.lo[axN], x.lo[axM]+lo)
	last = min(x.hi[axN], x.hi[axM]-1+hi)
	if a.c.Visible.KLen != nil {
		longest := 0
		for b := x.lo[axB]; b < x.hi[axB]; b++ {
			longest = max(longest, a.c.Visible.KLen[b])
		}
		last = min(last, longest)
	}
	return first, last
}

// step is the dispatch for a piece, of whose state so many bytes are totals.
func (a *attention) step(x box, first, last bool, totals uint64) step {
	align := a.cut.align
	q, k, v := a.q.view(x, align), a.k.view(x, align), a.val.view(x, align)
	pairs := a.views(x, align)
	mask, bias, more := a.windows(pairs)
	o, lse := a.o.view(x, align), a.lse.view(x, align)
	if a.tiled {
		q, k, v = granules(q), granules(k), granules(v)
	}
	lo, hi := bounds(a.c.Visible)
	// As in attention.wgsl and flash.wgsl.
	flags := flagBits(!first, !last, !a.c.LSE.IsZero(), a.c.Visible.KLen != nil) | a.flags()
	sinks := 1.0 // unit
	p := newParams()
	p.u32(0, 0, (x.len(axM)+a.rows-1)/a.rows, x.len(axH), x.lo[axH], max(a.k.group, 1),
		x.len(axM), x.lo[axM], x.len(axN), x.lo[axN], a.d.Dim, a.d.ValueDim)
	p.f32(a.c.Scale)
	p.f32(a.c.Softcap)
	p.u32(lo, hi, flags, biasType(a.bias.t), int(a.c.O.DType()))
	if a.tiled {
		p.u32(a.d.SeqK, int(totals/16)) // in vec4
		p.f32(unit(&a.c.Problem))
		sinks = math.Log2E
	}
	a.params(&p, x)
	for _, w := range []view{q, k, v, o, lse, pairs.mask, pairs.bias, pairs.blocks, pairs.relative} {
		p.strides(w.base, w.strides)
	}
	a.tables(&p, x, sinks)
	a.pageParams(&p, x)
	return step{
		variant: a.v, params: p,
		windows: append([]window{q.window, k.window, v.window, mask, bias, o.window, lse.window, {}}, more...),
	}
}

// klen appends the table of key lengths of a box's batches.
func (p *params) klen(v backend.Visibility, x box) {
	var table [klenBatches]int
	if v.KLen != nil {
		copy(table[:], v.KLen[x.lo[axB]:x.hi[axB]])
	}
	p.u32(table[:]...)
}

// bounds returns the visibility rule as row i sees key j when i+lo <= j < i+hi,
// kept within what 32 bits hold; lengths are below 2^30, so nothing changes.
func bounds(v backend.Visibility) (lo, hi int) {
	lo, hi = -(maxSeq - 1), maxSeq-1
	if v.Left != backend.Unbounded {
		lo = max(min(v.Offset-v.Left, hi), lo)
	}
	if v.Right != backend.Unbounded {
		hi = max(min(v.Offset+v.Right+1, maxSeq-1), -(maxSeq - 1))
	}
	return lo, hi
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

// flagBits packs flags, the first one lowest.
func flagBits(flags ...bool) int {
	n := 0
	for i, f := range flags {
		if f {
			n |= 1 << i
		}
	}
	return n
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
		keys = max(keys, int(s.params[8]))
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
