//go:build unix

package npy

import (
	"os"
	"syscall"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/internal/op"
)

// Map maps the data of the array in f into memory for reading, until unmap. The system loads pages on demand
// and drops them when memory is short, so a file may be larger than memory. A program that truncates the file
// meanwhile ends this one (SIGBUS), as with any mapping. It returns kernels.ErrFile when the system refuses
// the mapping; systems without mappings return errors.ErrUnsupported and kernels.ErrUnsupported.
func (h *Header) Map(f *os.File) (data []byte, unmap func(), err error) {
	lead := int(h.Start % int64(os.Getpagesize())) // mappings begin at a page
	data, err = syscall.Mmap(int(f.Fd()), h.Start-int64(lead), lead+h.Count*h.Size, syscall.PROT_READ, syscall.MAP_SHARED)
	if err != nil {
		return nil, nil, op.As(kernels.ErrFile, err)
	}
	return data[lead:], func() { _ = syscall.Munmap(data) }, nil // cannot fail for a mapping of Mmap
}
