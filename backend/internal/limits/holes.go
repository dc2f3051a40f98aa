package limits

import (
	"cmp"
	"math"
	"slices"
	"sync"
	"unsafe"
	"weak"
)

// Blocks of this size on are recorded while the process has a limit of mapped memory.
const recorded = 1 << 20

// block is memory from start to end that a request took. alive does not keep it.
type block struct {
	start, end uintptr
	alive      weak.Pointer[byte]
}

// heap has the recorded blocks, and the span of all addresses that blocks ever had.
var heap struct {
	sync.Mutex
	blocks []block
	span   block
}

var mappingIsLimited = sync.OnceValue(func() bool {
	return slices.ContainsFunc(known(), func(l Limit) bool { return l.kind >= mapped })
})

func record(p *byte, bytes int64) {
	start := uintptr(unsafe.Pointer(p))
	b := block{start, start + uintptr(bytes), weak.Make(p)}
	heap.Lock()
	defer heap.Unlock()
	heap.blocks = append(heap.blocks, b)
	if heap.span.end == 0 {
		heap.span = b
	}
	heap.span.start, heap.span.end = min(heap.span.start, b.start), max(heap.span.end, b.end)
}

// largestHole returns the most bytes between two blocks that are alive, or no limit before the first block.
func largestHole() int64 {
	heap.Lock()
	defer heap.Unlock()
	if heap.span.end == 0 {
		return math.MaxInt64
	}
	heap.blocks = slices.DeleteFunc(heap.blocks, func(b block) bool { return b.alive.Value() == nil })
	slices.SortFunc(heap.blocks, func(a, b block) int { return cmp.Compare(a.start, b.start) })
	hole, end := uintptr(0), heap.span.start
	for _, b := range heap.blocks {
		hole, end = max(hole, b.start-end), b.end
	}
	return int64(max(hole, heap.span.end-end))
}
