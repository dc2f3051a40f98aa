//go:build unix

package array

import (
	"syscall"

	"github.com/seed90331342/attn/cmd/attn/internal/files"
)

// mapFile maps the first size bytes of a file for reading. The system loads pages
// on demand and drops them when memory is short, so a file may be larger than
// memory. A program that truncates the file meanwhile ends this one (SIGBUS), as
// with any mapping.
func mapFile(path string, size int) (data []byte, unmap func(), err error) {
	f, _, err := files.Open(path)
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	data, err = syscall.Mmap(int(f.Fd()), 0, size, syscall.PROT_READ, syscall.MAP_SHARED)
	if err != nil {
		return nil, nil, err
	}
	return data, func() { _ = syscall.Munmap(data) }, nil // cannot fail for a mapping of Mmap
}
