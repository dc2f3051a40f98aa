package cut

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/seed90331342/attn/backend"
)

// Tile is the number of rows and columns of a workgroup's tile in the plain kernels.
const Tile = 32

// Cutter divides an index space into boxes whose operands fit into bindings, and each
// box along one inner axis into chunks.
type Cutter struct {
	Operands []*Operand
	Inner    int // the axis of the chunks
	// Granule divides the length of every chunk along the inner axis but the last.
	Granule int
	// Most bounds the length of a box along each axis, and that of a chunk along the inner one; 0 is no bound.
	Most [axes]int
	// Share multiplies the bound on chunks. It is less than 1 near a deadline.
	Share float64
	// State returns the bytes of state with which chunks of a box continue.
	State func(Box) uint64
	// StateAbove is the length along the inner axis above which a box takes state even when
	// it is one chunk; 0 is never, and -1 always.
	StateAbove int

	Align uint64
	// MaxState bounds State.
	MaxState uint64
	// Room is the device memory in bytes for streaming; 0 without an operand in host memory.
	Room uint64

	heads      int // query heads that a workgroup needs together
	maxBinding uint64
	maxStaged  uint64
	one        [1]Cut // of Boxes: most calls are one box
}

// MaxLoops bounds the number of loop iterations of one thread of a dispatch. Mesa's software driver counts them and
// silently ends every loop after 65,535 (LP_MAX_TGSI_LOOP_ITERATIONS); 60,000 leaves room for what is outside the main
// loop. No hardware has such a limit.
const MaxLoops = 60000

// LongestChunk returns the largest length of a chunk, in whole granules, for which a thread
// makes at most MaxLoops iterations and maxOps operations. Both are given for a granule.
func LongestChunk(granule, loops int, ops, maxOps float64) int {
	n := MaxLoops / loops
	if ops > 0 {
		n = int(min(float64(n), maxOps/ops))
	}
	return max(n, 1) * granule
}

// maxStateBytes bounds the state of a box and a staged window.
const maxStateBytes = 64 << 20

// New returns a Cutter for operands on a device. It decides which operands are staged: operands of a plan have no
// memory, and count as where Alloc and Upload would place them, in the order of operands.
func New(l Limits, m Memory, inner, granule int, operands ...*Operand) *Cutter {
	most := min(l.Binding, l.Buffer, maxStateBytes) &^ 3
	c := &Cutter{
		Operands: operands, Inner: inner, heads: 1, Granule: granule, Share: 1, Align: l.Align,
		MaxState: most, maxStaged: most, maxBinding: l.Binding &^ (GranuleBytes - 1),
	}
	streamed := false
	for _, o := range operands {
		if o.T.IsZero() {
			continue
		}
		c.heads = max(c.heads, o.Heads)
		o.part = l.Part()
		if s := StoreOf(o.T); s != nil {
			if o.OnHost = s.Host != nil; !o.OnHost {
				o.part = s.Part // a program's buffer is one part of any size
			}
		} else {
			bytes := int64(Distinct(o.T.Shape(), o.T.Strides()).Elements()) * int64(o.T.DType().Size())
			if o.OnHost = !m.Fits(bytes); !o.OnHost {
				m.Used += bytes
			}
		}
		streamed = streamed || o.OnHost
		o.Gathered = !o.OnHost && c.smallest(o) > c.maxBinding
	}
	if streamed {
		c.Room = m.Room()
		c.MaxState = min(c.MaxState, c.Room/RoomShares) &^ 3
	}
	return c
}

// AlignGranules makes windows begin at multiples of GranuleBytes.
func (c *Cutter) AlignGranules() { c.Align = max(c.Align, GranuleBytes) }

// AtMost lowers the bound on the length of a box along an axis to n.
func (c *Cutter) AtMost(axis, n int) {
	c.Most[axis] = min(cmp.Or(c.Most[axis], n), n)
}

// OnHost reports whether the operand with tensor t is in host memory.
func (c *Cutter) OnHost(t backend.Tensor) bool {
	return slices.ContainsFunc(c.Operands, func(o *Operand) bool { return o.OnHost && o.T == t })
}

// StateOf returns the bytes of state that x takes in chunks of a length along the inner axis, 0 if one chunk covers x.
func (c *Cutter) StateOf(x Box, chunk int) uint64 {
	if c.State == nil || chunk >= x.Len(c.Inner) {
		return 0
	}
	return c.State(x)
}

// Fits returns the error of Boxes.
func (c *Cutter) Fits(x Box) error {
	_, err := c.Boxes(nil, x)
	return err
}

// Cut is a box and the length of its chunks along the inner axis.
type Cut struct {
	Box   Box
	Chunk int
}

