package cpu

import (
	"sync"
	"unsafe"
)

// scratch is the memory that one goroutine works in; it is taken from a pool
// once a goroutine and call, never once a tile.
type scratch struct {
	arena []float32
	used  int
	spans []span
	sums  []float64

	// What fused calls keep here, so that it does not have to be allocated.
	workspace workspace
	tiles     [maxTiles]wideTile
	few       fewLoad
}

// span is the keys [lo, hi) that a query row sees.
type span struct{ lo, hi int }

var scratchPool = sync.Pool{New: func() any { return new(scratch) }}

// getScratch returns a scratch whose floats method will be good for n floats in
// at most 48 pieces, with a span and a sum for each of rows query rows. putScratch takes it back.
func getScratch(n, rows int) *scratch {
	w := scratchPool.Get().(*scratch)
	n += alignSlack
	if cap(w.arena) < n {
		w.arena = make([]float32, n)
	}
	w.arena = w.arena[:n]
	if cap(w.spans) < rows {
		w.spans, w.sums = make([]span, rows), make([]float64, rows)
	}
	w.spans, w.sums = w.spans[:rows], w.sums[:rows]
	w.used = 0
	return w
}

// alignSlack is how many floats aligning 48 pieces may take.
const alignSlack = 48 * 16

// scratchKeep is how many floats a pooled scratch may hold: 4 MiB, several times
// what head sizes up to 256 take. A larger one is left to the collector.
const scratchKeep = 1 << 20

func putScratch(w *scratch) {
	if cap(w.arena) <= scratchKeep {
		scratchPool.Put(w)
	}
}

// floats cuts n floats with unspecified contents off the arena, on a 64 byte
// boundary. n = 0 gives an empty slice.
func (w *scratch) floats(n int) []float32 {
	off := int(uintptr(unsafe.Pointer(unsafe.SliceData(w.arena)))/4) % 16
	at := (w.used+off+15)&^15 - off
	w.used = at + n
	return w.arena[at : at+n : at+n]
}

// roundUp returns the smallest multiple of 4 that is at least n: the leading
// dimension that keeps rows aligned.
func roundUp(n int) int { return (n + 3) &^ 3 }
