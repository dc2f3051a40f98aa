package cut

import (
	"cmp"
	"slices"

	"github.com/seed90331342/attn/backend"
)

// Staged stands in a window for a buffer that does not exist yet: the elements are in host memory, or not a span of one
// buffer. The step that needs the window gets a buffer that was filled with the elements.
type Staged struct {
	Of   *Operand
	size uint64
	// Lo and Hi are the part of a tensor in host memory, or of the keys in pages. Strides are those of the window.
	Lo, Hi  [4]int
	Strides backend.Strides
	// Runs are the spans of device memory, or of a pool of pages, that fill the window.
	Runs []Run
}

// Run is a span of a tensor's memory and its place in a window, in bytes.
type Run struct{ Lo, Hi, To uint64 }

// atWords reports whether a copy between buffers can move r, with what follows up to a word.
func (r Run) atWords() bool { return (r.Lo|r.To)%4 == 0 }

// Size implements Buffer.
func (a *Staged) Size() uint64 { return a.size }

// Release implements Buffer. It does nothing.
func (a *Staged) Release() {}

// HostMemory returns the host memory of the tensor from the window's first element on.
func (a *Staged) HostMemory() []byte {
	first := a.Of.T.Offset()
	for i, s := range a.Of.T.Strides() {
		first += a.Lo[i] * s
	}
	return StoreOf(a.Of.T).Host[first*a.Of.T.DType().Size():]
}

// Shape returns the window's shape, with 1 along axes of stride zero.
func (a *Staged) Shape() backend.Shape {
	var shape backend.Shape
	for i := range shape {
		shape[i] = a.Hi[i] - a.Lo[i]
	}
	return Distinct(shape, a.Of.T.Strides())
}

// Copies returns the copies that fill buf with runs of a gathered window or, with back, that return
// them. It leaves out those of Shifts, which follow, because copies move whole words.
func (a *Staged) Copies(runs []Run, buf Buffer, back bool) []Copy {
	var list []Copy
	s := StoreOf(a.Of.T)
	for _, r := range runs {
		if !r.atWords() {
			continue
		}
		to := r.To
		for w := range s.Spans(r.Lo, (r.Hi+3)&^3) {
			c := Copy{Src: w.Buf, SrcOffset: w.Offset, Dst: buf, DstOffset: to, Size: w.Size}
			if back {
				c = Copy{Src: buf, SrcOffset: to, Dst: w.Buf, DstOffset: w.Offset, Size: w.Size}
			}
			list = append(list, c)
			to += w.Size
		}
	}
	return list
}

// Shifts returns the runs of 16-bit elements that do not begin at words, in the tensor or in the window. A
// dispatch moves each of them from a copy of its words.
func (a *Staged) Shifts() []Run {
	return slices.DeleteFunc(slices.Clone(a.Runs), Run.atWords)
}

// Words returns the words of a shift, for the beginning of a buffer.
func (r Run) Words() Run { return Run{r.Lo &^ 3, (r.Hi + 3) &^ 3, 0} }

// stagedAlign divides the offsets in a staged window and its size, in bytes. Whatever a
// kernel may load as a vector of four words in the tensor is aligned in the window too.
const stagedAlign = 16

// byStride returns the axes from lo to hi with more than one index and a stride other than zero, by increasing stride.
func byStride(lo, hi [4]int, strides backend.Strides) []int {
	axes := make([]int, 0, 4)
	for i := range strides {
		if hi[i]-lo[i] > 1 && strides[i] > 0 {
			axes = append(axes, i)
		}
	}
	slices.SortStableFunc(axes, func(a, b int) int { return cmp.Compare(strides[a], strides[b]) })
	return axes
}

// uploaded returns the window of a part of a tensor in host memory. It is packed, keeps
// the order of the axes, and its rows begin at multiples of stagedAlign.
func (o *Operand) uploaded(lo, hi [4]int) View {
	size := uint64(o.T.DType().Size())
	a := &Staged{Of: o, Lo: lo, Hi: hi}
	pitch := 1
	for n, i := range byStride(lo, hi, o.T.Strides()) {
		if n == 1 {
			pitch = AlignUp(pitch, stagedAlign/int(size))
		}
		a.Strides[i] = pitch
		pitch *= hi[i] - lo[i]
	}
	a.size = (uint64(pitch)*size + stagedAlign - 1) &^ (stagedAlign - 1)
	return View{Window: Window{Buf: a, Size: a.size}, Strides: a.Strides}
}

// nearBytes is the largest distance between elements that one copy moves together with
// what is between them: a copy for each element would cost more.
const nearBytes = 64

// gathered returns the window of a part of a tensor that is too far apart to be bound. first is the byte of its first
// element. Neighbours are moved as runs, one for each index of the other axes.
func (o *Operand) gathered(lo, hi [4]int, first uint64) View {
	size := uint64(o.T.DType().Size())
	a := &Staged{Of: o}
	axes := byStride(lo, hi, o.T.Strides())
	span := size // of a run
	for len(axes) > 0 {
		i := axes[0]
		step := uint64(o.T.Strides()[i]) * size
		if step > 2*span && step > nearBytes {
			break
		}
		span += uint64(hi[i]-lo[i]-1) * step
		a.Strides[i] = o.T.Strides()[i]
		axes = axes[1:]
	}
	base := first % stagedAlign
	// The next run begins after the last word, as far beyond a multiple of stagedAlign as in the tensor.
	runs, end := o.repeat(a, Run{Lo: first, To: base}, axes, lo, hi, span+3)
	for _, r := range runs {
		a.Runs = append(a.Runs, Run{r.Lo &^ 3, (r.Lo + span + 3) &^ 3, r.To &^ 3})
	}
	a.size = (base + end - 3 + stagedAlign - 1) &^ (stagedAlign - 1)
	return View{Window{Buf: a, Size: a.size}, int(base / size), a.Strides}
}

// repeat returns run for each index of axes from lo to hi, and sets the strides of a along them. length is the bytes of
// the window from one run to where the next one may begin; the result is that of all runs.
func (o *Operand) repeat(a *Staged, run Run, axes []int, lo, hi [4]int, length uint64) ([]Run, uint64) {
	size, runs := uint64(o.T.DType().Size()), []Run{run}
	for _, i := range axes {
		step := uint64(o.T.Strides()[i]) * size
		pitch := (length+stagedAlign-1)&^(stagedAlign-1) + step%stagedAlign
		a.Strides[i] = int(pitch / size)
		once := runs
		for x := uint64(1); x < uint64(hi[i]-lo[i]); x++ {
			for _, r := range once {
				runs = append(runs, Run{Lo: r.Lo + x*step, To: r.To + x*pitch})
			}
			length += pitch
		}
	}
	return runs, length
}