// Boxes appends the boxes of x to list, in a fixed order; nil is a list that stays until the next call. It returns
// backend.ErrUnsupported when the smallest box does not fit into bindings, and backend.ErrMemory when it does not fit into
// the memory for streaming.
func (c *Cutter) Boxes(list []Cut, x Box) ([]Cut, error) {
	if list == nil {
		list = c.one[:0]
	}
	for a, m := range c.Most {
		if m > 0 && a != c.Inner && x.Len(a) > max(m, c.grain(a)) {
			return c.halve(list, x, a)
		}
	}
	chunk := x.Len(c.Inner)
	if m := c.Most[c.Inner]; m > 0 {
		m = int(c.Share * float64(m))
		chunk = min(chunk, max(m/c.Granule*c.Granule, c.Granule))
	}
	for {
		probe := x
		probe.Hi[c.Inner] = x.Lo[c.Inner] + chunk
		bad, size := c.tooLarge(probe)
		if bad == nil {
			break
		}
		axis := c.widest(bad, probe)
		switch {
		case axis < 0:
			return nil, c.noRoom(bad, size)
		case axis != c.Inner:
			return c.halve(list, x, axis)
		}
		chunk = max(chunk/2/c.Granule*c.Granule, c.Granule)
	}
	continues := chunk < x.Len(c.Inner) || c.StateAbove != 0 && x.Len(c.Inner) > c.StateAbove
	if continues && c.State != nil && c.State(x) > c.MaxState {
		for _, a := range []int{Batch, Head, Row, Col} {
			// All rows of a workgroup share its state, so halving may not reduce it.
			if a != c.Inner && x.Len(a) > c.grain(a) && c.State(c.firstHalf(x, a)) < c.State(x) {
				return c.halve(list, x, a)
			}
		}
	}
	return append(list, Cut{x, chunk}), nil
}

// halve appends the boxes of both halves of x along an axis.
func (c *Cutter) halve(list []Cut, x Box, axis int) ([]Cut, error) {
	left, right := c.firstHalf(x, axis), x
	right.Lo[axis] = left.Hi[axis]
	list, err := c.Boxes(list, left)
	if err != nil {
		return nil, err
	}
	return c.Boxes(list, right)
}

// ChunkAt returns the chunk of x that begins at lo along the inner axis, and whether it is the first or the last.
func (c *Cutter) ChunkAt(x Box, lo, chunk int) (p Box, first, last bool) {
	p = x
	p.Lo[c.Inner], p.Hi[c.Inner] = lo, min(lo+chunk, x.Hi[c.Inner])
	return p, lo == x.Lo[c.Inner], p.Hi[c.Inner] == x.Hi[c.Inner]
}

// firstHalf returns the first half of x along an axis. It keeps together the heads that a
// workgroup needs, and ends between tiles when x is longer than two tiles.
func (c *Cutter) firstHalf(x Box, axis int) Box {
	n := x.Len(axis) / 2
	if n > Tile {
		n = n / Tile * Tile
	}
	if axis == Head {
		n = max(n/c.heads, 1) * c.heads
	}
	x.Hi[axis] = x.Lo[axis] + n
	return x
}

// grain is the length along an axis below which a box cannot be cut.
func (c *Cutter) grain(axis int) int {
	switch axis {
	case c.Inner:
		return c.Granule
	case Head:
		return c.heads
	}
	return 1
}

// smallest returns the bytes that the smallest part of o for a workgroup spans, with the alignment of a window.
func (c *Cutter) smallest(o *Operand) uint64 {
	n := uint64(1)
	for i, a := range o.Axes {
		l := o.T.Shape()[i]
		switch {
		case a == Whole, o.Pages != nil && a != Head:
		case a == c.Inner:
			l = min(l, c.Granule)
		case a == Head:
			l = max(o.Heads, 1)
		default:
			l = 1
		}
		n += uint64(l-1) * uint64(o.T.Strides()[i])
	}
	return n*uint64(o.T.DType().Size()) + max(c.Align, 4)
}

// tooLarge returns the operand with the largest window that does not fit, and the size of that window. Streamed windows
// have one share of the room for those that stay while a box goes from chunk to chunk, and one for those of a chunk.
func (c *Cutter) tooLarge(x Box) (*Operand, uint64) {
	var sum, most [2]uint64
	var widest [2]*Operand
	for _, o := range c.Operands {
		v := o.View(x, c.Align)
		limit := c.maxBinding
		if _, ok := v.Buf.(*Staged); ok {
			limit = min(limit, c.maxStaged)
		}
		if v.Size > limit {
			return o, v.Size
		}
		if o.OnHost {
			class := 0
			if slices.Contains(o.Axes[:], c.Inner) {
				class = 1
			}
			if sum[class] += v.Size; v.Size > most[class] {
				widest[class], most[class] = o, v.Size
			}
		}
	}
	for class, n := range sum {
		if n > c.Room/RoomShares {
			return widest[class], n
		}
	}
	return nil, 0
}

// widest returns the axis of x that adds most to o's window and can be cut, or -1.
func (c *Cutter) widest(o *Operand, x Box) int {
	best, most := -1, uint64(0)
	lo, hi := o.spans(x)
	strides := o.T.Strides()
	if o.OnHost || o.Gathered {
		strides = o.View(x, c.Align).Strides
	}
	for i, a := range o.Axes {
		if o.Diagonal > 0 && a == Col && x.Len(Col) <= c.grain(Col) {
			a = Row
		}
		if a == Whole || x.Len(a) <= c.grain(a) {
			continue
		}
		if reach := uint64(hi[i]-lo[i]-1) * uint64(strides[i]); reach > most {
			best, most = a, reach
		}
	}
	return best
}

// noRoom is the error for an operand whose smallest part does not fit.
func (c *Cutter) noRoom(o *Operand, size uint64) error {
	if o.OnHost {
		return fmt.Errorf("%s: the smallest part of shape %v that a workgroup needs takes %d bytes; streaming it takes %d times as much, and %d bytes of device memory are left: raise Options.MemoryBytes or release tensors: %w",
			o.Name, o.T.Shape(), size, RoomShares, c.Room, backend.ErrMemory)
	}
	return fmt.Errorf("%s: strides %v of shape %v spread the smallest part that a workgroup needs over %d bytes, a binding holds %d: %w",
		o.Name, o.T.Strides(), o.T.Shape(), size, c.maxBinding, backend.ErrUnsupported)
}
