package gpu

import (
	"cmp"
	"slices"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/port"
)

// absent stands in a window for a buffer that is not there: the elements lie in
// host memory, or not as a span of one buffer. A step that needs the window gets
// a buffer with the elements before it runs.
type absent struct {
	o    *operand
	size uint64
	// The part of a tensor in host memory, or of the keys in pages, and how it lies in
	// the window.
	lo, hi  [4]int
	strides backend.Strides
	// The spans of device memory, or of a pool of pages, that the window is made of.
	runs []run
}

// run is a span of a tensor's memory, and where it lies in a window, in bytes; all
// are multiples of 4.
type run struct{ lo, hi, to uint64 }

// Size implements port.Buffer.
func (a *absent) Size() uint64 { return a.size }

// Release implements port.Buffer; there is nothing to release.
func (a *absent) Release() {}

// widthOf is what offsets in a gathered window keep to, in bytes, and what its size
// is a multiple of, so that what a kernel may load as one vector of four words in the
// tensor, it may there.
const widthOf = 16

// byStride returns the axes of a tensor's part that are longer than 1, the one
// with the smallest stride first, and without those of stride zero.
func (o *operand) byStride(lo, hi [4]int) []int {
	strides := o.t.Strides()
	axes := make([]int, 0, 4)
	for i := range strides {
		if hi[i]-lo[i] > 1 && strides[i] > 0 {
			axes = append(axes, i)
		}
	}
	slices.SortStableFunc(axes, func(a, b int) int { return cmp.Compare(strides[a], strides[b]) })
	return axes
}

// brought is the view of a part of a tensor in host memory: packed, in the order
// in which the axes lie there, with rows that start at multiples of widthOf.
func (o *operand) brought(lo, hi [4]int) view {
	size := uint64(o.t.DType().Size())
	a := &absent{o: o, lo: lo, hi: hi}
	pitch := 1
	for n, i := range o.byStride(lo, hi) {
		if n == 1 {
			pitch = alignUp(pitch, widthOf/int(size))
		}
		a.strides[i] = pitch
		pitch *= hi[i] - lo[i]
	}
	a.size = (uint64(pitch)*size + widthOf - 1) &^ (widthOf - 1)
	return view{window{a, 0, a.size}, 0, a.strides}
}

// nearBytes is how far apart elements may lie that are copied with what is
// between them: a copy of its own for each would cost more.
const nearBytes = 64

// gathered is the view of a part of a tensor whose elements lie far apart, the
// first at byte first: runs of what lies near one another, and one run for each
// index of the other axes.
func (o *operand) gathered(lo, hi [4]int, first uint64) view {
	size := uint64(o.t.DType().Size())
	a := &absent{o: o}
	axes := o.byStride(lo, hi)
	span := size // of a run
	for len(axes) > 0 {
		i := axes[0]
		step := uint64(o.t.Strides()[i]) * size
		if step > 2*span && step > nearBytes {
			break
		}
		span += uint64(hi[i]-lo[i]-1) * step
		a.strides[i] = o.t.Strides()[i]
		axes = axes[1:]
	}
	base := first % widthOf
	starts := []run{{lo: first, to: base}}
	end := base + span
	for _, i := range axes {
		step := uint64(o.t.Strides()[i]) * size
		// From beyond the last word on, and by as much more than a multiple of
		// the width as in the tensor.
		pitch := (end-base+3+widthOf-1)/widthOf*widthOf + step%widthOf
		n := uint64(hi[i] - lo[i])
		all := make([]run, 0, n*uint64(len(starts)))
		for x := range n {
			for _, r := range starts {
				all = append(all, run{lo: r.lo + x*step, to: r.to + x*pitch})
			}
		}
		starts = all
		a.strides[i] = int(pitch / size)
		end += (n - 1) * pitch
	}
	for _, r := range starts {
		a.runs = append(a.runs, run{r.lo &^ 3, (r.lo + span + 3) &^ 3, r.to &^ 3})
	}
	a.size = (end + widthOf - 1) &^ (widthOf - 1)
	return view{window{a, 0, a.size}, int(base / size), a.strides}
}

// copies returns the commands that fill buf with what a gathered window is made
// of, or, back, that return it.
func (a *absent) copies(buf port.Buffer, back bool) []port.Command {
	var list []port.Command
	s := storeOf(a.o.t)
	for _, r := range a.runs {
		to := r.to
		_ = s.each(r.lo, r.hi, func(part port.Buffer, at, n uint64) error { // f never fails
			c := port.Command{Src: part, SrcOffset: at, Dst: buf, DstOffset: to, Size: n}
			if back {
				c = port.Command{Src: buf, SrcOffset: to, Dst: part, DstOffset: at, Size: n}
			}
			list = append(list, c)
			to += n
			return nil
		})
	}
	return list
}
