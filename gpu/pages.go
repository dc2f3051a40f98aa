package gpu

import (
	"encoding/binary"
	"fmt"
	"maps"
	"math/bits"

	"github.com/seed90331342/attn/backend"
)

// pageSlack is how many keys beyond a batch's last a kernel may look up: its tile's.
const pageSlack = 128

// pages is how a call reads keys and values from pools.
type pages struct {
	*backend.Pages
	size  int // keys of a page
	width int // pages of a batch in the table that kernels get
	klen  []int
}

// pagesOf returns the pages of c, nil when it has none.
func pagesOf(c *backend.Call) *pages {
	if c.Pages == nil {
		return nil
	}
	p := &pages{Pages: c.Pages, size: c.K.Shape()[backend.Seq], klen: c.Visible.KLen}
	most := 0
	for b := range p.Table {
		most = max(most, p.count(b))
	}
	p.width = max((min(most+pageSlack, p.Keys)+p.size-1)/p.size, 1)
	return p
}

// count is how many keys batch b has.
func (p *pages) count(b int) int {
	if p.klen != nil {
		return min(p.klen[b], p.Keys)
	}
	return p.Keys
}

// table returns a buffer with the table: width pages of each batch, those beyond its
// keys the pool's first, of which nothing is seen.
func (p *pages) table(r *runner) (window, error) {
	data := make([]byte, 4*len(p.Table)*p.width)
	for b, row := range p.Table {
		n := (p.count(b) + p.size - 1) / p.size
		for i, page := range row[:min(n, len(row))] {
			binary.LittleEndian.PutUint32(data[4*(b*p.width+i):], uint32(page))
		}
	}
	size := uint64(len(data))
	if most := maxWindow(r.b.limits); size > most {
		return window{}, fmt.Errorf("the table of %d batches of %d pages takes %d bytes, %d can be bound: larger pages make it smaller: %w",
			len(p.Table), p.width, size, most, backend.ErrUnsupported)
	}
	buf, err := r.temp(size)
	if err != nil || buf == nil {
		return window{nil, 0, size}, err
	}
	return window{buf, 0, size}, translate(r.b.info.Name, r.b.dev.Write(buf, 0, data))
}

// tableFor returns the window of the table of the call's pages; none when it has none.
func (a *attention) tableFor(r *runner) ([]window, error) {
	if !a.paged() {
		return nil, nil
	}
	w, err := a.pages.table(r)
	return []window{w}, err
}

// pageParams appends what kernels are told of the pages of a box's batches; zeros when
// they look none up.
func (a *attention) pageParams(w *params, x box) {
	if !a.paged() {
		w.u32(0, 0, 0, 0)
		return
	}
	p := a.pages
	shift := 32
	if p.size&(p.size-1) == 0 {
		shift = bits.TrailingZeros(uint(p.size))
	}
	w.u32(p.size, p.width, x.lo[axB]*p.width, shift)
}

// paged reports whether kernels look pages up. They do not where a pool is in host
// memory or larger than what can be bound, or where the device has no storage buffer
// left for the table: then the pages of a step, of both pools, are collected before it.
func (a *attention) paged() bool { return a.pages != nil && !a.k.far && !a.k.host }

// storage says of the plan how operands are stored and pages found.
func (a *attention) storage() string {
	text := storage(a.c)
	switch {
	case a.paged():
		text += fmt.Sprintf(" in pages of %d, looked up", a.pages.size)
	case a.pages != nil:
		text += fmt.Sprintf(" in pages of %d, which are collected before each step", a.pages.size)
	}
	return text
}

// placePages sees to that after the cutter has found out where the pools are, room
// saying whether the table can be bound.
func (a *attention) placePages(room bool) {
	if a.pages == nil {
		return
	}
	aside := !room || a.k.far || a.k.host || a.val.far || a.val.host
	a.k.far, a.val.far = aside && !a.k.host, aside && !a.val.host
}

