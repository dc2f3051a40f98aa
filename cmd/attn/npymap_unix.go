//go:build unix

package main

import (
	"os"
	"syscall"
)

// mapFile maps a file's first size bytes, for reading alone, without reading
// them: the system brings pages when they are needed and drops them when memory is
// short, so that a file may be larger than memory. unmap ends that. A file that
// another program cuts short meanwhile ends this one (SIGBUS), as with any mapping.
func mapFile(path string, size int) (data []byte, unmap func(), err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	data, err = syscall.Mmap(int(f.Fd()), 0, size, syscall.PROT_READ, syscall.MAP_SHARED)
	if err != nil {
		return nil, nil, err
	}
	return data, func() { _ = syscall.Munmap(data) }, nil // which fails for no mapping of Mmap's
}
