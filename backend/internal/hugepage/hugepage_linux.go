// Package hugepage asks the system to back memory with large pages. Attention of a few rows waits for
// memory, and a processor that reads in pages of 4 KiB also waits for their addresses.
package hugepage

import (
	"syscall"
	"unsafe"
)

const (
	Size   = 2 << 20 // of a large page on most machines. Larger ones are multiples of it
	advice = 14      // MADV_HUGEPAGE
)

// Advise asks for large pages where they fit into the bytes at p. They are given when the memory is
// first written, so that what a program never uses still costs nothing. A system that has none keeps
// its small pages.
func Advise(p unsafe.Pointer, bytes int) {
	first, n := within(uintptr(p), uintptr(bytes))
	if n > 0 {
		_ = syscall.Madvise(unsafe.Slice((*byte)(unsafe.Add(p, first)), n), advice)
	}
}

// within returns the bytes before the first large page in the bytes at p, and those of all of them.
func within(p, bytes uintptr) (first, n uintptr) {
	first = -p % Size
	if bytes < first {
		return 0, 0
	}
	return first, (bytes - first) / Size * Size
}
