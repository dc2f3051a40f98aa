//go:build !unix

package mapfile

import (
	"errors"
	"os"
)

// Map is not available: files are read into memory.
func Map(*os.File, int64, int) ([]byte, func(), error) {
	return nil, nil, errors.ErrUnsupported
}
