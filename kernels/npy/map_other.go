//go:build !unix

package npy

import (
	"errors"
	"os"
)

// Map is not available: files are read into memory.
func (h *Header) Map(*os.File) ([]byte, func(), error) {
	return nil, nil, errors.ErrUnsupported
}
