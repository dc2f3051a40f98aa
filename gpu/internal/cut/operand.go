package cut

import "github.com/seed90331342/attn/backend"

// Operand is a tensor and how it follows the index space.
type Operand struct {
	Name string
	T    backend.Tensor
	Axes [4]int // the axis of the index space for each of the tensor's
	Use  Use
	// Group is the number of query heads that share one head of the tensor; 0 means 1.
	Group int
	// Heads is the number of query heads that a workgroup needs together; 0 means 1.
	Heads int
	// Block is the numbers of rows and keys that share one element; 0 means 1.
	Block [2]int
	// Diagonal, unless 0, is the number of query rows of a call in which row i and key j
	// share element j-i+Diagonal-1 of the last axis.
	Diagonal int
	// Pages, unless nil, means that the tensor is a pool of pages. Axes are then those of the keys in the pages.
	Pages *Pages
	// Listed means that kernels find elements of the last axis, which is Whole, by the positions of listed keys.
	Listed bool

	// Set by New.
	OnHost   bool   // in host memory: windows are uploaded when a step needs them
	Gathered bool   // too far apart to be bound: windows are gathered on the device
	part     uint64 // bytes of each of the tensor's buffers
}

// Use is what a kernel does with an operand.
type Use uint8

// Uses of an operand.
const (
	Read    Use = iota
	Written     // writes every element of a box and reads none
	Updated     // reads and writes
)

// Reads returns an operand that kernels read.
func Reads(name string, t backend.Tensor, axes [4]int, group int) *Operand {
	return &Operand{Name: name, T: t, Axes: axes, Group: group, Use: Read}
}

// Writes returns an operand that kernels write.
func Writes(name string, t backend.Tensor, axes [4]int) *Operand {
	return &Operand{Name: name, T: t, Axes: axes, Use: Written}
}

// Updates returns an operand that kernels change in place.
func Updates(name string, t backend.Tensor, axes [4]int) *Operand {
	return &Operand{Name: name, T: t, Axes: axes, Use: Updated}
}

// View is a window with the base index and the strides that find an element in it.
type View struct {
	Window
	Base    int // index of the first element of the box
	Strides backend.Strides
}

// View returns the window of o that contains what x needs, from a multiple of align bytes. A missing operand has the
// zero View. Base of an operand with blocks is where block 0 would be. Along a diagonal, the next row is one element
// back. Kernels compute indices modulo 2^32, so a negative base or stride is correct.
func (o *Operand) View(x Box, align uint64) View {
	if o.T.IsZero() {
		return View{}
	}
	lo, hi := o.spans(x)
	v := o.windowOf(lo, hi, align)
	if o.Block[0] > 0 {
		v.Base -= lo[backend.Seq]*v.Strides[backend.Seq] + lo[backend.Dim]*v.Strides[backend.Dim]
	}
	if o.Listed && o.Block[0] == 0 { // kernels count positions from the first key of a chunk
		v.Base += x.Lo[Col] * v.Strides[backend.Dim]
	}
	if o.Diagonal > 0 {
		v.Base += (x.Len(Row) - 1) * v.Strides[backend.Dim]
		v.Strides[backend.Seq] = -v.Strides[backend.Dim]
	}
	return v
}

// spans returns the range of each of the tensor's four axes that x needs.
func (o *Operand) spans(x Box) (lo, hi [4]int) {
	shared := [axes]int{Head: o.Group, Row: o.Block[0], Col: o.Block[1]} // indices with one element
	for i, a := range o.Axes {
		if a == Whole {
			if hi[i] = o.T.Shape()[i]; o.Diagonal > 0 && i == backend.Dim { // as many as keys
				hi[i] -= o.Diagonal - 1
			}
			continue
		}
		lo[i], hi[i] = x.Lo[a], x.Hi[a]
		if n := shared[a]; n > 1 {
			lo[i] /= n
			hi[i] = (hi[i]-1)/n + 1
		}
	}
	if o.Diagonal > 0 {
		lo[backend.Dim] += o.Diagonal - x.Hi[Row]
		hi[backend.Dim] += o.Diagonal - x.Lo[Row] - 1
	}
	if o.Pages != nil && !o.Gathered && !o.OnHost {
		for _, i := range []int{backend.Batch, backend.Seq} {
			lo[i], hi[i] = 0, o.T.Shape()[i]
		}
	}
	return lo, hi
}

// windowOf returns the window of a part of the tensor.
func (o *Operand) windowOf(lo, hi [4]int, align uint64) View {
	if o.Pages != nil && (o.Gathered || o.OnHost) {
		return o.collected(lo, hi)
	}
	if o.OnHost {
		return o.uploaded(lo, hi)
	}
	size := uint64(o.T.DType().Size())
	first, reach := uint64(o.T.Offset()), uint64(0)
	v := View{}
	for i, s := range o.T.Strides() {
		first += uint64(lo[i]) * uint64(s)
		if n := hi[i] - lo[i]; n > 1 {
			reach += uint64(n-1) * uint64(s)
			v.Strides[i] = s
		}
	}
	if o.Gathered {
		return o.gathered(lo, hi, first*size)
	}
	align = max(align, 4)
	start := first * size / align * align
	end := ((first+reach+1)*size + 3) &^ 3
	v.Window = o.bytes(start, end)
	v.Base = int(first - start/size)
	return v
}

// bytes returns the window of bytes [start, end) of the tensor's memory: a span of one
// buffer, or a gathered window where the bytes are in several.
func (o *Operand) bytes(start, end uint64) Window {
	s := StoreOf(o.T)
	if i := start / o.part; (end-1)/o.part == i {
		w := Window{Offset: start - i*o.part, Size: end - start}
		if s != nil {
			w.Buf = s.Parts[i]
		}
		return w
	}
	size := uint64(AlignUp(int(end-start), stagedAlign))
	return Window{Buf: &Staged{Of: o, size: size, Runs: []Run{{start, end, 0}}}, Size: size}
}

// AlignedRows reports whether each row of t begins at a multiple of n elements and
// consists of whole groups of n neighbours.
func AlignedRows(t backend.Tensor, n int) bool {
	shape, strides := t.Shape(), t.Strides()
	if strides[backend.Dim] != 1 || shape[backend.Dim]%n != 0 || t.Offset()%n != 0 {
		return false
	}
	for i, s := range strides[:backend.Dim] {
		if shape[i] > 1 && s%n != 0 {
			return false
		}
	}
	return true
}

// AlignedAlong reports whether the n elements along an axis of the window are neighbours
// and consist of whole groups of 4, each line of them beginning at a multiple of 4.
func (v View) AlignedAlong(axis, n int) bool {
	for i, s := range v.Strides {
		if i != axis && s%4 != 0 {
			return false
		}
	}
	return v.Base%4 == 0 && v.Strides[axis] == 1 && n%4 == 0
}

// GranuleBytes is the size of the vectors that kernels load where rows are aligned.
const GranuleBytes = 16

// Granules widens a window to whole granules. The sizes of buffers are multiples of them.
func (v View) Granules() View {
	if v.Buf != nil {
		v.Size = min((v.Size+GranuleBytes-1)&^(GranuleBytes-1), v.Buf.Size()-v.Offset)
	}
	return v
}
