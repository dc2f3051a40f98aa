package gpu

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/join"
	"github.com/seed90331342/attn/gpu/internal/queue"
	"github.com/seed90331342/attn/gpu/internal/tune"
	"github.com/seed90331342/attn/shaders"
)

// attention is the part of a call that both paths share.
type attention struct {
	b *Backend
	c *backend.Call
	d backend.Dims
	*cut.Call
	options    scoreOptions
	cutter     *cut.Cutter
	opsPerPair float64      // operations for one row and one key
	table      []byte       // of pages and packed batches, nil when kernels look none up
	packed     *join.Packed // batches, or nil
	packedAt   int          // of them in the table
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
		b: b, c: c, d: d, Call: ops, options: newScoreOptions(&c.Problem, d.Heads, &ops.Pairs),
		opsPerPair: 2 * float64(d.Dim+d.ValueDim),
	}, nil
}

// newCutter sets the Cutter for a kernel with so many storage buffers in addition to
// the page table and the options, and decides whether kernels look pages up.
func (a *attention) newCutter(buffers int) error {
	if a.options.both == shaders.Apart {
		buffers += 2
	}
	a.cutter = a.b.dev.NewCutter(cut.Col, cut.Tile, a.List()...)
	a.options.limit(a.cutter)
	most := queue.MaxWindow(a.b.dev.Limits)
	for bound := a.packed != nil || buffers < int(a.b.dev.Limits.MaxStorageBuffersPerShaderStage); ; bound = false {
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
		if a.packedAt = len(pages) / 4; a.packed != nil {
			pages, _ = binary.Append(pages, binary.LittleEndian, a.packed.Batches) // they have a size
		}
		a.table = a.options.table(pages)
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
	return a.Pages.Listed() && (a.HasTable() || a.options.p.ScoreMod != nil || a.options.flags&placed != 0)
}

// check returns backend.ErrUnsupported when k has more storage buffers than the device binds.
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
// sets where the pages of the chunk's batches are, and returns the window of their table. That of packed batches is the mask.
func (a *attention) bind(w *shaders.AttentionParams, p queue.Chunk) (mask, bias cut.Window, more []cut.Window) {
	mask, bias, more = a.options.bind(w, p, a.cutter.Align, math.Log2E)
	lookUp := a.HasTable() || a.listed()
	if lookUp {
		size, width := a.Pages.Size, a.Pages.Width
		w.Page, w.Pages, w.TableAt, w.PageBits = size, width, a.Pages.At(p.Lo[cut.Batch]), 32
		if size&(size-1) == 0 {
			w.PageBits = bits.TrailingZeros(uint(size))
		}
	}
	if !a.c.Lists.IsZero() {
		w.Flags |= shaders.HasCounts
		w.BatchAt = a.Pages.At(a.d.Batch) + p.Lo[cut.Batch]
	}
	if a.packed != nil {
		w.BatchAt, mask = a.packedAt+binary.Size(join.Batch{})/4*p.Lo[cut.Batch], p.Table
	}
	if lookUp && a.packed == nil && a.options.values != shaders.InTable {
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
		Pairs:    a.options.kinds,
		Wide:     cut.AlignedRows(c.Q, 4) && (c.K.DType().Quantised() || cut.AlignedRows(c.K, 4) && cut.AlignedRows(c.V, 4)),
		Eights:   cut.AlignedRows(c.Q, 8) && cut.AlignedRows(c.K, 8) && cut.AlignedRows(c.V, 8),
		Half:     c.O.DType() != backend.F32,
		Software: a.b.info.Type == backend.CPU, OwnExp2: a.b.dev.Pipelines.OwnExp2,
		Limits: tune.Limits{
			Threads: int(l.MaxComputeInvocationsPerWorkgroup), Memory: int(l.MaxComputeWorkgroupStorageSize), Binding: queue.MaxWindow(*l),
		},
	}
}

// tableBytes returns the size of the table of lists in device memory: that of listed keys, and then their numbers.
func (a *attention) tableBytes() uint64 { return 4 * uint64(a.Pages.At(a.d.Batch)+a.d.Batch) }

// scoreOptions are the options of a problem in the form that kernels need: slopes and sinks in the uniform, masks and
// biases in bindings. The field both names their bindings:
//
//	Neither    at most one mask, in the binding of masks, and one bias, in that of biases
//	Crossed    two masks and no bias, or two biases and no mask: the second is in the other binding
//	Apart      all others: the block mask and the relative bias have bindings of their own
type scoreOptions struct {
	p      *backend.Problem
	heads  int // of the call
	pairs  *cut.Pairs
	kinds  tune.Pairs     // the options that change the kernels' loops
	flags  int            // for kernels
	both   shaders.Both   // where the second operand of a kind is
	values shaders.Values // where the values of the score mod are: in a binding that the other options leave free
	unit   float32        // turns dot products, or with softcap the values of tanh, into scores in units of log 2
}

// newScoreOptions returns the options of a problem with so many heads.
func newScoreOptions(p *backend.Problem, heads int, pairs *cut.Pairs) scoreOptions {
	bias, relative := !p.Bias.IsZero(), !p.Relative.IsZero()
	other := relative || bias && p.Bias.DType() != backend.F32
	k := tune.Pairs{
		Mask: !p.Mask.IsZero(), Blocks: !p.Blocks.IsZero(), Bias: bias && !other, OtherBias: other,
		Slopes: p.Slopes != nil, Softcap: p.Softcap > 0, Dropout: p.Dropout.P > 0,
	}
	o := scoreOptions{p: p, heads: heads, pairs: pairs, kinds: k, unit: p.Scale}
	o.flags = when(k.Mask, shaders.HasMask) | when(k.Blocks, shaders.HasBlocks) | when(k.Bias || k.OtherBias, shaders.HasBias) |
		when(k.Slopes, shaders.HasSlopes) | when(k.Softcap, shaders.HasSoftcap) | when(k.Dropout, shaders.HasDropout) |
		when(p.Sinks != nil, shaders.HasSinks) | when(p.Visible.KLen != nil, shaders.HasKLen) | when(p.Visible.Offsets != nil, shaders.HasOffsets)
	switch masks, biases := k.Mask && k.Blocks, bias && relative; {
	case masks && (bias || relative), biases && (k.Mask || k.Blocks):
		o.both = shaders.Apart
	case masks, biases:
		o.both = shaders.Crossed
	}
	switch {
	case p.ScoreMod == nil || len(p.ScoreMod.Values) == 0:
		o.values = shaders.NoValues
	case o.both == shaders.Neither && !k.Mask && !k.Blocks:
		o.values = shaders.InMask
	case o.both == shaders.Neither && !bias && !relative:
		o.values = shaders.InBias
	default:
		o.values = shaders.InTable
	}
	if k.Softcap {
		o.unit = p.Softcap
	} else if p.ScoreMod != nil { // its results are scaled
		o.unit = 1
	}
	o.unit = float32(math.Log2E * float64(o.unit))
	return o
}

// Lengths of the tables in a kernel's parameters.
const (
	klenBatches = len(shaders.AttentionParams{}.KLen)
	tableHeads  = len(shaders.AttentionParams{}.Slopes) // and of sinks
)

// modded returns a kernel with the score mod, if there is one, and with slope also its derivative.
func (o *scoreOptions) modded(v shaders.Variant, slope bool) shaders.Variant {
	m := o.p.ScoreMod
	if m == nil {
		return v
	}
	k := shaders.Modded{Variant: v, Score: m.WGSL, Values: o.values}
	if slope {
		k.Derivative = m.WGSLDerivative
	}
	return k
}

// table returns the contents of the table binding: pages, then values of the score mod.
func (o *scoreOptions) table(pages []byte) []byte {
	if o.values != shaders.NoValues {
		pages, _ = binary.Append(pages, binary.LittleEndian, o.p.ScoreMod.Values) // they have a size
	}
	return pages
}

// limit bounds boxes to what the tables hold.
func (o *scoreOptions) limit(c *cut.Cutter) {
	if v := o.p.Visible; v.KLen != nil || v.Offsets != nil {
		c.AtMost(cut.Batch, klenBatches)
	}
	if o.p.Slopes != nil || o.p.Sinks != nil {
		c.AtMost(cut.Head, tableHeads)
	}
	if len(o.p.Slopes) > o.heads {
		c.AtMost(cut.Batch, max(tableHeads/o.heads, 1))
	}
}

// rounds bounds the loop iterations that the options add to a thread that computes its
// weights of a tile in groups, each with its own Philox counter.
func (o *scoreOptions) rounds(groups int) int {
	return when(o.kinds.Blocks, 65) + when(o.kinds.Dropout, 21*groups) // up to two counters of ten rounds
}

// bind sets the parameters of the options for a box, with the places of the pair operands. It
// returns the windows of mask, of bias and, as more, those that only some kernels bind: of blocks and relative, in the order of
// options.wgsl, and last that of the table of pages.wgsl.
func (o *scoreOptions) bind(w *shaders.AttentionParams, c queue.Chunk, align uint64, sinks float64) (mask, bias cut.Window, more []cut.Window) {
	x := c.Box
	o.params(w, x, sinks)
	if m := o.p.ScoreMod; m != nil {
		w.ModBatch, w.ModHead = m.First[backend.Batch]+x.Lo[cut.Batch], m.First[backend.Heads]+x.Lo[cut.Head]
		w.ModRow, w.ModKey = m.First[backend.Seq]+x.Lo[cut.Row]+o.p.Visible.Offset, m.First[backend.Dim]+x.Lo[cut.Col]
		w.Values, w.ValuesAt = len(m.Values), int(c.Table.Size)/4-len(m.Values)
	}
	m, b := o.pairs.Mask.View(x, align), o.pairs.Bias.View(x, align)
	blocks, relative := o.pairs.Blocks.View(x, align), o.pairs.Relative.View(x, align)
	w.Mask, w.Bias, w.Blocked, w.Relative = strides(m), strides(b), strides(blocks), strides(relative)
	switch o.both {
	case shaders.Apart:
		mask, bias, more = m.Window, b.Window, []cut.Window{blocks.Window, relative.Window}
	case shaders.Crossed:
		mask, bias = cmp.Or(m.Window, relative.Window), cmp.Or(b.Window, blocks.Window)
	default:
		mask, bias = cmp.Or(m.Window, blocks.Window), cmp.Or(b.Window, relative.Window)
	}
	switch o.values {
	case shaders.InMask:
		mask = c.Table
	case shaders.InBias:
		bias = c.Table
	case shaders.InTable:
		more = append(more, c.Table)
	}
	return mask, bias, more
}

// params sets the place of a box in the call, and the parameters of the options that are no
// pair operands. sinks is the unit of the sinks.
func (o *scoreOptions) params(w *shaders.AttentionParams, x cut.Box, sinks float64) {
	p, d := o.p, o.p.Dropout
	heads := x.Len(cut.Head)
	w.Heads, w.Head0, w.Rows, w.Row0, w.Keys, w.Key0 = heads, x.Lo[cut.Head], x.Len(cut.Row), x.Lo[cut.Row], x.Len(cut.Col), x.Lo[cut.Col]
	w.Scale, w.Softcap, w.Unit = p.Scale, p.Softcap, o.unit
	w.Lo, w.Hi = cut.Bounds(p.Visible)
	w.Offset = p.Visible.Offset
	w.Flags |= o.flags
	w.BiasType, w.RelativeType = biasType(o.pairs.Bias.T), biasType(o.pairs.Relative.T)
	w.BlockQ, w.BlockK = o.pairs.Blocks.Block[0], o.pairs.Blocks.Block[1]
	w.Threshold, w.Seed0, w.Seed1, w.Keep = int(d.Threshold()), int(uint32(d.Seed)), int(uint32(d.Seed>>32)), 1
	if d.P > 0 {
		w.Keep = d.Factor()
	}
	w.DropBatch, w.DropHead = d.First[backend.Batch]+x.Lo[cut.Batch], d.First[backend.Heads]+x.Lo[cut.Head]
	w.DropRow, w.DropKey = d.First[backend.Seq]+x.Lo[cut.Row], d.First[backend.Dim]+x.Lo[cut.Col]
	setBatches(&w.KLen, p.Visible.KLen, x)
	setBatches(&w.Offsets, p.Visible.Offsets, x)
	if p.Sinks != nil {
		for h := range heads {
			w.Sinks[h] = float32(sinks * float64(p.Sink(x.Lo[cut.Head]+h)))
		}
	}
	if p.Slopes == nil {
		return
	}
	batches := 1 // that have slopes of their own
	if len(p.Slopes) > o.heads {
		w.SlopeB, batches = heads, x.Len(cut.Batch)
	}
	for b := range batches {
		for h := range heads {
			w.Slopes[b*heads+h] = p.Slope(x.Lo[cut.Batch]+b, x.Lo[cut.Head]+h, o.heads)
		}
	}
}

// setBatches sets table to the elements of a list for the batches of x; nil has none.
func setBatches(table *[klenBatches]int32, list []int, x cut.Box) {
	for b := range list[min(x.Lo[cut.Batch], len(list)):min(x.Hi[cut.Batch], len(list))] {
		table[b] = int32(list[x.Lo[cut.Batch]+b])
	}
}

// strides returns the place of a view's elements for kernels.
func strides(v cut.View) shaders.Strides {
	return shaders.Strides{Base: v.Base, B: v.Strides[0], H: v.Strides[1], S: v.Strides[2], D: v.Strides[3]}
}

// biasType returns the type of a bias for kernels: 0 for none, else 1 + its type.
func biasType(t backend.Tensor) int {
	if t.IsZero() {
		return 0
	}
	return 1 + int(t.DType())
}

// when returns bits if is, else 0.
func when(is bool, bits int) int {
	if is {
		return bits
	}
	return 0
}
