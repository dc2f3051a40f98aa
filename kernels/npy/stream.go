package npy

import (
	"bufio"
	"bytes"
	"errors"
	"io"
)

// Open reads the header of the size bytes that r has, and returns it with a reader of
// the data that follows. Errors are those of ReadHeader.
func Open(r io.Reader, size int64) (Header, io.Reader, error) {
	const most = 12 + maxHeader
	b := bufio.NewReaderSize(r, most)
	lead, err := b.Peek(int(min(size, most)))
	if err != nil && !errors.Is(err, io.EOF) {
		return Header{}, nil, err
	}
	h, err := ReadHeader(bytes.NewReader(lead), size)
	if err != nil {
		return h, nil, err
	}
	_, err = b.Discard(int(h.Start))
	return h, b, err
}
