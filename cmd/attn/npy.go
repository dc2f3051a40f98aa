package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/npy"
)

// npyFile is a .npy file whose header was read and whose size was checked
// against it, so that the data can be read without another surprise.
type npyFile struct {
	name string // what errors call it
	path string
	npy.Header
}

// openNPY reads and checks the header of a file of floating point numbers, or
// also of bools where the caller takes them. name is what the command line
// calls it.
func openNPY(name, path string, bools bool) (*npyFile, error) {
	n := &npyFile{name: name, path: path}
	if err := n.readHeader(); err != nil {
		var pe *os.PathError
		if errors.As(err, &pe) {
			err = pe.Err // the path is in the text already
		}
		return nil, fmt.Errorf("--%s %s: %w", name, path, err)
	}
	if n.Kind == 'b' && !bools {
		return nil, fmt.Errorf("--%s %s: elements are bool, they must be f2, f4 or f8", name, path)
	}
	return n, nil
}

func (n *npyFile) readHeader() error {
	f, err := os.Open(n.path)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return errors.New("not a regular file")
	}
	n.Header, err = npy.ReadHeader(f, info.Size())
	return err
}

// dtype is the type that the elements have in memory unless asked otherwise: the
// file's, and f32 for f8.
func (n *npyFile) dtype() backend.DType {
	switch {
	case n.Kind == 'b':
		return backend.Bool
	case n.Size == 2:
		return backend.F16
	}
	return backend.F32
}
