package gpu

import (
	"fmt"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/backend"
)

// The axes of the index space of a call. Every operand's axis follows one of
// them, or is there whole.
const (
	axB = iota // batches
	axH        // query heads
	axM        // query rows
	axN        // keys of attention and softmax, columns of a product
	axX        // the axis that a product sums over
	nAxes
	whole = -1
)

// box is a part of the index space: from lo up to hi along each axis.
type box struct{ lo, hi [nAxes]int }

func (x box) len(axis int) int { return x.hi[axis] - x.lo[axis] }

// operand is a tensor with how it follows the index space.
type operand struct {
	name string
	t    backend.Tensor
	axes [4]int // for each of the tensor's axes, the box's or whole
	// group is how many of the box's heads share one of the tensor's; 0 is 1.
	group int
	// block is how many of the box's rows and keys share one of the tensor's; 0 is 1.
	block [2]int
	// diagonal, if it is not 0, is the number of query rows of a call whose row i and key
	// j meet element j-i+diagonal-1 of the last axis.
	diagonal int
	use      use
	// pages, unless nil, says that the tensor is a pool of pages, and axes are those of
	// the keys that are in them.
	pages *pages

	// What newCutter finds out of where the elements lie.
	host bool   // in host memory: windows are brought when a step needs them
	far  bool   // so far apart on the device that windows are gathered
	part uint64 // bytes of each of the tensor's buffers
}

// use is what a kernel does with an operand.
type use uint8

const (
	isRead    use = iota
	isWritten     // every element of a box, without a look at what is there
	isUpdated     // both
)

// reads, writes and updates return an operand by its use.
func reads(name string, t backend.Tensor, axes [4]int, group int) *operand {
	return &operand{name: name, t: t, axes: axes, group: group, use: isRead}
}

func writes(name string, t backend.Tensor, axes [4]int, group int) *operand {
	return &operand{name: name, t: t, axes: axes, group: group, use: isWritten}
}

func updates(name string, t backend.Tensor, axes [4]int, group int) *operand {
	return &operand{name: name, t: t, axes: axes, group: group, use: isUpdated}
}

// span returns the part of the tensor that a box meets.
func (o *operand) span(x box) (lo, hi [4]int) {
	for i, a := range o.axes {
		if a == whole {
			hi[i] = o.t.Shape()[i]
			continue
		}
		lo[i], hi[i] = x.lo[a], x.hi[a]
		n := 1
		switch a {
		case axH:
			n = o.group
		case axM:
			n = o.block[0]
		case axN:
			n = o.block[1]
		}
		if n > 1 {
			lo[i] /= n
			hi[i] = (hi[i]-1)/n + 1
		}
	}
	if o.diagonal > 0 {
		lo[backend.Dim] += o.diagonal - x.hi[axM]
		hi[backend.Dim] += o.diagonal - x.lo[axM] - 1
	}
	if o.pages != nil && !o.far && !o.host {
		for _, i := range []int{backend.Batch, backend.Seq} {
			lo[i], hi[i] = 0, o.t.Shape()[i]
		}
	}
	return lo, hi
}

// view is a window with what a shader needs to find elements in it.
type view struct {
	window
	base    int // index of the box's first element
	strides backend.Strides
}

// maxWindowBytes keeps indices into a window in 32 bits, with room.
const maxWindowBytes = 1 << 31

// maxWindow is the largest span that is bound.
func maxWindow(l gputypes.Limits) uint64 {
	return min(l.MaxStorageBufferBindingSize, maxWindowBytes) &^ 3
}

// view returns the window of o that holds what box x meets, from an aligned
// offset on. A missing operand gives the zero view. Of an operand with blocks, base is
// where block 0 would lie; of one along diagonals, a step to the next row is one back
// along the keys. Shaders compute indices modulo 2^32.
func (o *operand) view(x box, align uint64) view {
	if o.t.IsZero() {
		return view{}
	}
	lo, hi := o.span(x)
	v := o.spanned(lo, hi, align)
	if o.block[0] > 0 {
		v.base -= lo[backend.Seq]*v.strides[backend.Seq] + lo[backend.Dim]*v.strides[backend.Dim]
	}
	if o.diagonal > 0 {
		v.base += (x.len(axM) - 1) * v.strides[backend.Dim]
		v.strides[backend.Seq] = -v.strides[backend.Dim]
	}
	return v
}

