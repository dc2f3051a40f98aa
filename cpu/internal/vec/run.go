package vec

import (
	"math"
	"unsafe"
)

// Run is rows of keys or of values at a constant distance in memory, and rows to prefetch, as four streams, each a
// quarter of the rows. The assembly depends on the layout of its fields. It advances next, left and at.
type Run struct {
	rows  *byte
	next  uintptr // of the first stream, the line to prefetch next
	n     int
	left  int    // lines of the stream's row from next on
	apart [3]int // bytes from the first stream to each of the others
	lines int    // of a row
	jump  int    // bytes from the end of a row's lines to the next row
	more  int    // bytes to the Run to prefetch after this one, or 0
	at    int    // of the first Run of a chain, bytes to the one to prefetch
}

// stagger is the bytes by which streams of adjacent rows of float32 and of 16-bit elements are further apart than
// a quarter of them. Quarters are usually multiples of 4 KiB, and streams that enter new pages at the same time
// are slower: 4 rows of values took 40% longer in 16 bits. All kernels but Dots prefetch about as much more.
const stagger = 512

// AppendRun appends n rows of d elements, those of bytes with their scales, ld apart, the first at rows[0]. While the kernels
// read them, they prefetch as many rows from next on.
func AppendRun[T float32 | uint16 | byte](runs []Run, rows []T, ld, n, d int, next []T) []Run {
	_ = rows[(n-1)*ld+d-1]
	runs = append(runs, Run{})
	r := &runs[len(runs)-1] // to copy a Run that was just written takes long
	r.rows, r.n = (*byte)(unsafe.Pointer(&rows[0])), n
	Ahead(r, next, ld, n, d)
	return runs
}

// Ahead lets the kernels prefetch other rows while they read those of r: n rows of d elements, ld apart.
func Ahead[T float32 | uint16 | byte](r *Run, next []T, ld, n, d int) {
	size := int(unsafe.Sizeof(*new(T)))
	quarter := n / 4 * ld * size
	r.next = uintptr(unsafe.Pointer(unsafe.SliceData(next)))
	r.lines = (d*size + 63) / 64
	r.left, r.jump = r.lines, ld*size-64*r.lines
	if r.jump == 0 && size > 1 {
		quarter += stagger
	}
	if r.next != uintptr(unsafe.Pointer(r.rows)) { // else one stream stays in the first-level cache
		r.apart = [3]int{quarter, 2 * quarter, 3 * quarter}
	}
	if r.jump <= 0 {
		r.left = math.MaxInt // there are no gaps to leave out
	}
}

// PrefetchRows prefetches the listed rows, of d elements each, which are ld apart in rows. It does nothing where the
// processor is not an amd64.
func PrefetchRows[T float32 | uint16 | byte](rows []T, keys []int32, ld, d int) {
	if size := int(unsafe.Sizeof(*new(T))); len(keys) > 0 {
		prefetchRows((*byte)(unsafe.Pointer(unsafe.SliceData(rows))), &keys[0], len(keys), ld*size, d*size)
	}
}

// Spread sets the bytes from the first stream of rows to prefetch to each of the others.
func (r *Run) Spread(second, third, fourth int) { r.apart = [3]int{second, third, fourth} }

// Chain lets Values prefetch what follows runs of adjacent rows one run after another: for each
// of them in turns there would be too many streams.
func Chain(runs []Run) {
	for i := range runs[:len(runs)-1] {
		if r := &runs[i]; r.jump == 0 {
			r.left, r.more = max(1, r.n/4*r.lines), int(unsafe.Sizeof(*r))
		}
	}
}

// words returns r as the assembly takes it.
func (r *Run) words() *uintptr { return (*uintptr)(unsafe.Pointer(r)) }

// rowsOf returns the number of rows of all runs.
func rowsOf(runs []Run) (n int) {
	for i := range runs {
		n += runs[i].n
	}
	return n
}
