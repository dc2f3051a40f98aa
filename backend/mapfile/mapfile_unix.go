//go:build unix

// Package mapfile maps files into memory.
package mapfile

import (
	"os"
	"syscall"
)

// Map maps n bytes of a file from byte start on for reading. The system loads pages on
// demand and drops them when memory is short, so a file may be larger than memory. A
// program that truncates the file meanwhile ends this one (SIGBUS), as with any mapping.
func Map(f *os.File, start int64, n int) (data []byte, unmap func(), err error) {
	lead := int(start % int64(os.Getpagesize())) // mappings begin at a page
	data, err = syscall.Mmap(int(f.Fd()), start-int64(lead), lead+n, syscall.PROT_READ, syscall.MAP_SHARED)
	if err != nil {
		return nil, nil, err
	}
	return data[lead:], func() { _ = syscall.Munmap(data) }, nil // cannot fail for a mapping of Mmap
}