// spanned returns the window that holds a part of the tensor.
func (o *operand) spanned(lo, hi [4]int, align uint64) view {
	if o.pages != nil && (o.far || o.host) {
		return o.collected(lo, hi)
	}
	if o.host {
		return o.brought(lo, hi)
	}
	size := uint64(o.t.DType().Size())
	first, reach := uint64(o.t.Offset()), uint64(0)
	v := view{}
	for i, s := range o.t.Strides() {
		first += uint64(lo[i]) * uint64(s)
		if n := hi[i] - lo[i]; n > 1 {
			reach += uint64(n-1) * uint64(s)
			v.strides[i] = s
		}
	}
	if o.far {
		return o.gathered(lo, hi, first*size)
	}
	align = max(align, 4)
	start := first * size / align * align
	end := ((first+reach+1)*size + 3) &^ 3
	v.window = o.window(start, end)
	v.base = int(first - start/size)
	return v
}

// window returns bytes [start, end) of o's memory: a span of the buffer that has
// them all, or a gathered one where they lie in several.
func (o *operand) window(start, end uint64) window {
	s := storeOf(o.t)
	if i := start / o.part; (end-1)/o.part == i {
		if s == nil {
			return window{nil, start - i*o.part, end - start}
		}
		return window{s.parts[i], start - i*o.part, end - start}
	}
	size := uint64(alignUp(int(end-start), widthOf))
	return window{&absent{o: o, size: size, runs: []run{{start, end, 0}}}, 0, size}
}

// cutter cuts a call's index space into boxes whose operands all fit into
// bindings, and each box along one inner axis into pieces.
type cutter struct {
	operands []*operand
	// inner is the axis along which pieces go on from one another's state.
	inner int
	// granule is what pieces along the inner axis are multiples of.
	granule int
	// most is the longest that a box may be along an axis; 0 is no limit. For
	// the inner axis it bounds pieces.
	most [nAxes]int
	// state is how many bytes a box takes to go on from piece to piece.
	state func(box) uint64
	// keeps is from what length along the inner axis on a box takes state even when
	// it is one piece; 0 is never.
	keeps int

	maxBind   uint64
	maxState  uint64
	maxGather uint64 // bytes of a window that is not a span of one buffer
	align     uint64
	// room is the device memory in bytes for what is streamed; 0 when all
	// operands are on the device.
	room uint64

	// Hooks of a call that can be resumed; nil when it cannot.
	skip func(x box) bool            // whether a box is done already
	from func(x box) (int, error)    // where the pieces of a box begin or go on
	left func(x box, end bool) error // a piece, or with end a whole box, was queued
}

// maxLoops bounds the rounds of loops, all added up, that one thread of a dispatch
// makes. Mesa's software driver counts them and silently ends every loop after
// 65,535 (LP_MAX_TGSI_LOOP_ITERATIONS); 60,000 leaves room for what is outside the
// main loop. No hardware needs it, nor notices it.
const maxLoops = 60000

// longest returns the length of a piece in which a thread makes at most maxLoops
// rounds and operations stay within bound, in whole granules.
func longest(granule, loopsEach int, opsEach, maxOps float64) int {
	n := maxLoops / loopsEach
	if opsEach > 0 {
		n = int(min(float64(n), maxOps/opsEach))
	}
	return max(n, 1) * granule
}

// maxStateBytes bounds the scratch that pieces go on from.
const maxStateBytes = 64 << 20