// checkPages says when pages are to be collected that cannot be.
func (a *attention) checkPages() error {
	for _, o := range []*operand{a.k, a.val} {
		if a.pages != nil && o.far && !o.inWords() {
			return fmt.Errorf("%s has strides %v at offset %d, so that pages do not begin at words, which those must that are collected before a step, as they are here for want of room for a pool or of a storage buffer: make pages of an even number of elements: %w",
				o.name, o.t.Strides(), o.t.Offset(), backend.ErrUnsupported)
		}
	}
	return nil
}

// kernel returns v as it reads what the call has: options, pools of pages or not. The call's
// cutter must have been made.
func (a *attention) kernel(v variant) variant {
	v = a.options.kernel(v)
	if !a.paged() {
		return v
	}
	v.kernel.Bindings += "r"
	v.consts = maps.Clone(v.consts)
	v.consts["PAGED"] = 1
	return v
}

// inWords reports whether pages of a pool can be copied one by one: each begins at a
// word, there and side by side.
func (o *operand) inWords() bool {
	if o.pages == nil || o.t.DType().Size() == 4 {
		return true
	}
	s := o.t.Strides()
	odd := o.t.Offset() | s[backend.Batch] | s[backend.Heads] | s[backend.Seq]*o.pages.size
	if s[backend.Dim] > s[backend.Seq] {
		odd |= s[backend.Dim]
	}
	return odd&1 == 0
}

// collected is the view of the keys of some batches and heads that lie in pages of a
// pool: pages side by side, with the other axes in the order in which they lie in one,
// batch after batch. Where a batch has no page anything may lie.
func (o *operand) collected(lo, hi [4]int) view {
	size, keys := uint64(o.t.DType().Size()), o.pages.size
	step := func(axis int) uint64 { return uint64(o.t.Strides()[axis]) * size }
	first, last := lo[backend.Seq]/keys, (hi[backend.Seq]-1)/keys+1
	a := &absent{o: o, lo: lo, hi: hi}
	axes := o.byStride([4]int{0, lo[backend.Heads], 0, 0}, [4]int{1, hi[backend.Heads], 1, hi[backend.Dim]})
	// A run is what a page has of one index of the axes outside of its rows.
	row, span, inside := step(backend.Seq), size, len(axes)
	if keys > 1 {
		inside = 0
	}
	for inside < len(axes) && step(axes[inside]) < row {
		inside++
	}
	for _, i := range axes[:inside] {
		span += uint64(hi[i]-lo[i]-1) * step(i)
		a.strides[i] = o.t.Strides()[i]
	}
	if keys == 1 {
		row = (span + widthOf - 1) &^ (widthOf - 1)
	}
	a.strides[backend.Seq] = int(row / size)
	page := uint64(keys) * row
	span += uint64(keys-1) * row
	end := uint64(last-first-1)*page + span
	outer := []run{{lo: uint64(lo[backend.Heads]) * step(backend.Heads)}}
	for _, i := range axes[inside:] {
		pitch := (end+widthOf-1)&^(widthOf-1) + step(i)%widthOf
		n := uint64(hi[i] - lo[i])
		all := make([]run, 0, n*uint64(len(outer)))
		for x := range n {
			for _, r := range outer {
				all = append(all, run{lo: r.lo + x*step(i), to: r.to + x*pitch})
			}
		}
		outer = all
		a.strides[i] = int(pitch / size)
		end += (n - 1) * pitch
	}
	batch := (end + widthOf - 1) &^ (widthOf - 1)
	a.strides[backend.Batch] = int(batch / size)
	for b := lo[backend.Batch]; b < hi[backend.Batch]; b++ {
		have := min((o.pages.count(b)+keys-1)/keys, last)
		for n := first; n < have; n++ {
			from := uint64(o.t.Offset())*size + uint64(o.pages.Table[b][n])*step(backend.Batch)
			to := uint64(b-lo[backend.Batch])*batch + uint64(n-first)*page
			for _, r := range outer {
				a.runs = append(a.runs, run{from + r.lo, (from + r.lo + span + 3) &^ 3, to + r.to})
			}
		}
	}
	a.size = uint64(hi[backend.Batch]-lo[backend.Batch]) * batch
	return view{window{a, 0, a.size}, (lo[backend.Seq] - first*keys) * a.strides[backend.Seq], a.strides}
}
