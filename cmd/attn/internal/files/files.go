// Package files opens the input files of a command. Errors do not contain the path.
package files

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"github.com/seed90331342/attn/backend/atomicfile"
	"github.com/seed90331342/attn/backend/budget"
)

// MaxText bounds reports, problems, walkthroughs and labels, and all that comes from a
// pipe or a device, which may have no end.
const MaxText = 64 << 20

// Read returns the content of a file, a pipe or a device of at most the given number of
// bytes. It returns when ctx ends, also while a pipe has no writer: that wait then ends
// with the process.
func Read(ctx context.Context, path string, most int64) ([]byte, error) {
	type result struct {
		text []byte
		err  error
	}
	done := make(chan result, 1)
	go func() {
		text, err := read(path, most)
		done <- result{text, atomicfile.Reason(err)}
	}()
	select {
	case r := <-done:
		return r.text, r.err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

func read(path string, most int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	size := info.Size()
	if size == 0 || !info.Mode().IsRegular() { // unknown
		size, most = MaxText, min(most, MaxText)
	}
	if size <= most {
		// Memory that is not written to is not used.
		text, err := budget.Make[byte](int(size) + 1)
		if err != nil {
			return nil, err
		}
		n, err := io.ReadFull(f, text)
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return text[:n], nil
		}
		if err != nil {
			return nil, err
		}
	}
	return nil, fmt.Errorf("it has more than %d bytes, the most that is read", most)
}

// Open opens a regular file and returns its size.
func Open(path string) (*os.File, int64, error) {
	info, err := os.Stat(path) // opening a pipe would wait for a writer
	switch {
	case err != nil:
		return nil, 0, atomicfile.Reason(err)
	case info.Mode()&fs.ModeNamedPipe != 0:
		return nil, 0, errors.New("not a regular file but a pipe, whose size is unknown: write it into a file first")
	case !info.Mode().IsRegular():
		return nil, 0, errors.New("not a regular file")
	}
	f, err := os.Open(path)
	return f, info.Size(), atomicfile.Reason(err)
}