// newCutter returns one that cuts along inner by multiples of granule.
func (b *Backend) newCutter(inner, granule int, operands ...*operand) *cutter {
	c := &cutter{
		operands: operands, inner: inner, granule: granule,
		maxBind:   maxWindow(b.limits) &^ (granuleBytes - 1),
		maxState:  min(maxWindow(b.limits), b.limits.MaxBufferSize, maxStateBytes) &^ 3,
		maxGather: min(maxWindow(b.limits), b.limits.MaxBufferSize, maxStateBytes) &^ 3,
		align:     uint64(b.limits.MinStorageBufferOffsetAlignment),
	}
	b.place(c)
	return c
}

// place finds out where the operands lie; those of a plan lie where Alloc and
// Upload would put them, in the order of the operands.
func (b *Backend) place(c *cutter) {
	planned, streamed := b.tensors.Load(), false
	for _, o := range c.operands {
		if o.t.IsZero() {
			continue
		}
		o.part = b.partBytes()
		if s := storeOf(o.t); s != nil {
			o.host = s.host != nil
		} else {
			bytes := int64(once(o.t.Shape(), o.t.Strides()).Elements()) * int64(o.t.DType().Size())
			if o.host = b.memory > 0 && planned+bytes > b.memory/8*tensorEighths; !o.host {
				planned += bytes
			}
		}
		streamed = streamed || o.host
		o.far = !o.host && c.smallest(o) > c.maxBind
	}
	if streamed {
		c.room = b.room(planned)
		c.maxState = min(c.maxState, c.room/roomShares) &^ 3
	}
}

// smallest is how many bytes the smallest part of o that a workgroup needs spans,
// with the alignment of a window.
func (c *cutter) smallest(o *operand) uint64 {
	n := uint64(1)
	for i, a := range o.axes {
		l := o.t.Shape()[i]
		switch {
		case a == whole, o.pages != nil && a != axH:
		case a == c.inner:
			l = min(l, c.granule)
		default:
			l = 1
		}
		n += uint64(l-1) * uint64(o.t.Strides()[i])
	}
	return n*uint64(o.t.DType().Size()) + max(c.align, 4)
}

// boxes calls f for each box of x with the length of its pieces along the inner
// axis, in a fixed order. backend.ErrUnsupported when not even the smallest box
// fits into bindings.
func (c *cutter) boxes(x box, f func(x box, piece int) error) error {
	for a, m := range c.most {
		if m > 0 && a != c.inner && x.len(a) > m {
			return c.halve(x, a, f)
		}
	}
	piece := x.len(c.inner)
	if m := c.most[c.inner]; m > 0 {
		piece = min(piece, max(m/c.granule*c.granule, c.granule))
	}
	for {
		probe := x
		probe.hi[c.inner] = x.lo[c.inner] + piece
		bad, size := c.tooLarge(probe)
		if bad == nil {
			break
		}
		axis := c.widest(bad, probe)
		switch {
		case axis < 0:
			return c.noRoom(bad, size)
		case axis != c.inner:
			return c.halve(x, axis, f)
		}
		piece = max(piece/2/c.granule*c.granule, c.granule)
	}
	goesOn := piece < x.len(c.inner) || c.keeps > 0 && x.len(c.inner) > c.keeps
	if goesOn && c.state != nil && c.state(x) > c.maxState {
		for _, a := range []int{axB, axH, axM, axN} {
			// Rows of one workgroup take as much as one of them.
			if a != c.inner && x.len(a) > c.grain(a) && c.state(firstHalf(x, a)) < c.state(x) {
				return c.halve(x, a, f)
			}
		}
	}
	if c.skip != nil && c.skip(x) {
		return nil
	}
	if err := f(x, piece); err != nil || c.left == nil {
		return err
	}
	return c.left(x, true)
}

// aside reports whether the operand with tensor t is in host memory.
func (c *cutter) aside(t backend.Tensor) bool {
	for _, o := range c.operands {
		if o.t == t {
			return o.host
		}
	}
	return false
}

