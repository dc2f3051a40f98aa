package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

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
	if err := n.readHeader(npy.ReadHeader); err != nil {
		return nil, err
	}
	if n.Kind == 'b' && !bools {
		return nil, fmt.Errorf("--%s %s: elements are bool, they must be f2, f4 or f8", name, path)
	}
	return n, nil
}

// readInts reads a file of whole numbers of 32 bits with one or two axes.
func readInts(name, path string) ([][]int32, error) {
	n := &npyFile{name: name, path: path}
	if err := n.readHeader(npy.ReadIntHeader); err != nil {
		return nil, err
	}
	if len(n.Shape) < 1 || len(n.Shape) > 2 {
		return nil, fmt.Errorf("--%s %s: shape %v has %d axes, it must have 1 or 2", name, path, n.Shape, len(n.Shape))
	}
	flat := make([]int32, 0, n.Count)
	var beyond error
	err := n.each(context.Background(), func(_ int, raw []byte) {
		wide := make([]int64, len(raw)/n.Size)
		n.Int64s(wide, raw)
		for _, x := range wide {
			if x != int64(int32(x)) {
				beyond = fmt.Errorf("--%s %s: %d is beyond 32 bits", name, path, x)
			}
			flat = append(flat, int32(x))
		}
	})
	if err != nil || beyond != nil {
		return nil, errors.Join(err, beyond)
	}
	cols := n.Shape[len(n.Shape)-1]
	return slices.Collect(slices.Chunk(flat, cols)), nil
}

// readHeader reads the header by read.
func (n *npyFile) readHeader(read func(io.ReaderAt, int64) (npy.Header, error)) error {
	err := n.header(read)
	if err == nil {
		return nil
	}
	var pe *os.PathError
	if errors.As(err, &pe) {
		err = pe.Err // the path is in the text already
	}
	return fmt.Errorf("--%s %s: %w", n.name, n.path, err)
}

func (n *npyFile) header(read func(io.ReaderAt, int64) (npy.Header, error)) error {
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
	n.Header, err = read(f, info.Size())
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