// noRoom is the error for an operand of which the smallest part does not fit.
func (c *cutter) noRoom(o *operand, size uint64) error {
	if o.host {
		return fmt.Errorf("%s: the smallest part of shape %v that a workgroup needs takes %d bytes; %d bytes of device memory are left for what is streamed, it takes %d times as much as a part: raise Options.MemoryBytes or release tensors: %w",
			o.name, o.t.Shape(), size, c.room, roomShares, backend.ErrMemory)
	}
	return fmt.Errorf("%s: strides %v of shape %v spread the smallest part that a workgroup needs over %d bytes, %d can be bound: %w",
		o.name, o.t.Strides(), o.t.Shape(), size, c.maxBind, backend.ErrUnsupported)
}

// grain is the length along an axis that cannot be cut.
func (c *cutter) grain(axis int) int {
	if axis == c.inner {
		return c.granule
	}
	return 1
}

// halve cuts x in two along an axis, between tiles while it is longer than two.
func (c *cutter) halve(x box, axis int, f func(x box, piece int) error) error {
	left, right := firstHalf(x, axis), x
	right.lo[axis] = left.hi[axis]
	if err := c.boxes(left, f); err != nil {
		return err
	}
	return c.boxes(right, f)
}

// firstHalf returns the first of the two.
func firstHalf(x box, axis int) box {
	n := x.len(axis) / 2
	if n > tile {
		n = n / tile * tile
	}
	x.hi[axis] = x.lo[axis] + n
	return x
}

// tooLarge returns an operand whose window is the largest of those that do not
// fit, and its size. What is streamed has one share of the room for the windows
// that stay while a box goes from piece to piece, and one for those of a piece.
func (c *cutter) tooLarge(x box) (*operand, uint64) {
	var sum [2]uint64
	var widest [2]*operand
	var most [2]uint64
	for _, o := range c.operands {
		v := o.view(x, c.align)
		limit := c.maxBind
		if _, ok := v.buf.(*absent); ok {
			limit = min(limit, c.maxGather)
		}
		if v.size > limit {
			return o, v.size
		}
		if o.host {
			class := 0
			if o.follows(c.inner) {
				class = 1
			}
			if sum[class] += v.size; v.size > most[class] {
				widest[class], most[class] = o, v.size
			}
		}
	}
	for class, n := range sum {
		if n > c.room/roomShares {
			return widest[class], n
		}
	}
	return nil, 0
}

// follows reports whether one of o's axes is the box's.
func (o *operand) follows(axis int) bool {
	for _, a := range o.axes {
		if a == axis {
			return true
		}
	}
	return false
}

// widest returns the axis of x that adds most to o's window and can be cut, or
// -1.
func (c *cutter) widest(o *operand, x box) int {
	best, most := -1, uint64(0)
	lo, hi := o.span(x)
	strides := o.t.Strides()
	if o.host || o.far {
		strides = o.view(x, c.align).strides
	}
	for i, a := range o.axes {
		if o.diagonal > 0 && a == axN && x.len(axN) <= c.grain(axN) {
			a = axM
		}
		if a == whole || x.len(a) <= c.grain(a) {
			continue
		}
		if reach := uint64(hi[i]-lo[i]-1) * uint64(strides[i]); reach > most {
			best, most = a, reach
		}
	}
	return best
}

// pieces calls f for each piece of x along the inner axis.
func (c *cutter) pieces(x box, piece int, f func(x box, first, last bool) error) error {
	lo := x.lo[c.inner]
	if c.from != nil && piece < x.len(c.inner) {
		var err error
		if lo, err = c.from(x); err != nil {
			return err
		}
	}
	for ; lo < x.hi[c.inner]; lo += piece {
		p := x
		p.lo[c.inner], p.hi[c.inner] = lo, min(lo+piece, x.hi[c.inner])
		last := p.hi[c.inner] == x.hi[c.inner]
		if err := f(p, lo == x.lo[c.inner], last); err != nil {
			return err
		}
		if c.left != nil && !last {
			if err := c.left(p, false); err != nil {
				return err
			}
		}
	}
	return nil
}
